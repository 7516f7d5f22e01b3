// Inputs that find faults, and buffers that notice a stray access.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include <keel/core/view.hpp>
#include <keel/core/workspace.hpp>
#include <keel/format/format.hpp>

namespace keel_test {

enum class data_kind { normal, uniform, any_bits, huge, tiny, subnormal, mixed_scales, with_nan, with_inf, zeros, equal, outlier };

inline constexpr std::initializer_list<data_kind> all_kinds = {
    data_kind::normal,       data_kind::uniform,  data_kind::any_bits, data_kind::huge,  data_kind::tiny,  data_kind::subnormal,
    data_kind::mixed_scales, data_kind::with_nan, data_kind::with_inf, data_kind::zeros, data_kind::equal, data_kind::outlier};
/// Those without NaN or Inf.
inline constexpr std::initializer_list<data_kind> finite_kinds = {data_kind::normal, data_kind::uniform, data_kind::zeros,
                                                                  data_kind::equal,  data_kind::outlier, data_kind::mixed_scales};

inline char const* name_of(data_kind kind) {
    constexpr char const* names[] = {"normal", "uniform", "any_bits", "huge", "tiny", "subnormal", "mixed_scales", "with_nan", "with_inf",
                                     "zeros", "equal", "outlier"};
    return names[static_cast<int>(kind)];
}

/// n floats of a kind, the same on every platform (no std::distribution).
inline std::vector<float> floats(data_kind kind, int64_t n, uint64_t seed = 1) {
    std::mt19937_64 engine(seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(kind));
    auto const unit = [&] { return static_cast<double>(engine() >> 11) * 0x1p-53; };
    auto const bell = [&] { // sum of uniforms: near enough to a normal, exactly reproducible
        double s = 0;
        for (int k = 0; k < 12; ++k) s += unit();
        return s - 6.0;
    };
    std::vector<float> x(static_cast<std::size_t>(n));
    for (auto& v : x) {
        double const b = bell();
        switch (kind) {
        case data_kind::normal:
        case data_kind::with_nan:
        case data_kind::with_inf:
        case data_kind::outlier: v = static_cast<float>(b); break;
        case data_kind::uniform: v = static_cast<float>(2 * unit() - 1); break;
        case data_kind::any_bits: v = std::bit_cast<float>(static_cast<uint32_t>(engine())); break;
        case data_kind::huge: v = static_cast<float>(b * 0x1p124); break;
        case data_kind::tiny: v = static_cast<float>(b * 0x1p-120); break;
        case data_kind::subnormal: v = static_cast<float>(b * 0x1p-130); break;
        case data_kind::mixed_scales: v = static_cast<float>(b * (1 << (engine() % 20)) * 0x1p-10); break;
        case data_kind::zeros: v = (engine() & 1) != 0 ? 0.0f : -0.0f; break;
        case data_kind::equal: v = 0.37f; break;
        }
    }
    if (n > 0) {
        auto const spot = [&] { return static_cast<std::size_t>(engine() % static_cast<uint64_t>(n)); };
        if (kind == data_kind::with_nan) x[spot()] = std::bit_cast<float>(0xffc12345u);
        if (kind == data_kind::with_inf) x[spot()] = -std::bit_cast<float>(0x7f800000u);
        if (kind == data_kind::outlier) x[spot()] = 3000.0f;
    }
    return x;
}

template <class T> T to_format(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else if constexpr (sizeof(T) > 1) return keel::encode<T, keel::overflow::to_nonfinite, keel::rounding::nearest_even>(x);
    else return keel::encode<T, keel::overflow::saturate, keel::rounding::nearest_even>(x);
}
template <class T> double to_double(T x) {
    if constexpr (std::is_same_v<T, float>) return static_cast<double>(x);
    else return static_cast<double>(keel::decode(x));
}

/// A matrix whose rows start `stride` apart at an odd address, between guard bytes that untouched() checks.
template <class T> class guarded_matrix {
  public:
    guarded_matrix(int64_t row_count, int64_t column_count, int64_t gap = 0)
        : rows_(row_count), columns_(column_count), stride_(column_count + gap), memory_(bytes(), guard) {
        for (int64_t i = 0; i < rows_; ++i) std::memset(address(i), 0, static_cast<std::size_t>(columns_) * sizeof(T));
    }
    guarded_matrix(int64_t row_count, int64_t column_count, int64_t gap, std::vector<float> const& values)
        : guarded_matrix(row_count, column_count, gap) {
        for (int64_t i = 0; i < rows_; ++i)
            for (int64_t j = 0; j < columns_; ++j) set(i, j, to_format<T>(values[static_cast<std::size_t>(i * columns_ + j)]));
    }
    keel::view<T, 2> view() { return keel::rows(reinterpret_cast<T*>(address(0)), rows_, columns_, stride_); }
    keel::view<T, 1> vec() { return keel::vec(reinterpret_cast<T*>(address(0)), columns_); }
    T get(int64_t i, int64_t j) const {
        T v;
        std::memcpy(&v, memory_.data() + offset(i, j), sizeof(T));
        return v;
    }
    void set(int64_t i, int64_t j, T v) { std::memcpy(memory_.data() + offset(i, j), &v, sizeof(T)); }
    double at(int64_t i, int64_t j) const { return to_double(get(i, j)); }
    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    /// No byte outside the matrix's elements has changed.
    bool untouched() const {
        std::vector<bool> inside(memory_.size());
        for (int64_t i = 0; i < rows_; ++i)
            for (std::size_t b = 0; b < static_cast<std::size_t>(columns_) * sizeof(T); ++b) inside[offset(i, 0) + b] = true;
        for (std::size_t b = 0; b < memory_.size(); ++b)
            if (!inside[b] && memory_[b] != guard) return false;
        return true;
    }
    /// The elements' bytes, row after row.
    std::vector<unsigned char> contents() const {
        std::vector<unsigned char> out;
        for (int64_t i = 0; i < rows_; ++i)
            out.insert(out.end(), memory_.begin() + static_cast<std::ptrdiff_t>(offset(i, 0)),
                       memory_.begin() + static_cast<std::ptrdiff_t>(offset(i, 0) + static_cast<std::size_t>(columns_) * sizeof(T)));
        return out;
    }

  private:
    static constexpr unsigned char guard = 0xa5;
    static constexpr std::size_t margin = 64 + sizeof(T); // aligned for T, for nothing wider
    std::size_t bytes() const { return 2 * margin + 64 + static_cast<std::size_t>(rows_ * stride_) * sizeof(T); }
    std::size_t offset(int64_t i, int64_t j) const { return margin + static_cast<std::size_t>(i * stride_ + j) * sizeof(T); }
    unsigned char* address(int64_t i) { return memory_.data() + offset(i, 0); }

    int64_t rows_, columns_, stride_;
    std::vector<unsigned char> memory_;
};

/// The same bytes in both (NaN equals itself, 0 differs from -0).
template <class T> bool equal_bits(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Memory for a workspace of exactly `bytes`.
class scratch {
  public:
    explicit scratch(int64_t bytes) : memory_(static_cast<std::size_t>(bytes)) {}
    keel::workspace get() { return {memory_.data(), static_cast<int64_t>(memory_.size())}; }

  private:
    std::vector<std::byte> memory_;
};

/// FNV-1a, for comparing results across builds.
class digest {
  public:
    void add(void const* p, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) state_ = (state_ ^ static_cast<unsigned char const*>(p)[i]) * 0x100000001b3u;
    }
    template <class T> void add(guarded_matrix<T> const& m) {
        auto const c = m.contents();
        add(c.data(), c.size());
    }
    uint64_t value() const { return state_; }

  private:
    uint64_t state_ = 0xcbf29ce484222325u;
};

} // namespace keel_test
