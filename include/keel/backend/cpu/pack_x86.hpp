// machine<Arch> on x86-64: SSE (with what the translation unit has beyond SSE2) and AVX2. AVX-512: pack_avx512.hpp.
#pragma once

#include <immintrin.h>

#include <keel/backend/cpu/pack_scalar.hpp>

namespace keel::inline KEEL_ABI::detail {

// --- 128-bit pieces that the wider machines use too --------------------------------------------------------------------

KEEL_FN float tree_sum_128(__m128 a) {
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
KEEL_FN uint32_t first_word(__m128i a) { return static_cast<uint32_t>(_mm_cvtsi128_si32(a)); }
KEEL_FN uint32_t sum_words_128(__m128i a) {
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return first_word(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
/// Four lanes of 8 or 16 bits.
template <class T> KEEL_FN __m128i load_four(T const* p) {
    if constexpr (sizeof(T) == 2) return _mm_loadl_epi64(reinterpret_cast<__m128i const*>(p));
    int word;
    __builtin_memcpy(&word, p, sizeof word);
    return _mm_cvtsi32_si128(word);
}
/// The low `bytes` of a register.
template <int bytes> KEEL_FN void store_low(void* p, __m128i x) {
    if constexpr (bytes == 16) {
        _mm_storeu_si128(static_cast<__m128i*>(p), x);
    } else if constexpr (bytes == 8) {
        _mm_storel_epi64(static_cast<__m128i*>(p), x);
    } else {
        int const word = _mm_cvtsi128_si32(x);
        __builtin_memcpy(p, &word, sizeof word);
    }
}

#if !defined(__FMA__)
/// exact_fma (core/detail/exact_fma.hpp) on two lanes of double.
KEEL_FN __m128d fma_rounded_to_odd(__m128d a, __m128d b, __m128d c) {
    __m128d const p = _mm_mul_pd(a, b);
    __m128d const s = _mm_add_pd(p, c);
    __m128d const t = _mm_sub_pd(s, p);
    __m128d const e = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, t)), _mm_sub_pd(c, t));
    __m128d const inexact = _mm_and_pd(_mm_cmpneq_pd(e, _mm_setzero_pd()), _mm_cmpord_pd(e, e));
    __m128i const one = _mm_set1_epi64x(1);
    __m128i const odd = _mm_and_si128(_mm_castpd_si128(s), one);
    __m128i const even = _mm_sub_epi64(odd, one); // all ones where s is even
    __m128i const away = _mm_srli_epi64(_mm_castpd_si128(_mm_xor_pd(e, s)), 63);
    __m128i const step = _mm_sub_epi64(one, _mm_add_epi64(away, away)); // +1, or -1 where the signs differ
    __m128i const correction = _mm_and_si128(step, _mm_and_si128(even, _mm_castpd_si128(inexact)));
    return _mm_castsi128_pd(_mm_add_epi64(_mm_castpd_si128(s), correction));
}
#endif

template <class A> struct machine_sse : xsimd_machine<typename A::xsimd_arch>, buffered_partials<machine_sse<A>, 4> {
    using base = xsimd_machine<typename A::xsimd_arch>;
    using typename base::f;
    using typename base::m;
    using typename base::u;

    KEEL_FN static m set_mask(bool x) { return m(_mm_set1_epi32(x ? -1 : 0)); }
    KEEL_FN static f div(f const& a, f const& b) { return f(_mm_div_ps(a, b)); }
    KEEL_FN static f sqrt(f const& a) { return f(_mm_sqrt_ps(a)); }
    KEEL_FN static f fma(f const& a, f const& b, f const& c) {
#if defined(__FMA__)
        return f(_mm_fmadd_ps(a, b, c));
#else
        auto low = [](__m128 x) { return _mm_cvtps_pd(x); };
        auto high = [](__m128 x) { return _mm_cvtps_pd(_mm_movehl_ps(x, x)); };
        __m128 const first = _mm_cvtpd_ps(fma_rounded_to_odd(low(a), low(b), low(c)));
        __m128 const second = _mm_cvtpd_ps(fma_rounded_to_odd(high(a), high(b), high(c)));
        return f(_mm_movelh_ps(first, second));
#endif
    }
    KEEL_FN static u bits(f const& a) { return u(_mm_castps_si128(a)); }
    KEEL_FN static f as_float(u const& a) { return f(_mm_castsi128_ps(a)); }
    template <int K> KEEL_FN static u shl(u const& a) { return u(_mm_slli_epi32(a, K)); }
    template <int K> KEEL_FN static u shr(u const& a) { return u(_mm_srli_epi32(a, K)); }
    KEEL_FN static u shr_by(u const& a, u const& k) {
#if defined(__AVX2__)
        return u(_mm_srlv_epi32(a, k));
#else
        // The five low bits of k, one after the other; then zero where k has a higher one.
        u r = shift_where<16>(a, k);
        r = shift_where<8>(r, k);
        r = shift_where<4>(r, k);
        r = shift_where<2>(r, k);
        r = shift_where<1>(r, k);
        return select(gt(k, u(31u)), u(0u), r);
#endif
    }
    KEEL_FN static m gt(u const& a, u const& b) { return m(_mm_cmpgt_epi32(flip(a), flip(b))); }
    KEEL_FN static m eq(u const& a, u const& b) { return m(_mm_cmpeq_epi32(a, b)); }
    KEEL_FN static bool any(m const& a) { return _mm_movemask_epi8(a) != 0; }
#if defined(__SSE4_1__)
    KEEL_FN static u umin(u const& a, u const& b) { return u(_mm_min_epu32(a, b)); }
    KEEL_FN static u umax(u const& a, u const& b) { return u(_mm_max_epu32(a, b)); }
    KEEL_FN static u smax(u const& a, u const& b) { return u(_mm_max_epi32(a, b)); }
    KEEL_FN static u select(m const& c, u const& a, u const& b) { return u(_mm_blendv_epi8(b, a, c)); }
#else
    KEEL_FN static u umin(u const& a, u const& b) { return select(gt(a, b), b, a); }
    KEEL_FN static u umax(u const& a, u const& b) { return select(gt(a, b), a, b); }
    KEEL_FN static u smax(u const& a, u const& b) { return select(m(_mm_cmpgt_epi32(a, b)), a, b); }
    KEEL_FN static u select(m const& c, u const& a, u const& b) {
        return u(_mm_or_si128(_mm_and_si128(c, a), _mm_andnot_si128(c, b)));
    }
#endif
    KEEL_FN static f select(m const& c, f const& a, f const& b) { return as_float(select(c, bits(a), bits(b))); }

    KEEL_FN static u load_bytes(void const* p) { return u(_mm_loadu_si128(static_cast<__m128i const*>(p))); }
    KEEL_FN static u load_words(uint32_t const* p) { return load_bytes(p); }
    KEEL_FN static u load_words(uint16_t const* p) { return u(_mm_unpacklo_epi16(load_four(p), _mm_setzero_si128())); }
    KEEL_FN static u load_words(uint8_t const* p) {
        __m128i const zero = _mm_setzero_si128();
        return u(_mm_unpacklo_epi16(_mm_unpacklo_epi8(load_four(p), zero), zero));
    }
    KEEL_FN static void store_words(uint32_t* p, u const& x) { store_low<16>(p, x); }
    KEEL_FN static void store_words(uint16_t* p, u const& x) {
        __m128i const low = _mm_shufflelo_epi16(x, 0x08);
        store_low<8>(p, _mm_shuffle_epi32(_mm_shufflehi_epi16(low, 0x08), 0x08));
    }
    KEEL_FN static void store_words(uint8_t* p, u const& x) {
        __m128i const low = _mm_and_si128(x, _mm_set1_epi32(0xff));
        __m128i const words = _mm_packs_epi32(low, low);
        store_low<4>(p, _mm_packus_epi16(words, words));
    }

    KEEL_FN static float tree_sum(f const& a) { return tree_sum_128(a); }
    KEEL_FN static uint32_t max_word(u const& a) {
        u const b = umax(a, u(_mm_shuffle_epi32(a, 0x4e)));
        return first_word(umax(b, u(_mm_shuffle_epi32(b, 0xb1))));
    }
    KEEL_FN static uint32_t sum_words(u const& a) { return sum_words_128(a); }
    template <class U> KEEL_FN static void transpose(U (&r)[4]) {
        __m128i const t0 = _mm_unpacklo_epi32(r[0].v, r[1].v);
        __m128i const t1 = _mm_unpackhi_epi32(r[0].v, r[1].v);
        __m128i const t2 = _mm_unpacklo_epi32(r[2].v, r[3].v);
        __m128i const t3 = _mm_unpackhi_epi32(r[2].v, r[3].v);
        r[0].v = u(_mm_unpacklo_epi64(t0, t2));
        r[1].v = u(_mm_unpackhi_epi64(t0, t2));
        r[2].v = u(_mm_unpacklo_epi64(t1, t3));
        r[3].v = u(_mm_unpackhi_epi64(t1, t3));
    }

private:
    KEEL_FN static __m128i flip(__m128i a) { return _mm_xor_si128(a, _mm_set1_epi32(static_cast<int>(sign_bit))); }
    template <int K> KEEL_FN static u shift_where(u const& a, u const& k) {
        u const bit(static_cast<uint32_t>(K));
        return select(eq(k & bit, bit), shr<K>(a), a);
    }
};

template <> struct machine<arch::sse2> : machine_sse<arch::sse2> {};
#if defined(__SSE4_1__)
template <> struct machine<arch::sse4> : machine_sse<arch::sse4> {};
#endif

#if defined(__AVX2__) && defined(__FMA__)

KEEL_FN float tree_sum_256(__m256 a) {
    return tree_sum_128(_mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
KEEL_FN uint32_t max_word_256(__m256i a) {
    __m128i b = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epu32(b, _mm_shuffle_epi32(b, 0x4e));
    return first_word(_mm_max_epu32(b, _mm_shuffle_epi32(b, 0xb1)));
}
KEEL_FN uint32_t sum_words_256(__m256i a) {
    return sum_words_128(_mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}

template <> struct machine<arch::avx2> : xsimd_machine<xsimd::avx2>, buffered_partials<machine<arch::avx2>, 8> {
    KEEL_FN static m set_mask(bool x) { return m(_mm256_set1_epi32(x ? -1 : 0)); }
    KEEL_FN static f div(f const& a, f const& b) { return f(_mm256_div_ps(a, b)); }
    KEEL_FN static f sqrt(f const& a) { return f(_mm256_sqrt_ps(a)); }
    KEEL_FN static f fma(f const& a, f const& b, f const& c) { return f(_mm256_fmadd_ps(a, b, c)); }
    KEEL_FN static u bits(f const& a) { return u(_mm256_castps_si256(a)); }
    KEEL_FN static f as_float(u const& a) { return f(_mm256_castsi256_ps(a)); }
    template <int K> KEEL_FN static u shl(u const& a) { return u(_mm256_slli_epi32(a, K)); }
    template <int K> KEEL_FN static u shr(u const& a) { return u(_mm256_srli_epi32(a, K)); }
    KEEL_FN static u shr_by(u const& a, u const& k) { return u(_mm256_srlv_epi32(a, k)); }
    KEEL_FN static u umin(u const& a, u const& b) { return u(_mm256_min_epu32(a, b)); }
    KEEL_FN static u umax(u const& a, u const& b) { return u(_mm256_max_epu32(a, b)); }
    KEEL_FN static u smax(u const& a, u const& b) { return u(_mm256_max_epi32(a, b)); }
    KEEL_FN static m gt(u const& a, u const& b) {
        __m256i const flip = _mm256_set1_epi32(static_cast<int>(sign_bit));
        return m(_mm256_cmpgt_epi32(_mm256_xor_si256(a, flip), _mm256_xor_si256(b, flip)));
    }
    KEEL_FN static m eq(u const& a, u const& b) { return m(_mm256_cmpeq_epi32(a, b)); }
    KEEL_FN static bool any(m const& a) { return _mm256_movemask_epi8(a) != 0; }
    KEEL_FN static u select(m const& c, u const& a, u const& b) { return u(_mm256_blendv_epi8(b, a, c)); }
    KEEL_FN static f select(m const& c, f const& a, f const& b) { return as_float(select(c, bits(a), bits(b))); }

    KEEL_FN static u load_bytes(void const* p) { return u(_mm256_loadu_si256(static_cast<__m256i const*>(p))); }
    KEEL_FN static u load_words(uint32_t const* p) { return load_bytes(p); }
    KEEL_FN static u load_words(uint16_t const* p) {
        return u(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<__m128i const*>(p))));
    }
    KEEL_FN static u load_words(uint8_t const* p) {
        return u(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<__m128i const*>(p))));
    }
    KEEL_FN static void store_words(uint32_t* p, u const& x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    KEEL_FN static void store_words(uint16_t* p, u const& x) { store_low<16>(p, narrow(x, 0xffff)); }
    /// Past the caches; p is on a boundary of as many bytes as the lanes take there.
    KEEL_FN static void stream_words(uint32_t* p, u const& x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
    KEEL_FN static void stream_words(uint16_t* p, u const& x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow(x, 0xffff)); }
    KEEL_FN static void store_words(uint8_t* p, u const& x) {
        __m128i const words = narrow(x, 0xff);
        store_low<8>(p, _mm_packus_epi16(words, words));
    }

    KEEL_FN static float tree_sum(f const& a) { return tree_sum_256(a); }
    KEEL_FN static uint32_t max_word(u const& a) { return max_word_256(a); }
    KEEL_FN static uint32_t sum_words(u const& a) { return sum_words_256(a); }
    template <class U> KEEL_FN static void transpose(U (&r)[8]) {
        __m256i t[8];
        repeat<4>([&](auto i) {
            t[2 * i] = _mm256_unpacklo_epi32(r[2 * i].v, r[2 * i + 1].v);
            t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i].v, r[2 * i + 1].v);
        });
        __m256i q[8]; // q[4h + j]: column j of both halves, rows 4h .. 4h+3
        repeat<2>([&](auto h) {
            q[4 * h] = _mm256_unpacklo_epi64(t[4 * h], t[4 * h + 2]);
            q[4 * h + 1] = _mm256_unpackhi_epi64(t[4 * h], t[4 * h + 2]);
            q[4 * h + 2] = _mm256_unpacklo_epi64(t[4 * h + 1], t[4 * h + 3]);
            q[4 * h + 3] = _mm256_unpackhi_epi64(t[4 * h + 1], t[4 * h + 3]);
        });
        repeat<4>([&](auto j) {
            r[j].v = u(_mm256_permute2x128_si256(q[j], q[j + 4], 0x20));
            r[j + 4].v = u(_mm256_permute2x128_si256(q[j], q[j + 4], 0x31));
        });
    }

private:
    /// The lanes, masked to 16 bits or less, side by side.
    KEEL_FN static __m128i narrow(__m256i x, int mask) {
        __m256i const low = _mm256_and_si256(x, _mm256_set1_epi32(mask));
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08));
    }
};
#endif

} // namespace keel::inline KEEL_ABI::detail
