// From largest magnitudes to the two scales of NVFP4 and the multiplier of the elements: one rule a struct, named as an argument of
// quantize_nvfp4, as in quantize_nvfp4<nvfp4_rules::round_up>(be, x, out). All are integer work or single roundings.
//
//     nearest            the block's scale to nearest even: NVIDIA's recipe in divisions              (default)
//     round_up           the block's scale rounded up: nothing saturates, no block but of zeros gets scale 0
//     transformer_engine TransformerEngine's order of operations: reciprocals and their products
#pragma once

#include <keel/format/fp4.hpp>
#include <keel/format/fp8.hpp>
#include <keel/quantize/scale_rule.hpp>

namespace keel::inline KEEL_ABI {

namespace detail {
/// x as an e4m3 scale, past 448 as 448; NaN where it or `amax` is not finite.
template <rounding R, class F> KEEL_FN F nvfp4_scale(F const& x, bits_of<F> const& amax) {
    using U = bits_of<F>;
    F const rounded = decode_words<e4m3, F>(encode_words<e4m3, overflow::saturate, R>(x));
    return select(gt(amax, U(infinity_bits - 1)), as_float(U(nan_bits)), rounded);
}
/// 1 / (scale * tensor): two roundings. 0 where the scale is 0 or NaN.
template <class F> KEEL_FN F nvfp4_multiplier(F const& scale, float tensor) {
    using U = bits_of<F>;
    auto const none = either(eq(bits(scale), U(0u)), is_nan(scale));
    return select(none, F(0.0f), div(F(1.0f), select(none, F(1.0f), mul(scale, F(tensor)))));
}

/// What nearest and round_up share: S = top / 2688 with top = max(amax, 2688 * 2^-117), b = e4m3(amax of the block / (6 S)),
/// multiplier = 1 / (b S); every operation one rounding. e4m3's smallest scale is 2^-9, so b S is at least 2^-126: never subnormal,
/// nor is its reciprocal, up to the largest float as amax. Blocks of 1.5 * 2^-125 and below flush.
template <rounding R> struct nvfp4_by_division {
    float scale; ///< S
    float widest;

    KEEL_FN explicit nvfp4_by_division(uint32_t amax) {
        constexpr float code_max = (format_traits<e2m1>::max)(), full = code_max * (format_traits<e4m3>::max)();
        float const top = as_float(umax(amax, bits(full * 0x1p-117f)));
        scale = amax < infinity_bits ? div(top, full) : as_float(nan_bits);
        widest = mul(code_max, scale);
    }
    template <class F> KEEL_FN block_scale<F> of(bits_of<F> const& amax) const {
        using U = bits_of<F>;
        U const quotient = bits(div(as_float(amax), F(widest)));
        U const positive = select(eq(amax, U(0u)), quotient, umax(quotient, U(1u))); // also where fp32 has lost it
        F const b = nvfp4_scale<R, F>(as_float(positive), amax);
        return {b, nvfp4_multiplier(b, scale)};
    }
};
} // namespace detail

// A rule is made from the tensor's largest magnitude as a word (NaN or Inf: poisoned). It has `scale`, the tensor's, and
// of<F>(amax): the scale and the multiplier of a block in lanes F. A block with NaN or Inf has scale NaN and multiplier 0.

namespace nvfp4_rules {

/// b to nearest even. Rounded down, it leaves the block's largest element at up to 6.375, which is still 6. Below 2^-6, where e4m3 has
/// fewer digits, at up to 9: it saturates. Where b is 0, all of the block is flushed to zeros.
using nearest = detail::nvfp4_by_division<rounding::nearest_even>;

/// b rounded up, so that no element passes 6 by more than its own roundings.
using round_up = detail::nvfp4_by_division<rounding::upward>;

/// TransformerEngine, as of September 2026: encode = 2688 / amax, at most FLT_MAX, 1 for a tensor of zeros; S = 1 / encode;
/// b = e4m3(amax of the block * (encode * fl(1 / 6))); multiplier = 1 / (b S), at most FLT_MAX, also where b is 0: codes 6 then,
/// worth nothing. For its bits. NaN and Inf are treated as by the other rules (TransformerEngine overlooks them).
struct transformer_engine {
    float scale, sixth;

    KEEL_FN explicit transformer_engine(uint32_t amax) {
        float const quotient = div(2688.0f, as_float(amax == 0 ? bits(2688.0f) : amax));
        float const encode = as_float(umin(bits(quotient), infinity_bits - 1));
        bool const finite = amax < infinity_bits;
        scale = finite ? div(1.0f, encode) : as_float(nan_bits);
        sixth = finite ? mul(encode, 1.0f / 6.0f) : as_float(nan_bits);
    }
    template <class F> KEEL_FN block_scale<F> of(bits_of<F> const& amax) const {
        using U = bits_of<F>;
        F const b = detail::nvfp4_scale<rounding::nearest_even, F>(mul(as_float(amax), F(sixth)), amax);
        U const multiplier = umin(bits(div(F(1.0f), mul(b, F(scale)))), U(infinity_bits - 1));
        return {b, select(is_nan(b), F(0.0f), as_float(multiplier))};
    }
};

} // namespace nvfp4_rules

} // namespace keel::inline KEEL_ABI
