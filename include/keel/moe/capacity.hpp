// Capacity: which assignments an expert serves and which are dropped, in integers only, and where each served one lies.
//
//     keel::apply_capacity(be, ids, demand, {slots, offsets}, served, {.limit = keel::capacity_limit::factor(5, 4)}, ws).or_throw();
//     keel::reroute_overflow(be, choices, weights, demand, ids, {slots, offsets}, served, {}, {...}, ws).or_throw();
//
// The second asks a token's next choices (route_options::spare) before it drops. Kernels: capacity_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/moe/capacity_limit.hpp>
#include <keel/moe/capacity_rows.hpp>
#include <keel/moe/demand.hpp>

namespace keel {

/// What capacity can count beside `served`, caller-owned. Absent: not counted.
struct capacity_saved {
    view<int64_t, 1> overflow = {}; ///< [experts], assignments that found the expert full: dropped unless rerouted; demand - kept
    view<int64_t, 1> received = {}; ///< [experts], assignments that it took over from full ones; 0 without rerouting
};

} // namespace keel

namespace keel::inline KEEL_ABI {

KEEL_HOST int64_t capacity_tiles(int64_t tokens) { return (tokens + capacity_tile_tokens - 1) / capacity_tile_tokens; }

/// Bytes for apply_capacity in the order of position.
KEEL_HOST int64_t apply_capacity_workspace(int64_t tokens, int64_t experts) {
    int64_t const tiles = capacity_tiles(tokens);
    return workspace_total(workspace_bytes<int64_t>(tiles * experts) + workspace_bytes<int64_t>(tiles) + 2 * workspace_bytes<int64_t>(experts));
}
/// Bytes for reroute_overflow, with `spare` next choices a token.
KEEL_HOST int64_t reroute_overflow_workspace(int64_t tokens, int64_t experts, int64_t k, int64_t spare) {
    int64_t const queues = 2 * workspace_bytes<int64_t>(experts) + workspace_bytes<uint64_t>(tokens * k);
    return apply_capacity_workspace(tokens, experts) + queues + (spare > 0 ? workspace_bytes<uint32_t>(tokens) : 0);
}
/// Bytes for apply_capacity in any order.
KEEL_HOST int64_t apply_capacity_workspace(int64_t tokens, int64_t experts, int64_t k, drop_order order) {
    return order == drop_order::position ? apply_capacity_workspace(tokens, experts) : reroute_overflow_workspace(tokens, experts, k, 0);
}

namespace detail {

/// One call of apply_capacity or reroute_overflow: its arguments, checked, and its rounds.
template <class B, class I> struct capacity_call {
    B const& be;
    view<I const, 2> choices;
    view<float const, 2> weights;
    demand_counts const& demand;
    view<I, 2> ids; ///< absent: nothing is rerouted
    expert_slots out;
    served_counts& served;
    capacity_saved saved;
    capacity_options options;
    workspace ws;

    int64_t tokens, k, experts, tiles;
    view<int64_t, 1> counts;
    int64_t *places = nullptr, *faults = nullptr, *lengths = nullptr, *next = nullptr;

    KEEL_HOST bool needs_weights() const {
        return options.order == drop_order::weight || options.order == drop_order::batch_prioritised;
    }
    KEEL_HOST bool by_queues() const { return options.order != drop_order::position || !ids.absent(); }

    void check_arguments(validation& check) const {
        capacity_limit const limit = options.limit;
        char const* const chosen = ids.absent() ? "ids" : "choices";
        check.present(chosen, choices);
        check.require(demand.filled(), status_code::bad_state, "demand", "demand that route has filled");
        check.require(k >= 1 && (ids.absent() ? demand.per_token() == k : k <= choices.extent[1]), status_code::bad_state, "demand",
                      "experts a token", demand.per_token(), "the demand that route counted on these ids");
        check.require(options.order <= drop_order::batch_prioritised, status_code::bad_option, "options.order", "value",
                      static_cast<int64_t>(options.order), "position, choice_major, weight or batch_prioritised");
        if (needs_weights()) check.shape("weights", weights, tokens, k);
        if (!ids.absent()) check.shape("ids", ids, tokens, k).distinct("ids", ids);
        check.shape("served", counts, experts).unit_stride("served", counts);
        check.shape("out.slots", out.slots, tokens, k).distinct("out.slots", out.slots);
        check.shape("out.offsets", out.offsets, experts + 1).distinct("out.offsets", out.offsets);
        for (auto const& [name, memory] : {named{"saved.overflow", saved.overflow}, named{"saved.received", saved.received}}) {
            if (memory.absent()) continue;
            check.shape(name, memory, experts).distinct(name, memory);
            check.disjoint(name, memory, choices, weights, ids, counts, out.slots, out.offsets, demand.counts());
        }
        check.disjoint("saved.overflow", saved.overflow, saved.received);
        auto const bounded = [&](int64_t number, char const* name) {
            check.require(number >= 1 && number <= (1 << 20), status_code::bad_option, "options.limit", name, number, "1 up to 2^20");
        };
        bounded(limit.numerator(), "numerator"), bounded(limit.denominator(), "denominator"), bounded(limit.alignment(), "alignment");
        check.require(limit.minimum() >= 0, status_code::bad_option, "options.limit", "minimum", limit.minimum(), "0 or more");
        check.disjoint("out.slots", out.slots, choices, weights, ids, counts, out.offsets, demand.counts());
        check.disjoint("out.offsets", out.offsets, choices, weights, ids, counts, demand.counts());
        check.disjoint("served", counts, choices, weights, ids, demand.counts()).disjoint("ids", ids, choices, weights, demand.counts());
    }
    struct named {
        char const* name;
        view<int64_t, 1> memory;
    };

    /// Counts the choices and holds them against the demand. The last check.
    void count_choices(validation& check) {
        places = ws.take<int64_t>(tiles * experts), faults = ws.take<int64_t>(tiles), lengths = ws.take<int64_t>(experts);
        next = ws.take<int64_t>(experts);
        be.for_rows(tiles, capacity_tile_tokens * k, capacity_count_tile<I>{choices, k, experts, places, faults});
        for (int64_t tile = 0; tile < tiles; ++tile)
            check.require(faults[tile] == 0, status_code::bad_option, ids.absent() ? "ids" : "choices", "indices out of range", faults[tile],
                          "experts, or -1 for padding");
        find_lengths();
        for (int64_t e = 0; e < experts; ++e)
            if (lengths[e] != demand[e]) check.fail(status_code::bad_state, "demand", "count", demand[e], lengths[e]);
    }
    /// How many ask for each expert. Tile after tile, as they lie in memory.
    KEEL_HOST void find_lengths() const {
        for (int64_t e = 0; e < experts; ++e) lengths[e] = 0;
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t e = 0; e < experts; ++e) lengths[e] += places[tile * experts + e];
    }
    /// From counts by tile, whose sums are `lengths`, to each tile's first place at each expert, `start(e)` being the expert's first.
    template <class Start> void counts_to_places(Start start) {
        for (int64_t e = 0; e < experts; ++e) next[e] = start(e);
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t e = 0; e < experts; ++e) {
                int64_t& place = places[tile * experts + e];
                int64_t const in_tile = place;
                place = next[e];
                next[e] += in_tile;
            }
    }

    /// Round after round: who asks queues, experts keep what they have room for, the rest asks its token's next spare expert.
    void run_queues(int64_t capacity) {
        auto *const starts = ws.take<int64_t>(experts), *const room = ws.take<int64_t>(experts);
        auto* const queues = ws.take<uint64_t>(tokens * k);
        int64_t const rounds = choices.extent[1] - k + 1, width = capacity_tile_tokens * k;
        auto* const used = rounds > 1 ? ws.take<uint32_t>(tokens) : nullptr;
        view<I const, 2> asked = choices;
        for (int64_t e = 0; e < experts; ++e) room[e] = capacity;
        for (int64_t round = 0; round < rounds; ++round) {
            int64_t total = 0;
            counts_to_places([&](int64_t e) {
                starts[e] = total;
                total += lengths[e];
                return starts[e];
            });
            be.for_rows(tiles, width, capacity_queue_tile<I>{asked, k, experts, places, out.slots, {options.order, weights}, queues, round == 0});
            be.for_rows(experts, total / experts + 1, capacity_keep_expert{starts, lengths, room, queues});
            for (int64_t e = 0; e < experts; ++e) room[e] -= lengths[e] < room[e] ? lengths[e] : room[e];
            be.for_rows(tiles, width,
                        capacity_settle_tile<I>{choices, ids, k, experts, out.slots, queues, used, places, round == 0, round == rounds - 1});
            find_lengths();
            if (!ids.absent()) asked = ids;
        }
    }

    status run(validation& check, int64_t bytes) {
        check_arguments(check);
        check.enough(ws, bytes);
        if (!check.ok()) return check.result;
        count_choices(check);
        if (!check.ok()) return check.result;

        int64_t const capacity = options.limit.tokens_an_expert(demand.tokens(), k, experts);
        auto const kept = [&](int64_t e) { return demand[e] < capacity ? demand[e] : capacity; };
        if (by_queues() && tokens > 0) run_queues(capacity);
        int64_t total = 0, moved = 0;
        counts_to_places([&](int64_t e) {
            out.offsets(e) = total;
            counts(e) = lengths[e] < capacity ? lengths[e] : capacity;
            total += counts(e);
            moved += counts(e) - kept(e);
            if (!saved.overflow.absent()) saved.overflow(e) = demand[e] - kept(e);
            if (!saved.received.absent()) saved.received(e) = counts(e) - kept(e);
            return out.offsets(e);
        });
        out.offsets(experts) = total;
        view<I const, 2> const served_ids = ids.absent() ? choices : view<I const, 2>(ids);
        be.for_rows(tiles, capacity_tile_tokens * k, capacity_place_tile<I>{served_ids, k, experts, places, out, by_queues()});
        load_counts_access::fill(served, demand.tokens(), k, total, moved);
        return check.result;
    }
};

template <class B, class I>
capacity_call<B, I> call_capacity(B const& be, view<I const, 2> choices, view<float const, 2> weights, demand_counts const& demand,
                                            view<I, 2> ids, expert_slots out, served_counts& served, capacity_saved saved,
                                            capacity_options options, workspace ws) {
    static_assert(backend_traits<B>::space == memory_space::host, "the counting sort is a service of host backends so far");
    int64_t const tokens = choices.extent[0], k = ids.absent() ? choices.extent[1] : demand.per_token();
    return {be, choices, weights, demand, ids, out, served, saved, options, ws, tokens, k, demand.experts(), capacity_tiles(tokens),
            load_counts_access::memory(served)};
}

} // namespace detail

/// Drops what exceeds each expert's capacity and gives every served assignment its row.
///
/// Rule           each expert keeps the first C of those that ask for it, in options.order (drop_order),
///                C = options.limit.tokens_an_expert(demand.tokens(), k, experts). served[e] = min(demand[e], C); offsets are the sums of
///                served; slots count an expert's rows by (token, choice), whatever the drop order. Integers only.
/// Weights        stay as route gave them: what a token's dropped experts held is lost to it, as in training with Megatron.
///                route_weights with normalise_over::served shares it out among those that serve the token.
/// Shapes         ids [tokens, k] from route (-1 for padding), weights [tokens, k] for the orders weight and batch_prioritised, else absent;
///                out.slots [tokens, k], out.offsets [experts + 1], served over memory for [experts] counts; any strides. ids int32 or
///                int64, weights float, the rest int64. saved: each may be absent.
/// Padding        ids of -1 get slot -1 and take no place; served.tokens() leaves them out, as demand.tokens() does.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (limit or alignment outside 1 ... 2^20, minimum below 0, an id that is no
///                expert, order), bad_state (demand that was not counted on these ids, or of another k), overlap, small_workspace: all
///                found before an output is written.
/// Zero sizes     no tokens: served and offsets are 0.
/// Aliasing       outputs have memory of their own. Workspace: apply_capacity_workspace(tokens, experts, k, order); without the last two
///                for the order of position.
/// Cost           two passes over the ids, one write of the slots; tiles of 256 tokens run side by side. Other orders than position: two more
///                passes over both, and up to 8 over the queue of each full expert.
/// Source         Fedus et al. 2022 (2101.03961) eq. 3 for the factor.
template <row_backend B, class I>
status apply_capacity(B const& be, view<I, 2> ids, std::type_identity_t<view<float const, 2>> weights, demand_counts const& demand,
                      expert_slots out, served_counts& served, capacity_saved saved, capacity_options options, workspace ws = {}) {
    using index = std::remove_const_t<I>;
    validation check("apply_capacity");
    auto call = detail::call_capacity<B, index>(be, ids, weights, demand, {}, out, served, saved, options, ws);
    return call.run(check, apply_capacity_workspace(call.tokens, call.experts, call.k, options.order));
}
template <row_backend B, class I>
status apply_capacity(B const& be, view<I, 2> ids, demand_counts const& demand, expert_slots out, served_counts& served,
                      capacity_options options, workspace ws = {}) {
    return apply_capacity(be, ids, {}, demand, out, served, {}, options, ws);
}

/// Serves as apply_capacity does, but offers what overflowed to the token's next choices before it is dropped.
///
/// Rule           choices holds k experts a token and then `spare` next ones, in route's order (route_options::spare). Round 0 is
///                apply_capacity on the first k. In each of the `spare` rounds after it, every assignment that no expert has kept asks for
///                the first spare expert that its token has not asked for, lower choices first; experts keep what they have room for
///                in options.order (by the weight of the choice that an assignment stands for). What an expert has kept it never gives
///                back. Pure and deterministic: the same for any number of threads.
/// Demand         is of the first k choices, as route counted it. A rerouted assignment is no demand of the expert that takes it over, so
///                that the balancing bias sees the true load. served may exceed it: served.rerouted() is by how many in all.
/// Ids            ids [tokens, k], written: the expert that serves the assignment, or the choice itself where it was dropped. They are
///                distinct in a token. weights of route belong to the choices: route_weights makes those of ids, and route_backward
///                takes both as they are.
/// Shapes         choices [tokens, k + spare], spare 0 or more; -1 ends a row's spare experts early. The rest as in apply_capacity.
/// Status         as apply_capacity. Workspace: reroute_overflow_workspace(tokens, experts, k, spare).
/// Cost           three passes over ids and slots a round.
template <row_backend B, class C, class I>
status reroute_overflow(B const& be, view<C, 2> choices, std::type_identity_t<view<float const, 2>> weights, demand_counts const& demand,
                        view<I, 2> ids, expert_slots out, served_counts& served, capacity_saved saved, capacity_options options,
                        workspace ws = {}) {
    static_assert(std::is_same_v<std::remove_const_t<C>, I>, "choices and ids share one format");
    validation check("reroute_overflow");
    check.present("ids", ids).require(!ids.absent(), status_code::bad_pointer, "ids", "data, not null");
    if (!check.ok()) return check.result;
    auto call = detail::call_capacity<B, I>(be, choices, weights, demand, ids, out, served, saved, options, ws);
    return call.run(check, reroute_overflow_workspace(call.tokens, call.experts, call.k, choices.extent[1] - call.k));
}

/// The share of assignments that were dropped, 1 - served / demand, both of the same tokens. 0 where nothing was asked for.
KEEL_HOST double dropped_share(demand_counts const& demand, served_counts const& served) {
    return demand.total() == 0 ? 0.0 : static_cast<double>(demand.total() - served.total()) / static_cast<double>(demand.total());
}

} // namespace keel::inline KEEL_ABI
