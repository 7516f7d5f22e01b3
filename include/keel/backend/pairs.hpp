// Rows walked by pairs of neighbours, for codes of which two share a byte: lane i owns elements 2i and 2i + 1, so no byte has two owners.
// The functions here are the definition; where a backend knows a quicker way to the same bits it overloads them.
#pragma once

#include <keel/backend/row_memory.hpp>

namespace keel::inline KEEL_ABI {

/// Elements odd, odd + 2, ... of a row as a scattered_row; where there is none, the row's last element.
template <class T> struct every_second {
    T* data;
    int64_t odd, last;
    KEEL_FN T* element(int64_t i) const { return data + (2 * i + odd < last ? 2 * i + odd : last); }
};

/// A lane's two neighbours.
template <class V> struct neighbours { V even, odd; };

/// True in the lane whose pair lacks its odd element: the last of an odd row of n.
template <class G, class At> KEEL_FN auto is_alone(G const& g, At at, int64_t n) {
    using U = typename G::words;
    return eq(g.position(at), U(n % 2 == 0 ? 0xffffffffu : static_cast<uint32_t>(n / 2)));
}

/// Elements 2i and 2i + 1 of the row of n at p, +0 past its end; at walks (n + 1) / 2 pairs.
template <class G, class T, class At> KEEL_FN neighbours<typename G::value> load_pair(G const& g, T const* p, At at, int64_t n) {
    using F = typename G::value;
    F const odd = g.load(every_second<T const>{p, 1, n - 1}, at);
    return {g.load(every_second<T const>{p, 0, n - 1}, at), select(is_alone(g, at, n), F(0.0f), odd)};
}

/// The same as a store. Nothing is written past the row's end: a lane alone writes its even element twice.
template <class G, class T, class At> KEEL_FN void store_pair(G const& g, T* p, At at, int64_t n, neighbours<typename G::value> const& v) {
    g.store(every_second<T>{p, 0, n - 1}, at, v.even);
    g.store(every_second<T>{p, 1, n - 1}, at, select(is_alone(g, at, n), v.even, v.odd));
}

/// Blocks of eight pairs along a row, as g.blocks gives them; `words` has one for each block that is worked on at a time.
template <class G> struct eight_pairs {
    using words = typename G::template block_lane_words<8>;
    template <class Body> KEEL_FN static void each(G const& g, int64_t pairs, Body body) { g.template blocks<8>(pairs, body); }
};

} // namespace keel::inline KEEL_ABI
