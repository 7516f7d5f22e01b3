// Memory for thresholds and a layer that keeps them, with short calls.
#pragma once

#include <keel/moe/thresholds.hpp>
#include <moe/balance_layer.hpp>

namespace keel_test {

inline constexpr int64_t bins = 200;

/// Histogram memory and the call.
struct histogram {
    list memory;
    keel::threshold_counts counts;
    explicit histogram(int64_t experts, int64_t width = bins)
        : memory(static_cast<std::size_t>(experts * width), -7), counts(keel::rows(memory.data(), experts, width)) {}
    histogram(histogram const&) = delete;

    template <class B, class L>
    keel::status run(B const& be, keel::view<L, 2> logits, std::vector<float> const& bias, int64_t k, keel::route_options options = {},
                     keel::view<bool const, 1> valid = {}) {
        scratch ws(keel::count_thresholds_workspace(logits.extent[0], logits.extent[1], k, options));
        return keel::count_thresholds(be, logits, keel::vec(bias.data(), static_cast<int64_t>(bias.size())), k, counts, options, ws.get(), valid);
    }
};

/// A layer that keeps thresholds.
struct quantile_layer : layer {
    list thresholds;
    explicit quantile_layer(int64_t experts) : layer(experts), thresholds(static_cast<std::size_t>(experts * bins)) {}
    keel::balance_state state() {
        keel::balance_state s = layer::state();
        s.thresholds = keel::rows(thresholds.data(), static_cast<int64_t>(bias.size()), bins);
        return s;
    }
    bool same(quantile_layer const& o) const { return layer::same(o) && thresholds == o.thresholds; }
    keel::status update_by_quantile(keel::step_gate const& gate = keel::open_gate(), keel::balance_options options = {keel::balance_rule::quantile, 1.0f}) {
        keel::demand_counts all;
        keel::status const s = keel::pending_demand(state(), all);
        return s.ok() ? keel::update_balance(keel::cpu{}, state(), keel::reduced_over_ranks(all), gate, options) : s;
    }
};

} // namespace keel_test
