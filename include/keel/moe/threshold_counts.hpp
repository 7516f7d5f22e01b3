// How large each expert's bias would have had to be for each token: histograms of exact counts, for the quantile rule.
//
// The threshold of expert e at token t is a_t - s_te, s the score and a_t the (k + 1)-th largest score plus bias: an expert that is
// chosen stays so with any bias above it. (One that is not has to pass the k-th largest, which is no lower: the published rule takes one level
// for all.) The k / experts quantile of its thresholds is then the bias at which an expert has its fair share.
// Thresholds come from scores alone, so nothing that is dropped later can hide from them.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// Bins reach from 1 below the smallest bias to 1 above the largest, which holds every threshold of scores in [0, 1]; what lies
/// outside is in the first or the last bin.
struct threshold_range {
    float low = 0.0f, width = 0.0f; ///< where bin 0 begins, and how wide each is

    KEEL_FN bool same(threshold_range const& o) const { return low == o.low && width == o.width; }
};

/// [experts, bins] counts over the caller's memory, of one forward pass. A copy is another view of the same memory.
class threshold_counts {
  public:
    threshold_counts() = default;
    /// Memory for count_thresholds to fill, two bins or more (public trainers take 1000). Counts nothing until then.
    KEEL_FN explicit threshold_counts(view<int64_t, 2> memory) : memory_(memory) {}

    KEEL_FN view<int64_t const, 2> counts() const { return memory_; }
    KEEL_FN int64_t tokens() const { return tokens_; }   ///< tokens that were routed, padding left out: the sum of each row
    KEEL_FN int64_t per_token() const { return k_; }     ///< experts a token chose, k
    KEEL_FN threshold_range range() const { return range_; }
    KEEL_FN bool filled() const { return k_ > 0; }

  private:
    friend struct threshold_counts_access;
    view<int64_t, 2> memory_;
    int64_t tokens_ = 0, k_ = 0;
    threshold_range range_;
};

/// For the call that counts, and no other.
struct threshold_counts_access {
    KEEL_FN static view<int64_t, 2> memory(threshold_counts const& c) { return c.memory_; }
    KEEL_FN static void fill(threshold_counts& c, int64_t tokens, int64_t k, threshold_range range) {
        c.tokens_ = tokens, c.k_ = k, c.range_ = range;
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// The bins that belong to a bias of numbers.
KEEL_FN threshold_range threshold_range_of(view<float const, 1> bias, int64_t bins) {
    uint32_t low = 0xffffffffu, high = 0;
    for (int64_t e = 0; e < bias.extent[0]; ++e) low = umin(low, ordered_word(bias(e))), high = umax(high, ordered_word(bias(e)));
    if (bias.extent[0] == 0 || bins == 0) return {};
    float const from = from_ordered_word(low) - 1.0f, to = from_ordered_word(high) + 1.0f;
    return {from, div(to - from, static_cast<float>(bins))};
}

} // namespace keel::inline KEEL_ABI
