// Zero-centred RMSNorm: y = x / rms(x) * (1 + delta), its backward, and both fused with the residual sum.
//
// delta is stored instead of the gain, starts at 0 and is weight-decayed by the optimiser, so the gain is pulled back to 1
// instead of being used as a volume knob without a stop. Kernels: rms_norm_rows.hpp.
#pragma once

#include <keel/backend/column_sum.hpp>
#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/norm/rms_norm_rows.hpp>

namespace keel {

struct rms_norm_options {
    float epsilon = 1e-6f; ///< added to mean(x^2), in units of x squared; at least 2^-126
    cast_order order = cast_order::gain_then_cast;
};

/// What the forward saved, as the backward reads it: 1 / rms of each row, fp32.
struct rms_norm_kept {
    view<float const, 1> rrms = {};
};
/// What the forward saves for the backward, caller-owned. Absent: not saved.
struct rms_norm_saved {
    view<float, 1> rrms = {};
    KEEL_FN constexpr operator rms_norm_kept() const { return {rrms}; }
};

template <class DY> struct rms_norm_gradients {
    view<DY, 2> dx = {};        ///< [rows, columns], in dy's format; overwritten. Absent: not computed
    view<float, 1> ddelta = {}; ///< [columns]; written or added to, by `grad`. Absent: not computed
};

struct rms_norm_backward_options {
    grad_mode grad = overwrite; ///< of ddelta
};

struct add_rms_norm_options {
    float epsilon = 1e-6f;
    cast_order order = cast_order::gain_then_cast;
    residual_rounding rounding = residual_rounding::from_stored;
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Bytes for rms_norm_backward and add_rms_norm_backward (only where ddelta is wanted).
KEEL_FN int64_t rms_norm_backward_workspace(int64_t row_count, int64_t column_count) {
    return workspace_total(column_sum_workspace(row_count, column_count));
}

// What the calls that normalise require of their arguments but the output.

template <class X, class D>
KEEL_HOST void check_norm(validation& check, view<X, 2> x, view<D, 1> delta, rms_norm_saved saved, float epsilon) {
    if (!delta.absent()) check.shape("delta", delta, x.extent[1]).unit_stride("delta", delta);
    if (!saved.rrms.absent()) check.shape("saved.rrms", saved.rrms, x.extent[0]).distinct("saved.rrms", saved.rrms);
    check.require(epsilon >= 0x1p-126f && epsilon <= 0x1.fffffep127f, status_code::bad_option, "options.epsilon",
                  "a finite number of at least 2^-126");
    check.disjoint("saved.rrms", saved.rrms, x, delta);
}
template <class X, class R, class D, class S>
KEEL_HOST void check_norm_sum(validation& check, view<X, 2> x, view<R, 2> residual, view<D, 1> delta, view<S, 2> sum,
                              rms_norm_saved saved, residual_rounding rounding) {
    static_assert(std::is_same_v<std::remove_const_t<X>, std::remove_const_t<R>>, "x and residual share one format");
    check.shape("residual", residual, x.extent[0], x.extent[1]).unit_stride("residual", residual);
    check.shape("sum", sum, x.extent[0], x.extent[1]).unit_stride("sum", sum).distinct("sum", sum);
    check.disjoint("sum", sum, delta).disjoint("saved.rrms", saved.rrms, residual, sum);
    if (rounding == residual_rounding::from_sum)
        check.disjoint("sum", sum, x, residual);
    else
        check.disjoint_or_same("sum", sum, x).disjoint_or_same("sum", sum, residual);
}

/// Normalises each row by its root mean square and applies the gain 1 + delta.
///
/// Formula        r = 1 / sqrt(sum(x^2) / columns + epsilon); u = x * r; y = fma(u, delta, u). The sum in THE reduction order,
///                fp32. Where it would overflow or vanish, x and epsilon are scaled by a power of two first, without
///                rounding.
/// Shapes         x, y [rows, columns], delta [columns] or absent (gain 1), saved.rrms [rows] or absent. Rows may be strided,
///                columns must be adjacent.
/// Formats        x and delta any of float, bf16, f16 and raw FP8; y float, bf16 or f16. One rounding, to y; with cast_order::cast_then_gain one more, of u.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (epsilon below 2^-126 or not finite), overlap.
/// Non-finite     a NaN in a row makes the row NaN; an Inf makes that element NaN and the others 0. A zero row gives zeros.
/// Aliasing       y may be x itself (same format, same strides) under gain_then_cast.
/// Cost           reads x twice (the second time from cache), writes y: sizeof(X) + sizeof(Y) bytes an element. No workspace.
/// Source         Zhang & Sennrich 2019, eq. 4, with gain 1 + delta as in Gemma and Qwen3-Next.
template <row_backend B, class X, class D, class Y> status rms_norm(B const& be, view<X, 2> x, view<D, 1> delta,
                                                                    view<Y, 2> y, rms_norm_saved saved = {},
                                                                    rms_norm_options options = {}) {
    int64_t const row_count = x.extent[0], column_count = x.extent[1];
    validation check("rms_norm");
    check.present("x", x).unit_stride("x", x);
    check_norm(check, x, delta, saved, options.epsilon);
    check.shape("y", y, row_count, column_count).unit_stride("y", y).distinct("y", y);
    check.disjoint_or_same("y", y, x).disjoint("y", y, delta).disjoint("saved.rrms", saved.rrms, y);
    if (options.order == cast_order::cast_then_gain) check.disjoint("y", y, x);
    if (!check.ok()) return check.result;
    if (x.empty()) return check.result;
    using source = rms_norm_source<std::remove_const_t<X>, std::remove_const_t<D>>;
    be.for_rows(row_count, column_count, stored_norm_row<source, Y>{{x, delta, saved.rrms, options.epsilon, options.order}, y});
    return check.result;
}

/// The gradients of rms_norm.
///
/// Formula        g = fma(dy, delta, dy); u = x * r; c = sum(g * u) / columns; dx = r * fma(-c, u, g) (exact for epsilon > 0 too);
///                ddelta = sum over rows of dy * u, in the column order of core/reduce.hpp. All fp32. A down-cast before
///                the gain counts as the identity.
/// Shapes         dy, x, out.dx [rows, columns], delta [columns] or absent, saved.rrms [rows] from the forward, out.ddelta
///                [columns]; an absent gradient is not computed. Rows may be strided (an input's stride may be 0), columns
///                must be adjacent.
/// Formats        x and delta as rms_norm; dy float, bf16 or f16, dx the same, rounded once; ddelta fp32, overwritten or
///                added to.
/// Error          |dx - exact| <= 2^-18 r (|g| + |u| mean|g u|) before the rounding to dx, up to 4099 columns; |ddelta -
///                exact| <= (68 + rows / 64) 2^-24 sum|dy u| (one more rounding under accumulate); both for the r that was
///                saved, where no partial result is subnormal or overflows.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace.
/// Non-finite     a NaN or Inf stays in its row of dx, and reaches its column of ddelta (from x or dy) or all (from r).
/// Aliasing       out.dx may be dy itself when ddelta is absent; otherwise outputs have memory of their own.
/// Workspace      rms_norm_backward_workspace(rows, columns) where ddelta is wanted.
/// Cost           dx: reads dy and x twice (the second time from cache), writes dx; ddelta: reads dy and x once more.
/// Source         the derivative of Zhang & Sennrich 2019, eq. 4.
template <row_backend B, class DY, class X, class D>
status rms_norm_backward(B const& be, view<DY, 2> dy, view<X, 2> x, view<D, 1> delta, rms_norm_kept saved,
                         std::type_identity_t<rms_norm_gradients<std::remove_const_t<DY>>> out,
                         rms_norm_backward_options options = {}, workspace ws = {}) {
    return add_rms_norm_backward(be, dy, view<DY, 2>{}, x, delta, saved, out, options, ws, "rms_norm_backward");
}

/// sum = x + residual, stored with one rounding; y = rms_norm(sum).
///
/// Formula        as rms_norm of the stored sum, or of the unrounded one (options.rounding).
/// Shapes         x, residual, sum, y [rows, columns]; x, residual and sum of one format.
/// Aliasing       sum may be x or residual itself under residual_rounding::from_stored. y has memory of its own.
/// Cost           reads x, residual, writes sum, y.
template <row_backend B, class X, class R, class D, class Y>
status add_rms_norm(B const& be, view<X, 2> x, view<R, 2> residual, view<D, 1> delta,
                    std::type_identity_t<view<std::remove_const_t<X>, 2>> sum, view<Y, 2> y, rms_norm_saved saved = {},
                    add_rms_norm_options options = {}) {
    int64_t const row_count = x.extent[0], column_count = x.extent[1];
    validation check("add_rms_norm");
    check.present("x", x).unit_stride("x", x);
    check_norm(check, x, delta, saved, options.epsilon);
    check_norm_sum(check, x, residual, delta, sum, saved, options.rounding);
    check.shape("y", y, row_count, column_count).unit_stride("y", y).distinct("y", y);
    check.disjoint("y", y, x, residual, sum, delta).disjoint("saved.rrms", saved.rrms, y);
    if (!check.ok()) return check.result;
    if (x.empty()) return check.result;
    using source = add_rms_norm_source<std::remove_const_t<X>, std::remove_const_t<D>>;
    be.for_rows(row_count, column_count,
                stored_norm_row<source, Y>{
                    {x, residual, delta, sum, saved.rrms, options.epsilon, options.order, options.rounding}, y});
    return check.result;
}

/// The gradients of add_rms_norm: dx (= dresidual) = rms_norm's dx + dsum, with dsum the gradient that reaches the stored sum
/// from the residual stream; it is added after the norm's Jacobian, never passed through it. dsum absent: none.
///
/// Formula        as rms_norm_backward of `sum`, the last step being dx = fma(fma(-c, u, g), r, dsum): one rounding to dx.
/// Shapes         dsum [rows, columns], in dy's format; `sum` is what the forward stored. The rest as rms_norm_backward,
///                and so are formats, status, workspace and error (dsum adds a rounding at the size of the result).
/// Rounding       under residual_rounding::from_sum the forward normalised an unrounded sum: u then differs from the
///                forward's by that rounding, at most half an ulp of sum's format.
/// Non-finite     as rms_norm_backward; a NaN or Inf of dsum stays in its element.
/// Aliasing       out.dx may be dsum itself, or dy itself when ddelta is absent.
/// Cost           as rms_norm_backward, and dsum is read once.
template <row_backend B, class DY, class DS, class X, class D>
status add_rms_norm_backward(B const& be, view<DY, 2> dy, view<DS, 2> dsum, view<X, 2> sum, view<D, 1> delta,
                             rms_norm_kept saved,
                             std::type_identity_t<rms_norm_gradients<std::remove_const_t<DY>>> out,
                             rms_norm_backward_options options = {}, workspace ws = {},
                             char const* name = "add_rms_norm_backward") {
    static_assert(std::is_same_v<std::remove_const_t<DY>, std::remove_const_t<DS>>, "dy and dsum share one format");
    using dy_format = std::remove_const_t<DY>;
    using x_format = std::remove_const_t<X>;
    int64_t const row_count = sum.extent[0], column_count = sum.extent[1];
    bool const wants_dx = !out.dx.absent(), wants_ddelta = !out.ddelta.absent();
    validation check(name);
    char const* const input = dsum.absent() ? "x" : "sum";
    check.present(input, sum).unit_stride(input, sum);
    check.shape("dy", dy, row_count, column_count).unit_stride("dy", dy);
    if (!dsum.absent()) check.shape("dsum", dsum, row_count, column_count).unit_stride("dsum", dsum);
    if (!delta.absent()) check.shape("delta", delta, column_count).unit_stride("delta", delta);
    check.shape("saved.rrms", saved.rrms, row_count);
    if (wants_dx)
        check.shape("out.dx", out.dx, row_count, column_count).unit_stride("out.dx", out.dx).distinct("out.dx", out.dx);
    if (wants_ddelta) {
        check.shape("out.ddelta", out.ddelta, column_count).unit_stride("out.ddelta", out.ddelta);
        check.enough(ws, rms_norm_backward_workspace(row_count, column_count)).disjoint("out.dx", out.dx, dy);
    }
    check.disjoint_or_same("out.dx", out.dx, dy).disjoint_or_same("out.dx", out.dx, dsum);
    check.disjoint("out.dx", out.dx, sum, delta, saved.rrms);
    check.disjoint("out.ddelta", out.ddelta, out.dx, dy, dsum, sum, delta, saved.rrms);
    if (!check.ok()) return check.result;
    if (wants_dx && !sum.empty())
        be.for_rows(row_count, column_count,
                    rms_norm_backward_row<dy_format, x_format, std::remove_const_t<D>>{dy, sum, delta, dsum, saved.rrms,
                                                                                       out.dx});
    if (wants_ddelta && column_count > 0)
        column_sum(be, row_count, column_count, rms_norm_gain_term<dy_format, x_format>{dy, sum, saved.rrms},
                   out.ddelta.data, options.grad, ws);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
