// multiply_wide for packs: the 32 x 32 -> 64 bit product that Philox (core/random.hpp) needs in every lane.
#pragma once

#include <keel/backend/cpu/pack.hpp>

namespace keel::inline KEEL_ABI {
namespace detail {

// x86 multiplies the even lanes; the odd ones are shifted down to them, and the halves put back together.
#if defined(__SSE2__)
KEEL_FN __m128i wide_product(__m128i a, uint32_t b, __m128i& high) {
    __m128i const factor = _mm_set1_epi32(static_cast<int>(b));
    __m128i const even = _mm_shuffle_epi32(_mm_mul_epu32(a, factor), 0xd8); // low0 low2 high0 high2
    __m128i const odd = _mm_shuffle_epi32(_mm_mul_epu32(_mm_srli_epi64(a, 32), factor), 0xd8);
    high = _mm_unpackhi_epi32(even, odd);
    return _mm_unpacklo_epi32(even, odd);
}
#endif
#if defined(__AVX2__)
KEEL_FN __m256i wide_product(__m256i a, uint32_t b, __m256i& high) {
    __m256i const factor = _mm256_set1_epi32(static_cast<int>(b));
    __m256i const even = _mm256_mul_epu32(a, factor);
    __m256i const odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
#endif
#if defined(__AVX512F__)
KEEL_FN __m512i wide_product(__m512i a, uint32_t b, __m512i& high) {
    __m512i const factor = _mm512_set1_epi32(static_cast<int>(b));
    // The zeroing forms with a full mask are the same instructions; gcc 12 warns of the plain ones (its own undefined
    // operand, PR 105593).
    __mmask8 const all = 0xff;
    __m512i const even = _mm512_maskz_mul_epu32(all, a, factor);
    __m512i const odd = _mm512_maskz_mul_epu32(all, _mm512_maskz_srli_epi64(all, a, 32), factor);
    high =
        _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB); // odd places stay, the rest take their neighbour
    return _mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CDAB);
}
#endif
#if defined(__aarch64__)
KEEL_FN uint32x4_t wide_product(uint32x4_t a, uint32_t b, uint32x4_t& high) {
    uint32x4_t const first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), b));
    uint32x4_t const second = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(a), b));
    high = vuzp2q_u32(first, second);
    return vuzp1q_u32(first, second);
}
#endif

} // namespace detail

/// a * b in 64 bits in every lane: returns the low words, `high` takes the others.
template <class A> KEEL_FN bits_pack<A> multiply_wide(bits_pack<A> const& a, uint32_t b, bits_pack<A>& high) {
    using word = typename bits_pack<A>::register_type;
    typename word::register_type upper;
    word const lower(detail::wide_product(a.v, b, upper));
    high.v = word(upper);
    return bits_pack<A>::of(lower);
}
KEEL_FN bits_pack<arch::scalar> multiply_wide(bits_pack<arch::scalar> const& a, uint32_t b,
                                              bits_pack<arch::scalar>& high) {
    uint64_t const p = uint64_t{a.v} * b;
    high.v = static_cast<uint32_t>(p >> 32);
    return bits_pack<arch::scalar>::of(static_cast<uint32_t>(p));
}

} // namespace keel::inline KEEL_ABI
