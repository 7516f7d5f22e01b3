// What calls require of block-scaled arguments.
#pragma once

#include <keel/core/validate.hpp>
#include <keel/quantize/block_scaled.hpp>

namespace keel {

template <class T> KEEL_HOST void check_scales(validation& check, char const* name, view<T, 2> const& scales, int64_t row_count, int64_t column_count) {
    check.shape(name, scales, row_count, column_count);
}
template <class T, class Tile>
KEEL_HOST void check_scales(validation& check, char const* name, tiled_view<T, Tile> const& scales, int64_t row_count, int64_t column_count) {
    check.shape(name, view<T, 2>{scales.data, {scales.extent[0], scales.extent[1]}, {0, 0}}, row_count, column_count);
    int const r = scales.turned ? 1 : 0;
    check.require(scales.origin[0] >= 0 && scales.origin[1] >= 0 && scales.origin[r] + scales.extent[r] <= scales.tile_rows * Tile::height &&
                      scales.origin[1 - r] + scales.extent[1 - r] <= scales.tiles * 4,
                  status_code::bad_shape, name, "tiles for all elements");
}

template <class Code, class Scale, int Rows, int Columns, class Layout>
KEEL_HOST void check_blocks(validation& check, char const* codes, char const* scales, block_scaled<Code, Scale, Rows, Columns, Layout> const& q,
                            int64_t row_count, int64_t column_count) {
    using blocks = block_scaled<Code, Scale, Rows, Columns, Layout>;
    auto const most = [](int side) { return side == whole ? int64_t{whole} : (int64_t{1} << 32) - 1; };
    auto const words = [](int side) { return side == whole ? "at most 2^31 - 1 in a block" : "fewer than 2^32"; };
    check.require(row_count <= most(Rows), status_code::bad_shape, codes, "rows", row_count, words(Rows));
    check.require(column_count <= most(Columns), status_code::bad_shape, codes, "columns", column_count, words(Columns));
    check.shape(codes, q.codes, row_count, column_count);
    check_scales(check, scales, q.scales, blocks::scale_rows(row_count), blocks::scale_columns(column_count));
}

/// Blocks of x to be written: also of distinct elements, in memory of their own.
template <class X, class Code, class Scale, int Rows, int Columns, class Layout>
KEEL_HOST void check_new_blocks(validation& check, char const* codes, char const* scales, view<X, 2> x,
                                block_scaled<Code, Scale, Rows, Columns, Layout> const& q) {
    static_assert(format_traits<Code>::bias < 127, "keel: codes are e4m3, e5m2 or another format of a byte, not bf16 or float");
    static_assert(format_traits<Code>::max_exponent >= 1, "keel: codes whose largest value is below 2 leave large blocks no scale");
    check_blocks(check, codes, scales, q, x.extent[0], x.extent[1]);
    check.distinct(codes, q.codes).distinct(scales, memory_of(q.scales));
    check.disjoint(codes, q.codes, x).disjoint(scales, memory_of(q.scales), x, q.codes);
}

/// Codes without NaN cannot keep a bad element to themselves.
template <class Code> KEEL_HOST void check_policy(validation& check, char const* name, non_finite_policy policy) {
    check.require(format_traits<Code>::has_nan || policy == non_finite_policy::poison, status_code::bad_option, name,
                  "poison: these codes have no NaN");
}

} // namespace keel
