// A router's call with its buffers, for the tests of this folder.
#pragma once

#include <cstdint>
#include <vector>

#include <keel/moe/route.hpp>
#include <support/data.hpp>

namespace keel_test {

/// Everything that one call of route writes, over guarded memory.
template <class I = int32_t> struct routed {
    guarded_matrix<I> ids;
    guarded_matrix<float> weights, log_sum;
    std::vector<int64_t> counts;
    keel::demand_counts demand;

    routed(int64_t tokens, int64_t experts, int64_t k, int64_t spare = 0)
        : ids(tokens, k + spare, 3), weights(tokens, k, 1), log_sum(1, tokens), counts(static_cast<std::size_t>(experts), -7),
          demand(keel::vec(counts.data(), experts)) {}
    routed(routed const&) = delete;

    template <class B, class L>
    keel::status run(B const& be, keel::view<L, 2> logits, keel::route_inputs in = {}, keel::route_options options = {}) {
        scratch ws(keel::route_workspace(logits.extent[0], logits.extent[1]));
        return keel::route(be, logits, in, ids.view(), weights.view(), demand, {.log_sum = log_sum.vec()}, options, ws.get());
    }
    int64_t id(int64_t t, int64_t j) const { return static_cast<int64_t>(ids.get(t, j)); }
    /// The k experts of each token, without its next choices.
    keel::view<I, 2> chosen() { return keel::columns(ids.view(), 0, weights.columns()); }
    bool same(routed const& o) const {
        return ids.contents() == o.ids.contents() && weights.contents() == o.weights.contents() && log_sum.contents() == o.log_sum.contents() &&
               counts == o.counts;
    }
    bool untouched() const { return ids.untouched() && weights.untouched() && log_sum.untouched(); }
};

inline constexpr keel::score_function all_scores[] = {keel::score_function::softmax, keel::score_function::sigmoid,
                                                      keel::score_function::sqrt_softplus};
inline constexpr keel::weight_rule both_rules[] = {keel::weight_rule::normalised, keel::weight_rule::scores};

} // namespace keel_test
