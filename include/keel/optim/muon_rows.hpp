// The mathematics of a Muon step around Newton-Schulz: momentum before it, the weights after it, one row at a time.
#pragma once

#include <keel/guard/step_gate_rows.hpp>
#include <keel/optim/muon_plan.hpp>
#include <keel/optim/newton_schulz_rows.hpp>
#include <keel/optim/step_change.hpp>
#include <keel/optim/weight_rows.hpp>

namespace keel {

/// ema: M = mu M + (1 - mu) G (Jordan's code, torch's code, Megatron). heavy_ball: M = mu M + G (Moonlight, dion, torch's text).
/// From a zero state the two give the same direction; they differ where mu changes, or a state crosses over.
enum class momentum_rule : uint8_t { ema, heavy_ball };

} // namespace keel

namespace keel::inline KEEL_ABI {

/// The random words of a matrix's elements: element [i, j] draws block first + map(i) * row_step + j * column_step.
struct matrix_numbers {
    random_key key;
    uint64_t first, row_step;
    uint32_t column_step;
    row_map map;

    template <class G, class At> KEEL_FN random_block<typename G::words> at(G const& g, int64_t row, At at) const {
        return random_block_of(key, first + static_cast<uint64_t>(map(row)) * row_step, g.position(at), column_step);
    }
};

/// A source for Newton-Schulz (newton_schulz_rows.hpp): U = the momentum after this gradient, looked ahead once more where
/// nesterov. take() stores the momentum, unless it is kept in blocks: those are stored by store_row, after the last take().
///     add = (1 - mu) or 1;  x = gradient * clip;  M' = fma(mu, M, add x);  U = nesterov ? fma(mu, M', add x) : M'
template <class Gradient, class M> struct momentum_source {
    using momentum_kind = M;
    view<Gradient const, 2> gradient;
    state_view<M, 2> momentum;
    row_map map;
    step_gate const* gate;
    float mu, add;
    bool nesterov;
    matrix_numbers numbers; ///< word 0

    template <class F> struct pair {
        F momentum, direction;
    };
    template <class G, class At> KEEL_FN pair<typename G::value> next(G const& g, int64_t row, At at) const {
        using F = typename G::value;
        int64_t const here = map(row);
        F const x = mul(F(add), F(load_at(g, gradient, here, at) * F(gate->clip)));
        F const m = fma(F(mu), F(state_row_of(momentum, here).load(g, at)), x);
        return {m, nesterov ? fma(F(mu), m, x) : m};
    }
    template <class G, class At> KEEL_FN typename G::value peek(G const& g, int64_t row, At at) const { return next(g, row, at).direction; }
    template <class G, class At> KEEL_FN typename G::value take(G const& g, int64_t row, At at) const {
        auto const n = next(g, row, at);
        if constexpr (!is_block_state<M>) state_row_of(momentum, map(row)).store(g, at, n.momentum, noise(g, row, at));
        return n.direction;
    }
    template <class G> KEEL_FN void store_row(G const& g, int64_t row, int64_t width) const {
        if constexpr (is_block_state<M>)
            state_row_of(momentum, map(row))
                .store_blocks(
                    g, width, false, [&](auto at) { return next(g, row, at).momentum; }, [&](auto at) { return noise(g, row, at); });
    }

private:
    template <class G, class At> KEEL_FN typename G::words noise(G const& g, int64_t row, At at) const {
        if constexpr (draws_numbers<M>) return numbers.at(g, row, at).word[0];
        else return typename G::words(0u);
    }
};

/// What is known of a row before anything is written: its largest magnitude, and the sum of its squares, the largest brought into [2, 4).
/// The row is read twice, the second time from cache, so the matrix once.
struct row_norm {
    uint32_t largest;
    float squares;
};
template <class Source> struct row_norm_row {
    Source source;
    int64_t width;
    row_norm* norms;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        using U = typename G::words;
        U m(0u);
        g.each(width, [&](auto at) { m = umax(m, g.inside(at, magnitude(source.peek(g, row, at)))); });
        row_norm norm{g.max_bits(m), 0.0f};
        if (norm.largest != 0 && norm.largest < infinity_bits) {
            exact_scale const scale = scale_to_two(norm.largest);
            norm.squares = g.sum(width, [&](F const& acc, auto at) {
                F const v = scale.apply(source.peek(g, row, at));
                return fma(v, v, acc);
            });
        }
        if (g.leader()) norms[row] = norm;
    }
};

/// The exponent of a power of two that is given as two factors.
KEEL_FN int64_t exponent_of(exact_scale const& s) { return int64_t{bits(s.first) >> 23} + int64_t{bits(s.second) >> 23} - 254; }
/// 2^e for e in [-1022, 0].
KEEL_FN double small_power(int64_t e) { return __builtin_bit_cast(double, static_cast<uint64_t>(1023 + e) << 52); }

/// *largest and 1 / the norm of the matrix with the largest brought into [2, 4): rows in order, in double. The rows' own powers of two are
/// exact, so they do not show.
struct matrix_norm_row {
    row_norm const* norms;
    int64_t count;
    uint32_t* largest;
    float* inverse;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        uint32_t top = 0;
        for (int64_t i = 0; i < count; ++i) top = umax(top, norms[i].largest);
        *largest = top;
        if (top == 0 || top >= infinity_bits) return;
        int64_t const up = exponent_of(scale_to_two(top));
        double sum = 0.0;
        for (int64_t i = 0; i < count; ++i)
            if (norms[i].largest != 0)
                sum += static_cast<double>(norms[i].squares) * small_power(2 * (up - exponent_of(scale_to_two(norms[i].largest))));
        *inverse = static_cast<float>(1.0 / __builtin_sqrt(sum));
    }
};

/// For a direction of zeros: the momentum moves on, and nothing else.
template <class Source> struct take_row {
    Source source;
    int64_t width;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        g.each(width, [&](auto at) { source.take(g, row, at); });
    }
};
/// Momentum in blocks.
template <class Source> struct store_momentum_row {
    Source source;
    int64_t width;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const { source.store_row(g, row, width); }
};

/// A matrix of weights, of which row() gives one.
template <class Shadow> struct master_weight_matrix {
    view<float, 2> weight;
    view<Shadow, 2> shadow;
    KEEL_FN master_weight_row<Shadow> row(int64_t i) const {
        return {state_row_of(weight, i), shadow.absent() ? state_row<Shadow>{nullptr} : state_row_of(shadow, i)};
    }
};
template <class Weight> struct stochastic_weight_matrix {
    view<Weight, 2> weight;
    KEEL_FN stochastic_weight_row<Weight> row(int64_t i) const { return {state_row_of(weight, i)}; }
};
template <class Weight> struct kahan_weight_matrix {
    view<Weight, 2> weight, compensation;
    KEEL_FN kahan_weight_row<Weight> row(int64_t i) const { return {state_row_of(weight, i), state_row_of(compensation, i)}; }
};

/// What NorMuon multiplies a direction with, a factor for each row of the logical matrix: along the kernel's rows, or along its columns where
/// the matrix is worked on turned.
struct direction_factors {
    float const* factor = nullptr; ///< null: 1
    bool along_columns = false;

    template <class G, class At> KEEL_FN typename G::value apply(G const& g, int64_t row, At at, typename G::value const& d) const {
        using F = typename G::value;
        if (factor == nullptr) return d;
        return mul(d, along_columns ? F(g.load(factor, at)) : F(factor[row]));
    }
};

/// w = fma(-rate * scale, O, fma(-rate * decay, w, w)), or what weight_rows.hpp makes of it.
template <class T, class Weights> struct muon_update_row {
    view<T const, 2> direction; ///< absent: zeros
    direction_factors factors;
    Weights weights;
    row_map map;
    int64_t width;
    weight_factors step;
    matrix_numbers numbers; ///< word 2
    step_change_part* change; ///< null: not wanted

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        using U = typename G::words;
        auto const w = weights.row(map(row));
        auto const update = [&](auto at) {
            F d(0.0f);
            if (!direction.absent()) d = factors.apply(g, row, at, g.load(direction.at(row), at));
            U noise(0u);
            if constexpr (decltype(w)::draws) noise = numbers.at(g, row, at).word[2];
            return F(w.move(g, at, d, step, noise));
        };
        if (change == nullptr) {
            g.each(width, [&](auto at) { update(at); });
            return;
        }
        step_change_part part;
        part.update_squares = g.sum(width, [&](F const& acc, auto at) {
            F const moved = update(at);
            return fma(moved, moved, acc);
        });
        part.weight_squares = g.sum(width, [&](F const& acc, auto at) {
            F const now = w.load(g, at);
            return fma(now, now, acc);
        });
        if (g.leader()) change[row] = part;
    }
};

} // namespace keel::inline KEEL_ABI
