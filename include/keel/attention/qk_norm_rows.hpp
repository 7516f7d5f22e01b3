// The mathematics of QK-norm with rotary positions, one head of one token at a time.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/math.hpp>
#include <keel/core/view.hpp>
#include <keel/norm/rms_norm_rows.hpp>

namespace keel {

/// Which elements of a head rotate together. R elements rotate, the first of the head; the others pass.
enum class rope_layout : uint8_t {
    half_pairs,        ///< (i, i + R/2): Llama, Qwen, GPT-NeoX
    interleaved_pairs, ///< (2i, 2i + 1): the RoFormer paper, GPT-J
};

/// Cosines and sines of the angles, [tokens, R/2] each, as rope_table makes them. Absent: no rotation.
struct rope_angles {
    view<float const, 2> cosine = {};
    view<float const, 2> sine = {};
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// cos and sin of position * frequency, a token a row.
template <class P> struct rope_table_row {
    view<P const, 1> positions;
    view<float const, 1> frequencies;
    view<float, 2> cosine, sine;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        using F = typename G::value;
        F const position(static_cast<float>(positions(token)));
        g.each(frequencies.extent[0], [&](auto at) {
            F s, c;
            sincos_product(position, F(g.load(frequencies.data, at)), s, c);
            g.store(cosine.at(token), at, c);
            g.store(sine.at(token), at, s);
        });
    }
};

// --- the parts of a head -----------------------------------------------------------------------------------------------

/// The pairs' first elements, the pairs' second elements, or what lies behind the R rotated ones: each turns a pointer to
/// a head into something that a group loads from. `half` is R/2.
template <rope_layout Layout> struct pair_firsts {
    int64_t half;
    template <class T> KEEL_FN auto operator()(T* head) const {
        if constexpr (Layout == rope_layout::half_pairs)
            return head;
        else
            return strided<T>{head, 2};
    }
};
template <rope_layout Layout> struct pair_seconds {
    int64_t half;
    template <class T> KEEL_FN auto operator()(T* head) const {
        if constexpr (Layout == rope_layout::half_pairs)
            return head + half;
        else
            return strided<T>{head + 1, 2};
    }
};
struct unrotated {
    int64_t half;
    template <class T> KEEL_FN T* operator()(T* head) const { return head + 2 * half; }
};

template <class F> struct rotated { F first, second; };
/// (a, b) turned by the angle with cosine c and sine s; by the opposite angle with -s.
template <class F> KEEL_FN rotated<F> rotate(F const& a, F const& b, F const& c, F const& s) {
    return {fma(a, c, negate(mul(b, s))), fma(b, c, mul(a, s))};
}

// --- forward -----------------------------------------------------------------------------------------------------------

/// Of each head: z = u + u * delta with u = x * r, as rms_norm; then z rotated, and one rounding. A row is one token: its heads
/// share the angles.
template <rope_layout Layout, class X, class D, class Y> struct qk_norm_row {
    view<X const, 3> x;
    view<D const, 1> delta;
    rope_angles rope;
    view<Y, 3> y;
    view<float, 2> rrms;
    float epsilon;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        int64_t const heads = x.extent[1], step_in = x.stride[1], step_out = y.stride[1];
        one_head const head{x.extent[2], rope.cosine.extent[1], rope.cosine.at(token), rope.sine.at(token), delta.data,
                            epsilon};
        X const* const in = x.at(token);
        Y* const out = y.at(token);
        for (int64_t h = 0; h < heads; ++h) {
            float const r = head(g, in + h * step_in, out + h * step_out);
            if (!rrms.absent() && g.leader()) rrms(token, h) = canonical(r);
        }
    }

    /// What the heads of a token share; gives 1 / rms.
    struct one_head {
        int64_t n, half;
        float const *cosine, *sine;
        D const* gain; ///< null: none
        float epsilon;

        template <class G> KEEL_FN float operator()(G const& g, X const* in, Y* out) const {
            using F = typename G::value;
            inverse_rms const r = find_inverse_rms(
                n, epsilon,
                [&](float s) {
                    return g.sum(n, [&](F const& acc, auto at) {
                        F const v = g.load(in, at) * F(s);
                        return fma(v, v, acc);
                    });
                },
                [&] { return row_largest(g, in, n); });
            auto const normed = [&](auto part, auto at) {
                F const u = (g.load(part(in), at) * F(r.scale)) * F(r.root);
                return gain == nullptr ? u : fma(u, g.load(part(gain), at), u);
            };
            pair_firsts<Layout> const firsts{half};
            pair_seconds<Layout> const seconds{half};
            unrotated const rest{half};
            g.each(half, [&](auto at) {
                F const c = g.load(cosine, at), s = g.load(sine, at);
                auto const z = rotate<F>(normed(firsts, at), normed(seconds, at), c, s);
                g.store(firsts(out), at, z.first);
                g.store(seconds(out), at, z.second);
            });
            g.each(n - 2 * half, [&](auto at) { g.store(rest(out), at, normed(rest, at)); });
            return r.value();
        }
    };
};

// --- backward ----------------------------------------------------------------------------------------------------------

/// Of each head, with w = dy turned back, g = w + w * delta, u = x * r: dx = r * (g - c * u), c = mean(g * u). The mean's sum
/// takes the pairs (first, then second element) in THE reduction order, then the unrotated elements.
template <rope_layout Layout, class DY, class X, class D> struct qk_norm_backward_row {
    view<DY const, 3> dy;
    view<X const, 3> x;
    view<D const, 1> delta;
    rope_angles rope;
    view<float const, 2> rrms;
    view<DY, 3> dx;

    template <class G> KEEL_FN void operator()(G const& g, int64_t token) const {
        int64_t const heads = x.extent[1], step_dy = dy.stride[1], step_x = x.stride[1], step_dx = dx.stride[1];
        one_head const head{x.extent[2], rope.cosine.extent[1], rope.cosine.at(token), rope.sine.at(token), delta.data};
        DY const* const gradient = dy.at(token);
        X const* const in = x.at(token);
        DY* const out = dx.at(token);
        for (int64_t h = 0; h < heads; ++h)
            head(g, rrms(token, h), gradient + h * step_dy, in + h * step_x, out + h * step_dx);
    }

    struct one_head {
        int64_t n, half;
        float const *cosine, *sine;
        D const* gain;

        template <class G>
        KEEL_FN void operator()(G const& g, float rr, DY const* gradient, X const* in, DY* out) const {
            using F = typename G::value;
            F const r(rr);
            pair_firsts<Layout> const firsts{half};
            pair_seconds<Layout> const seconds{half};
            unrotated const rest{half};
            auto const gained = [&](auto part, auto at, F const& w) {
                return gain == nullptr ? w : fma(w, g.load(part(gain), at), w);
            };
            auto const turned_back = [&](auto at) {
                F const c = g.load(cosine, at), s = g.load(sine, at);
                auto w = rotate<F>(g.load(firsts(gradient), at), g.load(seconds(gradient), at), c, negate(s));
                w.first = gained(firsts, at, w.first);
                w.second = gained(seconds, at, w.second);
                return w;
            };
            auto const passed = [&](auto at) { return gained(rest, at, F(g.load(rest(gradient), at))); };
            float const rotated_sum = g.sum(half, [&](F const& acc, auto at) {
                auto const w = turned_back(at);
                return fma(w.second, g.load(seconds(in), at) * r, fma(w.first, g.load(firsts(in), at) * r, acc));
            });
            float const passed_sum = g.sum(
                n - 2 * half, [&](F const& acc, auto at) { return fma(passed(at), g.load(rest(in), at) * r, acc); });
            F const minus_c(div(-add(rotated_sum, passed_sum), static_cast<float>(n)));
            auto const projected = [&](auto part, auto at, F const& w) {
                return fma(minus_c, g.load(part(in), at) * r, w) * r;
            };
            g.each(half, [&](auto at) {
                auto const w = turned_back(at);
                g.store(firsts(out), at, projected(firsts, at, w.first));
                g.store(seconds(out), at, projected(seconds, at, w.second));
            });
            g.each(n - 2 * half, [&](auto at) { g.store(rest(out), at, projected(rest, at, passed(at))); });
        }
    };
};

/// ddelta = sum over tokens and heads of w * u, w = dy turned back: the terms of three column sums (backend/column_sum.hpp),
/// one for each part of a head. A row is one token; its heads continue the chain in order.
template <class Part, rope_layout Layout, class DY, class X> struct qk_norm_gain_term {
    view<DY const, 3> dy;
    view<X const, 3> x;
    rope_angles rope;
    view<float const, 2> rrms;

    template <class G, class At>
    KEEL_FN typename G::value operator()(G const& g, typename G::value const& before, int64_t token, At at) const {
        using F = typename G::value;
        Part const part{rope.cosine.extent[1]};
        pair_firsts<Layout> const firsts{part.half};
        pair_seconds<Layout> const seconds{part.half};
        F acc = before, c(1.0f), s(0.0f);
        if constexpr (!std::is_same_v<Part, unrotated>)
            c = g.load(rope.cosine.at(token), at), s = negate(F(g.load(rope.sine.at(token), at)));
        for (int64_t head = 0; head < x.extent[1]; ++head) {
            DY const* const gradient = dy.at(token, head);
            F const u = g.load(part(x.at(token, head)), at) * F(rrms(token, head));
            if constexpr (std::is_same_v<Part, unrotated>) {
                acc = fma(g.load(part(gradient), at), u, acc);
            } else {
                auto const w = rotate<F>(g.load(firsts(gradient), at), g.load(seconds(gradient), at), c, s);
                acc = fma(std::is_same_v<Part, pair_firsts<Layout>> ? w.first : w.second, u, acc);
            }
        }
        return acc;
    }
};

/// Puts the three parts' sums (firsts, seconds, unrotated, one behind the other) to their places in ddelta.
template <rope_layout Layout> struct qk_norm_gain_row {
    float const* sums;
    int64_t half;
    view<float, 1> ddelta;
    grad_mode mode;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        place(g, half, sums, pair_firsts<Layout>{half});
        place(g, half, sums + half, pair_seconds<Layout>{half});
        place(g, ddelta.extent[0] - 2 * half, sums + 2 * half, unrotated{half});
    }
    template <class G, class Part> KEEL_FN void place(G const& g, int64_t n, float const* from, Part part) const {
        using F = typename G::value;
        g.each(n, [&](auto at) {
            F const v = g.load(from, at);
            g.store(part(ddelta.data), at,
                    mode == accumulate ? F(g.load(part(static_cast<float const*>(ddelta.data)), at) + v) : v);
        });
    }
};

} // namespace keel::inline KEEL_ABI
