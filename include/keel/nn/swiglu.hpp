// SwiGLU: y = silu(gate) * up, the gated activation of the feed-forward layer. Kernels: swiglu_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/nn/swiglu_rows.hpp>

namespace keel {

template <class DY> struct swiglu_gradients {
    view<DY, 2> dgate = {}, dup = {}; ///< [rows, width], in dy's format; overwritten
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Multiplies each element of `up` by silu(gate) = gate * sigmoid(gate).
///
/// Formula        y = silu(gate) * up, fp32, one rounding to y; silu within the error that core/math.hpp states.
/// Shapes         gate, up, y [rows, width]; the halves of a fused product are columns(v, 0, width) and columns(v, width, width).
/// Formats        gate and up of one format, y of any: float, bf16, f16.
/// Status         bad_shape, bad_stride (columns must be adjacent), bad_pointer, overlap.
/// Non-finite     NaN stays NaN; gate = -Inf gives silu = -0, gate = Inf gives Inf * up.
/// Aliasing       y may be gate or up itself. No workspace.
/// Cost           2 sizeof(X) + sizeof(Y) bytes an element.
/// Source         Shazeer 2020 (GLU variants), eq. 6 without bias, beta = 1.
template <row_backend B, class X, class U, class Y> status swiglu(B const& be, view<X, 2> gate, view<U, 2> up, view<Y, 2> y) {
    using format = std::remove_const_t<X>;
    static_assert(std::is_same_v<format, std::remove_const_t<U>>, "gate and up share one format");
    int64_t const row_count = gate.extent[0], width = gate.extent[1];
    validation check("swiglu");
    check.present("gate", gate).unit_stride("gate", gate);
    check.shape("up", up, row_count, width).unit_stride("up", up);
    check.shape("y", y, row_count, width).unit_stride("y", y).distinct("y", y);
    check.disjoint_or_same("y", y, gate).disjoint_or_same("y", y, up);
    if (!check.ok() || gate.empty()) return check.result;
    be.for_rows(row_count, width, swiglu_row<format, Y>{{gate, up}, y});
    return check.result;
}

/// The gradients of swiglu.
///
/// Formula        dup = dy * silu(gate); dgate = (dy * up) * silu'(gate), silu'(z) = s (1 + z (1 - s)) with s = sigmoid(z);
///                fp32, one rounding to each output.
/// Shapes         dy, gate, up, out.dgate, out.dup [rows, width], columns adjacent. Both outputs are wanted.
/// Formats        gate and up of one format, dy and the outputs of another: float, bf16, f16.
/// Error          before the rounding to the output: dup 6e-7 relative; dgate 2^-20 |dy up|;
///                where no partial result is subnormal or overflows.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Non-finite     stays in its element: NaN where dy, gate or up is NaN, or where an Inf meets a 0.
/// Aliasing       dgate may be gate itself and dup may be up itself (same format, same strides), one or both; else memory
///                of their own.
/// Cost           2 sizeof(X) + 3 sizeof(DY) bytes an element. No workspace.
template <row_backend B, class DY, class X, class U>
status swiglu_backward(B const& be, view<DY, 2> dy, view<X, 2> gate, view<U, 2> up,
                       std::type_identity_t<swiglu_gradients<std::remove_const_t<DY>>> out) {
    using format = std::remove_const_t<X>;
    static_assert(std::is_same_v<format, std::remove_const_t<U>>, "gate and up share one format");
    int64_t const row_count = dy.extent[0], width = dy.extent[1];
    validation check("swiglu_backward");
    check.present("dy", dy).unit_stride("dy", dy);
    check.shape("gate", gate, row_count, width).unit_stride("gate", gate);
    check.shape("up", up, row_count, width).unit_stride("up", up);
    check.shape("out.dgate", out.dgate, row_count, width).unit_stride("out.dgate", out.dgate).distinct("out.dgate", out.dgate);
    check.shape("out.dup", out.dup, row_count, width).unit_stride("out.dup", out.dup).distinct("out.dup", out.dup);
    check.disjoint("out.dgate", out.dgate, dy).disjoint("out.dgate", out.dgate, up).disjoint_or_same("out.dgate", out.dgate, gate);
    check.disjoint("out.dup", out.dup, dy).disjoint("out.dup", out.dup, gate).disjoint_or_same("out.dup", out.dup, up);
    check.disjoint("out.dup", out.dup, out.dgate);
    if (!check.ok() || dy.empty()) return check.result;
    be.for_rows(row_count, width, swiglu_backward_row<std::remove_const_t<DY>, format>{dy, gate, up, out.dgate, out.dup});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
