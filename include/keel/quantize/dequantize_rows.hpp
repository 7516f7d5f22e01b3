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

    KEEL_FN int64_t output_bytes() const { return y.v.size() * static_cast<int64_t>(sizeof(typename To::value)); }

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        each_block<Blocks::block_columns>(g, column_count, [&](auto const& b) {
            auto const scale = b.spread(b.get(row_of(scales, row / Blocks::block_rows)));
            decode_scaled(g, b, codes(row), y(row), scale);
        });
    }
};

} // namespace keel::inline KEEL_ABI
