// From logits to scores and weights, one token at a time: what selection, weights, losses and gradients of the router share.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/row_memory.hpp>
#include <keel/core/math.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// s(z), what the bias is added to: a probability over the experts, or each expert's own number.
enum class score_function : uint8_t { softmax, sigmoid, sqrt_softplus };

/// What a selected expert's output is multiplied by, apart from the scaling factor: its score over the sum of the selected
/// scores, or the score itself. With one expert a token the first would be 1 whatever the logits, and the router would never
/// learn; so one expert's weight is its score under either rule (as in Switch; Megatron and DeepSeek-V3 skip it too).
enum class weight_rule : uint8_t { normalised, scores };

/// What a group of experts is chosen by: the sum of its two best scores with their bias (DeepSeek-V3), or its best one (DeepSeek-V2).
enum class group_score : uint8_t { top_two, best };

struct route_options {
    score_function score = score_function::sigmoid;
    weight_rule weight = weight_rule::normalised;
    float scaling = 1.0f;   ///< factor on every weight; finite and above 0
    int64_t groups = 1;     ///< experts in groups of equal size, neighbours together: 1 is no grouping
    int64_t top_groups = 1; ///< a token's experts are of this many groups, 1 ... groups
    group_score by = group_score::top_two;
    int64_t spare = 0;      ///< next choices that ids holds after a token's k, for reroute_overflow: no demand, no weight
};

} // namespace keel

namespace keel::inline KEEL_ABI {

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
/// What is known of logits: nothing, or that they are finite, which saves the clamping and gives the same bits.
enum class logits_are : uint8_t { any, finite };
template <logits_are Known, class F> KEEL_FN F exp_of_shifted(F const& x) {
    if constexpr (Known == logits_are::finite) return detail::exp_not_above_zero(x);
    else return exp(x);
}

/// log(1 + e^z) / min(e^z, 1), given e = e^-|z|: between log 2 and 1 below 0, softplus above.
template <class F> KEEL_FN F softplus_factor(F const& z, F const& e) {
    F const log_part = detail::log1p_unit(e, e + F(1.0f));
    return select(far_below(z), F(1.0f), select(detail::is_negative(z), log_part / e, z + log_part));
}
/// -|z|
template <class F> KEEL_FN F minus_magnitude(F const& z) { return as_float(magnitude(z) | bits_of<F>(sign_bit)); }

/// s(z). One exponential: e^(z - shift), e^-|z| or e^(-|z|/2). Row: row_softmax, or the same of a token a lane.
template <logits_are Known = logits_are::any, class F, class Row> KEEL_FN F score_of(score_function s, F const& z, Row const& row) {
    auto const below_zero = detail::is_negative(z);
    F x = (Known == logits_are::finite ? z : finite_logit(z)) - F(row.shift);
    if (s == score_function::sigmoid) x = minus_magnitude(z);
    if (s == score_function::sqrt_softplus) x = minus_magnitude(z) * F(0.5f);
    F const e = exp_of_shifted<Known>(x);
    if (s == score_function::softmax) return e / F(row.sum);
    if (s == score_function::sigmoid) return select(below_zero, e, F(1.0f)) / (e + F(1.0f));
    return detail::product(select(below_zero, e, F(1.0f)), sqrt(softplus_factor(z, detail::product(e, e))));
}

/// s(z) times a factor that all of a token's selected experts share, chosen so that the largest neither overflows nor vanishes:
/// `shift` is the largest of scale_exponent(z). This is normalisation in the log domain, without the rounding of a logarithm.
template <class F> KEEL_FN F scale_exponent(score_function s, F const& z) { return s == score_function::softmax ? z : not_above_zero(z); }
template <logits_are Known = logits_are::any, class F, class Shift> KEEL_FN F scaled_score(score_function s, F const& z, Shift const& shift) {
    F const below = scale_exponent(s, z) - F(shift);
    F const scaled = exp_of_shifted<Known>(s == score_function::sqrt_softplus ? F(below * F(0.5f)) : below);
    if (s == score_function::softmax) return scaled;
    F const e = exp_of_shifted<Known>(minus_magnitude(z));
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

/// What a row's logits say as a whole.
struct row_of_logits {
    row_softmax softmax; ///< only where it was asked for
    float top = 0.0f;    ///< the largest logit; 0 where all are finite and no softmax was asked for
    bool has_nan = false;

    /// No NaN, no +Inf, not all of them -Inf.
    KEEL_FN bool sound() const { return !has_nan && !is_non_finite(top); }
    KEEL_FN float log_sum() const { return sound() ? add(softmax.shift, log(softmax.sum)) : has_nan ? as_float(nan_bits) : top; }
};

template <class G, class L> KEEL_FN row_of_logits read_logits(G const& g, L const* z, int64_t experts, bool with_softmax) {
    using F = typename G::value;
    using U = typename G::words;
    U highest(0u), largest(0u);
    g.each(experts, [&](auto at) {
        F const v = g.load(z, at);
        highest = umax(highest, g.inside(at, rank_word(v)));
        largest = umax(largest, magnitude(v));
    });
    row_of_logits row;
    bool const all_finite = !g.any(gt(largest, U(infinity_bits - 1)));
    if (all_finite && !with_softmax) return row;
    row.top = from_ordered_word(g.max_bits(highest));
    row.has_nan = !all_finite && g.max_bits(largest) > infinity_bits;
    row.softmax.shift = finite_logit(row.top);
    if (with_softmax)
        row.softmax.sum = g.sum(experts, [&](F const& acc, auto at) {
            return acc + g.inside(at, exp(finite_logit(g.load(z, at)) - F(row.softmax.shift)));
        });
    return row;
}

/// Whether one expert a token or the rule makes a weight the score itself.
KEEL_FN bool shares_sum(route_options const& options, int64_t k) { return options.weight == weight_rule::normalised && k > 1; }

/// The weights of k logits of a row: scaling * s, or scaling * s / (sum of the k). A logit of -Inf weighs 0, also where all do.
template <class G, class P>
KEEL_FN void weights_of(G const& g, P chosen, int64_t k, row_of_logits const& row, route_options const& options, float* w) {
    using F = typename G::value;
    using U = typename G::words;
    if (!row.sound()) return g.each(k, [&](auto at) { g.store(w, at, F(as_float(nan_bits))); });
    if (shares_sum(options, k) && g.holds(k))
        return g.each(k, [&](auto at) {
            F const z = g.load(chosen, at);
            float const shift = from_ordered_word(g.max_bits(g.inside(at, rank_word(scale_exponent(options.score, z)))));
            if (is_non_finite(shift)) return g.store(w, at, F(0.0f));
            F const s = scaled_score(options.score, z, shift);
            float const sum = g.sum(k, [&](F const& acc, auto) { return acc + g.inside(at, s); });
            g.store(w, at, s / F(sum) * F(options.scaling));
        });
    if (!shares_sum(options, k))
        return g.each(k, [&](auto at) { g.store(w, at, score_of(options.score, g.load(chosen, at), row.softmax) * F(options.scaling)); });

    U highest(0u);
    g.each(k, [&](auto at) {
        highest = umax(highest, g.inside(at, rank_word(scale_exponent(options.score, g.load(chosen, at)))));
    });
    float const shift = from_ordered_word(g.max_bits(highest));
    if (is_non_finite(shift)) return g.each(k, [&](auto at) { g.store(w, at, F(0.0f)); });
    g.each(k, [&](auto at) { g.store(w, at, scaled_score(options.score, g.load(chosen, at), shift)); });
    g.sync();
    float const sum = g.sum(k, [&](F const& acc, auto at) { return acc + g.load(static_cast<float const*>(w), at); });
    g.each(k, [&](auto at) { g.store(w, at, g.load(static_cast<float const*>(w), at) / F(sum) * F(options.scaling)); });
}

} // namespace keel::inline KEEL_ABI
