// Block-scaled quantisation and its inverse. Kernels: quantize_rows.hpp, quantize_block_rows.hpp, quantize_columns.hpp,
// quantize_tensor.hpp; scales: scale_rule.hpp; types: block_scaled.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/quantize/check_blocks.hpp>
#include <keel/quantize/dequantize_rows.hpp>
#include <keel/quantize/quantize_block_rows.hpp>
#include <keel/quantize/quantize_pair_rows.hpp>
#include <keel/quantize/quantize_rows.hpp>
#include <keel/quantize/quantize_tensor.hpp>

namespace keel {

struct quantize_options {
    non_finite_policy policy = non_finite_policy::isolate;
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// One walk over all strips, by the rows of x and of the codes.
template <overflow Overflow, class Rule, class B, class From, class To, class Blocks, class Rounding>
void quantize_strips(B const& be, From const& x, To const& codes, Blocks const& out, quantize_options options, report* report,
                     view<block_events, 2> events, Rounding const& rounding) {
    int64_t const row_count = x.v.extent[0], column_count = x.v.extent[1];
    if constexpr (Blocks::block_rows == whole && Blocks::block_columns == whole && backend_traits<B>::space == memory_space::host) {
        keel::report own; // of the one block
        keel::report* const counts = report != nullptr || !events.absent() ? &own : nullptr;
        quantize_tensor<Overflow, Rule>(be, x, codes, out, tensor_amax(be, x, options.policy), counts, rounding);
        if (report != nullptr) add_shared(*report, own);
        if (!events.absent())
            events(0, 0) = {static_cast<uint32_t>(own.saturated), static_cast<uint32_t>(own.flushed), static_cast<uint32_t>(own.non_finite)};
    } else {
        int64_t const height = Blocks::block_rows == whole ? row_count : Blocks::block_rows;
        be.for_rows(Blocks::scale_rows(row_count), column_count * height,
                    quantize_strip<From, To, Blocks, Overflow, Rule, Rounding>{x, codes, out.scales, row_count, column_count, options.policy,
                                                                               report, events, rounding});
    }
}

template <class T> KEEL_FN bool has_adjacent_columns(view<T, 2> const& v) { return v.extent[1] <= 1 || v.stride[1] == 1; }

/// The walk that suits how x and the codes lie. The bits are the same.
template <overflow Overflow, class Rule, class B, class X, class Code, class Scale, int Rows, int Columns, class Layout, class Rounding = to_nearest>
void quantize_checked(B const& be, view<X, 2> x, block_scaled<Code, Scale, Rows, Columns, Layout> out, quantize_options options, report* report,
                      view<block_events, 2> events = {}, Rounding const& rounding = {}) {
    using value = std::remove_const_t<X>;
    using blocks = block_scaled<Code, Scale, Rows, Columns, Layout>;
    view<value const, 2> const from = x;
    if constexpr (elementwise_backend<B>)
        return quantize_strips<Overflow, Rule>(be, spread_rows<value const>{from}, spread_rows<Code>{out.codes}, out, options, report, events, rounding);
    bool const codes_lie_along = has_adjacent_columns(out.codes) || has_adjacent_columns(transposed(out.codes));
    [[maybe_unused]] bool const plain = events.absent() && codes_lie_along;
    constexpr bool scales_at_once = Rows == 1 && Columns > 1 && Columns <= 1024 && Rule::bounded && Rounding::is_nearest && thread_backend<B>;
    if constexpr (scales_at_once)
        if (has_adjacent_columns(x) && has_adjacent_columns(out.codes)) {
            int64_t const band = rows_of_a_band(x.extent[0], be.concurrency());
            return be.for_rows((x.extent[0] + band - 1) / band, x.extent[1] * band,
                               quantize_block_rows<value, blocks, Overflow, Rule>{from, out, options.policy, report, band, events});
        }
    if constexpr (Columns == 1 && Rounding::is_nearest)
        if (plain && has_adjacent_columns(x))
            return be.for_rows(out.scale_rows(x.extent[0]), x.extent[1] * (Rows == whole ? x.extent[0] : Rows),
                               quantize_column_strip<value, blocks, Overflow, Rule>{from, out, options.policy, report});
    if constexpr (Rows == 1 && Columns != 1 && Rounding::is_nearest) // columns of the transpose
        if (plain && !has_adjacent_columns(x) && has_adjacent_columns(transposed(x)))
            return be.for_rows(out.scale_columns(x.extent[1]), x.extent[0] * (Columns == whole ? x.extent[1] : Columns),
                               quantize_column_strip<value, block_scaled<Code, Scale, Columns, 1, Layout>, Overflow, Rule>{
                                   transposed(from), transposed(out), options.policy, report});
    if constexpr (Rows == Columns && Rounding::is_nearest)
        if (!has_adjacent_columns(x) && has_adjacent_columns(transposed(x)))
            return quantize_checked<Overflow, Rule>(be, transposed(x), transposed(out), options, report, transposed(events), rounding);
    if constexpr (!scales_at_once)
        if (has_adjacent_columns(x) && has_adjacent_columns(out.codes))
            return quantize_strips<Overflow, Rule>(be, adjacent_rows<value const>{from}, adjacent_rows<Code>{out.codes}, out, options, report, events, rounding);
    if constexpr (Rows > 1 && Columns > 1 && Rounding::is_nearest) // blocks whose codes are turned tile by tile
        if (has_adjacent_columns(x))
            return quantize_strips<Overflow, Rule>(be, adjacent_rows<value const>{from}, spread_rows<Code>{out.codes}, out, options, report, events, rounding);
    quantize_strips<Overflow, Rule>(be, spread_rows<value const>{from}, spread_rows<Code>{out.codes}, out, options, report, events, rounding);
}

/// Quantises a matrix to codes with one scale a block:
///     quantize<overflow::saturate>(be, x, out).or_throw();                            // by the default rule, round_up
///     quantize<overflow::saturate, scale_rules::deep_gemm>(be, x, out).or_throw();    // by another one
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
///                Fewer than 2^32 rows and columns.
///                x and codes by any strides (x may repeat elements): turned codes are written by quantize(be, x, transposed(q)) with q's
///                codes [columns, rows]. Fastest is x with adjacent columns, and codes either way; 1 x C blocks with turned codes and
///                strides above 1 both ways go element by element. Scales by any strides, so also column-major with padding
///                (transposed(rows(p, blocks a row, rows, pitch))), in 128x4 tiles or in DeepGEMM's words (scale_layout.hpp).
/// Formats        x float, bf16 or f16; codes e4m3 or e5m2 (or another format of one byte). The product x * multiplier is rounded to fp32, then once to the code.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (isolate with codes that have no NaN).
/// Non-finite     isolate: a NaN becomes the code's NaN, an Inf what `Overflow` says, the others are scaled as if they were not
///                there. poison: the scale is NaN. A zero block: zero codes (-0 keeps its sign) and the rule's smallest scale
///                (transformer_engine: 1).
/// Report         optional, in memory of the backend's space: elements, saturated (finite, beyond the rounding boundary), flushed (became zero), non_finite, scale
///                min/max; from the same pass. `events` [as scales], optional: the same counts of each block (up to 2^32 - 1); its walk is
///                the slower one, without the short encoding.
/// Aliasing       outputs have memory of their own. No workspace.
/// Cost           sizeof(X) + 1 bytes an element (each block is read again from cache). Threads share the strips of Rows rows, so
///                whole x C is one thread's work; whole x whole is shared by rows (on CUDA one warp does it).
/// Gradient       straight-through: the backward of quantise-dequantise is the identity.
/// Source         DeepSeek-V3 (2412.19437) section 3.3 for the shapes; OCP MX v1.0 for e8m0, with the exponent rounded up instead of down
///                (NVIDIA 2506.08027), so that nothing saturates.
template <overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class Code, class Scale,
          int Rows, int Columns, class Layout>
status quantize(B const& be, view<X, 2> x, block_scaled<Code, Scale, Rows, Columns, Layout> out, quantize_options options = {},
                report* report = nullptr, view<block_events, 2> events = {}) {
    validation check("quantize");
    check.present("x", x);
    check_new_blocks(check, "out.codes", "out.scales", x, out);
    check_policy<Code>(check, "options.policy", options.policy);
    if (!events.absent()) {
        check.shape("events", events, out.scale_rows(x.extent[0]), out.scale_columns(x.extent[1])).distinct("events", events);
        int64_t const high = x.extent[0] < Rows ? x.extent[0] : Rows, wide = x.extent[1] < Columns ? x.extent[1] : Columns;
        check.require(high == 0 || wide <= 0xffffffff / high, status_code::bad_shape, "events", "blocks of at most 2^32 - 1 elements");
        check.disjoint("events", events, x, out.codes, memory_of(out.scales));
    }
    if (!check.ok() || x.empty()) return check.result;
    quantize_checked<Overflow, Rule>(be, x, out, options, report, events);
    return check.result;
}

/// Both quantisations that a linear layer needs of one tensor, each from the high-precision source (never from the other's codes):
/// along the rows for the products that sum over columns, along the columns for those that sum over rows.
///
/// Formula, formats, status, non-finite values: as quantize, twice; the same bits as two calls.
/// Shapes         x and both codes [rows, columns], each with the scales of its own blocks. Codes along the columns that a product wants
///                turned, [columns, rows]: transposed(q), as in quantize.
/// Report         counts both: each element twice.
/// Aliasing       the four outputs have memory of their own, apart from x and from each other.
/// Cost           sizeof(X) + 2 bytes an element where the blocks are 1 x C and R x 1 with C a divisor of 1024, x and the codes along the rows
///                have adjacent columns, and those along the columns too or adjacent rows: one pass over x, strips of R rows by 1024
///                columns staying in cache. Else: two passes.
template <overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class Code, class Scale,
          int RowsA, int ColumnsA, class LayoutA, int RowsB, int ColumnsB, class LayoutB>
status quantize_pair(B const& be, view<X, 2> x, block_scaled<Code, Scale, RowsA, ColumnsA, LayoutA> along_rows,
                     block_scaled<Code, Scale, RowsB, ColumnsB, LayoutB> along_columns, quantize_options options = {},
                     report* report = nullptr) {
    validation check("quantize_pair");
    check.present("x", x);
    check_new_blocks(check, "along_rows.codes", "along_rows.scales", x, along_rows);
    check_new_blocks(check, "along_columns.codes", "along_columns.scales", x, along_columns);
    check_policy<Code>(check, "options.policy", options.policy);
    check.disjoint("along_columns.codes", along_columns.codes, along_rows.codes, memory_of(along_rows.scales));
    check.disjoint("along_columns.scales", memory_of(along_columns.scales), along_rows.codes, memory_of(along_rows.scales));
    if (!check.ok() || x.empty()) return check.result;
    if constexpr (RowsA == 1 && ColumnsB == 1 && column_stretch % ColumnsA == 0 && !elementwise_backend<B>)
        if (has_adjacent_columns(x) && has_adjacent_columns(along_rows.codes) &&
            (has_adjacent_columns(along_columns.codes) || has_adjacent_columns(transposed(along_columns.codes)))) {
            using along = block_scaled<Code, Scale, RowsA, ColumnsA, LayoutA>;
            using down = block_scaled<Code, Scale, RowsB, ColumnsB, LayoutB>;
            be.for_rows(along_columns.scale_rows(x.extent[0]), x.extent[1] * RowsB,
                        quantize_pair_strip<std::remove_const_t<X>, along, down, Overflow, Rule, thread_backend<B>>{x, along_rows, along_columns, options.policy,
                                                                                                 report});
            return check.result;
        }
    quantize_checked<Overflow, Rule>(be, x, along_rows, options, report);
    quantize_checked<Overflow, Rule>(be, x, along_columns, options, report);
    return check.result;
}

/// The values that blocks stand for.
///
/// Formula        y = decode(code) * decode(scale): one fp32 product (exact for powers of two, apart from the ends of the
///                range), then one rounding to y.
/// Shapes         codes and y [rows, columns], scales as quantize. Any strides; fastest with adjacent columns.
/// Formats        codes e4m3 or e5m2, scales of any kind; y float, bf16 or f16.
/// Error          y is the product rounded to fp32 and to y's format, no more. After quantize with a rule that rounds up:
///                |y - x| <= (2^-m + 2^-21) |x| + scale 2^-s, m = 4 and s = 10 for e4m3, m = 3 and s = 17 for e5m2, before
///                the rounding to y, as long as the product stays below 2^128: with scales of powers of two an x within that rounding of
///                2^128 (from 0x1.fp127 with e4m3, 0x1.ep127 with e5m2) may come back as Inf.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Non-finite     NaN codes or scales give NaN; an e5m2 Inf stays Inf.
/// Aliasing       y has memory of its own. No workspace.
/// Cost           1 + sizeof(Y) bytes an element.
template <row_backend B, class Code, class Scale, int Rows, int Columns, class Layout, class Y>
status dequantize(B const& be, block_scaled<Code, Scale, Rows, Columns, Layout> in, view<Y, 2> y) {
    using code = std::remove_const_t<Code>;
    using blocks = block_scaled<code const, Scale, Rows, Columns, Layout>;
    validation check("dequantize");
    check.present("y", y).distinct("y", y);
    check_blocks(check, "in.codes", "in.scales", in, y.extent[0], y.extent[1]);
    check.disjoint("y", y, in.codes, memory_of(in.scales));
    if (!check.ok() || y.empty()) return check.result;
    blocks const from = in;
    if constexpr (!elementwise_backend<B>)
        if (has_adjacent_columns(y) && has_adjacent_columns(in.codes)) {
            be.for_rows(y.extent[0], y.extent[1],
                        dequantize_row<adjacent_rows<code const>, adjacent_rows<Y>, blocks>{{from.codes}, from.scales, {y}, y.extent[1]});
            return check.result;
        }
    be.for_rows(y.extent[0], y.extent[1],
                dequantize_row<spread_rows<code const>, spread_rows<Y>, blocks>{{from.codes}, from.scales, {y}, y.extent[1]});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
