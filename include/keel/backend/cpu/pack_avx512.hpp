// machine<Arch> on AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <keel/backend/cpu/pack_x86.hpp>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

// GCC 12 says of its own intrinsics that their deliberately undefined operands are uninitialized (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI::detail {

struct machine_avx512 : xsimd_machine<xsimd::avx512bw> {
    KEEL_FN static m set_mask(bool x) { return m(static_cast<__mmask16>(x ? 0xffff : 0)); }
    KEEL_FN static f div(f const& a, f const& b) { return f(_mm512_div_ps(a, b)); }
    KEEL_FN static f sqrt(f const& a) { return f(_mm512_sqrt_ps(a)); }
    KEEL_FN static f fma(f const& a, f const& b, f const& c) { return f(_mm512_fmadd_ps(a, b, c)); }
    /// a 2^n for whole n, rounded once.
    KEEL_FN static f times_power_of_two(f const& a, f const& n) { return f(_mm512_scalef_ps(a, n)); }
    KEEL_FN static u bits(f const& a) { return u(_mm512_castps_si512(a)); }
    KEEL_FN static f as_float(u const& a) { return f(_mm512_castsi512_ps(a)); }
    template <int K> KEEL_FN static u shl(u const& a) { return u(_mm512_slli_epi32(a, K)); }
    template <int K> KEEL_FN static u shr(u const& a) { return u(_mm512_srli_epi32(a, K)); }
    KEEL_FN static u shr_by(u const& a, u const& k) { return u(_mm512_srlv_epi32(a, k)); }
    KEEL_FN static u umin(u const& a, u const& b) { return u(_mm512_min_epu32(a, b)); }
    KEEL_FN static u umax(u const& a, u const& b) { return u(_mm512_max_epu32(a, b)); }
    KEEL_FN static u smax(u const& a, u const& b) { return u(_mm512_max_epi32(a, b)); }
    KEEL_FN static m gt(u const& a, u const& b) { return m(_mm512_cmpgt_epu32_mask(a, b)); }
    KEEL_FN static m eq(u const& a, u const& b) { return m(_mm512_cmpeq_epi32_mask(a, b)); }
    KEEL_FN static bool any(m const& a) { return static_cast<__mmask16>(a) != 0; }
    KEEL_FN static u select(m const& c, u const& a, u const& b) { return u(_mm512_mask_blend_epi32(c, b, a)); }
    KEEL_FN static f select(m const& c, f const& a, f const& b) { return f(_mm512_mask_blend_ps(c, b, a)); }

    KEEL_FN static f load_partial(float const* p, int n) { return f(_mm512_maskz_loadu_ps(first(n), p)); }
    KEEL_FN static void store_partial(float* p, f const& x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
    KEEL_FN static u load_bytes(void const* p) { return u(_mm512_loadu_si512(p)); }
    KEEL_FN static u load_bytes_partial(void const* p, int n) { // fewer than 64
        return u(_mm512_maskz_loadu_epi8(static_cast<__mmask64>((uint64_t{1} << n) - 1), p));
    }
    KEEL_FN static u load_words(uint32_t const* p) { return load_bytes(p); }
    KEEL_FN static u load_words(uint16_t const* p) {
        return u(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(p))));
    }
    KEEL_FN static u load_words(uint8_t const* p) {
        return u(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<__m128i const*>(p))));
    }
    KEEL_FN static u load_words_partial(uint32_t const* p, int n) { return u(_mm512_maskz_loadu_epi32(first(n), p)); }
    KEEL_FN static u load_words_partial(uint16_t const* p, int n) {
        return u(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)));
    }
    KEEL_FN static u load_words_partial(uint8_t const* p, int n) {
        return u(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
    }
    KEEL_FN static void store_words(uint32_t* p, u const& x) { _mm512_storeu_si512(p, x); }
    KEEL_FN static void store_words(uint16_t* p, u const& x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }
    KEEL_FN static void stream_words(uint32_t* p, u const& x) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), x); }
    KEEL_FN static void stream_words(uint16_t* p, u const& x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }
    KEEL_FN static void store_words(uint8_t* p, u const& x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
    }
    KEEL_FN static void store_words_partial(uint32_t* p, u const& x, int n) {
        _mm512_mask_storeu_epi32(p, first(n), x);
    }
    KEEL_FN static void store_words_partial(uint16_t* p, u const& x, int n) {
        _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(x));
    }
    KEEL_FN static void store_words_partial(uint8_t* p, u const& x, int n) {
        _mm_mask_storeu_epi8(p, first(n), _mm512_cvtepi32_epi8(x));
    }

    /// The lanes where c is true, packed to the front; writes a whole register.
    KEEL_FN static int store_chosen(uint32_t* p, u const& x, m const& c) {
        _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(c, x));
        return __builtin_popcount(static_cast<__mmask16>(c));
    }

    KEEL_FN static float tree_sum(f const& a) {
        return tree_sum_256(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)));
    }
    KEEL_FN static uint32_t max_word(u const& a) {
        return max_word_256(_mm256_max_epu32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)));
    }
    KEEL_FN static uint32_t sum_words(u const& a) {
        return sum_words_256(_mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)));
    }
    template <class U> KEEL_FN static void transpose(U (&r)[16]) {
        __m512i t[16]; // 4x4 blocks within 128-bit lanes ...
        repeat<8>([&](auto i) {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i].v, r[2 * i + 1].v);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i].v, r[2 * i + 1].v);
        });
        __m512i q[16]; // q[4h + j]: column j of each lane, rows 4h .. 4h+3
        repeat<4>([&](auto h) {
            q[4 * h] = _mm512_unpacklo_epi64(t[4 * h], t[4 * h + 2]);
            q[4 * h + 1] = _mm512_unpackhi_epi64(t[4 * h], t[4 * h + 2]);
            q[4 * h + 2] = _mm512_unpacklo_epi64(t[4 * h + 1], t[4 * h + 3]);
            q[4 * h + 3] = _mm512_unpackhi_epi64(t[4 * h + 1], t[4 * h + 3]);
        });
        repeat<4>([&](auto j) { // ... then a 4x4 transpose of whole lanes
            __m512i const a = _mm512_shuffle_i32x4(q[j], q[j + 4], 0x88);
            __m512i const b = _mm512_shuffle_i32x4(q[j + 8], q[j + 12], 0x88);
            __m512i const c = _mm512_shuffle_i32x4(q[j], q[j + 4], 0xdd);
            __m512i const d = _mm512_shuffle_i32x4(q[j + 8], q[j + 12], 0xdd);
            r[j].v = u(_mm512_shuffle_i32x4(a, b, 0x88));
            r[j + 8].v = u(_mm512_shuffle_i32x4(a, b, 0xdd));
            r[j + 4].v = u(_mm512_shuffle_i32x4(c, d, 0x88));
            r[j + 12].v = u(_mm512_shuffle_i32x4(c, d, 0xdd));
        });
    }

private:
    KEEL_FN static __mmask16 first(int n) {
        KEEL_ASSERT(0 <= n && n <= 16);
        return static_cast<__mmask16>((1u << n) - 1u);
    }
};

template <> struct machine<arch::avx512> : machine_avx512 {};
#if defined(__AVX512BF16__)
template <> struct machine<arch::avx512bf16> : machine_avx512 {
    /// The first n elements of two registers as bf16, to nearest. False, and nothing is written, where one holds a NaN or a subnormal, which
    /// the instruction would not treat as encode does.
    KEEL_FN static bool store_bf16(uint16_t* p, f const& a, f const& b, int n) {
        constexpr int other = 0x01 | 0x80 | 0x20; // quiet and signalling NaN, subnormal
        if (_kortestz_mask16_u8(_mm512_fpclass_ps_mask(a, other), _mm512_fpclass_ps_mask(b, other)) == 0) return false;
        __m512i const words = __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(b, a));
        if (n == 32) _mm512_storeu_si512(p, words);
        else _mm512_mask_storeu_epi16(p, (1u << n) - 1u, words);
        return true;
    }
};
#endif

} // namespace keel::inline KEEL_ABI::detail

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
