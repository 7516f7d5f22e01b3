// What a quantiser does with every element of a block, as calls on a group: the largest magnitude, the codes of the scaled elements,
// and back. The loops here are the definition; where a backend knows a quicker way to the same bits it overloads them
// (cpu/scaled_codes_x86.hpp).
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/backend/row_memory.hpp>

namespace keel::inline KEEL_ABI {

/// The rows of a matrix whose elements are adjacent: row -> pointer.
template <class T> struct adjacent_rows {
    using value = std::remove_const_t<T>;
    view<T, 2> v;
    KEEL_FN T* operator()(int64_t row) const { return v.at(row); }
};
/// The rows of a matrix by any strides.
template <class T> struct spread_rows {
    using value = std::remove_const_t<T>;
    view<T, 2> v;
    KEEL_FN strided<T> operator()(int64_t row) const { return {v.at(row), v.stride[1]}; }
};

/// The largest |x| of the block of row p as words, lane by lane (b.max_bits makes one of them); NaN above Inf above all.
template <class G, class Block, class P> KEEL_FN typename G::words largest_magnitude(G const& g, Block const& b, P p) {
    typename G::words top(0u);
    b.each([&](auto at) { top = umax(top, magnitude(g.load(p, at))); });
    return top;
}

/// Counts elements other than zero whose code is zero.
template <class Code, class U> KEEL_FN U flushed_to_zero(U const& element, U const& code) {
    using traits = format_traits<Code>;
    constexpr uint32_t sign = traits::has_negative_zero ? 0 : traits::sign_code; // without -0 that code is another's, or none
    auto const is_zero = eq(code & U(traits::magnitude_code | sign), U(0u));
    return select(both(is_zero, gt(element & U(magnitude_mask), U(0u))), U(1u), U(0u));
}

/// code = encode_bounded(x * multiplier) for the block's elements of row `from`, all finite and within the code's range once scaled. Adds to
/// `flushed`, lane by lane, the elements other than zero whose code is zero.
template <class Code, class G, class Block, class From, class To>
KEEL_FN void encode_scaled(G const& g, Block const& b, From from, To to, typename G::value const& multiplier, typename G::words& flushed) {
    using U = typename G::words;
    b.each([&](auto at) {
        auto const v = g.load(from, at);
        U const code = encode_bounded_words<Code>(v * multiplier);
        g.store_code(to, at, code);
        flushed = flushed + flushed_to_zero<Code>(bits(v), code);
    });
}
/// The same for rows [first, last) of a block.
template <class Code, class G, class Block, class From, class To>
KEEL_FN void encode_scaled_rows(G const& g, Block const& b, From const& from, To const& to, int64_t first, int64_t last,
                                typename G::value const& multiplier, typename G::words& flushed) {
    for (int64_t row = first; row < last; ++row) encode_scaled<Code>(g, b, from(row), to(row), multiplier, flushed);
}

/// The same for all blocks of C of a row of n elements, block b by multipliers[b].
template <int C, class G, class X, class Code>
KEEL_FN void encode_blocks(G const& g, X const* from, Code* to, int64_t n, float const* multipliers, typename G::words& flushed) {
    g.template blocks<C>(n, [&](auto const& b) { encode_scaled<Code>(g, b, from, to, b.spread(b.get(multipliers)), flushed); });
}

// The same for a tile: some rows of a matrix, some columns wide, that stay in the first-level cache.

template <class T> struct tile {
    T* p;
    int64_t pitch, rows, columns;
};

/// top[row * blocks + b] = the largest |x| of block b of C elements of each row, as a float; NaN above Inf above all.
template <int C, class G, class X> KEEL_FN void largest_of_tile(G const& g, tile<X const> const& x, float* top) {
    int64_t const blocks = (x.columns + C - 1) / C;
    for (int64_t row = 0; row < x.rows; ++row)
        g.template blocks<C>(x.columns, [&](auto const& b) {
            b.put(top + row * blocks, as_float(b.max_bits(largest_magnitude(g, b, x.p + row * x.pitch))));
        });
}
/// encode_blocks of the rows of a tile by multipliers[row * blocks + b].
template <int C, class G, class X, class Code>
KEEL_FN void encode_tile(G const& g, tile<X const> const& x, tile<Code> const& to, float const* multipliers, typename G::words& flushed) {
    int64_t const blocks = (x.columns + C - 1) / C;
    for (int64_t row = 0; row < x.rows; ++row)
        encode_blocks<C>(g, x.p + row * x.pitch, to.p + row * to.pitch, x.columns, multipliers + row * blocks, flushed);
}
/// encode_tile of one tile and largest_of_tile of the next. `after` is where the first row of the one after that lies, if anywhere.
template <int C, class G, class X, class Code>
KEEL_FN void encode_tile_and_look(G const& g, tile<X const> const& x, tile<Code> const& to, float const* multipliers,
                                  typename G::words& flushed, tile<X const> const& next, [[maybe_unused]] X const* after, float* next_top) {
    encode_tile<C>(g, x, to, multipliers, flushed);
    largest_of_tile<C>(g, next, next_top);
}

// The same for columns, each with a scale of its own: n of them beside each other, their numbers in arrays of floats.

/// top[j] = max(top[j], |x|) over `rows` rows of column j, the first at p; magnitudes as floats, NaN above Inf above all.
template <class G, class X>
KEEL_FN void raise_largest(G const& g, X const* p, int64_t pitch, int64_t rows, int64_t n, float* top) {
    g.each(n, [&](auto at) {
        auto largest = magnitude(g.load(static_cast<float const*>(top), at));
        for (int64_t row = 0; row < rows; ++row) largest = umax(largest, magnitude(g.load(p + row * pitch, at)));
        g.store(top, at, as_float(largest));
    });
}

/// Brings n multipliers into the order in which encode_columns<X, Code> of this group wants them.
template <class X, class Code, class G> KEEL_FN void arrange_multipliers(G const&, float*, int64_t) {}

/// codes of a row: code = encode_bounded(x * multiplier of the column), flushed as in encode_scaled. All finite and within range.
template <class G, class X, class Code>
KEEL_FN void encode_columns(G const& g, X const* from, Code* to, int64_t n, float const* multipliers,
                            typename G::words& flushed) {
    using U = typename G::words;
    g.each(n, [&](auto at) {
        auto const v = g.load(from, at);
        U const code = encode_bounded_words<Code>(v * g.load(multipliers, at));
        g.store_code(to, at, code);
        flushed = flushed + flushed_to_zero<Code>(bits(v), code);
    });
}

/// The same for `rows` rows whose codes are turned: those of column j adjacent, from to + j * to_pitch on.
template <class G, class X, class Code>
KEEL_FN void encode_columns_turned(G const& g, X const* from, int64_t pitch, int64_t rows, Code* to, int64_t to_pitch, int64_t n,
                                   float const* multipliers, typename G::words& flushed) {
    using U = typename G::words;
    for (int64_t row = 0; row < rows; ++row)
        g.each(n, [&](auto at) {
            auto const v = g.load(from + row * pitch, at);
            U const code = encode_bounded_words<Code>(v * g.load(multipliers, at));
            g.store_code(strided<Code>{to + row, to_pitch}, at, code);
            flushed = flushed + flushed_to_zero<Code>(bits(v), code);
        });
}

// Both at once: blocks of C elements along the rows and one a column.

/// raise_largest for `rows` rows, and block_top[row * blocks + b] = the largest |x| of block b of each, as a float.
template <int C, class G, class X>
KEEL_FN void raise_both(G const& g, X const* p, int64_t pitch, int64_t rows, int64_t n, float* column_top, float* block_top, int64_t blocks) {
    for (int64_t row = 0; row < rows; ++row)
        g.template blocks<C>(n, [&](auto const& b) {
            typename G::words top(0u);
            b.each([&](auto at) {
                auto const m = magnitude(g.load(p + row * pitch, at));
                top = umax(top, m);
                g.store(column_top, at, as_float(umax(m, magnitude(g.load(static_cast<float const*>(column_top), at)))));
            });
            b.put(block_top + row * blocks, as_float(b.max_bits(top)));
        });
}

/// encode_blocks and encode_columns of the same row. `after` is where a row lies that will be wanted, if anywhere.
template <int C, class G, class X, class Code>
KEEL_FN void encode_both(G const& g, X const* from, Code* along, Code* down, int64_t n, float const* block_multipliers,
                         float const* column_multipliers, typename G::words& flushed, [[maybe_unused]] X const* after) {
    encode_blocks<C>(g, from, along, n, block_multipliers, flushed);
    encode_columns(g, from, down, n, column_multipliers, flushed);
}

/// y = decode(code) * scale for the block's elements: one product in fp32, one rounding to y.
template <class G, class Block, class From, class To>
KEEL_FN void decode_scaled(G const& g, Block const& b, From from, To to, typename G::value const& scale) {
    b.each([&](auto at) { g.store(to, at, g.load(from, at) * scale); });
}

} // namespace keel::inline KEEL_ABI
