// Routing 16 tokens at once where the group has top_rows: each token's scores as in route_row, then selection and weights with a token a
// lane. The same bits as route_row, which takes what does not fit here: logits that are not finite, ties of scores, many candidates.
#pragma once

#include <keel/backend/top_rows.hpp>
#include <keel/moe/route_scores.hpp>

namespace keel::inline KEEL_ABI {

/// row_softmax of a token a lane.
template <class F> struct lane_softmax {
    F shift, sum;
};

/// Row: route_row<L, I>.
template <class G, class Row> struct route_lanes {
    using F = typename G::value;
    using U = typename G::words;
    using service = top_rows<G>;
    static constexpr int most_tokens = service::rows;

    Row const row; ///< a copy: members that no store can reach
    bool has_bias = !row.bias.absent(), shares = shares_sum(row.options, row.weights.extent[1]);

    /// Groups and spare experts are left to route_row, and a bias that is not finite.
    KEEL_FN bool fits(G const& g) const {
        int64_t const experts = row.logits.extent[1], k = row.weights.extent[1];
        if (k > service::most_k || experts < service::least_n || experts > service::most_held || row.ids.extent[1] != k) return false;
        if (row.options.top_groups < row.options.groups) return false;
        U largest(0u);
        if (has_bias) g.each(experts, [&](auto at) { largest = umax(largest, magnitude(g.load(row.bias.data, at))); });
        return !g.any(gt(largest, U(infinity_bits - 1)));
    }

    /// Routes n tokens, counts their experts. Which of them (bits) are left to route_row.
    KEEL_FN uint32_t route(G const& g, int64_t const* tokens, int64_t n, uint32_t* count) const {
        switch (row.options.score) {
        case score_function::softmax: return route_by<score_function::softmax>(g, tokens, n, count);
        case score_function::sigmoid: return route_by<score_function::sigmoid>(g, tokens, n, count);
        default: return route_by<score_function::sqrt_softplus>(g, tokens, n, count);
        }
    }

  private:
    template <score_function S> KEEL_FN uint32_t route_by(G const& g, int64_t const* tokens, int64_t n, uint32_t* count) const {
        int64_t const experts = row.logits.extent[1], k = row.weights.extent[1], together = service::rows_together(experts);
        bool const soft = S == score_function::softmax, sums = !row.log_sum.absent() || (soft && (has_bias || !shares));
        service top;
        alignas(64) float shift[std::size_t{most_tokens}] = {}, sum[std::size_t{most_tokens}] = {};
        uint32_t left = 0;
        for (int64_t t = n < together ? n : together; t < most_tokens; ++t) top.leave_row(t);
        for (int64_t first = 0; first < n; first += together) {
            int64_t const last = first + together < n ? first + together : n;
            // A loop for each step: the steps of several tokens then overlap, where those of one would wait for each other.
            for (int64_t t = first; t < last; ++t)
                if (!find_top(g, tokens[t], shift[t])) left |= 1u << t;
            if (sums)
                for (int64_t t = first; t < last; ++t) {
                    auto const* const z = row.logits.at(tokens[t]);
                    F const own(shift[t]);
                    top.hold(g, t - first, experts, 0.0f, [&](auto at) { return detail::exp_not_above_zero(g.load(z, at) - own); });
                }
            if (sums)
                for (int64_t t = first; t < last; ++t) sum[t] = top.sum_held(t - first, experts);
            for (int64_t t = first; t < last; ++t) {
                hold_keys<S>(g, tokens[t], top, t - first, sum[t]);
                top.set_lanes(t - first, t, experts);
            }
            top.bound_rows(k);
            for (int64_t t = first; t < last; ++t)
                if ((left >> t & 1u) != 0) top.leave_row(t);
                else if (!top.find_row(t - first, t, experts)) left |= 1u << t;
        }
        uint32_t const tied = top.select_rows(k);
        if (has_bias) left |= tied & ((1u << n) - 1u); // without one, the number is the logit
        lane_softmax<F> softmax;
        softmax.shift = service::load_row(shift), softmax.sum = service::load_row(sum);
        write<S>(tokens, n, left, top, softmax, count);
        return left;
    }

    /// The largest logit. False, and 0, where one is not finite.
    KEEL_FN bool find_top(G const& g, int64_t token, float& top) const {
        auto const* const z = row.logits.at(token);
        U largest(0u);
        F highest(as_float(sign_bit | infinity_bits));
        g.each(row.logits.extent[1], [&](auto at) {
            F const v = g.load(z, at); // +0 past the end
            largest = umax(largest, magnitude(v));
            highest = service::larger(highest, service::inside(at, v, as_float(sign_bit | infinity_bits)));
        });
        bool const finite = !g.any(gt(largest, U(infinity_bits - 1)));
        top = finite ? add(service::largest(highest), 0.0f) : 0.0f;
        return finite;
    }

    /// The numbers that the token is selected by, none of them -0: s is never below +0. Those of a token that is left to route_row mean nothing.
    template <score_function S> KEEL_FN void hold_keys(G const& g, int64_t token, service& top, int64_t place, float sum) const {
        auto const* const z = row.logits.at(token);
        int64_t const experts = row.logits.extent[1];
        float const end = as_float(sign_bit | infinity_bits);
        if (!has_bias) return top.hold(g, place, experts, end, [&](auto at) { return g.load(z, at) + F(0.0f); });
        float const* const bias = row.bias.data;
        F const divisor(sum);
        top.hold(g, place, experts, end, [&](auto at) {
            F s;
            if constexpr (S == score_function::softmax) s = top.held(place, experts, at) / divisor;
            else s = score_of<logits_are::finite>(S, g.load(z, at), row_softmax{});
            return s + g.load(bias, at);
        });
    }

    template <score_function S>
    KEEL_FN void write(int64_t const* tokens, int64_t n, uint32_t left, service const& top, lane_softmax<F> const& softmax, uint32_t* count) const {
        int64_t const k = row.weights.extent[1];
        alignas(64) typename service::table z = {}; // by token, then a token a lane
        for (int64_t t = 0; t < n; ++t) {
            if ((left >> t & 1u) != 0) continue;
            auto const* const logits = row.logits.at(tokens[t]);
            service::copy_first(row.ids.at(tokens[t]), &top.chosen[t][0], k);
            for (int64_t j = 0; j < k; ++j) {
                uint32_t const e = top.chosen[t][j];
                z[t][j] = load_element(logits + e);
                ++count[e];
            }
        }
        service::turn(z);
        weigh<S>(z, k, softmax);
        service::turn(z);
        for (int64_t t = 0; t < n; ++t)
            if ((left >> t & 1u) == 0) service::copy_first(row.weights.at(tokens[t]), &z[t][0], k);
        if (row.log_sum.absent()) return;
        alignas(64) float log_sums[std::size_t{most_tokens}];
        service::store_row(log_sums, add(softmax.shift, log(softmax.sum)));
        for (int64_t t = 0; t < n; ++t)
            if ((left >> t & 1u) == 0) row.log_sum(tokens[t]) = log_sums[t];
    }

    /// Logits become weights, as in weights_of: THE order of a sum of up to 16 is a halving tree.
    template <score_function S> KEEL_FN void weigh(typename service::table& z, int64_t k, lane_softmax<F> const& softmax) const {
        F const scaling(row.options.scaling);
        if (!shares) {
            for (int64_t j = 0; j < k; ++j) service::store_row(z[j], score_of<logits_are::finite>(S, service::load_row(z[j]), softmax) * scaling);
            return;
        }
        F shift = scale_exponent(S, service::load_row(z[0]));
        for (int64_t j = 1; j < k; ++j) shift = service::larger(shift, scale_exponent(S, service::load_row(z[j])));
        shift = shift + F(0.0f);
        alignas(64) typename service::table part = {};
        for (int64_t j = 0; j < k; ++j) {
            F const s = scaled_score<logits_are::finite>(S, service::load_row(z[j]), shift);
            service::store_row(z[j], s), service::store_row(part[j], s);
        }
        for (int64_t half = k > 8 ? 8 : 4; half > 0; half /= 2) // +0 past k changes no sum
            for (int64_t j = 0; j < half; ++j) service::store_row(part[j], service::load_row(part[j]) + service::load_row(part[j + half]));
        F const total = service::load_row(part[0]);
        for (int64_t j = 0; j < k; ++j) service::store_row(z[j], service::load_row(z[j]) / total * scaling);
    }
};

} // namespace keel::inline KEEL_ABI
