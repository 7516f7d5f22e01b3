// The balancing bias: committed demand in, one update a step out. Served counts do not compile here.
//
//     keel::commit(be, state, demand, {.step = s, .micro_batch = m}).or_throw();     // after each forward; twice counts once
//     all_reduce(state.pending), all_reduce(keel::pending_tokens(state));             // where there are ranks: sums of int64, in place,
//     keel::demand_counts pending;                                                  // after the step's last commit on each of them;
//                                                                                   // all_reduce(state.thresholds) too, if it is kept
//     keel::pending_demand(state, pending).or_throw();
//     keel::update_balance(be, state, keel::reduced_over_ranks(pending), gate, {.rate = 1e-3f}).or_throw();
//
// All state is tensors of the caller's: their bytes are the checkpoint, between any two calls, and zeroed memory is a fresh state.
// A bias that another trainer left starts beside a zeroed ledger; centre_bias takes away what all its experts share. Kernel:
// balance_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/guard/step_gate_rows.hpp>
#include <keel/moe/balance_rows.hpp>
#include <keel/moe/demand.hpp>
#include <keel/moe/threshold_counts.hpp>

namespace keel {

/// Words before the ledger's list of micro-batches; those that nothing uses stay 0, so that a checkpoint outlives additions.
inline constexpr int64_t balance_ledger_header = 16;
/// Elements of a ledger for up to this many micro-batches a step.
KEEL_FN constexpr int64_t balance_ledger_size(int64_t micro_batches) { return balance_ledger_header + micro_batches; }

/// The bias of one layer and what is needed to count each micro-batch exactly once. Views over the caller's memory; the bias stays
/// fp32 whatever the model's precision, and is no parameter of the optimiser (no gradient, no decay).
struct balance_state {
    view<float, 1> bias = {};      ///< [experts]
    view<int64_t, 1> pending = {}; ///< [experts], demand committed since the last update
    view<int64_t, 1> ledger = {};  ///< [balance_ledger_size(micro-batches)], see balance_ledger
    view<int64_t, 1> signs = {};   ///< [experts], -1, 0 or 1: where each bias was last sent. Absent: flips are not counted
    view<int64_t, 2> thresholds = {}; ///< [experts, bins], thresholds committed since the last update. Only the quantile rule needs it
};

/// One forward pass. A step that is tried again after it was skipped is another attempt.
struct balance_key {
    int64_t step = 0;
    int64_t micro_batch = 0;
    int64_t attempt = 0;
};

namespace detail {
/// The ledger's words.
struct balance_ledger {
    view<int64_t, 1> words;

    KEEL_FN int64_t& next_step() const { return words(0); }   ///< steps below it are done; their commits are late
    KEEL_FN int64_t& open_step() const { return words(1); }   ///< the step being counted, and which attempt at it
    KEEL_FN int64_t& open_attempt() const { return words(2); }
    KEEL_FN int64_t& tokens() const { return words(3); }      ///< tokens in pending
    KEEL_FN int64_t& per_token() const { return words(4); }   ///< k of what is in pending
    KEEL_FN int64_t& moved() const { return words(5); }       ///< biases that the last update changed
    KEEL_FN int64_t& count() const { return words(6); }       ///< micro-batches in pending; 0: no step is open
    KEEL_FN int64_t& still() const { return words(7); }       ///< updates in a row that changed no bias, frozen ones left out
    KEEL_FN int64_t& flipped() const { return words(8); }     ///< experts that the last update sent the other way than before
    KEEL_FN int64_t& frozen() const { return words(9); }      ///< 1: the last update was told to leave the bias
    KEEL_FN int64_t& deadband() const { return words(10); }   ///< the fp32 bits of the last update's
    KEEL_FN int64_t& micro_batch(int64_t i) const { return words(balance_ledger_header + i); }
    KEEL_FN int64_t room() const { return words.extent[0] - balance_ledger_header; }

    /// As before the first commit of the step.
    KEEL_FN void close() const {
        for (int64_t i = 0; i < count(); ++i) micro_batch(i) = 0;
        open_step() = open_attempt() = tokens() = per_token() = count() = 0;
    }
};

/// A ledger comes from memory of the caller's, or a checkpoint: what is in it is not trusted with an index.
KEEL_HOST void check_balance(validation& check, balance_state const& state) {
    check.present("state.bias", state.bias).unit_stride("state.bias", state.bias);
    check.require(state.bias.extent[0] <= most_experts, status_code::bad_shape, "state.bias", "experts", state.bias.extent[0], "at most 2^20");
    check.shape("state.pending", state.pending, state.bias.extent[0]).unit_stride("state.pending", state.pending);
    check.present("state.ledger", state.ledger).unit_stride("state.ledger", state.ledger);
    check.require(state.ledger.extent[0] > balance_ledger_header, status_code::bad_shape, "state.ledger", "length", state.ledger.extent[0],
                  "balance_ledger_size(micro-batches a step)");
    check.disjoint("state.bias", state.bias, state.pending).disjoint("state.ledger", state.ledger, state.pending);
    check.disjoint("state.ledger", state.ledger, state.bias);
    if (!state.signs.absent())
        check.shape("state.signs", state.signs, state.bias.extent[0]).unit_stride("state.signs", state.signs);
    check.disjoint("state.signs", state.signs, state.bias, state.pending, state.ledger);
    if (!state.thresholds.absent())
        check.extent("state.thresholds", state.thresholds, 0, state.bias.extent[0]).unit_stride("state.thresholds", state.thresholds);
    check.disjoint("state.thresholds", state.thresholds, state.bias, state.pending, state.ledger, state.signs);
    if (!check.ok()) return;
    balance_ledger const ledger{state.ledger};
    check.require(ledger.count() >= 0 && ledger.count() <= ledger.room(), status_code::bad_state, "state.ledger", "count of micro-batches",
                  ledger.count(), "0 up to its room; zeroed memory is a fresh ledger");
    check.require(ledger.tokens() >= 0, status_code::bad_state, "state.ledger", "tokens", ledger.tokens(), "0 or more");
}
KEEL_HOST void check_pending(validation& check, balance_state const& state) {
    for (int64_t e = 0; check.ok() && e < state.pending.extent[0]; ++e)
        check.require(state.pending(e) >= 0 && state.pending(e) <= balance_ledger{state.ledger}.tokens(), status_code::bad_state,
                      "state.pending", "count", state.pending(e), "0 up to the ledger's tokens");
}
KEEL_HOST void check_balance_options(validation& check, balance_options const& options) {
    check.require(options.rule <= balance_rule::quantile, status_code::bad_option, "options.rule", "value",
                  static_cast<int64_t>(options.rule), "a balance_rule");
    check.require(options.rate >= 0.0f && options.rate <= 0x1.fffffep127f, status_code::bad_option, "options.rate",
                  "a finite number, 0 or above");
    check.require(options.deadband >= 0.0f && options.deadband <= 0x1.fffffep127f, status_code::bad_option, "options.deadband",
                  "a finite number, 0 or above");
}
/// Each expert's thresholds are one a token.
KEEL_HOST void check_thresholds(validation& check, char const* name, view<int64_t const, 2> counts, int64_t tokens) {
    for (int64_t e = 0; check.ok() && e < counts.extent[0]; ++e) {
        int64_t sum = 0;
        for (int64_t b = 0; check.ok() && b < counts.extent[1]; ++b) {
            check.require(counts(e, b) >= 0 && counts(e, b) <= tokens, status_code::bad_state, name, "count", counts(e, b),
                          "0 up to the number of tokens");
            if (check.ok()) sum += counts(e, b);
        }
        if (check.ok() && sum != tokens) check.fail(status_code::bad_state, name, "sum of an expert", sum, tokens);
    }
}
/// Counts that no one has written to since they were counted: none outside [0, most], and together the total.
template <class Stage> KEEL_HOST void check_counts(validation& check, char const* name, load_counts<Stage> const& c, int64_t most) {
    int64_t sum = 0;
    for (int64_t e = 0; check.ok() && e < c.experts(); ++e) {
        check.require(c[e] >= 0 && c[e] <= most, status_code::bad_state, name, "count", c[e], "0 up to the number of tokens");
        if (check.ok()) sum += c[e];
    }
    if (check.ok() && sum != c.total()) check.fail(status_code::bad_state, name, "sum", sum, c.total());
}
} // namespace detail

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Thresholds where the state keeps some, and only there: of the same tokens and k.
KEEL_HOST void check_same_thresholds(validation& check, balance_state const& state, demand_counts const& demand,
                                     threshold_counts const& thresholds) {
    if (!check.ok()) return;
    check.require(thresholds.filled() == !state.thresholds.absent(), status_code::bad_state, "thresholds",
                  "those of this forward where state.thresholds is kept, else none");
    if (!check.ok() || !thresholds.filled()) return;
    check.shape("thresholds", thresholds.counts(), state.thresholds.extent[0], state.thresholds.extent[1]);
    check.disjoint("thresholds", thresholds.counts(), state.bias, state.pending, state.ledger, state.signs, state.thresholds);
    check.require(thresholds.tokens() == demand.tokens(), status_code::bad_state, "thresholds", "tokens", thresholds.tokens(),
                  "those of the demand");
    check.require(thresholds.per_token() == demand.per_token(), status_code::bad_state, "thresholds", "experts a token",
                  thresholds.per_token(), "the k of the demand");
}

/// Adds a micro-batch's demand to the pending counts, once: a key that is there already (a recomputed forward, a repeated call) or
/// that belongs to a step already updated changes nothing and is ok. Evaluation simply does not commit.
///
/// Shapes         state as in balance_state; demand of as many experts.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (a negative step); bad_state: demand that nothing filled,
///                that does not sum to k * tokens any more, or of another k; another step or attempt is still open (update_balance
///                closes it, applied or skipped); the ledger is full, or no ledger; more than 2^42 assignments.
/// Late           of a step that was updated: ok, nothing changes. Of an attempt that was skipped: a skip leaves nothing behind to know
///                it by, so it opens that attempt again, and the next attempt's commit says so; update_balance with a closed gate
///                clears it.
/// Thresholds     of the same forward pass, where the state keeps them: counted with the state's bias, in as many bins; else bad_state.
/// A type that is not demand_counts does not compile.
template <row_backend B>
status commit(B const&, balance_state const& state, demand_counts const& demand, threshold_counts const& thresholds, balance_key key) {
    static_assert(backend_traits<B>::space == memory_space::host, "the ledger lives on the host so far");
    int64_t const experts = state.bias.extent[0];
    detail::balance_ledger const ledger{state.ledger};
    validation check("commit");
    detail::check_balance(check, state);
    check.shape("demand", demand.counts(), experts);
    check.disjoint("demand", demand.counts(), state.bias, state.pending, state.ledger, state.signs, state.thresholds);
    check.require(demand.filled(), status_code::bad_state, "demand", "demand that route has filled");
    check.require(key.step >= 0, status_code::bad_option, "key.step", "value", key.step, "0 or more");
    check_same_thresholds(check, state, demand, thresholds);
    if (!check.ok() || key.step < ledger.next_step()) return check.result; // late, the bias has moved since
    if (thresholds.filled())
        check.require(thresholds.range().same(threshold_range_of(state.bias, state.thresholds.extent[1])), status_code::bad_state, "thresholds",
                      "thresholds that were counted with state.bias");
    if (ledger.count() > 0) {
        check.require(ledger.open_step() == key.step, status_code::bad_state, "key.step", "value", key.step,
                      "the step that is open; update_balance closes it");
        check.require(ledger.open_attempt() == key.attempt, status_code::bad_state, "key.attempt", "value", key.attempt,
                      "the attempt that is open; update_balance closes it");
        check.require(ledger.per_token() == demand.per_token(), status_code::bad_state, "demand", "experts a token", demand.per_token(),
                      "the same k in every micro-batch");
        for (int64_t i = 0; check.ok() && i < ledger.count(); ++i)
            if (ledger.micro_batch(i) == key.micro_batch) return check.result;
    }
    detail::check_pending(check, state);
    detail::check_counts(check, "demand", demand, demand.tokens());
    detail::check_thresholds(check, "thresholds", thresholds.counts(), demand.tokens());
    check.require(ledger.count() < ledger.room(), status_code::bad_state, "state.ledger", "room for micro-batches", ledger.room(),
                  "room for all of a step");
    check.require(ledger.tokens() <= detail::most_assignments / demand.per_token() - demand.tokens(), status_code::bad_state, "demand",
                  "tokens", demand.tokens(), "at most 2^42 / k a step");
    if (!check.ok()) return check.result;
    for (int64_t e = 0; e < experts; ++e) {
        state.pending(e) += demand[e];
        for (int64_t b = 0; b < state.thresholds.extent[1]; ++b) state.thresholds(e, b) += thresholds.counts()(e, b);
    }
    ledger.open_step() = key.step;
    ledger.open_attempt() = key.attempt;
    ledger.tokens() += demand.tokens();
    ledger.per_token() = demand.per_token();
    ledger.micro_batch(ledger.count()++) = key.micro_batch;
    return check.result;
}
template <row_backend B> status commit(B const& be, balance_state const& state, demand_counts const& demand, balance_key key) {
    return commit(be, state, demand, threshold_counts{}, key);
}

/// The number of tokens in state.pending: one element of the ledger, for a communicator to sum as it sums the counts.
/// Empty where the state has no ledger.
KEEL_FN view<int64_t, 1> pending_tokens(balance_state const& state) {
    return state.ledger.extent[0] < balance_ledger_header ? view<int64_t, 1>{} : vec(&detail::balance_ledger{state.ledger}.tokens(), 1);
}

/// The demand committed since the last update, on this rank or, where a communicator has summed state.pending and pending_tokens(state),
/// on all: a view of state.pending, until the next commit. bad_state where nothing was committed, or where the counts do not sum to
/// k * tokens (only one of the two was summed).
KEEL_HOST status pending_demand(balance_state const& state, demand_counts& pending) {
    detail::balance_ledger const ledger{state.ledger};
    validation check("pending_demand");
    detail::check_balance(check, state);
    if (!check.ok()) return check.result;
    check.require(ledger.count() > 0, status_code::bad_state, "state.ledger", "a micro-batch that was committed");
    return check.ok() ? demand_from_counts(state.pending, ledger.tokens(), ledger.per_token(), pending) : check.result;
}

/// Moves the bias once, by the whole step's demand over all ranks, or not at all; then the next step may be counted.
///
/// Formula        b_e = fma(rate, direction_e, b_e) with the direction of balance_rule: a division of exact integers, in fp32. An expert
///                within the deadband counts as one whose demand is the mean.
/// Bounds         all rules but sign sum to 0 over the experts but for the rounding of each direction: the mean of the bias
///                stays. sign drifts by rate * mean(sign) a step; a constant common to all selects nothing, but takes the scores' digits.
/// Gate           gate.apply: the bias moves and the step is done. Not: the step never happened; bias, pending, signs and ledger have
///                the bytes that they had before its first commit, and it may be tried again under another attempt.
/// Frozen         with an open gate the step is done like any other, bias and signs keep their bytes, and the health line says so.
/// Shapes         demand of as many experts as the state. It may be the pending counts themselves.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (rate, deadband, rule; quantile without state.thresholds), bad_state: nothing was committed since the last update
///                (once per step), the demand is less than what is pending here (another layer's, or not reduced), of another k, or does
///                not sum to its total any more (a micro-batch was committed after pending_demand), thresholds were not reduced with it,
///                or a bias is NaN: it would stay so for ever, its expert last.
/// Zero tokens    direction 0.
/// A type that is not reduced_demand does not compile: not served counts, and not one rank's share.
template <row_backend B>
status update_balance(B const& be, balance_state const& state, reduced_demand const& demand, step_gate const& gate,
                      balance_options options = {}) {
    static_assert(backend_traits<B>::space == memory_space::host, "the ledger lives on the host so far");
    int64_t const experts = state.bias.extent[0];
    detail::balance_ledger const ledger{state.ledger};
    validation check("update_balance");
    detail::check_balance(check, state);
    check.shape("demand", demand.counts(), experts).disjoint("demand", demand.counts(), state.bias, state.ledger, state.signs, state.thresholds);
    check.disjoint_or_same("demand", demand.counts(), state.pending);
    check.require(demand.filled(), status_code::bad_state, "demand", "demand that was counted");
    detail::check_balance_options(check, options);
    if (!check.ok()) return check.result;
    check.require(ledger.count() > 0, status_code::bad_state, "state.ledger", "a micro-batch committed since the last update");
    check.require(demand.per_token() == ledger.per_token(), status_code::bad_state, "demand", "experts a token", demand.per_token(),
                  "the k of what was committed");
    for (int64_t e = 0; check.ok() && e < experts; ++e)
        if (is_nan(state.bias(e))) check.fail(status_code::bad_state, "state.bias", "NaN at expert", e, 0, "none");
    for (int64_t e = 0; check.ok() && e < experts; ++e)
        if (demand[e] < state.pending(e))
            check.fail(status_code::bad_state, "demand", "count", demand[e], 0, "at least what is pending on this rank");
    detail::check_counts(check, "demand", demand, demand.tokens());
    if (!state.thresholds.absent()) detail::check_thresholds(check, "state.thresholds", state.thresholds, demand.tokens());
    check.require(options.rule != balance_rule::quantile || !state.thresholds.absent(), status_code::bad_option, "options.rule",
                  "a rule that needs no thresholds, or state.thresholds");
    if (!check.ok()) return check.result;
    if (gate.apply != 0) {
        balance_moves moves;
        if (!options.frozen) {
            threshold_range const range = threshold_range_of(state.bias, state.thresholds.extent[1]);
            be.for_rows(1, experts, balance_row{demand.counts(), state.bias, state.signs, state.thresholds, range, demand.total(), options, &moves});
            ledger.still() = moves.moved == 0 ? ledger.still() + 1 : 0;
        }
        ledger.moved() = moves.moved, ledger.flipped() = moves.flipped;
        ledger.frozen() = options.frozen ? 1 : 0, ledger.deadband() = static_cast<int64_t>(bits(options.deadband));
        ledger.next_step() = ledger.open_step() + 1;
    }
    for (int64_t e = 0; e < experts; ++e) {
        state.pending(e) = 0;
        for (int64_t b = 0; b < state.thresholds.extent[1]; ++b) state.thresholds(e, b) = 0;
    }
    ledger.close();
    return check.result;
}

/// Subtracts the mean of the bias from each: for a bias that comes from elsewhere, or from the sign rule, with much in common, which
/// selects nothing and takes the scores' digits (34.5 leaves a score 18 bits).
///
/// Formula        mean = (b_0 + b_1 + ...) / experts in double, in that order; b_e = fp32(double(b_e) - mean).
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_state: a bias that is not finite, or a step is open (its micro-batches
///                were routed with this bias).
template <row_backend B> status centre_bias(B const& be, balance_state const& state) {
    static_assert(backend_traits<B>::space == memory_space::host, "the ledger lives on the host so far");
    int64_t const experts = state.bias.extent[0];
    validation check("centre_bias");
    detail::check_balance(check, state);
    if (!check.ok()) return check.result;
    check.require(detail::balance_ledger{state.ledger}.count() == 0, status_code::bad_state, "state.ledger", "open micro-batches",
                  detail::balance_ledger{state.ledger}.count(), "none");
    for (int64_t e = 0; check.ok() && e < experts; ++e)
        if (is_non_finite(state.bias(e))) check.fail(status_code::bad_state, "state.bias", "a number that is not finite at expert", e, 0, "none");
    if (!check.ok()) return check.result;
    be.for_rows(experts > 0 ? 1 : 0, experts, centre_row{state.bias});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
