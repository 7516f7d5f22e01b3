// Elements as words of two bf16, for packing_pairs.hpp: by conversion, and codes of eight bits on AVX-512 by a table of their 128 magnitudes.
#pragma once

#include <keel/backend/cpu/packing.hpp>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI::detail {

template <class A, class T> struct pair_words {
    using U = bits_pack<A>;
    /// 2 w adjacent elements.
    KEEL_FN U along(T const* p) const { return pair_of_neighbours<T>(load_neighbours<U>(p)); }
    /// w elements of one row in the low halves, of another in the high ones; and of 2 w elements.
    KEEL_FN U across(T const* even, T const* odd) const { return as_bf16<T>(load_words<U>(&even->bits)) | shl<16>(as_bf16<T>(load_words<U>(&odd->bits))); }
    KEEL_FN void across_two(T const* even, T const* odd, U (&words)[2]) const {
        words[0] = across(even, odd), words[1] = across(even + A::width, odd + A::width);
    }
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

template <class A>
    requires(A::width == 16)
struct pair_words<A, bf16> {
    using U = bits_pack<A>;
    KEEL_FN U along(bf16 const* p) const { return load_bytes<U>(p); }
    KEEL_FN U across(bf16 const* even, bf16 const* odd) const { return load_words<U>(&even->bits) | shl<16>(load_words<U>(&odd->bits)); }
    KEEL_FN void across_two(bf16 const* even, bf16 const* odd, U (&words)[2]) const {
        alignas(64) static constexpr table places = [] {
            table t{};
            for (int i = 0; i < 32; ++i) t.of[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
            return t;
        }();
        __m512i const a = load_bytes<U>(even).v, b = load_bytes<U>(odd).v, first = _mm512_load_si512(&places.of[0]);
        __m512i const second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
        words[0] = U::of(typename U::register_type(_mm512_permutex2var_epi16(a, first, b)));
        words[1] = U::of(typename U::register_type(_mm512_permutex2var_epi16(a, second, b)));
    }

private:
    struct table {
        alignas(64) uint16_t of[32];
    };
};

/// Whether a code of eight bits is a sign above a magnitude of its own meaning.
template <class T> inline constexpr bool is_signed_byte = false;
template <class T>
    requires(sizeof(T) == 1 && format_traits<T>::has_sign)
inline constexpr bool is_signed_byte<T> = format_traits<T>::sign_code == 0x80u && format_traits<T>::has_negative_zero;

template <class A, class T>
    requires(A::width == 16 && is_signed_byte<T>)
struct pair_words<A, T> {
    using U = bits_pack<A>;
    KEEL_FN U along(T const* p) const { return words(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(p))); }
    KEEL_FN U across(T const* even, T const* odd) const {
        __m128i const a = _mm_loadu_si128(reinterpret_cast<__m128i const*>(even)), b = _mm_loadu_si128(reinterpret_cast<__m128i const*>(odd));
        return words(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
    }
    KEEL_FN void across_two(T const* even, T const* odd, U (&words)[2]) const { words[0] = across(even, odd), words[1] = across(even + 16, odd + 16); }

private:
    struct table {
        alignas(64) uint16_t of[128];
    };
    static constexpr table magnitudes = [] {
        table t{};
        for (uint32_t code = 0; code < 128; ++code) t.of[code] = static_cast<uint16_t>(bits(decode(from_word<T>(code))) >> 16);
        return t;
    }();
    KEEL_FN static __m512i part(int i) { return _mm512_load_si512(&magnitudes.of[32 * i]); }

    KEEL_FN static U words(__m256i codes) {
        __m512i const code = _mm512_maskz_cvtepu8_epi16(0xffffffffu, codes);
        __m512i const low = _mm512_permutex2var_epi16(part(0), code, part(1)), high = _mm512_permutex2var_epi16(part(2), code, part(3));
        __m512i const magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40)), low, high);
        constexpr int first_chooses = 0xca; // the second operand's bit where the first has one, else the third's
        __m512i const word = _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<short>(0x8000)), _mm512_slli_epi16(code, 8), magnitude, first_chooses);
        return U::of(typename U::register_type(word));
    }
};

#endif

} // namespace keel::inline KEEL_ABI::detail

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
