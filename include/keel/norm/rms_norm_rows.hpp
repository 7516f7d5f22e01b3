// The mathematics of RMSNorm with gain 1 + delta, one row at a time.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// Where the row is rounded to the output's format: after the gain (Gemma, Qwen3-Next, TransformerEngine), one rounding;
/// or before it and again after (HF Llama, Qwen3).
enum class cast_order : uint8_t { gain_then_cast, cast_then_gain };

/// What add_rms_norm normalises: the stored, rounded sum (HF, Liger; the backward then sees the same numbers), or the
/// unrounded one (quack, FlashInfer).
enum class residual_rounding : uint8_t { from_stored, from_sum };

} // namespace keel

namespace keel::inline KEEL_ABI {

/// r = 1 / sqrt(mean(x^2) + epsilon), as r = scale * root with `scale` a power of two that is 1 unless the sum of squares would
/// overflow or lose digits. Then x * scale is exact and (x * scale) * root has one rounding even where r is subnormal.
struct inverse_rms {
    float scale, root;
    KEEL_FN float value() const { return mul(scale, root); }
};

/// `squares(s)` sums (x * s)^2 over the row in THE reduction order; `largest()` is the magnitude word of its largest element.
template <class Squares, class Largest>
KEEL_FN inverse_rms find_inverse_rms(int64_t n, float epsilon, Squares squares, Largest largest) {
    float const count = static_cast<float>(n);
    float const mean = add(div(squares(1.0f), count), epsilon);
    uint32_t const safe_low = bits(0x1p-80f), safe_high = bits(0x1p120f);
    if (bits(mean) - safe_low < safe_high - safe_low) return {1.0f, div(1.0f, sqrt(mean))};
    // Tiny, huge or not finite. Bring the larger of max|x| and sqrt(epsilon) to [1, 2); every factor of two stays normal.
    uint32_t const top = umax(largest(), bits(sqrt(epsilon)));
    if (top >= infinity_bits) return {1.0f, div(1.0f, sqrt(mean))};
    uint32_t const exponent = umin(umax(top >> 23, 3u), 251u);
    float const scale = as_float((254 - exponent) << 23);
    return {scale, div(1.0f, sqrt(add(div(squares(scale), count), mul(mul(epsilon, scale), scale))))};
}

/// The magnitude word of a row's largest element.
template <class G, class X> KEEL_FN uint32_t row_largest(G const& g, X const* in, int64_t n) {
    typename G::words top(0u);
    g.each(n, [&](auto at) { top = umax(top, magnitude(g.load(in, at))); });
    return g.max_bits(top);
}

/// y = u + u * delta to p[at]; under cast_then_gain u is rounded to p's format first. delta null: gain 1.
template <class G, class At, class D, class Y>
KEEL_FN void store_gained(G const& g, At at, typename G::value u, D const* delta, cast_order order, Y* p) {
    if (order == cast_order::cast_then_gain) g.store(p, at, u), u = g.load(p, at);
    g.store(p, at, delta == nullptr ? u : fma(u, g.load(delta, at), u));
}

// A row of the norm in two steps, for kernels that store it and for those that quantise it (quantize/quantize_produced.hpp): begin, which
// finds r and saves it, then put, element by element.

/// Rows of y = u + u * delta with u = x * r.
template <class X, class D> struct rms_norm_source {
    view<X const, 2> x;
    view<D const, 1> delta;
    view<float, 1> rrms;
    float epsilon;
    cast_order order;

    struct row_state {
        inverse_rms r;
        X const* in;
        D const* delta;
        cast_order order;
    };
    template <class G> KEEL_FN row_state begin(G const& g, int64_t row) const {
        using F = typename G::value;
        X const* const in = x.at(row);
        int64_t const n = x.extent[1];
        inverse_rms const r = find_inverse_rms(
            n, epsilon,
            [&](float s) {
                return g.sum(n, [&](F const& acc, auto at) {
                    F const v = g.load(in, at) * F(s);
                    return fma(v, v, acc);
                });
            },
            [&] { return row_largest(g, in, n); });
        if (!rrms.absent() && g.leader()) rrms(row) = canonical(r.value());
        return {r, in, delta.data, order};
    }
    template <class G, class At, class Y> KEEL_FN static void put(G const& g, row_state const& s, int64_t column, At at, Y* p) {
        using F = typename G::value;
        F const u = (g.load(s.in + column, at) * F(s.r.scale)) * F(s.r.root);
        store_gained(g, at, u, s.delta == nullptr ? nullptr : s.delta + column, s.order, p);
    }
};

/// sum = x + residual (stored, one rounding), then rows of the norm of it.
template <class X, class D> struct add_rms_norm_source {
    view<X const, 2> x, residual;
    view<D const, 1> delta;
    view<X, 2> sum;
    view<float, 1> rrms;
    float epsilon;
    cast_order order;
    residual_rounding rounding;

    struct row_state {
        inverse_rms r;
        X const *a, *b, *stored;
        D const* delta;
        cast_order order;
        residual_rounding rounding;

        template <class G, class At> KEEL_FN typename G::value element(G const& g, int64_t column, At at) const {
            using F = typename G::value;
            return rounding == residual_rounding::from_stored ? g.load(stored + column, at) : F(g.load(a + column, at) + g.load(b + column, at));
        }
    };
    template <class G> KEEL_FN row_state begin(G const& g, int64_t row) const {
        using F = typename G::value;
        X* const to = sum.at(row);
        row_state s{{1.0f, 1.0f}, x.at(row), residual.at(row), to, delta.data, order, rounding};
        int64_t const n = x.extent[1];
        g.each(n, [&](auto at) { g.store(to, at, g.load(s.a, at) + g.load(s.b, at)); });
        s.r = find_inverse_rms(
            n, epsilon,
            [&](float scale) {
                return g.sum(n, [&](F const& acc, auto at) {
                    F const v = s.element(g, 0, at) * F(scale);
                    return fma(v, v, acc);
                });
            },
            [&] {
                typename G::words top(0u);
                g.each(n, [&](auto at) { top = umax(top, magnitude(s.element(g, 0, at))); });
                return g.max_bits(top);
            });
        if (!rrms.absent() && g.leader()) rrms(row) = canonical(s.r.value());
        return s;
    }
    template <class G, class At, class Y> KEEL_FN static void put(G const& g, row_state const& s, int64_t column, At at, Y* p) {
        using F = typename G::value;
        F const u = (s.element(g, column, at) * F(s.r.scale)) * F(s.r.root);
        store_gained(g, at, u, s.delta == nullptr ? nullptr : s.delta + column, s.order, p);
    }
};

/// The rows of a source, stored.
template <class Source, class Y> struct stored_norm_row {
    Source source;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        auto const state = source.begin(g, row);
        Y* const out = y.at(row);
        g.each(y.extent[1], [&](auto at) { Source::put(g, state, 0, at, out); });
    }
};

/// dx = r * (g - c * u) [+ dsum], with g = dy + dy * delta, u = x * r, c = mean(g * u).
template <class DY, class X, class D> struct rms_norm_backward_row {
    view<DY const, 2> dy;
    view<X const, 2> x;
    view<D const, 1> delta;
    view<DY const, 2> dsum; ///< gradient that reaches the residual stream past the norm; absent for none
    view<float const, 1> rrms;
    view<DY, 2> dx;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        DY const* const gradient = dy.at(row);
        X const* const in = x.at(row);
        DY* const out = dx.at(row);
        int64_t const n = x.extent[1];
        F const r(rrms(row));
        auto const gained = [&](auto at) {
            F const v = g.load(gradient, at);
            return delta.absent() ? v : fma(v, g.load(delta.data, at), v);
        };
        float const t = g.sum(n, [&](F const& acc, auto at) { return fma(gained(at), g.load(in, at) * r, acc); });
        F const minus_c(div(-t, static_cast<float>(n)));
        g.each(n, [&](auto at) {
            F const inner = fma(minus_c, g.load(in, at) * r, gained(at));
            g.store(out, at, dsum.absent() ? inner * r : fma(inner, r, g.load(dsum.at(row), at)));
        });
    }
};

/// ddelta = sum over rows of dy * u: the term of a column sum (backend/column_sum.hpp).
template <class DY, class X> struct rms_norm_gain_term {
    view<DY const, 2> dy;
    view<X const, 2> x;
    view<float const, 1> rrms;

    template <class G, class At>
    KEEL_FN typename G::value operator()(G const& g, typename G::value const& acc, int64_t row, At at) const {
        using F = typename G::value;
        return fma(g.load(dy.at(row), at), g.load(x.at(row), at) * F(rrms(row)), acc);
    }
};

} // namespace keel::inline KEEL_ABI
