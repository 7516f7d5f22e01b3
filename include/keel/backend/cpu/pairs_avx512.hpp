// pairs.hpp on AVX-512: the same bits without gathering neighbours one by one. A register holds 16 pairs, so two blocks of eight, and
// what a block has of its own (its scale) is computed for both at once.
#pragma once

#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/pairs.hpp>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI {

template <class A>
concept avx512_arch = std::is_same_v<A, arch::avx512> || std::is_same_v<A, arch::avx512bf16>;

namespace detail {

/// The first n of 32 elements; n may be anything.
KEEL_FN __mmask32 first_of_32(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1u; }
/// Elements of the row of n that the pairs of `at` hold.
template <class A, class At> KEEL_FN __mmask32 held(cpu_row_group<A> const& g, At at, int64_t n) {
    int64_t const left = n - 2 * at.i, most = 2 * g.count_of(at);
    return first_of_32(left < most ? left : most);
}
/// 0, 2, 4, ... and, of each half, what interleaves it with another register's.
KEEL_FN __m512i even_places() { return _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30); }
KEEL_FN __m512i odd_places() { return _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31); }
KEEL_FN __m512i low_places() { return _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
KEEL_FN __m512i high_places() { return _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }

template <class V> KEEL_FN V to_lanes(__m512i u) { return V::of(typename V::register_type(u)); }
template <class V> KEEL_FN V to_lanes(__m512 f) { return V::of(typename V::register_type(f)); }

} // namespace detail

template <avx512_arch A, class T, class At>
    requires(sizeof(T) == 2)
KEEL_FN neighbours<pack<A>> load_pair(cpu_row_group<A> const& g, T const* p, At at, int64_t n) {
    prefetch_read(p + 2 * at.i);
    auto const words = detail::to_lanes<bits_pack<A>>(_mm512_maskz_loadu_epi16(detail::held(g, at, n), p + 2 * at.i));
    return {decode_words<T, pack<A>>(words), decode_words<T, pack<A>>(shr<16>(words))};
}
template <avx512_arch A, class At> KEEL_FN neighbours<pack<A>> load_pair(cpu_row_group<A> const& g, float const* p, At at, int64_t n) {
    prefetch_read(p + 2 * at.i);
    __mmask32 const held = detail::held(g, at, n);
    __m512 const low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(held), p + 2 * at.i),
                 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(held >> 16), p + 2 * at.i + 16);
    return {detail::to_lanes<pack<A>>(_mm512_permutex2var_ps(low, detail::even_places(), high)),
            detail::to_lanes<pack<A>>(_mm512_permutex2var_ps(low, detail::odd_places(), high))};
}

template <avx512_arch A, class T, class At>
    requires(sizeof(T) == 2)
KEEL_FN void store_pair(cpu_row_group<A> const& g, T* p, At at, int64_t n, neighbours<pack<A>> const& v) {
    prefetch_write(p + 2 * at.i);
    auto const words = encode_words<T>(v.even) | shl<16>(encode_words<T>(v.odd));
    _mm512_mask_storeu_epi16(p + 2 * at.i, detail::held(g, at, n), words.v);
}
template <avx512_arch A, class At>
KEEL_FN void store_pair(cpu_row_group<A> const& g, float* p, At at, int64_t n, neighbours<pack<A>> const& v) {
    prefetch_write(p + 2 * at.i);
    __mmask32 const held = detail::held(g, at, n);
    __m512 const even = canonical(v.even).v, odd = canonical(v.odd).v;
    _mm512_mask_storeu_ps(p + 2 * at.i, static_cast<__mmask16>(held), _mm512_permutex2var_ps(even, detail::low_places(), odd));
    _mm512_mask_storeu_ps(p + 2 * at.i + 16, static_cast<__mmask16>(held >> 16),
                          _mm512_permutex2var_ps(even, detail::high_places(), odd));
}

/// Two blocks of eight pairs, the second perhaps past the row's end.
template <class A> struct twin_block {
    using lane = pack<A>;
    using lane_words = bits_pack<A>;
    int64_t i, end; ///< pairs

    template <class Body> KEEL_FN void each(Body body) const {
        if (end - i >= 16) body(at_full{i});
        else body(at_tail{i, end - i});
    }
    KEEL_FN lane_words max_bits(lane_words const& u) const {
        __m512i v = u.v;
        v = _mm512_maskz_max_epu32(0xffff, v, _mm512_maskz_shuffle_i64x2(0xff, v, v, 0xb1));
        v = _mm512_maskz_max_epu32(0xffff, v, _mm512_maskz_shuffle_epi32(0xffff, v, _MM_PERM_BADC));
        v = _mm512_maskz_max_epu32(0xffff, v, _mm512_maskz_shuffle_epi32(0xffff, v, _MM_PERM_CDAB));
        return detail::to_lanes<lane_words>(v);
    }
    template <auto... Policy, class P> KEEL_FN void put(P p, lane const& v) const {
        using T = std::remove_cvref_t<decltype(*element_of(p, 0))>;
        __m512i const codes = encode_words<T, Policy...>(v).v;
        store_bits(element_of(p, i / 8), static_cast<uint32_t>(_mm_cvtsi128_si32(_mm512_castsi512_si128(codes))));
        if (valid_lanes() != 0xff)
            store_bits(element_of(p, i / 8 + 1), static_cast<uint32_t>(_mm_cvtsi128_si32(_mm512_maskz_extracti32x4_epi32(0xf, codes, 2))));
    }
    template <class P> KEEL_FN lane get(P p) const {
        float const a = load_element(element_of(p, i / 8)), b = valid_lanes() != 0xff ? load_element(element_of(p, i / 8 + 1)) : 0.0f;
        return detail::to_lanes<lane>(_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(a), _mm512_set1_ps(b)));
    }
    KEEL_FN mask_pack<A> valid() const { return mask_pack<A>::of(typename mask_pack<A>::register_type(valid_lanes())); }
    KEEL_FN static lane spread(lane const& v) { return v; }

private:
    KEEL_FN __mmask16 valid_lanes() const { return end - i > 8 ? 0xffff : 0xff; }
};

template <avx512_arch A> struct eight_pairs<cpu_row_group<A>> {
    using words = bits_pack<A>;
    template <class Body> KEEL_FN static void each(cpu_row_group<A> const&, int64_t pairs, Body body) {
        for (int64_t i = 0; i < pairs; i += 16) body(twin_block<A>{i, pairs});
    }
};

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
