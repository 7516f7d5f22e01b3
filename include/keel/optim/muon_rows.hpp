// The mathematics of a Muon step around Newton-Schulz: momentum before it, the weights after it, one row at a time.
#pragma once

#include <keel/guard/step_gate_rows.hpp>
#include <keel/optim/newton_schulz_rows.hpp>
#include <keel/optim/step_change.hpp>

namespace keel {

/// ema: M = mu M + (1 - mu) G (Jordan's code, torch's code, Megatron). heavy_ball: M = mu M + G (Moonlight, dion, torch's text).
/// From a zero state the two give the same direction; they differ where mu changes, or a state crosses over.
enum class momentum_rule : uint8_t { ema, heavy_ball };

} // namespace keel

namespace keel::inline KEEL_ABI {

/// A source for Newton-Schulz (newton_schulz_rows.hpp): U = the momentum after this gradient, looked ahead once more where
/// nesterov. take() stores the momentum.
///     add = (1 - mu) or 1;  x = gradient * clip;  M' = fma(mu, M, add x);  U = nesterov ? fma(mu, M', add x) : M'
template <class Gradient> struct momentum_source {
    view<Gradient const, 2> gradient;
    view<float, 2> momentum;
    step_gate const* gate;
    float mu, add;
    bool nesterov;

    template <class F> struct pair {
        F momentum, direction;
    };
    template <class G, class At> KEEL_FN pair<typename G::value> next(G const& g, int64_t row, At at) const {
        using F = typename G::value;
        F const x = mul(F(add), F(load_at(g, gradient, row, at) * F(gate->clip)));
        F const m = fma(F(mu), F(load_at(g, momentum, row, at)), x);
        return {m, nesterov ? fma(F(mu), m, x) : m};
    }
    template <class G, class At> KEEL_FN typename G::value peek(G const& g, int64_t row, At at) const { return next(g, row, at).direction; }
    template <class G, class At> KEEL_FN typename G::value take(G const& g, int64_t row, At at) const {
        auto const n = next(g, row, at);
        store_at(g, momentum, row, at, n.momentum);
        return n.direction;
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

/// w = fma(-rate * scale, O, fma(-rate * decay, w, w)).
template <class T, class Shadow> struct muon_update_row {
    view<T const, 2> direction; ///< absent: zeros
    view<float, 2> weight;
    view<Shadow, 2> shadow; ///< absent: none
    float step, decay;
    step_change_part* change; ///< null: not wanted

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        int64_t const n = weight.extent[1];
        auto const update = [&](auto at) {
            F const before = load_at(g, weight, row, at);
            F after = fma(F(-decay), before, before);
            if (!direction.absent()) after = fma(F(-step), g.load(direction.at(row), at), after);
            store_at(g, weight, row, at, after);
            if (!shadow.absent()) store_at(g, shadow, row, at, after);
            return F(after - before);
        };
        if (change == nullptr) {
            g.each(n, [&](auto at) { update(at); });
            return;
        }
        step_change_part part;
        part.update_squares = g.sum(n, [&](F const& acc, auto at) {
            F const moved = update(at);
            return fma(moved, moved, acc);
        });
        part.weight_squares = g.sum(n, [&](F const& acc, auto at) {
            F const now = load_at(g, weight, row, at);
            return fma(now, now, acc);
        });
        if (g.leader()) change[row] = part;
    }
};

} // namespace keel::inline KEEL_ABI
