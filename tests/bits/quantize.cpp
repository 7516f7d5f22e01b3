// Same bits: block quantisation of each shape, and back.
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize_stochastic.hpp>
#include <support/bits.hpp>

using namespace keel_test;

namespace {

template <class Q> void cases(char const* name) {
    for (data_kind kind : all_kinds)
        same_bits(std::string("quantize ") + name + " " + name_of(kind), [&](auto const& be, digest& d) {
            int64_t const rows = 131, columns = 259;
            guarded_matrix<keel::bf16> x(rows, columns, 1, floats(kind, rows * columns, 1));
            guarded_matrix<typename Q::code> codes(rows, columns, 1);
            guarded_matrix<typename Q::scale_storage> scales(Q::scale_rows(rows), Q::scale_columns(columns));
            guarded_matrix<keel::bf16> y(rows, columns);
            Q const q{codes.view(), scales.view()};
            keel::report report;
            keel::quantize<keel::overflow::saturate_finite>(be, x.view(), q, {}, &report).or_throw();
            keel::dequantize(be, q, y.view()).or_throw();
            d.add(codes), d.add(scales), d.add(y), d.add(&report, sizeof report);
        });
}

/// Codes that lie turned, scales in tiles, events of each block, stochastic codes.
void layouts() {
    for (data_kind kind : all_kinds)
        same_bits(std::string("quantize turned, tiled, by chance ") + name_of(kind), [&](auto const& be, digest& d) {
            int64_t const rows = 131, columns = 259;
            using blocks = keel::mx_blocks<keel::e4m3, keel::swizzled_scales>;
            guarded_matrix<keel::bf16> x(rows, columns, 1, floats(kind, rows * columns, 1));
            guarded_matrix<keel::e4m3> codes(rows, columns, 1), turned(columns, rows, 1);
            guarded_matrix<keel::e8m0> tiles(1, keel::swizzled_size(rows, 9)), down(5, columns);
            keel::block_events events[131 * 9] = {}; // a vector of them would be a weak symbol of every level
            blocks const q{codes.view(), keel::swizzled(tiles.view().data, rows, 9)};
            keel::quantize<keel::overflow::saturate>(be, x.view(), q, {}, nullptr, keel::rows(&events[0], rows, 9)).or_throw();
            keel::quantize<keel::overflow::saturate>(
                be, x.view(), keel::block_scaled<keel::e4m3, keel::e8m0_scale, 32, 1>{keel::transposed(turned.view()), down.view()}).or_throw();
            d.add(codes), d.add(turned), d.add(tiles), d.add(down), d.add(&events[0], sizeof events);
            keel::quantize_stochastic<keel::overflow::saturate>(be, x.view(), q, {.key = {.seed = 5, .step = 1}}).or_throw();
            d.add(codes);
        });
}

} // namespace

int main() {
    layouts();
    cases<keel::row_blocks<keel::e4m3, keel::fp32_scale>>("1x128 fp32");
    cases<keel::column_blocks<keel::e5m2, keel::e8m0_scale>>("128x1 e8m0");
    cases<keel::tile_blocks<keel::e4m3, keel::power_of_two_scale>>("128x128 pow2");
    cases<keel::block_scaled<keel::e4m3, keel::fp32_scale, 1, keel::whole>>("a row");
    cases<keel::block_scaled<keel::e4m3, keel::fp32_scale, keel::whole, keel::whole>>("a tensor");
    return disagreements != 0;
}
