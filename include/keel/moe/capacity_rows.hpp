// Capacity in integers: queues at the experts, what each keeps of its queue, and where that lies. Tokens go by tiles, experts one by one.
//
// While queues are worked on, an assignment's slot says how it stands: -2 - i is the place i in all queues together, asking_slot is to
// ask again, 0 is served, -1 is given up (or padding). place_tile turns them into rows.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/lanes.hpp>
#include <keel/moe/capacity_limit.hpp>

namespace keel {

/// Where each assignment lies among the rows that the experts work on.
struct expert_slots {
    view<int64_t, 2> slots = {};   ///< [tokens, k], the row of each assignment; -1: dropped, or padding
    view<int64_t, 1> offsets = {}; ///< [experts + 1], expert e owns rows offsets[e] ... offsets[e + 1] - 1
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Tokens that are counted together. Any number gives the same slots.
inline constexpr int64_t capacity_tile_tokens = 256;
inline constexpr int64_t asking_slot = -2;

/// body(token) over the tile's tokens.
template <class Body> KEEL_FN void each_token(int64_t tile, int64_t tokens, Body body) {
    int64_t const first = tile * capacity_tile_tokens, end = first + capacity_tile_tokens;
    for (int64_t t = first; t < tokens && t < end; ++t) body(t);
}

/// How often each expert occurs in a tile, and how many ids are no expert (the spare ones of a row too).
template <class I> struct capacity_count_tile {
    view<I const, 2> ids;
    int64_t k, experts;
    int64_t *counts, *faults;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        if (!g.leader()) return;
        capacity_count_tile const own = *this; // members that no store can reach
        int64_t* const count = counts + tile * experts;
        for (int64_t e = 0; e < own.experts; ++e) count[e] = 0;
        int64_t bad = 0;
        each_token(tile, own.ids.extent[0], [&](int64_t t) {
            for (int64_t j = 0; j < own.k; ++j) {
                auto const id = static_cast<int64_t>(own.ids(t, j));
                if (own.is_expert(id)) [[likely]] ++count[id]; // a branch: without one, each count would wait for those before it
                else bad += id != -1 ? 1 : 0;
            }
            for (int64_t j = own.k; j < own.ids.extent[1]; ++j) {
                auto const id = static_cast<int64_t>(own.ids(t, j));
                bad += own.is_expert(id) || id == -1 ? 0 : 1;
            }
        });
        faults[tile] = bad;
    }
    KEEL_FN bool is_expert(int64_t id) const { return static_cast<uint64_t>(id) < static_cast<uint64_t>(experts); }
};

/// Each assignment's slot: the next one of its expert, if that has one left. After queues only what they served has one.
template <class I> struct capacity_place_tile {
    view<I const, 2> ids;
    int64_t k, experts;
    int64_t* next; ///< [tiles, experts], the tile's first slot at each expert; consumed
    expert_slots out;
    bool has_state; ///< only what stands at 0 is served

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        if (!g.leader()) return;
        capacity_place_tile const own = *this; // members that no store can reach
        int64_t* const place = next + tile * experts;
        each_token(tile, own.ids.extent[0], [&](int64_t t) {
            for (int64_t j = 0; j < own.k; ++j) {
                auto const id = static_cast<int64_t>(own.ids(t, j));
                int64_t slot = -1;
                if (id >= 0 && (!own.has_state || own.out.slots(t, j) == 0)) [[likely]] {
                    slot = place[id]++;
                    slot |= (own.out.offsets(id + 1) - 1 - slot) >> 63; // -1 from there on; a branch would often be guessed wrong
                }
                own.out.slots(t, j) = slot;
            }
        });
    }
};

/// By what an expert's queue is kept: lower words first, equal ones by their place in the queue.
struct drop_words {
    drop_order order;
    view<float const, 2> weights;

    KEEL_FN static uint64_t falling(float w) { return is_nan(w) ? 0xffffffffu : ~ordered_word(w + 0.0f); }
    /// What a token's assignments share.
    KEEL_FN uint64_t of_token(int64_t t, int64_t k) const {
        uint64_t first = 0xffffffffu;
        if (order == drop_order::batch_prioritised)
            for (int64_t j = 0; j < k; ++j) first = falling(weights(t, j)) < first ? falling(weights(t, j)) : first;
        return first;
    }
    KEEL_FN uint64_t of(int64_t t, int64_t j, uint64_t token) const {
        if (order == drop_order::position) return 0;
        if (order == drop_order::weight) return falling(weights(t, j));
        auto const choice = static_cast<uint64_t>(j);
        return order == drop_order::choice_major ? choice : (choice << 32) | token;
    }
};

/// Queues what asks: its word at its place among all queues. The first round finds everyone asking.
template <class I> struct capacity_queue_tile {
    view<I const, 2> ids;
    int64_t k, experts;
    int64_t* next; ///< [tiles, experts], the tile's first place in each queue; consumed
    view<int64_t, 2> slots;
    drop_words words;
    uint64_t* queues;
    bool first_round;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        if (!g.leader()) return;
        int64_t* const place = next + tile * experts;
        each_token(tile, ids.extent[0], [&](int64_t t) {
            uint64_t const token = words.of_token(t, k);
            for (int64_t j = 0; j < k; ++j) {
                auto const id = static_cast<int64_t>(ids(t, j));
                if (first_round) slots(t, j) = id >= 0 ? asking_slot : -1;
                if (slots(t, j) != asking_slot) continue;
                int64_t const i = place[id]++;
                queues[i] = words.of(t, j, token);
                slots(t, j) = -2 - i;
            }
        });
    }
};

/// Which of its queue an expert keeps: the `room` lowest words. Leaves 1 for those, 0 for the others.
struct capacity_keep_expert {
    int64_t const *starts, *lengths, *room;
    uint64_t* queues;

    template <class G> KEEL_FN void operator()(G const& g, int64_t expert) const {
        if (!g.leader()) return;
        uint64_t* const queue = queues + starts[expert];
        int64_t const n = lengths[expert];
        int64_t equal = room[expert]; // how many of those with the word `last` are kept
        uint64_t const last = n > equal ? nth(queue, n, equal) : ~uint64_t{0};
        for (int64_t i = 0; i < n; ++i) {
            bool const kept = queue[i] < last || (queue[i] == last && equal-- > 0);
            queue[i] = kept ? 1 : 0;
        }
    }
    /// The word at place `left` of the n ones in order, a byte at a time; `left` becomes its place among its equals.
    KEEL_FN static uint64_t nth(uint64_t const* words, int64_t n, int64_t& left) {
        uint64_t all = 0, found = 0, known = 0;
        for (int64_t i = 0; i < n; ++i) all |= words[i];
        int shift = 0;
        while (shift < 56 && (all >> shift) > 0xff) shift += 8;
        for (; shift >= 0; shift -= 8) {
            int64_t count[256] = {};
            for (int64_t i = 0; i < n; ++i)
                if ((words[i] & known) == found) ++count[(words[i] >> shift) & 0xff];
            uint64_t digit = 0;
            while (left >= count[digit]) left -= count[digit++];
            found |= digit << shift;
            known |= uint64_t{0xff} << shift;
        }
        return found;
    }
};

/// What the queues decided: served, or the token's next spare expert, or given up. Counts who asks next or, in the last round, who is served.
template <class I> struct capacity_settle_tile {
    view<I const, 2> choices; ///< [tokens, k + spare]
    view<I, 2> asked;         ///< [tokens, k]; absent where there are no spare experts
    int64_t k, experts;
    view<int64_t, 2> slots;
    uint64_t const* queues;
    uint32_t* used; ///< [tokens], spare experts that the token has asked for
    int64_t* counts;
    bool first_round, last_round;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        if (!g.leader()) return;
        int64_t* const count = counts + tile * experts;
        for (int64_t e = 0; e < experts; ++e) count[e] = 0;
        each_token(tile, choices.extent[0], [&](int64_t t) {
            if (first_round && !asked.absent())
                for (int64_t j = 0; j < k; ++j) asked(t, j) = choices(t, j);
            if (first_round && !last_round) used[t] = 0;
            for (int64_t j = 0; j < k; ++j) {
                if (slots(t, j) <= asking_slot) slots(t, j) = queues[-2 - slots(t, j)] != 0 ? 0 : next_of(t, j);
                if (slots(t, j) != (last_round ? 0 : asking_slot)) continue;
                ++count[static_cast<int64_t>(asked.absent() ? choices(t, j) : asked(t, j))];
            }
        });
    }
    KEEL_FN int64_t next_of(int64_t t, int64_t j) const {
        bool const again = !last_round && k + used[t] < choices.extent[1] && choices(t, k + used[t]) >= 0;
        if (!asked.absent()) asked(t, j) = choices(t, again ? k + used[t]++ : j);
        return again ? asking_slot : -1;
    }
};

} // namespace keel::inline KEEL_ABI
