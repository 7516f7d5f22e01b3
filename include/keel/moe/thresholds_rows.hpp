// The mathematics of the thresholds: a token's level, and the bins that its experts' thresholds fall into.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/math.hpp>
#include <keel/moe/route_rows.hpp>
#include <keel/moe/threshold_counts.hpp>

namespace keel::inline KEEL_ABI {

/// s(z) to fp32's accuracy; softmax by the row's log-sum-exp. NaN for -Inf: the expert is masked, no bias brings it in.
template <class F> KEEL_FN F threshold_score(score_function score, F const& z, float log_sum) {
    F s = sigmoid(z);
    if (score == score_function::softmax) s = exp(z - F(log_sum));
    if (score == score_function::sqrt_softplus) s = sqrt(softplus(z));
    return select(both(is_non_finite(z), detail::is_negative(z)), F(as_float(nan_bits)), s);
}

/// a_t = s + bias of the (k + 1)-th choice; -Inf where that is masked, so that the others' thresholds are below every bin.
template <class L> struct threshold_level_row {
    view<L const, 2> logits;
    view<float const, 1> bias, log_sum;
    view<int32_t const, 2> ids; ///< [tokens, k + 1]
    score_function score;
    float* level;

    template <class G> KEEL_FN void operator()(G const& g, int64_t t) const {
        int64_t const id = ids(t, ids.extent[1] - 1);
        if (!g.leader() || id < 0) return;
        float const z = load_element(logits.at(t) + id), s = threshold_score(score, z, log_sum(t));
        level[t] = bits(z) == bits(-as_float(infinity_bits)) ? z : s + bias(id);
    }
};

/// Experts that one group counts for, all tokens in turn.
inline constexpr int64_t threshold_block = 64;

/// The bins of a block of experts.
template <class L> struct threshold_block_row {
    view<L const, 2> logits;
    view<float const, 1> log_sum;
    view<int32_t const, 2> ids; ///< -1 in a row of padding
    score_function score;
    threshold_range range;
    float const* level; ///< [tokens], or [tokens, experts] where each expert has its own
    bool own_levels;
    float* scratch; ///< [blocks, threshold_block]
    view<int64_t, 2> counts;

    template <class G> KEEL_FN void operator()(G const& g, int64_t block) const {
        using F = typename G::value;
        int64_t const first = block * threshold_block, left = logits.extent[1] - first, n = left < threshold_block ? left : threshold_block;
        float* const x = scratch + first;
        if (g.leader())
            for (int64_t e = first; e < first + n; ++e)
                for (int64_t b = 0; b < counts.extent[1]; ++b) counts(e, b) = 0;
        for (int64_t t = 0; t < logits.extent[0]; ++t) {
            if (ids(t, 0) < 0) continue;
            g.each(n, [&](auto at) {
                F const s = threshold_score(score, g.load(logits.at(t) + first, at), log_sum(t));
                F const a = own_levels ? g.load(level + t * logits.extent[1] + first, at) : F(level[t]);
                g.store(x, at, (a - s - F(range.low)) / F(range.width));
            });
            g.sync();
            if (g.leader())
                for (int64_t e = 0; e < n; ++e) ++counts(first + e, bin(x[e]));
            g.sync();
        }
    }
    KEEL_FN int64_t bin(float x) const {
        int64_t const bins = counts.extent[1];
        if (is_nan(x) || x >= static_cast<float>(bins)) return bins - 1;
        return x > 0.0f ? static_cast<int64_t>(x) : 0;
    }
};

} // namespace keel::inline KEEL_ABI
