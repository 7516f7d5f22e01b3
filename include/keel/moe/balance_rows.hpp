// The mathematics of the balancing bias: which way each expert's bias moves, from exact counts.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// What b_e moves along each step, in units of `rate`:
///   sign          sgn(mean - D_e)                                    (2408.15664, DeepSeek-V3)
///   centred_sign  sgn(mean - D_e) - mean over experts of that        (torchtitan, Moonlight): the mean of the bias does not drift
///   proportional  1 / experts - D_e / sum(D)                         small where the load is near its mean
enum class balance_rule : uint8_t { sign, centred_sign, proportional };

struct balance_options {
    balance_rule rule = balance_rule::centred_sign;
    float rate = 1e-3f;    ///< in units of the score; 0 or above
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

/// b_e = fma(rate, direction_e, b_e). The direction is one division of integers that are exact up to their conversion to fp32.
struct balance_row {
    view<int64_t const, 1> counts;
    view<float, 1> bias;
    view<int64_t, 1> signs; ///< may be absent
    int64_t total;
    balance_options options;
    balance_moves* moves;

    /// experts * (mean - D_e), or 0 within the deadband, which is judged in fp32.
    KEEL_FN int64_t surplus(int64_t e) const {
        int64_t const s = total - counts.extent[0] * counts(e), size = s < 0 ? -s : s;
        return s == 0 || div(static_cast<float>(size), static_cast<float>(total)) <= options.deadband ? 0 : s;
    }
    KEEL_FN int64_t sign(int64_t e) const { return surplus(e) > 0 ? 1 : surplus(e) < 0 ? -1 : 0; }

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        int64_t const experts = counts.extent[0];
        int64_t signs_sum = 0, surplus_sum = 0;
        for (int64_t e = 0; e < experts; ++e) signs_sum += sign(e), surplus_sum += surplus(e);
        balance_moves out;
        for (int64_t e = 0; e < experts; ++e) {
            int64_t numerator = sign(e), denominator = 1;
            if (options.rule == balance_rule::centred_sign) numerator = experts * sign(e) - signs_sum, denominator = experts;
            if (options.rule == balance_rule::proportional) // the deadband takes away a part that the others' mean then has to give
                numerator = surplus(e) - surplus_sum / experts, denominator = total > 0 ? experts * total : 1;
            float const direction = div(static_cast<float>(numerator), static_cast<float>(denominator));
            float const next = fma(options.rate, direction, bias(e));
            out.moved += bits(next) != bits(bias(e)) ? 1 : 0;
            bias(e) = next;
            if (signs.absent() || sign(e) == 0) continue;
            out.flipped += sign(e) == -signs(e) ? 1 : 0;
            signs(e) = sign(e);
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
