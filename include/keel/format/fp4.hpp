// e2m1, the four-bit format of OCP microscaling and NVFP4, and the byte that holds two of them. Same layouts as __nv_fp4_e2m1,
// ml_dtypes.float4_e2m1fn and, in pairs, __nv_fp4x2_e2m1 and torch.float4_e2m1fn_x2.
//
//     code    0  1    2  3    4  5  6  7      8 to 15: the same, negative (8 is -0)
//     value   0  0.5  1  1.5  2  3  4  6
//
// It has no Inf and no NaN, so it can only saturate; a NaN is encoded as code 7. Who stores e2m1 therefore puts NaN and Inf into the
// scale beside it.
//
// A lone e2m1 takes a byte, its upper half zero. Stored matrices hold pairs; pair_of, low_of and high_of convert.
#pragma once

#include <keel/format/minifloat.hpp>

namespace keel {

/// 2 significant bits up to 6, no Inf, no NaN.
using e2m1 = minifloat<2, 1, 1, specials::none>;

/// Two elements of a row in a byte: the one of the lower index in the low half. No scalar_format: its halves are.
struct e2m1x2 : encoded_bits<uint8_t> {};

KEEL_FN constexpr e2m1x2 pair_of(e2m1 low, e2m1 high) {
    return {static_cast<uint8_t>((low.bits & 0xfu) | static_cast<uint32_t>(high.bits) << 4)};
}
KEEL_FN constexpr e2m1 low_of(e2m1x2 pair) { return {static_cast<uint8_t>(pair.bits & 0xfu)}; }
KEEL_FN constexpr e2m1 high_of(e2m1x2 pair) { return {static_cast<uint8_t>(pair.bits >> 4)}; }

/// What a store of codes asks.
template <> struct format_traits<e2m1x2> {
    using storage = uint8_t;
};

/// The byte of a pair read as one of its elements, Shift = 0 or 4: a format for loads. It has the numbers of e2m1.
template <int Shift> struct e2m1_half {
    uint8_t bits;
};
template <int Shift> struct format_traits<e2m1_half<Shift>> : format_traits<e2m1> {};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <int Shift> struct codec<e2m1_half<Shift>> {
    template <class F> KEEL_FN static constexpr F decode(bits_of<F> const& code) {
        return codec<e2m1>::template decode<F>(shr<Shift>(code)); // which ignores the bits above its own
    }
};

/// A row of pairs as the row of their low (0) or high (4) halves.
template <int Shift> KEEL_FN e2m1_half<Shift> const* halves(e2m1x2 const* pairs) {
    return reinterpret_cast<e2m1_half<Shift> const*>(pairs);
}

} // namespace keel::inline KEEL_ABI
