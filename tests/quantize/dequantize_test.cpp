// Codes back to numbers: every code by every kind of scale, into every format, on every backend, against the formula.
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/minifloat.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

/// Each row one scale (x columns of codes in an order that mixes them), blocks of any length.
template <class Code, class Y, int Block> void check_codes(int64_t columns = 256 + 77) {
    float const scales[] = {1.0f,     0x1p-7f,  0x1.8p3f, 0.3f,    3.1e-39f, 0x1p-149f, 1.2e38f, 3.4e38f, 0x1.fffffep-1f,
                            7.3e-21f, 5.5e-41f, 0.0f,     -0.75f,  std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            0x1.01p0f, 0x1.03p4f, // products halfway between two bf16
                            0x1.4p-112f, 0x1.4p-113f, 0x1.4p-120f, 0x1.4p-121f, 0x1.4p-123f, // the smallest normal code times these, about 2^-126
                            0x1p111f, 0x1p112f, 0x1.4p113f, 0x1p118f, 0x1.4p118f, 0x1p119f, 0x1.4p119f}; // the largest, about 2^128
    auto const rows = static_cast<int64_t>(std::size(scales));
    using blocks = keel::block_scaled<Code, keel::fp32_scale, 1, Block>;
    guarded_matrix<Code> codes(rows, columns, 3);
    guarded_matrix<float> s(rows, blocks::scale_columns(columns), 1);
    guarded_matrix<Y> want(rows, columns);
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t b = 0; b < s.columns(); ++b) s.set(i, b, scales[(i + b) % rows]);
        for (int64_t j = 0; j < columns; ++j) {
            codes.set(i, j, keel::from_word<Code>(static_cast<uint32_t>((j * 37 + i) % 256)));
            // The product of two floats is exact in double, so this rounds once to fp32 and once to Y.
            double const product = codes.at(i, j) * static_cast<double>(scales[(i + j / Block) % rows]);
            want.set(i, j, keel::encode<Y>(static_cast<float>(product)));
        }
    }
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name << ", blocks of " << Block);
        guarded_matrix<Y> y(rows, columns, 2);
        keel::dequantize(be, blocks{codes.view(), s.view()}, y.view()).or_throw();
        int64_t wrong = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                Y const a = y.get(i, j), b = want.get(i, j);
                wrong += std::memcmp(&a, &b, sizeof a) != 0;
            }
        CHECK(wrong == 0);
        CHECK(y.untouched());
    });
}
template <class Code, class Y> void check_blocks_of() {
    check_codes<Code, Y, 128>();
    check_codes<Code, Y, 32>();
    check_codes<Code, Y, 97>();
    check_codes<Code, Y, keel::whole>();
}

} // namespace

TEST_CASE("every code times every scale is one product and one rounding") {
    check_blocks_of<keel::e4m3, keel::bf16>();
    check_blocks_of<keel::e5m2, keel::bf16>();
    check_blocks_of<keel::minifloat<3, 4, 3, keel::specials::ieee>, keel::bf16>();
    check_blocks_of<keel::e4m3, float>();
    check_codes<keel::e5m2, float, 128>();
    check_codes<keel::e5m2, keel::f16, 128>();
    check_codes<keel::e4m3, keel::bf16, 1024>(2500); // of which a tile takes a part
    check_codes<keel::e4m3, float, 1>(1300);
    for (int64_t tail = 0; tail < 33; ++tail) check_codes<keel::e4m3, keel::bf16, 128>(64 + tail);
}

namespace {
/// Row i: all codes, in two orders, with byte i as the scale of each block.
template <class Code, class Y> void check_bytes() {
    using blocks = keel::mx_blocks<Code>;
    guarded_matrix<Code> codes(256, 512, 1);
    guarded_matrix<keel::e8m0> s(256, blocks::scale_columns(512), 1);
    guarded_matrix<Y> want(256, 512);
    for (int64_t i = 0; i < 256; ++i) {
        double const scale = i == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, static_cast<int>(i) - 127);
        for (int64_t b = 0; b < s.columns(); ++b) s.set(i, b, keel::e8m0{static_cast<uint8_t>(i)});
        for (int64_t j = 0; j < 512; ++j) {
            codes.set(i, j, keel::from_word<Code>(static_cast<uint32_t>(j < 256 ? j : j * 37 % 256)));
            want.set(i, j, keel::encode<Y>(static_cast<float>(codes.at(i, j) * scale)));
        }
    }
    CHECK(want.at(0, keel::to_word(keel::encode<Code, keel::overflow::saturate>(1.0f))) == 0x1p-127);
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<Y> y(256, 512, 2);
        keel::dequantize(be, blocks{codes.view(), s.view()}, y.view()).or_throw();
        CHECK((y.contents() == want.contents())); // not printed
        CHECK(y.untouched());
    });
}
} // namespace

TEST_CASE("every code times every e8m0 byte: 00 is 2^-127, ff is NaN") { // TE #3262, ao #4725
    check_bytes<keel::e4m3, float>();
    check_bytes<keel::e5m2, keel::bf16>();
}

TEST_CASE("a bad dequantize names the argument and writes nothing") {
    guarded_matrix<float> y(2, 130, 3, std::vector<float>(260, 7.0f));
    guarded_matrix<keel::e4m3> codes(2, 130), short_codes(2, 129);
    guarded_matrix<float> scales(2, 2), few(2, 1);
    keel::row_blocks<> const q{codes.view(), scales.view()};
    auto const call = [&](keel::row_blocks<> in, keel::view<float, 2> to) { return keel::dequantize(keel::cpu{}, in, to); };
    auto const Y = y.view();
    CHECK(call({short_codes.view(), scales.view()}, Y).message() == "dequantize: in.codes has columns = 129, wanted 130 (bad_shape)");
    CHECK(call({codes.view(), few.view()}, Y).message() == "dequantize: in.scales has columns = 1, wanted 2 (bad_shape)");
    using keel::status_code;
    CHECK(call(q, {nullptr, {2, 130}, {130, 1}}).code == status_code::bad_pointer);
    CHECK(call(q, {Y.data, {2, 130}, {0, 1}}).code == status_code::bad_stride);
    CHECK(call({keel::rows(reinterpret_cast<keel::e4m3*>(Y.data), 2, 130), scales.view()}, Y).code == status_code::overlap);
    CHECK(call({codes.view(), keel::rows(Y.data + 100, 2, 2)}, Y).code == status_code::overlap);
    CHECK(y.contents() == guarded_matrix<float>(2, 130, 0, std::vector<float>(260, 7.0f)).contents());
    CHECK(call(q, Y).ok());
    CHECK(y.at(1, 129) == 0.0);
}
