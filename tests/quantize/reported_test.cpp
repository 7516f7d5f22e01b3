// Kinds of faults that users of other quantisers have reported, each asked for every shape, scale and rule that it could touch. Single
// inputs are in tests/vectors.
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/delayed_scaling.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

using namespace keel_test;
using keel::e4m3;
using keel::e5m2;
using keel::overflow;
using keel::whole;
namespace rules = keel::scale_rules;

namespace {

template <class Code, class Scale, int Rows, int Columns> struct owned {
    using blocks = keel::block_scaled<Code, Scale, Rows, Columns>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    owned(int64_t rows, int64_t columns) : codes(rows, columns, 1), scales(blocks::scale_rows(rows), blocks::scale_columns(columns), 2) {}
    blocks view() { return {codes.view(), scales.view()}; }
    bool operator==(owned const& o) const { return codes.contents() == o.codes.contents() && scales.contents() == o.scales.contents(); }
    bool untouched() const { return codes.untouched() && scales.untouched(); }
};

template <int R, int C> struct shape_of {
    static constexpr int rows = R, columns = C;
};
/// fn(shape_of<Rows, Columns>{}) for a shape of each walk.
template <class Fn> void for_each_shape(Fn fn) {
    fn(shape_of<1, 128>{}), fn(shape_of<128, 1>{}), fn(shape_of<128, 128>{}), fn(shape_of<5, 7>{}), fn(shape_of<whole, whole>{});
}
/// The reference and what callers use.
template <class Fn> void for_some_backends(Fn fn) { fn(keel::reference{}), fn(keel::cpu{}); }

} // namespace

// FBGEMM #2919, #3508; vllm #49092: views of a larger matrix. compressed-tensors #547, llm-compressor #2290: 192 x 320 and other sizes that
// blocks do not divide, of which the padding must not count.
TEST_CASE("what lies around a view is not read: NaN and huge values there change nothing") {
    for (auto const& size : {std::pair<int64_t, int64_t>{192, 320}, {131, 45}, {3, 129}}) {
        int64_t const rows = size.first, columns = size.second;
        guarded_matrix<float> dense(rows, columns, 0, floats(data_kind::normal, rows * columns, 2)), sea(rows + 9, columns + 300);
        for (int64_t i = 0; i < sea.rows(); ++i)
            for (int64_t j = 0; j < sea.columns(); ++j) sea.set(i, j, j % 3 == 0 ? std::numeric_limits<float>::quiet_NaN() : 3e38f);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) sea.set(i + 4, j + 7, dense.get(i, j));
        auto const island = keel::columns(keel::slice(sea.view(), 4, rows), 7, columns);
        for_each_shape([&]<class S>(S) {
            INFO(S::rows << "x" << S::columns << " on " << rows << "x" << columns);
            owned<e4m3, keel::fp32_scale, S::rows, S::columns> want(rows, columns);
            keel::report expected;
            keel::quantize<overflow::saturate>(keel::reference{}, dense.view(), want.view(), {}, &expected).or_throw();
            CHECK(expected.non_finite == 0);
            for_some_backends([&](auto const& be) {
                owned<e4m3, keel::fp32_scale, S::rows, S::columns> got(rows, columns);
                keel::report seen;
                keel::quantize<overflow::saturate>(be, island, got.view(), {}, &seen).or_throw();
                CHECK(got == want);
                CHECK(got.untouched());
                CHECK((seen.elements == rows * columns && seen.non_finite == 0 && seen.scale_max_bits == expected.scale_max_bits));
            });
        });
    }
}

// THUDM/slime #2256; kernels-community #681; ao #4713: 0 / 0 beside blocks of data. compressed-tensors #595: nothing but zeros.
TEST_CASE("zero blocks have zero codes and a finite scale beside any other, under every rule") {
    int64_t const rows = 256, columns = 256;
    guarded_matrix<float> x(rows, columns);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            bool const zero = (i < 128) == (j < 128);
            x.set(i, j, zero ? ((i + j) % 2 == 0 ? 0.0f : -0.0f) : static_cast<float>(i + j));
        }
    auto const check = [&]<class Rule, class Scale, class S>(Rule, Scale, S) {
        owned<e4m3, Scale, S::rows, S::columns> q(rows, columns);
        guarded_matrix<float> y(rows, columns);
        keel::quantize<overflow::to_nonfinite, Rule>(keel::cpu{}, x.view(), q.view()).or_throw();
        keel::dequantize(keel::cpu{}, q.view(), y.view()).or_throw();
        int64_t wrong = 0;
        for (int64_t i = 0; i < q.scales.rows(); ++i)
            for (int64_t j = 0; j < q.scales.columns(); ++j) wrong += !(std::isfinite(q.scales.at(i, j)) && q.scales.at(i, j) > 0);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                bool const zero = (i < 128) == (j < 128);
                wrong += zero ? (q.codes.get(i, j).bits & 0x7f) != 0 || y.at(i, j) != 0 : !(y.at(i, j) > 0.9 * x.at(i, j));
            }
        CHECK(wrong == 0);
    };
    auto const check_shapes = [&](auto rule, auto scale) {
        check(rule, scale, shape_of<1, 128>{}), check(rule, scale, shape_of<128, 1>{}), check(rule, scale, shape_of<128, 128>{});
    };
    check_shapes(rules::round_up{}, keel::fp32_scale{}), check_shapes(rules::transformer_engine{}, keel::fp32_scale{});
    check(rules::round_up{}, keel::e8m0_scale{}, shape_of<1, 128>{}), check(rules::round_up{}, keel::power_of_two_scale{}, shape_of<128, 1>{});
    check(rules::deep_gemm{}, keel::fp32_scale{}, shape_of<128, 128>{}), check(rules::deep_gemm{}, keel::e8m0_scale{}, shape_of<1, 128>{});
    check(rules::transformer_engine{}, keel::power_of_two_scale{}, shape_of<128, 128>{});

    guarded_matrix<float> nothing(3, 700), history(1, 2);
    for (bool delayed : {false, true}) {
        owned<e4m3, keel::fp32_scale, whole, whole> q(3, 700);
        keel::report seen;
        if (delayed)
            keel::quantize_delayed<overflow::saturate>(keel::cpu{}, nothing.view(), q.view(), history.vec(), {}, &seen).or_throw();
        else
            keel::quantize<overflow::saturate>(keel::cpu{}, nothing.view(), q.view(), {}, &seen).or_throw();
        CHECK(q.scales.at(0, 0) == 0x1p-126);
        CHECK(q.codes.contents() == guarded_matrix<e4m3>(3, 700).contents());
        CHECK((seen.flushed == 0 && seen.saturated == 0));
        CHECK((history.get(0, 0) == 0.0f && history.get(0, 1) == 0.0f));
    }
}

namespace {
/// What comes back is within half a code's step of what went in, wherever the block's own scale reaches: so the multiplier was the reciprocal
/// of the scale that was stored.
template <class Rule, class Code, class Scale, class X = float> void check_round_trip(data_kind kind) {
    int64_t const rows = 4, columns = 300;
    INFO(name_of(kind));
    guarded_matrix<X> x(rows, columns, 0, floats(kind, rows * columns, 6));
    guarded_matrix<float> y(rows, columns);
    owned<Code, Scale, 1, 128> q(rows, columns);
    keel::quantize<overflow::saturate, Rule>(keel::cpu{}, x.view(), q.view()).or_throw();
    keel::dequantize(keel::cpu{}, q.view(), y.view()).or_throw();
    using traits = keel::format_traits<Code>;
    double const half_step = std::ldexp(1.0, -traits::mantissa_bits - 1), smallest = static_cast<double>(traits::min_subnormal()) / 2;
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            double const scale = q.scales.at(i, j / 128), size = std::abs(x.at(i, j));
            if (!Rule::bounded && size > scale * static_cast<double>(traits::max()) * 1.0001) continue; // clipped, as the rule says
            wrong += !(std::abs(y.at(i, j) - x.at(i, j)) <= (half_step + 0x1p-21) * size + smallest * scale);
        }
    CHECK(wrong == 0);
}
template <class Rule, class Scale, class Code = e4m3> void check_round_trips() {
    for (data_kind kind : {data_kind::normal, data_kind::mixed_scales, data_kind::outlier, data_kind::tiny, data_kind::subnormal, data_kind::huge})
        check_round_trip<Rule, Code, Scale>(kind);
}
} // namespace

// transformers #46763: elements divided by a scale that was rounded afterwards (0.6 instead of 0.02). ao #1104: 2^-126 on one way and 2^-127 on
// the other. TE #2408, #2647; ao #4117; flashinfer #4023: a reciprocal that is subnormal, and was taken for zero. TE #786: one that is Inf.
TEST_CASE("elements are scaled by the reciprocal of the stored scale, under every rule and at both ends of the range") {
    check_round_trips<rules::round_up, keel::fp32_scale>(), check_round_trips<rules::round_up, keel::power_of_two_scale>();
    check_round_trips<rules::round_up, keel::e8m0_scale>();
    check_round_trips<rules::ocp_floor, keel::power_of_two_scale>(), check_round_trips<rules::ocp_floor, keel::e8m0_scale>();
    check_round_trips<rules::ocp_even, keel::power_of_two_scale>(), check_round_trips<rules::ocp_even, keel::e8m0_scale>();
    check_round_trips<rules::nearest, keel::power_of_two_scale>(), check_round_trips<rules::nearest, keel::e8m0_scale>();
    check_round_trips<rules::deep_gemm, keel::fp32_scale>(), check_round_trips<rules::deep_gemm, keel::power_of_two_scale>();
    check_round_trips<rules::deep_gemm, keel::e8m0_scale>();
    check_round_trips<rules::transformer_engine, keel::fp32_scale>(), check_round_trips<rules::transformer_engine, keel::power_of_two_scale>();
    check_round_trips<rules::round_up, keel::fp32_scale, e5m2>(), check_round_trips<rules::ocp_even, keel::e8m0_scale, e5m2>();
    check_round_trips<rules::deep_gemm, keel::power_of_two_scale, e5m2>(), check_round_trips<rules::transformer_engine, keel::fp32_scale, e5m2>();
    for (data_kind kind : {data_kind::tiny, data_kind::subnormal})
        check_round_trip<rules::transformer_engine, e4m3, keel::fp32_scale, keel::bf16>(kind);
    check_round_trip<rules::transformer_engine, e4m3, keel::fp32_scale, keel::f16>(data_kind::normal);

    // A format whose largest value is 3.5 reaches byte FE, whose reciprocal is 2^-127.
    using narrow = keel::minifloat<4, 3, 14, keel::specials::fn>;
    static_assert(keel::format_traits<narrow>::max() == 3.5f);
    guarded_matrix<float> x(1, 3, 0, {0x1.ep127f, -0x1p126f, 0x1p127f}), y(1, 3);
    for_some_backends([&](auto const& be) {
        owned<narrow, keel::e8m0_scale, 1, 32> q(1, 3);
        keel::quantize<overflow::to_nonfinite>(be, x.view(), q.view()).or_throw();
        CHECK(q.scales.get(0, 0).bits == 0xfe);
        keel::dequantize(be, q.view(), y.view()).or_throw();
        CHECK(y.contents() == x.contents());
    });
}

// transformers #47030; sglang #39193; vllm #49784: fp32 scales handed to a packer of exponents, which cut their mantissas off.
TEST_CASE("a matrix by fp32 scales cannot pass for one by powers of two; made anew it keeps its values within two roundings") {
    using fp32 = keel::row_blocks<>;
    using power = keel::row_blocks<e4m3, keel::power_of_two_scale>;
    using byte = keel::row_blocks<e4m3, keel::e8m0_scale>;
    static_assert(!std::is_constructible_v<power, fp32> && !std::is_constructible_v<byte, fp32> && !std::is_constructible_v<byte, power>);
    static_assert(!std::is_constructible_v<byte::scale_matrix, fp32::scale_matrix>);

    int64_t const rows = 5, columns = 300;
    guarded_matrix<float> x(rows, columns, 0, floats(data_kind::normal, rows * columns, 4)), y(rows, columns), z(rows, columns);
    owned<e4m3, keel::fp32_scale, 1, 128> q(rows, columns);
    owned<e4m3, keel::e8m0_scale, 1, 128> p(rows, columns);
    for_some_backends([&](auto const& be) {
        keel::quantize<overflow::to_nonfinite>(be, x.view(), q.view()).or_throw();
        keel::dequantize(be, q.view(), y.view()).or_throw();
        keel::quantize<overflow::to_nonfinite>(be, y.view(), p.view()).or_throw();
        keel::dequantize(be, p.view(), z.view()).or_throw();
        int64_t wrong = 0, cut = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                double const scale = q.scales.at(i, j / 128), size = std::abs(x.at(i, j)), packed = std::exp2(std::floor(std::log2(scale)));
                double const bound = 0x1.1p-3 * size + (scale + p.scales.at(i, j / 128)) * 0x1p-10; // twice half a step of 2^-3
                wrong += !(std::abs(z.at(i, j) - x.at(i, j)) <= bound);
                cut += std::abs(q.codes.at(i, j) * packed - x.at(i, j)) > bound; // what the packers made of it
            }
        CHECK(wrong == 0);
        CHECK(cut > rows * columns / 4);
    });
}

// ROCm TransformerEngine #737: a floor of 1e-4 under amax made zeros of 64 % of a gradient whose blocks were of size 2e-9.
TEST_CASE("small gradients have the codes of large ones, and a rule with a floor counts what it flushes") {
    int64_t const rows = 130, columns = 300;
    auto values = floats(data_kind::normal, rows * columns, 12);
    guarded_matrix<float> large(rows, columns, 0, values);
    for (float& v : values) v *= 0x1p-90f; // exact
    guarded_matrix<float> small(rows, columns, 0, values);
    auto const check = [&]<class Rule, class Scale, class S>(Rule, Scale, S) {
        INFO(S::rows << "x" << S::columns);
        owned<e4m3, Scale, S::rows, S::columns> a(rows, columns), b(rows, columns);
        keel::report of_large, of_small;
        keel::quantize<overflow::saturate, Rule>(keel::cpu{}, large.view(), a.view(), {}, &of_large).or_throw();
        keel::quantize<overflow::saturate, Rule>(keel::cpu{}, small.view(), b.view(), {}, &of_small).or_throw();
        CHECK(a.codes.contents() == b.codes.contents());
        CHECK(of_large.flushed == of_small.flushed);
    };
    auto const check_shapes = [&](auto rule, auto scale) {
        check(rule, scale, shape_of<1, 128>{}), check(rule, scale, shape_of<128, 1>{}), check(rule, scale, shape_of<128, 128>{});
    };
    check_shapes(rules::round_up{}, keel::fp32_scale{}), check_shapes(rules::round_up{}, keel::e8m0_scale{});
    check(rules::transformer_engine{}, keel::fp32_scale{}, shape_of<1, 128>{});
    check(rules::nearest{}, keel::power_of_two_scale{}, shape_of<128, 1>{});

    for_some_backends([&](auto const& be) {
        owned<e4m3, keel::fp32_scale, 1, 128> q(rows, columns);
        keel::report seen;
        keel::quantize<overflow::saturate, rules::deep_gemm>(be, small.view(), q.view(), {}, &seen).or_throw();
        int64_t zeros = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) zeros += q.codes.at(i, j) == 0 && small.at(i, j) != 0;
        CHECK((zeros == rows * columns && seen.flushed == zeros));
    });
}

// vllm-xpu-kernels #521: groups of 512 for which a subgroup took only part of the maximum.
TEST_CASE("the largest element counts wherever it stands in its block") {
    auto const check = []<int Columns>(std::integral_constant<int, Columns>) {
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << ", blocks of " << Columns);
            int64_t const columns = Columns + 5;
            guarded_matrix<keel::bf16> x(1, columns, 0, std::vector<float>(static_cast<std::size_t>(columns), 1.0f));
            owned<e4m3, keel::fp32_scale, 1, Columns> q(1, columns);
            int64_t wrong = 0;
            for (int64_t at = 0; at < columns; ++at) {
                x.set(0, at, to_format<keel::bf16>(-7.0f));
                keel::quantize<overflow::saturate>(be, x.view(), q.view()).or_throw();
                x.set(0, at, to_format<keel::bf16>(1.0f));
                wrong += q.scales.get(0, at / Columns) != 7.0f / 448.0f || q.scales.get(0, 1 - at / Columns) != 1.0f / 448.0f ||
                         q.codes.at(0, at) != -448.0;
            }
            CHECK(wrong == 0);
        });
    };
    check(std::integral_constant<int, 32>{}), check(std::integral_constant<int, 128>{}), check(std::integral_constant<int, 512>{});
}

// xtuner #2044: quantised from fp32 masters and from their bf16 export, the codes differ. Each is right for what was passed.
TEST_CASE("a source of 16 bits is quantised as its exact values, which its rounding has made others than the master's") {
    int64_t const rows = 130, columns = 300;
    auto const master = floats(data_kind::mixed_scales, rows * columns, 3);
    guarded_matrix<float> x(rows, columns, 0, master);
    auto const check = [&]<class X, class S>(X, S) {
        guarded_matrix<X> exported(rows, columns, 0, master);
        guarded_matrix<float> exact(rows, columns);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) exact.set(i, j, static_cast<float>(exported.at(i, j)));
        owned<e4m3, keel::fp32_scale, S::rows, S::columns> a(rows, columns), b(rows, columns), c(rows, columns);
        keel::quantize<overflow::saturate>(keel::cpu{}, exported.view(), a.view()).or_throw();
        keel::quantize<overflow::saturate>(keel::cpu{}, exact.view(), b.view()).or_throw();
        keel::quantize<overflow::saturate>(keel::cpu{}, x.view(), c.view()).or_throw();
        CHECK(a == b);
        CHECK(!(a == c));
    };
    for_each_shape([&](auto shape) { check(keel::bf16{}, shape); });
    check(keel::f16{}, shape_of<1, 128>{});
}

// vllm-xpu-kernels #609: no rows.
TEST_CASE("shapes without rows or columns are nothing to do, for every block shape") {
    for (auto const& size : {std::pair<int64_t, int64_t>{0, 128}, {128, 0}, {0, 0}})
        for_each_shape([&]<class S>(S) {
            INFO(S::rows << "x" << S::columns << " on " << size.first << "x" << size.second);
            guarded_matrix<float> x(size.first, size.second), y(size.first, size.second);
            owned<e4m3, keel::fp32_scale, S::rows, S::columns> q(size.first, size.second), p(size.first, size.second);
            for_some_backends([&](auto const& be) {
                keel::report seen;
                CHECK(keel::quantize<overflow::saturate>(be, x.view(), q.view(), {}, &seen).ok());
                CHECK(keel::quantize_pair<overflow::saturate>(be, x.view(), q.view(), p.view(), {}, &seen).ok());
                CHECK(keel::dequantize(be, q.view(), y.view()).ok());
                CHECK(seen.elements == 0);
            });
            CHECK((q.untouched() && p.untouched() && y.untouched()));
        });
}

// FBGEMM #2131; vllm #9425, #53390; DeepGEMM #226; unsloth #6884: offsets past 2^31.
TEST_CASE("every block shape reaches rows that no 32-bit index does") {
    int64_t const rows = 3, columns = 37;
    sparse<float> x(rows * far_stride);
    sparse<e4m3> codes(rows * far_stride), more_codes(rows * far_stride);
    if (x.data() == nullptr || codes.data() == nullptr || more_codes.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    guarded_matrix<float> near(rows, columns, 0, floats(data_kind::normal, rows * columns, 8)), want_y(rows, columns);
    auto const X = keel::rows(x.data(), rows, columns, far_stride);
    for_each_shape([&]<class S>(S) {
        INFO(S::rows << "x" << S::columns);
        owned<e4m3, keel::fp32_scale, S::rows, S::columns> want(rows, columns), got(rows, columns);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) X(i, j) = near.get(i, j);
        auto far = got.view();
        far.codes = keel::rows(codes.data(), rows, columns, far_stride);
        keel::quantize<overflow::saturate>(keel::cpu{}, X, far).or_throw();
        keel::quantize<overflow::saturate>(keel::cpu{}, near.view(), want.view()).or_throw();
        keel::dequantize(keel::cpu{}, far, X).or_throw();
        keel::dequantize(keel::cpu{}, want.view(), want_y.view()).or_throw();
        CHECK(got.scales.contents() == want.scales.contents());
        int64_t wrong = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                wrong += far.codes(i, j).bits != want.codes.get(i, j).bits || X(i, j) != want_y.get(i, j) ? 1 : 0;
        CHECK(wrong == 0);
    });
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) X(i, j) = near.get(i, j);
    owned<e4m3, keel::fp32_scale, 1, 128> along(rows, columns), far_along(rows, columns);
    owned<e4m3, keel::fp32_scale, 128, 1> down(rows, columns), far_down(rows, columns);
    auto a = far_along.view();
    auto b = far_down.view();
    a.codes = keel::rows(codes.data(), rows, columns, far_stride), b.codes = keel::rows(more_codes.data(), rows, columns, far_stride);
    keel::quantize_pair<overflow::saturate>(keel::cpu{}, X, a, b).or_throw();
    keel::quantize_pair<overflow::saturate>(keel::cpu{}, near.view(), along.view(), down.view()).or_throw();
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
            wrong += a.codes(i, j).bits != along.codes.get(i, j).bits || b.codes(i, j).bits != down.codes.get(i, j).bits ? 1 : 0;
    CHECK(wrong == 0);
}
