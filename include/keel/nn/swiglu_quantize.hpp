// SwiGLU whose rows leave as block-scaled codes: the product of the down projection wants no other form of them.
#pragma once

#include <keel/nn/swiglu.hpp>
#include <keel/quantize/quantize.hpp>
#include <keel/quantize/quantize_produced.hpp>

namespace keel::inline KEEL_ABI {

/// Computes silu(gate) * up as swiglu and quantises it as quantize: swiglu_quantize<float, overflow::saturate>(be, gate, up, out).
///
/// `Via` is the rounding point, for which there is no default: float quantises the fp32 results, bf16 and f16 what a stored row of that format would hold.
/// The codes, scales and report are those of swiglu to a matrix of Via and then quantize<Overflow, Rule> of it, bit for bit.
///
/// Formula        y = Via(silu(gate) * up); codes and scales of y by `Rule`.
/// Shapes         gate, up, out.codes [rows, width], blocks 1 x C with C a divisor of 1024, or 1 x whole. Columns adjacent.
/// Formats        gate and up of one format: float, bf16, f16; codes and scales as quantize.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Non-finite     as swiglu, then as quantize.
/// Aliasing       outputs have memory of their own. No workspace; 4 KB of a row at a time lie on the stack.
/// Cost           2 sizeof(X) + 1 bytes an element; with 1 x whole the row is computed twice.
/// Gradient       swiglu_backward: quantisation counts as the identity.
template <class Via, overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class U, class Code, class Scale, int Columns,
          class Layout>
status swiglu_quantize(B const& be, view<X, 2> gate, view<U, 2> up, block_scaled<Code, Scale, 1, Columns, Layout> out,
                       quantize_options quantization = {}, report* report = nullptr) {
    using format = std::remove_const_t<X>;
    static_assert(std::is_same_v<format, std::remove_const_t<U>>, "gate and up share one format");
    validation check("swiglu_quantize");
    check.present("gate", gate).unit_stride("gate", gate);
    check.shape("up", up, gate.extent[0], gate.extent[1]).unit_stride("up", up);
    check_new_blocks(check, "out.codes", "out.scales", gate, out);
    check_policy<Code>(check, "quantization.policy", quantization.policy);
    check.unit_stride("out.codes", out.codes);
    check.disjoint("out.codes", out.codes, up).disjoint("out.scales", memory_of(out.scales), up);
    if (!check.ok() || gate.empty()) return check.result;
    be.for_rows(gate.extent[0], gate.extent[1],
                quantize_produced_row<swiglu_source<format>, Via, decltype(out), Overflow, Rule, thread_backend<B>>{{gate, up}, out, gate.extent[1],
                                                                                                 quantization.policy, report});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
