// Rows of 1 x C blocks where one thread has whole rows: they are walked tile by tile, a part of a row or some short rows, each tile's codes
// made while the next one's magnitudes are found, so that the memory is never waited for; a rule makes the scales of a register of blocks at once, at
// the price of one. The bits are those of quantize_rows.hpp's walk.
#pragma once

#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Elements of a tile: it, its codes and the tile after it stay in the first-level cache, and the memory's latency is less than a tile's time.
inline constexpr int64_t tile_elements = 2048;

/// How many rows one call of a kernel takes: all of them, or a quarter of a thread's share, since tiles overlap within a call only.
KEEL_FN int64_t rows_of_a_band(int64_t rows, int64_t workers) {
    int64_t const share = workers == 1 ? rows : rows / (4 * workers);
    return share < 1 ? 1 : share;
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
    static constexpr int64_t most = block_columns > tile_elements ? 1 : tile_elements / block_columns; ///< blocks of a tile
    using code = typename Blocks::code;
    view<X const, 2> x;
    Blocks out;
    non_finite_policy policy;
    keel::report* report;
    int64_t band_rows;
    view<block_events, 2> events = {};

    KEEL_FN int64_t output_bytes() const { return out.codes.size() * static_cast<int64_t>(sizeof(code)); }

    template <class G> KEEL_FN void operator()(G const& g, int64_t band) const {
        alignas(64) float top[2][std::size_t{most}]; // of a tile and of the next: magnitudes, then multipliers
        tiles const all = tiles_of(band);
        quantize_tally<G, typename G::words> tally;
        int64_t elements = 0, turn = 0;
        largest_of_tile<block_columns>(g, at(all, all.first), &top[0][0]);
        for (spot s = all.first; s.row < all.end; s = after(all, s), turn = 1 - turn) {
            spot const second = after(all, s), third = after(all, second);
            tile<X const> const here = at(all, s), next = at(all, second);
            int64_t const rows = here.rows, blocks = Blocks::scale_columns(here.columns), first_block = s.column / block_columns;
            auto const scales = columns(slice(out.scales, s.row, rows), first_block, blocks);
            if (!all_finite(g, &top[turn][0], rows * blocks) || !events.absent()) {
                using strip = quantize_strip<adjacent_rows<X const>, adjacent_rows<code>, Blocks, Overflow, Rule>;
                strip const by_block{{columns(slice(x, s.row, rows), s.column, here.columns)},
                                     {columns(slice(out.codes, s.row, rows), s.column, here.columns)}, scales, rows, here.columns, policy, report,
                                     events.absent() ? events : columns(slice(events, s.row, rows), first_block, blocks)};
                for (int64_t row = 0; row < rows; ++row) by_block(g, row);
                largest_of_tile<block_columns>(g, next, &top[1 - turn][0]);
                continue;
            }
            tally.make_room(g, report, rows * here.columns);
            make_scale_rows<X, Blocks, Rule>(g, &top[turn][0], rows, blocks, scales, tally);
            tile<code> const to{out.codes.at(s.row) + s.column, out.codes.stride[0], rows, here.columns};
            encode_tile_and_look<block_columns>(g, here, to, &top[turn][0], tally.flushed, next, address(x.data, third.row * x.stride[0] + third.column),
                                                &top[1 - turn][0]);
            elements += rows * here.columns;
        }
        if (report != nullptr) tally.give(g, *report, elements);
    }

private:
    struct spot {
        int64_t row, column;
    };
    /// The tiles of a band, along the rows.
    struct tiles {
        spot first;
        int64_t end, rows, width; ///< last row and one, extents of a whole tile
    };
    KEEL_FN tiles tiles_of(int64_t band) const {
        int64_t const first = band * band_rows, left = x.extent[0] - first, n = x.extent[1];
        int64_t const blocks = Blocks::scale_columns(n), in_a_row = (blocks + most - 1) / most, each = (blocks + in_a_row - 1) / in_a_row;
        return {{first, 0}, left < band_rows ? x.extent[0] : first + band_rows, most / each, each * block_columns};
    }
    KEEL_FN spot after(tiles const& all, spot s) const {
        return s.column + all.width < x.extent[1] ? spot{s.row, s.column + all.width} : spot{s.row + all.rows, 0};
    }
    /// Past the band: an empty one.
    KEEL_FN tile<X const> at(tiles const& all, spot s) const {
        if (s.row >= all.end) return {x.data, 0, 0, 0};
        int64_t const rows = all.end - s.row, columns = x.extent[1] - s.column;
        return {x.at(s.row) + s.column, x.stride[0], rows < all.rows ? rows : all.rows, columns < all.width ? columns : all.width};
    }
};

} // namespace keel::inline KEEL_ABI
