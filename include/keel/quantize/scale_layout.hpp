// Where the scales of blocks lie: by strides, in any order, or in the tiles that tensor cores' libraries read.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/view.hpp>

namespace keel {

/// Tiles of 128 rows by 4 columns, as cuBLAS and CUTLASS want the scales of MXFP8 and NVFP4: each tile 512 adjacent elements, row r and column
/// c of it at (r % 32) * 16 + (r / 32) * 4 + c; tiles along the rows first.
struct tiles_128x4 {
    static constexpr int64_t height = 128, size = 512;
    KEEL_FN static constexpr int64_t offset(int64_t r, int64_t c, int64_t tiles, int64_t) {
        return (r / 128 * tiles + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
    }
};
/// Words of 4 columns, the words of a column of them adjacent, as DeepGEMM wants e8m0 scales on Blackwell (packed UE8M0, MN-major, its pitch
/// a multiple of 4 words for TMA): element (r, c) is byte c % 4 of word c / 4 * pitch + r.
struct words_of_4 {
    static constexpr int64_t height = 1, size = 4;
    KEEL_FN static constexpr int64_t offset(int64_t r, int64_t c, int64_t, int64_t pitch) { return (c / 4 * pitch + r) * 4 + c % 4; }
};

/// A matrix in tiles. Memory for whole tiles (swizzled_size, packed_size); elements past the extents are padding, never read nor written: a
/// consumer that reads whole tiles wants them zeroed once.
template <class T, class Tile> struct tiled_view {
    using element_type = T;
    T* data = nullptr;
    int64_t extent[2] = {};
    int64_t tiles = 0;       ///< in a row of tiles
    int64_t tile_rows = 0;   ///< rows of tiles; of words_of_4 the pitch
    int64_t origin[2] = {};  ///< of a part, in the whole
    bool turned = false;     ///< rows here are columns of the tiles

    KEEL_FN constexpr bool absent() const { return data == nullptr && extent[0] == 0 && extent[1] == 0; }
    KEEL_FN constexpr bool empty() const { return extent[0] * extent[1] == 0; }
    KEEL_FN constexpr T* at(int64_t i, int64_t j) const {
        int64_t const r = turned ? origin[1] + j : origin[0] + i, c = turned ? origin[0] + i : origin[1] + j;
        return data + Tile::offset(r, c, tiles, tile_rows);
    }
    KEEL_FN constexpr T& operator()(int64_t i, int64_t j) const { return *at(i, j); }

    /// Inputs convert.
    template <class C>
        requires(std::is_same_v<C, T const> && !std::is_const_v<T>)
    KEEL_FN constexpr operator tiled_view<C, Tile>() const {
        return {data, {extent[0], extent[1]}, tiles, tile_rows, {origin[0], origin[1]}, turned};
    }
};
template <class T> using swizzled_view = tiled_view<T, tiles_128x4>;
template <class T> using packed_view = tiled_view<T, words_of_4>;

/// Elements of memory that a swizzled matrix takes, padding included.
KEEL_FN constexpr int64_t swizzled_size(int64_t row_count, int64_t column_count) {
    return (row_count + 127) / 128 * ((column_count + 3) / 4) * 512;
}
/// rows by columns in tiles, at p.
template <class T> KEEL_FN constexpr swizzled_view<T> swizzled(T* p, int64_t row_count, int64_t column_count) {
    return {p, {row_count, column_count}, (column_count + 3) / 4, (row_count + 127) / 128, {}, false};
}

/// Elements of memory that a packed matrix takes, padding included.
KEEL_FN constexpr int64_t packed_size(int64_t row_count, int64_t column_count) {
    return (row_count + 3) / 4 * 4 * ((column_count + 3) / 4 * 4);
}
/// rows by columns in words of 4 at p, the words of 4 columns `pitch` rows apart; without it the least that DeepGEMM takes.
template <class T> KEEL_FN constexpr packed_view<T> packed(T* p, int64_t row_count, int64_t column_count, int64_t pitch) {
    return {p, {row_count, column_count}, (column_count + 3) / 4, pitch, {}, false};
}
template <class T> KEEL_FN constexpr packed_view<T> packed(T* p, int64_t row_count, int64_t column_count) {
    return packed(p, row_count, column_count, (row_count + 3) / 4 * 4);
}

template <class T, class Tile> KEEL_FN constexpr tiled_view<T, Tile> transposed(tiled_view<T, Tile> v) {
    return {v.data, {v.extent[1], v.extent[0]}, v.tiles, v.tile_rows, {v.origin[1], v.origin[0]}, !v.turned};
}
template <class T, class Tile> KEEL_FN constexpr tiled_view<T, Tile> slice(tiled_view<T, Tile> v, int64_t first, int64_t count) {
    v.origin[0] += first, v.extent[0] = count;
    return v;
}
template <class T, class Tile> KEEL_FN constexpr tiled_view<T, Tile> columns(tiled_view<T, Tile> v, int64_t first, int64_t count) {
    v.origin[1] += first, v.extent[1] = count;
    return v;
}

/// As Layout of block_scaled: scales by strides. Row-major; column-major with padding, as transposed(rows(p, blocks a row, rows, pitch)), which is
/// DeepGEMM's for fp32 scales (MN-major, its pitch a multiple of 4) and TransformerEngine's for 1x128 blocks; any.
struct strided_scales {
    template <class T> using matrix = view<T, 2>;
};
/// As Layout of block_scaled: scales in 128x4 tiles. Scales of one byte only; nothing else is read so.
struct swizzled_scales {
    template <class T> using matrix = swizzled_view<T>;
};
/// As Layout of block_scaled: scales in words of 4. Of one byte only, too.
struct packed_scales {
    template <class T> using matrix = packed_view<T>;
};

/// One row of a matrix in tiles.
template <class T, class Tile> struct tiled_row {
    tiled_view<T, Tile> of;
    int64_t row;
    KEEL_FN T* element(int64_t i) const { return of.at(row, i); }
};

// What kernels and checks ask of scales in either layout.

template <class T> KEEL_FN constexpr strided<T> row_of(view<T, 2> const& v, int64_t row) { return {v.at(row), v.stride[1]}; }
template <class T, class Tile> KEEL_FN constexpr tiled_row<T, Tile> row_of(tiled_view<T, Tile> const& v, int64_t row) { return {v, row}; }

/// The memory that may be touched, as a view.
template <class T> KEEL_FN constexpr view<T, 2> memory_of(view<T, 2> const& v) { return v; }
template <class T, class Tile> KEEL_FN constexpr view<T, 2> memory_of(tiled_view<T, Tile> const& v) { return rows(v.data, v.tile_rows, v.tiles * Tile::size); }

template <class T> KEEL_FN constexpr view<T, 2> impossible_like(view<T, 2> const&) { return impossible_view<T, 2>(); }
template <class T, class Tile> KEEL_FN constexpr tiled_view<T, Tile> impossible_like(tiled_view<T, Tile> v) {
    v.extent[0] = v.extent[1] = -1;
    return v;
}

} // namespace keel
