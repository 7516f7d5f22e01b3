// Two k in a word: operands that bf16 holds exactly, as pairs of bf16. The hardware's bf16 dot takes such words whole and at
// twice the speed of an fma of floats, and computes what two fma do, first the odd element, then the even one:
//
//     sum = fma(odd(a), odd(b), sum);  sum = fma(even(a), even(b), sum)
//
// except that it reads and writes subnormals as zero, and that no manual promises what becomes of a product past the largest float.
// Neither can happen where all elements of a strip of A and of a strip of B are of moderate magnitude (moderate() below), which
// packing measures; other tiles take the two fma (two_fma_step) on the same words. So the bits are the same on every machine.
#pragma once

#include <keel/backend/cpu/pack.hpp>

// GCC 12 says of its own intrinsics that their deliberately undefined operands are uninitialized (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI::detail {

/// Whether packs of A have the dot of pairs.
template <class A> inline constexpr bool has_pair_dot = false;
#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
template <> inline constexpr bool has_pair_dot<arch::avx512bf16> = true;
#endif

/// The biased exponents of the least and of the greatest magnitude among some bf16 elements, zeros left out; of no element but zeros:
/// a range that is moderate beside any other.
struct exponent_range {
    int least = 254, greatest = 0;

    KEEL_FN exponent_range with(exponent_range const& other) const {
        return {other.least < least ? other.least : least, other.greatest > greatest ? other.greatest : greatest};
    }
};

/// Whether no chain over products of elements of these two ranges meets a subnormal or a product past the largest float.
///
/// An element of biased exponent e is a multiple of 2^(e - 127 - 7) and less than 2^(e - 127 + 1). So every product, every sum of
/// products and every rounded sum is a multiple of 2^(ea + eb - 268), hence zero or normal if that is 2^-126 or more; a product is less
/// than 2^(ea + eb - 252), at most 2^128. Subnormal elements (e = 0), Inf and NaN (e = 255) are for the two fma.
KEEL_FN constexpr bool moderate(exponent_range const& a, exponent_range const& b) {
    return a.least > 0 && b.least > 0 && a.greatest < 255 && b.greatest < 255 && a.least + b.least >= 142 &&
           a.greatest + b.greatest <= 380;
}

/// The definition, on words of pairs that are moved as floats.
template <class A> struct two_fma_step {
    KEEL_FN static pack<A> add(pack<A> const& left, pack<A> const& right, pack<A> const& sum) {
        bits_pack<A> const a = bits(left), b = bits(right), high(0xffff0000u);
        pack<A> const odd = fma(as_float(a & high), as_float(b & high), sum);
        return fma(as_float(shl<16>(a)), as_float(shl<16>(b)), odd);
    }
};

template <class A> struct pair_dot_step;
template <class A> class exponent_watch;

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

/// The same by one instruction, for moderate elements.
template <class A> struct pair_dot_step {
    KEEL_FN static pack<A> add(pack<A> const& left, pack<A> const& right, pack<A> const& sum) {
        __m512 const a = left.v, b = right.v;
        return pack<A>::of(typename pack<A>::register_type(
            _mm512_dpbf16_ps(sum.v, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b))));
    }
};

/// Collects the exponent_range of words of pairs. Magnitudes less one: a zero becomes the largest 16-bit word, and no least.
template <class A> class exponent_watch {
public:
    KEEL_FN void take(bits_pack<A> const& words) {
        __m512i const magnitudes = _mm512_and_si512(words.v, _mm512_set1_epi16(0x7fff));
        least_ = _mm512_min_epu16(least_, _mm512_sub_epi16(magnitudes, _mm512_set1_epi16(1)));
        greatest_ = _mm512_max_epu16(greatest_, magnitudes);
    }
    KEEL_FN exponent_range range() const {
        uint32_t const low = least_of(least_), high = 0xffffu - least_of(_mm512_xor_si512(greatest_, _mm512_set1_epi16(-1)));
        if (high == 0) return {};
        return {static_cast<int>((low + 1) >> 7), static_cast<int>(high >> 7)};
    }

private:
    KEEL_FN static uint32_t least_of(__m512i const& words) {
        __m256i const half = _mm256_min_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
        __m128i const quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter))) & 0xffffu;
    }
    __m512i least_ = _mm512_set1_epi16(-1), greatest_ = _mm512_setzero_si512();
};

#endif

} // namespace keel::inline KEEL_ABI::detail

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
