// The pieces that core/math.hpp is built from: powers of two, the exponential's and the logarithm's polynomials.
//
// Every polynomial was fitted for the least relative error (Remez exchange) and its coefficients then rounded to float
// from the lowest power up, each time fitting the rest again. The bound beside it is its error with the rounded
// coefficients and exact arithmetic; what rounding adds is measured by tests/core/math_test.cpp.
#pragma once

#include <keel/core/lanes.hpp>

namespace keel::inline KEEL_ABI::detail {

inline constexpr float log2_e = 0x1.715476p+0f;
/// ln 2 = ln2_high + ln2_low. n * ln2_high taken from x leaves no error for n = round(x / ln 2): both are multiples of
/// 2^-25 and the rest is below 1/2.
inline constexpr float ln2_high = 0x1.62e430p-1f;
inline constexpr float ln2_low = -0x1.05c610p-29f;
/// Adding it rounds |x| <= 2^22 to an integer, which then stands in the low bits of the sum's word.
inline constexpr float round_shift = 0x1.8p+23f;

/// c0 + c1 x + c2 x^2 + ..., one fma a step.
template <class F> KEEL_FN F polynomial(F const&, float c) { return F(c); }
template <class F, class... C> KEEL_FN F polynomial(F const& x, float c0, C... c) {
    return fma(x, polynomial(x, c...), F(c0));
}

/// a where the lane of `probe` is a number, keel's NaN where not.
template <class F> KEEL_FN F unless_nan(F const& probe, F const& a) {
    return select(is_nan(probe), F(as_float(nan_bits)), a);
}
/// True where the sign bit is set, -0 included.
template <class F> KEEL_FN mask_of<F> is_negative(F const& x) { return gt(bits(x), bits_of<F>(magnitude_mask)); }
/// a with x's sign; a's own must be clear.
template <class F> KEEL_FN F with_sign_of(F const& x, F const& a) {
    using U = bits_of<F>;
    return as_float(bits(a) | (bits(x) & U(sign_bit)));
}
/// |x|, at most `limit`, also for NaN.
template <class F> KEEL_FN F clamped_magnitude(F const& x, float limit) {
    return as_float(umin(magnitude(x), bits_of<F>(bits(limit))));
}
/// The rounded product where it may meet an addition, here or in the caller: compilers fuse bare products with sums,
/// and then the bits depend on what the compiler saw. Adding -0 changes no value.
template <class F> KEEL_FN F product(F const& a, F const& b) {
#if defined(__FMA__) || defined(__aarch64__)
    return fma(a, b, F(-0.0f));
#else
    return mul(a, b);
#endif
}
/// The exact error of s = fl(a + b) (Knuth). Neither a nor b may be a bare product: see product().
template <class F> KEEL_FN F sum_error(F const& a, F const& b, F const& s) {
    F const t = s - a;
    return (a - (s - t)) + (b - t);
}

/// e^-a * 2^64 for 0 <= a <= 128: scaled so that it stays a normal number, and the caller rounds once.
/// Relative error of the polynomial 2^-28.1 on |r| <= 0.348.
template <class F> KEEL_FN F exp_minus_scaled(F const& a) {
    constexpr float shift = round_shift + 64.0f;
    F const t = fma(a, F(-log2_e), F(shift)); // its low bits: n + 64, for e^-a = e^-r 2^n
    F const n = t - F(shift);
    F const r = fma(n, F(ln2_low), fma(n, F(ln2_high), a));
    F const p =
        polynomial(r, 1.0f, -1.0f, 0x1.fffffcp-2f, -0x1.555488p-3f, 0x1.555842p-5f, -0x1.1240f0p-7f, 0x1.6ae9e2p-10f);
    return as_float(bits(p) + shl<23>(bits(t)));
}
inline constexpr float unscale = 0x1p-64f; ///< undoes exp_minus_scaled's factor
inline constexpr float exp_minus_limit = 128.0f;

/// 1 - e^-b for 0 <= b <= 32, with small relative error for small b too. The polynomial's: 2^-31.
template <class F> KEEL_FN F one_minus_exp_minus(F const& b) {
    constexpr float shift = round_shift + 127.0f;
    F const t = fma(b, F(-log2_e), F(shift));
    F const n = t - F(shift);
    F const r = fma(n, F(ln2_low), fma(n, F(ln2_high), b));
    F const q =
        polynomial(r, -0.5f, 0x1.555554p-3f, -0x1.5554f6p-5f, 0x1.1112e2p-7f, -0x1.6d3d18p-10f, 0x1.9e5ed6p-13f);
    F const p = fma(r * r, q, r); // 1 - e^-r
    F const power = as_float(shl<23>(bits(t)));
    return fma(power, p, F(1.0f) - power);
}

/// ln 2 = ln2_short + ln2_rest, where n * ln2_short is exact for |n| < 512.
inline constexpr float ln2_short = 0x1.62e4p-1f;
inline constexpr float ln2_rest = 0x1.7f7d1cp-20f;

/// e ln 2 + log(1 + f) + correction for a whole e, f in [-1/3, 1/3] and a correction below an ulp of f. e ln 2 + f is
/// kept as a pair to the end. Relative error of the polynomial 2^-27.7; two chains halve its latency.
template <class F> KEEL_FN F log_near_one(F const& e, F const& f, F const& correction) {
    F const f2 = f * f;
    F const even = polynomial(f2, -0.5f, -0x1.fffefap-3f, -0x1.559c30p-3f, -0x1.f33c12p-4f, -0x1.07ab4ap-3f);
    F const odd = polynomial(f2, 0x1.555506p-2f, 0x1.99d05ap-3f, 0x1.1ed47ep-3f, 0x1.1e71b6p-3f);
    F const high = fma(e, F(ln2_short), f);
    F const high_rest = f - fma(e, F(-ln2_short), high); // exact: e is 0, or e ln 2 the larger of the two
    F const low = fma(e, F(ln2_rest), high_rest + correction);
    return high + fma(f2, fma(f, odd, even), low);
}

/// log(1 + z) for z in [0, 1], given u = fl(1 + z).
template <class F> KEEL_FN F log1p_unit(F const& z, F const& u) {
    using U = bits_of<F>;
    auto const upper = gt(bits(u), U(bits(0x1.555556p+0f))); // then log 2 + log((1 + z) / 2)
    F const f = select(upper, fma(z, F(0.5f), F(-0.5f)), z);
    return log_near_one(select(upper, F(1.0f), F(0.0f)), f, F(0.0f));
}

// A positive float is 2^e m with m in [2/3, 4/3]. With w = bits + binade_shift, e + 256 stands above bit 23 of w, and
// the rest are the bits of m above those of 2/3.
inline constexpr uint32_t two_thirds = 0x3f2aaaabu;
inline constexpr uint32_t binade_shift = 0x80000000u - two_thirds;
inline constexpr float binade_bias = 256.0f;

/// e as a float, plus 256 + 2^23.
template <class U> KEEL_FN auto binade(U const& w) { return as_float(shr<23>(w) | U(0x4b000000u)); }
inline constexpr float binade_origin = 0x1p+23f + binade_bias;

/// y, but the logarithm's limits where u is no positive finite number: -Inf at +-0, +Inf at +Inf, else NaN.
template <class F> KEEL_FN F with_log_limits(F const& u, F const& y) {
    using U = bits_of<F>;
    U const word = bits(u);
    U const infinite = select(eq(word, U(infinity_bits)), U(infinity_bits), U(nan_bits));
    U const limit = select(eq(magnitude(u), U(0u)), U(infinity_bits | sign_bit), infinite);
    return as_float(select(gt(word - U(1u), U(infinity_bits - 2u)), limit, bits(y)));
}

} // namespace keel::inline KEEL_ABI::detail
