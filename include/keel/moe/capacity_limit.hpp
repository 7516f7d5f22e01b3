// How many tokens an expert takes, and which of those that ask for more it keeps: the decisions that capacity is made of.
#pragma once

#include <keel/core/view.hpp>

namespace keel {

/// How many tokens an expert takes. There is no default and no number that means "no limit": one names dropless() or a factor.
///
///     capacity_limit::dropless()               every assignment is served
///     capacity_limit::factor(5, 4)             1.25 times the mean load: ceil(tokens * k * 5 / (experts * 4))
///     capacity_limit::factor(5, 4).at_least(8).multiple_of(4)
///
/// The factor is a ratio of integers because 100 * 1.1 is 111 after ceil in fp64.
class capacity_limit {
  public:
    KEEL_FN static constexpr capacity_limit dropless() { return {}; }
    KEEL_FN static constexpr capacity_limit factor(int64_t numerator, int64_t denominator) { return {numerator, denominator}; }
    KEEL_FN constexpr capacity_limit at_least(int64_t minimum) const {
        capacity_limit c = *this;
        c.minimum_ = minimum;
        return c;
    }
    KEEL_FN constexpr capacity_limit multiple_of(int64_t alignment) const {
        capacity_limit c = *this;
        c.alignment_ = alignment;
        return c;
    }

    KEEL_FN constexpr bool is_dropless() const { return dropless_; }
    KEEL_FN constexpr int64_t numerator() const { return numerator_; }
    KEEL_FN constexpr int64_t denominator() const { return denominator_; }
    KEEL_FN constexpr int64_t minimum() const { return minimum_; }
    KEEL_FN constexpr int64_t alignment() const { return alignment_; }

    /// Tokens one expert takes: max(minimum, ceil(tokens * k * numerator / (experts * denominator))), then up to the next multiple of the
    /// alignment, then at most `tokens`, which is all that can ask. Exact while tokens * k <= 2^42 and the numbers are at most 2^20,
    /// which apply_capacity checks.
    KEEL_FN constexpr int64_t tokens_an_expert(int64_t tokens, int64_t k, int64_t experts) const {
        if (dropless_) return tokens;
        int64_t const share = experts * denominator_;
        int64_t const rounded_up = (tokens * k * numerator_ + share - 1) / share;
        int64_t const wanted = rounded_up > minimum_ ? rounded_up : minimum_;
        if (wanted >= tokens) return tokens;
        int64_t const aligned = (wanted + alignment_ - 1) / alignment_ * alignment_;
        return aligned < tokens ? aligned : tokens;
    }

  private:
    constexpr capacity_limit() = default;
    KEEL_FN constexpr capacity_limit(int64_t numerator, int64_t denominator)
        : numerator_(numerator), denominator_(denominator), dropless_(false) {}
    int64_t numerator_ = 1, denominator_ = 1, minimum_ = 0, alignment_ = 1;
    bool dropless_ = true;
};

/// Which assignments an expert keeps that is asked for more than it takes. What is equal is kept in the order of (token, choice).
///   position           the earliest tokens                                           (MaxText)
///   choice_major       all first choices before all second ones                      (GShard, DeepSpeed's top 2)
///   weight             the largest weights: each expert keeps what it matters to most (Megatron's "probs")
///   batch_prioritised  choice-major, the tokens by falling largest weight             (Riquelme et al. 2021, 2106.05974, algorithm 2)
/// A weight of NaN comes after all numbers.
enum class drop_order : uint8_t { position, choice_major, weight, batch_prioritised };

struct capacity_options {
    capacity_limit limit; ///< no default: dropping is a decision
    drop_order order = drop_order::position;
};

} // namespace keel
