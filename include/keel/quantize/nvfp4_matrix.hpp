// NVFP4: matrices of e2m1 codes with an e4m3 scale for every 16 of a row and one fp32 scale for all. What the type says of them.
#pragma once

#include <type_traits>

#include <keel/core/view.hpp>
#include <keel/format/float32.hpp>
#include <keel/format/fp4.hpp>
#include <keel/format/fp8.hpp>
#include <keel/quantize/scale_layout.hpp>

namespace keel {

/// Elements of a row that share a scale.
inline constexpr int nvfp4_block = 16;

/// x[i, j] = decode(code j of row i) * decode(scales[i, j / 16]) * tensor_scale. Two codes a byte: code j is the low half of codes[i, j / 2]
/// for even j, the high half for odd; an odd row's last high half is 0. Rows of codes adjacent within; scales by any strides, or in
/// 128x4 tiles by Layout. With a Pair const all three are read only.
template <class Pair = e2m1x2, class Layout = strided_scales> struct nvfp4_matrix {
    static_assert(std::is_same_v<std::remove_const_t<Pair>, e2m1x2>);
    template <class T> using like_codes = std::conditional_t<std::is_const_v<Pair>, T const, T>;

    int64_t columns = 0;                             ///< elements a row
    view<Pair, 2> codes = {};                        ///< [rows, pairs(columns)]
    typename Layout::template matrix<like_codes<e4m3>> scales = {}; ///< [rows, blocks(columns)]
    view<like_codes<float>, 1> tensor_scale = {};    ///< [1]

    /// Inputs convert.
    template <class P>
        requires(std::is_same_v<P, Pair const> && !std::is_const_v<Pair>)
    KEEL_FN constexpr operator nvfp4_matrix<P, Layout>() const { return {columns, codes, scales, tensor_scale}; }

    KEEL_FN static constexpr int64_t pairs(int64_t column_count) { return (column_count + 1) / 2; }
    KEEL_FN static constexpr int64_t blocks(int64_t column_count) { return (column_count + nvfp4_block - 1) / nvfp4_block; }
};

/// Rows [first, first + count), by the scale of the whole.
template <class Pair, class Layout>
KEEL_FN constexpr nvfp4_matrix<Pair, Layout> slice(nvfp4_matrix<Pair, Layout> q, int64_t first, int64_t count) {
    return {q.columns, slice(q.codes, first, count), slice(q.scales, first, count), q.tensor_scale};
}

} // namespace keel
