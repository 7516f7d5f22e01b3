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

/// body(adjacent): as std::true_type where a row's elements are adjacent, so that its loops know.
template <class Body> KEEL_FN void by_adjacency(bool adjacent, Body const& body) {
    if (adjacent) body(std::true_type{});
    else body(std::false_type{});
}

/// A row of momentum that a row of gradient goes into.
///     add = (1 - mu) or 1;  x = gradient * clip;  M' = fma(mu, M, add x);  U = nesterov ? fma(mu, M', add x) : M'
template <class Gradient, class M> struct momentum_row {
    state_row<Gradient const> gradient;
    state_row<M> momentum;
    float clip, mu, add;
    bool nesterov;

    template <class F> struct pair {
        F momentum, direction;
    };
    template <class G, class At> KEEL_FN pair<typename G::value> next(G const& g, At at) const {
        using F = typename G::value;
        F const x = mul(F(add), F(gradient.load(g, at) * F(clip)));
        F const m = fma(F(mu), F(momentum.load(g, at)), x);
        return {m, nesterov ? fma(F(mu), m, x) : m};
    }
};

/// What a direction is made of: U, the momentum after this gradient, looked ahead once more where nesterov.
template <class Gradient, class M> struct momentum_source {
    using momentum_kind = M;
    view<Gradient const, 2> gradient;
    state_view<M, 2> momentum;
    row_map map;
    step_gate const* gate;
    float mu, add;
    bool nesterov;
    matrix_numbers numbers; ///< word 0

    KEEL_FN bool adjacent() const {
        if constexpr (is_block_state<M>) return gradient.stride[1] == 1;
        else return gradient.stride[1] == 1 && momentum.stride[1] == 1;
    }
    template <bool Adjacent> KEEL_FN momentum_row<Gradient, M> row(int64_t i, std::bool_constant<Adjacent>) const {
        int64_t const here = map(i);
        return {state_row_of<Adjacent>(gradient, here), state_row_of<Adjacent>(momentum, here), gate->clip, mu, add, nesterov};
    }
    template <class G, class At> KEEL_FN typename G::words noise(G const& g, int64_t row, At at) const {
        if constexpr (draws_numbers<M>) return numbers.at(g, row, at).word[0];
        else return typename G::words(0u);
    }
};

/// The exponent of a power of two that is given as two factors.
KEEL_FN int64_t exponent_of(exact_scale const& s) { return int64_t{bits(s.first) >> 23} + int64_t{bits(s.second) >> 23} - 254; }

/// What is known of a row before anything is written: its largest magnitude, and the sum of its squares under 2^exponent.
struct row_norm {
    uint32_t largest;
    float squares;
    int64_t exponent;
};
/// Both in one walk, under the scale that brings the largest of the first 128 elements into [2, 4). Where they hold less than 2^-30 of the row's
/// largest, so that squares could be lost or overflow, a second one under the row's own. Either choice goes by ratios alone, so a matrix times
/// a power of two has the same sums; and either gives the same sums but for squares far below the others.
template <class Source> struct row_norm_row {
    static constexpr int64_t looked_at = 128, far = 30;
    Source source;
    int64_t width;
    row_norm* norms;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        by_adjacency(source.adjacent(), [&](auto adjacent) {
            using U = typename G::words;
            auto const u = source.row(row, adjacent);
            U m(0u);
            g.each(width < looked_at ? width : looked_at, [&](auto at) { m = umax(m, g.inside(at, magnitude(u.next(g, at).direction))); });
            uint32_t const first = g.max_bits(m);
            row_norm norm{first, 0.0f, 0};
            if (first < infinity_bits) norm = under(g, u, first);
            bool const is_number = norm.largest != 0 && norm.largest < infinity_bits;
            if (is_number && (first == 0 || norm.exponent - exponent_of(scale_to_two(norm.largest)) > far)) norm = under(g, u, norm.largest);
            if (g.leader()) norms[row] = norm;
        });
    }

private:
    template <class G, class Row> KEEL_FN row_norm under(G const& g, Row const& row, uint32_t top) const {
        using F = typename G::value;
        using U = typename G::words;
        exact_scale const scale = scale_to_two(top);
        U m(0u);
        float const squares = g.sum(width, [&](F const& acc, auto at) {
            F const u = row.next(g, at).direction, v = scale.apply(u);
            m = umax(m, g.inside(at, magnitude(u)));
            return fma(v, v, acc);
        });
        return {g.max_bits(m), squares, exponent_of(scale)};
    }
};

/// 4^e for |e| up to 500.
KEEL_FN double power_of_four(int64_t e) { return __builtin_bit_cast(double, static_cast<uint64_t>(1023 + 2 * e) << 52); }

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
                sum += static_cast<double>(norms[i].squares) * power_of_four(up - norms[i].exponent);
        *inverse = static_cast<float>(1.0 / __builtin_sqrt(sum));
    }
};

/// X = (U * scale) / norm: exact, then one rounding to float and, where T is smaller, one to T. The momentum moves on with it, unless it is
/// kept in blocks: those follow in a walk of their own.
template <class Source, class T> struct direction_row {
    Source source;
    exact_scale scale;
    float const* inverse; ///< null: a direction of zeros, the momentum alone moves
    view<T, 2> x;
    int64_t width;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        F const r(inverse == nullptr ? 0.0f : *inverse);
        T* const to = inverse == nullptr ? nullptr : x.at(row);
        by_adjacency(source.adjacent(), [&](auto adjacent) {
            auto const u = source.row(row, adjacent);
            g.each(width, [&](auto at) {
                auto const n = u.next(g, at);
                if constexpr (!is_block_state<typename Source::momentum_kind>) u.momentum.store(g, at, n.momentum, source.noise(g, row, at));
                if (to != nullptr) g.store(to, at, scale.apply(n.direction) * r);
            });
        });
    }
};
template <class Source> struct store_momentum_row {
    Source source;
    int64_t width;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        auto const u = source.row(row, std::false_type{});
        u.momentum.store_blocks(
            g, width, false, [&](auto at) { return u.next(g, at).momentum; }, [&](auto at) { return source.noise(g, row, at); });
    }
};

/// A matrix of weights, of which row() gives one.
template <class Shadow> struct master_weight_matrix {
    view<float, 2> weight;
    view<Shadow, 2> shadow;
    KEEL_FN bool adjacent() const { return weight.stride[1] == 1 && (shadow.absent() || shadow.stride[1] == 1); }
    template <bool Adjacent> KEEL_FN master_weight_row<Shadow> row(int64_t i, std::bool_constant<Adjacent>) const {
        return {state_row_of<Adjacent>(weight, i), shadow.absent() ? state_row<Shadow>{nullptr, 1} : state_row_of<Adjacent>(shadow, i)};
    }
};
template <class Weight> struct stochastic_weight_matrix {
    view<Weight, 2> weight;
    KEEL_FN bool adjacent() const { return weight.stride[1] == 1; }
    template <bool Adjacent> KEEL_FN stochastic_weight_row<Weight> row(int64_t i, std::bool_constant<Adjacent>) const {
        return {state_row_of<Adjacent>(weight, i)};
    }
};
template <class Weight> struct kahan_weight_matrix {
    view<Weight, 2> weight, compensation;
    KEEL_FN bool adjacent() const { return weight.stride[1] == 1 && compensation.stride[1] == 1; }
    template <bool Adjacent> KEEL_FN kahan_weight_row<Weight> row(int64_t i, std::bool_constant<Adjacent>) const {
        return {state_row_of<Adjacent>(weight, i), state_row_of<Adjacent>(compensation, i)};
    }
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
        by_adjacency(weights.adjacent(), [&](auto adjacent) {
            step_change_part const part = move(g, row, weights.row(map(row), adjacent));
            if (change != nullptr && g.leader()) change[row] = part;
        });
    }

private:
    template <class G, class Row> KEEL_FN step_change_part move(G const& g, int64_t row, Row const& w) const {
        using F = typename G::value;
        using U = typename G::words;
        T const* const from = direction.absent() ? nullptr : direction.at(row);
        auto const update = [&](auto at) {
            F d(0.0f);
            if (from != nullptr) d = factors.apply(g, row, at, g.load(from, at));
            U noise(0u);
            if constexpr (Row::draws) noise = numbers.at(g, row, at).word[2];
            return F(w.move(g, at, d, step, noise));
        };
        step_change_part part{};
        if (change == nullptr) {
            g.each(width, [&](auto at) { update(at); });
            return part;
        }
        part.update_squares = g.sum(width, [&](F const& acc, auto at) {
            F const moved = update(at);
            return fma(moved, moved, acc);
        });
        part.weight_squares = g.sum(width, [&](F const& acc, auto at) {
            F const now = w.load(g, at);
            return fma(now, now, acc);
        });
        return part;
    }
};

} // namespace keel::inline KEEL_ABI
