// The mathematics of the balancing bias: which way each expert's bias moves, from exact counts.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/core/view.hpp>
#include <keel/moe/threshold_counts.hpp>

namespace keel {

/// What b_e moves along each step, in units of `rate`:
///   sign          sgn(mean - D_e)                                    (2408.15664, DeepSeek-V3)
///   centred_sign  sgn(mean - D_e) - mean over experts of that        (torchtitan, Moonlight): the mean of the bias does not drift
///   proportional  1 / experts - D_e / sum(D)                         small where the load is near its mean
///   quantile      q_e - b_e - mean over experts of that, q_e the k / experts quantile of the expert's thresholds
///                 (threshold_counts.hpp): at a rate of 1 the bias jumps to where each expert has its share of these tokens
enum class balance_rule : uint8_t { sign, centred_sign, proportional, quantile };

struct balance_options {
    balance_rule rule = balance_rule::centred_sign;
    float rate = 1e-3f;    ///< in units of the score; quantile: the share of the way. 0 or above
    float deadband = 0.0f; ///< an expert with |mean - D_e| <= deadband * mean asks for no move; 0 or above
    bool frozen = false;   ///< the step is counted and done, the bias keeps its bytes: for phases in which the router must not change
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// What one update did, for the health line.
struct balance_moves {
    int64_t moved = 0;   ///< biases whose bits changed
    int64_t flipped = 0; ///< experts that ask for the other direction than when they last asked for one
};

/// b_e = fma(rate, direction_e, b_e). By counts the direction is one division of integers that are exact up to their conversion to fp32.
struct balance_row {
    view<int64_t const, 1> counts;
    view<float, 1> bias;
    view<int64_t, 1> signs;            ///< may be absent
    view<int64_t const, 2> thresholds; ///< for quantile, [experts, bins]
    threshold_range range;
    int64_t total;
    balance_options options;
    balance_moves* moves;

    /// experts * (mean - D_e), or 0 within the deadband, which is judged in fp32.
    KEEL_FN int64_t surplus(int64_t e) const {
        int64_t const s = total - counts.extent[0] * counts(e), size = s < 0 ? -s : s;
        return s == 0 || div(static_cast<float>(size), static_cast<float>(total)) <= options.deadband ? 0 : s;
    }
    KEEL_FN int64_t sign(int64_t e) const {
        if (options.rule != balance_rule::quantile) return surplus(e) > 0 ? 1 : surplus(e) < 0 ? -1 : 0;
        return to_quantile(e) > 0.0f ? 1 : to_quantile(e) < 0.0f ? -1 : 0;
    }

    /// q_e - b_e, or 0 within the deadband. q_e lies in the first bin up to which experts * count >= k * tokens, as far into it as
    /// the rest of the counts.
    KEEL_FN float to_quantile(int64_t e) const {
        if (surplus(e) == 0) return 0.0f;
        int64_t const experts = counts.extent[0];
        int64_t below = 0, bin = 0;
        while (bin + 1 < thresholds.extent[1] && experts * (below + thresholds(e, bin)) < total) below += thresholds(e, bin++);
        int64_t const here = thresholds(e, bin);
        float const part = here > 0 ? div(static_cast<float>(total - experts * below), static_cast<float>(experts * here)) : 0.0f;
        return fma(range.width, static_cast<float>(bin) + part, range.low) - bias(e);
    }

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        int64_t const experts = counts.extent[0];
        int64_t signs_sum = 0, surplus_sum = 0;
        double way_sum = 0.0;
        bool const by_quantile = options.rule == balance_rule::quantile;
        for (int64_t e = 0; e < experts; ++e) signs_sum += sign(e), surplus_sum += surplus(e);
        for (int64_t e = 0; by_quantile && e < experts; ++e) way_sum += static_cast<double>(to_quantile(e));
        float const mean_way = static_cast<float>(way_sum / static_cast<double>(experts));
        balance_moves out;
        for (int64_t e = 0; e < experts; ++e) {
            int64_t const own = sign(e);
            int64_t numerator = own, denominator = 1;
            if (options.rule == balance_rule::centred_sign) numerator = experts * own - signs_sum, denominator = experts;
            if (options.rule == balance_rule::proportional) // the deadband takes away a part that the others' mean then has to give
                numerator = surplus(e) - surplus_sum / experts, denominator = total > 0 ? experts * total : 1;
            float const direction =
                by_quantile ? to_quantile(e) - mean_way : div(static_cast<float>(numerator), static_cast<float>(denominator));
            float const next = fma(options.rate, direction, bias(e));
            out.moved += bits(next) != bits(bias(e)) ? 1 : 0;
            bias(e) = next;
            if (signs.absent() || own == 0) continue;
            out.flipped += own == -signs(e) ? 1 : 0;
            signs(e) = own;
        }
        *moves = out;
    }
};

/// b_e - mean(b)
struct centre_row {
    view<float, 1> bias;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        double sum = 0.0;
        for (int64_t e = 0; e < bias.extent[0]; ++e) sum += static_cast<double>(bias(e));
        double const mean = sum / static_cast<double>(bias.extent[0]);
        for (int64_t e = 0; e < bias.extent[0]; ++e) bias(e) = static_cast<float>(static_cast<double>(bias(e)) - mean);
    }
};

} // namespace keel::inline KEEL_ABI
