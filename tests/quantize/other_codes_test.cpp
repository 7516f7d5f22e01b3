// What e4m3 and e5m2 do not have in common with other codes of a byte, and the ends of ranges: of values, of counts and of sizes.
#include <cmath>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/fp4.hpp>
#include <keel/format/fp8_fnuz.hpp>
#include <keel/quantize/quantize_stochastic.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::non_finite_policy;
using keel::overflow;

namespace {

float const not_a_number = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();

/// One row in one block.
template <class Code, class Scale, int Columns> struct row_of_codes {
    std::vector<Code> codes;
    typename Scale::storage scale{};
    keel::report report;
    explicit row_of_codes(std::size_t n) : codes(n) {}
    keel::block_scaled<Code, Scale, 1, Columns> view() {
        return {keel::rows(codes.data(), 1, static_cast<int64_t>(codes.size())), keel::rows(&scale, 1, 1)};
    }
};

} // namespace

TEST_CASE("codes without -0: their NaN is not a zero, and a negative element that vanishes is") {
    std::vector<float> x{1.0f, not_a_number, -1.0f, infinity, -1e-9f, 0.0f, -0.0f, 0.5f};
    for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        row_of_codes<keel::e4m3fnuz, keel::fp32_scale, 128> q(x.size());
        auto const X = keel::rows(x.data(), 1, static_cast<int64_t>(x.size()));
        keel::quantize<overflow::to_nonfinite>(be, X, q.view(), {}, &q.report).or_throw();
        CHECK((q.report.elements == 8 && q.report.non_finite == 2 && q.report.flushed == 1 && q.report.saturated == 0));
        CHECK((q.codes[1].bits == 0x80 && q.codes[3].bits == 0x80 && q.codes[4].bits == 0 && q.codes[6].bits == 0));
        CHECK(keel::decode(q.codes[0]) == 240.0f);
        q.report = {};
        keel::quantize<overflow::saturate>(be, X, q.view(), {non_finite_policy::poison}, &q.report).or_throw();
        CHECK((q.report.non_finite == 2 && q.report.flushed == 0 && q.report.saturated == 0));
        for (auto const& c : q.codes) CHECK(c.bits == 0x80);
        CHECK(std::isnan(q.scale));
        q.report = {};
        std::vector<keel::block_events> events(1);
        keel::quantize<overflow::to_nonfinite, keel::scale_rules::nearest>( // 1.4 * 240 takes 2^0, and is past the boundary
            be, keel::rows(std::vector<float>{336.0f, 1.0f}.data(), 1, 2), row_of_codes<keel::e4m3fnuz, keel::power_of_two_scale, 128>(2).view(), {},
            &q.report, keel::rows(events.data(), 1, 1))
            .or_throw();
        CHECK((q.report.saturated == 1 && q.report.flushed == 0 && events[0].saturated == 1 && events[0].flushed == 0));
    });
}

TEST_CASE("codes without NaN are quantised under poison alone") {
    std::vector<float> x{1.0f, not_a_number, -3.0f};
    auto const X = keel::rows(x.data(), 1, 3);
    row_of_codes<keel::e2m1, keel::e8m0_scale, 32> q(3);
    q.codes.assign(3, keel::from_word<keel::e2m1>(5));
    std::string const wanted = ": options.policy, wanted poison: these codes have no NaN (bad_option)";
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, X, q.view()).message() == "quantize" + wanted);
    CHECK(keel::quantize_stochastic<overflow::saturate>(keel::cpu{}, X, q.view(), {}).message() == "quantize_stochastic" + wanted);
    CHECK((q.codes[0].bits == 5 && q.scale.bits == 0));
    for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<float> y(1, 3);
        keel::quantize<overflow::saturate>(be, X, q.view(), {non_finite_policy::poison}).or_throw();
        keel::dequantize(be, q.view(), y.view()).or_throw();
        CHECK((std::isnan(y.get(0, 0)) && std::isnan(y.get(0, 1))));
        keel::quantize<overflow::saturate>(be, keel::rows(x.data() + 2, 1, 1), row_of_codes<keel::e2m1, keel::e8m0_scale, 32>(1).view(), {non_finite_policy::poison})
            .or_throw();
    });
}

TEST_CASE("the largest floats come back finite up to the documented ends") {
    for_main_backends([](std::string const& name, auto const& be) {
        INFO(name);
        auto const back = [&]<class Code, class Scale>(float x, Code, Scale) {
            row_of_codes<Code, Scale, 32> q(1);
            float y = 0;
            keel::quantize<overflow::saturate>(be, keel::rows(&x, 1, 1), q.view(), {}, &q.report).or_throw();
            CHECK(q.report.saturated == 0);
            keel::dequantize(be, q.view(), keel::rows(&y, 1, 1)).or_throw();
            return y;
        };
        float const most = (std::numeric_limits<float>::max)();
        CHECK(back(most, keel::e4m3{}, keel::fp32_scale{}) == most);
        CHECK(back(most, keel::e5m2{}, keel::fp32_scale{}) == most);
        CHECK(back(std::nextafter(0x1.fp127f, 0.0f), keel::e4m3{}, keel::e8m0_scale{}) == 0x1.ep127f);
        CHECK(back(0x1.fp127f, keel::e4m3{}, keel::e8m0_scale{}) == infinity);
        CHECK(back(std::nextafter(0x1.ep127f, 0.0f), keel::e5m2{}, keel::power_of_two_scale{}) == 0x1.cp127f);
        CHECK(back(0x1.ep127f, keel::e5m2{}, keel::power_of_two_scale{}) == infinity);
    });
}

TEST_CASE("counts of more elements than a word holds reach the report whole") {
    keel::reference_group const g{};
    keel::report report;
    keel::quantize_tally<keel::reference_group, uint32_t> tally;
    int64_t const many = (int64_t{1} << 32) - 1;
    for (int k = 0; k < 5; ++k) {
        tally.make_room(g, &report, k % 2 == 0 ? many : 1000);
        tally.flushed += static_cast<uint32_t>(k % 2 == 0 ? many : 1000);
        tally.saturated += 3;
    }
    tally.give(g, report, 3 * many + 2000);
    CHECK(report.flushed == 3 * many + 2000);
    CHECK(report.saturated == 15);
    CHECK(report.elements == 3 * many + 2000);
}

TEST_CASE("sizes past 2^32 rows or columns are refused, and past 2^31 only along a block") {
    float x = 1;
    keel::e4m3 code{};
    float scale = -1;
    auto const asked = [&]<class Blocks>(int64_t rows, int64_t columns, Blocks) {
        Blocks const q{{&code, {rows, columns}, {columns, 1}}, {&scale, {1, 1}, {1, 1}}}; // the scales' shape is wrong in any case
        return keel::quantize<overflow::saturate>(keel::cpu{}, keel::view<float, 2>{&x, {rows, columns}, {0, 0}}, q).message();
    };
    using row = keel::row_blocks<>;
    using whole_row = keel::block_scaled<keel::e4m3, keel::fp32_scale, 1, keel::whole>;
    int64_t const limit = int64_t{1} << 32;
    CHECK(asked(limit, 1, row{}) == "quantize: out.codes has rows = 4294967296, wanted fewer than 2^32 (bad_shape)");
    CHECK(asked(2, limit, row{}) == "quantize: out.codes has columns = 4294967296, wanted fewer than 2^32 (bad_shape)");
    CHECK(asked(limit - 1, 8, row{}) == "quantize: out.scales has rows = 1, wanted 4294967295 (bad_shape)");
    CHECK(asked(8, limit / 2, whole_row{}) == "quantize: out.codes has columns = 2147483648, wanted at most 2^31 - 1 in a block (bad_shape)");
    CHECK(asked(limit - 1, 8, whole_row{}) == "quantize: out.scales has rows = 1, wanted 4294967295 (bad_shape)");
}
