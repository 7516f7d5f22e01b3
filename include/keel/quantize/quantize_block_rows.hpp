// Rows of 1 x C blocks where one thread has whole rows: some of them are walked together, tile by tile, each tile's codes made while the
// next one's magnitudes are found, so that the memory is never waited for; a rule makes the scales of a register of blocks at once, at
// the price of one. The bits are those of quantize_rows.hpp's walk.
#pragma once

#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// One thread reads eight rows beside each other from memory at 1.4 times the speed of one after another.
inline constexpr int64_t rows_together = 8;
/// Columns of a tile: it, its codes and the tile after it stay in the first-level cache.
inline constexpr int64_t tile_columns = 256;

/// How many rows to walk together, so that each of `workers` gets its share: at most `most`.
KEEL_FN int64_t rows_of_a_band(int64_t rows, int64_t workers, int64_t most) {
    int64_t const share = workers == 1 ? rows : rows / (4 * workers);
    return share < 1 ? 1 : share < most ? share : most;
}

/// The largest magnitudes of rows x blocks, in a line of one thread's stack, become their multipliers; their scales go to `scales`. As many
/// at once as there is room for, wherever a row ends.
template <class X, class Blocks, class Rule, class G, class Scales, class Tally>
KEEL_FN void make_scale_rows(G const& g, float* line, int64_t rows, int64_t blocks, Scales const& scales, Tally& tally) {
    constexpr int64_t room = 128;
    alignas(64) typename Blocks::scale_storage made[std::size_t{room}];
    int64_t const count = rows * blocks;
    for (int64_t first = 0, row = 0, block = 0; first < count; first += room) {
        int64_t const n = count - first < room ? count - first : room;
        make_scales<X, Blocks, Rule>(g, line + first, n, &made[0], tally);
        for (int64_t k = 0; k < n; ++k) {
            *element_of(row_of(scales, row), block) = made[k];
            if (++block == blocks) block = 0, ++row;
        }
    }
}

/// Some rows, their elements and their codes adjacent. Tiles with NaN or Inf go block by block, and all do where each block's events are
/// asked for.
template <class X, class Blocks, overflow Overflow, class Rule> struct quantize_block_rows {
    static_assert(Blocks::block_rows == 1 && Rule::bounded);
    static constexpr int block_columns = Blocks::block_columns;
    static constexpr int64_t width = block_columns > tile_columns ? block_columns : tile_columns / block_columns * block_columns;
    using code = typename Blocks::code;
    view<X const, 2> x;
    Blocks out;
    non_finite_policy policy;
    keel::report* report;
    int64_t band_rows;
    view<block_events, 2> events = {};

    KEEL_FN int64_t output_bytes() const { return out.codes.size() * static_cast<int64_t>(sizeof(code)); }

    template <class G> KEEL_FN void operator()(G const& g, int64_t band) const {
        constexpr int64_t most = rows_together * (width / block_columns);
        alignas(64) float top[2][std::size_t{most}]; // of a tile and of the next: magnitudes, then multipliers
        int64_t const first = band * band_rows, left = x.extent[0] - first, rows = left < band_rows ? left : band_rows, n = x.extent[1];
        quantize_tally<G, typename G::words> tally;
        int64_t elements = 0;
        largest_of_tile<block_columns>(g, tile_at(first, rows, 0), &top[0][0]);
        for (int64_t column = 0, turn = 0; column < n; column += width, turn = 1 - turn) {
            tile<X const> const here = tile_at(first, rows, column),
                                next = column + width < n ? tile_at(first, rows, column + width) : tile<X const>{here.p, 0, 0, 0};
            int64_t const blocks = Blocks::scale_columns(here.columns), first_block = column / block_columns;
            auto const scales = columns(slice(out.scales, first, rows), first_block, blocks);
            if (!all_finite(g, &top[turn][0], rows * blocks) || !events.absent()) {
                using strip = quantize_strip<adjacent_rows<X const>, adjacent_rows<code>, Blocks, Overflow, Rule>;
                strip const by_block{{columns(slice(x, first, rows), column, here.columns)},
                                     {columns(slice(out.codes, first, rows), column, here.columns)}, scales, rows, here.columns, policy, report,
                                     events.absent() ? events : columns(slice(events, first, rows), first_block, blocks)};
                for (int64_t row = 0; row < rows; ++row) by_block(g, row);
                largest_of_tile<block_columns>(g, next, &top[1 - turn][0]);
                continue;
            }
            tally.make_room(g, report, rows * here.columns);
            make_scale_rows<X, Blocks, Rule>(g, &top[turn][0], rows, blocks, scales, tally);
            tile<code> const to{out.codes.at(first) + column, out.codes.stride[0], rows, here.columns};
            encode_tile_and_look<block_columns>(g, here, to, &top[turn][0], tally.flushed, next, ahead(first, rows, column + 2 * width),
                                                &top[1 - turn][0]);
            elements += rows * here.columns;
        }
        if (report != nullptr) tally.give(g, *report, elements);
    }

private:
    KEEL_FN tile<X const> tile_at(int64_t row, int64_t rows, int64_t column) const {
        int64_t const left = x.extent[1] - column;
        return {x.at(row) + column, x.stride[0], rows, left < width ? left : width};
    }
    /// Where the tile at `column` lies, or where the next band goes on.
    KEEL_FN X const* ahead(int64_t first, int64_t rows, int64_t column) const {
        return column < x.extent[1] ? x.at(first) + column : address(x.at(first), rows * x.stride[0] + column - x.extent[1]);
    }
};

} // namespace keel::inline KEEL_ABI
