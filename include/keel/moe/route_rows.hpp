// The mathematics of the router, one token at a time: selection, weights, counts, and the gradient of the logits.
#pragma once

#include <keel/backend/top_k.hpp>
#include <keel/core/report.hpp>
#include <keel/moe/load_balance_rows.hpp>
#include <keel/moe/route_groups.hpp>
#include <keel/moe/route_lanes.hpp>
#include <keel/moe/route_scores.hpp>

namespace keel::inline KEEL_ABI {

/// Tokens that one group routes in turn, with one row of scratch.
inline constexpr int64_t route_tile_tokens = 64;

/// By what a token's experts are ordered: their score with the bias, or their logit where there is no bias, then the logit. Experts
/// outside the token's groups come after all others.
template <class L> struct selection_keys {
    L const* logits;
    float const* biased;
    bool one_word; ///< the logit alone: neither bias nor groups

    template <class G> KEEL_FN auto of(G const& g, auto at) const {
        auto const logit = rank_word(g.load(logits, at));
        return arg_max_keys<typename G::words>{one_word ? logit : rank_word(g.load(biased, at)), logit};
    }
    KEEL_FN arg_max_keys<uint32_t> of_element(int64_t i) const {
        uint32_t const logit = rank_word(load_element(logits + i));
        return {one_word ? logit : rank_word(biased[i]), logit};
    }
};

/// Scratch for one row of logits.
struct route_scratch {
    float* biased;   ///< s(z) + bias
    uint32_t* words; ///< for top_k
    KEEL_FN route_scratch row(int64_t i, int64_t experts) const { return {biased + i * experts, words + i * experts}; }
};

/// The selection, weights and log-sum-exp of tokens.
template <class L, class I> struct route_row {
    view<L const, 2> logits;
    view<float const, 1> bias;
    view<I, 2> ids;
    view<float, 2> weights;
    view<float, 1> log_sum;
    route_options options;

    template <class G> KEEL_FN void route(G const& g, int64_t token, route_scratch scratch) const {
        using F = typename G::value;
        L const* const z = logits.at(token);
        int64_t const experts = logits.extent[1], k = weights.extent[1], listed = ids.extent[1];
        bool const has_bias = !bias.absent(), grouped = options.top_groups < options.groups;
        bool const by_score = has_bias || (grouped && options.by == group_score::top_two);
        bool const soft = options.score == score_function::softmax;
        row_of_logits const row = read_logits(g, z, experts, !log_sum.absent() || (soft && (by_score || !shares_sum(options, k))));
        if (!log_sum.absent() && g.leader()) log_sum(token) = row.log_sum();

        if (by_score || grouped)
            g.each(experts, [&](auto at) {
                F const v = g.load(z, at);
                F c = v;
                if (by_score) {
                    F const s = score_of(options.score, v, row.softmax);
                    auto const masked = both(is_non_finite(v), detail::is_negative(v)); // -Inf, whatever its bias
                    c = select(either(is_nan(v), masked), v, has_bias ? F(s + g.load(bias.data, at)) : s);
                }
                g.store(scratch.biased, at, grouped ? nan_as_mask(c) : c);
            });
        g.sync();
        if (grouped) limit_to_groups(g, z, experts, options, !has_bias, scratch.biased, scratch.words);
        selection_keys<L> const keys{z, scratch.biased, !has_bias && !grouped};
        top_k(g, experts, listed, keys, ids.at(token), scratch.words);
        g.sync();
        if (listed > k && g.leader()) end_spares(keys, token, k);
        weights_of(g, indexed<L const, I>{z, ids.at(token)}, k, row, options, weights.at(token));
    }

    /// Masked experts, and those outside the groups, are nobody's next choice.
    KEEL_FN void end_spares(selection_keys<L> const& keys, int64_t token, int64_t k) const {
        for (int64_t j = k; j < ids.extent[1]; ++j)
            if (keys.of_element(static_cast<int64_t>(ids(token, j))).primary <= ordered_word(as_float(sign_bit | infinity_bits)))
                ids(token, j) = I(-1);
    }

    /// A padding token: no expert.
    template <class G> KEEL_FN void leave_out(G const& g, int64_t token) const {
        using F = typename G::value;
        float* const w = weights.at(token);
        g.each(weights.extent[1], [&](auto at) { g.store(w, at, F(0.0f)); });
        if (!g.leader()) return;
        for (int64_t j = 0; j < ids.extent[1]; ++j) ids(token, j) = I(-1);
        if (!log_sum.absent()) log_sum(token) = 0.0f;
    }
};

/// Routes a tile of tokens and counts its demand.
template <class L, class I> struct route_tile {
    route_row<L, I> row;
    view<bool const, 1> valid;
    route_scratch scratch; ///< [tiles, experts]
    uint32_t* counts; ///< [tiles, experts]
    report* events;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        int64_t const tokens = row.logits.extent[0], experts = row.logits.extent[1], k = row.weights.extent[1];
        int64_t const first = tile * route_tile_tokens;
        int64_t const last = first + route_tile_tokens < tokens ? first + route_tile_tokens : tokens;
        uint32_t* const count = counts + tile * experts;
        int64_t bad = 0;
        if (g.leader())
            for (int64_t e = 0; e < experts; ++e) count[e] = 0;
        auto const one = [&](int64_t token) {
            row.route(g, token, scratch.row(tile, experts));
            if (events != nullptr) bad += non_finite(g, token);
            if (g.leader())
                for (int64_t j = 0; j < k; ++j) ++count[row.ids(token, j)];
        };
        if constexpr (top_rows<G>::exists)
            if (route_lanes<G, route_row<L, I>> const lanes{row}; lanes.fits(g)) {
                int64_t tokens_of[std::size_t{lanes.most_tokens}], n = 0;
                for (int64_t token = first; token < last; ++token) {
                    if (valid.absent() || valid(token)) tokens_of[n++] = token;
                    else row.leave_out(g, token);
                    if (n == 0 || (n < lanes.most_tokens && token + 1 < last)) continue;
                    for (uint32_t left = lanes.route(g, tokens_of, n, count); left != 0; left &= left - 1) one(tokens_of[__builtin_ctz(left)]);
                    n = 0;
                }
                if (events != nullptr) add_shared(events->non_finite, bad);
                return;
            }
        for (int64_t token = first; token < last; ++token) {
            if (valid.absent() || valid(token)) one(token);
            else row.leave_out(g, token);
        }
        if (events != nullptr && g.leader()) add_shared(events->non_finite, bad);
    }

    template <class G> KEEL_FN int64_t non_finite(G const& g, int64_t token) const {
        using U = typename G::words;
        U bad(0u);
        g.each(row.logits.extent[1], [&](auto at) {
            bad = bad + select(is_non_finite(g.load(row.logits.at(token), at)), U(1u), U(0u));
        });
        return g.total(bad);
    }
};

/// The gradient of a token's logits.
///
/// With w the weights and G their gradients: own_j = w_j (G_j - center) dlog s/dz_j, center = sum(w G) / scaling where the weights
/// are normalised, else 0. What every expert of the row gets besides: softmax_e * spread, spread = z-loss' part
/// - (softmax scores that are not normalised ? sum(w G) : 0), and the load-balancing loss' part.
template <class L, class I, class D> struct route_backward_row {
    view<float const, 2> dweights;
    view<L const, 2> logits;
    view<I const, 2> ids;
    view<float const, 2> weights;
    view<D, 2> dlogits;
    route_options options;
    float z_loss;
    view<float const, 2> factors;
    view<int64_t const, 1> documents;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        L const* const z = logits.at(token);
        D* const out = dlogits.at(token);
        float const *const w = weights.at(token), *const dw = dweights.at(token);
        int64_t const experts = logits.extent[1], k = ids.extent[1];
        bool const normalise = options.weight == weight_rule::normalised && k > 1, left_out = ids(token, 0) < 0;
        bool const soft = options.score == score_function::softmax && !normalise;
        if (left_out) return g.each(experts, [&](auto at) { g.store(out, at, F(0.0f)); });

        // p = w / scaling first: where one weight holds everything, center is then exactly its gradient.
        float const unit = normalise ? options.scaling : 1.0f;
        float const mean = g.sum(k, [&](F const& acc, auto at) { return fma(g.load(w, at) / F(unit), g.load(dw, at), acc); });
        float const center = normalise ? mean : 0.0f;
        row_softmax row;
        float spread = soft ? negate(mean) : 0.0f;
        bool const spreads = soft || z_loss != 0.0f;
        if (spreads) {
            row = softmax_of(g, z, experts);
            if (z_loss != 0.0f) spread = fma(mul(2.0f, z_loss), add(row.shift, log(row.sum)), spread);
        }
        bool const balances = !factors.absent();
        float const* const factor = balances ? factors.at(document_at(documents, token)) : nullptr;
        row_shares shares;
        float term = 0.0f;
        if (balances) {
            shares = shares_of(g, z, experts, options.score);
            term = balance_term(g, z, factor, experts, options.score, shares);
        }
        auto const with_balance = [&](F const& v, F const& f, F const& others) { // p (f - term) slope more than the others
            return fma(shares.of(options.score, v) * (f - F(term)), log_score_slope(options.score, v), others);
        };
        g.each(experts, [&](auto at) {
            F const v = g.load(z, at), all = spreads ? F(score_of(score_function::softmax, v, row) * F(spread)) : F(0.0f);
            g.store(out, at, balances ? with_balance(v, g.load(factor, at), all) : all);
        });
        g.sync();
        indexed<L const, I const> const chosen{z, ids.at(token)};
        g.each(k, [&](auto at) {
            F const v = g.load(chosen, at);
            F const own = g.load(w, at) * (g.load(dw, at) - F(center)) * log_score_slope(options.score, v);
            F const all = spreads ? fma(score_of(score_function::softmax, v, row), F(spread), own) : own;
            F const total = balances ? with_balance(v, g.load(indexed<float const, I const>{factor, ids.at(token)}, at), all) : all;
            g.store(indexed<D, I const>{out, ids.at(token)}, at, total);
        });
    }

    template <class G> KEEL_FN static row_softmax softmax_of(G const& g, L const* z, int64_t experts) {
        using F = typename G::value;
        using U = typename G::words;
        U highest(0u);
        g.each(experts, [&](auto at) { highest = umax(highest, g.inside(at, ordered_word(g.load(z, at)))); });
        row_softmax row{from_ordered_word(g.max_bits(highest)), 1.0f};
        row.sum = g.sum(experts, [&](F const& acc, auto at) { return acc + g.inside(at, exp(g.load(z, at) - F(row.shift))); });
        return row;
    }
};

/// Adds the tiles' counts, in any order: integers.
struct count_tiles {
    uint32_t const* counts;
    int64_t tiles;
    view<int64_t, 1> total;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        int64_t const experts = total.extent[0];
        for (int64_t e = 0; e < experts; ++e) total(e) = 0;
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t e = 0; e < experts; ++e) total(e) += counts[tile * experts + e];
    }
};

/// The sum of squares of a row: the z-loss before its coefficient.
struct square_sum_row {
    view<float const, 1> x;
    float* result;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        using F = typename G::value;
        float const sum = g.sum(x.extent[0], [&](F const& acc, auto at) {
            F const v = g.load(strided<float const>{x.data, x.stride[0]}, at);
            return fma(v, v, acc);
        });
        if (g.leader()) *result = sum;
    }
};

} // namespace keel::inline KEEL_ABI
