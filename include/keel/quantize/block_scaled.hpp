// Matrices of low-precision codes with a scale for every block: what the types say of them.
#pragma once

#include <keel/core/view.hpp>
#include <keel/format/e8m0.hpp>
#include <keel/format/float32.hpp>
#include <keel/format/fp8.hpp>
#include <keel/quantize/scale_layout.hpp>

namespace keel {

// The kind of a scale is part of the type, so that an arbitrary fp32 scale cannot reach a consumer of powers of two.

/// fp32, amax / code_max.
struct fp32_scale {
    using storage = float;
    static constexpr bool is_power_of_two = false;
};
/// fp32 storage, the smallest power of two that brings the block inside the codes' range.
struct power_of_two_scale {
    using storage = float;
    static constexpr bool is_power_of_two = true;
};
/// The same power of two as one e8m0 byte (OCP microscaling).
struct e8m0_scale {
    using storage = e8m0;
    static constexpr bool is_power_of_two = true;
};

/// What Scale may be: one of these three.
template <class T> concept kind_of_scale = requires {
    typename T::storage;
    { T::is_power_of_two } -> std::convertible_to<bool>;
};

/// As Rows or Columns: blocks as long as the matrix. 1 x whole is a scale a row, whole x 1 one a column, whole x whole one for all.
inline constexpr int whole = 0x7fffffff;

/// x[i, j] = decode(codes[i, j]) * decode(scales[i / Rows, j / Columns]). Codes and scales in any order; the last block of a row or column
/// may be partial. The scale multiplies on decoding. With a Code const both are read only.
template <class Code, kind_of_scale Scale, int Rows, int Columns, class Layout = strided_scales> struct block_scaled {
    using code = Code;
    using scale_kind = Scale;
    using scale_storage =
        std::conditional_t<std::is_const_v<Code>, typename Scale::storage const, typename Scale::storage>;
    using scale_matrix = typename Layout::template matrix<scale_storage>;
    static constexpr int block_rows = Rows;
    static constexpr int block_columns = Columns;
    static_assert(sizeof(scale_storage) == 1 || std::is_same_v<Layout, strided_scales>, "keel: only scales of one byte lie in tiles or words");

    view<Code, 2> codes = {};
    scale_matrix scales = {};

    /// Inputs convert: codes and scales that are only read.
    template <class C>
        requires(std::is_same_v<C, Code const> && !std::is_const_v<Code>)
    KEEL_FN constexpr operator block_scaled<C, Scale, Rows, Columns, Layout>() const { return {codes, scales}; }

    KEEL_FN static constexpr int64_t scale_rows(int64_t row_count) { return (row_count + Rows - 1) / Rows; }
    KEEL_FN static constexpr int64_t scale_columns(int64_t column_count) {
        return (column_count + Columns - 1) / Columns;
    }
};

/// The transpose, without moving anything: blocks turn with the matrix.
template <class Code, class Scale, int Rows, int Columns, class Layout>
KEEL_FN constexpr block_scaled<Code, Scale, Columns, Rows, Layout> transposed(block_scaled<Code, Scale, Rows, Columns, Layout> q) {
    return {transposed(q.codes), transposed(q.scales)};
}
/// Rows [first, first + count); first is a multiple of Rows. If it is not: impossible views, which every call refuses.
template <class Code, class Scale, int Rows, int Columns, class Layout>
KEEL_FN constexpr block_scaled<Code, Scale, Rows, Columns, Layout> slice(block_scaled<Code, Scale, Rows, Columns, Layout> q, int64_t first,
                                                                         int64_t count) {
    if (q.codes.absent() && q.scales.absent()) return q;
    if (first % Rows != 0) return {impossible_like(q.codes), impossible_like(q.scales)};
    return {slice(q.codes, first, count), slice(q.scales, first / Rows, (count + Rows - 1) / Rows)};
}

/// The published shapes by name.
template <class Code = e4m3, class Scale = fp32_scale, class Layout = strided_scales> using row_blocks =
    block_scaled<Code, Scale, 1, 128, Layout>; ///< activations, gradients
template <class Code = e4m3, class Scale = fp32_scale, class Layout = strided_scales> using column_blocks =
    block_scaled<Code, Scale, 128, 1, Layout>; ///< the same, along the columns
template <class Code = e4m3, class Scale = fp32_scale, class Layout = strided_scales> using tile_blocks =
    block_scaled<Code, Scale, 128, 128, Layout>; ///< weights
template <class Code = e4m3, class Layout = strided_scales> using mx_blocks =
    block_scaled<Code, e8m0_scale, 1, 32, Layout>; ///< OCP MX

/// What a NaN or Inf does to its block. isolate: the scale is taken from the finite elements and only the bad one stays bad.
/// poison: the scale becomes NaN, and with it the whole block.
enum class non_finite_policy : uint8_t { isolate, poison };

} // namespace keel
