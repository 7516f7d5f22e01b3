// Scales in words of 4, as DeepGEMM packs them: where each lies, padding untouched, and the calls that take them.
#include <cstring>

#include <keel/backend/cpu/matmul.hpp>
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <keel/quantize/scaled_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;
using keel::scale_rules::deep_gemm;

namespace {

using strided = keel::row_blocks<keel::e4m3, keel::e8m0_scale>;
using packed = keel::row_blocks<keel::e4m3, keel::e8m0_scale, keel::packed_scales>;

/// An int32 tensor [ceil(columns / 4), pitch], the transpose of which is what DeepGEMM calls packed UE8M0, MN-major.
struct words {
    std::vector<keel::e8m0> memory;
    int64_t rows, columns, pitch;
    words(int64_t r, int64_t c)
        : memory(static_cast<std::size_t>(keel::packed_size(r, c) + 16), keel::e8m0{0xa5}), rows(r), columns(c), pitch((r + 3) / 4 * 4) {}
    keel::packed_view<keel::e8m0> view() { return keel::packed(memory.data(), rows, columns); }
    /// Words that are not those of `want`, where padding is as it was made.
    int64_t wrong(guarded_matrix<keel::e8m0> const& want) const {
        std::vector<uint32_t> got(memory.size() / 4);
        std::memcpy(got.data(), memory.data(), memory.size());
        int64_t n = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
            int64_t const word = static_cast<int64_t>(i) / pitch, row = static_cast<int64_t>(i) % pitch;
            uint32_t expected = 0;
            for (int k = 0; k < 4; ++k) {
                bool const padding = row >= rows || 4 * word + k >= columns;
                expected |= (padding ? 0xa5u : uint32_t{want.get(row, 4 * word + k).bits}) << (8 * k);
            }
            n += got[i] != expected;
        }
        return n;
    }
};

} // namespace

TEST_CASE("a packed view has its elements where DeepGEMM reads them, in parts and turned as well") {
    CHECK((keel::packed_size(0, 5) == 0 && keel::packed_size(5, 0) == 0 && keel::packed_size(5, 5) == 64));
    words w(6, 7);
    auto const v = w.view();
    CHECK(v.at(0, 3) == &w.memory[3]);
    CHECK(v.at(5, 0) == &w.memory[20]);
    CHECK(v.at(2, 5) == &w.memory[8 * 4 + 2 * 4 + 1]);
    CHECK(keel::packed(w.memory.data(), 6, 7, 12).at(2, 5) == &w.memory[12 * 4 + 2 * 4 + 1]);
    CHECK(keel::transposed(v).at(5, 2) == v.at(2, 5));
    CHECK(keel::columns(keel::slice(v, 1, 4), 2, 5).at(1, 3) == v.at(2, 5));
}

TEST_CASE("quantise and dequantise take packed scales") {
    for (auto const& shape : {std::pair<int64_t, int64_t>{1, 1}, {7, 700}, {130, 300}}) {
        int64_t const rows = shape.first, columns = shape.second;
        INFO(rows << "x" << columns);
        guarded_matrix<keel::bf16> x(rows, columns, 1, floats(data_kind::mixed_scales, rows * columns, 4));
        guarded_matrix<keel::e4m3> want(rows, columns);
        guarded_matrix<keel::e8m0> scales(rows, strided::scale_columns(columns));
        guarded_matrix<float> y(rows, columns);
        strided const plain{want.view(), scales.view()};
        keel::quantize<overflow::saturate, deep_gemm>(keel::reference{}, x.view(), plain).or_throw();
        keel::dequantize(keel::reference{}, plain, y.view()).or_throw();
        for_main_backends([&](std::string const& name, auto const& be) {
            INFO(name);
            guarded_matrix<keel::e4m3> codes(rows, columns);
            guarded_matrix<float> z(rows, columns);
            words w(rows, strided::scale_columns(columns));
            packed const q{codes.view(), w.view()};
            keel::quantize<overflow::saturate, deep_gemm>(be, x.view(), q).or_throw();
            CHECK(codes.contents() == want.contents());
            CHECK(w.wrong(scales) == 0);
            keel::dequantize(be, q, z.view()).or_throw();
            CHECK(equal_bits(z.contents(), y.contents()));
        });
    }
}

TEST_CASE("a product of blocks with packed scales has the bits of the plain one") {
    int64_t const m = 9, n = 6, k = 700;
    guarded_matrix<float> a(m, k, 0, floats(data_kind::normal, m * k, 1)), want(m, n), got(m, n);
    guarded_matrix<keel::e4m3> codes(m, k);
    guarded_matrix<keel::e8m0> scales(m, strided::scale_columns(k));
    words w(m, strided::scale_columns(k));
    keel::cpu be;
    strided const p{codes.view(), scales.view()};
    packed const q{codes.view(), w.view()};
    keel::quantize<overflow::saturate>(be, a.view(), p).or_throw();
    keel::quantize<overflow::saturate>(be, a.view(), q).or_throw();
    scratch room(keel::scaled_matmul_workspace(be, m, n, k));
    keel::scaled_matmul(be, p, keel::transposed(keel::slice(p, 2, n)), want.view(), {}, room.get()).or_throw();
    keel::scaled_matmul(be, q, keel::transposed(keel::slice(q, 2, n)), got.view(), {}, room.get()).or_throw();
    CHECK(equal_bits(got.contents(), want.contents()));
}

TEST_CASE("a pitch below the rows is refused") {
    guarded_matrix<float> x(5, 64, 0, floats(data_kind::normal, 320));
    guarded_matrix<keel::e4m3> codes(5, 64);
    words w(5, 1);
    auto const wanted = keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), packed{codes.view(), keel::packed(w.memory.data(), 5, 1, 4)});
    CHECK(wanted.message() == "quantize: out.scales, wanted tiles for all elements (bad_shape)");
    CHECK(codes.at(0, 0) == 0.0);
    CHECK(w.memory[0].bits == 0xa5);
}
