// The load-balancing loss, one token at a time. It is linear in the tokens' probabilities: with what multiplies them known from the demand,
// a token's part is one dot product, forward and backward.
#pragma once

#include <keel/moe/route_scores.hpp>

namespace keel::inline KEEL_ABI {

/// p_e = s_e / (sum of all s) of a row, by a common shift that no score's vanishing touches. Scores, not their bias.
struct row_shares {
    float shift = 0.0f, sum = 1.0f;

    template <class F> KEEL_FN F of(score_function s, F const& z) const { return scaled_score(s, z, shift) / F(sum); }
};

template <class G, class L> KEEL_FN row_shares shares_of(G const& g, L const* z, int64_t experts, score_function score) {
    using F = typename G::value;
    using U = typename G::words;
    U highest(0u);
    g.each(experts, [&](auto at) { highest = umax(highest, g.inside(at, rank_word(scale_exponent(score, g.load(z, at))))); });
    row_shares shares{from_ordered_word(g.max_bits(highest)), 1.0f};
    shares.sum = g.sum(experts, [&](F const& acc, auto at) {
        return acc + g.inside(at, scaled_score(score, g.load(z, at), shares.shift));
    });
    return shares;
}

/// sum over experts of factor_e p_e.
template <class G, class L>
KEEL_FN float balance_term(G const& g, L const* z, float const* factors, int64_t experts, score_function score, row_shares const& shares) {
    using F = typename G::value;
    return g.sum(experts, [&](F const& acc, auto at) {
        return fma(g.inside(at, shares.of(score, g.load(z, at))), g.load(factors, at), acc);
    });
}

/// Which document a token is in; 0 without documents.
KEEL_FN int64_t document_at(view<int64_t const, 1> documents, int64_t token) {
    if (documents.absent()) return 0;
    int64_t first = 0, last = documents.extent[0] - 1; // documents(first) <= token < documents(last)
    while (last - first > 1) {
        int64_t const middle = first + (last - first) / 2;
        (documents(middle) <= token ? first : last) = middle;
    }
    return first;
}

/// Each token's part of the loss; 0 for padding.
template <class L> struct balance_term_row {
    view<L const, 2> logits;
    view<float const, 2> factors;
    view<bool const, 1> valid;
    view<int64_t const, 1> documents;
    score_function score;
    float* terms;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        float term = 0.0f;
        if (valid.absent() || valid(token)) {
            L const* const z = logits.at(token);
            int64_t const experts = logits.extent[1];
            row_shares const shares = shares_of(g, z, experts, score);
            term = balance_term(g, z, factors.at(document_at(documents, token)), experts, score, shares);
        }
        if (g.leader()) terms[token] = term;
    }
};

struct balance_sum_row {
    float const* terms;
    int64_t tokens;
    float* loss;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        using F = typename G::value;
        float const sum = g.sum(tokens, [&](F const& acc, auto at) { return acc + g.load(terms, at); });
        if (g.leader()) *loss = sum;
    }
};

/// How often each expert occurs in a document, and the document's tokens after them.
template <class I> struct document_count_row {
    view<I const, 2> ids;
    int64_t k, experts;
    view<int64_t const, 1> documents;
    int64_t* counts; ///< [documents, experts + 1]

    template <class G> KEEL_FN void operator()(G const& g, int64_t document) const {
        if (!g.leader()) return;
        int64_t* const count = counts + document * (experts + 1);
        for (int64_t e = 0; e <= experts; ++e) count[e] = 0;
        for (int64_t t = documents(document); t < documents(document + 1); ++t) {
            if (ids(t, 0) < 0) continue;
            ++count[experts];
            for (int64_t j = 0; j < k; ++j) ++count[static_cast<int64_t>(ids(t, j))];
        }
    }
};

/// coefficient * (experts D_e / (k T)) / tokens, three roundings beside those of the integers.
struct balance_factor_row {
    int64_t const* counts; ///< [documents, step]
    int64_t step, counted; ///< counted: tokens that the counts are of; -1: they stand after the experts
    int64_t k, tokens;
    float coefficient;
    grad_mode mode;
    view<float, 2> factors;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        if (!g.leader()) return;
        int64_t const experts = factors.extent[1];
        int64_t const* const count = counts + row * step;
        int64_t const chosen = k * (counted < 0 ? count[experts] : counted);
        for (int64_t e = 0; e < experts; ++e) {
            float const share = chosen == 0 ? 0.0f : div(static_cast<float>(experts * count[e]), static_cast<float>(chosen));
            float const factor = tokens == 0 ? 0.0f : div(mul(coefficient, share), static_cast<float>(tokens));
            factors(row, e) = mode == accumulate ? add(factors(row, e), factor) : factor;
        }
    }
};

} // namespace keel::inline KEEL_ABI
