// What calls require of block-scaled arguments.
#pragma once

#include <keel/core/validate.hpp>
#include <keel/quantize/block_scaled.hpp>

namespace keel {

template <class T> KEEL_HOST void check_scales(validation& check, char const* name, view<T, 2> const& scales, int64_t row_count, int64_t column_count) {
    check.shape(name, scales, row_count, column_count);
}
template <class T>
KEEL_HOST void check_scales(validation& check, char const* name, swizzled_view<T> const& scales, int64_t row_count, int64_t column_count) {
    check.shape(name, view<T, 2>{scales.data, {scales.extent[0], scales.extent[1]}, {0, 0}}, row_count, column_count);
    int const r = scales.turned ? 1 : 0;
    check.require(scales.origin[0] >= 0 && scales.origin[1] >= 0 && scales.origin[r] + scales.extent[r] <= scales.tile_rows * 128 &&
                      scales.origin[1 - r] + scales.extent[1 - r] <= scales.tiles * 4,
                  status_code::bad_shape, name, "tiles for all elements");
}

template <class Code, class Scale, int Rows, int Columns, class Layout>
KEEL_HOST void check_blocks(validation& check, char const* codes, char const* scales, block_scaled<Code, Scale, Rows, Columns, Layout> const& q,
                            int64_t row_count, int64_t column_count) {
    using blocks = block_scaled<Code, Scale, Rows, Columns, Layout>;
    if (Rows == whole || Columns == whole)
        check.require(row_count <= whole && column_count <= whole, status_code::bad_shape, codes,
                      "at most 2^31 - 1 rows and columns in a block");
    check.shape(codes, q.codes, row_count, column_count);
    check_scales(check, scales, q.scales, blocks::scale_rows(row_count), blocks::scale_columns(column_count));
}

/// Blocks of x to be written: also of distinct elements, in memory of their own.
template <class X, class Code, class Scale, int Rows, int Columns, class Layout>
KEEL_HOST void check_new_blocks(validation& check, char const* codes, char const* scales, view<X, 2> x,
                                block_scaled<Code, Scale, Rows, Columns, Layout> const& q) {
    check_blocks(check, codes, scales, q, x.extent[0], x.extent[1]);
    check.distinct(codes, q.codes).distinct(scales, memory_of(q.scales));
    check.disjoint(codes, q.codes, x).disjoint(scales, memory_of(q.scales), x, q.codes);
}

} // namespace keel
