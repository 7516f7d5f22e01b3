// A row owned by one CPU thread and its SIMD registers.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/cpu/copy_bytes.hpp>
#include <keel/backend/cpu/pack.hpp>
#include <keel/backend/cpu/pack_multiply.hpp>
#include <keel/backend/row_memory.hpp>
#include <keel/core/reduce.hpp>

namespace keel::inline KEEL_ABI {

/// A whole pack of the row, from element i on.
struct at_full {
    int64_t i;
};
/// The row's last elements: `count` of them, fewer than a pack.
struct at_tail {
    int64_t i;
    int64_t count;
};

/// How far ahead of a whole pack its row's memory is asked for. The hardware's own prefetch stops at every page, where one thread then
/// waits: at 64 MB this takes rms_norm from 0.33 to 0.45 of a copy; in the caches it costs a few per cent.
inline constexpr int64_t prefetch_bytes = 2048;
template <class T> KEEL_FN T const* ahead_of(T const* p) { return address(p, 0, prefetch_bytes); }
template <class T> KEEL_FN void prefetch_read(T const* p) { __builtin_prefetch(ahead_of(p)); }
template <class T> KEEL_FN void prefetch_write(T* p) { __builtin_prefetch(ahead_of(p), 1); }

template <class Arch> struct cpu_row_group {
    using value = pack<Arch>;
    using words = bits_of<value>;
    static constexpr int width = Arch::width;
    static constexpr int registers = reduction_lanes / width; ///< accumulators of one segment
    bool streams = false; ///< outputs are larger than the caches: whole lines of them may go past

    KEEL_FN bool leader() const { return true; }

    // --- memory ------------------------------------------------------------------------------------------------------

    template <class T> KEEL_FN value load(T const* p, at_full at) const {
        prefetch_read(p + at.i);
        return load_pack<value>(p + at.i);
    }
    template <class T> KEEL_FN value load(T const* p, at_tail at) const { return load_pack_partial<value>(p + at.i, at.count); }
    template <scattered_row P, class At> KEEL_FN value load(P p, At at) const {
        std::remove_cvref_t<decltype(*p.element(0))> line[std::size_t{width}] = {};
        for (int64_t k = 0; k < count_of(at); ++k) line[k] = *p.element(at.i + k);
        return load_pack<value>(line);
    }

    template <class T, int B, class At>
        requires(B % width == 0) // packs start at multiples of their width
    KEEL_FN value load(repeated<T, B> p, At at) const {
        value const all(load_element(p.element(at.i)));
        return inside(at, all);
    }

    template <auto... Policy, class T> KEEL_FN void store(T* p, at_full at, value const& v) const {
        if constexpr (can_stream<T>)
            if (streams && reinterpret_cast<uintptr_t>(p + at.i) % (sizeof(T) * std::size_t{width}) == 0)
                return stream_pack<Policy...>(p + at.i, v);
        prefetch_write(p + at.i);
        store_pack<Policy...>(p + at.i, v);
    }
    template <auto... Policy, class T> KEEL_FN void store(T* p, at_tail at, value const& v) const {
        store_pack_partial<Policy...>(p + at.i, v, at.count);
    }
    template <auto... Policy, scattered_row P, class At> KEEL_FN void store(P p, At at, value const& v) const {
        std::remove_cvref_t<decltype(*p.element(0))> line[std::size_t{width}];
        store_pack<Policy...>(line, v);
        for (int64_t k = 0; k < count_of(at); ++k) *p.element(at.i + k) = line[k];
    }
    template <class T> KEEL_FN void store_code(T* p, at_full at, words const& u) const { store_words(storage_of(p + at.i), u); }
    template <class T> KEEL_FN void store_code(T* p, at_tail at, words const& u) const {
        store_words_partial(storage_of(p + at.i), u, at.count);
    }
    template <scattered_row P, class At> KEEL_FN void store_code(P p, At at, words const& u) const {
        uint32_t line[std::size_t{width}];
        store_words(&line[0], u);
        for (int64_t k = 0; k < count_of(at); ++k) store_bits(p.element(at.i + k), line[k]);
    }
    template <class T> KEEL_FN void prefetch(T const* p, at_full at) const { __builtin_prefetch(p + at.i); }
    template <class T> KEEL_FN void prefetch(T const*, at_tail) const {}
    template <class T> KEEL_FN void copy(T* to, T const* from, int64_t n) const {
        copy_bytes(to, from, n * static_cast<int64_t>(sizeof(T)), streams);
    }
    KEEL_FN void sync() const {}

    KEEL_FN static int64_t count_of(at_full) { return width; }
    KEEL_FN static int64_t count_of(at_tail at) { return at.count; }

    KEEL_FN value inside(at_full, value const& v) const { return v; }
    KEEL_FN value inside(at_tail at, value const& v) const { return as_float(inside(at, bits(v))); }
    KEEL_FN words inside(at_full, words const& u) const { return u; }
    KEEL_FN words inside(at_tail at, words const& u) const {
        return select(gt(words(static_cast<uint32_t>(at.count)), iota<words>()), u, words(0u));
    }
    template <class At> KEEL_FN words position(At at) const { return iota<words>() + words(static_cast<uint32_t>(at.i)); }

    // --- walks -------------------------------------------------------------------------------------------------------

    template <class Body> KEEL_FN void each(int64_t n, Body body) const {
        int64_t i = 0;
        for (; i + width <= n; i += width) body(at_full{i});
        if constexpr (width > 1)
            if (i < n) body(at_tail{i, n - i});
    }

    KEEL_FN static constexpr bool holds(int64_t n) { return n <= width; }

    template <class Term> KEEL_FN float sum(int64_t n, Term term) const {
        float total = 0.0f;
        for (int64_t begin = 0; begin < n; begin += reduction_segment) {
            int64_t const end = begin + reduction_segment < n ? begin + reduction_segment : n;
            value acc[std::size_t{registers}];
            for (int64_t r = 0; r < registers; ++r) acc[r] = value(0.0f);
            int64_t i = begin;
            for (; i + reduction_lanes <= end; i += reduction_lanes)
                for (int64_t r = 0; r < registers; ++r) acc[r] = term(acc[r], at_full{i + r * width});
            for (int64_t r = 0; r < registers && i + r * width < end; ++r) {
                int64_t const left = end - i - r * width;
                if (left >= width) acc[r] = term(acc[r], at_full{i + r * width});
                else if constexpr (width > 1) acc[r] = term(acc[r], at_tail{i + r * width, left});
            }
            for (int half = registers / 2; half > 0; half /= 2)
                for (int64_t r = 0; r < half; ++r) acc[r] = acc[r] + acc[r + half];
            total = add(total, tree_sum(acc[0]));
        }
        return canonical(total);
    }

    template <int N, class Term> KEEL_FN row_sums<N> sums(int64_t n, Term term) const {
        row_sums<N> total;
        for (int64_t begin = 0; begin < n; begin += reduction_segment) {
            int64_t const end = begin + reduction_segment < n ? begin + reduction_segment : n;
            value acc[std::size_t{registers}][std::size_t{N}];
            for (int64_t r = 0; r < registers; ++r)
                for (int k = 0; k < N; ++k) acc[r][k] = value(0.0f);
            int64_t i = begin;
            for (; i + reduction_lanes <= end; i += reduction_lanes)
                for (int64_t r = 0; r < registers; ++r) term(acc[r], at_full{i + r * width});
            for (int64_t r = 0; r < registers && i + r * width < end; ++r) {
                int64_t const left = end - i - r * width;
                if (left >= width) term(acc[r], at_full{i + r * width});
                else if constexpr (width > 1) term(acc[r], at_tail{i + r * width, left});
            }
            for (int half = registers / 2; half > 0; half /= 2)
                for (int64_t r = 0; r < half; ++r)
                    for (int k = 0; k < N; ++k) acc[r][k] = acc[r][k] + acc[r + half][k];
            for (int k = 0; k < N; ++k) total.value[k] = add(total.value[k], tree_sum(acc[0][k]));
        }
        for (int k = 0; k < N; ++k) total.value[k] = canonical(total.value[k]);
        return total;
    }

    // --- uniform results ---------------------------------------------------------------------------------------------

    KEEL_FN bool any(mask_of<value> const& m) const { return value::machine::any(m.v); }
    KEEL_FN bool any(bool m) const { return m; }
    KEEL_FN uint32_t max_bits(words const& u) const { return max_word(u); }
    KEEL_FN uint32_t max_bits(uint32_t u) const { return u; }
    KEEL_FN int64_t total(words const& u) const { return sum_words(u); }

    template <class Keys> KEEL_FN int64_t arg_max(int64_t n, Keys keys) const {
        // Each lane keeps its first best pair, which is its lowest index; then lanes are compared, ties by index.
        words first(0u), second(0u), index(0xffffffffu);
        each(n, [&](auto at) {
            auto const k = keys(at);
            words const p = inside(at, k.primary), s = inside(at, k.secondary), here = position(at);
            auto const unset = eq(index, words(0xffffffffu));
            auto better = gt(p, first) | (eq(p, first) & gt(s, second)) | unset;
            better = better & gt(words(static_cast<uint32_t>(n)), here);
            first = select(better, p, first);
            second = select(better, s, second);
            index = select(better, here, index);
        });
        uint32_t const top = max_word(first);
        second = select(eq(first, words(top)), second, words(0u));
        index = select(eq(first, words(top)), index, words(0xffffffffu));
        uint32_t const next = max_word(second);
        index = select(eq(second, words(next)), index, words(0xffffffffu));
        return static_cast<int64_t>(~max_word(index ^ words(0xffffffffu)));
    }

    // --- blocks ------------------------------------------------------------------------------------------------------

    template <int B> using block_lane_words = uint32_t;

    /// B consecutive elements, fewer in the row's last block.
    template <int B> struct block {
        using lane = float; // a thread works on one block at a time
        using lane_words = uint32_t;
        static constexpr int size = B;
        int64_t i;     ///< first element
        int64_t count; ///< elements inside the row
        int64_t index; ///< number of the block in the row

        template <class Body> KEEL_FN void each(Body body) const {
            if (B % width == 0 && count == B) {
                for (int64_t k = 0; k < B / width; ++k) body(at_full{i + k * width});
                return;
            }
            int64_t k = 0;
            for (; k + width <= count; k += width) body(at_full{i + k});
            if constexpr (width > 1)
                if (k < count) body(at_tail{i + k, count - k});
        }
        KEEL_FN uint32_t max_bits(words const& u) const { return max_word(u); }
        KEEL_FN uint32_t total(words const& u) const { return static_cast<uint32_t>(sum_words(u)); }
        template <auto... Policy, class P> KEEL_FN void put(P p, float v) const { store_element<Policy...>(element_of(p, index), v); }
        template <class P> KEEL_FN void put_word(P p, uint32_t u) const { store_bits(element_of(p, index), u); }
        template <class P> KEEL_FN float get(P p) const { return load_element(element_of(p, index)); }
        KEEL_FN bool valid() const { return true; }
        KEEL_FN static value spread(float v) { return value(v); }
    };

    template <int B, class Body> KEEL_FN void blocks(int64_t n, Body body) const {
        for (int64_t i = 0; i < n; i += B) body(block<B>{i, n - i < B ? n - i : B, i / B}); // one copy of the body: half the code
    }

  private:
    template <class V, class T> KEEL_FN static V load_pack(T const* p) {
        if constexpr (std::is_same_v<T, float>) return keel::load<V>(p);
        else return decode_words<T, V>(load_words<words>(storage_of(p)));
    }
    template <class V, class T> KEEL_FN static V load_pack_partial(T const* p, int64_t n) {
        if constexpr (std::is_same_v<T, float>) return load_partial<V>(p, n);
        else return decode_words<T, V>(load_words_partial<words>(storage_of(p), n));
    }
    template <auto... Policy, class T> KEEL_FN static void store_pack(T* p, value const& v) {
        if constexpr (std::is_same_v<T, float>) keel::store(p, canonical(v));
        else store_words(storage_of(p), encode_words<T, Policy...>(v));
    }
    template <class T> static constexpr bool can_stream =
        requires(std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>* p, words u) {
            words::machine::stream_words(p, u.v);
        };
    template <auto... Policy, class T> KEEL_FN static void stream_pack(T* p, value const& v) {
        if constexpr (std::is_same_v<T, float>) words::machine::stream_words(reinterpret_cast<uint32_t*>(p), bits(canonical(v)).v);
        else words::machine::stream_words(storage_of(p), encode_words<T, Policy...>(v).v);
    }
    template <auto... Policy, class T> KEEL_FN static void store_pack_partial(T* p, value const& v, int64_t n) {
        if constexpr (std::is_same_v<T, float>) store_partial(p, canonical(v), n);
        else store_words_partial(storage_of(p), encode_words<T, Policy...>(v), n);
    }
};

} // namespace keel::inline KEEL_ABI
