// Block-scaled quantisation and its inverse. Kernels: quantize_rows.hpp, quantize_columns.hpp,
// quantize_tensor.hpp; scales: scale_rule.hpp; types: block_scaled.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/quantize/quantize_columns.hpp>
#include <keel/quantize/quantize_rows.hpp>
#include <keel/quantize/quantize_tensor.hpp>

namespace keel {

struct quantize_options {
    non_finite_policy policy = non_finite_policy::isolate;
};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <class X, class Code, class Scale, int Rows, int Columns>
KEEL_HOST void check_blocks(validation& check, char const* codes, char const* scales, view<X, 2> x,
                            block_scaled<Code, Scale, Rows, Columns> const& q) {
    using blocks = block_scaled<Code, Scale, Rows, Columns>;
    if (Rows == whole || Columns == whole)
        check.require(x.extent[0] <= whole && x.extent[1] <= whole, status_code::bad_shape, codes,
                      "at most 2^31 - 1 rows and columns in a block");
    check.shape(codes, q.codes, x.extent[0], x.extent[1]).unit_stride(codes, q.codes);
    check.shape(scales, q.scales, blocks::scale_rows(x.extent[0]), blocks::scale_columns(x.extent[1]));
    if (Columns == 1) check.unit_stride(scales, q.scales);
}

/// Blocks to be written: also of distinct elements, in memory of their own.
template <class X, class Code, class Scale, int Rows, int Columns>
KEEL_HOST void check_new_blocks(validation& check, char const* codes, char const* scales, view<X, 2> x,
                                block_scaled<Code, Scale, Rows, Columns> const& q) {
    check_blocks(check, codes, scales, x, q);
    check.distinct(codes, q.codes).distinct(scales, q.scales);
    check.disjoint(codes, q.codes, x).disjoint(scales, q.scales, x).disjoint(scales, q.scales, q.codes);
}

template <overflow Overflow, class Rule, class B, class X, class Code, class Scale, int Rows, int Columns>
void quantize_checked(B const& be, view<X, 2> x, block_scaled<Code, Scale, Rows, Columns> out, quantize_options options,
                      report* report) {
    if (report != nullptr) add_shared(report->elements, x.size());
    int64_t const strips = out.scale_rows(x.extent[0]), size = x.extent[1] * (Rows == whole ? x.extent[0] : Rows);
    using value = std::remove_const_t<X>;
    if constexpr (Rows == whole && Columns == whole && backend_traits<B>::space == memory_space::host) {
        view<value const, 2> const from = x;
        quantize_tensor<Overflow, Rule>(be, from, out, tensor_amax(be, from, options.policy), report);
    } else if constexpr (Columns == 1)
        be.for_rows(strips, size,
                    quantize_column_strip<value, Code, Scale, Rows, Overflow, Rule>{x, out, options.policy, report});
    else
        be.for_rows(strips, size, quantize_strip<value, Code, Scale, Rows, Columns, Overflow, Rule>{
                                      x, out, options.policy, report});
}

/// Quantises a matrix to codes with one scale a block: quantize<overflow::saturate>(be, x, out), or by another rule than the default
/// quantize<overflow::saturate, scale_rules::deep_gemm>(be, x, out).
///
/// `Overflow` has no default: whether 1000 becomes 448 or NaN is the caller's decision. Under rules that round the scale up a finite
/// element never needs it (it stays within the rounding of code_max); Inf and NaN do, and under the others the largest elements.
///
/// Formula        amax = largest finite magnitude of the block (an integer maximum of bits; with poison NaN and Inf count too);
///                scale and multiplier by `Rule` (scale_rule.hpp), code = encode(x * multiplier), nearest even. The default,
///                scale_rules::round_up, with top = max(amax, code_max * 2^-126):
///                fp32_scale: scale = top / code_max, code = encode(x * (code_max / top));
///                power_of_two_scale and e8m0_scale: scale = the smallest 2^e with amax <= code_max * 2^e (e >= -126 in
///                fp32, >= -127 in e8m0), code = encode(x * 2^-e). Each division and product is one rounding in fp32.
/// Shapes         x, codes [rows, columns]; scales [ceil(rows / Rows), ceil(columns / Columns)]. Any size; partial blocks at the ends;
///                `whole` for a block as long as the matrix, up to 2^31 - 1.
///                Rows may be strided; columns adjacent. Scales in any order, so also column-major with padding (transposed(rows(p,
///                blocks a row, rows, pitch))), but adjacent where blocks are one column wide.
/// Formats        x float, bf16 or f16; codes e4m3 or e5m2. The product x * multiplier is rounded to fp32, then once to the code.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Non-finite     isolate: a NaN becomes the code's NaN, an Inf what `Overflow` says, the others are scaled as if they were not
///                there. poison: the scale is NaN. A zero block: zero codes and the smallest scale.
/// Report         optional: elements, saturated (finite, beyond the rounding boundary), flushed (became zero), non_finite, scale
///                min/max; from the same pass.
/// Aliasing       outputs have memory of their own. No workspace.
/// Cost           sizeof(X) + 1 bytes an element (each block is read again from cache).
/// Gradient       straight-through: the backward of quantise-dequantise is the identity.
/// Source         DeepSeek-V3 (2412.19437) section 3.3 for the shapes; OCP MX v1.0 for e8m0, with the exponent rounded up instead of down
///                (NVIDIA 2506.08027), so that nothing saturates.
template <overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class Code, class Scale,
          int Rows, int Columns>
status quantize(B const& be, view<X, 2> x, block_scaled<Code, Scale, Rows, Columns> out, quantize_options options = {},
                report* report = nullptr) {
    validation check("quantize");
    check.present("x", x).unit_stride("x", x);
    check_new_blocks(check, "out.codes", "out.scales", x, out);
    if (!check.ok() || x.empty()) return check.result;
    quantize_checked<Overflow, Rule>(be, x, out, options, report);
    return check.result;
}

/// Both quantisations that a linear layer needs of one tensor, each from the high-precision source (never from the other's codes):
/// along the rows for the products that sum over columns, along the columns for those that sum over rows.
///
/// Formula, formats, status, non-finite values: as quantize, twice; the same bits as two calls.
/// Shapes         x and both codes [rows, columns], each with the scales of its own blocks.
/// Report         counts both: each element twice.
/// Aliasing       the four outputs have memory of their own, apart from x and from each other.
/// Cost           sizeof(X) + 2 bytes an element where the blocks are 1 x C and R x 1 with C a divisor of 1024: one pass over x,
///                strips of R rows by 1024 columns staying in cache. Other shapes: two passes.
template <overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class Code, class Scale,
          int RowsA, int ColumnsA, int RowsB, int ColumnsB>
status quantize_pair(B const& be, view<X, 2> x, block_scaled<Code, Scale, RowsA, ColumnsA> along_rows,
                     block_scaled<Code, Scale, RowsB, ColumnsB> along_columns, quantize_options options = {},
                     report* report = nullptr) {
    validation check("quantize_pair");
    check.present("x", x).unit_stride("x", x);
    check_new_blocks(check, "along_rows.codes", "along_rows.scales", x, along_rows);
    check_new_blocks(check, "along_columns.codes", "along_columns.scales", x, along_columns);
    check.disjoint("along_columns.codes", along_columns.codes, along_rows.codes);
    check.disjoint("along_columns.codes", along_columns.codes, along_rows.scales);
    check.disjoint("along_columns.scales", along_columns.scales, along_rows.codes);
    check.disjoint("along_columns.scales", along_columns.scales, along_rows.scales);
    if (!check.ok() || x.empty()) return check.result;
    if constexpr (RowsA == 1 && ColumnsB == 1 && column_stretch % ColumnsA == 0) {
        if (report != nullptr) add_shared(report->elements, 2 * x.size());
        be.for_rows(along_columns.scale_rows(x.extent[0]), x.extent[1] * RowsB,
                    quantize_pair_strip<std::remove_const_t<X>, Code, Scale, ColumnsA, RowsB, Overflow, Rule>{
                        x, along_rows, along_columns, options.policy, report});
    } else {
        quantize_checked<Overflow, Rule>(be, x, along_rows, options, report);
        quantize_checked<Overflow, Rule>(be, x, along_columns, options, report);
    }
    return check.result;
}

/// The values that blocks stand for.
///
/// Formula        y = decode(code) * decode(scale): one fp32 product (exact for powers of two, apart from the ends of the
///                range), then one rounding to y.
/// Shapes         codes and y [rows, columns], scales as quantize. Rows may be strided; columns adjacent.
/// Formats        codes e4m3 or e5m2, scales of any kind; y float, bf16 or f16.
/// Error          y is the product rounded to fp32 and to y's format, no more. After quantize with a rule that rounds up:
///                |y - x| <= (2^-m + 2^-21) |x| + scale 2^-s, m = 4 and s = 10 for e4m3, m = 3 and s = 17 for e5m2, before
///                the rounding to y.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Non-finite     NaN codes or scales give NaN; an e5m2 Inf stays Inf.
/// Aliasing       y has memory of its own. No workspace.
/// Cost           1 + sizeof(Y) bytes an element.
template <row_backend B, class Code, class Scale, int Rows, int Columns, class Y>
status dequantize(B const& be, block_scaled<Code, Scale, Rows, Columns> in, view<Y, 2> y) {
    validation check("dequantize");
    check.present("y", y).unit_stride("y", y).distinct("y", y);
    check_blocks(check, "in.codes", "in.scales", y, in);
    check.disjoint("y", y, in.codes).disjoint("y", y, in.scales);
    if (!check.ok() || y.empty()) return check.result;
    be.for_rows(y.extent[0], y.extent[1], dequantize_row<std::remove_const_t<Code>, Scale, Rows, Columns, Y>{in, y});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
