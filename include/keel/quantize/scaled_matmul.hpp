// The product of two block-scaled matrices, promoted to fp32 at every block.
#pragma once

#include <keel/backend/matmul.hpp>
#include <keel/backend/row_memory.hpp>
#include <keel/quantize/check_blocks.hpp>

namespace keel::inline KEEL_ABI {

/// The scale of A's element in `row` and block `block` of k.
template <class Scales, int Rows> struct left_scales {
    Scales scales;
    KEEL_FN float operator()(int64_t, int64_t row, int64_t block) const {
        return load_element(scales.at(row / Rows, block));
    }
};
/// The scale of B's element in `column` and block `block` of k.
template <class Scales, int Columns> struct right_scales {
    Scales scales;
    KEEL_FN float operator()(int64_t, int64_t column, int64_t block) const {
        return load_element(scales.at(block, column / Columns));
    }
};

/// Bytes for scaled_matmul, with blocks of `block` along k.
template <matmul_backend B>
int64_t scaled_matmul_workspace(B const& be, int64_t m, int64_t n, int64_t k, int64_t block = 128) {
    return matmul_promoted_workspace(be, m, n, k, block);
}

/// C = alpha * A * B + beta * C on codes and scales.
///
/// Formula        for each block of k: block = sum of decode(a) * decode(b), one fma a k ascending by pairs, the odd element first
///                (backend/matmul.hpp; in blocks of an odd length less than k without pairs), from +0;
///                total = fma(block, scale_a * scale_b, total), blocks ascending; c = fma(alpha, total, beta * c), and alpha * total
///                where beta is 0: the old c is not read. All fp32, the same bits for any instruction set and thread count.
/// Shapes         A [m, k] with blocks L wide along k, B [k, n] with blocks L high, C [m, n]. With codes q of X [t, i], W [o, i] and
///                dY [t, o] in tile and row blocks: Y = X W^T is scaled_matmul(x, transposed(w)), dX = dY W is (dy, w), and
///                dW = dY^T X is (transposed(dy_columns), x_columns).
/// Formats        codes e4m3 or e5m2, scales of any kind; C float, bf16 or f16, rounded once.
/// Error          |c - exact| <= (L + blocks + 2) * 2^-24 * sum |a b scales| before the rounding to C (each block is a chain of L fma,
///                then one fma a block), against the exact product of the decoded matrices, where every scale_a * scale_b is
///                a normal float. Below 2^-126 that product loses digits; past 2^128 it is Inf, and a zero block times it NaN:
///                operands whose scales multiply to less or more do not belong into one fp32 product.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (options.form), overlap, small_workspace.
/// Non-finite     NaN codes or scales make their elements of C NaN.
/// Workspace      scaled_matmul_workspace(be, m, n, k), with L as last argument where L is not 128.
/// Source         the promotion that DeepGEMM does on Hopper every 128, here without the tensor core's short sum.
template <matmul_backend B, class CodeA, class ScaleA, int RowsA, int Block, class LayoutA, class CodeB, class ScaleB, int ColumnsB,
          class LayoutB, class C>
status scaled_matmul(B const& be, block_scaled<CodeA, ScaleA, RowsA, Block, LayoutA> a,
                     block_scaled<CodeB, ScaleB, Block, ColumnsB, LayoutB> b, view<C, 2> c, matmul_options options = {},
                     workspace ws = {}) {
    int64_t const m = c.extent[0], n = c.extent[1], k = a.codes.extent[1];
    validation check("scaled_matmul");
    check.present("c", c).distinct("c", c);
    check_blocks(check, "a.codes", "a.scales", a, m, k);
    check_blocks(check, "b.codes", "b.scales", b, k, n);
    check.disjoint("c", c, a.codes, b.codes, memory_of(a.scales), memory_of(b.scales));
    check.require(options.form == product_form::full, status_code::bad_option, "options.form", "product_form::full");
    check.enough(ws, scaled_matmul_workspace(be, m, n, k, Block));
    if (!check.ok()) return check.result;
    product_set set;
    set.a = layout_of(a.codes), set.b = layout_of(b.codes), set.c = layout_of(c);
    set.m = m, set.n = n, set.k = k, set.options = options;
    using left = left_scales<typename LayoutA::template matrix<typename ScaleA::storage const>, RowsA>;
    using right = right_scales<typename LayoutB::template matrix<typename ScaleB::storage const>, ColumnsB>;
    promotion<left, right> const promote{Block, left{a.scales}, right{b.scales}};
    return matmul_promoted<std::remove_const_t<CodeA>, std::remove_const_t<CodeB>, C>(be, set, promote, ws);
}

} // namespace keel::inline KEEL_ABI
