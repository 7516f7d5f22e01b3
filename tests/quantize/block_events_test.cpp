// What happened in each block, from the call that made it: against a recount of its elements, and against the whole call's report.
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

using namespace keel_test;
using keel::overflow;
using keel::whole;

namespace {

template <class Rule, int Rows, int Columns, class Scale> void check_events(int64_t rows, int64_t columns, keel::non_finite_policy policy) {
    using blocks = keel::block_scaled<keel::e4m3, Scale, Rows, Columns>;
    INFO(Rows << "x" << Columns << " on " << rows << "x" << columns);
    int64_t const sr = blocks::scale_rows(rows), sc = blocks::scale_columns(columns);
    auto values = floats(data_kind::mixed_scales, rows * columns, 5);
    for (std::size_t i = 0; i < values.size(); i += 97) values[i] = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
    for (std::size_t i = 3; i < values.size(); i += 51) values[i] = 1e-30f; // flushed beside anything of size
    guarded_matrix<float> x(rows, columns, 1, values);
    guarded_matrix<keel::e4m3> codes(rows, columns);
    guarded_matrix<typename Scale::storage> scales(sr, sc);
    for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::e4m3> plain(rows, columns);
        guarded_matrix<typename Scale::storage> plain_scales(sr, sc);
        std::vector<keel::block_events> events(static_cast<std::size_t>(sr * (sc + 1)), {7, 7, 7});
        keel::report whole_call, other;
        auto const E = keel::rows(events.data(), sr, sc, sc + 1);
        keel::quantize<overflow::saturate, Rule>(be, x.view(), blocks{codes.view(), scales.view()}, {.policy = policy}, &whole_call, E).or_throw();
        keel::quantize<overflow::saturate, Rule>(be, x.view(), blocks{plain.view(), plain_scales.view()}, {.policy = policy}, &other).or_throw();
        CHECK(codes.contents() == plain.contents());
        CHECK(scales.contents() == plain_scales.contents());
        CHECK(std::memcmp(&whole_call, &other, sizeof other) == 0);
        int64_t saturated = 0, flushed = 0, non_finite = 0, wrong = 0;
        for (int64_t bi = 0; bi < sr; ++bi)
            for (int64_t bj = 0; bj < sc; ++bj) {
                uint32_t s = 0, f = 0, b = 0;
                double const scale = scales.at(bi, bj);
                for (int64_t i = bi * Rows; i < std::min<int64_t>(rows, bi * Rows + Rows); ++i)
                    for (int64_t j = bj * Columns; j < std::min<int64_t>(columns, bj * Columns + Columns); ++j) {
                        bool const bad = !std::isfinite(x.at(i, j));
                        b += bad;
                        f += !bad && x.at(i, j) != 0 && codes.at(i, j) == 0;
                        s += !bad && std::isfinite(scale) && std::abs(x.at(i, j)) / scale > 464; // exact where a rule saturates
                    }
                wrong += E(bi, bj).saturated != s || E(bi, bj).flushed != f || E(bi, bj).non_finite != b;
                saturated += E(bi, bj).saturated, flushed += E(bi, bj).flushed, non_finite += E(bi, bj).non_finite;
            }
        CHECK(wrong == 0);
        CHECK(saturated == whole_call.saturated);
        CHECK(flushed == whole_call.flushed);
        CHECK(non_finite == whole_call.non_finite);
        if (sr > 0 && sc > 0) CHECK(events[static_cast<std::size_t>(sc)].saturated == 7); // between the rows
    });
}

} // namespace

TEST_CASE("the events of each block add up to the report, and are those of its own elements") {
    for (auto policy : {keel::non_finite_policy::isolate, keel::non_finite_policy::poison}) {
        check_events<keel::scale_rules::round_up, 1, 128, keel::fp32_scale>(3, 300, policy);
        check_events<keel::scale_rules::ocp_floor, 1, 32, keel::e8m0_scale>(3, 97, policy); // this rule saturates
        check_events<keel::scale_rules::round_up, 128, 1, keel::fp32_scale>(140, 37, policy);
        check_events<keel::scale_rules::nearest, 128, 128, keel::power_of_two_scale>(130, 140, policy);
        check_events<keel::scale_rules::round_up, 1, 48, keel::fp32_scale>(2, 100, policy); // blocks that a warp walks one by one
        check_events<keel::scale_rules::round_up, 1, whole, keel::fp32_scale>(3, 500, policy);
        check_events<keel::scale_rules::nearest, whole, 1, keel::e8m0_scale>(70, 40, policy);
        check_events<keel::scale_rules::ocp_floor, whole, whole, keel::power_of_two_scale>(3, 500, policy);
    }
    check_events<keel::scale_rules::round_up, 1, 128, keel::fp32_scale>(0, 5, keel::non_finite_policy::isolate);
}

TEST_CASE("saturated elements are told block by block") {
    // OCP's floor takes 2^0 for 511 (it is below 2 * 448 / 1.75): beyond 464 it saturates, 463 rounds to 448.
    std::vector<float> x(96, 1.0f);
    x[0] = 511, x[1] = 480, x[2] = 463, x[40] = 448, x[70] = -500;
    std::vector<keel::e4m3> codes(96);
    std::vector<keel::e8m0> scales(3);
    std::vector<keel::block_events> events(3);
    keel::quantize<overflow::saturate, keel::scale_rules::ocp_floor>(keel::cpu{}, keel::rows(x.data(), 1, 96),
                                                                      keel::mx_blocks<>{keel::rows(codes.data(), 1, 96), keel::rows(scales.data(), 1, 3)},
                                                                      {}, nullptr, keel::rows(events.data(), 1, 3))
        .or_throw();
    CHECK((events[0].saturated == 2 && events[1].saturated == 0 && events[2].saturated == 1));

    // The boundary itself: 464 is a tie that stays 448, its next saturates; 61440 of e5m2 goes up, the one before it stays 57344.
    auto const counted = [](auto code, std::vector<float> values) {
        values.resize(128);
        std::vector<decltype(code)> made(128);
        float scale = 0;
        keel::report seen;
        keel::quantize<overflow::saturate, keel::scale_rules::ocp_floor>(keel::cpu{}, keel::rows(values.data(), 1, 128),
                                                                          keel::row_blocks<decltype(code), keel::power_of_two_scale>{keel::rows(made.data(), 1, 128), keel::rows(&scale, 1, 1)},
                                                                          {}, &seen)
            .or_throw();
        CHECK(scale == 1.0f);
        return seen.saturated;
    };
    CHECK(counted(keel::e4m3{}, {464.0f, -464.0f}) == 0);
    CHECK(counted(keel::e4m3{}, {std::nextafter(464.0f, 500.0f), std::nextafter(-464.0f, -500.0f)}) == 2);
    CHECK(counted(keel::e5m2{}, {61440.0f, -61440.0f}) == 2);
    CHECK(counted(keel::e5m2{}, {std::nextafter(61440.0f, 0.0f)}) == 0);
}

TEST_CASE("events of another shape or over other arguments are refused") {
    guarded_matrix<float> x(2, 130, 0, floats(data_kind::normal, 260));
    guarded_matrix<keel::e4m3> codes(2, 130);
    guarded_matrix<float> scales(2, 2);
    std::vector<keel::block_events> events(4);
    keel::row_blocks<> const q{codes.view(), scales.view()};
    auto const refused = [&](keel::view<keel::block_events, 2> e) { return keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), q, {}, nullptr, e).message(); };
    CHECK(refused(keel::rows(events.data(), 2, 1)) == "quantize: events has columns = 1, wanted 2 (bad_shape)");
    CHECK(refused(keel::rows(events.data(), 2, 2, 0)) == "quantize: events, wanted elements that do not overlap (bad_stride)");
    CHECK(refused(keel::rows(reinterpret_cast<keel::block_events*>(scales.view().data), 2, 2)) == "quantize: events, wanted memory of its own (overlap)");
    CHECK(codes.at(0, 0) == 0.0);
    // Counts of 32 bits: a block of 2^32 elements is refused before anything is looked at.
    int64_t const side = 65536;
    sparse<keel::e4m3> room(side * side);
    if (room.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    keel::view<float, 2> const vast{x.view().data, {side, side}, {0, 0}};
    float scale = -1;
    keel::block_scaled<keel::e4m3, keel::fp32_scale, whole, whole> const one{{room.data(), {side, side}, {side, 1}}, keel::rows(&scale, 1, 1)};
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, vast, one, {}, nullptr, keel::rows(events.data(), 1, 1)).message() ==
          "quantize: events, wanted blocks of at most 2^32 - 1 elements (bad_shape)");
    CHECK(scale == -1.0f);
}
