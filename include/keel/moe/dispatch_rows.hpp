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

/// rows[slot] = x[token], for each of the token's slots: bits, whatever they stand for.
template <class X> struct dispatch_row {
    view<X const, 2> x;
    view<int64_t const, 2> slots;
    view<X, 2> out;

    KEEL_FN int64_t output_bytes() const { return out.size() * static_cast<int64_t>(sizeof(X)); }
    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        for (int64_t j = 0; j < slots.extent[1]; ++j)
            if (int64_t const slot = slots(token, j); has_row(slot, out.extent[0])) g.copy(out.at(slot), x.at(token), x.extent[1]);
    }
};

/// The rows that serve a token, in the order of choice, found once: the walks along them ask nothing else. Without room for all, they ask the
/// slots as they go. While one token's rows are summed the next one's are asked for: they lie wherever their experts' queues have them.
template <class R, bool Weighted> struct serving_rows {
    static constexpr int64_t most = 16;

    view<R const, 2> rows;
    view<int64_t const, 2> slots;
    view<float const, 2> weights; ///< read where Weighted; otherwise 1, without a product
    int64_t token, count;
    R const* row[std::size_t{most}];
    float weight[std::size_t{most}];

    KEEL_FN serving_rows(view<R const, 2> all, view<int64_t const, 2> where, view<float const, 2> w, int64_t t)
        : rows(all), slots(where), weights(w), token(t), count(0) {
        for (int64_t j = 0; token < slots.extent[0] && j < slots.extent[1] && j < most; ++j)
            if (int64_t const slot = slots(token, j); has_row(slot, rows.extent[0])) {
                row[count] = rows.at(slot);
                weight[count++] = weight_of(j);
            }
    }
    template <class G, class At> KEEL_FN void prefetch(G const& g, At at) const {
        for (int64_t i = 0; i < count; ++i) g.prefetch(row[i], at);
    }
    template <class F, class G, class At> KEEL_FN F sum(G const& g, At at) const {
        F sum(0.0f);
        auto const add = [&](float w, R const* r) {
            if constexpr (Weighted) sum = fma(F(w), g.load(r, at), sum);
            else sum = sum + g.load(r, at);
        };
        for (int64_t i = 0; i < count; ++i) add(weight[i], row[i]);
        for (int64_t j = most; j < slots.extent[1]; ++j)
            if (int64_t const slot = slots(token, j); has_row(slot, rows.extent[0]))
                add(weight_of(j), rows.at(slot));
        return sum;
    }
    KEEL_FN float weight_of(int64_t j) const {
        if constexpr (Weighted) return weights(token, j);
        else return 1.0f;
    }
};

/// dx = ((0 + drows[slot_0]) + drows[slot_1]) + ..., dropped slots left out; one rounding.
template <class D> struct dispatch_backward_row {
    view<D const, 2> drows;
    view<int64_t const, 2> slots;
    view<D, 2> dx;

    KEEL_FN int64_t output_bytes() const { return dx.size() * static_cast<int64_t>(sizeof(D)); }
    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        serving_rows<D, false> const serving(drows, slots, {}, token), next(drows, slots, {}, token + 1);
        g.each(dx.extent[1], [&](auto at) {
            next.prefetch(g, at);
            g.store(dx.at(token), at, serving.template sum<F>(g, at));
        });
    }
};

/// y = r + h with r = sum_j w_j O[slot_j], an fma chain from +0 in the order of j, and h the shared experts' row. With `terms`, the
/// token's <r, y>, <y, y>, <r, r>, <h, h> before y is rounded, from the same pass. With `row_terms`, <w_j O[slot_j], y> at each slot.
template <class O, class S, class Y> struct combine_row {
    view<O const, 2> expert_rows;
    view<int64_t const, 2> slots;
    view<float const, 2> weights;
    view<S const, 2> shared;
    view<Y, 2> y;
    view<float, 2> terms;
    view<float, 1> row_terms;
    view<bool const, 1> valid;

    KEEL_FN int64_t output_bytes() const { return y.size() * static_cast<int64_t>(sizeof(Y)); }
    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        Y* const out = y.at(token);
        int64_t const width = y.extent[1];
        serving_rows<O, true> const serving(expert_rows, slots, weights, token), next(expert_rows, slots, weights, token + 1);
        auto const routed = [&](auto at) {
            next.prefetch(g, at);
            return serving.template sum<F>(g, at);
        };
        auto const shared_part = [&](auto at) { return shared.absent() ? F(0.0f) : g.load(shared.at(token), at); };
        auto const whole = [&](F const& r, F const& h) { return shared.absent() ? r : F(r + h); };
        if (!row_terms.absent()) measure_rows(g, token, [&](auto at) { return whole(routed(at), shared_part(at)); }); // y may be h: before it
        if (terms.absent()) return g.each(width, [&](auto at) { g.store(out, at, whole(routed(at), shared_part(at))); });
        row_sums<4> total = g.template sums<4>(width, [&](F(&acc)[4], auto at) {
            F const r = g.inside(at, routed(at)), h = shared_part(at), sum = whole(r, h);
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

    /// <w_j O[slot_j], y> of eight choices at a time; the rows come from the caches.
    template <class G, class Sum> KEEL_FN void measure_rows(G const& g, int64_t token, Sum const& output) const {
        using F = typename G::value;
        constexpr int64_t some = 8;
        for (int64_t first = 0; first < slots.extent[1]; first += some) {
            int64_t const n = slots.extent[1] - first < some ? slots.extent[1] - first : some;
            row_sums<some> const total = g.template sums<some>(y.extent[1], [&](F(&acc)[some], auto at) {
                F const sum = g.inside(at, output(at));
                for (int64_t j = 0; j < n; ++j) {
                    int64_t const slot = slots(token, first + j);
                    if (!has_row(slot, expert_rows.extent[0])) continue;
                    acc[j] = fma(g.inside(at, F(weights(token, first + j)) * g.load(expert_rows.at(slot), at)), sum, acc[j]);
                }
            });
            for (int64_t j = 0; g.leader() && j < n; ++j)
                if (int64_t const slot = slots(token, first + j); has_row(slot, expert_rows.extent[0])) row_terms(slot) = total.value[j];
        }
    }
};

/// dO[slot_j] = w_j dy; dw_j = <dy, O[slot_j]> in THE reduction order, 0 where the slot was dropped. One walk for both.
template <class D, class O> struct combine_backward_row {
    view<D const, 2> dy;
    view<O const, 2> expert_rows;
    view<int64_t const, 2> slots;
    view<float const, 2> weights;
    view<D, 2> dexpert_rows;
    view<float, 2> dweights;

    KEEL_FN int64_t output_bytes() const { return dexpert_rows.size() * static_cast<int64_t>(sizeof(D)); }
    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        bool const both = !dweights.absent() && !dexpert_rows.absent();
        for (int64_t j = 0; j < slots.extent[1];) {
            bool const first = served(token, j), second = j + 1 < slots.extent[1] && served(token, j + 1);
            if (both && first && second) two_choices(g, token, j), j += 2;
            else one_choice(g, token, j, first), j += 1;
        }
    }

private:
    KEEL_FN bool served(int64_t token, int64_t j) const { return has_row(slots(token, j), expert_rows.extent[0]); }

    template <class G> KEEL_FN void one_choice(G const& g, int64_t token, int64_t j, bool is_served) const {
        using F = typename G::value;
        D const* const in = dy.at(token);
        bool const moves = is_served && !dexpert_rows.absent();
        O const* const row = is_served ? expert_rows.at(slots(token, j)) : nullptr;
        O const* const next = row_after(token, j);
        D* const out = moves ? dexpert_rows.at(slots(token, j)) : nullptr;
        float const w = weights(token, j);
        float dw = 0.0f;
        if (is_served && !dweights.absent())
            dw = g.sum(dy.extent[1], [&](F const& acc, auto at) {
                F const v = g.load(in, at);
                if (next != nullptr) g.prefetch(next, at);
                if (moves) g.store(out, at, v * F(w));
                return fma(v, g.load(row, at), acc);
            });
        else if (moves) g.each(dy.extent[1], [&](auto at) { g.store(out, at, g.load(in, at) * F(w)); });
        if (!dweights.absent() && g.leader()) dweights(token, j) = dw;
    }
    /// Two that are served, by one walk along dy.
    template <class G> KEEL_FN void two_choices(G const& g, int64_t token, int64_t j) const {
        using F = typename G::value;
        D const* const in = dy.at(token);
        O const *row[2], *next[2];
        D* out[2];
        float w[2];
        for (int64_t i = 0; i < 2; ++i) {
            int64_t const slot = slots(token, j + i);
            row[i] = expert_rows.at(slot), out[i] = dexpert_rows.at(slot), w[i] = weights(token, j + i), next[i] = row_after(token, j + 1 + i);
        }
        auto const dw = g.template sums<2>(dy.extent[1], [&](F(&acc)[2], auto at) {
            F const v = g.load(in, at);
            for (int i = 0; i < 2; ++i) {
                if (next[i] != nullptr) g.prefetch(next[i], at);
                g.store(out[i], at, v * F(w[i]));
                acc[i] = fma(v, g.load(row[i], at), acc[i]);
            }
        });
        for (int64_t i = 0; g.leader() && i < 2; ++i) dweights(token, j + i) = dw.value[i];
    }
    /// The row that is read after choice j's, or after so many past the last, if it is known to be one.
    KEEL_FN O const* row_after(int64_t token, int64_t j) const {
        int64_t const k = slots.extent[1], past = j + 1 - k;
        if (past >= k || (past >= 0 && token + 1 >= slots.extent[0])) return nullptr;
        int64_t const slot = past < 0 ? slots(token, j + 1) : slots(token + 1, past);
        return has_row(slot, expert_rows.extent[0]) ? expert_rows.at(slot) : nullptr;
    }
};

/// Each expert's share: the sum of its rows' terms, in THE reduction order, over <y, y>.
struct expert_share_row {
    view<float const, 1> row_terms;
    view<int64_t const, 1> offsets;
    float output;
    view<float, 1> shares;

    template <class G> KEEL_FN void operator()(G const& g, int64_t expert) const {
        using F = typename G::value;
        int64_t const first = offsets(expert);
        strided<float const> const own{row_terms.data + first * row_terms.stride[0], row_terms.stride[0]};
        float const sum = g.sum(offsets(expert + 1) - first, [&](F const& acc, auto at) { return acc + g.load(own, at); });
        if (g.leader()) shares(expert) = output == 0.0f ? 0.0f : div(sum, output);
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
