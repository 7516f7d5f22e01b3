// The mathematics of moving tokens to experts and back, one token at a time.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// How much of a layer's output y = r + h its routed experts made; r the routed part, h the shared one. Sums over the tokens, of values
/// before they were rounded to y's format. Print projection() beside the routed share of the parameters. Plain fp32 sums of squares:
/// a layer whose outputs have a norm beyond 2^64 over all tokens has sums of Inf and a share of NaN, which a log should show as it is.
struct routed_share {
    float routed_output = 0.0f; ///< <r, y>
    float output = 0.0f;        ///< <y, y>
    float routed = 0.0f;        ///< <r, r>
    float shared = 0.0f;        ///< <h, h>

    /// <r, y> / <y, y>: the routed part's share of the output along the output. The shared part has the rest, exactly; below 0 or
    /// above 1 where the two cancel. 0 for no output.
    KEEL_FN float projection() const { return output == 0.0f ? 0.0f : routed_output / output; }
    /// |r|^2 / (|r|^2 + |h|^2): sizes alone, blind to cancellation. 0 for no output.
    KEEL_FN float norm() const {
        float const unit = routed + shared <= 0x1.fffffep127f ? 1.0f : 0.5f; // halves, where the sum alone would overflow
        return routed == 0.0f ? 0.0f : routed * unit / (routed * unit + shared * unit);
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// True where an assignment has a row. Anything that is no row counts as dropped and is never dereferenced.
KEEL_FN bool has_row(int64_t slot, int64_t row_count) {
    KEEL_ASSERT(slot >= -1 && slot < row_count);
    return static_cast<uint64_t>(slot) < static_cast<uint64_t>(row_count);
}

/// rows[slot] = x[token], for each of the token's slots.
template <class X> struct dispatch_row {
    view<X const, 2> x;
    view<int64_t const, 2> slots;
    view<X, 2> out;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        g.each(x.extent[1], [&](auto at) {
            auto const v = g.load(x.at(token), at);
            for (int64_t j = 0; j < slots.extent[1]; ++j)
                if (int64_t const slot = slots(token, j); has_row(slot, out.extent[0])) g.store(out.at(slot), at, v);
        });
    }
};

/// dx = ((0 + drows[slot_0]) + drows[slot_1]) + ..., dropped slots left out; one rounding.
template <class D> struct dispatch_backward_row {
    view<D const, 2> drows;
    view<int64_t const, 2> slots;
    view<D, 2> dx;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        g.each(dx.extent[1], [&](auto at) {
            F sum(0.0f);
            for (int64_t j = 0; j < slots.extent[1]; ++j)
                if (int64_t const slot = slots(token, j); has_row(slot, drows.extent[0])) sum = sum + g.load(drows.at(slot), at);
            g.store(dx.at(token), at, sum);
        });
    }
};

/// y = r + h with r = sum_j w_j O[slot_j], an fma chain from +0 in the order of j, and h the shared experts' row. With `terms`, the
/// token's <r, y>, <y, y>, <r, r>, <h, h> before y is rounded, from the same pass.
template <class O, class S, class Y> struct combine_row {
    view<O const, 2> expert_rows;
    view<int64_t const, 2> slots;
    view<float const, 2> weights;
    view<S const, 2> shared;
    view<Y, 2> y;
    view<float, 2> terms;
    view<bool const, 1> valid;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        Y* const out = y.at(token);
        int64_t const width = y.extent[1];
        auto const routed = [&](auto at) {
            F sum(0.0f);
            for (int64_t j = 0; j < slots.extent[1]; ++j)
                if (int64_t const slot = slots(token, j); has_row(slot, expert_rows.extent[0]))
                    sum = fma(F(weights(token, j)), g.load(expert_rows.at(slot), at), sum);
            return sum;
        };
        auto const shared_part = [&](auto at) { return shared.absent() ? F(0.0f) : g.load(shared.at(token), at); };
        if (terms.absent())
            return g.each(width, [&](auto at) { g.store(out, at, shared.absent() ? routed(at) : F(routed(at) + shared_part(at))); });
        row_sums<4> total = g.template sums<4>(width, [&](F(&acc)[4], auto at) {
            F const r = g.inside(at, routed(at)), h = shared_part(at), sum = shared.absent() ? r : F(r + h);
            g.store(out, at, sum);
            acc[0] = fma(r, sum, acc[0]);
            acc[1] = fma(sum, sum, acc[1]);
            acc[2] = fma(r, r, acc[2]);
            acc[3] = fma(h, h, acc[3]);
        });
        if (!valid.absent() && !valid(token)) total = {};
        if (g.leader())
            for (int64_t q = 0; q < 4; ++q) terms(token, q) = total.value[q];
    }
};

/// dO[slot_j] = w_j dy; dw_j = <dy, O[slot_j]> in THE reduction order, 0 where the slot was dropped.
template <class D, class O> struct combine_backward_row {
    view<D const, 2> dy;
    view<O const, 2> expert_rows;
    view<int64_t const, 2> slots;
    view<float const, 2> weights;
    view<D, 2> dexpert_rows;
    view<float, 2> dweights;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        D const* const in = dy.at(token);
        int64_t const width = dy.extent[1];
        for (int64_t j = 0; j < slots.extent[1]; ++j) {
            int64_t const slot = slots(token, j);
            bool const served = has_row(slot, expert_rows.extent[0]);
            float dw = 0.0f;
            if (served && !dweights.absent())
                dw = g.sum(width, [&](F const& acc, auto at) { return fma(g.load(in, at), g.load(expert_rows.at(slot), at), acc); });
            if (served && !dexpert_rows.absent())
                g.each(width, [&](auto at) { g.store(dexpert_rows.at(slot), at, g.load(in, at) * F(weights(token, j))); });
            if (!dweights.absent() && g.leader()) dweights(token, j) = dw;
        }
    }
};

/// The four terms of the routed share, each summed over the tokens in THE reduction order.
struct share_sum_row {
    view<float const, 2> terms;
    routed_share* share;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        using F = typename G::value;
        row_sums<4> const sum = g.template sums<4>(terms.extent[0], [&](F(&acc)[4], auto at) {
            for (int64_t q = 0; q < 4; ++q) acc[q] = acc[q] + g.load(strided<float const>{terms.at(0, q), terms.stride[0]}, at);
        });
        if (g.leader()) *share = {sum.value[0], sum.value[1], sum.value[2], sum.value[3]};
    }
};

} // namespace keel::inline KEEL_ABI
