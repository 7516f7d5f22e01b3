// How many tokens each expert was asked for, and how many it served: exact counts whose stage is their type.
//
// A load that is counted after tokens were dropped for capacity hides the very imbalance that the balancing bias exists to
// correct: an oversubscribed expert looks healthy. So the two are different types, neither converts to the other, and only
// the call that counts can fill one:
//
//     demand_counts    filled by route: assignments before any capacity, on this rank
//     served_counts    filled by apply_capacity or reroute_overflow: what is left of them (on all ranks: served_from_counts)
//     reduced_demand   demand summed over all ranks: the only thing that update_balance takes
//
//     int64_t memory[experts];
//     keel::demand_counts demand(keel::vec(memory, experts));       // nothing yet
//     keel::route(be, logits, {.bias = bias}, ids, weights, demand, {}, {}, ws).or_throw();
//     keel::max_over_mean(demand);
#pragma once

#include <keel/core/math.hpp>
#include <keel/core/validate.hpp>

namespace keel {

struct demand_stage {};
struct served_stage {};
struct reduced_stage {};

namespace detail {
struct load_counts_access;
}

/// int64 counts, one an expert, over the caller's memory. A copy is another view of the same memory.
template <class Stage> class load_counts {
  public:
    load_counts() = default;
    /// Memory for a call to fill. Counts nothing until then.
    KEEL_FN explicit load_counts(view<int64_t, 1> memory) : memory_(memory) {}

    KEEL_FN view<int64_t const, 1> counts() const { return memory_; }
    KEEL_FN int64_t operator[](int64_t expert) const { return memory_(expert); }
    KEEL_FN int64_t experts() const { return memory_.extent[0]; }
    KEEL_FN int64_t tokens() const { return tokens_; }  ///< tokens that were routed, padding left out
    KEEL_FN int64_t per_token() const { return k_; }    ///< experts a token chose, k
    KEEL_FN int64_t total() const { return total_; }    ///< the sum of the counts; k * tokens for demand
    KEEL_FN int64_t rerouted() const { return rerouted_; } ///< of served counts: those that another expert serves than was asked for
    KEEL_FN bool filled() const { return k_ > 0; }

  private:
    friend struct detail::load_counts_access;
    view<int64_t, 1> memory_;
    int64_t tokens_ = 0, k_ = 0, total_ = 0, rerouted_ = 0;
};

using demand_counts = load_counts<demand_stage>;
using served_counts = load_counts<served_stage>;
using reduced_demand = load_counts<reduced_stage>;

namespace detail {
/// For the calls that count. Going through here elsewhere is how a load comes to lie about its stage.
struct load_counts_access {
    template <class Stage> KEEL_FN static view<int64_t, 1> memory(load_counts<Stage> const& c) { return c.memory_; }
    template <class Stage> KEEL_FN static void fill(load_counts<Stage>& c, int64_t tokens, int64_t k, int64_t total, int64_t rerouted = 0) {
        c.tokens_ = tokens, c.k_ = k, c.total_ = total, c.rerouted_ = rerouted;
    }
};
/// Counts times experts stay inside int64: what balance.hpp and the ratios below compute.
inline constexpr int64_t most_assignments = int64_t{1} << 42;
inline constexpr int64_t most_experts = int64_t{1} << 20;
} // namespace detail

/// Demand again from bare counts that come back from a checkpoint or a communicator.
///
/// Checks         none is negative or above `tokens`; they sum to k * tokens; 1 <= k <= experts; k * tokens <= 2^42.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (tokens or k), bad_state (the counts contradict them).
/// A sum over ranks is rebuilt with the tokens of all ranks, then named so: reduced_over_ranks(demand).
KEEL_HOST status demand_from_counts(view<int64_t, 1> counts, int64_t tokens, int64_t k, demand_counts& demand) {
    int64_t const experts = counts.extent[0];
    validation check("demand_from_counts");
    check.present("counts", counts).unit_stride("counts", counts);
    check.require(experts <= detail::most_experts, status_code::bad_shape, "counts", "experts", experts, "at most 2^20");
    check.require(k >= 1 && k <= experts, status_code::bad_option, "k", "value", k, "1 up to the number of experts");
    check.require(tokens >= 0, status_code::bad_option, "tokens", "value", tokens, "0 or more");
    if (!check.ok()) return check.result;
    check.require(tokens <= detail::most_assignments / k, status_code::bad_option, "tokens", "value", tokens, "at most 2^42 / k");
    int64_t sum = 0;
    for (int64_t e = 0; e < experts && check.ok(); ++e) {
        check.require(counts(e) >= 0 && counts(e) <= tokens, status_code::bad_state, "counts", "element", counts(e),
                      "0 up to the number of tokens");
        if (check.ok()) sum += counts(e);
    }
    if (check.ok() && sum != k * tokens) check.fail(status_code::bad_state, "counts", "sum", sum, k * tokens);
    if (!check.ok()) return check.result;
    demand = demand_counts(counts);
    detail::load_counts_access::fill(demand, tokens, k, sum);
    return check.result;
}

/// Served counts again, for the line of all ranks: a communicator has summed them and their rerouted(), and `demand` is the sum of what was
/// asked for in the same tokens (demand_from_counts).
///
/// Checks         none is negative or above the tokens; they sum to no more than the demand; what experts serve beyond their own
///                demand is no more than `rerouted`.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (rerouted below 0), bad_state (demand that was not filled, counts
///                that contradict it).
KEEL_HOST status served_from_counts(view<int64_t, 1> counts, demand_counts const& demand, int64_t rerouted, served_counts& served) {
    validation check("served_from_counts");
    check.require(demand.filled(), status_code::bad_state, "demand", "demand that was counted");
    check.shape("counts", counts, demand.experts()).unit_stride("counts", counts).disjoint("counts", counts, demand.counts());
    check.require(rerouted >= 0, status_code::bad_option, "rerouted", "value", rerouted, "0 or more");
    int64_t sum = 0, beyond = 0;
    for (int64_t e = 0; check.ok() && e < demand.experts(); ++e) {
        check.require(counts(e) >= 0 && counts(e) <= demand.tokens(), status_code::bad_state, "counts", "element", counts(e),
                      "0 up to the number of tokens");
        if (!check.ok()) break;
        sum += counts(e);
        beyond += counts(e) > demand[e] ? counts(e) - demand[e] : 0;
    }
    check.require(sum <= demand.total(), status_code::bad_state, "counts", "sum", sum, "no more than the demand");
    check.require(beyond <= rerouted, status_code::bad_state, "counts", "sum beyond the demand of each", beyond, "no more than was rerouted");
    if (!check.ok()) return check.result;
    served = served_counts(counts);
    detail::load_counts_access::fill(served, demand.tokens(), demand.per_token(), sum, rerouted);
    return check.result;
}

/// sum += part, of the same experts and k: for the line of a step of several micro-batches, demand with demand and served with served.
/// The first part goes into a `sum` over memory that nothing has filled.
/// Status: bad_shape, overlap, bad_state (a part that was not filled, or of another k; more than 2^42 assignments).
template <class Stage> KEEL_HOST status add_counts(load_counts<Stage>& sum, load_counts<Stage> const& part) {
    view<int64_t, 1> const total = detail::load_counts_access::memory(sum);
    validation check("add_counts");
    check.shape("sum", total, part.experts()).unit_stride("sum", total).disjoint("sum", total, part.counts());
    check.require(part.filled(), status_code::bad_state, "part", "counts that a call has filled");
    check.require(!sum.filled() || sum.per_token() == part.per_token(), status_code::bad_state, "part", "experts a token", part.per_token(),
                  "the k of the sum");
    if (!check.ok()) return check.result;
    check.require(sum.tokens() <= detail::most_assignments / part.per_token() - part.tokens(), status_code::bad_state, "part", "tokens",
                  part.tokens(), "at most 2^42 / k together");
    if (!check.ok()) return check.result;
    for (int64_t e = 0; e < part.experts(); ++e) total(e) = (sum.filled() ? total(e) : 0) + part[e];
    detail::load_counts_access::fill(sum, sum.tokens() + part.tokens(), part.per_token(), sum.total() + part.total(),
                                     sum.rerouted() + part.rerouted());
    return check.result;
}

/// The same counts, said to be the sum over every rank: because a communicator has summed them, or because there is one rank.
KEEL_HOST reduced_demand reduced_over_ranks(demand_counts const& demand) {
    reduced_demand r(detail::load_counts_access::memory(demand));
    detail::load_counts_access::fill(r, demand.tokens(), demand.per_token(), demand.total());
    return r;
}

} // namespace keel

namespace keel::inline KEEL_ABI {

/// The largest count over the mean count: 1 is perfect balance, experts / k the worst demand. 0 where nothing was counted.
template <class Stage> KEEL_HOST double max_over_mean(load_counts<Stage> const& c) {
    int64_t top = 0;
    for (int64_t e = 0; e < c.experts(); ++e) top = c[e] > top ? c[e] : top;
    return c.total() == 0 ? 0.0 : static_cast<double>(top * c.experts()) / static_cast<double>(c.total());
}

/// The smallest count over the mean count. 0 where nothing was counted.
template <class Stage> KEEL_HOST double min_over_mean(load_counts<Stage> const& c) {
    int64_t low = c.total();
    for (int64_t e = 0; e < c.experts(); ++e) low = c[e] < low ? c[e] : low;
    return c.total() == 0 ? 0.0 : static_cast<double>(low * c.experts()) / static_cast<double>(c.total());
}

/// The entropy of the load over that of a uniform one, in [0, 1]: -sum(p log p) / log(experts), p = count / total; 1 for one
/// expert, 0 where nothing was counted. Logarithms in fp32.
template <class Stage> KEEL_HOST double load_entropy(load_counts<Stage> const& c) {
    if (c.total() == 0) return 0.0;
    if (c.experts() == 1) return 1.0;
    double sum = 0.0;
    for (int64_t e = 0; e < c.experts(); ++e) {
        double const p = static_cast<double>(c[e]) / static_cast<double>(c.total());
        if (c[e] > 0) sum = __builtin_fma(-p, static_cast<double>(log(static_cast<float>(p))), sum);
    }
    return sum / static_cast<double>(log(static_cast<float>(c.experts())));
}

/// Experts with less than 1% of the mean count, in exact integers. 0 where nothing was counted.
template <class Stage> KEEL_HOST int64_t dead_experts(load_counts<Stage> const& c) {
    int64_t dead = 0;
    for (int64_t e = 0; e < c.experts(); ++e) dead += c.total() > 0 && c[e] <= (c.total() - 1) / (100 * c.experts()) ? 1 : 0;
    return dead;
}

} // namespace keel::inline KEEL_ABI
