// The linear layer y = x W^T and its two gradients, on operands stored in float or bf16.
// In FP8: nn/fp8_linear.hpp.
#pragma once

#include <keel/backend/matmul.hpp>

namespace keel {

template <class DY> struct linear_gradients {
    view<DY, 2> dx = {};    ///< [tokens, inputs], in dy's format; overwritten. Absent: not computed
    view<float, 2> dw = {}; ///< [outputs, inputs]; written or added to, by `grad`. Absent: not computed
};

struct linear_backward_options {
    grad_mode grad = overwrite; ///< of dw
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Bytes for linear and linear_backward.
template <matmul_backend B> int64_t linear_workspace(B const& be, int64_t tokens, int64_t inputs, int64_t outputs) {
    int64_t const forward = matmul_workspace(be, tokens, outputs, inputs), to_x = matmul_workspace(be, tokens, inputs, outputs),
                  to_w = matmul_workspace(be, outputs, inputs, tokens);
    int64_t const backward = to_x < to_w ? to_w : to_x;
    return forward < backward ? backward : forward;
}

/// y = x W^T.
///
/// Formula        y[t, o] = sum over i of x[t, i] * w[o, i], in the matrix order (backend/matmul.hpp), fp32, one rounding to y.
/// Shapes         x [tokens, inputs], w [outputs, inputs], y [tokens, outputs].
/// Formats        x and w float, bf16 or f16 (both bf16 is the fast case); y float, bf16 or f16.
/// Error          |y - exact| <= (inputs + 1) 2^-24 sum|x w| before the rounding to y,
///                where no partial result is subnormal or overflows.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace. Non-finite values as matmul.
/// Aliasing       y has memory of its own. Workspace: linear_workspace(be, tokens, inputs, outputs).
/// Cost           2 tokens inputs outputs flops.
template <matmul_backend B, class X, class W, class Y>
status linear(B const& be, view<X, 2> x, view<W, 2> w, view<Y, 2> y, workspace ws = {}) {
    validation check("linear");
    check.present("x", x).extent("w", w, 1, x.extent[1]).shape("y", y, x.extent[0], w.extent[0]);
    check.distinct("y", y).disjoint("y", y, x, w).enough(ws, matmul_workspace(be, x.extent[0], w.extent[0], x.extent[1]));
    if (!check.ok()) return check.result;
    return matmul(be, x, transposed(w), y, {}, ws);
}

/// The gradients of linear: dx = dy W and dw = dy^T x.
///
/// Formula        dx[t, i] = sum over o of dy[t, o] * w[o, i]; dw[o, i] = sum over t of dy[t, o] * x[t, i], each in the
///                matrix order (backend/matmul.hpp), fp32; under accumulate then fma(1, sum, dw).
/// Shapes         dy [tokens, outputs], x [tokens, inputs], w [outputs, inputs]; out.dx as x, out.dw as w, either absent.
///                Any strides.
/// Formats        dy, x and w float, bf16 or f16; dx in dy's format, rounded once; dw fp32.
/// Error          |dx - exact| <= (outputs + 1) 2^-24 sum|dy w| before the rounding to dx; |dw - exact| <= (tokens + 1)
///                2^-24 sum|dy x|, one more rounding under accumulate;
///                where no partial result is subnormal or overflows.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace. Non-finite values as matmul.
/// Aliasing       outputs have memory of their own. Workspace: linear_workspace(be, tokens, inputs, outputs).
/// Cost           2 tokens inputs outputs flops for each gradient.
template <matmul_backend B, class DY, class X, class W>
status linear_backward(B const& be, view<DY, 2> dy, view<X, 2> x, view<W, 2> w,
                       std::type_identity_t<linear_gradients<std::remove_const_t<DY>>> out, linear_backward_options options = {},
                       workspace ws = {}) {
    validation check("linear_backward");
    check.present("dy", dy).shape("x", x, dy.extent[0], w.extent[1]).extent("w", w, 0, dy.extent[1]);
    if (!out.dx.absent()) check.shape("out.dx", out.dx, x.extent[0], x.extent[1]).distinct("out.dx", out.dx);
    if (!out.dw.absent()) check.shape("out.dw", out.dw, w.extent[0], w.extent[1]).distinct("out.dw", out.dw);
    check.disjoint("out.dx", out.dx, dy).disjoint("out.dx", out.dx, x).disjoint("out.dx", out.dx, w);
    check.disjoint("out.dw", out.dw, dy).disjoint("out.dw", out.dw, x).disjoint("out.dw", out.dw, w).disjoint("out.dw", out.dw, out.dx);
    check.enough(ws, linear_workspace(be, x.extent[0], x.extent[1], w.extent[0]));
    if (!check.ok()) return check.result;
    if (!out.dx.absent())
        if (status const s = matmul(be, dy, w, out.dx, {}, ws); !s.ok()) return s;
    if (!out.dw.absent())
        return matmul(be, transposed(dy), x, out.dw, {.beta = options.grad == accumulate ? 1.0f : 0.0f}, ws);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
