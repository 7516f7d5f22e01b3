// Sine and cosine from fma and integers, generic over the lane type: the same bits on every machine.
#pragma once

#include <keel/core/detail/exp_log.hpp>

namespace keel::inline KEEL_ABI {

namespace detail {

/// pi/2 = half_pi[0] + half_pi[1] + half_pi[2] to 2^-76, and 2 pi = 4 times that.
inline constexpr float half_pi[3] = {0x1.921fb6p+0f, -0x1.777a5cp-25f, -0x1.ee59dap-50f};
inline constexpr float two_over_pi = 0x1.45f306p-1f;

/// sin and cos of (r + low) + quadrant * pi/2, |r| <= pi/4 and low below an ulp of r; quadrant counts modulo 4.
/// Relative error of the polynomials: sine 2^-27.9, cosine 2^-33.
template <class F>
KEEL_FN void sincos_quadrant(F const& r, F const& low, bits_of<F> const& quadrant, F& sine, F& cosine) {
    using U = bits_of<F>;
    F const r2 = r * r;
    F const s = r + fma(r * r2, polynomial(r2, -0x1.555546p-3f, 0x1.110776p-7f, -0x1.9952f8p-13f), low);
    F const near_one = fma(r2, F(-0.5f), F(1.0f));
    F const lost = fma(r2, F(-0.5f), F(1.0f) - near_one); // what rounding near_one took away
    F const rest = fma(r, negate(low), lost);
    F const c = near_one + fma(r2 * r2, polynomial(r2, 0x1.55554ap-5f, -0x1.6c0c28p-10f, 0x1.99e80cp-16f), rest);
    auto const swap = eq(quadrant & U(1u), U(1u));
    sine = as_float(bits(select(swap, c, s)) ^ shl<30>(quadrant & U(2u)));
    cosine = as_float(bits(select(swap, s, c)) ^ shl<30>((quadrant + U(1u)) & U(2u)));
}

} // namespace detail

/// The largest |angle| of sincos, sincos_sum and sincos_product, in radians.
inline constexpr float sincos_limit = 0x1p+24f;

/// Sine and cosine of high + low radians, where low is what rounding took from high (|low| <= ulp(high) / 2).
///
/// Whole turns are taken off first (exactly; 2 pi in 72 bits), then quarters; the rest goes on as an unevaluated pair.
/// |high| up to sincos_limit = 2^24; NaN, Inf and larger angles give NaN in both. Error: at most 1 ulp each, or 2^-47 where
/// the angle is so near to a multiple of pi/2 that the result is smaller than 2^-23.
/// sin(-0) = -0; subnormal angles are returned by the sine as they are.
/// About 60 operations.
template <class F> KEEL_FN void sincos_sum(F const& high, F const& low, F& sine, F& cosine) {
    using U = bits_of<F>;
    using namespace detail;
    U const size = magnitude(high);
    U const sign = bits(high) & U(sign_bit);
    F const h = as_float(size);
    F const l = as_float(bits(low) ^ sign);

    F const turns = fma(h, F(0.25f * two_over_pi), F(round_shift)) - F(round_shift);
    F const a = fma(turns, F(-4.0f * half_pi[0]), h); // exact
    F const p = product(turns, F(-4.0f * half_pi[1]));
    F const p_error = fma(turns, F(-4.0f * half_pi[1]), negate(p));
    F const b = a + p;
    F const angle = b + l;
    F const errors = sum_error(a, p, b) + sum_error(b, l, angle);
    F const rest = errors + fma(turns, F(-4.0f * half_pi[2]), p_error);

    F const t = fma(angle, F(two_over_pi), F(round_shift));
    F const quarters = t - F(round_shift);
    F const r = fma(quarters, F(-half_pi[0]), angle); // exact
    F const r_rest = fma(quarters, F(-half_pi[1]), fma(quarters, F(-half_pi[2]), rest));
    F const r_high = r + r_rest;
    F const r_low = r_rest - (r_high - r);
    sincos_quadrant(r_high, r_low, bits(t), sine, cosine);

    auto const beyond = gt(size, U(bits(sincos_limit)));
    sine = select(beyond, F(as_float(nan_bits)), as_float(bits(sine) ^ sign));
    cosine = select(beyond, F(as_float(nan_bits)), cosine);
}

/// Sine and cosine of x radians: sincos_sum with low = 0.
template <class F> KEEL_FN void sincos(F const& x, F& sine, F& cosine) { sincos_sum(x, F(0.0f), sine, cosine); }

/// Sine and cosine of the exact product position * frequency, which may need 48 bits: rotary embeddings at position
/// 2^24 - 1 are as accurate as at position 1, where the rounded product would be wrong by half a radian.
/// |position * frequency| up to sincos_limit, else NaN (also for NaN and Inf factors). Error: as sincos_sum.
template <class F> KEEL_FN void sincos_product(F const& position, F const& frequency, F& sine, F& cosine) {
    F const high = detail::product(position, frequency);
    F const low = fma(position, frequency, negate(high));
    sincos_sum(high, low, sine, cosine);
}

/// Sine and cosine of x full turns, sin(2 pi x) and cos(2 pi x); exact where x is a multiple of 1/4.
/// |x| up to 2^20; NaN, Inf and larger x give NaN in both. Error: at most 1 ulp each. sin(-0) = -0.
template <class F> KEEL_FN void sincos_turns(F const& x, F& sine, F& cosine) {
    using U = bits_of<F>;
    using namespace detail;
    U const size = magnitude(x);
    F const h = as_float(size);
    F const t = fma(h, F(4.0f), F(round_shift));
    F const f = fma(t - F(round_shift), F(-0.25f), h); // exact, |f| <= 1/8
    F const r = product(f, F(4.0f * half_pi[0]));
    F const low = fma(f, F(4.0f * half_pi[1]), fma(f, F(4.0f * half_pi[0]), negate(r)));
    sincos_quadrant(r, low, bits(t), sine, cosine);
    auto const beyond = gt(size, U(bits(0x1p+20f)));
    sine = select(beyond, F(as_float(nan_bits)), as_float(bits(sine) ^ (bits(x) & U(sign_bit))));
    cosine = select(beyond, F(as_float(nan_bits)), cosine);
}

} // namespace keel::inline KEEL_ABI
