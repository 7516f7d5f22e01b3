// Scales in any order: row-major, column-major with padding, backwards. The numbers do not depend on where they lie.
#include <keel/backend/cpu/matmul.hpp>
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <keel/quantize/scaled_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;

namespace {

template <class Scale, int Rows, int Columns> void check_layouts(int64_t rows, int64_t columns) {
    using blocks = keel::block_scaled<keel::e4m3, Scale, Rows, Columns>;
    using storage = typename Scale::storage;
    INFO(Rows << "x" << Columns << " on " << rows << "x" << columns);
    int64_t const sr = blocks::scale_rows(rows), sc = blocks::scale_columns(columns);
    guarded_matrix<keel::bf16> x(rows, columns, 1, floats(data_kind::mixed_scales, rows * columns, 4));
    guarded_matrix<keel::e4m3> want(rows, columns);
    guarded_matrix<storage> want_scales(sr, sc);
    guarded_matrix<float> want_y(rows, columns);
    blocks const plain{want.view(), want_scales.view()};
    keel::quantize<overflow::saturate>(keel::reference{}, x.view(), plain).or_throw();
    keel::dequantize(keel::reference{}, plain, want_y.view()).or_throw();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::e4m3> codes(rows, columns, 2);
        guarded_matrix<storage> turned(sc, sr, 3); // a line of it is a column of scales, padded by 3
        guarded_matrix<storage> spread(sr, 2 * sc, 1);
        guarded_matrix<float> y(rows, columns);
        keel::view<storage, 2> const s = spread.view(), backwards{s.data + 2 * (sc - 1), {sr, sc}, {s.stride[0], -2}};
        for (auto const& scales : {transposed(turned.view()), backwards}) {
            blocks const q{codes.view(), scales};
            keel::quantize<overflow::saturate>(be, x.view(), q).or_throw();
            keel::dequantize(be, q, y.view()).or_throw();
            CHECK(codes.contents() == want.contents());
            CHECK(equal_bits(y.contents(), want_y.contents()));
            int64_t wrong = 0;
            for (int64_t i = 0; i < sr; ++i)
                for (int64_t j = 0; j < sc; ++j) wrong += keel::to_word(scales(i, j)) != keel::to_word(want_scales.get(i, j));
            CHECK(wrong == 0);
        }
        CHECK((codes.untouched() && turned.untouched() && spread.untouched()));
    });
}

} // namespace

TEST_CASE("scales lie in any order") { // aiter #4506: "transposed" scales that were row-major
    check_layouts<keel::fp32_scale, 1, 128>(5, 700);
    check_layouts<keel::e8m0_scale, 1, 32>(5, 131);
    check_layouts<keel::power_of_two_scale, 128, 128>(131, 300);
    check_layouts<keel::fp32_scale, 1, 96>(3, 300); // blocks that a warp walks one by one
    check_layouts<keel::fp32_scale, 1, keel::whole>(4, 77);
    check_layouts<keel::fp32_scale, 128, 1>(131, 77); // a scale a lane
}

TEST_CASE("column-major scales go into the product as they are") {
    int64_t const m = 9, n = 130, k = 300;
    guarded_matrix<float> x(m, k, 0, floats(data_kind::normal, m * k, 1)), w(n, k, 0, floats(data_kind::normal, n * k, 2));
    using row = keel::row_blocks<>;
    using tile = keel::tile_blocks<>;
    guarded_matrix<keel::e4m3> xq(m, k), wq(n, k);
    guarded_matrix<float> xs(m, row::scale_columns(k)), turned(row::scale_columns(k), m, 3), ws(tile::scale_rows(n), tile::scale_columns(k));
    keel::cpu be;
    keel::quantize<overflow::saturate>(be, x.view(), row{xq.view(), xs.view()}).or_throw();
    keel::quantize<overflow::saturate>(be, w.view(), tile{wq.view(), ws.view()}).or_throw();
    scratch room(keel::scaled_matmul_workspace(be, m, n, k));
    guarded_matrix<float> want(m, n), got(m, n);
    keel::scaled_matmul(be, row{xq.view(), xs.view()}, transposed(tile{wq.view(), ws.view()}), want.view(), {}, room.get()).or_throw();
    keel::quantize<overflow::saturate>(be, x.view(), row{xq.view(), transposed(turned.view())}).or_throw();
    keel::scaled_matmul(be, row{xq.view(), transposed(turned.view())}, transposed(tile{wq.view(), ws.view()}), got.view(), {}, room.get())
        .or_throw();
    CHECK(equal_bits(got.contents(), want.contents()));
}
