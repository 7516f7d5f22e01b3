// What becomes of a weight: in an fp32 master with a low-precision copy, or in 16 bits alone, rounded by chance or with what the rounding
// took away kept beside it.
//
//     master        w' = fma(-step, d, w - decay w);  copy = w' to nearest
//     by chance     the same w', rounded up or down by chance: the mean is w'; w walks by up to a unit in its last place
//     compensated   d' = fma(-step, d, -decay w);  w, c = kahan(w, c, d'): as w + c, a number of 16 digits (kahan.hpp)
#pragma once

#include <keel/optim/kahan_rows.hpp>
#include <keel/optim/state_rows.hpp>

namespace keel {

/// decoupled: every weight loses its share. cautious: only those that the step takes towards 0, which are those whose direction has their
/// sign, and zeros.
enum class decay_rule : uint8_t { decoupled, cautious };

KEEL_HOST constexpr char const* name_of(decay_rule rule) { return rule == decay_rule::cautious ? "cautious" : "decoupled"; }

} // namespace keel

namespace keel::inline KEEL_ABI {

/// What a learning rate or a decay may be: with it no factor of a step overflows, whatever the scale and the bias correction.
KEEL_HOST constexpr bool is_rate(float x) { return x >= 0.0f && x <= 0x1p40f; }

/// One step's factors, uniform over a tensor. -0 for `decay` where there is none.
struct weight_factors {
    float step;  ///< what the direction is multiplied with before it is taken off
    float decay; ///< share of itself that a weight loses
    bool cautious;

    /// Where a weight w with this direction decays.
    template <class F> KEEL_FN mask_of<F> decays(F const& direction, F const& w) const {
        using U = bits_of<F>;
        U const agree = (bits(direction) ^ bits(w)) & U(sign_bit); // 0 where the signs are one
        return either(eq(agree, U(0u)), either(eq(magnitude(direction), U(0u)), eq(magnitude(w), U(0u))));
    }
    /// w - decay w - step direction, of which each operation rounds once.
    template <class F> KEEL_FN F moved(F const& direction, F const& w) const {
        F kept = fma(F(-decay), w, w);
        if (cautious) kept = select(decays(direction, w), kept, w);
        return fma(F(-step), direction, kept);
    }
    /// The change alone.
    template <class F> KEEL_FN F change(F const& direction, F const& w) const {
        F lost = mul(F(-decay), w);
        if (cautious) lost = select(decays(direction, w), lost, F(0.0f));
        return fma(F(-step), direction, lost);
    }
};

/// A row of weights. move() gives how far the element went, as it is stored; load() what the model multiplies with.
template <class Shadow> struct master_weight_row {
    static constexpr bool draws = false;
    state_row<float> master;
    state_row<Shadow> shadow; ///< null: none

    template <class G, class At>
    KEEL_FN typename G::value move(G const& g, At at, typename G::value const& direction, weight_factors const& f, typename G::words const&) const {
        auto const before = master.load(g, at), after = f.moved(direction, before);
        store_nearest(g, master, at, after);
        if (shadow.p != nullptr) store_nearest(g, shadow, at, after);
        return after - before;
    }
    template <class G, class At> KEEL_FN typename G::value load(G const& g, At at) const { return master.load(g, at); }

private:
    template <class G, class T, class At>
    KEEL_FN static void store_nearest(G const& g, state_row<T> const& row, At at, typename G::value const& v) {
        if (row.step == 1) g.store(row.p, at, v);
        else g.store(strided<T>{row.p, row.step}, at, v);
    }
};
template <class Weight> struct stochastic_weight_row {
    static constexpr bool draws = true;
    state_row<Weight> weight;

    template <class G, class At>
    KEEL_FN typename G::value move(G const& g, At at, typename G::value const& direction, weight_factors const& f,
                                   typename G::words const& noise) const {
        using F = typename G::value;
        F const before = weight.load(g, at);
        auto const code = encode_words<Weight, overflow::saturate_finite, rounding::stochastic>(f.moved(direction, before), noise);
        if (weight.step == 1) g.store_code(weight.p, at, code);
        else g.store_code(strided<Weight>{weight.p, weight.step}, at, code);
        return decode_words<Weight, F>(code) - before;
    }
    template <class G, class At> KEEL_FN typename G::value load(G const& g, At at) const { return weight.load(g, at); }
};
template <class Weight> struct kahan_weight_row {
    static constexpr bool draws = false;
    state_row<Weight> weight, compensation;

    template <class G, class At>
    KEEL_FN typename G::value move(G const& g, At at, typename G::value const& direction, weight_factors const& f, typename G::words const&) const {
        auto const before = weight.load(g, at), change = f.change(direction, before);
        auto const sum = compensated_sum<Weight>(before, compensation.load(g, at), change);
        store_code(g, weight, at, sum.weight_code);
        store_code(g, compensation, at, encode_words<Weight>(sum.compensation));
        return change;
    }
    template <class G, class At> KEEL_FN typename G::value load(G const& g, At at) const { return weight.load(g, at); }

private:
    template <class G, class At>
    KEEL_FN static void store_code(G const& g, state_row<Weight> const& row, At at, typename G::words const& code) {
        if (row.step == 1) g.store_code(row.p, at, code);
        else g.store_code(strided<Weight>{row.p, row.step}, at, code);
    }
};

} // namespace keel::inline KEEL_ABI
