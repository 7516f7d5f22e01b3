// The mathematics of AdamW, one chunk of a tensor at a time.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/guard/step_gate_rows.hpp>
#include <keel/optim/step_change.hpp>
#include <keel/optim/weight_rows.hpp>

namespace keel {

/// The smallest epsilon that adamw_step takes, 2^-63 (1.1e-19). (1 - beta2) g^2 vanishes in fp32 where g^2 < 2^-150 / (1 - beta2), which
/// for no beta2 below 1 reaches above 2^-63: where a gradient's square is lost, epsilon still holds that gradient / epsilon at 1 or less. torch, without it, steps by
/// |g| / epsilon there.
inline constexpr float least_adamw_epsilon = 0x1p-63f;

struct adamw_options {
    float learning_rate = 1e-3f; ///< of this step; 0 to 2^40
    float beta1 = 0.9f;          ///< of the mean m; in [0, 1)
    float beta2 = 0.999f;        ///< of the squares' mean v; in [0, 1)
    float epsilon = 1e-8f;       ///< added to the root, in units of the gradient; least_adamw_epsilon or above
    float weight_decay = 0.0f;   ///< decoupled: w loses learning_rate * weight_decay of itself; 0 to 2^40
    decay_rule decay = decay_rule::decoupled;
    random_key key = {};         ///< of what is rounded by chance; the count of applied steps is added to its step
    uint64_t first_element = 0;  ///< number of the first element in the whole tensor, of which this may be a shard
};

/// The weights that an optimiser moves: an fp32 master with an optional copy.
template <class Shadow = bf16> struct adamw_weights {
    view<float, 1> master = {};  ///< updated in place
    view<Shadow, 1> shadow = {}; ///< optional: receives each new weight, rounded once
};
/// Weights of 16 bits and nothing beside them, rounded by chance.
template <class Weight = bf16> struct stochastic_weights {
    view<Weight, 1> weight = {}; ///< updated in place
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Elements of a chunk; part of the definition of step_change's bits.
inline constexpr int64_t adamw_chunk = 8192;

/// base^n by squaring, in double.
KEEL_FN double whole_power(double base, int64_t n) {
    double result = 1.0;
    for (; n > 0; n /= 2, base *= base)
        if (n % 2 != 0) result *= base;
    return result;
}

/// What the t-th applied step multiplies with, each rounded once from double.
struct adamw_factors {
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float root_scale; ///< 1 / sqrt(1 - beta2^t)
    float step;       ///< learning_rate / (1 - beta1^t)
    float decay;      ///< learning_rate * weight_decay

    KEEL_FN static adamw_factors at(adamw_options const& o, int64_t t) {
        double const beta1 = static_cast<double>(o.beta1), beta2 = static_cast<double>(o.beta2);
        double const rate = static_cast<double>(o.learning_rate);
        return {o.beta1,
                static_cast<float>(1.0 - beta1),
                o.beta2,
                static_cast<float>(1.0 - beta2),
                static_cast<float>(1.0 / __builtin_sqrt(1.0 - whole_power(beta2, t))),
                static_cast<float>(rate / (1.0 - whole_power(beta1, t))),
                static_cast<float>(rate * static_cast<double>(o.weight_decay))};
    }
};

/// Finite values beyond 2^63 become 2^63, so that their square is finite; NaN and Inf pass.
template <class F> KEEL_FN F with_finite_square(F const& x) {
    using U = bits_of<F>;
    constexpr uint32_t limit = 0x5f000000u; // 2^63
    auto const beyond = gt(U(infinity_bits - limit), magnitude(x) - U(limit));
    return as_float(select(beyond, U(limit) | (bits(x) & U(sign_bit)), bits(x)));
}

template <class Shadow> KEEL_FN master_weight_row<Shadow> weight_run_of(adamw_weights<Shadow> const& w, int64_t first) {
    return {state_run_of(w.master, first), {w.shadow.data == nullptr ? nullptr : w.shadow.data + first, 1}};
}
template <class Weight> KEEL_FN stochastic_weight_row<Weight> weight_run_of(stochastic_weights<Weight> const& w, int64_t first) {
    return {state_run_of(w.weight, first)};
}
template <class Weight> KEEL_FN kahan_weight_row<Weight> weight_run_of(kahan_weights<Weight> const& w, int64_t first) {
    return {state_run_of(w.weight, first), state_run_of(w.compensation, first)};
}

/// m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w = w - decay w - step m / (sqrt(v) root_scale + epsilon).
/// State in blocks is written in a walk of its own, after the weights, by which its chunk lies in the cache.
template <class Gradient, class Weights, class M, class V> struct adamw_row {
    Gradient const* gradient;
    Weights weights;
    state_view<M, 1> m;
    state_view<V, 1> v;
    int64_t count;
    int64_t const* applied;
    step_gate const* gate;
    adamw_options options;
    step_change_part* change; ///< null: not wanted

    template <class G> KEEL_FN void operator()(G const& g, int64_t chunk) const {
        using F = typename G::value;
        using U = typename G::words;
        if (gate->apply == 0) return;
        int64_t const first = chunk * adamw_chunk, n = count - first < adamw_chunk ? count - first : adamw_chunk;
        Gradient const* const in = gradient + first;
        auto const w = weight_run_of(weights, first);
        auto const mean = state_run_of(m, first);
        auto const squares = state_run_of(v, first);
        adamw_factors const f = adamw_factors::at(options, *applied + 1);
        weight_factors const step{f.step, f.decay, options.decay == decay_rule::cautious};
        F const clip(gate->clip);

        random_key key = options.key;
        key.step += static_cast<uint32_t>(*applied);
        auto const numbers = [&](auto at) { // word 0 for m, 1 for v, 2 for the weight
            return random_block_of(key, options.first_element + static_cast<uint64_t>(first), g.position(at));
        };
        constexpr bool draws_at_once = (draws_numbers<M> && !is_block_state<M>) || (draws_numbers<V> && !is_block_state<V>) || decltype(w)::draws;
        auto const next_m = [&](auto at, F const& x) { return F(fma(F(f.beta1), mean.load(g, at), mul(F(f.one_minus_beta1), x))); };
        auto const next_v = [&](auto at, F const& x) { return F(fma(F(f.beta2), squares.load(g, at), mul(mul(F(f.one_minus_beta2), x), x))); };
        auto const clipped = [&](auto at) { return with_finite_square(F(g.load(in, at) * clip)); };
        auto const update = [&](auto at) {
            F const x = clipped(at), m1 = next_m(at, x), v1 = next_v(at, x);
            F const direction = div(m1, fma(sqrt(v1), F(f.root_scale), F(options.epsilon)));
            random_block<U> noise{U(0u), U(0u), U(0u), U(0u)};
            if constexpr (draws_at_once) noise = numbers(at);
            if constexpr (!is_block_state<M>) mean.store(g, at, m1, noise.word[0]);
            if constexpr (!is_block_state<V>) squares.store(g, at, v1, noise.word[1]);
            return F(w.move(g, at, direction, step, noise.word[2]));
        };
        if (change == nullptr) {
            g.each(n, [&](auto at) { update(at); });
        } else {
            step_change_part part;
            part.update_squares = g.sum(n, [&](F const& acc, auto at) {
                F const moved = update(at);
                return fma(moved, moved, acc);
            });
            part.weight_squares = g.sum(n, [&](F const& acc, auto at) {
                F const now = w.load(g, at);
                return fma(now, now, acc);
            });
            if (g.leader()) change[chunk] = part;
        }
        if constexpr (is_block_state<M> && state_block<M> == state_block<V>)
            store_block_pair(
                g, n, mean, squares,
                [&](auto at) {
                    F const x = clipped(at);
                    return moments_of<F>{next_m(at, x), next_v(at, x)};
                },
                numbers);
        else if constexpr (is_block_state<M>)
            mean.store_blocks(g, n, false, [&](auto at) { return next_m(at, clipped(at)); }, [&](auto at) { return numbers(at).word[0]; });
        if constexpr (is_block_state<V> && state_block<M> != state_block<V>)
            squares.store_blocks(g, n, true, [&](auto at) { return next_v(at, clipped(at)); }, [&](auto at) { return numbers(at).word[1]; });
    }
};

/// After all chunks have read it, the count of applied steps moves on.
struct count_applied_row {
    step_gate const* gate;
    int64_t* applied;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (g.leader() && gate->apply != 0) *applied += 1;
    }
};

} // namespace keel::inline KEEL_ABI
