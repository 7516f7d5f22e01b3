// rms_norm and add_rms_norm whose rows leave as block-scaled codes: the normalised row is never written.
#pragma once

#include <keel/norm/rms_norm.hpp>
#include <keel/quantize/quantize.hpp>
#include <keel/quantize/quantize_produced.hpp>

namespace keel::inline KEEL_ABI {

/// Normalises each row as rms_norm and quantises it as quantize: rms_norm_quantize<bf16, overflow::saturate>(be, x, delta, out).
///
/// `Via` is the rounding point, for which there is no default: float quantises the fp32 results, bf16 and f16 what a stored row of that format would hold.
/// The codes, scales and report are those of rms_norm to a matrix of Via and then quantize<Overflow, Rule> of it, bit for bit.
///
/// Formula        y = Via(rms_norm(x)), under cast_then_gain with u rounded to Via as well; codes and scales of y by `Rule`.
/// Shapes         x, out.codes [rows, columns], blocks 1 x C with C a divisor of 1024, or 1 x whole; out.scales [rows, ceil(columns / C)]; delta,
///                saved as rms_norm. Columns of x and of the codes adjacent.
/// Formats        as rms_norm and quantize.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (epsilon), overlap.
/// Non-finite     a row that rms_norm makes NaN has NaN codes (the scale by `policy`); see both.
/// Aliasing       outputs have memory of their own. No workspace; 4 KB of a row at a time lie on the stack.
/// Cost           sizeof(X) + 1 bytes an element; with 1 x whole x is read three times, twice from cache.
/// Gradient       rms_norm_backward: quantisation counts as the identity.
/// Source         vLLM quantises the fp32 results, FlashInfer the bf16 ones; the enum that they lack is `Via`.
template <class Via, overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class D, class Code, class Scale, int Columns,
          class Layout>
status rms_norm_quantize(B const& be, view<X, 2> x, view<D, 1> delta, block_scaled<Code, Scale, 1, Columns, Layout> out, rms_norm_saved saved = {},
                         rms_norm_options options = {}, quantize_options quantization = {}, report* report = nullptr) {
    validation check("rms_norm_quantize");
    check.present("x", x).unit_stride("x", x);
    check_norm(check, x, delta, saved, options.epsilon);
    check_new_blocks(check, "out.codes", "out.scales", x, out);
    check_policy<Code>(check, "quantization.policy", quantization.policy);
    check.unit_stride("out.codes", out.codes);
    check.disjoint("out.codes", out.codes, delta, saved.rrms).disjoint("out.scales", memory_of(out.scales), delta, saved.rrms);
    if (!check.ok() || x.empty()) return check.result;
    using source = rms_norm_source<std::remove_const_t<X>, std::remove_const_t<D>>;
    be.for_rows(x.extent[0], x.extent[1],
                quantize_produced_row<source, Via, decltype(out), Overflow, Rule, thread_backend<B>>{{x, delta, saved.rrms, options.epsilon, options.order},
                                                                                  out,
                                                                                  x.extent[1],
                                                                                  quantization.policy,
                                                                                  report});
    return check.result;
}

/// add_rms_norm with quantised rows: sum = x + residual, stored; codes of rms_norm(sum). Everything else as rms_norm_quantize and add_rms_norm, whose
/// backward is this one's too.
template <class Via, overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class R, class D, class Code, class Scale,
          int Columns, class Layout>
status add_rms_norm_quantize(B const& be, view<X, 2> x, view<R, 2> residual, view<D, 1> delta,
                             std::type_identity_t<view<std::remove_const_t<X>, 2>> sum, block_scaled<Code, Scale, 1, Columns, Layout> out,
                             rms_norm_saved saved = {}, add_rms_norm_options options = {}, quantize_options quantization = {},
                             report* report = nullptr) {
    validation check("add_rms_norm_quantize");
    check.present("x", x).unit_stride("x", x);
    check_norm(check, x, delta, saved, options.epsilon);
    check_norm_sum(check, x, residual, delta, sum, saved, options.rounding);
    check_new_blocks(check, "out.codes", "out.scales", x, out);
    check_policy<Code>(check, "quantization.policy", quantization.policy);
    check.unit_stride("out.codes", out.codes);
    check.disjoint("out.codes", out.codes, residual, delta, sum, saved.rrms);
    check.disjoint("out.scales", memory_of(out.scales), residual, delta, sum, saved.rrms);
    if (!check.ok() || x.empty()) return check.result;
    using source = add_rms_norm_source<std::remove_const_t<X>, std::remove_const_t<D>>;
    be.for_rows(x.extent[0], x.extent[1],
                quantize_produced_row<source, Via, decltype(out), Overflow, Rule, thread_backend<B>>{
                    {x, residual, delta, sum, saved.rrms, options.epsilon, options.order, options.rounding},
                    out,
                    x.extent[1],
                    quantization.policy,
                    report});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
