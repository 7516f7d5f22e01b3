// From a block's largest magnitude to its scale and the multiplier of its elements.
#pragma once

#include <keel/quantize/block_scaled.hpp>

namespace keel::inline KEEL_ABI {

/// The stored scale and its reciprocal, in every lane of the block.
template <class F> struct block_scale {
    F scale, multiplier;
};

/// fp32: scale = amax / code_max and multiplier = code_max / amax, each one division. amax is raised to code_max * 2^-126, so neither
/// is ever subnormal, zero or infinite, and a zero block decodes to zeros. (A larger floor, such as 1e-4 or 1e-12, would flush
/// real gradients.) amax of NaN or Inf: both NaN.
template <class Code, class F> KEEL_FN block_scale<F> scale_of(fp32_scale, bits_of<F> const& amax) {
    using U = bits_of<F>;
    float const code_max = (format_traits<Code>::max)();
    F const top = as_float(umax(amax, U(bits(code_max * 0x1p-126f))));
    auto const bad = gt(amax, U(infinity_bits - 1));
    F const nan = as_float(U(nan_bits));
    return {select(bad, nan, div(top, F(code_max))), select(bad, nan, div(F(code_max), top))};
}

/// Power of two: the smallest 2^e >= amax / code_max, by integers. code_max = m * 2^c with m in [1, 2): adding what lacks from m's bits
/// to all ones carries into the exponent exactly when amax's mantissa exceeds m. e is at least -127 and at most 127 - c,
/// so the multiplier 2^-e is always normal.
template <class Code, class F> KEEL_FN bits_of<F> scale_exponent(bits_of<F> const& amax) {
    using U = bits_of<F>;
    constexpr uint32_t top = format_traits<Code>::max_float_bits;
    constexpr uint32_t lacking = 0x7fffffu - (top & 0x7fffffu), exponent = (top >> 23) - 127;
    return umax(shr<23>(amax + U(lacking)), U(exponent)) - U(exponent); // biased by 127
}
template <class Code, class F> KEEL_FN block_scale<F> scale_of(e8m0_scale, bits_of<F> const& amax) {
    using U = bits_of<F>;
    U const e = scale_exponent<Code, F>(amax);
    auto const bad = gt(amax, U(infinity_bits - 1));
    U const scale = select(eq(e, U(0u)), U(0x00400000u), shl<23>(e)); // 2^-127 is a subnormal float
    return {as_float(select(bad, U(nan_bits), scale)), as_float(select(bad, U(nan_bits), shl<23>(U(254u) - e)))};
}
/// The same power of two, but at least 2^-126: an fp32 scale that is never subnormal.
template <class Code, class F> KEEL_FN block_scale<F> scale_of(power_of_two_scale, bits_of<F> const& amax) {
    using U = bits_of<F>;
    U const e = umax(scale_exponent<Code, F>(amax), U(1u));
    auto const bad = gt(amax, U(infinity_bits - 1));
    return {as_float(select(bad, U(nan_bits), shl<23>(e))), as_float(select(bad, U(nan_bits), shl<23>(U(254u) - e)))};
}

} // namespace keel::inline KEEL_ABI
