// Scalar formats: what a stored number is, how a float is rounded into it, and what happens past its largest value.
//
//     encode<e4m3, overflow::saturate>(x)                     float, double or integer -> code, one rounding
//     encode<bf16>(x)                                         IEEE behaviour: the default of float, bf16 and f16
//     encode<bf16, overflow::saturate, rounding::stochastic>(x, random_word)
//     decode(code)                                            code -> float, exact
//     encode_words<e4m3, overflow::saturate>(v), decode_words<e4m3, F>(u)     the same on lanes (core/lanes.hpp)
//
// A format is a trivially copyable type with three things: format_traits<T> (its numbers), codec<T> (its two functions
// on lanes) and the bit layout that other libraries give it. minifloat.hpp makes all of them from four constants;
// float32.hpp and e8m0.hpp stand beside it.
//
// Stores: a row store writes encode_words<T, O, R>(v) and takes O and R as template arguments, which default to
// store_policy<T>: to_nonfinite and nearest_even, as IEEE hardware does, for formats of 16 bits and more. Formats of 8
// bits have no default: whether 1000 becomes 448 or NaN is a decision, so leaving it out does not compile.
//
// Codes depend on the input alone: rounding and subnormals are integer work, so FTZ, DAZ and the rounding mode of the
// floating-point environment change nothing. Every NaN that is encoded becomes the format's one nan_code.
#pragma once

#include <concepts>
#include <type_traits>

#include <keel/core/lanes.hpp>

namespace keel {

/// What becomes of a value beyond the largest finite one. "Non-finite" is Inf, or NaN in a format without Inf.
enum class overflow {
    saturate,        ///< to the largest finite value, Inf too; NaN stays NaN
    saturate_finite, ///< finite values to the largest finite value; Inf and NaN stay non-finite
    to_nonfinite     ///< as IEEE 754: what the rounding carries past the largest finite value becomes non-finite
};

/// How a value between two codes is rounded.
enum class rounding {
    nearest_even, ///< to the nearer code, ties to the even one
    toward_zero,  ///< truncation; a finite value never overflows
    upward,       ///< toward +Inf
    stochastic    ///< up in magnitude with a probability equal to the part cut off; takes 32 random bits a value
};

/// How a format spends its codes on values that are not numbers.
enum class specials {
    ieee, ///< the largest exponent holds Inf and NaN
    fn,   ///< "finite": no Inf; only the code of all ones (either sign) is NaN
    fnuz, ///< "finite, unsigned zero": no Inf, no -0; the code of -0 is the NaN
    none  ///< every code is finite; NaN has no code and is encoded as the largest value
};

/// What a stored number is: the bits of its code. As a base it lets e4m3{0x38} name a code, and lets no number in past encode: without it
/// C++20 reads bf16(1.0f), and a std::vector<bf16> made from a range of floats, as the code 1.
template <class Storage> struct encoded_bits {
    Storage bits;
};

/// The numbers of a format; specialised for each, see derived_traits for the members.
template <class T> struct format_traits;

/// A type that keel can store: see the head of this file.
template <class T> concept scalar_format = std::is_trivially_copyable_v<T> && requires {
    typename format_traits<T>::storage;
    { (format_traits<T>::max)() } -> std::same_as<float>;
    requires sizeof(typename format_traits<T>::storage) == sizeof(T);
};

/// 2^exponent as a float, subnormals included; exponent in [-149, 127].
KEEL_FN constexpr float power_of_two(int exponent) {
    return __builtin_bit_cast(float, exponent >= -126 ? static_cast<uint32_t>(exponent + 127) << 23
                                                      : 1u << static_cast<uint32_t>(exponent + 149));
}

/// Everything about a format with a sign, derived from its layout: value = (-1)^s * 2^(e - Bias) * 1.m, and
/// (-1)^s * 2^(1 - Bias) * 0.m where the exponent field e is 0.
template <int ExponentBits, int MantissaBits, int Bias, specials Specials> struct derived_traits {
    using storage = std::conditional_t<(1 + ExponentBits + MantissaBits > 16), uint32_t,
                                       std::conditional_t<(1 + ExponentBits + MantissaBits > 8), uint16_t, uint8_t>>;

    static constexpr int exponent_bits = ExponentBits;
    static constexpr int mantissa_bits = MantissaBits;
    static constexpr int bias = Bias;
    static constexpr int digits = MantissaBits + 1;
    static constexpr specials special_values = Specials;
    static constexpr bool has_sign = true;
    static constexpr bool has_infinity = Specials == specials::ieee;
    static constexpr bool has_nan = Specials != specials::none;
    static constexpr bool has_negative_zero = Specials != specials::fnuz;

    static constexpr uint32_t sign_code = 1u << (ExponentBits + MantissaBits);
    static constexpr uint32_t magnitude_code = sign_code - 1; ///< the mask of a code without its sign
    static constexpr uint32_t infinity_code = ((1u << ExponentBits) - 1) << MantissaBits; ///< if has_infinity
    static constexpr uint32_t max_code = has_infinity               ? infinity_code - 1
                                         : Specials == specials::fn ? magnitude_code - 1
                                                                    : magnitude_code;
    /// The one NaN that is stored; in a format without NaN the code that stands in for it.
    static constexpr uint32_t nan_code = Specials == specials::fnuz ? sign_code : magnitude_code;
    /// What overflow and Inf become when they stay non-finite.
    static constexpr uint32_t nonfinite_code = has_infinity ? infinity_code : nan_code;

    static constexpr int max_exponent = static_cast<int>(max_code >> MantissaBits) - Bias;
    static constexpr int min_exponent = 1 - Bias; ///< of the smallest normal value
    /// The float of the largest finite value, as a word.
    static constexpr uint32_t max_float_bits = (static_cast<uint32_t>(max_exponent + 127) << 23) |
                                               ((max_code & ((1u << MantissaBits) - 1)) << (23 - MantissaBits));

    KEEL_FN static constexpr float(max)() { return __builtin_bit_cast(float, max_float_bits); }
    KEEL_FN static constexpr float min_normal() { return power_of_two(min_exponent); }
    KEEL_FN static constexpr float min_subnormal() { return power_of_two(min_exponent - MantissaBits); }
    /// The distance from 1 to the next larger value.
    KEEL_FN static constexpr float epsilon() { return power_of_two(-MantissaBits); }
};

template <class T> inline constexpr bool has_store_policy = sizeof(T) > 1;
/// How a store that names no policy treats overflow: as IEEE hardware, and not at all where nothing is usual.
template <class T> struct store_policy {
    static_assert(has_store_policy<T>, "keel: an 8-bit format has no default overflow; name it, as in "
                                       "encode<e4m3, keel::overflow::saturate>(x)");
    static constexpr overflow out_of_range = overflow::to_nonfinite;
};

/// A code as a word: its bits, zero-extended.
template <scalar_format T> KEEL_FN constexpr uint32_t to_word(T code) {
    return __builtin_bit_cast(typename format_traits<T>::storage, code);
}
/// The code in the low bits of a word.
template <scalar_format T> KEEL_FN constexpr T from_word(uint32_t word) {
    return __builtin_bit_cast(T, static_cast<typename format_traits<T>::storage>(word));
}

} // namespace keel

namespace keel::inline KEEL_ABI {

/// A format's two functions on lanes F with words U = bits_of<F>; specialised for each format:
///     encode<O, R>(F x, U noise) -> U     the code of x, the bits above it 0; noise is read if R is stochastic
///     decode<F>(U code) -> F              the value of the code in the low bits, whatever the bits above are
template <class T> struct codec;

/// x cut to float precision with the last bit set if anything was lost. Rounding this again to a format at least 3 bits
/// coarser than float gives what rounding x at once would give, in every direction and at every overflow boundary.
KEEL_FN constexpr float round_to_odd(double x) {
    uint64_t const u = __builtin_bit_cast(uint64_t, x);
    uint64_t const a = u & 0x7fffffffffffffffu;
    uint64_t const exponent = a >> 52;
    uint64_t word = 0;
    if (exponent == 0x7ff) {
        word = a > 0x7ff0000000000000u ? nan_bits : infinity_bits;
    } else if (exponent >= 1023 + 128) {
        word = infinity_bits - 1; // the largest float is odd
    } else {
        bool const normal = exponent >= 1023 - 126;
        uint64_t const kept = normal ? a - (uint64_t{1023 - 127} << 52) : (a & 0xfffffffffffffu) | (uint64_t{1} << 52);
        uint64_t const shift = normal ? 29 : (29 + 1023 - 126) - exponent;
        if (shift < 64) {
            word = kept >> shift;
            word |= static_cast<uint64_t>((word << shift) != kept);
        } else {
            word = static_cast<uint64_t>(a != 0);
        }
    }
    return __builtin_bit_cast(float, static_cast<uint32_t>(word) | static_cast<uint32_t>((u >> 63) << 31));
}

/// The codes of lanes of floats: one rounding, in the low bits of each word, the bits above 0.
/// NaN -> nan_code; Inf and overflow as O says; zeros keep their sign where the format has one; subnormals are made.
template <scalar_format T, overflow O = store_policy<T>::out_of_range, rounding R = rounding::nearest_even, class F>
    requires(R != rounding::stochastic)
KEEL_FN constexpr bits_of<F> encode_words(F const& x) { return codec<T>::template encode<O, R>(x, bits_of<F>(0u)); }
/// The same with 32 random bits a lane: it is rounded away from zero with a probability equal to the part cut off,
/// exactly so for normal codes; for subnormal ones it is short of that by less than 2^(mantissa_bits - 30).
/// Only to_nonfinite makes a finite value Inf or NaN.
template <scalar_format T, overflow O, rounding R, class F>
    requires(R == rounding::stochastic)
KEEL_FN constexpr bits_of<F> encode_words(F const& x, bits_of<F> const& noise) {
    return codec<T>::template encode<O, R>(x, noise);
}
/// The same codes, nearest even, of values that are known to be finite and to round to finite codes: for kernels that have just scaled
/// a block by its largest magnitude. An arithmetic short cut: unlike every other conversion it wants the environment that rounds to nearest.
template <scalar_format T, class F> KEEL_FN bits_of<F> encode_bounded_words(F const& x) {
    return codec<T>::encode_bounded(x);
}
/// The values of lanes of codes, exact. Bits above the code are ignored. NaN codes give some NaN.
template <scalar_format T, class F> KEEL_FN constexpr F decode_words(bits_of<F> const& code) {
    return codec<T>::template decode<F>(code);
}

/// The code of x: one rounding, as encode_words.
///     bf16 y = encode<bf16>(x);     e4m3 q = encode<e4m3, overflow::saturate>(x * scale);
template <scalar_format T, overflow O = store_policy<T>::out_of_range, rounding R = rounding::nearest_even>
    requires(R != rounding::stochastic)
KEEL_FN constexpr T encode(float x) { return from_word<T>(codec<T>::template encode<O, R>(x, 0u)); }
template <scalar_format T, overflow O, rounding R>
    requires(R == rounding::stochastic)
KEEL_FN constexpr T encode(float x, uint32_t noise) { return from_word<T>(codec<T>::template encode<O, R>(x, noise)); }

/// The code of a double: one rounding, not by way of float. Stochastic rounding to less than float sees the double cut
/// to 24 digits, the last one odd if more were there.
template <scalar_format T, overflow O = store_policy<T>::out_of_range, rounding R = rounding::nearest_even>
    requires(R != rounding::stochastic)
KEEL_FN constexpr T encode(double x) {
    if constexpr (std::is_same_v<T, float>) {
        return from_word<T>(codec<T>::template encode_double<O, R>(x, 0u));
    } else {
        return encode<T, O, R>(round_to_odd(x));
    }
}
template <scalar_format T, overflow O, rounding R>
    requires(R == rounding::stochastic)
KEEL_FN constexpr T encode(double x, uint32_t noise) {
    if constexpr (std::is_same_v<T, float>) {
        return from_word<T>(codec<T>::template encode_double<O, R>(x, noise));
    } else {
        return encode<T, O, R>(round_to_odd(x), noise);
    }
}

/// The code of an integer of up to 64 bits: one rounding, whatever its size.
template <scalar_format T, overflow O = store_policy<T>::out_of_range, rounding R = rounding::nearest_even, std::integral N>
    requires(R != rounding::stochastic && !std::is_same_v<N, bool> && sizeof(N) <= 8)
KEEL_FN constexpr T encode(N x) {
    bool const negative = x < N{0};
    uint64_t a = negative ? uint64_t{0} - static_cast<uint64_t>(x) : static_cast<uint64_t>(x);
    if (a >> 53 != 0) a = (a & ~uint64_t{0x7ff}) | static_cast<uint64_t>((a & 0x7ff) != 0) << 11; // round_to_odd, to a double
    double const magnitude = static_cast<double>(a);
    return encode<T, O, R>(negative ? -magnitude : magnitude);
}

/// The value of a code, exact.
template <scalar_format T> KEEL_FN constexpr float decode(T code) { return decode_words<T, float>(to_word(code)); }

} // namespace keel::inline KEEL_ABI
