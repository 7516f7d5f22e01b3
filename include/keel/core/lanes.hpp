// The vocabulary of kernels: what may be done with numbers, on one float or on many lanes at once.
//
// A kernel's arithmetic is written once, generic over the lane type F that its group loads:
//
//     float             one number (the reference backend, one CUDA slot)
//     pack<Arch>        one SIMD register                     (backend/cpu/pack.hpp)
//     lockstep<W>       W lanes of a warp, on the host        (backend/simt.hpp)
//     slots<F, K>       K of any of these side by side        (below)
//
// and over its companion U = bits_of<F> of 32-bit words and M = mask_of<F> of truth values. This header states the
// operations for float; the other types offer the same names, found by argument-dependent lookup.
//
// The operations are exactly those that IEEE 754 rounds correctly (+ - * / sqrt fma) and integer ones, so every lane type
// yields the same bits. Scalars convert: `v * 2.0f`, `u & 0xffu`, `F(1.0f)`, `U(7u)`; masks combine with both() and either().
// Two rules keep it so: a product never meets + or - outside fma (compilers contract them), except as mul(a, b); and no
// minimum, maximum or comparison looks at floats (a NaN would depend on the operand's side): those act on bits.
#pragma once

#include <concepts>
#include <type_traits>

#include <keel/config.hpp>

namespace keel::inline KEEL_ABI {

/// What belongs to a lane type: its words, its masks, and how many row elements it holds.
template <class F> struct lane_traits;
template <> struct lane_traits<float> {
    using bits = uint32_t;
    using mask = bool;
    static constexpr int width = 1;
};
template <class F> using bits_of = typename lane_traits<F>::bits;
template <class F> using mask_of = typename lane_traits<F>::mask;

// --- arithmetic, each correctly rounded ------------------------------------------------------------------------------

/// a*b + c with one rounding. On machines without the instruction, libm's exact emulation.
KEEL_FN float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}
/// The compiler may make one fma of a product and a sum.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr bool compiler_fuses = true;
#else
inline constexpr bool compiler_fuses = false;
#endif
/// a*b, never fused with a neighbour: for a product that may meet an addition. (No compiler takes an fma apart.)
KEEL_FN float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    if constexpr (compiler_fuses) return fma(a, b, -0.0f);
    else return a * b;
#endif
}
KEEL_FN float add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}
KEEL_FN float div(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}
KEEL_FN float sqrt(float a) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(a);
#else
    return __builtin_sqrtf(a);
#endif
}

// --- bits ------------------------------------------------------------------------------------------------------------

KEEL_FN constexpr uint32_t bits(float x) { return __builtin_bit_cast(uint32_t, x); }
KEEL_FN constexpr float as_float(uint32_t u) { return __builtin_bit_cast(float, u); }
template <int K> KEEL_FN constexpr uint32_t shl(uint32_t u) { return u << K; }
template <int K> KEEL_FN constexpr uint32_t shr(uint32_t u) { return u >> K; }
/// u >> k lane by lane; k of 32 and more gives 0.
KEEL_FN constexpr uint32_t shr_by(uint32_t u, uint32_t k) { return k < 32 ? u >> k : 0u; }
KEEL_FN constexpr uint32_t umin(uint32_t a, uint32_t b) { return a < b ? a : b; }
KEEL_FN constexpr uint32_t umax(uint32_t a, uint32_t b) { return a < b ? b : a; }
/// The larger as signed integers.
KEEL_FN constexpr uint32_t smax(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? b : a; }

// --- masks -----------------------------------------------------------------------------------------------------------

KEEL_FN constexpr bool gt(uint32_t a, uint32_t b) { return a > b; } ///< unsigned a > b
KEEL_FN constexpr bool eq(uint32_t a, uint32_t b) { return a == b; }
KEEL_FN constexpr uint32_t select(bool m, uint32_t a, uint32_t b) { return m ? a : b; }
KEEL_FN constexpr float select(bool m, float a, float b) { return m ? a : b; }

/// Masks combined; for bool without the warning that & and | of two calls draw.
template <class M> KEEL_FN M both(M const& a, M const& b) {
    if constexpr (std::is_same_v<M, bool>) return a && b;
    else return a & b;
}
template <class M> KEEL_FN M either(M const& a, M const& b) {
    if constexpr (std::is_same_v<M, bool>) return a || b;
    else return a | b;
}

// --- derived, for every lane type --------------------------------------------------------------------------------------

inline constexpr uint32_t sign_bit = 0x80000000u;
inline constexpr uint32_t magnitude_mask = 0x7fffffffu;
inline constexpr uint32_t infinity_bits = 0x7f800000u;
/// The one NaN that keel stores.
inline constexpr uint32_t nan_bits = 0x7fffffffu;

/// |x| as a word: orders like |x|, with NaN above Inf. The only maximum keel takes of floats is of these words.
template <class F> KEEL_FN bits_of<F> magnitude(F const& x) {
    using U = bits_of<F>;
    return bits(x) & U(magnitude_mask);
}
template <class F> KEEL_FN mask_of<F> is_nan(F const& x) {
    using U = bits_of<F>;
    return gt(magnitude(x), U(infinity_bits));
}
/// True for NaN and Inf.
template <class F> KEEL_FN mask_of<F> is_non_finite(F const& x) {
    using U = bits_of<F>;
    return gt(magnitude(x), U(infinity_bits - 1));
}
/// -x, exact for every value.
template <class F> KEEL_FN F negate(F const& x) {
    using U = bits_of<F>;
    return as_float(bits(x) ^ U(sign_bit));
}
/// x with every NaN replaced by the one that keel stores.
template <class F> KEEL_FN F canonical(F const& x) {
    using U = bits_of<F>;
    return as_float(select(is_nan(x), U(nan_bits), bits(x)));
}

/// A word that orders like the float: -Inf < ... < -0 < +0 < ... < Inf < NaN. A maximum of floats is taken of these.
template <class F> KEEL_FN bits_of<F> ordered_word(F const& x) {
    using U = bits_of<F>;
    U const u = bits(canonical(x));
    return u ^ select(gt(u, U(magnitude_mask)), U(0xffffffffu), U(sign_bit));
}
/// The float of an ordered word.
KEEL_FN float from_ordered_word(uint32_t u) { return as_float(u ^ (u < sign_bit ? 0xffffffffu : sign_bit)); }
/// Below every ordered word of a number: the start of a maximum.
inline constexpr uint32_t lowest_ordered_word = 0;

// --- slots: K lane types side by side --------------------------------------------------------------------------------

template <class V> struct scalar_of_ {
    using type = float;
};
/// The scalar that converts to lane type V: float, uint32_t or bool.
template <class V> using scalar_of = typename scalar_of_<V>::type;
template <> struct scalar_of_<uint32_t> {
    using type = uint32_t;
};
template <> struct scalar_of_<bool> {
    using type = bool;
};

template <class V, int K> struct slots;
template <class V, int K> struct scalar_of_<slots<V, K>> : scalar_of_<V> {};
template <class V, int K> struct lane_traits<slots<V, K>> {
    using bits = slots<bits_of<V>, K>;
    using mask = slots<mask_of<V>, K>;
    static constexpr int width = K * lane_traits<V>::width;
};

/// K values of one lane type, handled elementwise: what a CUDA thread holds of a row, or a CPU thread of a block.
template <class V, int K> struct slots {
    V s[static_cast<std::size_t>(K)];

    slots() = default;
    KEEL_FN slots(scalar_of<V> x) {
        for (int k = 0; k < K; ++k) s[k] = V(x);
    }

#define KEEL_SLOTS_EACH(expression)                                                                                    \
    for (int k = 0; k < K; ++k) r.s[k] = expression;                                                                   \
    return r;
#define KEEL_SLOTS_OPERATOR(op)                                                                                        \
    KEEL_FN friend slots operator op(slots const& a, slots const& b) {                                                 \
        slots r;                                                                                                       \
        KEEL_SLOTS_EACH(a.s[k] op b.s[k])                                                                              \
    }
#define KEEL_SLOTS_2(name)                                                                                             \
    KEEL_FN friend slots name(slots const& a, slots const& b) {                                                        \
        slots r;                                                                                                       \
        KEEL_SLOTS_EACH(name(a.s[k], b.s[k]))                                                                          \
    }
    KEEL_SLOTS_OPERATOR(+)
    KEEL_SLOTS_OPERATOR(-)
    KEEL_SLOTS_OPERATOR(*)
    KEEL_SLOTS_OPERATOR(/)
    KEEL_SLOTS_OPERATOR(&)
    KEEL_SLOTS_OPERATOR(|)
    KEEL_SLOTS_OPERATOR(^)
    KEEL_SLOTS_2(mul)
    KEEL_SLOTS_2(add)
    KEEL_SLOTS_2(div)
    KEEL_SLOTS_2(umin)
    KEEL_SLOTS_2(umax)
    KEEL_SLOTS_2(smax)
    KEEL_SLOTS_2(shr_by)
#undef KEEL_SLOTS_OPERATOR
#undef KEEL_SLOTS_2
    KEEL_FN friend slots fma(slots const& a, slots const& b, slots const& c) {
        slots r;
        KEEL_SLOTS_EACH(fma(a.s[k], b.s[k], c.s[k]))
    }
    KEEL_FN friend slots sqrt(slots const& a) {
        slots r;
        KEEL_SLOTS_EACH(sqrt(a.s[k]))
    }
    template <class M> KEEL_FN friend slots select(slots<M, K> const& m, slots const& a, slots const& b) {
        slots r;
        KEEL_SLOTS_EACH(select(m.s[k], a.s[k], b.s[k]))
    }
};

template <class V, int K> KEEL_FN slots<bits_of<V>, K> bits(slots<V, K> const& a) {
    slots<bits_of<V>, K> r;
    KEEL_SLOTS_EACH(bits(a.s[k]))
}
template <class U, int K> KEEL_FN auto as_float(slots<U, K> const& a) {
    slots<decltype(as_float(a.s[0])), K> r;
    KEEL_SLOTS_EACH(as_float(a.s[k]))
}
template <class U, int K> KEEL_FN auto gt(slots<U, K> const& a, slots<U, K> const& b) {
    slots<decltype(gt(a.s[0], b.s[0])), K> r;
    KEEL_SLOTS_EACH(gt(a.s[k], b.s[k]))
}
template <class U, int K> KEEL_FN auto eq(slots<U, K> const& a, slots<U, K> const& b) {
    slots<decltype(eq(a.s[0], b.s[0])), K> r;
    KEEL_SLOTS_EACH(eq(a.s[k], b.s[k]))
}
template <int N, class U, int K> KEEL_FN slots<U, K> shl(slots<U, K> const& a) {
    slots<U, K> r;
    KEEL_SLOTS_EACH(shl<N>(a.s[k]))
}
template <int N, class U, int K> KEEL_FN slots<U, K> shr(slots<U, K> const& a) {
    slots<U, K> r;
    KEEL_SLOTS_EACH(shr<N>(a.s[k]))
}
#undef KEEL_SLOTS_EACH

} // namespace keel::inline KEEL_ABI
