// What a conversion should give, from the definition of the format: a table of all its values, and a search in it.
//
// Nothing here comes from keel but the names of the policies. Every value, midpoint and comparison is exact in double.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <vector>

#include <keel/format/bf16.hpp>
#include <keel/format/e8m0.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/float32.hpp>
#include <keel/format/fp4.hpp>
#include <keel/format/fp8.hpp>
#include <keel/format/fp8_fnuz.hpp>

namespace keel_test {

// Formats that keel does not name: each is one alias. The last three take paths that no named format takes.
using e3m2 = keel::minifloat<3, 2, 3, keel::specials::none>;
using half_without_infinity = keel::minifloat<5, 10, 15, keel::specials::fn>;
using short_bf16 = keel::minifloat<8, 3, 127, keel::specials::ieee>;
using float_bias = keel::minifloat<7, 8, 127, keel::specials::ieee>;

/// A format as its specification states it.
struct layout {
    char const* name;
    int exponent_bits, mantissa_bits, bias;
    enum { with_infinity, nan_at_all_ones, nan_at_negative_zero, finite_only } special_values;
    uint32_t max_code, nan_code;
};
template <class T> inline constexpr layout layout_of = {};
template <> inline constexpr layout layout_of<keel::bf16> = {"bf16", 8, 7, 127, layout::with_infinity, 0x7f7f, 0x7fff};
template <> inline constexpr layout layout_of<keel::f16> = {"f16", 5, 10, 15, layout::with_infinity, 0x7bff, 0x7fff};
template <> inline constexpr layout layout_of<keel::e4m3> = {"e4m3", 4, 3, 7, layout::nan_at_all_ones, 0x7e, 0x7f};
template <> inline constexpr layout layout_of<keel::e5m2> = {"e5m2", 5, 2, 15, layout::with_infinity, 0x7b, 0x7f};
template <>
inline constexpr layout layout_of<keel::e4m3fnuz> = {"e4m3fnuz", 4, 3, 8, layout::nan_at_negative_zero, 0x7f, 0x80};
template <>
inline constexpr layout layout_of<keel::e5m2fnuz> = {"e5m2fnuz", 5, 2, 16, layout::nan_at_negative_zero, 0x7f, 0x80};
template <> inline constexpr layout layout_of<keel::e2m1> = {"e2m1", 2, 1, 1, layout::finite_only, 0x7, 0x7};
template <> inline constexpr layout layout_of<e3m2> = {"e3m2", 3, 2, 3, layout::finite_only, 0x1f, 0x1f};
template <> inline constexpr layout layout_of<half_without_infinity> = {
    "fn f16", 5, 10, 15, layout::nan_at_all_ones, 0x7ffe, 0x7fff};
template <> inline constexpr layout layout_of<short_bf16> = {"s1e8m3", 8, 3, 127, layout::with_infinity, 0x7f7, 0x7ff};
template <>
inline constexpr layout layout_of<float_bias> = {"s1e7m8", 7, 8, 127, layout::with_infinity, 0x7eff, 0x7fff};

class oracle {
public:
    /// Where a magnitude lies: steps[low] <= a, and a < steps[low + 1] unless it is past the end.
    struct place {
        double magnitude;
        uint32_t low;
        bool past_end;
    };

    explicit oracle(layout const& l) : l_(l) {
        for (uint32_t code = 0; code <= l.max_code + 1; ++code) steps_.push_back(number(code));
    }
    layout const& format() const { return l_; }
    uint32_t sign_code() const { return 1u << (l_.exponent_bits + l_.mantissa_bits); }
    uint32_t codes() const { return 2 * sign_code(); }
    /// The values of codes 0 ... max_code, and what the next code would be worth if it were a number.
    std::vector<double> const& steps() const { return steps_; }

    double value(uint32_t code) const {
        uint32_t const magnitude = code & (sign_code() - 1);
        double const sign = (code & sign_code()) != 0 ? -1.0 : 1.0;
        bool const is_nan = l_.special_values == layout::with_infinity          ? magnitude > l_.max_code + 1
                            : l_.special_values == layout::nan_at_all_ones      ? magnitude > l_.max_code
                            : l_.special_values == layout::nan_at_negative_zero ? code == sign_code()
                                                                                : false;
        if (is_nan) return std::numeric_limits<double>::quiet_NaN();
        if (magnitude > l_.max_code) return sign * std::numeric_limits<double>::infinity();
        return sign * steps_[magnitude];
    }

    place find(double x) const {
        double const a = std::fabs(x);
        if (!(a < steps_.back())) return {a, l_.max_code, true};
        if (!(steps_[hint_] <= a && a < steps_[hint_ + 1])) {
            auto const above = std::upper_bound(steps_.begin(), steps_.end(), a);
            hint_ = static_cast<uint32_t>(above - steps_.begin()) - 1;
        }
        return {a, hint_, false};
    }
    uint32_t encode(double x, place const& p, keel::overflow o, keel::rounding r) const {
        using keel::overflow, keel::rounding;
        bool const has_infinity = l_.special_values == layout::with_infinity;
        uint32_t const sign = std::signbit(x) ? sign_code() : 0;
        uint32_t const past_max = has_infinity ? sign | (l_.max_code + 1) : l_.nan_code;
        if (std::isnan(x)) return l_.nan_code;
        if (std::isinf(x)) return o == overflow::saturate ? sign | l_.max_code : past_max;

        bool const truncates = r == rounding::toward_zero || (r == rounding::upward && sign != 0);
        uint32_t code = p.low;
        if (p.past_end) {
            code += truncates ? 0 : 1;
        } else if (steps_[p.low] != p.magnitude && !truncates) {
            double const middle = (steps_[p.low] + steps_[p.low + 1]) / 2;
            bool const tie_up = p.magnitude == middle && p.low % 2 == 1;
            if (r == rounding::upward || p.magnitude > middle || tie_up) code += 1;
        }
        if (code > l_.max_code && o == overflow::to_nonfinite) return past_max;
        code = std::min(code, l_.max_code);
        return l_.special_values == layout::nan_at_negative_zero && code == 0 ? 0 : sign | code;
    }
    uint32_t encode(double x, keel::overflow o, keel::rounding r) const { return encode(x, find(x), o, r); }

private:
    /// A magnitude code read as a number, whatever else it may mean.
    double number(uint32_t code) const {
        uint32_t const mantissa = code % (1u << l_.mantissa_bits);
        int const exponent = static_cast<int>(code >> l_.mantissa_bits);
        double const fraction = std::ldexp(mantissa, -l_.mantissa_bits);
        return exponent == 0 ? std::ldexp(fraction, 1 - l_.bias) : std::ldexp(1 + fraction, exponent - l_.bias);
    }

    layout l_;
    std::vector<double> steps_;
    mutable uint32_t hint_ = 0; ///< the last place found: sweeps in order find the next one at once
};

/// The code of an e8m0 scale: the powers of two around x, and the rule that picks one.
inline uint32_t scale_code(double x, keel::overflow o, keel::rounding r) {
    using keel::overflow, keel::rounding;
    if (std::isnan(x) || x < 0) return 0xff;
    if (std::isinf(x)) return o == overflow::saturate ? 0xfe : 0xff;
    if (x <= 0x1p-127) return 0;
    int const low = std::ilogb(x);
    double const power = std::ldexp(1.0, low);
    uint32_t code = static_cast<uint32_t>(low + 127);
    if (r == rounding::upward && x > power) ++code;
    if (r == rounding::nearest_even && x >= 1.5 * power) ++code;
    return code < 0xff ? code : o == overflow::to_nonfinite && r != rounding::toward_zero ? 0xff : 0xfe;
}

/// What went wrong in a sweep, of which only the first case is shown.
struct mismatches {
    int64_t count = 0;
    double input = 0;
    uint32_t got = 0, wanted = 0;
    int policy = -1; ///< 10 * overflow + rounding

    void check(double x, uint32_t g, uint32_t w, int p = -1) {
        if (g == w) return;
        if (count++ == 0) input = x, got = g, wanted = w, policy = p;
    }
    friend std::ostream& operator<<(std::ostream& out, mismatches const& m) {
        return out << m.count << " mismatches, first at " << std::hexfloat << m.input << std::hex << ": got " << m.got
                   << ", wanted " << m.wanted << std::dec << " (policy " << m.policy << ")";
    }
};

template <keel::overflow O, keel::rounding R> struct policy {
    static constexpr keel::overflow on_overflow = O;
    static constexpr keel::rounding round = R;
    static constexpr int id = 10 * static_cast<int>(O) + static_cast<int>(R);
};

/// body(policy<O, R>{}) for every deterministic policy that the format has.
template <class T, class Body> void for_each_policy(Body const& body) {
    using keel::overflow, keel::rounding;
    body(policy<overflow::saturate, rounding::nearest_even>{});
    body(policy<overflow::saturate, rounding::toward_zero>{});
    body(policy<overflow::saturate, rounding::upward>{});
    if constexpr (keel::format_traits<T>::has_nan) {
        body(policy<overflow::saturate_finite, rounding::nearest_even>{});
        body(policy<overflow::saturate_finite, rounding::toward_zero>{});
        body(policy<overflow::saturate_finite, rounding::upward>{});
        body(policy<overflow::to_nonfinite, rounding::nearest_even>{});
        body(policy<overflow::to_nonfinite, rounding::toward_zero>{});
        body(policy<overflow::to_nonfinite, rounding::upward>{});
    }
}

/// The code that keel gives, as a word.
template <class T, class P, class X> uint32_t code_of(P, X x) {
    return keel::to_word(keel::encode<T, P::on_overflow, P::round>(x));
}

inline float float_of(uint32_t word) { return std::bit_cast<float>(word); }
inline uint32_t word_of(float x) { return std::bit_cast<uint32_t>(x); }
/// x moved by k places in the order of magnitudes, sign kept; stops at 0.
inline float nudged(float x, int k) {
    uint32_t const magnitude = word_of(x) & 0x7fffffffu;
    bool const past_zero = k < 0 && magnitude < static_cast<uint32_t>(-k);
    return float_of((word_of(x) & 0x80000000u) | (past_zero ? 0 : magnitude + static_cast<uint32_t>(k)));
}
inline double nudged(double x, int k) {
    uint64_t const u = std::bit_cast<uint64_t>(x), magnitude = u & 0x7fffffffffffffffu;
    bool const past_zero = k < 0 && magnitude < static_cast<uint64_t>(-k);
    return std::bit_cast<double>((u ^ magnitude) | (past_zero ? 0 : magnitude + static_cast<uint64_t>(k)));
}

/// Words that cover all floats: one in each 1024 consecutive ones, at a place that depends on which.
/// They are taken in steps of sample_step: by sanitizers' builds, which look for other faults, one in 29.
#if defined(KEEL_NATIVE_ONLY)
inline constexpr uint32_t sample_step = 29;
#else
inline constexpr uint32_t sample_step = 1;
#endif
inline uint32_t sampled_word(uint32_t stratum) { return (stratum << 10) | ((stratum * 2654435761u) >> 22); }

/// Zero, Inf, NaN quiet and signalling with payloads, and the ends of float's ranges; to be used with both signs.
inline constexpr uint32_t special_words[] = {
    0x00000000u, 0x00000001u, 0x00000002u, 0x003fffffu, 0x00400000u, 0x00400001u, 0x005fffffu, 0x00600000u,
    0x00600001u, 0x007fffffu, 0x00800000u, 0x00800001u, 0x3f800000u, 0x7e800000u, 0x7f000000u, 0x7f7f7fffu,
    0x7f7f8000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fa00000u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu};

} // namespace keel_test
