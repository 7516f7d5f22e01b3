// The mathematics of softmax cross-entropy with z-loss, one row of logits at a time.
#pragma once

#include <keel/backend/row_memory.hpp>
#include <keel/core/math.hpp>
#include <keel/core/view.hpp>

namespace keel::inline KEEL_ABI {

/// Largest value of a row; NaN if there is one.
template <class G, class X> KEEL_FN float row_max(G const& g, X const* x, int64_t n) {
    using U = typename G::words;
    U top(lowest_ordered_word);
    g.each(n, [&](auto at) { top = umax(top, g.inside(at, ordered_word(g.load(x, at)))); });
    return from_ordered_word(g.max_bits(top));
}

/// log(sum(exp(x))) of a row as largest + rest, so that nothing overflows and a small rest beside a large maximum is not lost.
struct log_sum_exp {
    float largest, rest;
    KEEL_FN float value() const { return add(largest, rest); }
};
template <class G, class X> KEEL_FN log_sum_exp row_log_sum_exp(G const& g, X const* x, int64_t n) {
    using F = typename G::value;
    float const top = row_max(g, x, n);
    if ((bits(top) & magnitude_mask) >= infinity_bits) return {top, 0.0f};
    return {top, log(g.sum(n, [&](F const& acc, auto at) { return acc + g.inside(at, exp(g.load(x, at) - F(top))); }))};
}

/// loss = rest + (largest - x[target]) + z * lse^2, with lse = largest + rest.
template <class X> struct cross_entropy_row {
    view<X const, 2> logits;
    view<int32_t const, 1> targets;
    view<float, 1> loss, lse, lse_rest;
    int32_t ignored;
    float z_loss;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        int32_t const target = targets(row);
        log_sum_exp const sum = row_log_sum_exp(g, logits.at(row), logits.extent[1]);
        if (!g.leader()) return;
        lse(row) = sum.value();
        if (!lse_rest.absent()) lse_rest(row) = lost_in_sum(sum.largest, sum.rest);
        if (loss.absent()) return;
        if (target == ignored) {
            loss(row) = 0.0f;
            return;
        }
        float const likelihood = add(sum.rest, sum.largest - load_element(logits.at(row, target)));
        float const penalty = z_loss == 0.0f ? 0.0f : mul(z_loss, mul(sum.value(), sum.value())); // 0 * Inf would be NaN
        loss(row) = canonical(add(likelihood, penalty));
    }
};

/// dlogits = scale * ((1 + 2 z lse) * softmax - onehot), softmax = exp((x - lse) - lse_rest).
template <class X, class DX> struct cross_entropy_backward_row {
    view<X const, 2> logits;
    view<int32_t const, 1> targets;
    view<float const, 1> lse, lse_rest;
    view<DX, 2> dlogits;
    int32_t ignored;
    float z_loss, scale;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        using U = typename G::words;
        int32_t const target = targets(row);
        bool const skip = target == ignored;
        F const total(lse(row)), rest(lse_rest.absent() ? 0.0f : lse_rest(row)), weight(skip ? 0.0f : mul(scale, fma(2.0f * z_loss, lse(row), 1.0f))),
            minus_scale(-scale);
        U const chosen(static_cast<uint32_t>(target));
        g.each(logits.extent[1], [&](auto at) {
            F const p = exp(g.load(logits.at(row), at) - total - rest);
            F const d = select(eq(g.position(at), chosen), fma(p, weight, minus_scale), p * weight);
            g.store(dlogits.at(row), at, skip ? F(0.0f) : d);
        });
    }
};

} // namespace keel::inline KEEL_ABI
