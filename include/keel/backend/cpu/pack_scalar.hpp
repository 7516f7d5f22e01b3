// machine<Arch>: the operations behind pack<Arch> on bare registers, one specialisation per instruction set.
// Here the one without registers, and what the others share: short copies and the part that xsimd covers.
#pragma once

#include <utility>

#include <xsimd/xsimd.hpp>

#include <keel/backend/cpu/arch.hpp>
#include <keel/core/lanes.hpp>

namespace keel::inline KEEL_ABI::detail {

/// f, u, m: registers of floats, of words and of truth values.
template <class A> struct machine;

/// body(0), body(1), ... body(N - 1), each with a constant, so that arrays indexed by it live in registers.
template <int N, class Body> KEEL_FN void repeat(Body const& body) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (body(std::integral_constant<int, I>{}), ...);
    }
    (std::make_integer_sequence<int, N>{});
}

/// Copies n < 2*Piece elements, in pieces of powers of two instead of a call to memcpy.
template <int Piece, class T> KEEL_FN void copy_short(T* to, T const* from, int n) {
    if constexpr (Piece > 0) {
        KEEL_ASSERT(0 <= n && n < 2 * Piece);
        if ((n & Piece) != 0) {
            __builtin_memcpy(to, from, static_cast<std::size_t>(Piece) * sizeof(T));
            to += Piece;
            from += Piece;
        }
        copy_short<Piece / 2>(to, from, n & (Piece - 1));
    }
}

/// Partial loads and stores by way of a buffer, for machines without masked memory access.
template <class M, std::size_t W> struct buffered_partials {
    static constexpr int piece = static_cast<int>(W / 2);

    KEEL_FN static auto load_partial(float const* p, int n) {
        if (n == static_cast<int>(W)) return M::load(p);
        float t[W] = {};
        copy_short<piece>(&t[0], p, n);
        return M::load(&t[0]);
    }
    KEEL_FN static void store_partial(float* p, auto const& x, int n) {
        if (n == static_cast<int>(W)) return M::store(p, x);
        float t[W];
        M::store(&t[0], x);
        copy_short<piece>(p, &t[0], n);
    }
    template <class T> KEEL_FN static auto load_words_partial(T const* p, int n) {
        if (n == static_cast<int>(W)) return M::load_words(p);
        T t[W] = {};
        copy_short<piece>(&t[0], p, n);
        return M::load_words(&t[0]);
    }
    template <class T> KEEL_FN static void store_words_partial(T* p, auto const& x, int n) {
        if (n == static_cast<int>(W)) return M::store_words(p, x);
        T t[W];
        M::store_words(&t[0], x);
        copy_short<piece>(p, &t[0], n);
    }
};

template <> struct machine<arch::scalar> : buffered_partials<machine<arch::scalar>, 1> {
    using f = float;
    using u = uint32_t;
    using m = bool;
    KEEL_FN static f set(float x) { return x; }
    KEEL_FN static u set(uint32_t x) { return x; }
    KEEL_FN static m set_mask(bool x) { return x; }
    KEEL_FN static f div(f a, f b) { return a / b; }
    KEEL_FN static f sqrt(f a) { return keel::sqrt(a); }
    KEEL_FN static f fma(f a, f b, f c) { return keel::fma(a, b, c); }
    KEEL_FN static u bits(f a) { return keel::bits(a); }
    KEEL_FN static f as_float(u a) { return keel::as_float(a); }
    template <int K> KEEL_FN static u shl(u a) { return keel::shl<K>(a); }
    template <int K> KEEL_FN static u shr(u a) { return keel::shr<K>(a); }
    KEEL_FN static u shr_by(u a, u k) { return keel::shr_by(a, k); }
    KEEL_FN static u umin(u a, u b) { return keel::umin(a, b); }
    KEEL_FN static u umax(u a, u b) { return keel::umax(a, b); }
    KEEL_FN static u smax(u a, u b) { return keel::smax(a, b); }
    KEEL_FN static m gt(u a, u b) { return a > b; }
    KEEL_FN static m eq(u a, u b) { return a == b; }
    KEEL_FN static m and_mask(m a, m b) { return a && b; }
    KEEL_FN static m or_mask(m a, m b) { return a || b; }
    KEEL_FN static bool any(m a) { return a; }
    KEEL_FN static f select(m c, f a, f b) { return c ? a : b; }
    KEEL_FN static u select(m c, u a, u b) { return c ? a : b; }
    KEEL_FN static f load(float const* p) { return *p; }
    KEEL_FN static void store(float* p, f x) { *p = x; }
    template <class T> KEEL_FN static u load_words(T const* p) { return *p; }
    KEEL_FN static u load_bytes(void const* p) {
        u word;
        __builtin_memcpy(&word, p, sizeof word);
        return word;
    }
    template <class T> KEEL_FN static void store_words(T* p, u x) { *p = static_cast<T>(x); }
    KEEL_FN static float tree_sum(f a) { return a; }
    KEEL_FN static uint32_t max_word(u a) { return a; }
    KEEL_FN static uint32_t sum_words(u a) { return a; }
    template <class U> KEEL_FN static void transpose(U&) {}
};

/// What xsimd does alike on all machines and correctly rounded: broadcasts, loads, stores, + - * (through batch) and the
/// bitwise operators. Its fma, div, sqrt, max and select are not used: in release 8.1 fma is a multiply and an add where
/// the arch tag lacks FMA (AVX-512 included), NEON's div and sqrt are approximations, max drops a NaN.
template <class X> struct xsimd_machine {
    using f = xsimd::batch<float, X>;
    using u = xsimd::batch<uint32_t, X>;
    using m = xsimd::batch_bool<uint32_t, X>;
    KEEL_FN static f set(float x) { return f(x); }
    KEEL_FN static u set(uint32_t x) { return u(x); }
    KEEL_FN static m and_mask(m const& a, m const& b) { return a & b; }
    KEEL_FN static m or_mask(m const& a, m const& b) { return a | b; }
    KEEL_FN static f load(float const* p) { return f::load_unaligned(p); }
    KEEL_FN static void store(float* p, f const& x) { x.store_unaligned(p); }
};

} // namespace keel::inline KEEL_ABI::detail
