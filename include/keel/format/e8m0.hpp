// e8m0: the scale format of the OCP microscaling formats, a power of two in one byte. Same layout as __nv_fp8_e8m0,
// torch.float8_e8m0fnu and ml_dtypes.float8_e8m0fnu.
//
//     code 0..254 is 2^(code - 127): 2^-127 (a float subnormal) to 2^127; code 255 is NaN. No sign, no zero, no Inf.
//
//     upward         what quantisers want: a block divided by its scale cannot exceed the codes' range
//     toward_zero    the floor of OCP's own rule
//     nearest_even   the nearer power of two; the tie 1.5 * 2^n goes to the larger one (IEEE 754's rule for one digit)
//     stochastic     to the larger power with probability x / 2^n - 1
//
// Values below 2^-127, zero and -0 included, become 2^-127. Negative values become NaN: a scale has no sign, so one
// that has is a fault to be seen. Past 2^127: saturate gives 2^127, for Inf too; saturate_finite gives 2^127, and NaN
// for Inf; to_nonfinite gives NaN for what the rounding carries past it and for Inf.
#pragma once

#include <keel/format/format.hpp>

namespace keel {

struct e8m0 : encoded_bits<uint8_t> { // from a number: keel::encode<e8m0, overflow, rounding>(x)
    operator float() const = delete;  // its value: keel::decode(x)
};

template <> struct format_traits<e8m0> {
    using storage = uint8_t;
    static constexpr int exponent_bits = 8;
    static constexpr int mantissa_bits = 0;
    static constexpr int bias = 127;
    static constexpr int digits = 1;
    static constexpr bool has_sign = false;
    static constexpr bool has_infinity = false;
    static constexpr bool has_nan = true;
    static constexpr bool has_negative_zero = false;
    static constexpr uint32_t sign_code = 0;
    static constexpr uint32_t magnitude_code = (1u << exponent_bits) - 1;
    static constexpr uint32_t nan_code = magnitude_code;
    static constexpr uint32_t nonfinite_code = nan_code;
    static constexpr uint32_t max_code = nan_code - 1;
    static constexpr int max_exponent = static_cast<int>(max_code) - bias;
    static constexpr int min_exponent = -bias;
    static constexpr uint32_t max_float_bits = max_code << 23;

    KEEL_FN static constexpr float (max)() { return power_of_two(max_exponent); }
    /// The smallest value; there is no zero and no subnormal below it.
    KEEL_FN static constexpr float min_normal() { return power_of_two(min_exponent); }
    KEEL_FN static constexpr float min_subnormal() { return min_normal(); }
    /// From 1 to the next value, 2.
    KEEL_FN static constexpr float epsilon() { return 1; }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <> struct codec<e8m0> {
    using traits = format_traits<e8m0>;

    /// A float's exponent field is the code; rounding adds to the bits below it. Below 2^-126 the field is 0 and the
    /// distance to the next power is half as large, so half as much is added.
    template <overflow O, rounding R, class F>
    KEEL_FN static constexpr bits_of<F> encode(F const& x, bits_of<F> const& noise) {
        using U = bits_of<F>;
        U const a = select(eq(bits(x), U(sign_bit)), U(0u), bits(x)); // negative values lie above Inf
        U addend = U(0u);
        if constexpr (R == rounding::nearest_even) addend = U(1u << 22);
        if constexpr (R == rounding::upward) addend = U((1u << 23) - 1);
        if constexpr (R == rounding::stochastic) addend = shr<9>(noise);
        U const rounded = shr<23>(a + select(gt(U(1u << 23), a), shr<1>(addend), addend));
        U const code = umin(rounded, U(O == overflow::to_nonfinite ? traits::nan_code : traits::max_code));
        auto const is_bad = gt(a, U(O == overflow::saturate ? infinity_bits : infinity_bits - 1));
        return select(is_bad, U(traits::nan_code), code);
    }

    template <class F> KEEL_FN static constexpr F decode(bits_of<F> const& code) {
        using U = bits_of<F>;
        U const a = code & U(traits::magnitude_code);
        U const u = select(eq(a, U(0u)), U(1u << 22), shl<23>(a));
        return as_float(select(eq(a, U(traits::nan_code)), U(nan_bits), u));
    }
};

} // namespace keel::inline KEEL_ABI
