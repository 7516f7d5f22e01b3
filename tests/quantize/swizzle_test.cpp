// Scales in 128x4 tiles: where each lies by the published formula, padding untouched, and every call that takes them.
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

/// cuBLAS's words for it: block tiles of 128 x 4, of which each row r lies in 16 bytes group r % 32, four of them beside each other.
std::size_t place(int64_t r, int64_t c, int64_t columns) {
    int64_t const tiles = (columns + 3) / 4, tile = (r / 128) * tiles + c / 4, inner_row = r % 128, inner_column = c % 4;
    return static_cast<std::size_t>(tile * 512 + (inner_row % 32) * 16 + (inner_row / 32) * 4 + inner_column);
}

struct tiles {
    std::vector<keel::e8m0> memory;
    int64_t rows, columns;
    tiles(int64_t r, int64_t c) : memory(static_cast<std::size_t>(keel::swizzled_size(r, c) + 16), keel::e8m0{0xa5}), rows(r), columns(c) {}
    keel::swizzled_view<keel::e8m0> view() { return keel::swizzled(memory.data(), rows, columns); }
    /// Elements that are not those of `want`, and bytes of padding that have changed.
    int64_t wrong(guarded_matrix<keel::e8m0> const& want, bool turned = false) const {
        std::vector<uint8_t> expected(memory.size(), 0xa5);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < columns; ++c) expected[place(r, c, columns)] = (turned ? want.get(c, r) : want.get(r, c)).bits;
        int64_t n = 0;
        for (std::size_t i = 0; i < memory.size(); ++i) n += memory[i].bits != expected[i];
        return n;
    }
};

using mx = keel::mx_blocks<>;
using mx_tiled = keel::mx_blocks<keel::e4m3, keel::swizzled_scales>;

} // namespace

TEST_CASE("a swizzled view has its elements where the format says, in parts and turned as well") {
    CHECK(keel::swizzled_size(0, 5) == 0);
    CHECK(keel::swizzled_size(1, 1) == 512);
    CHECK(keel::swizzled_size(129, 5) == 4 * 512);
    tiles t(300, 11);
    auto const v = t.view();
    int64_t wrong = 0;
    for (int64_t r = 0; r < 300; ++r)
        for (int64_t c = 0; c < 11; ++c) wrong += v.at(r, c) != &t.memory[place(r, c, 11)];
    CHECK(wrong == 0);
    CHECK(keel::transposed(v).at(3, 200) == v.at(200, 3));
    CHECK(keel::slice(v, 130, 50).at(7, 5) == v.at(137, 5));
    CHECK(keel::columns(keel::slice(v, 130, 50), 2, 6).at(7, 5) == v.at(137, 7));
    CHECK(keel::columns(keel::transposed(keel::slice(v, 130, 50)), 1, 40).at(5, 7) == v.at(138, 5));
}

TEST_CASE("quantise, pairs, dequantise and products take scales in 128x4 tiles") {
    for (auto const& shape : {std::pair<int64_t, int64_t>{1, 1}, {3, 33}, {130, 300}, {257, 128}}) {
        int64_t const rows = shape.first, columns = shape.second;
        INFO(rows << "x" << columns);
        guarded_matrix<keel::bf16> x(rows, columns, 1, floats(data_kind::mixed_scales, rows * columns, 4));
        guarded_matrix<keel::e4m3> want(rows, columns), want_down(rows, columns);
        guarded_matrix<keel::e8m0> scales(rows, mx::scale_columns(columns)), down_scales(mx::scale_columns(rows), columns);
        keel::block_scaled<keel::e4m3, keel::e8m0_scale, 32, 1> const down{want_down.view(), down_scales.view()};
        keel::quantize<overflow::saturate>(keel::reference{}, x.view(), mx{want.view(), scales.view()}).or_throw();
        keel::quantize<overflow::saturate>(keel::reference{}, x.view(), down).or_throw();
        guarded_matrix<float> y(rows, columns);
        keel::dequantize(keel::reference{}, mx{want.view(), scales.view()}, y.view()).or_throw();
        for_main_backends([&](std::string const& name, auto const& be) {
            INFO(name);
            guarded_matrix<keel::e4m3> codes(rows, columns), turned(columns, rows, 2);
            tiles t(rows, mx::scale_columns(columns)), t2(rows, mx::scale_columns(columns)), u(columns, mx::scale_columns(rows));
            mx_tiled const q{codes.view(), t.view()};
            keel::quantize<overflow::saturate>(be, x.view(), q).or_throw();
            CHECK(codes.contents() == want.contents());
            CHECK(t.wrong(scales) == 0);
            // Both directions at once: the second is the transpose's 1x32 blocks, as a product along the rows wants them.
            mx_tiled const both{codes.view(), t2.view()}, across{turned.view(), u.view()};
            keel::quantize_pair<overflow::saturate>(be, x.view(), both, keel::transposed(across)).or_throw();
            CHECK(t2.wrong(scales) == 0);
            CHECK(u.wrong(down_scales, true) == 0);
            int64_t wrong = 0;
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < columns; ++j) wrong += turned.get(j, i).bits != want_down.get(i, j).bits;
            CHECK(wrong == 0);
            guarded_matrix<float> z(rows, columns);
            keel::dequantize(be, q, z.view()).or_throw();
            CHECK(z.contents() == y.contents());
        });
    }
}

TEST_CASE("a product of blocks with scales in tiles has the bits of the plain one") {
    int64_t const m = 130, n = 37, k = 200;
    guarded_matrix<float> a(m, k, 0, floats(data_kind::normal, m * k, 1)), b(n, k, 0, floats(data_kind::normal, n * k, 2));
    guarded_matrix<keel::e4m3> ac(m, k), bc(n, k);
    guarded_matrix<keel::e8m0> as(m, mx::scale_columns(k)), bs(n, mx::scale_columns(k));
    tiles at(m, mx::scale_columns(k)), bt(n, mx::scale_columns(k));
    keel::cpu be;
    keel::quantize<overflow::saturate>(be, a.view(), mx{ac.view(), as.view()}).or_throw();
    keel::quantize<overflow::saturate>(be, b.view(), mx{bc.view(), bs.view()}).or_throw();
    guarded_matrix<float> want(m, n), got(m, n);
    scratch room(keel::scaled_matmul_workspace(be, m, n, k, 32));
    keel::scaled_matmul(be, mx{ac.view(), as.view()}, keel::transposed(mx{bc.view(), bs.view()}), want.view(), {}, room.get()).or_throw();
    keel::quantize<overflow::saturate>(be, a.view(), mx_tiled{ac.view(), at.view()}).or_throw();
    keel::quantize<overflow::saturate>(be, b.view(), mx_tiled{bc.view(), bt.view()}).or_throw();
    keel::scaled_matmul(be, mx_tiled{ac.view(), at.view()}, keel::transposed(mx_tiled{bc.view(), bt.view()}), got.view(), {}, room.get()).or_throw();
    CHECK(equal_bits(got.contents(), want.contents()));
}

TEST_CASE("tiles of another size, without memory or over other arguments are refused") {
    guarded_matrix<float> x(4, 64, 0, floats(data_kind::normal, 256));
    guarded_matrix<keel::e4m3> codes(4, 64);
    tiles t(4, 3), small(4, 2);
    auto const refused = [&](keel::swizzled_view<keel::e8m0> v) {
        return keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), mx_tiled{codes.view(), v}).message();
    };
    CHECK(refused(t.view()) == "quantize: out.scales has columns = 3, wanted 2 (bad_shape)");
    CHECK(refused(keel::swizzled<keel::e8m0>(nullptr, 4, 2)) == "quantize: out.scales, wanted data, not null (bad_pointer)");
    auto short_of = small.view();
    short_of.tile_rows = 0;
    CHECK(refused(short_of) == "quantize: out.scales, wanted tiles for all elements (bad_shape)");
    CHECK(refused(keel::swizzled(reinterpret_cast<keel::e8m0*>(codes.view().data), 4, 2)) ==
          "quantize: out.scales, wanted memory of its own (overlap)");
    CHECK(codes.at(0, 0) == 0.0);
    CHECK(small.memory[0].bits == 0xa5);
}
