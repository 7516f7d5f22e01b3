// The kernels of dequantisation: y = decode(code) * scale, one rounding to y.
#pragma once

#include <keel/quantize/quantize_block_rows.hpp>
#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// A row. From is adjacent_rows or spread_rows of codes, To of y.
template <class From, class To, class Blocks> struct dequantize_row {
    From codes;
    typename Blocks::scale_matrix scales;
    To y;
    int64_t column_count;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        each_block<Blocks::block_columns>(g, column_count, [&](auto const& b) {
            auto const scale = b.spread(b.get(row_of(scales, row / Blocks::block_rows)));
            decode_scaled(g, b, codes(row), y(row), scale);
        });
    }
};

/// Some rows beside each other, tile by tile, where one thread has whole rows: their elements and their codes are adjacent.
template <class Y, class Blocks> struct dequantize_rows {
    static constexpr int block_columns = Blocks::block_columns;
    static constexpr int64_t rows_together = 4, tile_columns = 512; ///< codes are half the bytes, and nothing is read twice
    static constexpr bool is_cut = block_columns > tile_columns && (block_columns == whole || block_columns % tile_columns == 0);
    static constexpr int part = is_cut ? static_cast<int>(tile_columns) : block_columns; ///< of a block
    static constexpr int64_t width = part > tile_columns ? part : tile_columns / part * part;
    Blocks from;
    view<Y, 2> y;
    int64_t band_rows;

    KEEL_FN int64_t output_bytes() const { return y.size() * static_cast<int64_t>(sizeof(Y)); }

    template <class G> KEEL_FN void operator()(G const& g, int64_t band) const {
        int64_t const first = band * band_rows, left = y.extent[0] - first, last = left < band_rows ? y.extent[0] : first + band_rows;
        for (int64_t column = 0; column < y.extent[1]; column += width) {
            int64_t const rest = y.extent[1] - column, n = rest < width ? rest : width;
            for (int64_t row = first; row < last; ++row) {
                int64_t const scale_row = row / Blocks::block_rows;
                auto const* const codes = from.codes.at(row) + column;
                Y* const to = y.at(row) + column;
                if constexpr (block_columns == 1) {
                    auto const scales = row_of(columns(from.scales, column, n), scale_row);
                    each_block<1>(g, n, [&](auto const& b) { decode_scaled(g, b, codes, to, b.get(scales)); });
                } else {
                    auto const scales = row_of(from.scales, scale_row);
                    g.template blocks<part>(n, [&](auto const& b) {
                        decode_scaled(g, b, codes, to, b.spread(load_element(element_of(scales, (column + b.i) / block_columns))));
                    });
                }
            }
        }
    }
};

} // namespace keel::inline KEEL_ABI
