// The mathematics of SwiGLU, one row at a time.
#pragma once

#include <keel/core/math.hpp>
#include <keel/core/view.hpp>

namespace keel::inline KEEL_ABI {

/// Rows of y = silu(gate) * up, for kernels that store them and for those that quantise them (quantize/quantize_produced.hpp).
template <class X> struct swiglu_source {
    view<X const, 2> gate, up;

    struct row_state {
        X const *gate, *up;
    };
    template <class G> KEEL_FN row_state begin(G const&, int64_t row) const { return {gate.at(row), up.at(row)}; }
    template <class G, class At, class Y> KEEL_FN static void put(G const& g, row_state const& s, int64_t column, At at, Y* p) {
        g.store(p, at, silu(g.load(s.gate + column, at)) * g.load(s.up + column, at));
    }
};
template <class X, class Y> struct swiglu_row {
    swiglu_source<X> source;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        auto const state = source.begin(g, row);
        Y* const out = y.at(row);
        g.each(y.extent[1], [&](auto at) { source.put(g, state, 0, at, out); });
    }
};

/// dup = dy * silu(gate); dgate = dy * up * silu'(gate).
template <class DY, class X> struct swiglu_backward_row {
    view<DY const, 2> dy;
    view<X const, 2> gate, up;
    view<DY, 2> dgate, dup;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        g.each(dy.extent[1], [&](auto at) {
            F const d = g.load(dy.at(row), at), z = g.load(gate.at(row), at), u = g.load(up.at(row), at);
            g.store(dup.at(row), at, d * silu(z));
            g.store(dgate.at(row), at, (d * u) * silu_derivative(z));
        });
    }
};

} // namespace keel::inline KEEL_ABI
