// The balance line: what one layer's router is asked for and what its experts serve, side by side, and an alarm for the fault that
// hides in the difference.
//
//     demand 3.20x  served 1.25x  dropped 21.4%  dead 2  bias spread 0.031
//
// Print it for each layer; a mean over layers hides the one that fails.
#pragma once

#include <keel/moe/balance.hpp>
#include <keel/moe/capacity.hpp>

namespace keel {

/// All ratios are of exact counts. For one micro-batch, or for a step's pending demand.
struct balance_line {
    double demand_max = 0.0;     ///< largest demand over mean demand: the truth
    double served_max = 0.0;     ///< the same of what was served: flattering where tokens are dropped
    double demand_min = 0.0;     ///< smallest demand over the mean
    double demand_entropy = 0.0; ///< 1 for uniform demand
    double dropped = 0.0;        ///< share of assignments dropped
    int64_t dead = 0;            ///< experts with less than 1% of the mean demand
    float bias_spread = 0.0f;    ///< largest minus smallest bias
    int64_t bias_moved = 0;      ///< biases that the last update changed

    /// Demand is skewed, serving hides it, and nothing corrects it: demand_max exceeds served_max by more than `tolerance` of it while
    /// the last update moved no bias (or there never was one). In a run whose bias works this is never true.
    KEEL_FN constexpr bool concealed(double tolerance = 0.05) const {
        return bias_moved == 0 && demand_max - served_max > tolerance * served_max;
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Makes the line from one call's demand and served counts and the layer's state.
/// Status: bad_state where either was not filled, or where served exceeds demand; bad_shape where the experts differ.
KEEL_HOST status measure_balance(demand_counts const& demand, served_counts const& served, balance_state const& state, balance_line& line) {
    int64_t const experts = demand.experts();
    validation check("measure_balance");
    detail::check_balance(check, state);
    check.shape("served", served.counts(), experts).shape("state.bias", state.bias, experts);
    check.require(demand.filled(), status_code::bad_state, "demand", "demand that route has filled");
    check.require(served.filled(), status_code::bad_state, "served", "counts that apply_capacity has filled");
    for (int64_t e = 0; check.ok() && e < experts; ++e)
        if (served[e] > demand[e]) check.fail(status_code::bad_state, "served", "count", served[e], 0, "no more than the demand");
    if (!check.ok()) return check.result;
    line = {max_over_mean(demand), max_over_mean(served), min_over_mean(demand), load_entropy(demand), dropped_share(demand, served),
            dead_experts(demand), 0.0f, detail::balance_ledger{state.ledger}.moved()};
    uint32_t low = 0xffffffffu, high = 0;
    for (int64_t e = 0; e < experts; ++e) low = umin(low, ordered_word(state.bias(e))), high = umax(high, ordered_word(state.bias(e)));
    if (experts > 0) line.bias_spread = from_ordered_word(high) - from_ordered_word(low);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
