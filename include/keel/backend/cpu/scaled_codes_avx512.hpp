// scaled_codes.hpp for bf16 rows and FP8 codes on AVX-512: the same bits in less than half the instructions.
//
// A bf16 element is the upper half of its float. Of each 32-bit lane of 32 loaded elements, the upper half is one element as it
// stands and the lower half another after a shift, so two operations widen 32 elements, and a shift and a blend put their codes
// back in order. Signs, maxima and counts are taken 32 or 64 at a time. The code itself is encode_bounded's (minifloat.hpp).
#pragma once

#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/scaled_codes.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/fp8.hpp>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI {

template <class A>
concept avx512_arch = std::is_same_v<A, arch::avx512> || std::is_same_v<A, arch::avx512bf16>;
/// Codes of eight bits whose zero has a sign, so that the sign can be set on its own.
template <class Code>
concept signed_byte_code = sizeof(Code) == 1 && format_traits<Code>::has_negative_zero && format_traits<Code>::sign_code == 0x80u;

namespace detail {

/// 32 magnitudes of bf16 as two registers of floats: elements 0, 2, 4, ... and 1, 3, 5, ...
KEEL_FN void widen(__m512i magnitudes, __m512& even, __m512& odd) {
    even = _mm512_castsi512_ps(_mm512_slli_epi32(magnitudes, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(magnitudes, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

/// encode_bounded of magnitudes in the low byte of every lane, but for a constant that byte_offset takes off.
template <class Code> struct byte_codes {
    using traits = format_traits<Code>;
    static constexpr int cut = 23 - traits::mantissa_bits;
    static constexpr uint32_t lowest = static_cast<uint32_t>(128 - traits::bias);
    static constexpr uint32_t byte_offset = ((lowest + static_cast<uint32_t>(cut)) << traits::mantissa_bits) & 0x7fu;

    KEEL_FN static __m512i of(__m512 v) {
        __m512i const exponent = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7f800000));
        __m512i const binade = _mm512_max_epu32(exponent, _mm512_set1_epi32(static_cast<int>(lowest << 23)));
        __m512i const anchor = _mm512_add_epi32(binade, _mm512_set1_epi32(cut << 23));
        __m512i const sum = _mm512_castps_si512(_mm512_add_ps(v, _mm512_castsi512_ps(anchor)));
        return _mm512_add_epi32(sum, _mm512_maskz_srli_epi32(0xffff, anchor, cut));
    }
    /// The codes, in the low bytes of 32 words, of 32 elements of bf16 by the multipliers of elements 0, 2, ... and 1, 3, ...
    KEEL_FN static __m512i of_words(__m512i elements, __m512 even_multiplier, __m512 odd_multiplier) {
        __m512 even, odd;
        widen(_mm512_and_si512(elements, _mm512_set1_epi16(0x7fff)), even, odd);
        __m512i const low = of(_mm512_mul_ps(even, even_multiplier)), high = of(_mm512_mul_ps(odd, odd_multiplier));
        __m512i const codes = _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16));
        __m512i const aligned = _mm512_sub_epi16(codes, _mm512_set1_epi16(static_cast<short>(byte_offset)));
        constexpr int third_chooses = 0xe4; // the first operand's bit where the third has one, else the second's
        return _mm512_ternarylogic_epi32(aligned, _mm512_srli_epi16(elements, 8), _mm512_set1_epi16(0x7f), third_chooses);
    }
};

/// The bf16 words of the codes 0 ... 127, all of them exact.
template <class Code> struct bf16_words_of {
    uint16_t word[128];
    constexpr bf16_words_of() : word{} {
        for (uint32_t code = 0; code < 128; ++code) word[code] = encode<bf16>(decode(from_word<Code>(code))).bits;
    }
};
template <class Code> alignas(64) inline constexpr bf16_words_of<Code> bf16_table;

/// 32 codes in the low bytes of words to bf16 words.
template <class Code> KEEL_FN __m512i bf16_words(__m512i codes) {
    uint16_t const* const table = bf16_table<Code>.word;
    auto const quarter = [&](int i) { return _mm512_load_si512(table + 32 * i); };
    __m512i const low = _mm512_permutex2var_epi16(quarter(0), codes, quarter(1));
    __m512i const high = _mm512_permutex2var_epi16(quarter(2), codes, quarter(3));
    __m512i const magnitudes = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), low, high);
    __m512i const signs = _mm512_and_si512(_mm512_slli_epi16(codes, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
    return _mm512_or_si512(magnitudes, signs);
}
/// To bf16 in the upper half of each word, nearest even; NaN becomes the one NaN.
KEEL_FN __m512i rounded_up_half(__m512 v) {
    __m512i const u = _mm512_castps_si512(v);
    __m512i const odd = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, u, 16), _mm512_set1_epi32(1));
    __m512i const sum = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fff0000));
}

KEEL_FN __m512i load_32(bf16 const* p) { return _mm512_loadu_si512(p); }

} // namespace detail

/// What a block has after its first `done` elements.
template <class Block> KEEL_FN Block rest_of(Block const& b, int64_t done) { return {b.i + done, b.count - done, b.index}; }

template <avx512_arch A, class Block>
    requires(Block::size >= 64)
KEEL_FN bits_pack<A> largest_magnitude(cpu_row_group<A> const& g, Block const& b, bf16 const* p) {
    using U = bits_pack<A>;
    __m512i top = _mm512_setzero_si512();
    int64_t const count = b.count / 32 * 32;
    if (Block::size <= 256)
        for (int64_t k = 0; k < count; k += 32) prefetch_read(p + b.i + k);
    for (int64_t k = 0; k < count; k += 32) {
        if (Block::size > 256) prefetch_read(p + b.i + k);
        top = _mm512_max_epu16(top, _mm512_and_si512(detail::load_32(p + b.i + k), _mm512_set1_epi16(0x7fff)));
    }
    __m512 even, odd;
    detail::widen(top, even, odd);
    using word = typename U::register_type;
    U const largest = umax(U::of(word(_mm512_castps_si512(even))), U::of(word(_mm512_castps_si512(odd))));
    if (count == b.count) return largest;
    return umax(largest, largest_magnitude<cpu_row_group<A>, Block, bf16 const*>(g, rest_of(b, count), p));
}

namespace detail {

/// The codes of 64 elements of bf16 by their four registers of multipliers, stored; how many others than zero became zero, if Counting.
template <class Code, bool Counting> KEEL_FN int64_t encode_64(bf16 const* from, Code* to, __m512 const (&multiplier)[4]) {
    using codes = byte_codes<Code>;
    __m512i const first = load_32(from), second = load_32(from + 32);
    __m512i const packed = _mm512_packus_epi16(codes::of_words(first, multiplier[0], multiplier[1]),
                                               codes::of_words(second, multiplier[2], multiplier[3]));
    __m512i const order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); // packing works within 128 bits
    __m512i const bytes = _mm512_maskz_permutexvar_epi64(0xff, order, packed);
    prefetch_write(to);
    _mm512_storeu_si512(to, bytes);
    if constexpr (!Counting) return 0;
    uint64_t const zero = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x7f));
    uint64_t const some = _mm512_test_epi16_mask(first, _mm512_set1_epi16(0x7fff)) |
                          uint64_t{_mm512_test_epi16_mask(second, _mm512_set1_epi16(0x7fff))} << 32;
    return __builtin_popcountll(zero & some);
}
/// Adds to lane 0.
template <class U> KEEL_FN void add_count(U& words, int64_t count) {
    using word = typename U::register_type;
    words = words + U::of(word(_mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(count)))));
}

} // namespace detail

template <signed_byte_code Code, bool Counting, avx512_arch A, class Block>
    requires(Block::size >= 64)
KEEL_FN void encode_scaled(cpu_row_group<A> const& g, Block const& b, bf16 const* from, Code* to, pack<A> const& multiplier,
                           bits_pack<A>& flushed) {
    __m512 const same[4] = {multiplier.v, multiplier.v, multiplier.v, multiplier.v};
    int64_t lost = 0;
    int64_t const count = b.count / 64 * 64;
    for (int64_t k = 0; k < count; k += 64) lost += detail::encode_64<Code, Counting>(from + b.i + k, to + b.i + k, same);
    if constexpr (Counting) detail::add_count(flushed, lost);
    if (count < b.count)
        encode_scaled<Code, Counting, cpu_row_group<A>, Block, bf16 const*, Code*>(g, rest_of(b, count), from, to, multiplier, flushed);
}

// Columns: whole groups of 64 of them; what is left goes the general way.

template <avx512_arch A>
KEEL_FN void raise_largest(cpu_row_group<A> const& g, bf16 const* p, int64_t pitch, int64_t rows, int64_t n, float* top) {
    int64_t const count = n / 32 * 32;
    for (int64_t j = 0; j < count; j += 32) {
        __m512i largest = _mm512_setzero_si512();
        for (int64_t row = 0; row < rows; ++row) {
            prefetch_read(p + row * pitch + j);
            largest = _mm512_max_epu16(largest, _mm512_and_si512(detail::load_32(p + row * pitch + j), _mm512_set1_epi16(0x7fff)));
        }
        __m256i const half[] = {_mm512_castsi512_si256(largest), _mm512_maskz_extracti64x4_epi64(0xff, largest, 1)};
        for (int h = 0; h < 2; ++h) {
            float* const to = top + j + 16 * h;
            __m512i const words = _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, half[h]), 16);
            _mm512_store_si512(to, _mm512_maskz_max_epu32(0xffff, words, _mm512_load_si512(to)));
        }
    }
    if (count < n) raise_largest<cpu_row_group<A>, bf16>(g, p + count, pitch, rows, n - count, top + count);
}

/// Of each 32: those of elements 0, 2, ..., then those of 1, 3, ...
template <class X, signed_byte_code Code, avx512_arch A>
    requires std::is_same_v<X, bf16>
KEEL_FN void arrange_multipliers(cpu_row_group<A> const&, float* multipliers, int64_t n) {
    __m512i const even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    for (int64_t j = 0; j < n / 64 * 64; j += 32) {
        __m512 const low = _mm512_load_ps(multipliers + j), high = _mm512_load_ps(multipliers + j + 16);
        _mm512_store_ps(multipliers + j, _mm512_permutex2var_ps(low, even, high));
        _mm512_store_ps(multipliers + j + 16, _mm512_permutex2var_ps(low, odd, high));
    }
}

template <bool Counting, avx512_arch A, signed_byte_code Code>
KEEL_FN void encode_columns(cpu_row_group<A> const& g, bf16 const* from, Code* to, int64_t n, float const* multipliers,
                            bits_pack<A>& flushed) {
    int64_t lost = 0;
    int64_t const count = n / 64 * 64;
    for (int64_t j = 0; j < count; j += 64) {
        __m512 const own[4] = {_mm512_load_ps(multipliers + j), _mm512_load_ps(multipliers + j + 16),
                               _mm512_load_ps(multipliers + j + 32), _mm512_load_ps(multipliers + j + 48)};
        lost += detail::encode_64<Code, Counting>(from + j, to + j, own);
    }
    if constexpr (Counting) detail::add_count(flushed, lost);
    if (count < n)
        encode_columns<Counting, cpu_row_group<A>, bf16, Code>(g, from + count, to + count, n - count, multipliers + count,
                                                               flushed);
}

template <signed_byte_code Code, avx512_arch A, class Block>
    requires(Block::size >= 64)
KEEL_FN void decode_scaled(cpu_row_group<A> const& g, Block const& b, Code const* from, bf16* to, pack<A> const& scale) {
    int64_t const count = b.count / 32 * 32;
    for (int64_t k = 0; k < count; k += 32) {
        prefetch_read(from + b.i + k);
        prefetch_write(to + b.i + k);
        __m256i const bytes = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(from + b.i + k));
        __m512 even, odd;
        detail::widen(detail::bf16_words<Code>(_mm512_maskz_cvtepu8_epi16(0xffffffffu, bytes)), even, odd);
        __m512i const low = detail::rounded_up_half(_mm512_mul_ps(even, scale.v)),
                      high = detail::rounded_up_half(_mm512_mul_ps(odd, scale.v));
        __m512i const words = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_maskz_srli_epi32(0xffff, low, 16), high);
        _mm512_storeu_si512(to + b.i + k, words);
    }
    if (count < b.count) decode_scaled<cpu_row_group<A>, Block, Code const*, bf16*>(g, rest_of(b, count), from, to, scale);
}

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
