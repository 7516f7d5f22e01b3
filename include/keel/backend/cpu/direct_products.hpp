// Small products of floats, straight from the operands' memory. Packing pays by reuse, and a small B has little: at 64 it takes a
// quarter of the time, at 16 half of it. The tile, and so the chain of every element, is that of the packed kernel (micro_kernel.hpp).
#pragma once

#include <keel/backend/cpu/matmul_plan.hpp>
#include <keel/backend/cpu/product_tiles.hpp>

namespace keel::inline KEEL_ABI::detail {

/// B's largest size for it, unless the rows are few: half of a second cache, from which B streams beside the products (0.92 of the packed
/// product's time at 256, 1.01 at 512, 0.8 at 64). More comes from farther with every tile of rows.
inline constexpr int64_t largest_direct_bytes = int64_t{1} << 19;
inline constexpr int64_t few_rows = 48; // of a product: so few hardly repay packing B, whatever its size

/// Whether products of floats are taken directly: B's rows adjacent and no narrower than a pack. Strides and shapes decide, but no bit
/// depends on it.
template <class A> KEEL_FN bool takes_directly(product_set const& set) {
    bool const ragged_rows = set.cut == ragged::rows;
    return set.options.form == product_form::full && (set.cut == ragged::none || ragged_rows) && set.b.column == 1 && set.k > 0 && set.n >= A::width &&
           (set.k * set.n * static_cast<int64_t>(sizeof(float)) <= largest_direct_bytes || set.m <= few_rows * (ragged_rows ? set.count : 1));
}

/// Products in chunks: some items, or a part of one item's rows and columns.
struct product_parts {
    product_set const& set;
    int64_t rows, columns, items;    ///< of a chunk
    int64_t row_parts, column_parts; ///< of an item

    /// Parts of at least `few` rows, as far as there are, and of all columns where `whole`, else in whole tiles.
    KEEL_FN product_parts(product_set const& products, int64_t few, bool whole, int64_t tile_row_count, int64_t tile_column_count) : set(products) {
        int64_t most = set.cut == ragged::none ? set.m : 1;
        for (int64_t i = 0; set.cut != ragged::none && i < set.count; ++i) most = larger(most, set.offsets[i + 1] - set.offsets[i]);
        constexpr int64_t work = int64_t{1} << 18; // multiplications: a few microseconds, many times what a chunk costs
        int64_t const depth = larger(1, set.k);
        columns = whole ? set.n : smaller(set.n, round_up(ceil_div(work, depth * few), tile_column_count));
        rows = round_up(larger(few, ceil_div(work, depth * columns)), tile_row_count);
        row_parts = ceil_div(most, rows), column_parts = ceil_div(set.n, columns);
        items = larger(1, row_parts * column_parts > 1 ? 1 : work / (most * columns * depth));
    }
    KEEL_FN int64_t chunks() const { return ceil_div(set.count, items) * row_parts * column_parts; }
    /// body(product, row, row_end, column, column_end) of a chunk's parts.
    template <class Body> KEEL_FN void each(int64_t chunk, Body const& body) const {
        int64_t const column = chunk % column_parts * columns, upper = chunk / column_parts;
        int64_t const row = upper % row_parts * rows, first = upper / row_parts * items;
        for (int64_t item = first; item < smaller(first + items, set.count); ++item) {
            one_product const p = set.at(item);
            if (int64_t const row_end = smaller(row + rows, p.m); row < row_end) body(p, row, row_end, column, smaller(column + columns, p.n));
        }
    }
};

template <class A, class C> struct direct_products {
    product_set const& set;
    product_parts parts;
    bool straight; ///< the kernel may write C itself

    KEEL_FN explicit direct_products(product_set const& products)
        : set(products), parts(products, tile_rows<A>, false, tile_rows<A>, tile_columns<A>), straight(set.c.column == 1 && !set.options.adds()) {}
    KEEL_FN int64_t chunks() const { return parts.chunks(); }

    static void chunk(void const* context, int64_t index) {
        auto const& self = *static_cast<direct_products const*>(context);
        self.parts.each(index, [&](one_product const& p, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
            for (int64_t i = row, step = 0; i < row_end; i += step) {
                step = loose_rows<A>(row_end - i);
                self.multiply_rows(p, i, static_cast<int>(step), column, column_end);
            }
        });
    }

private:
    /// A tile that would jut out begins farther left, and its first columns are not stored again.
    KEEL_FN void multiply_rows(one_product const& p, int64_t row, int count, int64_t column, int64_t column_end) const {
        alignas(64) float tile[std::size_t{tile_size<A> + A::width}]; // and what the last step loads past its end
        constexpr int w = A::width, full = tile_columns<A>;
        constexpr int64_t bytes = sizeof(float);
        operand_layout const &c = set.c, &d = set.added();
        std::byte const* const a = static_cast<std::byte const*>(p.a) + row * set.a.row * bytes;
        for (; column < column_end; column += full) {
            int64_t const left = smaller(column_end - column, full);
            bool const narrow = left <= w || p.n < full;
            int64_t const now = narrow ? smaller(left, w) : left, begin = smaller(column, p.n - (narrow ? w : full));
            float const* const b = static_cast<float const*>(p.b) + begin;
            tile_target const to{static_cast<C*>(p.c) + row * c.row + column * c.column, c.row, c.column,
                                 static_cast<C const*>(p.d) + row * d.row + column * d.column, d.row, d.column, no_diagonal, c.element_bytes};
            int64_t const a_row = set.a.row * bytes, a_step = set.a.column * bytes, wanted = narrow ? w : full;
            auto const kernel = straight && begin == column ? find_straight_loose_kernel<A, fma_step<A>, C>(count, wanted) : nullptr;
            if (kernel != nullptr) {
                kernel(p.k, a, a_row, a_step, b, set.b.row, {to.c, c.row, now, set.options.alpha, nullptr});
            } else {
                find_loose_kernel<A, fma_step<A>>(count, wanted)(p.k, a, a_row, a_step, b, set.b.row, {&tile[0], chain_start::zero, {}});
                finish_tile<A, C>(&tile[column - begin], count, now, to, set.options.alpha, set.options.beta);
            }
            column += now - full;
        }
    }
};

} // namespace keel::inline KEEL_ABI::detail
