// Quantisers instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the reference, bit for bit.
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

using keel::overflow;

/// Along the rows, and by columns with turned codes.
template <class X> void check_quantize(int64_t rows, int64_t width) {
    using along = keel::block_scaled<keel::e4m3, keel::e8m0_scale, 1, 128>;
    using down = keel::block_scaled<keel::e4m3, keel::fp32_scale, 32, 1>;
    int64_t const blocks = along::scale_columns(width), strips = down::scale_rows(rows);
    twins<X> x(values<X>(rows * width, 1)), back(rows * width);
    twins<keel::e4m3> codes(rows * width), turned(rows * width);
    twins<keel::e8m0> scales(rows * blocks);
    twins<float> down_scales(strips * width);
    twins<keel::report> report(1);
    CHECK(on_both([&](auto be) {
        auto const X_ = keel::rows(x.on(be), rows, width);
        along const q{keel::rows(codes.on(be), rows, width), keel::rows(scales.on(be), rows, blocks)};
        keel::quantize<overflow::saturate>(be, X_, q, {}, report.on(be)).or_throw();
        keel::dequantize(be, q, keel::rows(back.on(be), rows, width)).or_throw();
        keel::quantize<overflow::saturate>(
            be, X_, down{keel::transposed(keel::rows(turned.on(be), width, rows)), keel::rows(down_scales.on(be), strips, width)})
            .or_throw();
    }));
    CHECK((codes.equal() && scales.equal() && report.equal() && back.equal()));
    CHECK((turned.equal() && down_scales.equal()));
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: quantise and dequantise") {
    for (int64_t width : {1, 127, 1000, 4099}) check_quantize<float>(70, width), check_quantize<keel::bf16>(70, width);
}
