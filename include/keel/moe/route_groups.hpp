// The group limit: a token's experts are of its few best groups. Experts of other groups rank below every other, masked ones included;
// a mask of 0, as some have it, would lose to nothing once a bias is negative.
#pragma once

#include <keel/moe/route_scores.hpp>

namespace keel::inline KEEL_ABI {

/// Inside a group NaN ranks with what -Inf masks, then by its logit: NaN itself marks what is outside.
template <class F> KEEL_FN F nan_as_mask(F const& c) { return select(is_nan(c), F(as_float(sign_bit | infinity_bits)), c); }

/// Marks the experts of all but the options.top_groups best groups: biased becomes NaN there. Groups go by options.by, ties by their largest
/// logit, then the lower index. A group with one expert that is not masked counts as masked in top_two. With by_logit the others
/// become their logits. `words` holds two words a group.
template <class G, class L>
KEEL_FN void limit_to_groups(G const& g, L const* z, int64_t experts, route_options const& options, bool by_logit, float* biased,
                             uint32_t* words) {
    using F = typename G::value;
    using U = typename G::words;
    int64_t const groups = options.groups, size = experts / groups;
    float const* const scores = biased;
    uint32_t *const order = words, *const logits = words + groups;
    for (int64_t q = 0; q < groups; ++q) {
        U highest(0u), highest_logit(0u);
        g.each(size, [&](auto at) {
            highest = umax(highest, g.inside(at, rank_word(g.load(scores + q * size, at))));
            highest_logit = umax(highest_logit, g.inside(at, rank_word(g.load(z + q * size, at))));
        });
        uint32_t const first = g.max_bits(highest), logit = g.max_bits(highest_logit);
        uint32_t word = first;
        if (options.by == group_score::top_two) {
            U lower(0u), equal(0u);
            g.each(size, [&](auto at) {
                U const own = g.inside(at, rank_word(g.load(scores + q * size, at)));
                lower = umax(lower, select(gt(U(first), own), own, U(0u)));
                equal = equal + select(eq(own, U(first)), U(1u), U(0u));
            });
            uint32_t const next = g.max_bits(lower);
            uint32_t const second = g.total(equal) > 1 ? first : next;
            word = rank_word(add(from_ordered_word(first), from_ordered_word(second)));
        }
        if (g.leader()) order[q] = word, logits[q] = logit;
    }
    g.sync();
    for (int64_t q = 0; q < groups; ++q) {
        int64_t ahead = 0;
        for (int64_t other = 0; other < groups; ++other) {
            bool const first = order[other] != order[q]     ? order[other] > order[q]
                               : logits[other] != logits[q] ? logits[other] > logits[q] : other < q;
            ahead += first ? 1 : 0;
        }
        bool const chosen = ahead < options.top_groups;
        if (chosen && !by_logit) continue;
        g.each(size, [&](auto at) {
            g.store(biased + q * size, at, chosen ? nan_as_mask(g.load(z + q * size, at)) : F(as_float(nan_bits)));
        });
    }
    g.sync();
}

} // namespace keel::inline KEEL_ABI
