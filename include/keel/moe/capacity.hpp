// Capacity: which assignments an expert serves and which are dropped, in integers only, and where each served one lies.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/moe/demand.hpp>
#include <keel/moe/route.hpp>

namespace keel {

/// How many tokens an expert takes. There is no default and no number that means "no limit": one names dropless() or a factor.
///
///     capacity_limit::dropless()               every assignment is served
///     capacity_limit::factor(5, 4)             1.25 times the mean load: ceil(tokens * k * 5 / (experts * 4))
///     capacity_limit::factor(5, 4).at_least(8)
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

    KEEL_FN constexpr bool is_dropless() const { return dropless_; }
    KEEL_FN constexpr int64_t numerator() const { return numerator_; }
    KEEL_FN constexpr int64_t denominator() const { return denominator_; }
    KEEL_FN constexpr int64_t minimum() const { return minimum_; }

    /// Tokens one expert takes: max(minimum, ceil(tokens * k * numerator / (experts * denominator))), at most `tokens`. Exact while
    /// tokens * k <= 2^42 and the numerator <= 2^20, which apply_capacity checks.
    KEEL_FN constexpr int64_t tokens_an_expert(int64_t tokens, int64_t k, int64_t experts) const {
        if (dropless_) return tokens;
        int64_t const share = experts * denominator_;
        int64_t const rounded_up = (tokens * k * numerator_ + share - 1) / share;
        int64_t const wanted = rounded_up > minimum_ ? rounded_up : minimum_;
        return wanted < tokens ? wanted : tokens;
    }

  private:
    constexpr capacity_limit() = default;
    KEEL_FN constexpr capacity_limit(int64_t numerator, int64_t denominator)
        : numerator_(numerator), denominator_(denominator), dropless_(false) {}
    int64_t numerator_ = 1, denominator_ = 1, minimum_ = 0;
    bool dropless_ = true;
};

struct capacity_options {
    capacity_limit limit; ///< no default: dropping is a decision
};

/// Where each assignment lies among the rows that the experts work on.
struct expert_slots {
    view<int64_t, 2> slots = {};   ///< [tokens, k], the row of each assignment; -1: dropped, or padding
    view<int64_t, 1> offsets = {}; ///< [experts + 1], expert e owns rows offsets[e] ... offsets[e + 1] - 1
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Tokens that are counted together. Any number gives the same slots.
inline constexpr int64_t capacity_tile_tokens = 256;

/// Pass 1: how often each expert occurs in a tile, and how many ids are no expert.
template <class I> struct capacity_count_tile {
    view<I const, 2> ids;
    int64_t experts;
    int64_t *counts, *faults;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        if (!g.leader()) return;
        int64_t* const count = counts + tile * experts;
        int64_t const first = tile * capacity_tile_tokens, tokens = ids.extent[0];
        for (int64_t e = 0; e < experts; ++e) count[e] = 0;
        faults[tile] = 0;
        for (int64_t t = first; t < tokens && t < first + capacity_tile_tokens; ++t)
            for (int64_t j = 0; j < ids.extent[1]; ++j) {
                auto const id = static_cast<int64_t>(ids(t, j));
                if (id >= 0 && id < experts) ++count[id];
                else if (id != -1) ++faults[tile];
            }
    }
};

/// Pass 2: each assignment's place in its expert's queue, and its slot if the expert still serves it.
template <class I> struct capacity_place_tile {
    view<I const, 2> ids;
    int64_t experts;
    int64_t* next; ///< [tiles, experts], the tile's first place in each queue; consumed
    expert_slots out;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        if (!g.leader()) return;
        int64_t* const place = next + tile * experts;
        int64_t const first = tile * capacity_tile_tokens, tokens = ids.extent[0];
        for (int64_t t = first; t < tokens && t < first + capacity_tile_tokens; ++t)
            for (int64_t j = 0; j < ids.extent[1]; ++j) {
                auto const id = static_cast<int64_t>(ids(t, j));
                int64_t slot = -1;
                if (id >= 0) {
                    slot = out.offsets(id) + place[id]++;
                    if (slot >= out.offsets(id + 1)) slot = -1;
                }
                out.slots(t, j) = slot;
            }
    }
};

/// Bytes for apply_capacity.
KEEL_HOST int64_t apply_capacity_workspace(int64_t tokens, int64_t experts) {
    int64_t const tiles = (tokens + capacity_tile_tokens - 1) / capacity_tile_tokens;
    return workspace_total(workspace_bytes<int64_t>(tiles * experts) + workspace_bytes<int64_t>(tiles) + workspace_bytes<int64_t>(experts));
}

/// Drops what exceeds each expert's capacity and gives every served assignment its row.
///
/// Rule           assignments queue at their expert in the order of (token, choice), whatever their weights; the first C are served,
///                C = options.limit.tokens_an_expert(demand.tokens(), k, experts). served[e] = min(demand[e], C); offsets are the sums of
///                served; the slot is offsets[e] + place in the queue: stable, expert by expert. Integers only.
/// Weights        stay as route gave them: what a token's dropped experts held is lost to it, as in training with Megatron.
/// Shapes         ids [tokens, k] from route (-1 for padding), out.slots [tokens, k], out.offsets [experts + 1], served over memory for
///                [experts] counts; ids, slots and offsets of any strides. ids int32 or int64, the rest int64.
/// Padding        ids of -1 get slot -1 and take no place; served.tokens() leaves them out, as demand.tokens() does.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (limit outside 1 ... 2^20, minimum below 0, an id that is no expert),
///                bad_state (demand that was not counted on these ids, or of another k), overlap, small_workspace: all found before an
///                output is written.
/// Zero sizes     no tokens: served and offsets are 0.
/// Aliasing       out.slots, out.offsets and served have memory of their own. Workspace: apply_capacity_workspace(tokens, experts).
/// Cost           two passes over the ids, one write of the slots; tiles of 256 tokens run side by side.
/// Source         Fedus et al. 2022 (2101.03961) eq. 3 for the factor; the order is that of Megatron's drop policy "position".
template <row_backend B, class I>
status apply_capacity(B const& be, view<I, 2> ids, demand_counts const& demand, expert_slots out, served_counts& served,
                      capacity_options options, workspace ws = {}) {
    static_assert(backend_traits<B>::space == memory_space::host, "the counting sort is a service of host backends so far");
    int64_t const tokens = ids.extent[0], k = ids.extent[1], experts = demand.experts();
    int64_t const tiles = (tokens + capacity_tile_tokens - 1) / capacity_tile_tokens;
    capacity_limit const limit = options.limit;
    view<int64_t, 1> const counts = detail::load_counts_access::memory(served);
    validation check("apply_capacity");
    check.present("ids", ids);
    check.require(demand.filled() && demand.per_token() == k, status_code::bad_state, "demand", "experts a token", demand.per_token(),
                  "the demand that route counted on these ids");
    check.shape("served", counts, experts).unit_stride("served", counts);
    check.shape("out.slots", out.slots, tokens, k).distinct("out.slots", out.slots);
    check.shape("out.offsets", out.offsets, experts + 1).distinct("out.offsets", out.offsets);
    check.require(limit.numerator() >= 1 && limit.numerator() <= (1 << 20), status_code::bad_option, "options.limit", "numerator",
                  limit.numerator(), "1 up to 2^20");
    check.require(limit.denominator() >= 1 && limit.denominator() <= (1 << 20), status_code::bad_option, "options.limit",
                  "denominator", limit.denominator(), "1 up to 2^20");
    check.require(limit.minimum() >= 0, status_code::bad_option, "options.limit", "minimum", limit.minimum(), "0 or more");
    check.disjoint("out.slots", out.slots, ids).disjoint("out.slots", out.slots, counts).disjoint("out.offsets", out.offsets, counts);
    check.disjoint("out.slots", out.slots, out.offsets).disjoint("out.slots", out.slots, demand.counts());
    check.disjoint("out.offsets", out.offsets, demand.counts()).disjoint("served", counts, demand.counts());
    check.disjoint("out.offsets", out.offsets, ids).disjoint("served", counts, ids);
    check.enough(ws, apply_capacity_workspace(tokens, experts));
    if (!check.ok()) return check.result;

    auto* const places = ws.take<int64_t>(tiles * experts);
    auto* const faults = ws.take<int64_t>(tiles);
    auto* const queue = ws.take<int64_t>(experts);
    be.for_rows(tiles, capacity_tile_tokens * k, capacity_count_tile<std::remove_const_t<I>>{ids, experts, places, faults});
    for (int64_t e = 0; e < experts; ++e) queue[e] = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        check.require(faults[tile] == 0, status_code::bad_option, "ids", "indices out of range", faults[tile], "experts, or -1 for padding");
        for (int64_t e = 0; e < experts; ++e) {
            int64_t const in_tile = places[tile * experts + e];
            places[tile * experts + e] = queue[e];
            queue[e] += in_tile;
        }
    }
    for (int64_t e = 0; e < experts; ++e)
        if (queue[e] != demand[e]) check.fail(status_code::bad_state, "demand", "count", demand[e], queue[e]);
    if (!check.ok()) return check.result;

    int64_t const capacity = limit.tokens_an_expert(demand.tokens(), k, experts);
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) {
        out.offsets(e) = total;
        counts(e) = queue[e] < capacity ? queue[e] : capacity;
        total += counts(e);
    }
    out.offsets(experts) = total;
    be.for_rows(tiles, capacity_tile_tokens * k, capacity_place_tile<std::remove_const_t<I>>{ids, experts, places, out});
    detail::load_counts_access::fill(served, demand.tokens(), k, total);
    return check.result;
}

/// The share of assignments that were dropped, 1 - served / demand, both of the same tokens. 0 where nothing was asked for.
KEEL_HOST double dropped_share(demand_counts const& demand, served_counts const& served) {
    return demand.total() == 0 ? 0.0 : static_cast<double>(demand.total() - served.total()) / static_cast<double>(demand.total());
}

} // namespace keel::inline KEEL_ABI
