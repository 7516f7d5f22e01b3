// From a block's largest magnitude to its scale and the multiplier of its elements: one rule a struct, named as an argument of
// quantize, as in quantize<overflow::saturate, scale_rules::ocp_floor>(be, x, out). All are integer work or single roundings.
//
//     round_up           the scale of the definition; nothing saturates                     (default)
//     ocp_floor          the largest power of two in amax over that in code_max: amax may saturate by up to 12.5 %
//     ocp_even           the same of amax rounded to the code's digits first: by up to 9.7 %
//     nearest            the power of two nearest to amax / code_max in ratio: by up to 29.3 %
//     deep_gemm          DeepGEMM's: amax at least 1e-4, the multiplier by way of the rounded scale
//     transformer_engine TransformerEngine's blockwise recipe: the multiplier first, the scale its reciprocal
#pragma once

#include <keel/quantize/block_scaled.hpp>

namespace keel::inline KEEL_ABI {

/// The stored scale and the multiplier of the elements, in every lane of the block.
template <class F> struct block_scale { F scale, multiplier; };

/// Magnitudes as words, with NaN and Inf as 0.
template <class F> KEEL_FN bits_of<F> finite_magnitude(F const& v) {
    using U = bits_of<F>;
    U const m = magnitude(v);
    return select(gt(m, U(infinity_bits - 1)), U(0u), m);
}

/// A block's scale into element `block` of a row of scales. It is an e8m0 value already; only NaN needs a policy.
template <class Scale, class Block, class P, class V> KEEL_FN void put_scale(Block const& b, P p, V const& scale) {
    if constexpr (std::is_same_v<Scale, e8m0_scale>)
        b.template put<overflow::to_nonfinite, rounding::toward_zero>(p, scale);
    else
        b.put(p, scale);
}

namespace detail {
/// 2^(e - 127) and its reciprocal as floats; e in [0, 254], 2^-127 being a subnormal.
template <class F> KEEL_FN block_scale<F> power_of_two_scale_of(bits_of<F> const& e, bits_of<F> const& amax) {
    using U = bits_of<F>;
    auto const bad = gt(amax, U(infinity_bits - 1));
    U const scale = select(eq(e, U(0u)), U(0x00400000u), shl<23>(e));
    U const multiplier = select(eq(e, U(254u)), U(0x00400000u), shl<23>(U(254u) - e));
    return {as_float(select(bad, U(nan_bits), scale)), as_float(select(bad, U(nan_bits), multiplier))};
}
template <class F> KEEL_FN block_scale<F> nan_if(mask_of<F> const& bad, block_scale<F> const& s) {
    F const nan = as_float(bits_of<F>(nan_bits));
    return {select(bad, nan, s.scale), select(bad, nan, s.multiplier)};
}
/// The exponent that an e8m0 or an fp32 power of two can hold without a subnormal.
template <class Scale> inline constexpr uint32_t least_exponent = std::is_same_v<Scale, e8m0_scale> ? 0u : 1u;
} // namespace detail

namespace scale_rules {

// A rule has of<X, Code, F>(Scale{}, amax) for elements X, codes Code and lanes F, amax being largest magnitudes as words, those of Inf and
// NaN only where they poison; and `bounded`: once scaled, a block's largest element rounds to no more than code_max, for every amax.
// One of your own passes as any of these; here one with torchao's floor:
//
//     struct floor_1e12 {
//         static constexpr bool bounded = true;
//         template <class X, class Code, class F> KEEL_FN static block_scale<F> of(fp32_scale, bits_of<F> const& amax) {
//             using U = bits_of<F>;
//             F const top = as_float(select(gt(amax, U(infinity_bits - 1)), U(nan_bits), umax(amax, U(bits(1e-12f)))));
//             F const scale = div(top, F((format_traits<Code>::max)()));
//             return {scale, div(F(1.0f), scale)};
//         }
//     };

/// fp32: scale = amax / code_max and multiplier = code_max / amax, each one division. amax is raised to code_max * 2^-126, so neither
/// is ever subnormal, zero or infinite, and a zero block decodes to zeros. (A larger floor, such as 1e-4 or 1e-12, would flush
/// real gradients.)
/// Powers of two: the smallest 2^e >= amax / code_max, by integers. code_max = m * 2^c with m in [1, 2): adding what lacks from m's
/// bits to all ones carries into the exponent exactly when amax's mantissa exceeds m. e is at least -127 (-126 in fp32) and at
/// most 128 - c: the multiplier 2^-e is a subnormal only where code_max is below 4.
/// amax of NaN or Inf: both NaN.
struct round_up {
    static constexpr bool bounded = true;

    template <class X, class Code, class F> KEEL_FN static block_scale<F> of(fp32_scale, bits_of<F> const& amax) {
        using U = bits_of<F>;
        float const code_max = (format_traits<Code>::max)();
        F const top = as_float(umax(amax, U(bits(code_max * 0x1p-126f))));
        return detail::nan_if<F>(gt(amax, U(infinity_bits - 1)), {div(top, F(code_max)), div(F(code_max), top)});
    }
    template <class X, class Code, class F, class Scale>
    requires Scale::is_power_of_two KEEL_FN static block_scale<F> of(Scale, bits_of<F> const& amax) {
        using U = bits_of<F>;
        constexpr uint32_t top = format_traits<Code>::max_float_bits;
        constexpr uint32_t lacking = 0x7fffffu - (top & 0x7fffffu), exponent = (top >> 23) - 127,
                           least = detail::least_exponent<Scale>;
        U const e = umax(shr<23>(amax + U(lacking)), U(exponent + least)) - U(exponent);
        return detail::power_of_two_scale_of<F>(e, amax);
    }
};

/// OCP MX v1.0, section 6.3: 2^(floor(log2 amax) - floor(log2 code_max)). Powers of two only.
struct ocp_floor {
    static constexpr bool bounded = false;

    template <class X, class Code, class F, class Scale>
    KEEL_FN static block_scale<F> of(Scale, bits_of<F> const& amax) {
        static_assert(Scale::is_power_of_two, "keel: ocp_floor makes powers of two; blocks with power_of_two_scale or e8m0_scale take it");
        using U = bits_of<F>;
        constexpr uint32_t exponent = (format_traits<Code>::max_float_bits >> 23) - 127,
                           least = detail::least_exponent<Scale>;
        return detail::power_of_two_scale_of<F>(umax(shr<23>(amax), U(exponent + least)) - U(exponent), amax);
    }
};

/// As ocp_floor, of amax rounded to nearest even at the code's digits, so that an amax which rounds up to the next power of two gets that
/// one's scale (torchao's EVEN).
struct ocp_even {
    static constexpr bool bounded = false;

    template <class X, class Code, class F, class Scale>
    KEEL_FN static block_scale<F> of(Scale, bits_of<F> const& amax) {
        static_assert(Scale::is_power_of_two, "keel: ocp_even makes powers of two; blocks with power_of_two_scale or e8m0_scale take it");
        using U = bits_of<F>;
        constexpr int cut = 23 - format_traits<Code>::mantissa_bits;
        constexpr uint32_t exponent = (format_traits<Code>::max_float_bits >> 23) - 127, least = detail::least_exponent<Scale>;
        U const rounded = amax + U((1u << (cut - 1)) - 1) + (shr<cut>(amax) & U(1u)); // up to 2^128, whose scale is a number
        return detail::power_of_two_scale_of<F>(umax(shr<23>(rounded), U(exponent + least)) - U(exponent), amax);
    }
};

/// The power of two nearest to amax / code_max in ratio: 2^e with amax / code_max in [2^(e - 1/2), 2^(e + 1/2)).
struct nearest {
    static constexpr bool bounded = false;

    template <class X, class Code, class F, class Scale>
    KEEL_FN static block_scale<F> of(Scale, bits_of<F> const& amax) {
        static_assert(Scale::is_power_of_two, "keel: nearest makes powers of two; blocks with power_of_two_scale or e8m0_scale take it");
        using U = bits_of<F>;
        // code_max * sqrt(2), rounded up, has the mantissa past which the next power is nearer.
        constexpr uint32_t turn = turning_point((format_traits<Code>::max)());
        constexpr uint32_t lacking = 0x800000u - (turn & 0x7fffffu), exponent = (turn >> 23) - 127,
                           least = detail::least_exponent<Scale>;
        U const e = umax(shr<23>(amax + U(lacking)), U(exponent + least)) - U(exponent);
        return detail::power_of_two_scale_of<F>(e, amax);
    }

private:
    /// The smallest float f with f * f >= 2 * code_max * code_max, as a word.
    static constexpr uint32_t turning_point(float code_max) {
        double const square = 2.0 * static_cast<double>(code_max) * static_cast<double>(code_max);
        uint32_t low = __builtin_bit_cast(uint32_t, code_max), high = low + (1u << 23);
        while (low < high) {
            uint32_t const middle = low + (high - low) / 2;
            double const f = static_cast<double>(__builtin_bit_cast(float, middle));
            if (f * f >= square)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }
};

/// DeepGEMM: amax = max(amax, 1e-4); scale = amax / code_max, for powers of two its exponent plus one where the mantissa is not zero;
/// multiplier = 1 / scale. On a GPU its reference divides by way of fp32(1 / code_max), so
/// that fp32 scales may differ in the last place from the CPU's, which these are; powers of two do not. The floor flushes what is
/// below 2e-10 (e4m3; 1.3e-14 in e5m2) to zero: for its bits, not for its numbers.
struct deep_gemm {
    static constexpr bool bounded = true;

    template <class X, class Code, class F, class Scale>
    KEEL_FN static block_scale<F> of(Scale, bits_of<F> const& amax) {
        using U = bits_of<F>;
        F const scale = div(as_float(umax(amax, U(bits(1e-4f)))), F((format_traits<Code>::max)()));
        auto const bad = gt(amax, U(infinity_bits - 1));
        if constexpr (Scale::is_power_of_two)
            return detail::power_of_two_scale_of<F>(shr<23>(bits(scale) + U(0x7fffffu)), amax);
        else
            return detail::nan_if<F>(bad, {scale, div(F(1.0f), scale)});
    }
};

/// TransformerEngine, Float8BlockScaling with its default epsilon of 0: multiplier = code_max / amax, with its mantissa cleared for
/// powers of two; 1 for a zero block; the input format's largest value where the quotient is Inf, and only there (f16
/// input has no amax so small). scale = 1 / multiplier, which for such tiny blocks is subnormal. For e8m0, its MXFP8
/// recipe, it is round_up; TransformerEngine differs on one amax, the float next above code_max * 2^-127, whose product with 1 / code_max
/// loses the digit that would round the scale up.
struct transformer_engine {
    static constexpr bool bounded = true;

    template <class X, class Code, class F, class Scale>
    KEEL_FN static block_scale<F> of(Scale scale, bits_of<F> const& amax) {
        if constexpr (std::is_same_v<Scale, e8m0_scale>) {
            return round_up::of<X, Code, F>(scale, amax);
        } else {
            using U = bits_of<F>;
            F const quotient = div(F((format_traits<Code>::max)()), as_float(amax));
            U word = select(eq(bits(quotient), U(infinity_bits)), U(bits((format_traits<X>::max)())), bits(quotient));
            if constexpr (Scale::is_power_of_two) word = word & U(infinity_bits);
            word = select(eq(amax, U(0u)), U(bits(1.0f)), word);
            F const multiplier = as_float(word);
            return detail::nan_if<F>(gt(amax, U(infinity_bits - 1)), {div(F(1.0f), multiplier), multiplier});
        }
    }
};

} // namespace scale_rules

} // namespace keel::inline KEEL_ABI
