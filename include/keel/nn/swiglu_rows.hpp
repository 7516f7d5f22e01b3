// The mathematics of SwiGLU, one row at a time.
#pragma once

#include <keel/core/math.hpp>
#include <keel/core/view.hpp>

namespace keel::inline KEEL_ABI {

/// y = silu(gate) * up.
template <class X, class Y> struct swiglu_row {
    view<X const, 2> gate, up;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        g.each(y.extent[1], [&](auto at) {
            g.store(y.at(row), at, silu(g.load(gate.at(row), at)) * g.load(up.at(row), at));
        });
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
