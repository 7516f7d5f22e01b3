// The FP8 linear layer: its three products on block-scaled codes, promoted to fp32 at every 128 of k.
//
//     forward    y  = x W^T      x in 1x128 blocks along its inputs       W in 128x128 tiles, quantised once a step
//     backward   dx = dy W       dy in 1x128 blocks along the outputs     the same codes of W
//                dw = dy^T x     dy and x in 128x1 blocks along the tokens
//
// x and dy are quantised twice, each time from their high-precision values, since a product needs blocks along the dimension it
// sums over. Only x's codes along the tokens are kept for the backward: one byte an element instead of two or four.
#pragma once

#include <keel/nn/fp8_linear_plan.hpp>
#include <keel/nn/linear.hpp>
#include <keel/quantize/quantize.hpp>
#include <keel/quantize/scaled_matmul.hpp>

namespace keel::inline KEEL_ABI {

/// Memory for `row_count` x `columns` in blocks of type Q, taken from `ws`.
template <class Q> KEEL_FN Q take_blocks(workspace& ws, int64_t row_count, int64_t column_count) {
    int64_t const sr = Q::scale_rows(row_count), sc = Q::scale_columns(column_count);
    auto* const codes = ws.take<typename Q::code>(row_count * column_count);
    auto* const scales = ws.take<typename Q::scale_storage>(sr * sc);
    return {rows(codes, row_count, column_count), rows(scales, sr, sc)};
}
template <class Q> KEEL_FN int64_t block_bytes(int64_t row_count, int64_t column_count) {
    return workspace_bytes<typename Q::code>(row_count * column_count) +
           workspace_bytes<typename Q::scale_storage>(Q::scale_rows(row_count) * Q::scale_columns(column_count));
}

/// Bytes for fp8_linear and fp8_linear_backward.
template <matmul_backend B, class Scale, class Code>
int64_t fp8_linear_workspace(B const& be, fp8_linear_plan<Scale, Code> const& plan) {
    using p = fp8_linear_plan<Scale, Code>;
    int64_t const t = plan.tokens, i = plan.inputs, o = plan.outputs;
    int64_t const forward = block_bytes<typename p::activation_blocks>(t, i) + scaled_matmul_workspace(be, t, o, i);
    int64_t const to_x = scaled_matmul_workspace(be, t, i, o), to_w = scaled_matmul_workspace(be, o, i, t);
    int64_t const backward = block_bytes<typename p::activation_blocks>(t, o) +
                             block_bytes<typename p::token_blocks>(t, o) + (to_x < to_w ? to_w : to_x);
    return workspace_total(forward < backward ? backward : forward);
}

/// y = x W^T through codes of x and W.
///
/// Formula        x is quantised (quantize<overflow::saturate_finite>), in 1x128 blocks for the product and, if `saved` is present, in 128x1
///                blocks for the backward; y = scaled_matmul(x, W^T).
/// Shapes         x [tokens, inputs], w: plan.weight's codes of [outputs, inputs], y [tokens, outputs], saved: plan.saved or absent.
/// Formats        x float, bf16 or f16; y float or bf16, one rounding.
/// Error          that of scaled_matmul against the codes; the codes are within 2^-4 (e4m3) of an element no smaller than
///                2^-13 of its block's largest. For normal x and W y is off by 4 % (Frobenius norm), below 6 % in the test.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace.
/// Aliasing       y, saved.codes and saved.scales have memory of their own, apart from each other and from x and w.
/// Non-finite     a NaN or Inf element stays one in its code (in e4m3 both are NaN), so it stays visible: its row of y is NaN or Inf.
/// Report         optional, of the quantisations. Workspace: fp8_linear_workspace(be, plan).
/// Source         DeepSeek-V3 (2412.19437), section 3.3.
template <matmul_backend B, class Scale, class Code, class X, class Y>
status fp8_linear(B const& be, fp8_linear_plan<Scale, Code> const& plan, view<X, 2> x,
                  std::type_identity_t<typename fp8_linear_plan<Scale, Code>::read_weight_blocks> w, view<Y, 2> y,
                  std::type_identity_t<typename fp8_linear_plan<Scale, Code>::token_blocks> saved = {},
                  report* report = nullptr, workspace ws = {}) {
    validation check("fp8_linear");
    check.shape("x", x, plan.tokens, plan.inputs).unit_stride("x", x);
    check.shape("y", y, plan.tokens, plan.outputs).distinct("y", y).disjoint("y", y, x);
    check_blocks(check, "w.codes", "w.scales", w, plan.outputs, plan.inputs);
    check.disjoint("y", y, w.codes).disjoint("y", y, w.scales);
    bool const keeps = !saved.codes.absent() || !saved.scales.absent();
    if (keeps) {
        check_new_blocks(check, "saved.codes", "saved.scales", x, saved);
        check.disjoint("saved.codes", saved.codes, y, w.codes, w.scales);
        check.disjoint("saved.scales", saved.scales, y, w.codes, w.scales);
    }
    check.enough(ws, fp8_linear_workspace(be, plan));
    if (!check.ok() || y.empty()) return check.result;
    auto const along_inputs =
        take_blocks<typename fp8_linear_plan<Scale, Code>::activation_blocks>(ws, plan.tokens, plan.inputs);
    status const quantised = keeps ? quantize_pair<overflow::saturate_finite>(be, x, along_inputs, saved, {}, report)
                                   : quantize<overflow::saturate_finite>(be, x, along_inputs, {}, report);
    if (!quantised.ok()) return quantised;
    return scaled_matmul(be, along_inputs, transposed(w), y, {}, ws);
}

/// The gradients: dx = dy W and dw = dy^T x, with dy quantised along the outputs and along the tokens, and x as saved.
///
/// Formula        dy is quantised twice (quantize_pair<overflow::saturate_finite>); dx = scaled_matmul(dy, W), dw =
///                scaled_matmul(dy^T, x), under accumulate with beta = 1. Gradient of the quantisations: straight through.
/// Shapes         dy [tokens, outputs], out.dx [tokens, inputs] and out.dw [outputs, inputs], either absent; w and saved
///                as in the forward, read only (also where dw is absent).
/// Formats        dy float, bf16 or f16; dx in dy's format, one rounding; dw fp32.
/// Error, status, non-finite values, report and workspace as fp8_linear: a bad element of dy reaches its row of dx and its
/// row of dw.
/// Aliasing       outputs have memory of their own, apart from dy, w and saved.
/// Cost           the two products; dy is read twice.
template <matmul_backend B, class Scale, class Code, class DY>
status fp8_linear_backward(B const& be, fp8_linear_plan<Scale, Code> const& plan, view<DY, 2> dy,
                           std::type_identity_t<typename fp8_linear_plan<Scale, Code>::read_weight_blocks> w,
                           std::type_identity_t<typename fp8_linear_plan<Scale, Code>::read_token_blocks> saved,
                           std::type_identity_t<linear_gradients<std::remove_const_t<DY>>> out,
                           linear_backward_options options = {}, report* report = nullptr, workspace ws = {}) {
    using p = fp8_linear_plan<Scale, Code>;
    int64_t const t = plan.tokens, o = plan.outputs, i = plan.inputs;
    validation check("fp8_linear_backward");
    check.shape("dy", dy, t, o).unit_stride("dy", dy);
    check_blocks(check, "w.codes", "w.scales", w, o, i);
    check_blocks(check, "saved.codes", "saved.scales", saved, t, i);
    auto const check_gradient = [&](char const* name, auto const& gradient, int64_t row_count, int64_t column_count) {
        if (gradient.absent()) return;
        check.shape(name, gradient, row_count, column_count).distinct(name, gradient).disjoint(name, gradient, dy);
        check.disjoint(name, gradient, w.codes).disjoint(name, gradient, w.scales);
        check.disjoint(name, gradient, saved.codes).disjoint(name, gradient, saved.scales);
    };
    check_gradient("out.dx", out.dx, t, i);
    check_gradient("out.dw", out.dw, o, i);
    check.disjoint("out.dw", out.dw, out.dx).enough(ws, fp8_linear_workspace(be, plan));
    if (!check.ok()) return check.result;
    auto const along_outputs = take_blocks<typename p::activation_blocks>(ws, t, o);
    auto const along_tokens = take_blocks<typename p::token_blocks>(ws, t, o);
    status const quantised = quantize_pair<overflow::saturate_finite>(be, dy, along_outputs, along_tokens, {}, report);
    if (!quantised.ok()) return quantised;
    if (!out.dx.absent())
        if (status const s = scaled_matmul(be, along_outputs, w, out.dx, {}, ws); !s.ok()) return s;
    if (!out.dw.absent())
        return scaled_matmul(be, transposed(along_tokens), saved, out.dw,
                             {.beta = options.grad == accumulate ? 1.0f : 0.0f}, ws);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
