// The reference backend: one element at a time, THE reduction order in the plainest words. The executable specification
// that every other backend must match bit for bit; not an oracle (those live in the tests, in double).
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/row_memory.hpp>
#include <keel/core/reduce.hpp>

namespace keel::inline KEEL_ABI {

struct at_element {
    int64_t i;
};

struct reference_group {
    using value = float;
    using words = uint32_t;

    KEEL_FN bool leader() const { return true; }

    template <class T> KEEL_FN float load(T const* p, at_element at) const { return load_element(p + at.i); }
    template <scattered_row P> KEEL_FN float load(P p, at_element at) const { return load_element(p.element(at.i)); }
    template <auto... Policy, class T> KEEL_FN void store(T* p, at_element at, float v) const {
        store_element<Policy...>(p + at.i, v);
    }
    template <auto... Policy, scattered_row P> KEEL_FN void store(P p, at_element at, float v) const {
        store_element<Policy...>(p.element(at.i), v);
    }
    template <class P> KEEL_FN void store_code(P p, at_element at, uint32_t u) const { store_bits(element_of(p, at.i), u); }
    template <class T> KEEL_FN void prefetch(T const*, at_element) const {}
    template <class T> KEEL_FN void copy(T* to, T const* from, int64_t n) const {
        for (int64_t i = 0; i < n; ++i) to[i] = from[i];
    }
    KEEL_FN void sync() const {}
    KEEL_FN float inside(at_element, float v) const { return v; }
    KEEL_FN uint32_t inside(at_element, uint32_t u) const { return u; }
    KEEL_FN uint32_t position(at_element at) const { return static_cast<uint32_t>(at.i); }

    template <class Body> KEEL_FN void each(int64_t n, Body body) const {
        for (int64_t i = 0; i < n; ++i) body(at_element{i});
    }

    KEEL_FN static constexpr bool holds(int64_t n) { return n <= 1; }

    template <class Term> KEEL_FN float sum(int64_t n, Term term) const {
        float total = 0.0f;
        for (int64_t begin = 0; begin < n; begin += reduction_segment) {
            float lane[reduction_lanes] = {};
            for (int64_t i = begin; i < n && i < begin + reduction_segment; ++i) {
                float& acc = lane[(i - begin) % reduction_lanes];
                acc = term(acc, at_element{i});
            }
            total = add(total, fold_lanes(lane));
        }
        return canonical(total);
    }

    template <int N, class Term> KEEL_FN row_sums<N> sums(int64_t n, Term term) const {
        row_sums<N> total;
        for (int64_t begin = 0; begin < n; begin += reduction_segment) {
            float lane[reduction_lanes][std::size_t{N}] = {};
            for (int64_t i = begin; i < n && i < begin + reduction_segment; ++i)
                term(lane[(i - begin) % reduction_lanes], at_element{i});
            for (int k = 0; k < N; ++k) {
                float column[reduction_lanes];
                for (int l = 0; l < reduction_lanes; ++l) column[l] = lane[l][k];
                total.value[k] = add(total.value[k], fold_lanes(column));
            }
        }
        for (int k = 0; k < N; ++k) total.value[k] = canonical(total.value[k]);
        return total;
    }

    KEEL_FN bool any(bool m) const { return m; }
    KEEL_FN uint32_t max_bits(uint32_t u) const { return u; }
    KEEL_FN int64_t total(uint32_t u) const { return static_cast<int64_t>(u); }

    template <class Keys> KEEL_FN int64_t arg_max(int64_t n, Keys keys) const {
        int64_t best = 0;
        arg_max_keys<uint32_t> top = keys(at_element{0});
        for (int64_t i = 1; i < n; ++i) {
            arg_max_keys<uint32_t> const k = keys(at_element{i});
            if (k.primary > top.primary || (k.primary == top.primary && k.secondary > top.secondary)) best = i, top = k;
        }
        return best;
    }

    template <int B> using block_lane_words = uint32_t;

    template <int B> struct block {
        using lane = float;
        using lane_words = uint32_t;
        int64_t i, count, index;

        template <class Body> KEEL_FN void each(Body body) const {
            for (int64_t k = 0; k < count; ++k) body(at_element{i + k});
        }
        KEEL_FN uint32_t max_bits(uint32_t u) const { return u; }
        KEEL_FN uint32_t total(uint32_t u) const { return u; }
        template <auto... Policy, class P> KEEL_FN void put(P p, float v) const { store_element<Policy...>(element_of(p, index), v); }
        template <class P> KEEL_FN void put_word(P p, uint32_t u) const { store_bits(element_of(p, index), u); }
        template <class P> KEEL_FN float get(P p) const { return load_element(element_of(p, index)); }
        KEEL_FN bool valid() const { return true; }
        KEEL_FN static float spread(float v) { return v; }
    };
    template <int B, class Body> KEEL_FN void blocks(int64_t n, Body body) const {
        for (int64_t i = 0; i < n; i += B) body(block<B>{i, n - i < B ? n - i : B, i / B});
    }
};

} // namespace keel::inline KEEL_ABI

namespace keel {

/// The scalar specification of every primitive. Rows and tasks run in order on the calling thread.
struct reference {
    KEEL_FN int64_t concurrency() const { return 1; }
    KEEL_FN reference alone() const { return {}; }
    template <class Kernel> KEEL_FN void for_rows(int64_t row_count, int64_t, Kernel const& kernel) const {
        reference_group const group{};
        for (int64_t row = 0; row < row_count; ++row) kernel(group, row);
    }
    template <class Task> KEEL_FN void for_tasks(int64_t n, Task const& task) const {
        for (int64_t i = 0; i < n; ++i) task(i, 0);
    }
};

template <> struct backend_traits<reference> {
    static constexpr bool is_backend = true;
    static constexpr bool asynchronous = false;
    static constexpr bool elementwise = true;
    static constexpr memory_space space = memory_space::host;
};

} // namespace keel
