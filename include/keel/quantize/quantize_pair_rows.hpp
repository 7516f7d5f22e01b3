// A tensor quantised both ways in one pass: blocks along the rows and blocks down the columns. The bits are those of two calls.
#pragma once

#include <keel/quantize/quantize_block_rows.hpp>
#include <keel/quantize/quantize_columns.hpp>

namespace keel::inline KEEL_ABI {

/// The strip of rows that blocks of RowsB x 1 cover, stretch by stretch of columns: x is read from memory once, then from the cache.
/// 1 x ColumnsA blocks lie whole in a stretch, their codes with adjacent columns. OneThread: all lanes of a group share its stack, so that
/// a stretch's magnitudes can be found together and its codes be made together.
template <class X, class Along, class Down, overflow Overflow, class Rule, bool OneThread> struct quantize_pair_strip {
    static_assert(column_stretch % Along::block_columns == 0);
    using code = typename Along::code;
    view<X const, 2> x;
    Along along_rows;
    Down along_columns;
    non_finite_policy policy;
    keel::report* report;

    /// Blocks along the rows of one stretch, whose magnitudes are kept on the stack if there are not too many.
    static constexpr int64_t kept_blocks = Down::block_rows <= 128 ? Down::block_rows * (column_stretch / Along::block_columns) : 0;
    static constexpr bool together = OneThread && kept_blocks > 0 && kept_blocks <= 4096 && Rule::bounded;

    KEEL_FN int64_t output_bytes() const { return 2 * x.size() * static_cast<int64_t>(sizeof(code)); }

    template <class G> KEEL_FN void operator()(G const& g, int64_t strip) const {
        int64_t const first = strip * Down::block_rows, end = x.extent[0],
                      count = first + Down::block_rows < end ? Down::block_rows : end - first;
        quantize_tally<G, typename G::words> tally;
        int64_t elements = 0;
        for (int64_t column = 0; column < x.extent[1]; column += column_stretch) {
            int64_t const left = x.extent[1] - column, n = left < column_stretch ? left : column_stretch;
            int64_t const blocks = along_rows.scale_columns(n), first_block = column / Along::block_columns;
            stretch const s{columns(slice(x, first, count), column, n),
                            {columns(slice(along_rows.codes, first, count), column, n),
                             columns(slice(along_rows.scales, first, count), first_block, blocks)},
                            {columns(slice(along_columns.codes, first, count), column, n), columns(slice(along_columns.scales, strip, 1), column, n)}};
            if constexpr (together)
                if (at_once(g, s, column + n < x.extent[1] ? x.at(first) + column + n : address(x.at(first), count * x.stride[0]), tally)) {
                    elements += 2 * count * n;
                    continue;
                }
            one_by_one(g, s);
        }
        if (report != nullptr) tally.give(g, *report, elements);
    }

  private:
    struct stretch {
        view<X const, 2> x;
        Along along;
        Down down;
    };

    /// Whether all elements are finite, so that the short encoding does; `tally` has counted them then. `after`: where the next stretch lies.
    template <class G, class Tally> KEEL_FN bool at_once(G const& g, stretch const& s, X const* after, Tally& tally) const {
        using F = typename G::value;
        constexpr int C = Along::block_columns;
        alignas(64) float column[std::size_t{column_stretch}], block[std::size_t{kept_blocks}]; // magnitudes, then multipliers
        int64_t const rows = s.x.extent[0], n = s.x.extent[1], blocks = Along::scale_columns(n);
        g.each(n, [&](auto at) { g.store(&column[0], at, F(0.0f)); });
        constexpr int64_t a_pass = 8;
        for (int64_t row = 0; row < rows; row += a_pass)
            raise_both<C>(g, s.x.at(row), s.x.stride[0], rows - row < a_pass ? rows - row : a_pass, n, &column[0], &block[row * blocks], blocks);
        if (!all_finite(g, &column[0], n)) return false;
        make_scales<X, Down, Rule>(g, &column[0], n, row_of(s.down.scales, 0), tally);
        make_scale_rows<X, Along, Rule>(g, &block[0], rows, blocks, s.along.scales, tally);
        tally.make_room(g, report, 2 * rows * n);
        arrange_multipliers<X, code>(g, &column[0], n);
        bool const turned = s.down.codes.stride[1] != 1 && n > 1;
        for (int64_t row = 0; row < rows; ++row) {
            if (turned)
                encode_blocks<C>(g, s.x.at(row), s.along.codes.at(row), n, &block[row * blocks], tally.flushed);
            else
                encode_both<C>(g, s.x.at(row), s.along.codes.at(row), s.down.codes.at(row), n, &block[row * blocks], &column[0], tally.flushed,
                               address(after, row * x.stride[0]));
        }
        if (turned)
            encode_columns_turned(g, s.x.at(0), s.x.stride[0], rows, s.down.codes.at(0, 0), s.down.codes.stride[1], n, &column[0], tally.flushed);
        return true;
    }

    /// Row by row, then down the columns.
    template <class G> KEEL_FN void one_by_one(G const& g, stretch const& s) const {
        int64_t const rows = s.x.extent[0], n = s.x.extent[1];
        quantize_strip<adjacent_rows<X const>, adjacent_rows<code>, Along, Overflow, Rule> const by_row{
            {s.x}, {s.along.codes}, s.along.scales, rows, n, policy, report};
        for (int64_t row = 0; row < rows; ++row) by_row(g, row);
        quantize_column_strip<X, Down, Overflow, Rule>{s.x, s.down, policy, report}(g, 0);
    }
};

} // namespace keel::inline KEEL_ABI
