// Where codes change, in integers alone. Floats of one sign are ordered as their words, so the codes of a format under one
// policy are a list of words: the first one that becomes each code. No other word needs to be asked about.
//
// Nothing here comes from keel but the names of the policies.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "format/oracle.hpp"

namespace keel_test {

/// Floats from this word on, up to the next change, have this code.
struct change {
    uint32_t word, code;
};

/// A format as its specification states it, for the arithmetic of words.
struct word_layout {
    char const* name;
    int mantissa_bits, bias;
    uint32_t sign_code; ///< 0: values have no sign, and the smallest one is 2^-127
    uint32_t max_code;
    uint32_t infinity_code; ///< 0: there is none
    uint32_t nan_code;
};
template <class T> inline constexpr word_layout word_layout_of = {};
template <> inline constexpr word_layout word_layout_of<keel::bf16> = {"bf16", 7, 127, 0x8000, 0x7f7f, 0x7f80, 0x7fff};
template <> inline constexpr word_layout word_layout_of<keel::f16> = {"f16", 10, 15, 0x8000, 0x7bff, 0x7c00, 0x7fff};
template <> inline constexpr word_layout word_layout_of<keel::e4m3> = {"e4m3", 3, 7, 0x80, 0x7e, 0, 0x7f};
template <> inline constexpr word_layout word_layout_of<keel::e5m2> = {"e5m2", 2, 15, 0x80, 0x7b, 0x7c, 0x7f};
template <> inline constexpr word_layout word_layout_of<keel::e8m0> = {"e8m0", 0, 127, 0, 0xfe, 0, 0xff};

/// The word of the float that code c of a magnitude stands for, with c = max_code + 1 read as the number it would be.
inline uint32_t word_of_code(word_layout const& l, uint32_t c) {
    int const fraction = 23 - l.mantissa_bits;
    if (l.sign_code == 0 && c == 0) return 1u << 22; // 2^-127, a subnormal float
    if (l.bias == 127) return c << fraction;         // float's own exponents, subnormals among them
    if (c >> l.mantissa_bits != 0) return (c << fraction) + (static_cast<uint32_t>(127 - l.bias) << 23);
    if (c == 0) return 0;
    int const top = 31 - std::countl_zero(c); // c * 2^(1 - bias - mantissa_bits), a normal float
    int const exponent = 127 + 1 - l.bias - l.mantissa_bits + top;
    return (static_cast<uint32_t>(exponent) << 23) + ((c - (1u << top)) << (23 - top));
}

/// The word half way between two neighbouring codes. In one binade, its upper end included, words go up as values do; half of a normal
/// number is one exponent less.
inline uint32_t word_between(uint32_t low, uint32_t high) {
    return low == 0 && high >= 2u << 23 ? high - (1u << 23) : low + (high - low) / 2;
}

inline bool truncates(keel::rounding r, bool negative) {
    return r == keel::rounding::toward_zero || (r == keel::rounding::upward && negative);
}

/// The first magnitude that becomes code c > 0 and no less.
inline uint32_t first_word(word_layout const& l, uint32_t c, keel::rounding r, bool negative) {
    uint32_t const low = word_of_code(l, c - 1), high = word_of_code(l, c);
    if (truncates(r, negative)) return high;
    if (r == keel::rounding::upward) return low + 1;
    bool const takes_ties = c % 2 == 0 || l.sign_code == 0; // an even code does; of two powers of two it is the larger one
    return word_between(low, high) + (takes_ties ? 0 : 1);
}

/// The codes of all floats of one sign, by magnitude: from 0 through the numbers to Inf and NaN.
inline std::vector<change> changes(word_layout const& l, keel::overflow o, keel::rounding r, bool negative) {
    using keel::overflow;
    constexpr uint32_t infinity = 0x7f800000u;
    if (negative && l.sign_code == 0) return {{0, 0}, {1, l.nan_code}};
    uint32_t const sign = negative ? l.sign_code : 0;
    uint32_t const past_max = l.infinity_code != 0 ? sign | l.infinity_code : l.nan_code;

    std::vector<change> list{{0, sign}};
    for (uint32_t c = 1; c <= l.max_code; ++c) list.push_back({first_word(l, c, r, negative), sign | c});
    if (o == overflow::to_nonfinite && !truncates(r, negative))
        list.push_back({first_word(l, l.max_code + 1, r, negative), past_max});
    list.push_back({infinity, o == overflow::saturate ? sign | l.max_code : past_max});
    list.push_back({infinity + 1, l.nan_code});
    return list;
}

} // namespace keel_test
