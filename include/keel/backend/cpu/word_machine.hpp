// The few operations on registers of 16-bit words that scaled_codes_x86.hpp is made of, on AVX-512 and on AVX2.
//
// i is a register of integers, f the same as floats; `elements` 16-bit elements fill one.
#pragma once

#include <keel/backend/cpu/pack.hpp>
#include <keel/format/bf16.hpp>

#if defined(__AVX2__) && defined(__FMA__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI::detail {

template <class A> struct word_machine {
    static constexpr bool exists = false;
};

template <> struct word_machine<arch::avx2> {
    static constexpr bool exists = true;
    using i = __m256i;
    using f = __m256;
    static constexpr int elements = 16;

    KEEL_FN static i load(bf16 const* p) { return _mm256_loadu_si256(reinterpret_cast<i const*>(p)); }
    KEEL_FN static void stream(void* p, i v) { _mm256_stream_si256(static_cast<i*>(p), v); } ///< past the caches; p of whole registers
    KEEL_FN static f load(float const* p) { return _mm256_load_ps(p); }
    KEEL_FN static i load_words(float const* p) { return _mm256_loadu_si256(reinterpret_cast<i const*>(p)); }
    KEEL_FN static void store(float* p, f v) { _mm256_store_ps(p, v); }
    KEEL_FN static i zero() { return _mm256_setzero_si256(); }
    KEEL_FN static i set16(uint32_t v) { return _mm256_set1_epi16(static_cast<short>(v)); }
    KEEL_FN static i set32(uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
    KEEL_FN static i land(i a, i b) { return _mm256_and_si256(a, b); }
    KEEL_FN static i add32(i a, i b) { return _mm256_add_epi32(a, b); }
    KEEL_FN static i sub32(i a, i b) { return _mm256_sub_epi32(a, b); }
    KEEL_FN static i max16(i a, i b) { return _mm256_max_epu16(a, b); }
    KEEL_FN static i max32(i a, i b) { return _mm256_max_epu32(a, b); }
    KEEL_FN static i add16(i a, i b) { return _mm256_add_epi16(a, b); }
    template <int N> KEEL_FN static i shl32(i a) { return _mm256_slli_epi32(a, N); }
    template <int N> KEEL_FN static i shr32(i a) { return _mm256_srli_epi32(a, N); }
    template <int N> KEEL_FN static i shl16(i a) { return _mm256_slli_epi16(a, N); }
    template <int N> KEEL_FN static i shr16(i a) { return _mm256_srli_epi16(a, N); }
    KEEL_FN static float first(f a) { return _mm256_cvtss_f32(a); }
    KEEL_FN static f mul(f a, f b) { return _mm256_mul_ps(a, b); }
    KEEL_FN static f fma(f a, f b, f c) { return _mm256_fmadd_ps(a, b, c); }
    static constexpr bool has_signed_max = false;
    KEEL_FN static f as_f(i a) { return _mm256_castsi256_ps(a); }
    KEEL_FN static i as_i(f a) { return _mm256_castps_si256(a); }
    /// The lower word of each lane from a, the upper one from b.
    KEEL_FN static i words_of(i a, i b) { return _mm256_blend_epi16(a, b, 0xaa); }
    /// a, but a + b in the upper words.
    KEEL_FN static i add_upper(i of, i a, i b) { return words_of(of, add16(a, b)); }
    /// The largest word.
    KEEL_FN static uint32_t largest16(i a) { return largest16(_mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1))); }
    KEEL_FN static uint32_t largest16(__m128i a) { // by the one instruction that looks for the smallest
        __m128i const inverse = _mm_xor_si128(a, _mm_set1_epi16(-1));
        return 0xffffu & ~static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(inverse)));
    }
    KEEL_FN static uint32_t largest32(i a) { return max_word(bits_pack<arch::avx2>::of(bits_pack<arch::avx2>::register_type(a))); }
    /// The bits of a where `mask` has ones, else those of b.
    KEEL_FN static i choose(i mask, i a, i b) { return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b)); }
    /// b where the float a is NaN, else v.
    KEEL_FN static i if_nan(f a, i v, i b) {
        return _mm256_blendv_epi8(v, b, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    }
    /// The low bytes of a's words, then of b's.
    KEEL_FN static i bytes_of(i a, i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8); }
    /// The low bytes of four registers of 32-bit lanes that hold no more.
    KEEL_FN static i bytes_of(i const (&a)[4]) {
        i const order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); // packing works within 128 bits
        return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(_mm256_packus_epi32(a[0], a[1]), _mm256_packus_epi32(a[2], a[3])), order);
    }
    template <class Code> KEEL_FN static void store_bytes(Code* p, i v) { _mm256_storeu_si256(reinterpret_cast<i*>(p), v); }
    /// How many bytes have no bit of 0x7f where the word beside them (a's, then b's) has one of 0x7fff.
    KEEL_FN static int64_t flushed(i bytes, i a, i b) {
        i const lost = _mm256_cmpeq_epi8(land(bytes, _mm256_set1_epi8(0x7f)), zero());
        if (_mm256_testz_si256(lost, lost) != 0) return 0; // as nearly always
        i const none = _mm256_packs_epi16(_mm256_cmpeq_epi16(land(a, set16(0x7fff)), zero()), _mm256_cmpeq_epi16(land(b, set16(0x7fff)), zero()));
        i const some_lost = _mm256_andnot_si256(_mm256_permute4x64_epi64(none, 0xd8), lost);
        return __builtin_popcount(static_cast<uint32_t>(_mm256_movemask_epi8(some_lost)));
    }
    /// The same beside four registers of floats.
    KEEL_FN static int64_t flushed(i bytes, i const (&a)[4]) {
        i const lost = _mm256_cmpeq_epi8(land(bytes, _mm256_set1_epi8(0x7f)), zero());
        if (_mm256_testz_si256(lost, lost) != 0) return 0;
        i none[4];
        for (int r = 0; r < 4; ++r) none[r] = land(_mm256_cmpeq_epi32(land(a[r], set32(0x7fffffffu)), zero()), set32(0xff));
        return __builtin_popcount(static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_andnot_si256(bytes_of(none), lost))));
    }
    /// Elements 0, 2, ... and 1, 3, ... of two registers.
    KEEL_FN static void split(f low, f high, f& even, f& odd) {
        auto const in_order = [](f v) { return as_f(_mm256_permute4x64_epi64(as_i(v), 0xd8)); };
        even = in_order(_mm256_shuffle_ps(low, high, 0x88));
        odd = in_order(_mm256_shuffle_ps(low, high, 0xdd));
    }
    /// p = max(p, floats of bf16 words), magnitudes.
    KEEL_FN static void raise(float* p, i words) {
        __m128i const half[] = {_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)};
        for (int64_t h = 0; h < 2; ++h) {
            i const own = shl32<16>(_mm256_cvtepu16_epi32(half[h]));
            i* const to = reinterpret_cast<i*>(p + 8 * h);
            _mm256_store_si256(to, max32(own, _mm256_load_si256(to)));
        }
    }
    KEEL_FN static i set8(uint32_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
    KEEL_FN static i lor(i a, i b) { return _mm256_or_si256(a, b); }
    KEEL_FN static i unless(i mask, i a) { return _mm256_andnot_si256(mask, a); }
    KEEL_FN static i add8(i a, i b) { return _mm256_add_epi8(a, b); }
    KEEL_FN static i sub8(i a, i b) { return _mm256_sub_epi8(a, b); }
    KEEL_FN static i max8(i a, i b) { return _mm256_max_epu8(a, b); }
    KEEL_FN static i above8(i a, i b) { return _mm256_cmpgt_epi8(a, b); } ///< of bytes below 2^7
    /// The low words of 32-bit lanes, a's, then b's.
    KEEL_FN static i words_in_order(i a, i b) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8); }
    /// The low bytes of sixteen words that hold no more, in both halves.
    KEEL_FN static i bytes_twice(i a) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, a), 0x88); }
    /// The bytes of the table at each byte of `at`, below 16.
    KEEL_FN static i look_up(i table, i at) { return _mm256_shuffle_epi8(table, at); }
    /// Bytes in the order in which low_pairs has the first half of them.
    template <class Code> KEEL_FN static i load_for_unpacking(Code const* p) {
        return _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<i const*>(p)), 0xd8);
    }
    /// Words whose low bytes are a's and whose high ones are b's.
    KEEL_FN static i low_pairs(i a, i b) { return _mm256_unpacklo_epi8(a, b); }
    KEEL_FN static i high_pairs(i a, i b) { return _mm256_unpackhi_epi8(a, b); }
#if defined(__F16C__)
    /// Bytes to words, with their sign.
    template <class Code> KEEL_FN static i load_signed_bytes(Code const* p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<__m128i const*>(p)));
    }
    /// Words that have all of these bits become a half that is NaN.
    KEEL_FN static i nan_where_all(i a, i mask) { return lor(a, _mm256_cmpeq_epi16(land(a, mask), mask)); }
    KEEL_FN static void widen_halves(i a, f& low, f& high) {
        low = _mm256_cvtph_ps(_mm256_castsi256_si128(a)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    }
#endif
    /// A count in lane 0.
    KEEL_FN static i lone(int64_t count) { return _mm256_setr_epi32(static_cast<int>(count), 0, 0, 0, 0, 0, 0, 0); }
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

template <> struct word_machine<arch::avx512> {
    static constexpr bool exists = true;
    using i = __m512i;
    using f = __m512;
    static constexpr int elements = 32;

    KEEL_FN static i load(bf16 const* p) { return _mm512_loadu_si512(p); }
    KEEL_FN static void stream(void* p, i v) { _mm512_stream_si512(static_cast<i*>(p), v); }
    KEEL_FN static f load(float const* p) { return _mm512_load_ps(p); }
    KEEL_FN static i load_words(float const* p) { return _mm512_loadu_si512(p); }
    KEEL_FN static void store(float* p, f v) { _mm512_store_ps(p, v); }
    KEEL_FN static i zero() { return _mm512_setzero_si512(); }
    KEEL_FN static i set16(uint32_t v) { return _mm512_set1_epi16(static_cast<short>(v)); }
    KEEL_FN static i set32(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
    KEEL_FN static i land(i a, i b) { return _mm512_and_si512(a, b); }
    KEEL_FN static i add32(i a, i b) { return _mm512_add_epi32(a, b); }
    KEEL_FN static i sub32(i a, i b) { return _mm512_sub_epi32(a, b); }
    KEEL_FN static i sub16(i a, i b) { return _mm512_sub_epi16(a, b); }
    KEEL_FN static i max16(i a, i b) { return _mm512_max_epu16(a, b); }
    KEEL_FN static i max32(i a, i b) { return _mm512_maskz_max_epu32(0xffff, a, b); }
    KEEL_FN static i add16(i a, i b) { return _mm512_add_epi16(a, b); }
    template <int N> KEEL_FN static i shl32(i a) { return _mm512_maskz_slli_epi32(0xffff, a, N); }
    template <int N> KEEL_FN static i shr32(i a) { return _mm512_maskz_srli_epi32(0xffff, a, N); }
    template <int N> KEEL_FN static i shl16(i a) { return _mm512_slli_epi16(a, N); }
    template <int N> KEEL_FN static i shr16(i a) { return _mm512_srli_epi16(a, N); }
    KEEL_FN static float first(f a) { return _mm512_cvtss_f32(a); }
    KEEL_FN static f mul(f a, f b) { return _mm512_mul_ps(a, b); }
    KEEL_FN static f fma(f a, f b, f c) { return _mm512_fmadd_ps(a, b, c); }
    static constexpr bool has_signed_max = true;
    /// The larger magnitude with the sign of a.
#if defined(__GNUC__) && !defined(__clang__) // without optimisation a macro, whose mask is a short
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"
#endif
    KEEL_FN static f signed_max(f a, f b) {
        constexpr int larger_magnitude_sign_of_first = 3;
        return _mm512_range_ps(a, b, larger_magnitude_sign_of_first);
    }
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
    KEEL_FN static f as_f(i a) { return _mm512_castsi512_ps(a); }
    KEEL_FN static i as_i(f a) { return _mm512_castps_si512(a); }
    KEEL_FN static i words_of(i a, i b) { return _mm512_mask_blend_epi16(0xaaaaaaaau, a, b); }
    KEEL_FN static i add_upper(i of, i a, i b) { return _mm512_mask_add_epi16(of, 0xaaaaaaaau, a, b); }
    KEEL_FN static uint32_t largest16(i a) {
        return word_machine<arch::avx2>::largest16(_mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_maskz_extracti64x4_epi64(0xff, a, 1)));
    }
    KEEL_FN static uint32_t largest32(i a) { return max_word(bits_pack<arch::avx512>::of(bits_pack<arch::avx512>::register_type(a))); }
    KEEL_FN static i choose(i mask, i a, i b) {
        constexpr int first_chooses = 0xca; // the second operand's bit where the first has one, else the third's
        return _mm512_ternarylogic_epi32(mask, a, b, first_chooses);
    }
    KEEL_FN static i if_nan(f a, i v, i b) { return _mm512_mask_mov_epi32(v, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), b); }
    KEEL_FN static i bytes_of(i a, i b) {
        __m512i const order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); // packing works within 128 bits
        return _mm512_maskz_permutexvar_epi64(0xff, order, _mm512_packus_epi16(a, b));
    }
    KEEL_FN static i bytes_of(i const (&a)[4]) {
        __m512i const order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_maskz_permutexvar_epi32(
            0xffff, order, _mm512_packus_epi16(_mm512_packus_epi32(a[0], a[1]), _mm512_packus_epi32(a[2], a[3])));
    }
    template <class Code> KEEL_FN static void store_bytes(Code* p, i v) { _mm512_storeu_si512(p, v); }
    /// Bytes to words.
    template <class Code> KEEL_FN static i load_bytes(Code const* p) {
        return _mm512_maskz_cvtepu8_epi16(0xffffffffu, _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p)));
    }
    KEEL_FN static int64_t flushed(i bytes, i a, i b) {
        uint64_t const lost = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x7f));
        if (lost == 0) return 0; // as nearly always
        uint64_t const some = _mm512_test_epi16_mask(a, set16(0x7fff)) | uint64_t{_mm512_test_epi16_mask(b, set16(0x7fff))} << 32;
        return __builtin_popcountll(lost & some);
    }
    KEEL_FN static int64_t flushed(i bytes, i const (&a)[4]) {
        uint64_t const lost = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x7f));
        if (lost == 0) return 0;
        uint64_t some = 0;
        for (int r = 0; r < 4; ++r) some |= uint64_t{_mm512_test_epi32_mask(a[r], set32(0x7fffffffu))} << (16 * r);
        return __builtin_popcountll(lost & some);
    }
    KEEL_FN static void split(f low, f high, f& even, f& odd) {
        even = _mm512_permutex2var_ps(low, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), high);
        odd = _mm512_permutex2var_ps(low, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), high);
    }
    KEEL_FN static void raise(float* p, i words) {
        __m256i const half[] = {_mm512_castsi512_si256(words), _mm512_maskz_extracti64x4_epi64(0xff, words, 1)};
        for (int64_t h = 0; h < 2; ++h) {
            i const own = shl32<16>(_mm512_maskz_cvtepu16_epi32(0xffff, half[h]));
            _mm512_store_si512(p + 16 * h, max32(own, _mm512_load_si512(p + 16 * h)));
        }
    }
    /// b where the word of `magnitude` (below 2^15) is above `limit`, else v.
    KEEL_FN static i if_above(i magnitude, uint32_t limit, i v, i b) {
        return _mm512_mask_mov_epi16(v, _mm512_cmpgt_epu16_mask(magnitude, set16(limit)), b);
    }
    /// Sixteen words to look up, twice, from the low words of 32-bit lanes, less `base`.
    KEEL_FN static i make_table(i of, uint32_t base) {
        i const words = _mm512_castsi256_si512(_mm512_maskz_cvtepi32_epi16(0xffff, of));
        return sub16(_mm512_maskz_shuffle_i64x2(0xff, words, words, 0x44), set16(base));
    }
    /// The words at the low four bits of each word.
    KEEL_FN static i look_up(i const& table, i at) { return _mm512_maskz_permutexvar_epi16(0xffffffffu, at, table); }
    template <class Code> KEEL_FN static i load_signed_bytes(Code const* p) {
        return _mm512_maskz_cvtepi8_epi16(0xffffffffu, _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p)));
    }
    KEEL_FN static i nan_where_all(i a, i mask) { return _mm512_mask_mov_epi16(a, _mm512_cmpeq_epi16_mask(land(a, mask), mask), set16(0x7fff)); }
    KEEL_FN static void widen_halves(i a, f& low, f& high) {
        low = _mm512_maskz_cvtph_ps(0xffff, _mm512_castsi512_si256(a));
        high = _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_extracti64x4_epi64(0xff, a, 1));
    }
    KEEL_FN static i lone(int64_t count) { return _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(count))); }
};
template <> struct word_machine<arch::avx512bf16> : word_machine<arch::avx512> {};

#endif

} // namespace keel::inline KEEL_ABI::detail

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
