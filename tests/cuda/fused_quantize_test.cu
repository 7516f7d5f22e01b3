// Quantisers of what is computed, and by chance, instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the reference, bit for bit.
#include <keel/format/bf16.hpp>
#include <keel/nn/swiglu_quantize.hpp>
#include <keel/norm/rms_norm_quantize.hpp>
#include <keel/quantize/quantize_stochastic.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

using keel::overflow;

template <class X> void check_fused(int64_t rows, int64_t width) {
    using along = keel::block_scaled<keel::e4m3, keel::e8m0_scale, 1, 128>;
    int64_t const blocks = along::scale_columns(width);
    twins<X> x(values<X>(rows * width, 1)), up(values<X>(rows * width, 2));
    twins<float> delta(values<float>(width, 3));
    twins<keel::e4m3> normed(rows * width), gated(rows * width), drawn(rows * width);
    twins<keel::e8m0> normed_scales(rows * blocks), gated_scales(rows * blocks), drawn_scales(rows * blocks);
    CHECK(on_both([&](auto be) {
        auto const X_ = keel::rows(x.on(be), rows, width);
        auto const in_blocks = [&](auto& c, auto& s) { return along{keel::rows(c.on(be), rows, width), keel::rows(s.on(be), rows, blocks)}; };
        keel::rms_norm_quantize<float, overflow::saturate>(be, X_, keel::vec(delta.on(be), width), in_blocks(normed, normed_scales)).or_throw();
        keel::swiglu_quantize<keel::bf16, overflow::saturate>(be, X_, keel::rows(up.on(be), rows, width), in_blocks(gated, gated_scales)).or_throw();
        keel::quantize_stochastic<overflow::saturate>(be, X_, in_blocks(drawn, drawn_scales), {.key = {.seed = 3}}).or_throw();
    }));
    CHECK((normed.equal() && normed_scales.equal()));
    CHECK((gated.equal() && gated_scales.equal()));
    CHECK((drawn.equal() && drawn_scales.equal()));
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: fused and stochastic quantisers") {
    for (int64_t width : {1, 127, 1000, 4099}) check_fused<keel::bf16>(70, width);
}
