// Block-scaled quantisation with stochastic rounding.
#pragma once

#include <keel/quantize/quantize.hpp>

namespace keel::inline KEEL_ABI {

/// Quantises as quantize does, each scaled element rounded to one of its two neighbours among the codes by chance, in proportion: the mean of the
/// decoded value is x * multiplier * scale. For gradients, whose small elements nearest rounding loses for good.
///
/// Formula        scale and multiplier as quantize; code = encode<Overflow, stochastic>(x * multiplier, word), word = the 32 Philox bits of
///                the element's index (core/random.hpp). Bias as format/format.hpp states: none for normal codes, below 2^(mantissa_bits -
///                30) of a step for subnormal ones, besides the rounding of x * multiplier to fp32.
/// Shapes, formats, status, aliasing as quantize. The codes are a function of x, the key and the index: not of the backend, threads, shards,
///                strides or the order of the walk.
/// Overflow       a scaled element above code_max, which the rounding of the product can make of the largest by one unit of fp32, is
///                code_max under both forms of saturate, and with to_nonfinite NaN or Inf with the chance that it rounds up.
/// Report         saturated: beyond the boundary of rounding to nearest. flushed: drew zero.
/// Non-finite     as quantize.
/// Cost           bytes as quantize; a Philox block an element, so bound by arithmetic: use quantize where chance is not needed.
/// Source         Gupta et al. 2015 (1502.02551); NVIDIA's and Quartet's FP4 recipes round gradients so.
template <overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class Code, class Scale, int Rows, int Columns, class Layout>
status quantize_stochastic(B const& be, view<X, 2> x, block_scaled<Code, Scale, Rows, Columns, Layout> out, random_elements random,
                           quantize_options options = {}, report* report = nullptr) {
    validation check("quantize_stochastic");
    check.present("x", x);
    check_new_blocks(check, "out.codes", "out.scales", x, out);
    check_policy<Code>(check, "options.policy", options.policy);
    if (!check.ok() || x.empty()) return check.result;
    uint64_t const pitch = random.pitch != 0 ? random.pitch : static_cast<uint64_t>(x.extent[1]);
    quantize_checked<Overflow, Rule>(be, x, out, options, report, view<block_events, 2>{}, to_random{random.key, random.first, pitch});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
