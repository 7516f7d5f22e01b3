// Small floating-point formats, all from one template.
//
//     minifloat<exponent bits, mantissa bits, bias, specials>
//
//              s e m   bias  specials  largest   min normal  min subnormal  Inf  NaN stored  nearest overflows
//     bf16     1 8 7   127   ieee      3.390e38  2^-126      2^-133         yes  7FFF        from 3.396e38
//     f16      1 5 10  15    ieee      65504     2^-14       2^-24          yes  7FFF        from 65520
//     e4m3     1 4 3   7     fn        448       2^-6        2^-9           no   7F          above 464, a tie to 448
//     e5m2     1 5 2   15    ieee      57344     2^-14       2^-16          yes  7F          from 61440
//
// A code is the sign, the exponent field e and the mantissa field m, high bit first. Its value is 2^(e - bias) * 1.m,
// or 2^(1 - bias) * 0.m when e = 0, with the sign. Another format is one alias and needs nothing else:
//
//     using e4m3fnuz = keel::minifloat<4, 3, 8, keel::specials::fnuz>;
//     using e2m1 = keel::minifloat<2, 1, 1, keel::specials::none>;
//
// How a float becomes a code. Its significand goes to the top of a 31-bit word and, below the format's smallest normal
// value, is shifted right by the missing exponents: the last bit that the format keeps now has the same place in every
// value. Rounding adds something below that bit, and what lies below it is cut off:
//
//     toward_zero   nothing
//     nearest_even  half a unit less the last place, plus the last kept bit: a tie moves only an odd code
//     stochastic    random bits
//     upward        of a positive value: the code after that of its predecessor, cut; of a negative one: nothing
//
// The code is this plus 2^M for each exponent above the smallest, so a carry out of the mantissa moves into the
// exponent by itself, and a carry out of the largest exponent is the overflow. In a format with float's bias the kept
// bits have one place from the start: its codes are the top bits of the float.
//
// Decoding is exact: the fields are moved into place and the bias is changed. Where e = 0, 2^(1-bias) * 1.m minus
// 2^(1-bias) is 2^(1-bias) * 0.m, a difference of normal floats that no rounding mode and no flushing can touch.
#pragma once

#include <keel/format/format.hpp>

namespace keel {

/// A stored number: its bits and nothing else. encode and decode convert, and no cast does; arithmetic is done in float.
///     bf16 y = encode<bf16>(1.5f);     float x = decode(y);     e4m3 one{0x38};     from_word<e4m3>(0x38)
template <int ExponentBits, int MantissaBits, int Bias, specials Specials>
struct minifloat : encoded_bits<typename derived_traits<ExponentBits, MantissaBits, Bias, Specials>::storage> { // from a number: keel::encode<T>(x)
    static_assert(ExponentBits >= 2 && MantissaBits >= 1 && 1 + ExponentBits + MantissaBits <= 16);
    operator float() const = delete; // its value: keel::decode(x)
};

template <int E, int M, int Bias, specials S> struct format_traits<minifloat<E, M, Bias, S>>
    : derived_traits<E, M, Bias, S> {
    static_assert(derived_traits<E, M, Bias, S>::max_exponent <= 127, "every value must be a float");
    static_assert(Bias == 127 || Bias + M <= 64, "subnormals must be float's own, or normal floats far above those");
};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <int E, int M, int Bias, specials S> struct codec<minifloat<E, M, Bias, S>> {
    using traits = format_traits<minifloat<E, M, Bias, S>>;
    static constexpr int cut = 23 - M;                                    ///< bits cut off a normal value
    static constexpr uint32_t lowest = static_cast<uint32_t>(128 - Bias); ///< float's exponent field of min_normal
    static constexpr int sign_shift = 31 - E - M;                         ///< from float's sign to the code's
    static constexpr bool has_float_bias = Bias == 127;
    /// The format is the top bits of a float, sign and specials included.
    static constexpr bool is_short_float = has_float_bias && E == 8 && S == specials::ieee;

    template <overflow O, rounding R, class F>
    KEEL_FN static constexpr bits_of<F> encode(F const& x, bits_of<F> const& noise) {
        static_assert(traits::has_nan || O == overflow::saturate, "keel: a format without NaN can only saturate: encode<e2m1, overflow::saturate>(x)");
        using U = bits_of<F>;
        U const u = bits(x);
        U const a = u & U(magnitude_mask);
        if constexpr (is_short_float && O == overflow::to_nonfinite) {
            return select(gt(a, U(infinity_bits)), U(traits::nan_code), round<R>(u, u, noise));
        } else if constexpr (O != overflow::to_nonfinite || R == rounding::toward_zero) {
            return bounded<O == overflow::saturate>(round<R>(umin(a, U(traits::max_float_bits)), u, noise), u, a);
        } else if constexpr (R == rounding::upward) { // only positive values overflow
            auto const is_finite_negative = gt(U(infinity_bits), u ^ U(sign_bit));
            U const v = select(is_finite_negative, umin(a, U(traits::max_float_bits)), a);
            return unbounded(round<R>(v, u, noise), u, a);
        } else {
            return unbounded(round<R>(a, u, noise), u, a);
        }
    }

    /// Nearest even of a finite x that rounds to a finite code, in half the work, by the floating-point addition: x is added to the
    /// power of two whose last place is the code's at x, so the sum's low bits are the significand, rounded. Below min_normal the
    /// place is min_subnormal's. Needs round-to-nearest arithmetic; takes x as zero where the machine flushes it (it is).
    template <class F> KEEL_FN static constexpr bits_of<F> encode_bounded(F const& x) {
        static_assert(!has_float_bias);
        using U = bits_of<F>;
        constexpr uint32_t bottom = lowest << 23, places = static_cast<uint32_t>(cut) << 23;
        U const u = bits(x);
        U const a = u & U(magnitude_mask);
        U const binade = umax(a & U(infinity_bits), U(bottom)) - U(bottom);
        U const anchor = binade + U(bottom + places);
        U const significand = bits(as_float(a) + as_float(anchor)) - anchor;
        return with_sign(shr<cut>(binade) + significand, u);
    }

    template <class F> KEEL_FN static constexpr F decode(bits_of<F> const& code) {
        using U = bits_of<F>;
        if constexpr (is_short_float) {
            return as_float(shl<cut>(code));
        } else {
            U const a = code & U(traits::magnitude_code);
            U u = shl<cut>(a) + U((lowest - 1) << 23);
            if constexpr (!has_float_bias) { // the mask drops the sign of x - x under downward rounding
                F const subnormal = as_float(u + U(1u << 23)) - F(traits::min_normal());
                u = select(gt(U(1u << M), a), bits(subnormal) & U(magnitude_mask), u);
            }
            if constexpr (S == specials::ieee) u = select(gt(a, U(traits::max_code)), u | U(infinity_bits), u);
            if constexpr (S == specials::fn) u = select(eq(a, U(traits::nan_code)), U(nan_bits), u);
            u = u | (shl<sign_shift>(code) & U(sign_bit));
            if constexpr (S == specials::fnuz) u = select(eq(u, U(sign_bit)), U(nan_bits), u); // the code of -0
            return as_float(u);
        }
    }

private:
    /// The code of magnitude v, whose sign is u's (v may keep it in a short float). Above max_code it is an overflow.
    template <rounding R, class U> KEEL_FN static constexpr U round(U const& v, U const& u, U const& noise) {
        if constexpr (R == rounding::upward) {
            U const one = umin(v, U(1u)) & (shr<31>(u) - U(1u)); // 1 for positive values, else 0
            return align_and_cut<rounding::toward_zero>(v - one, noise) + one;
        } else {
            return align_and_cut<R>(v, noise);
        }
    }

    template <rounding R, class U> KEEL_FN static constexpr U align_and_cut(U const& v, U const& noise) {
        if constexpr (has_float_bias) {
            return cut_off<R, cut>(v, noise);
        } else {
            U const exponent = shr<23>(v);
            U const bottom = umax(exponent, U(lowest));
            U const significand = (v & U(0x7fffffu)) | U(0x800000u); // wrong below 2^-126, but shifted away there
            U aligned = shr_by(shl<7>(significand), bottom - exponent);
            if constexpr (R == rounding::nearest_even && M > 6) { // a tie that is none must not look like one
                aligned = aligned | umin(significand & U((1u << (M - 6)) - 1), U(1u));
            }
            return cut_off<R, cut + 7>(aligned, noise) + shl<M>(bottom - U(lowest));
        }
    }

    template <rounding R, int K, class U> KEEL_FN static constexpr U cut_off(U const& v, U const& noise) {
        if constexpr (R == rounding::nearest_even) {
            return shr<K>(v + U((1u << (K - 1)) - 1) + (shr<K>(v) & U(1u)));
        } else if constexpr (R == rounding::stochastic) {
            return shr<K>(v + shr<32 - K>(noise));
        } else {
            return shr<K>(v);
        }
    }

    /// The finished code where finite values have been kept finite; Inf too if Saturates.
    template <bool Saturates, class U> KEEL_FN static constexpr U bounded(U const& code, U const& u, U const& a) {
        if constexpr (Saturates) {
            return with_sign(code, u, gt(a, U(infinity_bits)));
        } else if constexpr (traits::has_infinity) {
            U const finished = select(gt(a, U(infinity_bits - 1)), U(traits::infinity_code), code);
            return with_sign(finished, u, gt(a, U(infinity_bits)));
        } else {
            return with_sign(code, u, gt(a, U(infinity_bits - 1)));
        }
    }

    /// The finished code where a carry past max_code is an overflow.
    template <class U> KEEL_FN static constexpr U unbounded(U const& code, U const& u, U const& a) {
        if constexpr (traits::has_infinity) {
            return with_sign(umin(code, U(traits::infinity_code)), u, gt(a, U(infinity_bits)));
        } else {
            return with_sign(code, u, gt(code, U(traits::max_code)));
        }
    }

    template <class U, class Mask> KEEL_FN static constexpr U with_sign(U const& code, U const& u, Mask const& is_nan) {
        return select(is_nan, U(traits::nan_code), with_sign(code, u));
    }
    template <class U> KEEL_FN static constexpr U with_sign(U const& code, U const& u) {
        U finished = code | (shr<sign_shift>(u) & U(traits::sign_code));
        if constexpr (!traits::has_negative_zero) finished = select(eq(code, U(0u)), code, finished);
        return finished;
    }
};

} // namespace keel::inline KEEL_ABI
