// NVFP4 quantisation and its inverse: four bits an element, two of them a byte, with scales for 16 elements and for the tensor.
// Type: nvfp4_matrix.hpp; scales: nvfp4_rule.hpp; kernels: nvfp4_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/quantize/check_blocks.hpp>
#include <keel/quantize/nvfp4_rows.hpp>

namespace keel {

struct nvfp4_options {
    /// isolate: NaN and Inf make the scale of their block of 16 NaN. poison: the tensor's.
    non_finite_policy policy = non_finite_policy::isolate;
};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <class X, class Pair, class Layout>
KEEL_HOST void check_nvfp4(validation& check, char const* name, char const* codes, char const* scales, char const* tensor_scale,
                           char const* of, view<X, 2> x, nvfp4_matrix<Pair, Layout> const& q) {
    check.require(x.extent[1] < int64_t{1} << 32, status_code::bad_shape, of, "columns", x.extent[1], "fewer than 2^32");
    if (check.ok() && q.columns != x.extent[1]) check.fail(status_code::bad_shape, name, "columns", q.columns, x.extent[1]);
    check.shape(codes, q.codes, x.extent[0], q.pairs(x.extent[1])).unit_stride(codes, q.codes);
    check_scales(check, scales, q.scales, x.extent[0], q.blocks(x.extent[1]));
    check.shape(tensor_scale, q.tensor_scale, 1);
}

/// Quantises a matrix to NVFP4:
///     quantize_nvfp4(be, x, out).or_throw();                              // by the default rule, nearest
///     quantize_nvfp4<nvfp4_rules::round_up>(be, x, out).or_throw();       // by another one
///
/// Formula        amax = largest finite magnitude, of the tensor and of each block of 16 in a row (integer maxima of bits). The default
///                rule, nvfp4_rules::nearest: S = max(amax, 2688 * 2^-117) / 2688; for each block
///                b = e4m3(amax / (6 S)), nearest even, at most 448; multiplier = 1 / (b S), or 0 where b is 0;
///                code = e2m1(x * multiplier), nearest even, at most 6. Each product and quotient is one rounding in fp32, in this order;
///                2688 = 6 * 448 brings the largest element to the largest code of the largest scale.
/// Shapes         x [rows, columns]; out as nvfp4_matrix says. Any size below 2^32 columns; partial blocks and pairs at the ends of rows.
///                Rows may be strided; columns of x and pairs adjacent; scales by any strides or in
///                128x4 tiles. Where x is empty only out.tensor_scale is
///                written: that of a tensor of zeros, 2^-117 by the default rule.
/// Formats        x float, bf16 or f16.
/// Status         bad_shape, bad_stride, bad_pointer, overlap; then nothing is written.
/// Non-finite     e2m1 has neither NaN nor Inf, so they cannot be stored as themselves, and the smallest thing that can say so is a scale.
///                isolate: the scale of a block that holds one is NaN, and its 16 values decode to NaN; amax of the tensor is that of the
///                finite elements, so all other blocks are as if nothing had happened. poison: tensor_scale and all block scales are NaN.
///                Under both, the codes of a block whose scale is NaN mark the culprits: 7 for NaN and Inf, 0 (or -0) for the others.
/// Overflow       a finite element past 6 becomes 6: there is no other code. Only a scale that was rounded down leaves one there.
/// Zeros          a tensor of zeros: zero codes, zero block scales, tensor_scale 2^-117. A block much smaller than the tensor's amax (below
///                amax / 458752 = amax / (448 * 1024)) gets scale 0 and zero codes by the default rule: counted as flushed. -0 keeps its
///                sign, and so does what becomes zero.
/// Report         optional: elements; saturated (finite, 7 or more once scaled: the rounding boundary), flushed (other than zero, and
///                worth zero now), non_finite; scale min/max of b S in fp32, blocks of scale 0 included.
/// Aliasing       outputs have memory of their own. No workspace: the largest magnitude of a device's tensor lies in out.tensor_scale
///                until the rows are done.
/// Cost           2 sizeof(X) + 9 / 16 bytes an element: x is read once for its largest magnitude and once for the codes.
/// Gradient       straight-through: the backward of quantise-dequantise is the identity.
/// Source         NVIDIA 2509.25149, "Pretraining Large Language Models with NVFP4", the quantisation procedure, with quotients where it
///                multiplies by reciprocals, and with a floor under S.
template <class Rule = nvfp4_rules::nearest, row_backend B, class X, class Layout>
status quantize_nvfp4(B const& be, view<X, 2> x, nvfp4_matrix<e2m1x2, Layout> out, nvfp4_options options = {}, report* report = nullptr) {
    validation check("quantize_nvfp4");
    check.present("x", x).unit_stride("x", x);
    check_nvfp4(check, "out", "out.codes", "out.scales", "out.tensor_scale", "x", x, out);
    auto const scales = memory_of(out.scales);
    check.distinct("out.codes", out.codes).distinct("out.scales", scales);
    check.disjoint("out.codes", out.codes, x).disjoint("out.scales", scales, x, out.codes);
    check.disjoint("out.tensor_scale", out.tensor_scale, x, out.codes, scales);
    if (!check.ok()) return check.result;

    using value = std::remove_const_t<X>;
    view<value const, 2> const from = x;
    int64_t const count = x.empty() ? 0 : x.extent[0];
    auto const run = [&](uint32_t* amax) {
        be.for_rows(count, x.extent[1], tensor_amax_row<adjacent_rows<value const>>{{from}, x.extent[1], options.policy, amax});
        be.for_rows(count, x.extent[1], quantize_nvfp4_row<value, Rule, Layout>{from, out, amax, report});
        be.for_rows(1, 1, nvfp4_end_row<Rule>{amax, out.tensor_scale.data});
    };
    if constexpr (backend_traits<B>::space == memory_space::host) {
        uint32_t amax = 0;
        run(&amax);
    } else {
        auto* const amax = reinterpret_cast<uint32_t*>(out.tensor_scale.data);
        be.for_rows(1, 1, nvfp4_begin_row{amax});
        run(amax);
    }
    return check.result;
}

/// The values that NVFP4 stands for.
///
/// Formula        y = (decode(code) * decode(scale)) * tensor_scale: the first product is exact in fp32, the second one rounding; then
///                one rounding to y.
/// Shapes         y [rows, columns], in as nvfp4_matrix says, in.columns = columns. Rows may be strided; columns of y and pairs adjacent.
/// Formats        y float, bf16 or f16.
/// Error          after quantize_nvfp4 by any rule, of an element that was neither saturated nor in a block of scale 0, before the rounding
///                to y: |y - x| <= max(|x| / 5, scale * tensor_scale / 4) + 2^-20 |x|.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Non-finite     a NaN scale makes its block NaN, a NaN tensor_scale everything.
/// Aliasing       y has memory of its own. No workspace.
/// Cost           9 / 16 + sizeof(Y) bytes an element.
template <row_backend B, class Pair, class Layout, class Y>
status dequantize_nvfp4(B const& be, nvfp4_matrix<Pair, Layout> in, view<Y, 2> y) {
    validation check("dequantize_nvfp4");
    check.present("y", y).unit_stride("y", y).distinct("y", y);
    check_nvfp4(check, "in", "in.codes", "in.scales", "in.tensor_scale", "y", y, in);
    check.disjoint("y", y, in.codes, memory_of(in.scales), in.tensor_scale);
    if (!check.ok() || y.empty()) return check.result;
    be.for_rows(y.extent[0], y.extent[1], dequantize_nvfp4_row<Y, Layout>{in, y});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
