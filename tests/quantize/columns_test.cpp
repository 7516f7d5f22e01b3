// Blocks along the columns against blocks along the rows of the transpose: two walks, one result.
#include <cstring>
#include <limits>
#include <utility>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;

namespace {

template <class X, class Code, class Scale, int Length, overflow Overflow, class Rule>
void check_transposes(int64_t rows, int64_t columns, data_kind kind, bool bad, keel::non_finite_policy policy) {
    INFO(Length << "x1 on " << rows << "x" << columns << " " << name_of(kind) << (bad ? " with NaN and Inf" : ""));
    guarded_matrix<X> x(rows, columns, 3, floats(kind, rows * columns, 7)), turned(columns, rows, 1);
    if (bad) { // in one stretch of columns only, its first, last and tail
        float const inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
        x.set(rows / 2, columns - 1, to_format<X>(nan));
        x.set(0, columns / 2, to_format<X>(-inf));
        x.set(rows - 1, columns / 2, to_format<X>(inf));
    }
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) turned.set(j, i, x.get(i, j));
    using down = keel::block_scaled<Code, Scale, Length, 1>;
    using along = keel::block_scaled<Code, Scale, 1, Length>;
    guarded_matrix<Code> want(columns, rows);
    guarded_matrix<typename Scale::storage> want_scales(columns, along::scale_columns(rows));
    keel::report expected;
    keel::quantize<Overflow, Rule>(keel::reference{}, turned.view(), along{want.view(), want_scales.view()}, {policy}, &expected)
        .or_throw();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<Code> codes(rows, columns, 2);
        guarded_matrix<typename Scale::storage> scales(down::scale_rows(rows), columns, 1);
        keel::report got;
        keel::quantize<Overflow, Rule>(be, x.view(), down{codes.view(), scales.view()}, {policy}, &got).or_throw();
        int64_t wrong = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                wrong += codes.get(i, j).bits != want.get(j, i).bits;
        for (int64_t i = 0; i < scales.rows(); ++i)
            for (int64_t j = 0; j < columns; ++j) {
                auto const a = scales.get(i, j), b = want_scales.get(j, i);
                wrong += std::memcmp(&a, &b, sizeof a) != 0;
            }
        CHECK(wrong == 0);
        CHECK((codes.untouched() && scales.untouched()));
        CHECK(got.elements == expected.elements);
        CHECK(got.saturated == expected.saturated);
        CHECK(got.flushed == expected.flushed);
        CHECK(got.non_finite == expected.non_finite);
        CHECK(got.scale_min_bits == expected.scale_min_bits);
        CHECK(got.scale_max_bits == expected.scale_max_bits);
    });
}

} // namespace

TEST_CASE("columns quantised are rows of the transpose quantised") {
    namespace rules = keel::scale_rules;
    using keel::non_finite_policy;
    int64_t const stretch = keel::column_stretch;
    for (auto const& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {129, 37}, {7, stretch}, {33, 2 * stretch + 19}})
        for (data_kind kind : {data_kind::normal, data_kind::outlier, data_kind::zeros})
            for (bool bad : {false, true}) {
                check_transposes<keel::bf16, keel::e4m3, keel::fp32_scale, 128, overflow::saturate, rules::round_up>(
                    rows, columns, kind, bad, non_finite_policy::isolate);
                check_transposes<float, keel::e5m2, keel::e8m0_scale, 32, overflow::to_nonfinite, rules::ocp_floor>(
                    rows, columns, kind, bad, non_finite_policy::poison);
            }
    for (bool bad : {false, true}) {
        check_transposes<keel::f16, keel::e4m3, keel::power_of_two_scale, 5, overflow::saturate_finite, rules::nearest>(
            11, 70, data_kind::subnormal, bad, non_finite_policy::isolate);
        check_transposes<float, keel::e4m3, keel::fp32_scale, 16, overflow::to_nonfinite, rules::transformer_engine>(
            40, 70, data_kind::huge, bad, non_finite_policy::poison);
    }
}

namespace {

template <class Along, class Down, overflow Overflow = overflow::saturate>
void check_pair(int64_t rows, int64_t columns, data_kind kind, keel::non_finite_policy policy = keel::non_finite_policy::isolate) {
    using code = typename Along::code;
    using storage = typename Along::scale_storage;
    INFO("1x" << Along::block_columns << " and " << Down::block_rows << "x1 on " << rows << "x" << columns << " " << name_of(kind));
    guarded_matrix<keel::bf16> x(rows, columns, 3, floats(kind, rows * columns, 9));
    guarded_matrix<code> a(rows, columns), b(rows, columns);
    guarded_matrix<storage> as(rows, Along::scale_columns(columns)), bs(Down::scale_rows(rows), columns);
    keel::report two;
    keel::quantize<Overflow>(keel::reference{}, x.view(), Along{a.view(), as.view()}, {policy}, &two).or_throw();
    keel::quantize<Overflow>(keel::reference{}, x.view(), Down{b.view(), bs.view()}, {policy}, &two).or_throw();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<code> c(rows, columns, 1), d(rows, columns, 2);
        guarded_matrix<storage> cs(rows, as.columns(), 1), ds(bs.rows(), columns, 3);
        keel::report got;
        keel::quantize_pair<Overflow>(be, x.view(), Along{c.view(), cs.view()}, Down{d.view(), ds.view()}, {policy}, &got).or_throw();
        CHECK((c.contents() == a.contents() && cs.contents() == as.contents()));
        CHECK((d.contents() == b.contents() && ds.contents() == bs.contents()));
        CHECK((c.untouched() && d.untouched() && cs.untouched() && ds.untouched()));
        CHECK((got.elements == two.elements && got.saturated == two.saturated && got.flushed == two.flushed &&
               got.non_finite == two.non_finite && got.scale_min_bits == two.scale_min_bits && got.scale_max_bits == two.scale_max_bits));
    });
}

} // namespace

TEST_CASE("a pair has the codes, scales and report of two calls, on every backend") {
    for (auto const& size : {std::pair<int64_t, int64_t>{1, 1}, {129, 37}, {300, keel::column_stretch + 130}})
        for (data_kind kind : {data_kind::normal, data_kind::mixed_scales, data_kind::with_nan})
            check_pair<keel::row_blocks<>, keel::column_blocks<>>(size.first, size.second, kind);
}

TEST_CASE("pairs of OCP's blocks and of sixteen, whose registers hold more than one, by every policy") {
    using along = keel::mx_blocks<keel::e5m2>;
    using down = keel::block_scaled<keel::e5m2, keel::e8m0_scale, 32, 1>;
    for (data_kind kind : {data_kind::mixed_scales, data_kind::with_nan, data_kind::with_inf})
        for (auto policy : {keel::non_finite_policy::isolate, keel::non_finite_policy::poison})
            check_pair<along, down, overflow::to_nonfinite>(70, 200, kind, policy);
    check_pair<keel::block_scaled<keel::e4m3, keel::fp32_scale, 1, 16>, keel::block_scaled<keel::e4m3, keel::fp32_scale, 16, 1>>(33, 230, data_kind::mixed_scales);
}

TEST_CASE("pairs of blocks so narrow that a stretch's scales of a row do not fit together") {
    for (auto const& size : {std::pair<int64_t, int64_t>{17, 513}, {5, keel::column_stretch + 7}}) {
        check_pair<keel::block_scaled<keel::e4m3, keel::fp32_scale, 1, 4>, keel::block_scaled<keel::e4m3, keel::fp32_scale, 16, 1>>(
            size.first, size.second, data_kind::mixed_scales);
        check_pair<keel::block_scaled<keel::e5m2, keel::e8m0_scale, 1, 1>, keel::block_scaled<keel::e5m2, keel::e8m0_scale, 3, 1>>(
            size.first, size.second, data_kind::mixed_scales);
    }
}
