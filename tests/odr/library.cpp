// One library out of many that embed keel: symbols.py compiles it once per -march level, under another KEEL_ENTRY each time,
// and links the objects into one program. It uses no template of the standard library itself, so every weak symbol in the
// object comes from keel.
#include <keel/keel.hpp>

namespace {

constexpr int row_count = 5, column_count = 133;

template <class T> struct tensor {
    T at[row_count * column_count];
    keel::view<T, 2> rows() { return keel::rows(at, row_count, column_count); }
    keel::view<T, 1> vec() { return keel::vec(at, column_count); }
};

/// FNV-1a over the bytes.
std::uint64_t digest(std::uint64_t seed, void const* data, std::size_t bytes) {
    auto const* p = static_cast<unsigned char const*>(data);
    for (std::size_t i = 0; i < bytes; ++i) seed = (seed ^ p[i]) * 0x100000001b3u;
    return seed;
}

template <class B> std::uint64_t norm_digest(B const& be) {
    static tensor<float> x, delta, y, dx;
    static float rrms[row_count], ddelta[column_count];
    alignas(64) static std::byte scratch[1 << 16];
    for (int i = 0; i < row_count * column_count; ++i) {
        x.at[i] = static_cast<float>((i * 2654435761u) >> 8) * 0x1p-20f - 8.0f;
        delta.at[i] = static_cast<float>(i % 7) * 0.125f;
    }
    keel::rms_norm_saved saved{.rrms = keel::vec(rrms, row_count)};
    keel::workspace ws{scratch, sizeof scratch};
    bool const ok = keel::rms_norm(be, x.rows(), delta.vec(), y.rows(), saved).ok() &&
                    keel::rms_norm_backward(be, y.rows(), x.rows(), delta.vec(), saved,
                                            {.dx = dx.rows(), .ddelta = keel::vec(ddelta, column_count)}, {}, ws)
                        .ok();
    std::uint64_t d = digest(ok ? 0xcbf29ce484222325u : 1u, y.at, sizeof y.at);
    d = digest(d, dx.at, sizeof dx.at);
    return digest(d, ddelta, sizeof ddelta);
}

} // namespace

extern "C" std::uint64_t KEEL_ENTRY() {
    std::uint64_t const d = norm_digest(keel::cpu{});
    return d == norm_digest(keel::reference{}) && d == norm_digest(keel::simt<32>{}) ? d : 0;
}
