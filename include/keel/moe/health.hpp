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

/// All ratios are of exact counts, both of the same tokens: of one call of route and apply_capacity, or of sums by add_counts.
struct balance_line {
    double demand_max = 0.0;     ///< largest demand over mean demand: the truth
    double served_max = 0.0;     ///< the same of what was served: flattering where tokens are dropped
    double demand_min = 0.0;     ///< smallest demand over the mean
    double served_min = 0.0;
    double demand_entropy = 0.0; ///< 1 for uniform demand
    double served_entropy = 0.0;
    double dropped = 0.0;        ///< share of assignments dropped
    int64_t dead = 0;            ///< experts with less than 1% of the mean demand
    float bias_spread = 0.0f;    ///< largest minus smallest bias
    int64_t bias_nan = 0;        ///< biases that are NaN: update_balance refuses them
    int64_t bias_moved = 0;      ///< biases that the last update changed
    int64_t still_updates = 0;   ///< updates in a row, up to the last one, that changed none

    /// Demand is skewed, serving hides it, and nothing corrects it: demand_max exceeds served_max by more than `tolerance` of it while
    /// the last two updates moved no bias: they were fed with something else than this demand, or at rate 0. One still update may
    /// have seen exactly even demand; two in a row do not happen to a bias that works.
    KEEL_FN constexpr bool concealed(double tolerance = 0.05) const {
        return still_updates >= 2 && demand_max - served_max > tolerance * served_max;
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Makes the line from the demand and the served counts of the same tokens, and the layer's state.
/// Status: bad_state where either was not filled, where they are of different tokens or k, or where served exceeds demand; bad_shape
/// where the experts differ.
KEEL_HOST status measure_balance(demand_counts const& demand, served_counts const& served, balance_state const& state, balance_line& line) {
    int64_t const experts = demand.experts();
    validation check("measure_balance");
    detail::check_balance(check, state);
    check.shape("served", served.counts(), experts).shape("state.bias", state.bias, experts);
    check.require(demand.filled(), status_code::bad_state, "demand", "demand that route has filled");
    check.require(served.filled(), status_code::bad_state, "served", "counts that apply_capacity has filled");
    check.require(served.tokens() == demand.tokens(), status_code::bad_state, "served", "tokens", served.tokens(), "those of the demand");
    check.require(served.per_token() == demand.per_token(), status_code::bad_state, "served", "experts a token", served.per_token(),
                  "the k of the demand");
    for (int64_t e = 0; check.ok() && e < experts; ++e)
        if (served[e] - demand[e] > served.rerouted()) check.fail(status_code::bad_state, "served", "count", served[e], 0, "no more than the demand");
    if (!check.ok()) return check.result;
    detail::balance_ledger const ledger{state.ledger};
    line = {.demand_max = max_over_mean(demand),
            .served_max = max_over_mean(served),
            .demand_min = min_over_mean(demand),
            .served_min = min_over_mean(served),
            .demand_entropy = load_entropy(demand),
            .served_entropy = load_entropy(served),
            .dropped = dropped_share(demand, served),
            .dead = dead_experts(demand),
            .bias_moved = ledger.moved(),
            .still_updates = ledger.still()};
    uint32_t low = 0xffffffffu, high = 0;
    for (int64_t e = 0; e < experts; ++e) {
        low = umin(low, ordered_word(state.bias(e))), high = umax(high, ordered_word(state.bias(e)));
        line.bias_nan += is_nan(state.bias(e)) ? 1 : 0;
    }
    if (experts > 0) line.bias_spread = from_ordered_word(high) - from_ordered_word(low);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
