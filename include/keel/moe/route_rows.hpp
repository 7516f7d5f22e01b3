// The mathematics of the router, one token at a time: scores, selection, weights, and the gradient of the logits.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/row_memory.hpp>
#include <keel/backend/top_k.hpp>
#include <keel/core/math.hpp>
#include <keel/core/report.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// s(z), what the bias is added to: a probability over the experts, or each expert's own number.
enum class score_function : uint8_t { softmax, sigmoid, sqrt_softplus };

/// What a selected expert's output is multiplied by, apart from the scaling factor: its score over the sum of the selected
/// scores, or the score itself. With one expert a token the first would be 1 whatever the logits, and the router would never
/// learn; so one expert's weight is its score under either rule (as in Switch; Megatron and DeepSeek-V3 skip it too).
enum class weight_rule : uint8_t { normalised, scores };

struct route_options {
    score_function score = score_function::sigmoid;
    weight_rule weight = weight_rule::normalised;
    float scaling = 1.0f; ///< factor on every weight; finite and above 0
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Tokens that one group routes in turn, with one row of scratch.
inline constexpr int64_t route_tile_tokens = 64;

/// A word that ranks like the number: NaN lowest, then -Inf ... +Inf, -0 with +0. 0 ranks below everything.
template <class F> KEEL_FN bits_of<F> rank_word(F const& x) {
    using U = bits_of<F>;
    return select(is_nan(x), U(1u), ordered_word(x + F(0.0f)));
}

/// Inf becomes the largest finite number of its sign; NaN the lowest.
template <class F> KEEL_FN F finite_logit(F const& z) {
    using U = bits_of<F>;
    U const clamped = (bits(z) & U(sign_bit)) | umin(magnitude(z), U(infinity_bits - 1));
    return as_float(select(is_nan(z), U(sign_bit | (infinity_bits - 1)), clamped));
}

/// True below -20 (and for -Inf), where log(1 + e^z) is e^z to fp32's last bit.
template <class F> KEEL_FN mask_of<F> far_below(F const& z) {
    using U = bits_of<F>;
    return gt(bits(z), U(bits(-20.0f)));
}
template <class F> KEEL_FN F not_above_zero(F const& z) {
    using U = bits_of<F>;
    return select(gt(bits(z), U(magnitude_mask)), z, F(0.0f));
}

/// A row's softmax: e^(z - shift) / sum.
struct row_softmax {
    float shift = 0.0f, sum = 1.0f;
};

/// log(1 + e^z) / min(e^z, 1), given e = e^-|z|: between log 2 and 1 below 0, softplus above.
template <class F> KEEL_FN F softplus_factor(F const& z, F const& e) {
    F const log_part = detail::log1p_unit(e, e + F(1.0f));
    return select(far_below(z), F(1.0f), select(detail::is_negative(z), log_part / e, z + log_part));
}
/// -|z|
template <class F> KEEL_FN F minus_magnitude(F const& z) { return as_float(magnitude(z) | bits_of<F>(sign_bit)); }

/// s(z). One exponential: e^(z - shift), e^-|z| or e^(-|z|/2).
template <class F> KEEL_FN F score_of(score_function s, F const& z, row_softmax const& row) {
    auto const below_zero = detail::is_negative(z);
    F x = finite_logit(z) - F(row.shift);
    if (s == score_function::sigmoid) x = minus_magnitude(z);
    if (s == score_function::sqrt_softplus) x = minus_magnitude(z) * F(0.5f);
    F const e = exp(x);
    if (s == score_function::softmax) return e / F(row.sum);
    if (s == score_function::sigmoid) return select(below_zero, e, F(1.0f)) / (e + F(1.0f));
    return detail::product(select(below_zero, e, F(1.0f)), sqrt(softplus_factor(z, detail::product(e, e))));
}

/// s(z) times a factor that all of a token's selected experts share, chosen so that the largest neither overflows nor vanishes:
/// `shift` is the largest of scale_exponent(z). This is normalisation in the log domain, without the rounding of a logarithm.
template <class F> KEEL_FN F scale_exponent(score_function s, F const& z) { return s == score_function::softmax ? z : not_above_zero(z); }
template <class F> KEEL_FN F scaled_score(score_function s, F const& z, float shift) {
    F const below = scale_exponent(s, z) - F(shift);
    F const scaled = exp(s == score_function::sqrt_softplus ? F(below * F(0.5f)) : below);
    if (s == score_function::softmax) return scaled;
    F const e = exp(minus_magnitude(z));
    if (s == score_function::sigmoid) return scaled / (e + F(1.0f));
    return detail::product(scaled, sqrt(softplus_factor(z, e)));
}

/// d log s / dz, without the sum that softmax subtracts.
template <class F> KEEL_FN F log_score_slope(score_function s, F const& z) {
    if (s == score_function::softmax) return F(1.0f);
    F const e = exp(minus_magnitude(z));
    if (s == score_function::sigmoid) return select(detail::is_negative(z), F(1.0f), e) / (e + F(1.0f));
    return F(0.5f) / ((e + F(1.0f)) * softplus_factor(z, e));
}

/// By what a token's experts are ordered: their score with the bias, or their logit where there is no bias, then the logit.
template <class L> struct selection_keys {
    L const* logits;
    float const* biased; ///< null: no bias
    bool one_word;

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
        using U = typename G::words;
        L const* const z = logits.at(token);
        int64_t const experts = logits.extent[1], k = ids.extent[1];
        bool const has_bias = !bias.absent(), normalise = options.weight == weight_rule::normalised && k > 1;

        U highest(0u), largest(0u);
        g.each(experts, [&](auto at) {
            F const v = g.load(z, at);
            highest = umax(highest, g.inside(at, rank_word(v)));
            largest = umax(largest, magnitude(v));
        });
        float const top = from_ordered_word(g.max_bits(highest));
        bool const has_nan = g.max_bits(largest) > infinity_bits, sound = !has_nan && !is_non_finite(top);

        row_softmax row{finite_logit(top), 1.0f};
        if (!log_sum.absent() || (options.score == score_function::softmax && (has_bias || !normalise)))
            row.sum = g.sum(experts, [&](F const& acc, auto at) {
                return acc + g.inside(at, exp(finite_logit(g.load(z, at)) - F(row.shift)));
            });
        if (!log_sum.absent() && g.leader())
            log_sum(token) = sound ? add(row.shift, log(row.sum)) : has_nan ? as_float(nan_bits) : top;

        if (has_bias)
            g.each(experts, [&](auto at) {
                F const v = g.load(z, at);
                F const c = score_of(options.score, v, row) + g.load(bias.data, at);
                auto const masked = both(is_non_finite(v), detail::is_negative(v)); // -Inf, whatever its bias
                g.store(scratch.biased, at, select(either(is_nan(v), masked), v, c));
            });
        g.sync();
        top_k(g, experts, k, selection_keys<L>{z, scratch.biased, !has_bias}, ids.at(token), scratch.words);
        g.sync();

        float* const w = weights.at(token);
        indexed<L const, I> const chosen{z, ids.at(token)};
        if (!sound) g.each(k, [&](auto at) { g.store(w, at, F(as_float(nan_bits))); });
        else if (normalise) normalised_weights(g, chosen, w);
        else g.each(k, [&](auto at) { g.store(w, at, score_of(options.score, g.load(chosen, at), row) * F(options.scaling)); });
    }

    /// w = scaling * s / (sum of the selected s).
    template <class G, class P> KEEL_FN void normalised_weights(G const& g, P chosen, float* w) const {
        using F = typename G::value;
        using U = typename G::words;
        int64_t const k = ids.extent[1];
        U highest(0u);
        g.each(k, [&](auto at) {
            highest = umax(highest, g.inside(at, rank_word(scale_exponent(options.score, g.load(chosen, at)))));
        });
        float const shift = from_ordered_word(g.max_bits(highest));
        g.each(k, [&](auto at) { g.store(w, at, scaled_score(options.score, g.load(chosen, at), shift)); });
        g.sync();
        float const sum = g.sum(k, [&](F const& acc, auto at) { return acc + g.load(static_cast<float const*>(w), at); });
        g.each(k, [&](auto at) { g.store(w, at, g.load(static_cast<float const*>(w), at) / F(sum) * F(options.scaling)); });
    }

    /// A padding token: no expert.
    template <class G> KEEL_FN void leave_out(G const& g, int64_t token) const {
        using F = typename G::value;
        float* const w = weights.at(token);
        g.each(ids.extent[1], [&](auto at) { g.store(w, at, F(0.0f)); });
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
        int64_t const tokens = row.logits.extent[0], experts = row.logits.extent[1], k = row.ids.extent[1];
        int64_t const first = tile * route_tile_tokens;
        int64_t const last = first + route_tile_tokens < tokens ? first + route_tile_tokens : tokens;
        uint32_t* const count = counts + tile * experts;
        int64_t bad = 0;
        if (g.leader())
            for (int64_t e = 0; e < experts; ++e) count[e] = 0;
        for (int64_t token = first; token < last; ++token) {
            if (!valid.absent() && !valid(token)) {
                row.leave_out(g, token);
                continue;
            }
            row.route(g, token, scratch.row(tile, experts));
            if (events != nullptr) bad += non_finite(g, token);
            if (g.leader())
                for (int64_t j = 0; j < k; ++j) ++count[row.ids(token, j)];
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
/// - (softmax scores that are not normalised ? sum(w G) : 0).
template <class L, class I, class D> struct route_backward_row {
    view<float const, 2> dweights;
    view<L const, 2> logits;
    view<I const, 2> ids;
    view<float const, 2> weights;
    view<D, 2> dlogits;
    route_options options;
    float z_loss;

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
        g.each(experts, [&](auto at) {
            g.store(out, at, spreads ? F(score_of(score_function::softmax, g.load(z, at), row) * F(spread)) : F(0.0f));
        });
        g.sync();
        indexed<L const, I const> const chosen{z, ids.at(token)};
        g.each(k, [&](auto at) {
            F const v = g.load(chosen, at);
            F const own = g.load(w, at) * (g.load(dw, at) - F(center)) * log_score_slope(options.score, v);
            F const all = spreads ? fma(score_of(score_function::softmax, v, row), F(spread), own) : own;
            g.store(indexed<D, I const>{out, ids.at(token)}, at, all);
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
