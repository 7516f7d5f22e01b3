// What NVFP4 quantisation should give, from its definition: tables of the two formats, searches in them, and float operations one at a
// time. Nothing here comes from keel but the names of the policies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <keel/quantize/block_scaled.hpp>

namespace keel_test::nvfp4 {

enum class rule { nearest, round_up, transformer_engine };

inline constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float largest_float = std::numeric_limits<float>::max();
inline constexpr uint8_t nan_scale = 0x7f;

/// The eight magnitudes of e2m1.
inline std::vector<double> const& element_values() {
    static std::vector<double> const v = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return v;
}
/// The magnitudes of e4m3, codes 0 to 126.
inline std::vector<double> const& scale_values() {
    static std::vector<double> const v = [] {
        std::vector<double> values;
        for (int code = 0; code < 127; ++code) {
            int const exponent = code / 8, mantissa = code % 8;
            values.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
        }
        return values;
    }();
    return v;
}

/// The code of magnitude a: the nearest value, ties to the even code, or the next one not below; past the end the last.
inline uint8_t code_of(std::vector<double> const& values, double a, bool up = false) {
    auto const above = std::lower_bound(values.begin(), values.end(), a);
    if (above == values.end()) return static_cast<uint8_t>(values.size() - 1);
    auto const high = static_cast<std::size_t>(above - values.begin());
    if (*above == a || up) return static_cast<uint8_t>(high);
    double const middle = (values[high - 1] + values[high]) / 2;
    bool const goes_up = a > middle || (a == middle && high % 2 == 0);
    return static_cast<uint8_t>(goes_up ? high : high - 1);
}

struct result {
    std::vector<uint8_t> codes, scales; ///< rows of pairs, rows of block scales
    float tensor_scale = 0;
    int64_t saturated = 0, flushed = 0, non_finite = 0;
    float scale_min = infinity, scale_max = 0; ///< of block scale times tensor scale
};

/// What the rule makes of the tensor's largest magnitude.
struct tensor_numbers {
    float scale, encode;
    tensor_numbers(rule r, float amax, bool poisoned) {
        if (r == rule::transformer_engine) {
            encode = amax == 0 ? 1.0f : std::min(2688.0f / amax, largest_float);
            scale = 1.0f / encode;
        } else {
            encode = 0;
            scale = std::max(amax, 2688.0f * 0x1p-117f) / 2688.0f;
        }
        if (poisoned) scale = nan;
    }
};

inline result quantise(rule r, keel::non_finite_policy policy, std::vector<float> const& x, int64_t rows, int64_t columns) {
    result out;
    int64_t const pairs = (columns + 1) / 2, blocks = (columns + 15) / 16;
    out.codes.resize(static_cast<std::size_t>(rows * pairs));
    out.scales.resize(static_cast<std::size_t>(rows * blocks));
    float amax = 0;
    for (float v : x) {
        if (std::isfinite(v)) amax = std::max(amax, std::abs(v));
        else ++out.non_finite;
    }
    tensor_numbers const t(r, amax, policy == keel::non_finite_policy::poison && out.non_finite > 0);
    out.tensor_scale = t.scale;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t b = 0; b < blocks; ++b) {
            int64_t const first = b * 16, last = std::min(first + 16, columns);
            auto const at = [&](int64_t j) { return x[static_cast<std::size_t>(i * columns + j)]; };
            float top = 0;
            bool bad = std::isnan(t.scale);
            for (int64_t j = first; j < last; ++j) {
                if (std::isfinite(at(j))) top = std::max(top, std::abs(at(j)));
                else bad = true;
            }
            float quotient = 0, scale = 0, multiplier = 0;
            if (r == rule::transformer_engine) {
                float const sixth = t.encode * (1.0f / 6.0f);
                quotient = top * sixth;
            } else {
                float const widest = 6.0f * t.scale;
                quotient = top / widest;
                if (top > 0 && quotient == 0) quotient = std::numeric_limits<float>::denorm_min(); // rounded up it is not 0 at all
            }
            uint8_t code = nan_scale;
            if (!bad) {
                code = code_of(scale_values(), static_cast<double>(quotient), r == rule::round_up);
                scale = static_cast<float>(scale_values()[code]);
                float const decoded = scale * t.scale;
                out.scale_min = std::min(out.scale_min, decoded), out.scale_max = std::max(out.scale_max, decoded);
                multiplier = scale == 0 ? (r == rule::transformer_engine ? largest_float : 0.0f) : std::min(1.0f / decoded, largest_float);
            }
            out.scales[static_cast<std::size_t>(i * blocks + b)] = code;
            for (int64_t j = first; j < last; ++j) {
                bool const finite = std::isfinite(at(j));
                float const scaled = at(j) * multiplier;
                uint32_t element = 7; // what marks a NaN or Inf
                if (finite) element = code_of(element_values(), static_cast<double>(std::abs(scaled))) | (std::signbit(at(j)) ? 8u : 0u);
                out.codes[static_cast<std::size_t>(i * pairs + j / 2)] |= static_cast<uint8_t>(element << (j % 2 * 4));
                if (bad || !finite || at(j) == 0) continue;
                bool const gone = scale == 0 || element % 8 == 0;
                out.flushed += gone;
                out.saturated += !gone && std::abs(scaled) >= 7;
            }
        }
    return out;
}

/// The value of one element of a result, exact in double but for the single rounding to fp32.
inline float value_of(result const& q, int64_t columns, int64_t i, int64_t j) {
    int64_t const pairs = (columns + 1) / 2, blocks = (columns + 15) / 16;
    uint8_t const byte = q.codes[static_cast<std::size_t>(i * pairs + j / 2)], scale = q.scales[static_cast<std::size_t>(i * blocks + j / 16)];
    uint32_t const code = (byte >> (j % 2 * 4)) & 15u;
    if (scale == nan_scale) return nan;
    double const exact = element_values()[code % 8] * scale_values()[scale] * static_cast<double>(q.tensor_scale);
    return static_cast<float>(code >= 8 ? -exact : exact);
}

} // namespace keel_test::nvfp4
