// Elementary functions from fma and integers, generic over the lane type F: the same bits on every machine.
//
// For all of them: F is float or any lane type of core/lanes.hpp; no tables, no branches, no libm. A NaN argument gives
// the one NaN that keel stores (nan_bits). Subnormal arguments and results are as exact as the others; nothing is
// flushed. Round-to-nearest is assumed (core/environment.hpp tells). Errors are bounds over all float arguments, in
// units in the last place of the exact result, checked against double precision by tests/core/math_test.cpp.
// A call costs about 20 operations (exp, sigmoid, tanh, silu) or 30 to 40 (log, log1p, softplus), division included.
#pragma once

#include <keel/core/detail/exp_log.hpp>
#include <keel/core/trigonometry.hpp>

namespace keel::inline KEEL_ABI {

/// What rounding took from a + b, exactly (Knuth's two-sum); 0 where the sum is not finite.
template <class F> KEEL_FN F lost_in_sum(F const& a, F const& b) {
    using U = bits_of<F>;
    F const s = a + b, part_b = s - a, part_a = s - part_b;
    return select(gt(U(infinity_bits), magnitude(s)), (a - part_a) + (b - part_b), F(0.0f));
}

namespace detail {
/// e^c for |c| <= 104.
template <class F> KEEL_FN F exp_of_clamped(F const& c) {
    using U = bits_of<F>;
    constexpr float shift = round_shift + 254.0f;
    F const t = fma(c, F(log2_e), F(shift)); // its low bits: n + 254
    F const n = t - F(shift);
    F const r = fma(n, F(-ln2_low), fma(n, F(-ln2_high), c));
    F const p =
        polynomial(r, 1.0f, 1.0f, 0x1.fffffcp-2f, 0x1.555488p-3f, 0x1.555842p-5f, 0x1.1240f0p-7f, 0x1.6ae9e2p-10f);
    if constexpr (requires { F::machine::times_power_of_two(p.v, n.v); }) {
        return F::of(F::machine::times_power_of_two(p.v, n.v));
    } else {
        U const k = bits(t);
        U const half = shr<1>(k);
        return product(p * as_float(shl<23>(half)), as_float(shl<23>(k - half)));
    }
}
/// exp(x) for x from -Inf to 0, which must not be NaN.
template <class F> KEEL_FN F exp_not_above_zero(F const& x) {
    using U = bits_of<F>;
    return exp_of_clamped(as_float(umin(bits(x), U(bits(-104.0f))))); // words of negative numbers rise as they fall
}
} // namespace detail

/// e^x. x = n ln 2 + r, a polynomial of degree 6 in r, scaled by 2^n in two steps so that subnormal results round once.
/// exp(-Inf) = 0, exp(+Inf) = +Inf; from 88.72284 up +Inf, below -103.97 zero. Error: 0.9 ulp.
template <class F> KEEL_FN F exp(F const& x) {
    using namespace detail;
    return unless_nan(x, exp_of_clamped(with_sign_of(x, clamped_magnitude(x, 104.0f))));
}

/// Natural logarithm. x = 2^e m with m in [2/3, 4/3]; a polynomial in m - 1, plus e ln 2.
/// log(+-0) = -Inf, log(+Inf) = +Inf, log(x < 0) = NaN. Error: 1 ulp.
template <class F> KEEL_FN F log(F const& x) {
    using U = bits_of<F>;
    using namespace detail;
    U const word = bits(x);
    auto const subnormal = gt(U(0x00800000u), word);
    U const w = select(subnormal, bits(x * F(0x1p+24f)), word) + U(binade_shift);
    F const e = binade(w) - select(subnormal, F(binade_origin + 24.0f), F(binade_origin));
    F const f = as_float((w & U(0x007fffffu)) + U(two_thirds)) - F(1.0f);
    F const y = log_near_one(e, f, F(0.0f));
    return with_log_limits(x, y);
}

/// log(1 + x), accurate for small x. With u = fl(1 + x) = 2^e m, f = (1 + x) 2^-e - 1 is one fma, and what
/// it rounds away is kept. Error: 1.1 ulp.
/// log1p(+-0) = +-0, log1p(-1) = -Inf, log1p(+Inf) = +Inf, log1p(x < -1) = NaN.
template <class F> KEEL_FN F log1p(F const& x) {
    using U = bits_of<F>;
    using namespace detail;
    F const u = x + F(1.0f);
    U const w = bits(u) + U(binade_shift);
    F const four = as_float(U(0xc0800000u) - (w & U(0xff800000u))); // 4 * 2^-e: a normal number for every e
    F const scale = product(four, F(0.25f));
    F const less_one = scale - F(1.0f);
    F const f = fma(x, scale, less_one);
    F const rest = fma(x, scale, less_one - f);
    F const correction = fma(rest, negate(f), rest); // log(1 + f + rest) = log(1 + f) + rest / (1 + f)
    F const y = log_near_one(binade(w) - F(binade_origin), f, correction);
    return with_log_limits(u, select(eq(magnitude(x), U(0u)), x, y));
}

/// 1 / (1 + e^-x), without overflow: with z = e^-|x|, 1 / (1 + z) for x >= 0 and z / (1 + z) below. Relative accuracy
/// on both sides: sigmoid(-100) is a correct subnormal. Error: 2.5 ulp.
template <class F> KEEL_FN F sigmoid(F const& x) {
    using namespace detail;
    F const z = exp_minus_scaled(clamped_magnitude(x, exp_minus_limit));
    F const numerator = select(is_negative(x), z, F(1.0f / unscale));
    return unless_nan(x, product(numerator / fma(z, F(unscale), F(1.0f)), F(unscale)));
}

/// 1 - sigmoid(x) = sigmoid(-x), with full relative accuracy where sigmoid(x) rounds to 1.
template <class F> KEEL_FN F one_minus_sigmoid(F const& x) { return sigmoid(negate(x)); }

namespace detail {
/// softplus, without the rule for NaN.
template <class F> KEEL_FN F softplus_of_number(F const& x) {
    F const z = exp_minus_scaled(clamped_magnitude(x, exp_minus_limit));
    F const log_part = log1p_unit(z * F(unscale), fma(z, F(unscale), F(1.0f)));
    return log_part + select(is_negative(x), F(0.0f), x);
}
} // namespace detail

/// log(1 + e^x) = max(x, 0) + log1p(e^-|x|). softplus(-Inf) = 0, softplus(+Inf) = +Inf. Error: 2.2 ulp.
template <class F> KEEL_FN F softplus(F const& x) { return detail::unless_nan(x, detail::softplus_of_number(x)); }

/// log(sigmoid(x)) = -softplus(-x). log_sigmoid(-Inf) = -Inf, log_sigmoid(+Inf) = -0. Error: 2.2 ulp.
template <class F> KEEL_FN F log_sigmoid(F const& x) {
    return detail::unless_nan(x, negate(detail::softplus_of_number(negate(x))));
}

/// Hyperbolic tangent: with w = 1 - e^-2|x|, w / (2 - w) and x's sign. tanh(+-0) = +-0, tanh(+-Inf) = +-1; subnormal x
/// come back as they are. Error: 2.6 ulp.
template <class F> KEEL_FN F tanh(F const& x) {
    using namespace detail;
    F const a = clamped_magnitude(x, 16.0f);
    F const w = one_minus_exp_minus(a + a);
    return unless_nan(x, with_sign_of(x, w / (F(2.0f) - w)));
}

/// x sigmoid(x), the activation of SwiGLU. The factor x enters before a small sigmoid is rounded, so tiny results keep
/// their accuracy. silu(-Inf) = -0 (the limit), silu(+Inf) = +Inf, silu(+-0) = +-0.
/// Error: 3.4 ulp.
template <class F> KEEL_FN F silu(F const& x) {
    using namespace detail;
    F const a = clamped_magnitude(x, exp_minus_limit);
    F const z = exp_minus_scaled(a);
    auto const negative = is_negative(x);
    F const numerator = select(negative, negate(a * z), x);
    F const scale = select(negative, F(unscale), F(1.0f));
    return unless_nan(x, product(numerator / fma(z, F(unscale), F(1.0f)), scale));
}

/// d silu / dx = sigmoid(x) (1 + x sigmoid(-x)). -0 at -Inf, 1 at +Inf. Error: 3.1 ulp
/// for x >= -1/2 and 6 ulp for x <= -2; between them the derivative crosses zero (at -1.2785) and 2^-22 is the bound.
/// Called beside silu(x), the compiler shares the exponential.
template <class F> KEEL_FN F silu_derivative(F const& x) {
    using namespace detail;
    F const a = clamped_magnitude(x, exp_minus_limit);
    F const z = exp_minus_scaled(a);
    auto const negative = is_negative(x);
    F const inverse = F(1.0f) / fma(z, F(unscale), F(1.0f));
    F const gate = select(negative, z, F(1.0f / unscale)) * inverse;          // sigmoid(x) * 2^64
    F const complement = select(negative, F(1.0f), z * F(unscale)) * inverse; // sigmoid(-x)
    return unless_nan(x, product(gate * fma(with_sign_of(x, a), complement, F(1.0f)), F(unscale)));
}

} // namespace keel::inline KEEL_ABI
