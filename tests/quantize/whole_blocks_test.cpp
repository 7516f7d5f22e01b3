// A scale a row, a column or a tensor: what blocks of a length that is known give on matrices that fit into one. Delayed scaling.
#include <cstring>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/delayed_scaling.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::non_finite_policy;
using keel::overflow;
using keel::whole;

namespace {

template <class Code, class Scale> struct owned {
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    keel::report report;
    owned(int64_t rows, int64_t columns, int64_t scale_rows, int64_t scale_columns)
        : codes(rows, columns, 3), scales(scale_rows, scale_columns, 1) {}
    template <int Rows, int Columns> keel::block_scaled<Code, Scale, Rows, Columns> blocks() { return {codes.view(), scales.view()}; }
};
bool same(keel::report const& a, keel::report const& b) {
    return a.elements == b.elements && a.saturated == b.saturated && a.flushed == b.flushed && a.non_finite == b.non_finite &&
           a.scale_min_bits == b.scale_min_bits && a.scale_max_bits == b.scale_max_bits;
}

/// Rows x Columns with `whole` against blocks of 4096 in its place.
template <class X, class Code, class Scale, int Rows, int Columns, overflow Overflow, class Rule>
void check_whole(int64_t rows, int64_t columns, data_kind kind, bool bad, non_finite_policy policy) {
    INFO((Rows == whole ? "whole" : "1") << " x " << (Columns == whole ? "whole" : "1") << " on " << rows << "x" << columns << " "
                                         << name_of(kind) << (bad ? " with NaN and Inf" : ""));
    constexpr int known_rows = Rows == whole ? 4096 : Rows, known_columns = Columns == whole ? 4096 : Columns;
    using known = keel::block_scaled<Code, Scale, known_rows, known_columns>;
    guarded_matrix<X> x(rows, columns, 2, floats(kind, rows * columns, 5));
    if (bad) {
        x.set(rows / 2, columns - 1, to_format<X>(std::numeric_limits<float>::quiet_NaN()));
        x.set(0, columns / 2, to_format<X>(-std::numeric_limits<float>::infinity()));
    }
    int64_t const sr = known::scale_rows(rows), sc = known::scale_columns(columns);
    owned<Code, Scale> want(rows, columns, sr, sc);
    keel::quantize<Overflow, Rule>(keel::reference{}, x.view(), want.template blocks<known_rows, known_columns>(), {policy},
                                   &want.report)
        .or_throw();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        owned<Code, Scale> got(rows, columns, sr, sc);
        keel::quantize<Overflow, Rule>(be, x.view(), got.template blocks<Rows, Columns>(), {policy}, &got.report).or_throw();
        CHECK(got.codes.contents() == want.codes.contents());
        CHECK(got.scales.contents() == want.scales.contents());
        CHECK(same(got.report, want.report));
        CHECK((got.codes.untouched() && got.scales.untouched()));
        guarded_matrix<float> y(rows, columns), z(rows, columns);
        keel::dequantize(be, got.template blocks<Rows, Columns>(), y.view()).or_throw();
        keel::dequantize(be, want.template blocks<known_rows, known_columns>(), z.view()).or_throw();
        CHECK(equal_bits(y.contents(), z.contents()));
    });
}
template <class X, class Code, class Scale, overflow Overflow, class Rule>
void check_all(int64_t rows, int64_t columns, data_kind kind, bool bad, non_finite_policy policy) {
    check_whole<X, Code, Scale, 1, whole, Overflow, Rule>(rows, columns, kind, bad, policy);
    check_whole<X, Code, Scale, whole, 1, Overflow, Rule>(rows, columns, kind, bad, policy);
    check_whole<X, Code, Scale, whole, whole, Overflow, Rule>(rows, columns, kind, bad, policy);
}

} // namespace

TEST_CASE("blocks as long as the matrix are blocks of a length that covers it") {
    namespace rules = keel::scale_rules;
    for (auto const& size : {std::pair<int64_t, int64_t>{1, 1}, {3, 63}, {5, 129}, {4, keel::tensor_piece + 97}})
        for (data_kind kind : {data_kind::normal, data_kind::outlier, data_kind::zeros})
            for (bool bad : {false, true}) {
                check_all<keel::bf16, keel::e4m3, keel::fp32_scale, overflow::saturate, rules::round_up>(
                    size.first, size.second, kind, bad, non_finite_policy::isolate);
                check_all<float, keel::e5m2, keel::e8m0_scale, overflow::to_nonfinite, rules::ocp_floor>(
                    size.first, size.second, kind, bad, non_finite_policy::poison);
            }
    for (bool bad : {false, true})
        check_all<keel::f16, keel::e4m3, keel::power_of_two_scale, overflow::saturate_finite, rules::nearest>(
            6, 70, data_kind::subnormal, bad, non_finite_policy::isolate);
    // Nothing to quantise: no scale either.
    using tensor = keel::block_scaled<keel::e4m3, keel::fp32_scale, whole, whole>;
    CHECK((tensor::scale_rows(0) == 0 && tensor::scale_columns(5) == 1));
    tensor const none{{nullptr, {0, 5}, {5, 1}}, {nullptr, {0, 1}, {1, 1}}};
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, keel::view<float, 2>{nullptr, {0, 5}, {5, 1}}, none).ok());
}

TEST_CASE("delayed scaling starts as current scaling, then goes by the history") {
    int64_t const rows = 7, columns = 1100;
    auto const values = [&](float size, uint64_t seed) {
        auto v = floats(data_kind::uniform, rows * columns, seed);
        for (float& x : v) x *= size;
        return v;
    };
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<float> history(1, 3, 1);
        for (int64_t i = 0; i < 3; ++i) history.set(0, i, 0.0f);
        auto const amax_of = [&](guarded_matrix<keel::bf16> const& x) {
            float top = 0;
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < columns; ++j) {
                    float const a = std::abs(keel::decode(x.get(i, j)));
                    if (std::isfinite(a) && a > top) top = a;
                }
            return top;
        };
        auto const step = [&](guarded_matrix<keel::bf16>& x, int margin) {
            owned<keel::e4m3, keel::fp32_scale> q(rows, columns, 1, 1);
            keel::quantize_delayed<overflow::saturate>(be, x.view(), q.blocks<whole, whole>(), history.vec(), {margin}, &q.report)
                .or_throw();
            CHECK((q.codes.untouched() && q.scales.untouched()));
            return q;
        };
        guarded_matrix<keel::bf16> small(rows, columns, 1, values(1, 1)), large(rows, columns, 1, values(8, 2));
        owned<keel::e4m3, keel::fp32_scale> now(rows, columns, 1, 1);
        keel::quantize<overflow::saturate>(be, small.view(), now.blocks<whole, whole>(), {}, &now.report).or_throw();
        auto const first = step(small, 0);
        CHECK((first.codes.contents() == now.codes.contents() && first.scales.contents() == now.scales.contents()));
        CHECK(same(first.report, now.report));
        float const a = amax_of(small), b = amax_of(large);
        CHECK((history.get(0, 0) == a && history.get(0, 1) == 0.0f));

        // The scale is the small step's: what is larger saturates, and is counted.
        auto const second = step(large, 0);
        CHECK(second.scales.get(0, 0) == first.scales.get(0, 0));
        int64_t beyond = 0, wrong = 0;
        float const multiplier = 448.0f / a;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                float const scaled = keel::decode(large.get(i, j)) * multiplier;
                beyond += std::abs(scaled) > 464.0f ? 1 : 0;
                wrong += second.codes.get(i, j).bits != keel::encode<keel::e4m3, overflow::saturate>(scaled).bits;
            }
        CHECK(wrong == 0);
        CHECK((beyond > 0 && second.report.saturated == beyond));
        CHECK((history.get(0, 0) == b && history.get(0, 1) == a));

        // The largest of the history, and a margin; NaN and Inf are not recorded.
        small.set(1, 7, to_format<keel::bf16>(std::numeric_limits<float>::quiet_NaN()));
        small.set(2, 7, to_format<keel::bf16>(std::numeric_limits<float>::infinity()));
        auto const third = step(small, 2);
        CHECK(third.scales.get(0, 0) == b * 4.0f / 448.0f);
        CHECK((third.report.saturated == 0 && third.report.non_finite == 2));
        CHECK((history.get(0, 0) == amax_of(small) && history.get(0, 1) == b && history.get(0, 2) == a));
        CHECK(history.untouched());
    });
}

TEST_CASE("delayed scaling after a vanishing step: saturate_finite stays finite where even the product overflows") {
    for_main_backends([](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<float> x(1, 5, 0, {8.0f, -3e38f, 1e-37f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()});
        auto const codes_of = [&]<overflow O, class Code>(std::integral_constant<overflow, O>, Code) {
            guarded_matrix<float> history(1, 2);
            history.set(0, 0, 1e-37f), history.set(0, 1, 0.0f);
            owned<Code, keel::fp32_scale> q(1, 5, 1, 1);
            keel::quantize_delayed<O>(be, x.view(), q.template blocks<whole, whole>(), history.vec(), {}, &q.report).or_throw();
            CHECK((q.report.elements == 5 && q.report.saturated == 2 && q.report.non_finite == 2 && q.report.flushed == 0));
            CHECK(history.get(0, 0) == 3e38f);
            std::vector<int> bits;
            for (int64_t j = 0; j < 5; ++j) bits.push_back(q.codes.get(0, j).bits);
            return bits;
        };
        using finite = std::integral_constant<overflow, overflow::saturate_finite>;
        using none = std::integral_constant<overflow, overflow::to_nonfinite>;
        auto const small = keel::encode<keel::e4m3, overflow::saturate>(1e-37f * 0x1p126f).bits, wide = keel::encode<keel::e5m2, overflow::saturate>(1e-37f * 0x1p126f).bits;
        CHECK(codes_of(finite{}, keel::e4m3{}) == std::vector<int>{0x7e, 0xfe, small, 0x7f, 0x7f});
        CHECK(codes_of(finite{}, keel::e5m2{}) == std::vector<int>{0x7b, 0xfb, wide, 0x7c, 0x7f});
        CHECK(codes_of(none{}, keel::e5m2{}) == std::vector<int>{0x7c, 0xfc, wide, 0x7c, 0x7f});
    });
}

TEST_CASE("delayed scaling takes any strides, and leaves the history alone where there is nothing") {
    int64_t const rows = 5, columns = 70;
    auto const data = floats(data_kind::normal, rows * columns, 9);
    guarded_matrix<float> x(rows, columns, 1, data), turned(columns, rows, 2);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) turned.set(j, i, x.get(i, j));
    guarded_matrix<float> a(1, 2), b(1, 2);
    for (auto* h : {&a, &b}) h->set(0, 0, 2.0f), h->set(0, 1, 1.0f);
    owned<keel::e4m3, keel::e8m0_scale> q(rows, columns, 1, 1), p(columns, rows, 1, 1);
    keel::quantize_delayed<overflow::saturate>(keel::cpu{}, x.view(), q.blocks<whole, whole>(), a.vec(), {}, &q.report).or_throw();
    keel::quantize_delayed<overflow::saturate>(keel::cpu{}, keel::transposed(turned.view()), keel::transposed(p.blocks<whole, whole>()), b.vec(), {}, &p.report)
        .or_throw();
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) wrong += q.codes.get(i, j).bits != p.codes.get(j, i).bits;
    CHECK(wrong == 0);
    CHECK((q.scales.contents() == p.scales.contents() && a.contents() == b.contents() && same(q.report, p.report)));
    using tensor = keel::block_scaled<keel::e4m3, keel::fp32_scale, whole, whole>;
    CHECK(keel::quantize_delayed<overflow::saturate>(keel::cpu{}, keel::view<float, 2>{nullptr, {0, 5}, {5, 1}},
                                                     tensor{{nullptr, {0, 5}, {5, 1}}, {nullptr, {0, 1}, {1, 1}}}, a.vec())
              .ok());
    CHECK(a.contents() == b.contents());
}

TEST_CASE("a bad call of quantize_delayed names the argument and writes nothing") {
    guarded_matrix<float> x(2, 5, 0, floats(data_kind::normal, 10)), history(1, 2);
    history.set(0, 0, 1.0f), history.set(0, 1, 2.0f);
    owned<keel::e4m3, keel::fp32_scale> q(2, 5, 1, 1);
    auto const before = q.codes.contents();
    auto const call = [&](keel::view<float, 1> h, int margin = 0) {
        return keel::quantize_delayed<overflow::saturate>(keel::cpu{}, x.view(), q.blocks<whole, whole>(), h, {margin});
    };
    using keel::status_code;
    CHECK(call(keel::vec(history.view().data, 0)).message() == "quantize_delayed: history has length = 0, wanted 1 or more (bad_shape)");
    CHECK(call({}).code == status_code::bad_shape);
    CHECK(call(keel::vec(x.view().data, 2)).code == status_code::overlap);
    CHECK(call(keel::vec(q.scales.view().data, 1)).code == status_code::overlap);
    CHECK(call(history.vec(), -1).code == status_code::bad_option);
    CHECK(call(history.vec(), 17).code == status_code::bad_option);
    for (float bad : {-1.0f, -0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        history.set(0, 1, bad);
        CHECK(call(history.vec()).code == status_code::bad_option);
    }
    CHECK(q.codes.contents() == before);
    CHECK(history.get(0, 0) == 1.0f);
    // A history near the end of the floats, with a margin: the scale stays finite.
    history.set(0, 1, 3e38f);
    CHECK(call(history.vec(), 16).ok());
    CHECK(std::isfinite(q.scales.get(0, 0)));
}
