// float as a storage format, under the same functions as the small ones.
#pragma once

#include <keel/format/format.hpp>

namespace keel {

template <> struct format_traits<float> : derived_traits<8, 23, 127, specials::ieee> {};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <> struct codec<float> {
    using traits = format_traits<float>;

    /// Nothing to round: NaN becomes the one NaN, and Inf the largest value if asked.
    template <overflow O, rounding R, class F>
    KEEL_FN static constexpr bits_of<F> encode(F const& x, bits_of<F> const&) {
        using U = bits_of<F>;
        U u = bits(x);
        U const a = u & U(magnitude_mask);
        if constexpr (O == overflow::saturate) u = umin(a, U(traits::max_code)) | (u & U(sign_bit));
        return select(gt(a, U(infinity_bits)), U(nan_bits), u);
    }

    template <class F> KEEL_FN static constexpr F decode(bits_of<F> const& code) { return as_float(code); }

    /// A double to float, whatever the environment: minifloat's way, in 64 bits. The noise's 32 bits are the top of k.
    template <overflow O, rounding R> KEEL_FN static constexpr uint32_t encode_double(double x, uint32_t noise) {
        constexpr uint64_t double_infinity = uint64_t{0x7ff} << 52;
        constexpr uint64_t lowest = 1023 - 126;
        uint64_t const u = __builtin_bit_cast(uint64_t, x);
        uint64_t const a = u & (double_infinity | 0xfffffffffffffu);
        uint32_t const sign = static_cast<uint32_t>(u >> 63) << 31;
        if (a > double_infinity) return nan_bits;
        if (a == double_infinity) return sign | (O == overflow::saturate ? traits::max_code : infinity_bits);
        if (a == 0) return sign;

        uint64_t const exponent = a >> 52;
        uint64_t const bottom = exponent > lowest ? exponent : lowest;
        uint64_t significand = (a & 0xfffffffffffffu) | (uint64_t{1} << 52);
        uint64_t const cut = bottom - exponent + 29;
        uint64_t const k = cut < 63 ? cut : 63;
        if constexpr (R == rounding::nearest_even) {
            significand += (uint64_t{1} << (k - 1)) - 1 + ((significand >> k) & 1);
        } else if constexpr (R == rounding::upward) {
            significand += sign != 0 ? 0 : (uint64_t{1} << k) - 1;
        } else if constexpr (R == rounding::stochastic) {
            uint64_t const below = cut - k;
            significand = (below < 64 ? significand >> below : 0) + (uint64_t{noise} << 32 >> (64 - k));
        }
        uint64_t const code = (significand >> k) + ((bottom - lowest) << 23);
        if (code <= traits::max_code) return sign | static_cast<uint32_t>(code);
        bool const stays_finite =
            O != overflow::to_nonfinite || R == rounding::toward_zero || (R == rounding::upward && sign != 0);
        return sign | (stays_finite ? traits::max_code : infinity_bits);
    }
};

} // namespace keel::inline KEEL_ABI
