// sum and measure_peak_magnitude: plain words on every backend.
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/guard/peak_magnitude.hpp>
#include <keel/nn/sum.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

TEST_CASE("sum adds in fp32 and rounds once; measure_peak_magnitude sees the largest, Inf before numbers, NaN before Inf") {
    guarded_matrix<keel::bf16> a(3, 77, 1, floats(data_kind::normal, 231, 1)), b(3, 77, 0, floats(data_kind::normal, 231, 2)), c(3, 77, 2, floats(data_kind::normal, 231, 3));
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::bf16> y(3, 77, 5), z(3, 77);
        keel::sum(be, a.view(), b.view(), c.view(), y.view()).or_throw();
        keel::sum(be, a.view(), b.view(), {}, z.view()).or_throw();
        float largest = 0, largest_gain = 0;
        for (int64_t i = 0; i < 3; ++i)
            for (int64_t j = 0; j < 77; ++j) {
                float const two = keel::decode(a.get(i, j)) + keel::decode(b.get(i, j));
                CHECK(z.get(i, j).bits == keel::encode<keel::bf16>(two).bits);
                CHECK(y.get(i, j).bits == keel::encode<keel::bf16>(two + keel::decode(c.get(i, j))).bits);
                largest = std::max(largest, std::abs(keel::decode(a.get(i, j))));
                largest_gain = std::max(largest_gain, std::abs(1 + keel::decode(a.get(i, j))));
            }
        keel::peak_magnitude top, gain;
        keel::measure_peak_magnitude(be, a.view(), &top).or_throw();
        keel::measure_peak_magnitude(be, a.view(), &gain, 1.0f).or_throw();
        CHECK(top.value() == largest);
        CHECK(gain.value() == largest_gain);
        for (int64_t spot = 0; spot < 77; ++spot) {
            guarded_matrix<float> x(1, 77, 0, std::vector<float>(77, 2.0f));
            x.set(0, spot, -std::numeric_limits<float>::infinity());
            keel::peak_magnitude inf;
            keel::measure_peak_magnitude(be, x.view(), &inf).or_throw();
            CHECK(std::isinf(inf.value()));
            x.set(0, (spot + 5) % 77, std::numeric_limits<float>::quiet_NaN());
            keel::measure_peak_magnitude(be, x.view(), &inf).or_throw();
            CHECK(std::isnan(inf.value()));
        }
    });
    CHECK(keel::sum(keel::cpu{}, a.view(), keel::columns(b.view(), 0, 5), {}, c.view()).message() == "sum: b has columns = 5, wanted 77 (bad_shape)");
}

TEST_CASE("sum over any of its inputs has the bits of separate memory") {
    using matrix = guarded_matrix<keel::bf16>;
    matrix a(3, 77, 1, floats(data_kind::normal, 231, 1)), b(3, 77, 1, floats(data_kind::normal, 231, 2)), c(3, 77, 1, floats(data_kind::normal, 231, 3)), y(3, 77, 1);
    keel::cpu be;
    keel::sum(be, a.view(), b.view(), c.view(), y.view()).or_throw();
    matrix a2 = a, b2 = b, c2 = c;
    keel::sum(be, a2.view(), b.view(), c.view(), a2.view()).or_throw();
    keel::sum(be, a.view(), b2.view(), c.view(), b2.view()).or_throw();
    keel::sum(be, a.view(), b.view(), c2.view(), c2.view()).or_throw();
    CHECK((a2.contents() == y.contents() && b2.contents() == y.contents() && c2.contents() == y.contents()));
    CHECK(keel::sum(be, a.view(), b.view(), keel::rows(static_cast<keel::bf16*>(nullptr), 3, 77), y.view()).message() ==
          "sum: c, wanted data, not null (bad_pointer)");
}
