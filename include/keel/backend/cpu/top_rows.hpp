// top_k of up to 16 rows at once on AVX-512: rows by rows to a bound from below for the k-th word (cpu/top_k.hpp says why that is one),
// the few elements of each row that reach it, then those of all rows through one sorting network, a row a lane, without a branch.
#pragma once

#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/top_rows.hpp>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#if defined(__GNUC__) && !defined(__clang__) // GCC bug 105593, as in pack_avx512.hpp
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace keel::inline KEEL_ABI {

namespace detail {

/// Eight 64-bit keys: a word, then the inverse of its index, so that of equal words the lower index is the larger key.
struct wide_keys {
    __m512i v;
    KEEL_FN friend wide_keys umax(wide_keys const& a, wide_keys const& b) { return {_mm512_max_epu64(a.v, b.v)}; }
    KEEL_FN friend wide_keys umin(wide_keys const& a, wide_keys const& b) { return {_mm512_min_epu64(a.v, b.v)}; }
};

/// Sixteen numbers.
struct wide_numbers {
    __m512 v;
    KEEL_FN friend wide_numbers umax(wide_numbers const& a, wide_numbers const& b) { return {_mm512_max_ps(a.v, b.v)}; }
    KEEL_FN friend wide_numbers umin(wide_numbers const& a, wide_numbers const& b) { return {_mm512_min_ps(a.v, b.v)}; }
};

template <class V> KEEL_FN void put_in_order(V& first, V& second) {
    V const larger = umax(first, second);
    second = umin(first, second);
    first = larger;
}
/// Batcher's odd-even merge: every Step-th of N registers, whose halves are falling.
template <int N, int Step, class V> KEEL_FN void merge_halves(V* r) {
    if constexpr (2 * Step < N) {
        merge_halves<N, 2 * Step>(r);
        merge_halves<N, 2 * Step>(r + Step);
        repeat<(N - 2 * Step) / (2 * Step)>([&](auto i) { put_in_order(r[Step + 2 * Step * i], r[2 * Step + 2 * Step * i]); });
    } else {
        put_in_order(r[0], r[Step]);
    }
}
/// Lane by lane, falling.
template <int N, class V> KEEL_FN void sort_lanes(V* r) {
    if constexpr (N > 1) {
        sort_lanes<N / 2>(r);
        sort_lanes<N / 2>(r + N / 2);
        merge_halves<N, 1>(r);
    }
}
template <int N, class V> KEEL_FN void sort_bitonic(V* r) {
    if constexpr (N > 1) {
        repeat<N / 2>([&](auto i) { put_in_order(r[i], r[i + N / 2]); });
        sort_bitonic<N / 2>(r);
        sort_bitonic<N / 2>(r + N / 2);
    }
}
/// The N largest of two falling lists, falling, to `top`; `lost` is the largest of those left out so far.
template <int N, class V> KEEL_FN void keep_largest(V* top, V const* other, V& lost) {
    repeat<N>([&](auto i) {
        lost = umax(lost, umin(top[i], other[N - 1 - i]));
        top[i] = umax(top[i], other[N - 1 - i]);
    });
    sort_bitonic<N>(top);
}

KEEL_FN void transpose_keys(__m512i const (&from)[8], wide_keys* to) {
    __m512i pair[8], four[8];
    repeat<4>([&](auto i) {
        pair[2 * i] = _mm512_unpacklo_epi64(from[2 * i], from[2 * i + 1]);
        pair[2 * i + 1] = _mm512_unpackhi_epi64(from[2 * i], from[2 * i + 1]);
    });
    repeat<2>([&](auto h) {
        repeat<2>([&](auto odd) {
            four[4 * h + odd] = _mm512_shuffle_i64x2(pair[4 * h + odd], pair[4 * h + 2 + odd], 0x88);
            four[4 * h + 2 + odd] = _mm512_shuffle_i64x2(pair[4 * h + odd], pair[4 * h + 2 + odd], 0xdd);
        });
    });
    repeat<4>([&](auto i) {
        to[i].v = _mm512_shuffle_i64x2(four[i], four[i + 4], 0x88);
        to[i + 4].v = _mm512_shuffle_i64x2(four[i], four[i + 4], 0xdd);
    });
}

} // namespace detail

/// Numbers of rows in (no NaN, no -Inf, no -0), indices of their k first elements out:
///
///   hold for each row of a few; set_lanes, bound_rows, find_row for each of them; ... ; select for all.
///
/// Rows that find_row refuses, and those that select calls tied, are for top_k.
template <class A>
    requires(arch_usable<A> && A::width == 16)
struct top_rows<cpu_row_group<A>> {
    static constexpr bool exists = true;
    static constexpr int rows = 16;
    static constexpr int64_t most_k = 16, least_n = 32; ///< each of 32 lanes has an element
    static constexpr int64_t most_held = 4096;          ///< numbers of the rows that are held together
    static constexpr int64_t most_found = 48;
    using group = cpu_row_group<A>;
    using F = pack<A>;
    using U = bits_pack<A>;

    alignas(64) float numbers[std::size_t{most_held}];
    alignas(64) float lanes[std::size_t{rows}][std::size_t{32}]; ///< the largest of even and of odd registers
    alignas(64) float bound[std::size_t{rows}];
    alignas(64) float number[std::size_t{rows}][std::size_t{most_found + 16}];     ///< of the elements found
    alignas(64) uint32_t inverse[std::size_t{rows}][std::size_t{most_found + 16}]; ///< of their indices
    alignas(64) uint32_t chosen[std::size_t{rows}][std::size_t{most_k}];           ///< [row][j], the result
    int64_t found[std::size_t{rows}] = {}, most = 0;

    KEEL_FN static int64_t stride(int64_t n) { return (n + 15) / 16 * 16; }
    /// How many rows there is room for.
    KEEL_FN static int64_t rows_together(int64_t n) { return most_held / stride(n) < rows ? most_held / stride(n) : rows; }
    KEEL_FN static F larger(F const& a, F const& b) { return F::of(_mm512_max_ps(a.v, b.v)); } ///< of two numbers
    KEEL_FN static float largest(F const& a) { return _mm512_reduce_max_ps(a.v); }

    /// of(at) of each pack to the memory of the row at place `at` of those held, with `end` past the row's end; held gives it back.
    template <class Of> KEEL_FN void hold(group const& g, int64_t at, int64_t n, float end, Of const& of) {
        float* const to = &numbers[at * stride(n)];
        g.each(n, [&](auto place) {
            keel::store(to + place.i, inside(place, of(place), end));
        });
    }
    KEEL_FN static F inside(at_full, F const& v, float) { return v; }
    KEEL_FN static F inside(at_tail at, F const& v, float end) { return select(gt(U(static_cast<uint32_t>(at.count)), iota<U>()), v, F(end)); }
    template <class At> KEEL_FN F held(int64_t at, int64_t n, At place) const { return load<F>(&numbers[at * stride(n)] + place.i); }
    /// Their sum, in THE order, where none is below +0 and `end` was +0.
    KEEL_FN float sum_held(int64_t at, int64_t n) const {
        float total = 0.0f;
        for (int64_t begin = 0; begin < n; begin += reduction_segment) {
            float const* const from = &numbers[at * stride(n)] + begin;
            int64_t const count = stride(n) - begin < reduction_segment ? stride(n) - begin : reduction_segment;
            F acc[8];
            detail::repeat<8>([&](auto r) { acc[r] = F(0.0f); });
            int64_t i = 0;
            for (; i + 128 <= count; i += 128) detail::repeat<8>([&](auto r) { acc[r] = acc[r] + load<F>(from + i + 16 * r); });
            detail::repeat<8>([&](auto r) {
                if (i + 16 * r < count) acc[r] = acc[r] + load<F>(from + i + 16 * r);
            });
            detail::repeat<4>([&](auto r) { acc[r] = acc[r] + acc[r + 4]; });
            total = add(total, tree_sum((acc[0] + acc[2]) + (acc[1] + acc[3])));
        }
        return total;
    }

    /// The lanes of the row at place `at`, row `row` of all, held with an end of -Inf.
    KEEL_FN void set_lanes(int64_t at, int64_t row, int64_t n) {
        float const* const from = &numbers[at * stride(n)];
        F even = load<F>(from), odd = load<F>(from + 16); // n is 32 or more, or the row's end
        int64_t i = 32;
        for (; i + 32 <= stride(n); i += 32) even = larger(even, load<F>(from + i)), odd = larger(odd, load<F>(from + i + 16));
        if (i < stride(n)) even = larger(even, load<F>(from + i));
        keel::store(&lanes[row][0], even), keel::store(&lanes[row][16], odd);
    }
    /// A row that holds nothing, from here on.
    KEEL_FN void leave_row(int64_t row) {
        keel::store(&lanes[row][0], F(0.0f)), keel::store(&lanes[row][16], F(0.0f));
        found[row] = 0;
    }

    /// For all rows whose lanes are set, a number that at least k elements of the row reach, and not many more.
    KEEL_FN void bound_rows(int64_t k) {
        U even[16], odd[16];
        if (k <= 8) {
            detail::repeat<16>([&](auto i) { even[i] = bits(larger(load<F>(&lanes[i][0]), load<F>(&lanes[i][16]))); });
            transpose(even);
            kth_of<8>(even, even + 8, k);
        } else {
            detail::repeat<16>([&](auto i) { even[i] = bits(load<F>(&lanes[i][0])), odd[i] = bits(load<F>(&lanes[i][16])); });
            transpose(even), transpose(odd);
            kth_of<16>(even, odd, k);
        }
    }

    /// Finds the elements that reach the row's bound. False: there are too many.
    KEEL_FN bool find_row(int64_t at, int64_t row, int64_t n) {
        float const* const from = &numbers[at * stride(n)];
        float* const to = &number[row][0];
        uint32_t* const p = &inverse[row][0];
        __m512 const least = _mm512_set1_ps(bound[row]);
        int64_t count = 0;
        auto const take = [&](int64_t r, __m512 own, __mmask16 reaches) { // stores whole registers: few of these have much
            __m512i const index = _mm512_sub_epi32(_mm512_set1_epi32(static_cast<int>(~(16 * r))), iota<U>().v);
            _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(reaches, own));
            _mm512_storeu_si512(p + count, _mm512_maskz_compress_epi32(reaches, index));
            count += __builtin_popcount(reaches);
        };
        int64_t const registers = stride(n) / 16;
        if (registers <= 8) {
            for (int64_t r = 0; r < registers && count <= most_found; ++r) {
                __m512 const own = _mm512_load_ps(from + 16 * r);
                take(r, own, _mm512_cmp_ps_mask(own, least, _CMP_GE_OQ));
            }
        } else {
            alignas(64) uint16_t reaching[std::size_t{most_held / 16}];
            for (int64_t r = 0; r < registers; ++r) reaching[r] = _mm512_cmp_ps_mask(_mm512_load_ps(from + 16 * r), least, _CMP_GE_OQ);
            for (int64_t first = 0; first < registers; first += 32) {
                int64_t const here = registers - first < 32 ? registers - first : 32;
                auto const inside_row = static_cast<__mmask32>((uint64_t{1} << here) - 1);
                __m512i const masks = _mm512_maskz_loadu_epi16(inside_row, &reaching[first]);
                for (uint32_t some = _mm512_test_epi16_mask(masks, masks); some != 0 && count <= most_found; some &= some - 1) {
                    int64_t const r = first + __builtin_ctz(some);
                    take(r, _mm512_load_ps(from + 16 * r), reaching[r]);
                }
            }
        }
        found[row] = count <= most_found ? count : 0;
        most = found[row] > most ? found[row] : most;
        return count <= most_found;
    }

    /// The k first of each row to `chosen`. Which rows (bits) have two equal numbers among their first k + 1, where something else than the index
    /// may have to decide.
    KEEL_FN uint32_t select_rows(int64_t k) { return k <= 8 ? select_of<8>(k) : select_of<16>(k); }

    // --- a row a lane ------------------------------------------------------------------------------------------------------

    using table = float[std::size_t{rows}][std::size_t{most_k}];
    KEEL_FN static F load_row(float const (&r)[std::size_t{rows}]) { return load<F>(&r[0]); }
    KEEL_FN static void store_row(float (&r)[std::size_t{rows}], F const& v) { keel::store(&r[0], v); }
    /// Lanes become rows, rows lanes.
    KEEL_FN static void turn(table& t) {
        U r[16];
        detail::repeat<16>([&](auto i) { r[i] = bits(load<F>(&t[i][0])); });
        transpose(r);
        detail::repeat<16>([&](auto i) { keel::store(&t[i][0], as_float(r[i])); });
    }
    /// The first k.
    KEEL_FN static void copy_first(float* to, float const* from, int64_t k) { store_partial(to, load<F>(from), k); }
    KEEL_FN static void copy_first(int32_t* to, uint32_t const* from, int64_t k) {
        store_words_partial(reinterpret_cast<uint32_t*>(to), load_words<U>(from), k);
    }
    KEEL_FN static void copy_first(int64_t* to, uint32_t const* from, int64_t k) {
        for (int64_t j = 0; j < k; ++j) to[j] = from[j];
    }

  private:
    template <int N> KEEL_FN void kth_of(U* a, U* b, int64_t k) {
        detail::wide_numbers x[std::size_t{N}], y[std::size_t{N}], lost{_mm512_set1_ps(as_float(sign_bit | infinity_bits))};
        detail::repeat<N>([&](auto i) { x[i].v = as_float(a[i]).v, y[i].v = as_float(b[i]).v; });
        detail::sort_lanes<N>(x), detail::sort_lanes<N>(y);
        detail::keep_largest<N>(x, y, lost);
        _mm512_store_ps(&bound[0], x[k - 1].v);
    }
    template <int N> KEEL_FN uint32_t select_of(int64_t k) {
        uint32_t tied = 0;
        U index[16];
        detail::repeat<16>([&](auto j) { index[j] = U(0u); });
        alignas(64) uint32_t line[std::size_t{N}][std::size_t{rows}];
        for (int64_t half = 0; half < 2; ++half) {
            detail::wide_keys top[std::size_t{N}], lost{_mm512_setzero_si512()};
            take_keys<N>(8 * half, 0, top, lost);
            for (int64_t first = 16; first < most; first += 16) {
                detail::wide_keys more[std::size_t{N}];
                take_keys<N>(8 * half, first, more, lost);
                detail::keep_largest<N>(top, more, lost);
            }
            uint32_t same = 0;
            detail::repeat<N>([&](auto j) {
                __m512i next;
                if constexpr (j + 1 < N) next = top[j + 1].v;
                else next = lost.v;
                uint32_t const equal = _mm512_testn_epi64_mask(_mm512_xor_si512(top[j].v, next), _mm512_set1_epi64(-(int64_t{1} << 32)));
                same |= j < k ? equal : 0u;
                _mm256_store_si256(reinterpret_cast<__m256i*>(&line[j][8 * half]),
                                   _mm512_maskz_cvtepi64_epi32(0xff, _mm512_xor_si512(top[j].v, _mm512_set1_epi64(-1))));
            });
            tied |= same << (8 * half);
        }
        detail::repeat<N>([&](auto j) { index[j] = load_words<U>(&line[j][0]); });
        transpose(index);
        detail::repeat<16>([&](auto t) { store_words(&chosen[t][0], index[t]); });
        return tied;
    }
    /// The N largest keys of 16 places of each of eight rows, falling.
    template <int N> KEEL_FN void take_keys(int64_t row, int64_t first, detail::wide_keys* top, detail::wide_keys& lost) {
        __m512i low[8], high[8];
        detail::repeat<8>([&](auto i) {
            int64_t const left = found[row + i] - first;
            auto const there = static_cast<__mmask16>(left >= 16 ? 0xffffu : left <= 0 ? 0u : (1u << left) - 1u);
            __m512i const v = _mm512_maskz_loadu_epi32(there, &number[row + i][first]), p = _mm512_maskz_loadu_epi32(there, &inverse[row + i][first]);
            __m512i const flip = _mm512_or_si512(_mm512_srai_epi32(v, 31), _mm512_set1_epi32(static_cast<int>(sign_bit)));
            __m512i const w = _mm512_maskz_xor_epi32(there, v, flip); // ordered_word
            low[i] = _mm512_unpacklo_epi32(p, w), high[i] = _mm512_unpackhi_epi32(p, w);
        });
        detail::wide_keys key[16];
        detail::transpose_keys(low, key), detail::transpose_keys(high, key + 8);
        detail::sort_lanes<N>(key);
        if constexpr (N == 8) detail::sort_lanes<N>(key + 8), detail::keep_largest<N>(key, key + 8, lost);
        detail::repeat<N>([&](auto i) { top[i] = key[i]; });
    }
};

} // namespace keel::inline KEEL_ABI

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
