// Codes back to numbers: every code by every kind of scale, into every format, on every backend, against the formula.
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
template <class Code, class Y, int Block> void check_codes() {
    float const scales[] = {1.0f,     0x1p-7f,  0x1.8p3f, 0.3f,    3.1e-39f, 0x1p-149f, 1.2e38f, 3.4e38f, 0x1.fffffep-1f,
                            7.3e-21f, 5.5e-41f, 0.0f,     -0.75f,  std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
    auto const rows = static_cast<int64_t>(std::size(scales)), columns = int64_t{256 + 77};
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
    check_codes<keel::e5m2, keel::f16, 128>();
}
