// The row primitives instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the
// reference, bit for bit.
#include <cstring>
#include <vector>

#include <keel/backend/reference.hpp>
#include <keel/cuda.hpp>
#include <keel/format/bf16.hpp>
#include <keel/nn/swiglu_quantize.hpp>
#include <keel/norm/rms_norm_quantize.hpp>
#include <keel/quantize/quantize_stochastic.hpp>
#include <support/catch.hpp>

namespace {

/// Device memory with a host copy.
template <class T> struct mirrored {
    std::vector<T> host;
    T* device = nullptr;
    explicit mirrored(std::size_t n) : host(n) { cudaMalloc(&device, n * sizeof(T)); }
    ~mirrored() { cudaFree(device); }
    void up() { cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice); }
    bool equals(std::vector<T> const& want) {
        std::vector<T> got(host.size());
        cudaMemcpy(got.data(), device, got.size() * sizeof(T), cudaMemcpyDeviceToHost);
        return std::memcmp(got.data(), want.data(), got.size() * sizeof(T)) == 0;
    }
};

template <class T> T value(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else return keel::encode<T>(x);
}

template <class X> void check(int64_t rows, int64_t width) {
    auto const count = static_cast<std::size_t>(rows * width);
    mirrored<X> x(count), y(count), dy(count), dx(count);
    mirrored<float> delta(static_cast<std::size_t>(width)), ddelta(static_cast<std::size_t>(width)), rrms(static_cast<std::size_t>(rows));
    unsigned state = 12345;
    auto const next = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f; };
    for (auto& v : x.host) v = value<X>(next());
    for (auto& v : dy.host) v = value<X>(next());
    for (auto& v : delta.host) v = next();
    x.up(), dy.up(), delta.up();

    int64_t const bytes = keel::rms_norm_backward_workspace(rows, width);
    std::vector<std::byte> host_memory(static_cast<std::size_t>(bytes));
    std::byte* device_memory = nullptr;
    cudaMalloc(&device_memory, static_cast<std::size_t>(bytes));

    keel::reference const host;
    keel::cuda const device;
    auto const run = [&](auto const& be, X* x_, float* delta_, X* y_, X* dy_, X* dx_, float* ddelta_, float* rrms_, std::byte* memory) {
        auto const X_ = keel::rows(x_, rows, width), DY = keel::rows(dy_, rows, width);
        keel::rms_norm_saved const saved{keel::vec(rrms_, rows)};
        keel::rms_norm(be, X_, keel::vec(delta_, width), keel::rows(y_, rows, width), saved).or_throw();
        keel::rms_norm_backward(be, DY, X_, keel::vec(delta_, width), saved, {keel::rows(dx_, rows, width), keel::vec(ddelta_, width)}, {},
                                {memory, bytes}).or_throw();
    };
    run(host, x.host.data(), delta.host.data(), y.host.data(), dy.host.data(), dx.host.data(), ddelta.host.data(), rrms.host.data(), host_memory.data());
    run(device, x.device, delta.device, y.device, dy.device, dx.device, ddelta.device, rrms.device, device_memory);

    using blocks = keel::block_scaled<keel::e4m3, keel::e8m0_scale, 1, 128>;
    auto const scale_columns = blocks::scale_columns(width);
    mirrored<keel::e4m3> codes(count);
    mirrored<keel::e8m0> scales(static_cast<std::size_t>(rows * scale_columns));
    keel::quantize<keel::overflow::saturate>(host, keel::rows(x.host.data(), rows, width),
                                             blocks{keel::rows(codes.host.data(), rows, width), keel::rows(scales.host.data(), rows, scale_columns)}).or_throw();
    keel::quantize<keel::overflow::saturate>(device, keel::rows(x.device, rows, width),
                                             blocks{keel::rows(codes.device, rows, width), keel::rows(scales.device, rows, scale_columns)}).or_throw();
    // Fused, by columns with turned codes, and by chance.
    mirrored<keel::e4m3> normed(count), gated(count), turned(count), drawn(count);
    mirrored<keel::e8m0> normed_scales(scales.host.size()), gated_scales(scales.host.size()), drawn_scales(scales.host.size());
    using down = keel::block_scaled<keel::e4m3, keel::fp32_scale, 32, 1>;
    mirrored<float> down_scales(static_cast<std::size_t>(down::scale_rows(rows) * width));
    auto const more = [&](auto const& be, auto at) {
        auto const X_ = keel::rows(at(x), rows, width), DY = keel::rows(at(dy), rows, width);
        auto const in_blocks = [&](auto& c, auto& s) { return blocks{keel::rows(at(c), rows, width), keel::rows(at(s), rows, scale_columns)}; };
        keel::rms_norm_quantize<float, keel::overflow::saturate>(be, X_, keel::vec(at(delta), width), in_blocks(normed, normed_scales)).or_throw();
        keel::swiglu_quantize<keel::bf16, keel::overflow::saturate>(be, X_, DY, in_blocks(gated, gated_scales)).or_throw();
        keel::quantize<keel::overflow::saturate>(
            be, X_, down{keel::transposed(keel::rows(at(turned), width, rows)), keel::rows(at(down_scales), down::scale_rows(rows), width)}).or_throw();
        keel::quantize_stochastic<keel::overflow::saturate>(be, X_, in_blocks(drawn, drawn_scales), {.key = {.seed = 3}}).or_throw();
    };
    more(host, [](auto& m) { return m.host.data(); });
    more(device, [](auto& m) { return m.device; });

    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK((normed.equals(normed.host) && normed_scales.equals(normed_scales.host)));
    CHECK((gated.equals(gated.host) && gated_scales.equals(gated_scales.host)));
    CHECK((turned.equals(turned.host) && down_scales.equals(down_scales.host)));
    CHECK(drawn.equals(drawn.host));
    CHECK(y.equals(y.host));
    CHECK(rrms.equals(rrms.host));
    CHECK(dx.equals(dx.host));
    CHECK(ddelta.equals(ddelta.host));
    CHECK(codes.equals(codes.host));
    CHECK(scales.equals(scales.host));
    cudaFree(device_memory);
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: rms_norm, its backward, quantise") {
    for (int64_t width : {1, 127, 1000, 4099}) check<float>(70, width), check<keel::bf16>(70, width);
}
