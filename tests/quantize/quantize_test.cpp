// Block quantisation against its definition in double, on every block shape, and its policies.
#include <algorithm>
#include <cmath>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

using namespace keel_test;
using keel::overflow;

namespace {

/// Codes and scales in memory of their own.
template <class Code, class Scale, int Rows, int Columns> struct owned_blocks {
    using blocks = keel::block_scaled<Code, Scale, Rows, Columns>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    owned_blocks(int64_t rows, int64_t columns)
        : codes(rows, columns, 3), scales(blocks::scale_rows(rows), blocks::scale_columns(columns), 1) {}
    blocks view() { return {codes.view(), scales.view()}; }
    bool operator==(owned_blocks const& o) const { return codes.contents() == o.codes.contents() && scales.contents() == o.scales.contents(); }
    bool untouched() const { return codes.untouched() && scales.untouched(); }
};

/// The nearest code by enumeration, ties to the even code; the value must be finite.
template <class Code> double nearest_code_value(double x) {
    double best = 0, distance = std::numeric_limits<double>::infinity();
    uint32_t best_code = 0;
    for (uint32_t c = 0; c <= keel::format_traits<Code>::max_code; ++c) {
        double const v = to_double(keel::from_word<Code>(c)), d = std::abs(std::abs(x) - v);
        if (d < distance || (d == distance && best_code % 2 == 1)) best = v, distance = d, best_code = c;
    }
    return std::copysign(best, x);
}

template <class X, class Code, class Scale, int Rows, int Columns> void check_shape(int64_t rows, int64_t columns, data_kind kind) {
    INFO(Rows << "x" << Columns << " on " << rows << "x" << columns << " " << name_of(kind));
    guarded_matrix<X> x(rows, columns, 2, floats(kind, rows * columns, 3));
    owned_blocks<Code, Scale, Rows, Columns> q(rows, columns), other(rows, columns);
    keel::report report;
    keel::quantize<overflow::saturate_finite>(keel::reference{}, x.view(), q.view(), {}, &report).or_throw();
    double const code_max = static_cast<double>(keel::format_traits<Code>::max());
    int64_t flushed = 0;
    double low = std::numeric_limits<double>::infinity(), high = 0;
    for (int64_t bi = 0; bi < q.scales.rows(); ++bi)
        for (int64_t bj = 0; bj < q.scales.columns(); ++bj) {
            double amax = 0;
            for (int64_t i = bi * Rows; i < std::min<int64_t>((bi + 1) * Rows, rows); ++i)
                for (int64_t j = bj * Columns; j < std::min<int64_t>((bj + 1) * Columns, columns); ++j) amax = std::max(amax, std::abs(x.at(i, j)));
            double const scale = q.scales.at(bi, bj);
            low = std::min(low, scale), high = std::max(high, scale);
            float multiplier = 0;
            if constexpr (Scale::is_power_of_two) {
                double const floor = std::is_same_v<Scale, keel::e8m0_scale> ? 0x1p-127 : 0x1p-126;
                REQUIRE(std::exp2(std::round(std::log2(scale))) == scale);
                CHECK(amax <= code_max * scale);                                // nothing saturates
                CHECK((scale == floor || amax > code_max * scale / 2));         // and no smaller power would do
                multiplier = static_cast<float>(1 / scale);
            } else {
                float const top = std::max(static_cast<float>(amax), static_cast<float>(code_max * 0x1p-126));
                CHECK(scale == static_cast<double>(top / static_cast<float>(code_max)));
                multiplier = static_cast<float>(code_max) / top;
            }
            for (int64_t i = bi * Rows; i < std::min<int64_t>((bi + 1) * Rows, rows); ++i)
                for (int64_t j = bj * Columns; j < std::min<int64_t>((bj + 1) * Columns, columns); ++j) {
                    double const scaled = static_cast<double>(static_cast<float>(x.at(i, j)) * multiplier);
                    double const want = nearest_code_value<Code>(scaled);
                    if (q.codes.at(i, j) != want) FAIL_CHECK("at " << i << "," << j << ": " << q.codes.at(i, j) << " for " << want);
                    flushed += want == 0 && x.at(i, j) != 0;
                }
        }
    CHECK(report.elements == rows * columns);
    CHECK(report.saturated == 0);
    CHECK(report.non_finite == 0);
    CHECK(report.flushed == flushed);
    if (rows * columns > 0) {
        CHECK(static_cast<double>(report.scale_min()) == low);
        CHECK(static_cast<double>(report.scale_max()) == high);
    }
    CHECK(q.untouched());
    keel::report native_report;
    keel::quantize<overflow::saturate_finite>(keel::cpu{}, x.view(), other.view(), {}, &native_report).or_throw();
    CHECK(q == other);
    CHECK(native_report.flushed == flushed);
    CHECK(native_report.scale_min_bits == report.scale_min_bits);
    // Back again: half a code's step of each element, and dequantisation as defined.
    guarded_matrix<float> y(rows, columns), z(rows, columns);
    keel::dequantize(keel::reference{}, q.view(), y.view()).or_throw();
    keel::dequantize(keel::cpu{}, q.view(), z.view()).or_throw();
    CHECK(y.contents() == z.contents());
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
            if (y.at(i, j) != static_cast<double>(static_cast<float>(q.codes.at(i, j)) * static_cast<float>(q.scales.at(i / Rows, j / Columns))))
                FAIL_CHECK("dequantised " << i << "," << j);
}

template <class X, class Code, class Scale> void check_shapes() {
    for (data_kind kind : {data_kind::normal, data_kind::mixed_scales, data_kind::zeros, data_kind::outlier}) {
        check_shape<X, Code, Scale, 1, 128>(3, 300, kind);
        check_shape<X, Code, Scale, 128, 1>(200, 37, kind);
    }
    check_shape<X, Code, Scale, 128, 128>(130, 129, data_kind::normal);
    check_shape<X, Code, Scale, 1, 32>(2, 97, data_kind::mixed_scales);
}

} // namespace

TEST_CASE("every block shape, scale kind and code follows its definition") {
    check_shapes<float, keel::e4m3, keel::fp32_scale>();
    check_shapes<keel::bf16, keel::e4m3, keel::e8m0_scale>();
    check_shapes<keel::bf16, keel::e5m2, keel::power_of_two_scale>();
    for (int64_t columns : {0, 1, 2, 31, 32, 33, 127, 128, 129}) check_shape<float, keel::e5m2, keel::e8m0_scale, 1, 32>(1, columns, data_kind::normal);
    check_shape<float, keel::e4m3, keel::fp32_scale, 1, 128>(0, 128, data_kind::normal); // vllm-xpu-kernels #609
    for (data_kind kind : {data_kind::tiny, data_kind::subnormal}) { // TE #786, flashinfer #2440: scales stay finite, codes exact
        check_shape<float, keel::e4m3, keel::fp32_scale, 1, 128>(2, 130, kind);
        check_shape<float, keel::e4m3, keel::e8m0_scale, 1, 128>(2, 130, kind);
        check_shape<float, keel::e5m2, keel::power_of_two_scale, 128, 128>(2, 130, kind);
    }
    check_shape<float, keel::e4m3, keel::fp32_scale, 1, 48>(3, 101, data_kind::normal); // sizes that no register divides
    check_shape<keel::bf16, keel::e4m3, keel::e8m0_scale, 5, 7>(11, 40, data_kind::normal);
    check_shape<keel::bf16, keel::e5m2, keel::fp32_scale, 2, 300>(3, 700, data_kind::outlier);
    check_shape<float, keel::e4m3, keel::e8m0_scale, 1, 128>(2, 130, data_kind::huge);
    check_shape<float, keel::e5m2, keel::fp32_scale, 1, 128>(2, 130, data_kind::huge);
}

namespace {
template <class X, class Scale, int Rows, int Columns> void check_backends(data_kind kind) {
    INFO(Rows << "x" << Columns << " " << name_of(kind));
    guarded_matrix<X> x(3, 333, 1, floats(kind, 999, 8));
    owned_blocks<keel::e4m3, Scale, Rows, Columns> q(3, 333);
    keel::report want;
    keel::quantize<overflow::saturate_finite>(keel::reference{}, x.view(), q.view(), {}, &want).or_throw();
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        owned_blocks<keel::e4m3, Scale, Rows, Columns> r(3, 333);
        keel::report got;
        keel::quantize<overflow::saturate_finite>(be, x.view(), r.view(), {}, &got).or_throw();
        CHECK(q == r);
        CHECK(r.untouched());
        CHECK(got.saturated == want.saturated);
        CHECK(got.flushed == want.flushed);
        CHECK(got.non_finite == want.non_finite);
        CHECK(got.scale_min_bits == want.scale_min_bits);
        CHECK(got.scale_max_bits == want.scale_max_bits);
    });
}
} // namespace

TEST_CASE("quantisation keeps its bits on every backend and data") {
    for (data_kind kind : all_kinds) check_backends<keel::bf16, keel::e8m0_scale, 1, 128>(kind);
    for (data_kind kind : {data_kind::mixed_scales, data_kind::with_nan}) {
        check_backends<keel::bf16, keel::fp32_scale, 1, 48>(kind);
        check_backends<float, keel::fp32_scale, 2, 300>(kind);
        check_backends<float, keel::power_of_two_scale, 128, 1>(kind);
    }
}

TEST_CASE("NaN and Inf are isolated in any lane, or poison their block, and are counted") {
    for (int64_t spot = 0; spot < 130; spot += 1) {
        for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
            guarded_matrix<float> x(1, 130, 0, std::vector<float>(130, 3.0f));
            x.set(0, spot, bad);
            owned_blocks<keel::e4m3, keel::fp32_scale, 1, 128> q(1, 130);
            keel::report report;
            keel::cpu be;
            keel::quantize<overflow::saturate_finite>(be, x.view(), q.view(), {}, &report).or_throw();
            CHECK(report.non_finite == 1);
            CHECK(std::isnan(q.codes.at(0, spot)));
            for (int64_t j = 0; j < 130; ++j)
                if (j != spot) CHECK(q.codes.at(0, j) == 448.0);
            keel::quantize<overflow::saturate>(be, x.view(), q.view(), {}).or_throw();
            CHECK((std::isnan(bad) ? std::isnan(q.codes.at(0, spot)) : q.codes.at(0, spot) == std::copysign(448.0, bad)));
            keel::report poisoned;
            keel::quantize<overflow::saturate_finite>(be, x.view(), q.view(), {.policy = keel::non_finite_policy::poison}, &poisoned).or_throw();
            CHECK(poisoned.non_finite == 1);
            CHECK(poisoned.saturated == 0); // the others of the block are lost to the policy, not to their size
            CHECK(std::isnan(q.scales.at(0, spot / 128)));
            CHECK(q.scales.at(0, 1 - spot / 128) == static_cast<double>(3.0f / 448.0f));
            CHECK((poisoned.scale_min() == 3.0f / 448.0f && poisoned.scale_max() == 3.0f / 448.0f)); // of the other block
        }
    }
}

TEST_CASE("a zero tile beside a nonzero one has finite scale and zero codes") { // THUDM/slime #2256, ao #4713
    guarded_matrix<float> x(128, 256);
    x.set(5, 200, 1.0f);
    owned_blocks<keel::e4m3, keel::fp32_scale, 128, 128> q(128, 256);
    keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), q.view(), {}).or_throw();
    CHECK(q.scales.at(0, 0) == 0x1p-126);
    CHECK(q.scales.at(0, 1) == static_cast<double>(1.0f / 448.0f));
    CHECK(q.codes.at(5, 200) == 448.0);
    CHECK(q.codes.at(0, 0) == 0.0);
}

TEST_CASE("a pair comes from the source, not from the other's codes") {
    guarded_matrix<keel::bf16> x(150, 140, 0, floats(data_kind::mixed_scales, 150 * 140));
    owned_blocks<keel::e4m3, keel::fp32_scale, 1, 128> a(150, 140), a1(150, 140);
    owned_blocks<keel::e4m3, keel::fp32_scale, 128, 1> b(150, 140), b1(150, 140);
    keel::cpu be;
    keel::quantize_pair<overflow::saturate>(be, x.view(), a.view(), b.view(), {}).or_throw();
    keel::quantize<overflow::saturate>(be, x.view(), a1.view(), {}).or_throw();
    keel::quantize<overflow::saturate>(be, x.view(), b1.view(), {}).or_throw();
    CHECK(a == a1);
    CHECK(b == b1);
}

TEST_CASE("a bad quantise names the argument and writes nothing") {
    guarded_matrix<float> x(2, 130, 0, floats(data_kind::normal, 260));
    owned_blocks<keel::e4m3, keel::fp32_scale, 1, 128> q(2, 130), wrong(2, 131);
    auto s = keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), wrong.view(), {});
    CHECK(s.message() == "quantize: out.codes has columns = 131, wanted 130 (bad_shape)");
    auto view = q.view();
    view.scales = keel::columns(view.scales, 0, 1);
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), view, {}).message() ==
          "quantize: out.scales has columns = 1, wanted 2 (bad_shape)");
    owned_blocks<keel::e4m3, keel::fp32_scale, 128, 1> columns(2, 130);
    auto const refused = [&](auto rows_view, auto columns_view) {
        return keel::quantize_pair<overflow::saturate>(keel::cpu{}, x.view(), rows_view, columns_view).code;
    };
    auto bad = q.view();
    bad.scales.stride[0] = 0;
    CHECK(refused(bad, columns.view()) == keel::status_code::bad_stride);
    bad = q.view();
    bad.scales.data = reinterpret_cast<float*>(bad.codes.data);
    CHECK(refused(bad, columns.view()) == keel::status_code::overlap);
    auto bad_columns = columns.view();
    bad_columns.scales.data = reinterpret_cast<float*>(q.view().codes.data);
    CHECK(refused(q.view(), bad_columns) == keel::status_code::overlap);
    CHECK(columns.codes.at(0, 0) == 0.0);
    CHECK(q.codes.at(0, 0) == 0.0);
}

TEST_CASE("views that cannot be made are refused by quantize and dequantize, also beside others like them") {
    std::vector<float> x(1300, 1.0f), y(1300, -1.0f);
    std::vector<keel::e4m3> codes(1300, keel::e4m3{0x55});
    std::vector<float> scales(40, 9.0f);
    keel::view<float, 3> const from{x.data(), {2, 3, 8}, {40, 8, 1}}, to{y.data(), {2, 3, 8}, {40, 8, 1}};
    keel::tile_blocks<> const q{keel::rows(codes.data(), 256, 5), keel::rows(scales.data(), 2, 1)};
    auto const off = keel::slice(q, 64, 64); // no block begins there
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, flattened(from), off).message() ==
          "quantize: x has rows = -1, wanted 0 or more (bad_shape)");
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, keel::rows(x.data(), 0, 0), off).message() ==
          "quantize: out.codes has rows = -1, wanted 0 or more (bad_shape)");
    CHECK(keel::dequantize(keel::cpu{}, off, flattened(to)).message() == "dequantize: y has rows = -1, wanted 0 or more (bad_shape)");
    CHECK(keel::dequantize(keel::cpu{}, off, keel::rows(y.data(), 0, 0)).message() ==
          "dequantize: in.codes has rows = -1, wanted 0 or more (bad_shape)");
    CHECK(codes[0].bits == 0x55);
    CHECK(y == std::vector<float>(1300, -1.0f));
    auto const on = keel::slice(q, 128, 128);
    CHECK(keel::quantize<overflow::saturate>(keel::cpu{}, keel::rows(x.data(), 128, 5), on).ok());
    CHECK(scales[0] == 9.0f);
    CHECK(scales[1] == 1.0f / 448.0f);
}

TEST_CASE("quantise reads rows in any order: strides of zero and below") {
    int64_t const count = 130, width = 97;
    guarded_matrix<float> x(count, width, 3, floats(data_kind::mixed_scales, count * width, 4)), turned(count, width), first(count, width);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < width; ++j) turned.set(i, j, x.get(count - 1 - i, j)), first.set(i, j, x.get(0, j));
    auto const X = x.view();
    keel::view<float, 2> const backwards{X.at(count - 1), {count, width}, {-X.stride[0], 1}}, repeated{X.data, {count, width}, {0, 1}};
    auto const check = [&]<int Rows, int Columns>(std::integral_constant<int, Rows>, std::integral_constant<int, Columns>) {
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << " " << Rows << "x" << Columns);
            owned_blocks<keel::e4m3, keel::fp32_scale, Rows, Columns> a(count, width), b(count, width);
            keel::quantize<overflow::saturate>(be, backwards, a.view()).or_throw();
            keel::quantize<overflow::saturate>(be, turned.view(), b.view()).or_throw();
            CHECK(a == b);
            keel::quantize<overflow::saturate>(be, repeated, a.view()).or_throw();
            keel::quantize<overflow::saturate>(be, first.view(), b.view()).or_throw();
            CHECK(a == b);
            // Codes written from the last row to the first.
            auto upside = a.view();
            upside.codes = {upside.codes.at(count - 1), {count, width}, {-upside.codes.stride[0], 1}};
            keel::quantize<overflow::saturate>(be, backwards, upside).or_throw();
            keel::quantize<overflow::saturate>(be, turned.view(), b.view()).or_throw();
            for (int64_t i = 0; i < count; ++i) CHECK(a.codes.get(count - 1 - i, 5).bits == b.codes.get(i, 5).bits);
        });
    };
    check(std::integral_constant<int, 1>{}, std::integral_constant<int, 128>{});
    check(std::integral_constant<int, 128>{}, std::integral_constant<int, 1>{});
}

TEST_CASE("what is dequantised is within the stated error of what was quantised") {
    auto const check = []<class Code, class Scale>(Code, Scale, int m, int s) {
        int64_t const count = 3, width = 700;
        for (data_kind kind : {data_kind::normal, data_kind::mixed_scales, data_kind::outlier}) {
            guarded_matrix<float> x(count, width, 0, floats(kind, count * width, 6)), y(count, width);
            owned_blocks<Code, Scale, 1, 128> q(count, width);
            keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), q.view()).or_throw();
            keel::dequantize(keel::cpu{}, q.view(), y.view()).or_throw();
            int64_t wrong = 0;
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < width; ++j)
                    wrong += !(std::abs(y.at(i, j) - x.at(i, j)) <=
                               (std::ldexp(1.0, -m) + 0x1p-21) * std::abs(x.at(i, j)) + std::ldexp(q.scales.at(i, j / 128), -s));
            CHECK(wrong == 0);
        }
    };
    check(keel::e4m3{}, keel::fp32_scale{}, 4, 10);
    check(keel::e4m3{}, keel::e8m0_scale{}, 4, 10);
    check(keel::e5m2{}, keel::power_of_two_scale{}, 3, 17);
}

TEST_CASE("quantise and dequantise read and write nothing past their rows, up to a page's end, and reach far rows") {
    for (bool at_end : {true, false})
        for (int64_t width : {1, 17, 31, 127, 129, 200}) {
            INFO("width " << width << (at_end ? " at a page's end" : " at a page's start"));
            auto const values = floats(data_kind::normal, 3 * width, 7);
            fenced<float> x(values, at_end), y(3 * width, at_end), scales(3 * ((width + 127) / 128), at_end), column_scales(width, at_end);
            fenced<keel::e4m3> codes(3 * width, at_end), column_codes(3 * width, at_end);
            keel::row_blocks<> const q{keel::rows(codes.data(), 3, width), keel::rows(scales.data(), 3, (width + 127) / 128)};
            keel::column_blocks<> const c{keel::rows(column_codes.data(), 3, width), keel::rows(column_scales.data(), 1, width)};
            keel::quantize_pair<overflow::saturate>(keel::cpu{}, keel::rows(x.data(), 3, width), q, c).or_throw();
            for (int pass = 0; pass < 2; ++pass) {
                if (pass == 0) keel::dequantize(keel::cpu{}, q, keel::rows(y.data(), 3, width)).or_throw();
                else keel::dequantize(keel::cpu{}, c, keel::rows(y.data(), 3, width)).or_throw();
                for (std::size_t i = 0; i < values.size(); ++i)
                    CHECK(std::abs(y.data()[i] - values[i]) <= std::abs(values[i]) * 0x1.01p-4f + 0x1p-13f); // scales are below 2^-3
            }
        }
    int64_t const count = 3, width = 37;
    sparse<float> x(count * far_stride), scales(count * far_stride);
    sparse<keel::e4m3> codes(count * far_stride);
    if (x.data() == nullptr || scales.data() == nullptr || codes.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    guarded_matrix<float> near(count, width, 0, floats(data_kind::normal, count * width, 8)), y(count, width);
    owned_blocks<keel::e4m3, keel::fp32_scale, 1, 128> want(count, width);
    auto const X = keel::rows(x.data(), count, width, far_stride);
    keel::row_blocks<> const q{keel::rows(codes.data(), count, width, far_stride), keel::rows(scales.data(), count, 1, far_stride)};
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < width; ++j) X(i, j) = near.get(i, j);
    keel::quantize<overflow::saturate>(keel::cpu{}, X, q).or_throw();
    keel::quantize<overflow::saturate>(keel::cpu{}, near.view(), want.view()).or_throw();
    keel::dequantize(keel::cpu{}, q, X).or_throw();
    keel::dequantize(keel::cpu{}, want.view(), y.view()).or_throw();
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < width; ++j) CHECK((q.codes(i, j).bits == want.codes.get(i, j).bits && X(i, j) == y.get(i, j)));
}
