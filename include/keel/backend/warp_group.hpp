// A row owned by W threads of 8 slots each: the shape of a CUDA warp. The same source is the device group
// (warp = one thread's view, lanes run beside each other) and its lockstep emulation on the host (warp = all lanes at once).
//
// `Warp` supplies what differs: value/words (a float, or an array over lanes), each_lane(f), shuffle_xor, pick, broadcast.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/row_memory.hpp>
#include <keel/core/reduce.hpp>

namespace keel::inline KEEL_ABI {

template <class Warp> struct warp_group {
    static constexpr int threads = Warp::width;
    static constexpr int slots_per_thread = 8;
    static constexpr int span = threads * slots_per_thread;                     ///< elements a whole step
    static constexpr int team = reduction_lanes / slots_per_thread;             ///< threads that own a segment
    static constexpr int segments_at_once = threads / team;
    static_assert(threads >= team && (threads & (threads - 1)) == 0, "a warp is a power of two, and 16 threads or more own a row");

    using lane_value = typename Warp::value;
    using lane_words = typename Warp::words;
    using value = slots<lane_value, slots_per_thread>;
    using words = slots<lane_words, slots_per_thread>;

    /// Elements [i, i + span), 8 adjacent ones a thread; in_segments: each team of 16 threads in a segment of its own.
    struct at_step {
        int64_t i, n;
        bool in_segments;
        KEEL_FN int64_t first_of(int lane) const {
            return in_segments ? i + int64_t{lane / team} * reduction_segment + int64_t{lane % team} * slots_per_thread
                               : i + static_cast<int64_t>(lane) * slots_per_thread;
        }
    };

    KEEL_FN bool leader() const { return Warp::leader(); }

    // --- memory ------------------------------------------------------------------------------------------------------

    template <class T> KEEL_FN value load(T const* p, at_step at) const { return load(strided<T const>{p, 1}, at); }
    template <scattered_row P> KEEL_FN value load(P p, at_step at) const {
        value v;
        Warp::each_lane([&](int lane) {
            int64_t const first = at.first_of(lane);
            for (int k = 0; k < slots_per_thread; ++k)
                Warp::of(v.s[k], lane) = first + k < at.n ? load_element(p.element(first + k)) : 0.0f;
        });
        return v;
    }
    template <auto... Policy, class T> KEEL_FN void store(T* p, at_step at, value const& v) const {
        store<Policy...>(strided<T>{p, 1}, at, v);
    }
    template <auto... Policy, scattered_row P> KEEL_FN void store(P p, at_step at, value const& v) const {
        Warp::each_lane([&](int lane) {
            int64_t const first = at.first_of(lane);
            for (int k = 0; k < slots_per_thread; ++k)
                if (first + k < at.n) store_element<Policy...>(p.element(first + k), Warp::of(v.s[k], lane));
        });
    }
    template <class P> KEEL_FN void store_code(P p, at_step at, words const& u) const {
        Warp::each_lane([&](int lane) {
            int64_t const first = at.first_of(lane);
            for (int k = 0; k < slots_per_thread; ++k)
                if (first + k < at.n) store_bits(element_of(p, first + k), Warp::of(u.s[k], lane));
        });
    }
    template <class T> KEEL_FN void prefetch(T const*, at_step) const {}
    template <class T> KEEL_FN void copy(T* to, T const* from, int64_t n) const {
        Warp::each_lane([&](int lane) {
            for (int64_t i = lane; i < n; i += threads) to[i] = from[i];
        });
    }
    KEEL_FN void sync() const { Warp::sync(); }
    KEEL_FN value inside(at_step at, value const& v) const { return kept(at, v, 0.0f); }
    KEEL_FN words inside(at_step at, words const& u) const { return kept(at, u, 0u); }
    KEEL_FN words position(at_step at) const {
        words u;
        Warp::each_lane([&](int lane) {
            for (int k = 0; k < slots_per_thread; ++k) Warp::of(u.s[k], lane) = static_cast<uint32_t>(at.first_of(lane) + k);
        });
        return u;
    }

    // --- walks -------------------------------------------------------------------------------------------------------

    template <class Body> KEEL_FN void each(int64_t n, Body body) const {
        for (int64_t i = 0; i < n; i += span) body(at_step{i, n, false});
    }

    KEEL_FN static constexpr bool holds(int64_t n) { return n <= reduction_lanes; } // one step of a team, in both walks

    template <class Term> KEEL_FN float sum(int64_t n, Term term) const {
        float total = 0.0f;
        for (int64_t begin = 0; begin < n; begin += segments_at_once * reduction_segment) {
            value acc(0.0f);
            for (int64_t i = 0; i < reduction_segment; i += reduction_lanes) {
                at_step const at{begin + i, n, true};
                // A step past the end of the row changes nothing; skipping it also keeps -0 terms out.
                if (at.i < n || segments_at_once > 1) acc = guarded(at, term(acc, at), acc);
            }
            lane_value const folded = fold(acc);
            for (int s = 0; s < segments_at_once; ++s) total = add(total, Warp::broadcast(folded, s * team));
        }
        return canonical(total);
    }

    template <int N, class Term> KEEL_FN row_sums<N> sums(int64_t n, Term term) const {
        row_sums<N> total;
        for (int64_t begin = 0; begin < n; begin += segments_at_once * reduction_segment) {
            value acc[std::size_t{N}], next[std::size_t{N}];
            for (int k = 0; k < N; ++k) acc[k] = value(0.0f);
            for (int64_t i = 0; i < reduction_segment; i += reduction_lanes) {
                at_step const at{begin + i, n, true};
                if (at.i >= n && segments_at_once == 1) continue;
                for (int k = 0; k < N; ++k) next[k] = acc[k];
                term(next, at);
                for (int k = 0; k < N; ++k) acc[k] = guarded(at, next[k], acc[k]);
            }
            for (int k = 0; k < N; ++k) {
                lane_value const folded = fold(acc[k]);
                for (int s = 0; s < segments_at_once; ++s) total.value[k] = add(total.value[k], Warp::broadcast(folded, s * team));
            }
        }
        for (int k = 0; k < N; ++k) total.value[k] = canonical(total.value[k]);
        return total;
    }

    // --- uniform results ---------------------------------------------------------------------------------------------

    KEEL_FN bool any(mask_of<value> const& m) const {
        mask_of<lane_value> some = m.s[0];
        for (int k = 1; k < slots_per_thread; ++k) some = either(some, m.s[k]);
        return Warp::any(some);
    }
    KEEL_FN bool any(mask_of<lane_value> const& m) const { return Warp::any(m); }
    KEEL_FN bool any(bool m) const
        requires(!std::is_same_v<mask_of<lane_value>, bool>)
    {
        return m;
    }
    KEEL_FN uint32_t max_bits(words const& u) const {
        lane_words m = u.s[0];
        for (int k = 1; k < slots_per_thread; ++k) m = umax(m, u.s[k]);
        return max_bits(m);
    }
    KEEL_FN uint32_t max_bits(uint32_t u) const
        requires(!std::is_same_v<lane_words, uint32_t>)
    {
        return u;
    }
    KEEL_FN uint32_t max_bits(lane_words m) const {
        for (int half = threads / 2; half > 0; half /= 2) m = umax(m, Warp::shuffle_xor(m, half));
        return Warp::broadcast(m, 0);
    }
    KEEL_FN int64_t total(words const& u) const {
        lane_words sum = u.s[0];
        for (int k = 1; k < slots_per_thread; ++k) sum = sum + u.s[k];
        return total(sum);
    }
    KEEL_FN int64_t total(lane_words sum) const {
        for (int half = threads / 2; half > 0; half /= 2) sum = sum + Warp::shuffle_xor(sum, half);
        return static_cast<int64_t>(Warp::broadcast(sum, 0));
    }

    template <class Keys> KEEL_FN int64_t arg_max(int64_t n, Keys keys) const {
        words first(0u), second(0u), index(0xffffffffu);
        each(n, [&](at_step at) {
            auto const k = keys(at);
            words const p = inside(at, k.primary), s = inside(at, k.secondary), here = position(at);
            auto better = gt(p, first) | (eq(p, first) & gt(s, second)) | eq(index, words(0xffffffffu));
            better = better & gt(words(static_cast<uint32_t>(n)), here);
            first = select(better, p, first);
            second = select(better, s, second);
            index = select(better, here, index);
        });
        uint32_t const top = max_bits(first);
        second = select(eq(first, words(top)), second, words(0u));
        index = select(eq(first, words(top)), index, words(0xffffffffu));
        uint32_t const next = max_bits(second);
        index = select(eq(second, words(next)), index, words(0xffffffffu));
        return static_cast<int64_t>(~max_bits(index ^ words(0xffffffffu)));
    }

    // --- blocks ------------------------------------------------------------------------------------------------------

    /// A step of the warp holds span / B blocks, each owned by a team of B / 8 threads, where that comes out even; else the whole
    /// warp walks one block at a time.
    template <int B> static constexpr bool has_teams = B >= slots_per_thread && B <= span && (B & (B - 1)) == 0;
    template <int B> using block_lane_words = std::conditional_t<has_teams<B>, lane_words, uint32_t>;

    struct warp_block {
        using lane = float;
        using lane_words = uint32_t;
        warp_group const& g;
        int64_t i, end, index;

        template <class Body> KEEL_FN void each(Body body) const {
            for (int64_t k = i; k < end; k += span) body(at_step{k, end, false});
        }
        KEEL_FN uint32_t max_bits(words const& u) const { return g.max_bits(u); }
        KEEL_FN uint32_t total(words const& u) const { return static_cast<uint32_t>(g.total(u)); }
        template <auto... Policy, class P> KEEL_FN void put(P p, float v) const {
            if (g.leader()) store_element<Policy...>(element_of(p, index), v);
        }
        template <class P> KEEL_FN void put_word(P p, uint32_t u) const {
            if (g.leader()) store_bits(element_of(p, index), u);
        }
        template <class P> KEEL_FN float get(P p) const { return load_element(element_of(p, index)); }
        KEEL_FN bool valid() const { return true; }
        KEEL_FN static value spread(float v) { return value(v); }
    };

    template <int B> struct team_block {
        static constexpr int block_team = B / slots_per_thread;
        using lane = lane_value;
        using lane_words = warp_group::lane_words;
        at_step at;

        template <class Body> KEEL_FN void each(Body body) const { body(at); }
        KEEL_FN lane_words max_bits(words const& u) const {
            lane_words m = u.s[0];
            for (int k = 1; k < slots_per_thread; ++k) m = umax(m, u.s[k]);
            for (int half = block_team / 2; half > 0; half /= 2) m = umax(m, Warp::shuffle_xor(m, half));
            return m;
        }
        KEEL_FN lane_words total(words const& u) const {
            lane_words sum = u.s[0];
            for (int k = 1; k < slots_per_thread; ++k) sum = sum + u.s[k];
            for (int half = block_team / 2; half > 0; half /= 2) sum = sum + Warp::shuffle_xor(sum, half);
            return sum;
        }
        template <auto... Policy, class P> KEEL_FN void put(P p, lane_value const& v) const {
            each_owner([&](int l, int64_t index) { store_element<Policy...>(element_of(p, index), Warp::of(v, l)); });
        }
        template <class P> KEEL_FN void put_word(P p, lane_words const& u) const {
            each_owner([&](int l, int64_t index) { store_bits(element_of(p, index), Warp::of(u, l)); });
        }
        template <class P> KEEL_FN lane_value get(P p) const {
            lane_value v(0.0f);
            Warp::each_lane([&](int l) {
                int64_t const first = at.first_of(l);
                if (first < at.n) Warp::of(v, l) = load_element(element_of(p, first / B));
            });
            return v;
        }
        KEEL_FN mask_of<lane_value> valid() const {
            lane_words inside(0u);
            Warp::each_lane([&](int l) { Warp::of(inside, l) = at.first_of(l) < at.n ? 1u : 0u; });
            return eq(inside, lane_words(1u));
        }
        KEEL_FN static value spread(lane_value const& v) {
            value r;
            for (int k = 0; k < slots_per_thread; ++k) r.s[k] = v;
            return r;
        }

      private:
        /// body(lane, block) in the first lane of each block that lies in the row.
        template <class Body> KEEL_FN void each_owner(Body body) const {
            Warp::each_lane([&](int l) {
                int64_t const first = at.first_of(l);
                if (l % block_team == 0 && first < at.n) body(l, first / B);
            });
        }
    };
    template <int B, class Body> KEEL_FN void blocks(int64_t n, Body body) const {
        if constexpr (has_teams<B>) {
            for (int64_t i = 0; i < n; i += span) body(team_block<B>{at_step{i, n, false}});
        } else {
            for (int64_t i = 0; i < n; i += B) body(warp_block{*this, i, n - i < B ? n : i + B, i / B});
        }
    }

  private:
    template <class V, class S> KEEL_FN static V kept(at_step at, V const& v, S zero) {
        V r;
        Warp::each_lane([&](int lane) {
            for (int k = 0; k < slots_per_thread; ++k)
                Warp::of(r.s[k], lane) = at.first_of(lane) + k < at.n ? Warp::of(v.s[k], lane) : zero;
        });
        return r;
    }
    /// `next` where the element exists, `before` elsewhere.
    KEEL_FN static value guarded(at_step at, value const& next, value const& before) {
        value r;
        Warp::each_lane([&](int lane) {
            for (int k = 0; k < slots_per_thread; ++k)
                Warp::of(r.s[k], lane) = at.first_of(lane) + k < at.n ? Warp::of(next.s[k], lane) : Warp::of(before.s[k], lane);
        });
        return r;
    }
    /// The halving tree over a segment's 128 lanes; lane = thread * 8 + slot, so thread bits come first. Threads that exchange
    /// also halve their slots (each keeps the half it will need), so 4 + 2 + 1 + 1 shuffles do instead of 8 * 4.
    KEEL_FN static lane_value fold(value const& v) {
        lane_value a[4], b[2];
        for (int k = 0; k < 4; ++k) {
            lane_value const keep = Warp::pick(team / 2, v.s[k + 4], v.s[k]), send = Warp::pick(team / 2, v.s[k], v.s[k + 4]);
            a[k] = add(keep, Warp::shuffle_xor(send, team / 2));
        }
        for (int k = 0; k < 2; ++k) {
            lane_value const keep = Warp::pick(team / 4, a[k + 2], a[k]), send = Warp::pick(team / 4, a[k], a[k + 2]);
            b[k] = add(keep, Warp::shuffle_xor(send, team / 4));
        }
        lane_value const keep = Warp::pick(team / 8, b[1], b[0]), send = Warp::pick(team / 8, b[0], b[1]);
        lane_value c = add(keep, Warp::shuffle_xor(send, team / 8));
        for (int half = team / 16; half > 0; half /= 2) c = add(c, Warp::shuffle_xor(c, half));
        // What were the slot's bits 2, 1, 0 now sit in the thread's upper bits.
        for (int half = team / 2; half >= team / 8; half /= 2) c = add(c, Warp::shuffle_xor(c, half));
        return c;
    }
};

} // namespace keel::inline KEEL_ABI
