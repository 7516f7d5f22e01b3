// Thresholds under a group limit: what an expert's score with its bias has to reach so that its group is among a token's best and it is
// among the best of those groups.
//
// Raising one bias b_e lifts its group as well. Once group q is in, the others are the best top_groups - 1 of the rest, whatever b_e. So e
// has to pass two levels, and its threshold is the larger of them less its score:
//
//     place     the (k + 1)-th largest s + b of the experts of q and of those others
//     entrance  the score of the group that q puts out, less what q has without e; none where q is in without e
//
// In a toy of 512 tokens and 64 experts in 8 groups (best 3, k = 8, skewed by group and token) the bias of these levels, at a rate of 1,
// brought the largest demand from 4.4 means to 1.05; that of thresholds which see no groups stayed at 1.3.
#pragma once

#include <keel/moe/thresholds_rows.hpp>

namespace keel::inline KEEL_ABI {

/// How a group stands with a token.
struct group_standing {
    uint32_t best[3];      ///< words of its three largest s + b; 0 where it has fewer experts
    uint32_t score, logit; ///< what groups are ordered by, as in route_groups.hpp
    int32_t ahead;         ///< groups before it
    float place;
};

/// The word of the n-th largest of c over the groups that `takes` names; 0 where they have fewer experts. A bit a pass.
template <class G, class Takes>
KEEL_FN uint32_t nth_word(G const& g, float const* c, int64_t groups, int64_t size, int64_t n, Takes takes) {
    using U = typename G::words;
    uint32_t found = 0;
    for (uint32_t bit = sign_bit; bit != 0; bit >>= 1) {
        U count(0u);
        for (int64_t q = 0; q < groups; ++q)
            if (takes(q))
                g.each(size, [&](auto at) {
                    U const own = g.inside(at, rank_word(g.load(c + q * size, at)));
                    count = count + select(gt(own, U((found | bit) - 1)), U(1u), U(0u));
                });
        if (g.total(count) >= n) found |= bit;
    }
    return found;
}

/// Each expert's level for a token: s + bias on the way, then the larger of place and entrance.
template <class L> struct threshold_group_row {
    view<L const, 2> logits;
    view<float const, 1> bias, log_sum;
    view<int32_t const, 2> ids; ///< -1 in a row of padding
    route_options options;
    int64_t k;
    group_standing* standings; ///< [tokens, groups]
    float* level;              ///< [tokens, experts]

    template <class G> KEEL_FN void operator()(G const& g, int64_t t) const {
        using F = typename G::value;
        using U = typename G::words;
        if (ids(t, 0) < 0) return;
        int64_t const experts = logits.extent[1], groups = options.groups, size = experts / groups;
        L const* const z = logits.at(t);
        float* const c = level + t * experts;
        group_standing* const of = standings + t * groups;
        g.each(experts, [&](auto at) {
            F const s = threshold_score(options.score, g.load(z, at), log_sum(t));
            g.store(c, at, nan_as_mask(F(s + g.load(bias.data, at))));
        });
        g.sync();
        for (int64_t q = 0; q < groups; ++q) {
            group_standing own{};
            three_best(g, c + q * size, size, own.best);
            U highest(0u);
            g.each(size, [&](auto at) { highest = umax(highest, g.inside(at, rank_word(g.load(z + q * size, at)))); });
            own.logit = g.max_bits(highest);
            own.score = rank_word(score(own.best[0], own.best[1]));
            if (g.leader()) of[q] = own;
        }
        g.sync();
        if (g.leader())
            for (int64_t q = 0; q < groups; ++q) of[q].ahead = ahead_of(of, q);
        g.sync();
        int64_t const in = options.top_groups;
        float const chosen_place = number(nth_word(g, c, groups, size, k + 1, [&](int64_t p) { return of[p].ahead < in; }));
        for (int64_t q = 0; q < groups; ++q) {
            float own = chosen_place;
            if (of[q].ahead >= in) own = number(nth_word(g, c, groups, size, k + 1, [&](int64_t p) { return p == q || of[p].ahead < in - 1; }));
            if (g.leader()) of[q].place = own;
        }
        g.sync();
        for (int64_t q = 0; q < groups; ++q) {
            int64_t const put_out = of[q].ahead < in ? in : in - 1; // the group that q keeps out, or would
            float rival = 0.0f;
            for (int64_t p = 0; p < groups; ++p)
                if (of[p].ahead == put_out) rival = from_ordered_word(of[p].score);
            uint32_t const first = of[q].best[0], second = of[q].best[1], third = of[q].best[2];
            float const of_first = reach(of[q].place, rival, second, third), of_second = reach(of[q].place, rival, first, third);
            float const of_others = reach(of[q].place, rival, first, second);
            g.each(size, [&](auto at) {
                U const own = rank_word(g.load(c + q * size, at));
                g.store(c + q * size, at, select(eq(own, U(first)), F(of_first), select(eq(own, U(second)), F(of_second), F(of_others))));
            });
        }
    }

    /// Words in falling order; equal ones count each.
    template <class G> KEEL_FN static void three_best(G const& g, float const* c, int64_t size, uint32_t* best) {
        using U = typename G::words;
        uint32_t word = 0xffffffffu;
        for (int found = 0; found < 3 && word != 0;) {
            U highest(0u), equal(0u);
            g.each(size, [&](auto at) {
                U const own = g.inside(at, rank_word(g.load(c, at)));
                highest = umax(highest, select(gt(U(word), own), own, U(0u)));
            });
            word = g.max_bits(highest);
            if (word == 0) return;
            g.each(size, [&](auto at) { equal = equal + select(eq(g.inside(at, rank_word(g.load(c, at))), U(word)), U(1u), U(0u)); });
            for (int64_t left = g.total(equal); left > 0 && found < 3; --left) best[found++] = word;
        }
    }

    /// Nobody ranks as what is masked does.
    KEEL_FN static float number(uint32_t word) { return word == 0 ? as_float(sign_bit | infinity_bits) : from_ordered_word(word); }
    KEEL_FN float score(uint32_t first, uint32_t second) const {
        return options.by == group_score::best ? number(first) : add(number(first), number(second));
    }
    /// `first` and `second` lead the group without the expert.
    KEEL_FN float reach(float place, float rival, uint32_t first, uint32_t second) const {
        if (score(first, second) > rival) return place;
        float const entrance = options.by == group_score::best ? rival : rival - number(first);
        return is_nan(entrance) ? as_float(infinity_bits) : entrance > place ? entrance : place;
    }
    KEEL_FN int32_t ahead_of(group_standing const* of, int64_t q) const {
        int32_t ahead = 0;
        for (int64_t p = 0; p < options.groups; ++p) {
            bool const first = of[p].score != of[q].score   ? of[p].score > of[q].score
                               : of[p].logit != of[q].logit ? of[p].logit > of[q].logit : p < q;
            ahead += first ? 1 : 0;
        }
        return ahead;
    }
};

} // namespace keel::inline KEEL_ABI
