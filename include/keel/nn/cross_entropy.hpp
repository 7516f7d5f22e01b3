// Softmax cross-entropy with z-loss, and its gradient. Kernels: cross_entropy_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/nn/cross_entropy_rows.hpp>

namespace keel {

struct cross_entropy_options {
    float z_loss = 0.0f;  ///< coefficient of lse^2, which keeps the logits' scale from drifting (PaLM: 1e-4)
    int32_t ignored = -1; ///< rows with this target have loss 0 and gradient 0
    float scale = 1.0f;   ///< of the gradient, e.g. 1 / number of counted rows; the loss is not scaled
};

/// What the forward saved, as the backward reads it.
struct cross_entropy_kept {
    view<float const, 1> lse = {}, lse_rest = {};
};
/// What the forward saves for the backward, caller-owned.
struct cross_entropy_saved {
    view<float, 1> lse = {};      ///< [rows] log-sum-exp of the logits, natural log
    view<float, 1> lse_rest = {}; ///< [rows] what rounding took from lse, so that large logits keep their gradient's digits; or absent
    KEEL_FN constexpr operator cross_entropy_kept() const { return {lse, lse_rest}; }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// A target outside [0, columns) that is not `ignored`, or -1 as a row index where all are good. Reads host memory.
KEEL_FN int64_t first_bad_target(view<int32_t const, 1> targets, int64_t column_count, int32_t ignored) {
    for (int64_t i = 0; i < targets.extent[0]; ++i)
        if (targets(i) != ignored && (targets(i) < 0 || targets(i) >= column_count)) return i;
    return -1;
}

KEEL_HOST void check_cross_entropy(validation& check, cross_entropy_options const& options) {
    check.require(magnitude(options.z_loss) < infinity_bits, status_code::bad_option, "options.z_loss", "a finite number");
    check.require(magnitude(options.scale) < infinity_bits, status_code::bad_option, "options.scale", "a finite number");
}

/// The loss of each row of logits against its target.
///
/// Formula        rest = log(sum(exp(x - max))), the sum in THE reduction order, fp32; loss = rest + (max - x[target]) + z_loss * lse^2,
///                so a small loss beside large logits keeps its digits; lse = max + rest, and lse_rest
///                what that sum's rounding took, exactly.
/// Shapes         logits [rows, columns], targets [rows] (0 <= target < columns, or options.ignored), loss [rows] or absent,
///                saved.lse [rows], saved.lse_rest [rows] or absent. loss is in nats; divide by ln 2 for bits.
/// Formats        logits float, bf16 or f16; loss and lse fp32.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (z_loss or scale not finite; a target out of range, on host
///                backends).
/// Non-finite     a NaN or +Inf among a row's logits gives lse = NaN or Inf and a non-finite loss for that row alone; -Inf logits
///                are masked classes; a row of nothing but -Inf has lse = -Inf and a NaN loss and gradient. With a z_loss, lse^2
///                is Inf from |lse| = 1.8e19 on.
/// Aliasing       outputs have memory of their own. No workspace.
/// Cost           reads the logits twice (the second time from cache).
template <row_backend B, class X, class T> status cross_entropy(B const& be, view<X, 2> logits, view<T, 1> targets,
                                                                view<float, 1> loss, cross_entropy_saved saved,
                                                                cross_entropy_options options = {}) {
    int64_t const row_count = logits.extent[0], column_count = logits.extent[1];
    validation check("cross_entropy");
    check.present("logits", logits).unit_stride("logits", logits);
    check.shape("targets", targets, row_count);
    if (!loss.absent())
        check.shape("loss", loss, row_count).distinct("loss", loss).disjoint("loss", loss, logits, targets);
    check.shape("saved.lse", saved.lse, row_count).distinct("saved.lse", saved.lse);
    check.disjoint("saved.lse", saved.lse, logits, targets, loss);
    if (!saved.lse_rest.absent())
        check.shape("saved.lse_rest", saved.lse_rest, row_count).distinct("saved.lse_rest", saved.lse_rest);
    check.disjoint("saved.lse_rest", saved.lse_rest, logits, targets, loss, saved.lse);
    check.require(row_count == 0 || column_count > 0, status_code::bad_shape, "logits", "columns", column_count,
                  "1 or more");
    check_cross_entropy(check, options);
    if (!check.ok()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host)
        if (int64_t const bad = first_bad_target(targets, column_count, options.ignored); bad >= 0)
            return check
                .fail(status_code::bad_option, "targets", "value", targets(bad), 0,
                      "an index in [0, columns), or options.ignored")
                .result;
    be.for_rows(
        row_count, column_count,
        cross_entropy_row<std::remove_const_t<X>>{logits, targets, loss, saved.lse, saved.lse_rest, options.ignored,
                                                  options.z_loss});
    return check.result;
}

/// The gradient of options.scale * sum(loss).
///
/// Formula        p = exp((x - lse) - lse_rest), lse_rest = 0 where absent; dlogits = (scale * fma(2 z_loss, lse, 1)) * p,
///                less scale at the target by the same fma; fp32, one rounding to dlogits. Rows with the ignored target: +0.
/// Shapes         logits, dlogits [rows, columns], columns adjacent; targets, saved.lse [rows], saved.lse_rest [rows] or
///                absent. options as in the forward.
/// Formats        logits and dlogits any of float, bf16 or f16.
/// Error          |p - exact| <= 2^-21 up to 2051 columns with lse_rest, whatever the logits' size; without, 2^-24 |lse| p
///                more: 0.6 % at logits of 1e5.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (as the forward).
/// Non-finite     a row whose lse is not finite is NaN; a -Inf logit beside finite ones has p = 0.
/// Aliasing       dlogits may be logits itself (same format, same strides); else memory of its own. No workspace.
/// Cost           sizeof(X) + sizeof(DX) bytes an element.
/// Source         the derivative of softmax cross-entropy; z-loss as in PaLM (2204.02311), section 5.
template <row_backend B, class X, class T, class DX>
status cross_entropy_backward(B const& be, view<X, 2> logits, view<T, 1> targets, cross_entropy_kept saved,
                              view<DX, 2> dlogits, cross_entropy_options options = {}) {
    int64_t const row_count = logits.extent[0], column_count = logits.extent[1];
    validation check("cross_entropy_backward");
    check.present("logits", logits).unit_stride("logits", logits);
    check.shape("targets", targets, row_count).shape("saved.lse", saved.lse, row_count);
    if (!saved.lse_rest.absent()) check.shape("saved.lse_rest", saved.lse_rest, row_count);
    check.shape("dlogits", dlogits, row_count, column_count)
        .unit_stride("dlogits", dlogits)
        .distinct("dlogits", dlogits);
    check.disjoint_or_same("dlogits", dlogits, logits).disjoint("dlogits", dlogits, targets, saved.lse, saved.lse_rest);
    check_cross_entropy(check, options);
    if (!check.ok() || logits.empty()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host)
        if (int64_t const bad = first_bad_target(targets, column_count, options.ignored); bad >= 0)
            return check
                .fail(status_code::bad_option, "targets", "value", targets(bad), 0,
                      "an index in [0, columns), or options.ignored")
                .result;
    be.for_rows(row_count, column_count,
                cross_entropy_backward_row<std::remove_const_t<X>, DX>{logits, targets, saved.lse, saved.lse_rest, dlogits,
                                                                       options.ignored, options.z_loss, options.scale});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
