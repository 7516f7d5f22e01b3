// NVFP4 against its definition by tables, its policies for bad data, and the same bits on every backend.
#include <cmath>
#include <cstring>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/nvfp4.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <support/fenced.hpp>

#include "nvfp4_oracle.hpp"

using namespace keel_test;
using keel::non_finite_policy;

namespace {

/// Codes and scales in memory of their own.
struct owned_nvfp4 {
    guarded_matrix<keel::e2m1x2> codes;
    guarded_matrix<keel::e4m3> scales;
    guarded_matrix<float> tensor;
    int64_t columns;
    owned_nvfp4(int64_t rows, int64_t n)
        : codes(rows, keel::nvfp4_matrix<>::pairs(n), 3), scales(rows, keel::nvfp4_matrix<>::blocks(n), 1), tensor(1, 1), columns(n) {}
    keel::nvfp4_matrix<> view() { return {columns, codes.view(), scales.view(), tensor.vec()}; }
    float tensor_scale() const { return tensor.get(0, 0); }
    uint8_t code(int64_t i, int64_t j) const { return static_cast<uint8_t>(codes.get(i, j / 2).bits >> (j % 2 * 4) & 15); }
    bool operator==(owned_nvfp4 const& o) const {
        return codes.contents() == o.codes.contents() && scales.contents() == o.scales.contents() &&
               tensor.contents() == o.tensor.contents();
    }
    bool untouched() const { return codes.untouched() && scales.untouched() && tensor.untouched(); }
};

template <class T> std::vector<float> values(guarded_matrix<T> const& x) {
    std::vector<float> v;
    for (int64_t i = 0; i < x.rows(); ++i)
        for (int64_t j = 0; j < x.columns(); ++j) v.push_back(static_cast<float>(x.at(i, j)));
    return v;
}
uint32_t word(float x) { return std::bit_cast<uint32_t>(x); }

template <class Rule> constexpr nvfp4::rule named() {
    if constexpr (std::is_same_v<Rule, keel::nvfp4_rules::nearest>) return nvfp4::rule::nearest;
    else if constexpr (std::is_same_v<Rule, keel::nvfp4_rules::round_up>) return nvfp4::rule::round_up;
    else return nvfp4::rule::transformer_engine;
}

void check_report(keel::report const& got, nvfp4::result const& want, int64_t elements) {
    CHECK(got.elements == elements);
    CHECK(got.saturated == want.saturated);
    CHECK(got.flushed == want.flushed);
    CHECK(got.non_finite == want.non_finite);
    bool const some = want.scale_min <= want.scale_max;
    CHECK(got.scale_min_bits == (some ? word(want.scale_min) : 0xffffffffu));
    CHECK(got.scale_max_bits == word(want.scale_max));
}

/// One backend against the oracle: every byte, every count, and the way back.
template <class Rule, class B, class X>
void check_one(B const& be, guarded_matrix<X>& x, non_finite_policy policy, nvfp4::result const& want) {
    int64_t const rows = x.rows(), columns = x.columns();
    owned_nvfp4 q(rows, columns), uncounted(rows, columns);
    keel::report report;
    keel::quantize_nvfp4<Rule>(be, x.view(), q.view(), {.policy = policy}, &report).or_throw();
    keel::quantize_nvfp4<Rule>(be, x.view(), uncounted.view(), {.policy = policy}).or_throw();
    CHECK(q.codes.contents() == want.codes);
    CHECK(q.scales.contents() == want.scales);
    CHECK((word(q.tensor_scale()) == word(want.tensor_scale) || (std::isnan(want.tensor_scale) && word(q.tensor_scale()) == keel::nan_bits)));
    CHECK(q == uncounted);
    CHECK(q.untouched());
    check_report(report, want, rows * columns);
    guarded_matrix<X> y(rows, columns, 1);
    keel::dequantize_nvfp4(be, q.view(), y.view()).or_throw();
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            X const a = y.get(i, j), b = keel::encode<X>(nvfp4::value_of(want, columns, i, j));
            wrong += std::memcmp(&a, &b, sizeof a) != 0;
        }
    CHECK(wrong == 0);
    CHECK(y.untouched());
}

template <class Rule, class X> void check(guarded_matrix<X>& x, non_finite_policy policy) {
    auto const want = nvfp4::quantise(named<Rule>(), policy, values(x), x.rows(), x.columns());
    check_one<Rule>(keel::reference{}, x, policy, want);
    check_one<Rule>(keel::cpu{}, x, policy, want);
}

constexpr int64_t widths[] = {0, 1, 2, 15, 16, 17, 31, 33, 127, 300};
constexpr non_finite_policy policies[] = {non_finite_policy::isolate, non_finite_policy::poison};

template <class Rule, class X> void check_all_data() {
    for (data_kind kind : all_kinds)
        for (int64_t width : widths)
            for (auto policy : policies) {
                INFO(name_of(kind) << " " << width << (policy == non_finite_policy::poison ? " poison" : ""));
                guarded_matrix<X> x(3, width, 2, floats(kind, 3 * width, static_cast<uint64_t>(width + 5)));
                check<Rule>(x, policy);
            }
}

/// A row of blocks whose largest magnitudes are `tops`, their elements spread below them.
guarded_matrix<float> blocks_of(std::vector<float> const& tops) {
    guarded_matrix<float> x(1, static_cast<int64_t>(tops.size()) * 16);
    auto const spread = floats(data_kind::uniform, x.columns(), 17);
    for (int64_t j = 0; j < x.columns(); ++j) {
        float const top = tops[static_cast<std::size_t>(j / 16)];
        x.set(0, j, j % 16 == 5 ? -top : top * spread[static_cast<std::size_t>(j)]);
    }
    return x;
}

} // namespace

TEMPLATE_TEST_CASE("NVFP4 follows its definition on every kind of data and size", "", float, keel::bf16, keel::f16) {
    check_all_data<keel::nvfp4_rules::nearest, TestType>();
}

TEMPLATE_TEST_CASE("NVFP4 by the other rules follows their definition", "", keel::nvfp4_rules::round_up, keel::nvfp4_rules::transformer_engine) {
    check_all_data<TestType, float>();
    check_all_data<TestType, keel::bf16>();
}

TEST_CASE("NVFP4 keeps its bits and counts on every backend") {
    for (data_kind kind : all_kinds)
        for (int64_t width : {1, 33, 127, 700}) {
            INFO(name_of(kind) << " " << width);
            auto const policy = kind == data_kind::with_inf ? non_finite_policy::poison : non_finite_policy::isolate;
            guarded_matrix<keel::bf16> x(5, width, 3, floats(kind, 5 * width, 9));
            auto const want = nvfp4::quantise(nvfp4::rule::nearest, policy, values(x), 5, width);
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                check_one<keel::nvfp4_rules::nearest>(be, x, policy, want);
            });
        }
    guarded_matrix<float> x(3, 333, 1, floats(data_kind::any_bits, 999, 4));
    auto const want = nvfp4::quantise(nvfp4::rule::transformer_engine, non_finite_policy::isolate, values(x), 3, 333);
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        check_one<keel::nvfp4_rules::transformer_engine>(be, x, non_finite_policy::isolate, want);
    });
}

TEST_CASE("a NaN or Inf in any lane is loud: its block decodes to NaN, and the code tells where it was") {
    for (int64_t spot = 0; spot < 37; ++spot)
        for (float bad : {nvfp4::nan, -nvfp4::nan, nvfp4::infinity, -nvfp4::infinity}) {
            guarded_matrix<float> x(1, 37, 0, std::vector<float>(37, -3.0f)), y(1, 37);
            x.set(0, spot, bad);
            for (auto policy : policies) {
                owned_nvfp4 q(1, 37);
                keel::report report;
                keel::quantize_nvfp4(keel::cpu{}, x.view(), q.view(), {.policy = policy}, &report).or_throw();
                keel::dequantize_nvfp4(keel::cpu{}, q.view(), y.view()).or_throw();
                CHECK(report.non_finite == 1);
                CHECK(report.saturated == 0); // the others of the block are lost to the policy, not to their size
                CHECK(report.flushed == 0);
                bool const poisoned = policy == non_finite_policy::poison;
                CHECK(std::isnan(q.tensor_scale()) == poisoned);
                for (int64_t j = 0; j < 37; ++j) {
                    bool const lost = poisoned || j / 16 == spot / 16;
                    CHECK(q.code(0, j) == (j == spot ? 7 : lost ? 8 : 15));
                    CHECK((lost ? std::isnan(y.at(0, j)) : std::abs(y.at(0, j) + 3.0) <= 3 * 0x1p-23)); // S and the product by it are rounded
                }
                CHECK(q.codes.get(0, 18).bits >> 4 == 0); // no 38th element
            }
        }
}

TEST_CASE("a tensor of zeros has finite scales, and a block of zeros beside others zero codes") { // compressed-tensors #595
    guarded_matrix<float> zeros(3, 35), x = blocks_of({0.0f, 1.0f, 0.0f});
    owned_nvfp4 q(3, 35);
    keel::report report;
    keel::quantize_nvfp4(keel::cpu{}, zeros.view(), q.view(), {}, &report).or_throw();
    CHECK(q.tensor_scale() == 0x1p-117f);
    CHECK(q.codes.contents() == std::vector<unsigned char>(3 * 18));
    CHECK(report.flushed == 0);
    check<keel::nvfp4_rules::nearest>(x, non_finite_policy::isolate);
    check<keel::nvfp4_rules::transformer_engine>(x, non_finite_policy::isolate);
    owned_nvfp4 none(0, 35), thin(4, 0);
    keel::quantize_nvfp4(keel::cpu{}, keel::view<float, 2>{nullptr, {0, 35}, {35, 1}}, none.view()).or_throw(); // vllm-xpu-kernels #609
    keel::quantize_nvfp4(keel::cpu{}, keel::view<float, 2>{nullptr, {4, 0}, {7, 1}}, thin.view()).or_throw();
    CHECK(none.tensor_scale() == 0x1p-117f);
    CHECK(thin.tensor_scale() == 0x1p-117f);
}

TEST_CASE("block scales underflow aloud: flushed by the default rule, kept by round_up, worth nothing in TransformerEngine's codes") {
    std::vector<float> tops = {1.0f};
    for (int k = 9; k < 24; ++k) tops.push_back(std::ldexp(1.3f, -k));
    for (float edge : {1.0f / 458752.0f, 1.0001f / 458752.0f, 2.0f / 458752.0f, 3.0f / 458752.0f}) tops.push_back(edge);
    auto x = blocks_of(tops);
    check<keel::nvfp4_rules::nearest>(x, non_finite_policy::isolate);
    check<keel::nvfp4_rules::round_up>(x, non_finite_policy::isolate);
    check<keel::nvfp4_rules::transformer_engine>(x, non_finite_policy::isolate);

    auto deep = blocks_of({1.0f, 1e-7f});
    owned_nvfp4 q(1, 32);
    guarded_matrix<float> y(1, 32);
    keel::report nearest, up, engine;
    keel::quantize_nvfp4(keel::cpu{}, deep.view(), q.view(), {}, &nearest).or_throw();
    CHECK(nearest.flushed >= 16);
    CHECK(q.scales.at(0, 1) == 0.0);
    CHECK(q.code(0, 21) == 8); // the largest of the block, -1e-7
    keel::quantize_nvfp4<keel::nvfp4_rules::transformer_engine>(keel::cpu{}, deep.view(), q.view(), {}, &engine).or_throw();
    CHECK(engine.flushed >= 16);
    CHECK(q.code(0, 21) == 15); // -6, times 0
    auto less = blocks_of({1.0f, 1.9e-6f});
    keel::quantize_nvfp4<keel::nvfp4_rules::round_up>(keel::cpu{}, less.view(), q.view(), {}, &up).or_throw();
    keel::dequantize_nvfp4(keel::cpu{}, q.view(), y.view()).or_throw();
    CHECK(y.at(0, 21) != 0.0);
    CHECK(up.saturated == 0);
}

TEMPLATE_TEST_CASE("what NVFP4 decodes to is within the stated error", "", keel::nvfp4_rules::nearest, keel::nvfp4_rules::round_up,
                   keel::nvfp4_rules::transformer_engine) {
    for (data_kind kind : {data_kind::normal, data_kind::uniform, data_kind::mixed_scales, data_kind::outlier, data_kind::equal, data_kind::huge}) {
        INFO(name_of(kind));
        int64_t const rows = 4, columns = 715;
        guarded_matrix<float> x(rows, columns, 0, floats(kind, rows * columns, 6)), y(rows, columns);
        owned_nvfp4 q(rows, columns);
        keel::report report;
        keel::quantize_nvfp4<TestType>(keel::cpu{}, x.view(), q.view(), {}, &report).or_throw();
        keel::dequantize_nvfp4(keel::cpu{}, q.view(), y.view()).or_throw();
        int64_t beyond = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                double const a = std::abs(x.at(i, j)), scale = q.scales.at(i, j / 16) * q.tensor.at(0, 0);
                beyond += !(std::abs(y.at(i, j) - x.at(i, j)) <= std::max(a / 5, scale / 4) + 0x1p-20 * a) && scale != 0;
            }
        CHECK(beyond <= report.saturated);
        if (kind != data_kind::mixed_scales && kind != data_kind::outlier) CHECK(beyond == 0);
    }
}

TEST_CASE("NVFP4 reads rows in any order, and takes scales with columns apart") {
    int64_t const count = 6, width = 97;
    guarded_matrix<float> x(count, width, 3, floats(data_kind::mixed_scales, count * width, 4)), turned(count, width);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < width; ++j) turned.set(i, j, x.get(count - 1 - i, j));
    auto const X = x.view();
    keel::view<float, 2> const backwards{X.at(count - 1), {count, width}, {-X.stride[0], 1}};
    guarded_matrix<float> y(count, width), z(count, width);
    for_each_backend([&](std::string const& name, auto const& be) {
        INFO(name);
        owned_nvfp4 a(count, width), b(count, width);
        guarded_matrix<keel::e4m3> across(keel::nvfp4_matrix<>::blocks(width), count, 2);
        auto sideways = a.view();
        sideways.scales = keel::transposed(across.view());
        keel::quantize_nvfp4(be, backwards, sideways).or_throw();
        keel::quantize_nvfp4(be, turned.view(), b.view()).or_throw();
        CHECK(a.codes.contents() == b.codes.contents());
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < across.rows(); ++j) wrong += across.get(j, i).bits != b.scales.get(i, j).bits;
        CHECK(wrong == 0);
        CHECK(across.untouched());
        keel::dequantize_nvfp4(be, sideways, y.view()).or_throw();
        keel::dequantize_nvfp4(be, b.view(), z.view()).or_throw();
        CHECK(y.contents() == z.contents());
        keel::dequantize_nvfp4(be, keel::slice(b.view(), 2, 3), keel::slice(y.view(), 0, 3)).or_throw();
        for (int64_t j = 0; j < width; ++j) CHECK(word(y.get(1, j)) == word(z.get(3, j)));
    });
}

TEST_CASE("NVFP4's scales in 128x4 tiles are the same scales") {
    using tiled = keel::nvfp4_matrix<keel::e2m1x2, keel::swizzled_scales>;
    for (auto const& size : {std::pair<int64_t, int64_t>{1, 1}, {130, 100}, {257, 64}}) {
        int64_t const count = size.first, width = size.second;
        INFO(count << "x" << width);
        int64_t const blocks = tiled::blocks(width);
        guarded_matrix<keel::bf16> x(count, width, 1, floats(data_kind::mixed_scales, count * width, 4));
        owned_nvfp4 want(count, width), got(count, width);
        keel::quantize_nvfp4(keel::reference{}, x.view(), want.view()).or_throw();
        for_main_backends([&](std::string const& name, auto const& be) {
            INFO(name);
            std::vector<keel::e4m3> memory(static_cast<std::size_t>(keel::swizzled_size(count, blocks)), keel::from_word<keel::e4m3>(0x55));
            tiled const q{width, got.codes.view(), keel::swizzled(memory.data(), count, blocks), got.tensor.vec()};
            keel::quantize_nvfp4(be, x.view(), q).or_throw();
            CHECK(got.codes.contents() == want.codes.contents());
            int64_t wrong = 0, padding = 0;
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < blocks; ++j) wrong += q.scales(i, j).bits != want.scales.get(i, j).bits;
            for (auto const& s : memory) padding += s.bits == 0x55;
            CHECK(wrong == 0);
            CHECK(padding >= static_cast<int64_t>(memory.size()) - count * blocks);
            guarded_matrix<float> y(count, width), z(count, width);
            keel::dequantize_nvfp4(be, q, y.view()).or_throw();
            keel::dequantize_nvfp4(be, want.view(), z.view()).or_throw();
            CHECK(y.contents() == z.contents());
        });
        auto const wide = keel::swizzled(got.scales.view().data, count, blocks + 1);
        CHECK(keel::quantize_nvfp4(keel::cpu{}, x.view(), tiled{width, got.codes.view(), wide, got.tensor.vec()}).code == keel::status_code::bad_shape);
    }
}

TEST_CASE("NVFP4 rounded up: a block whose share of the tensor fp32 loses keeps a scale") {
    std::vector<float> x(48, 0.0f);
    x[0] = 1e38f, x[17] = 1e-12f;
    for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        owned_nvfp4 q(1, 48);
        keel::quantize_nvfp4<keel::nvfp4_rules::round_up>(be, keel::rows(x.data(), 1, 48), q.view()).or_throw();
        CHECK((q.scales.get(0, 0).bits == 0x7e && q.scales.get(0, 1).bits == 0x01 && q.scales.get(0, 2).bits == 0x00));
    });
}

TEST_CASE("NVFP4 reads and writes nothing past its rows, up to a page's end, and reaches far rows") {
    for (bool at_end : {true, false})
        for (int64_t width : widths) {
            if (width == 0) continue;
            INFO("width " << width << (at_end ? " at a page's end" : " at a page's start"));
            auto const data = floats(data_kind::normal, 3 * width, 7);
            int64_t const pairs = keel::nvfp4_matrix<>::pairs(width), blocks = keel::nvfp4_matrix<>::blocks(width);
            fenced<float> x(data, at_end), y(3 * width, at_end), tensor(1, at_end);
            fenced<keel::e2m1x2> codes(3 * pairs, at_end);
            fenced<keel::e4m3> scales(3 * blocks, at_end);
            keel::nvfp4_matrix<> const q{width, keel::rows(codes.data(), 3, pairs), keel::rows(scales.data(), 3, blocks), keel::vec(tensor.data(), 1)};
            std::vector<float> want;
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                std::fill_n(y.data(), data.size(), -77.0f);
                keel::quantize_nvfp4(be, keel::rows(x.data(), 3, width), q).or_throw();
                keel::dequantize_nvfp4(be, q, keel::rows(y.data(), 3, width)).or_throw();
                std::vector<float> const got(y.data(), y.data() + data.size());
                if (want.empty()) want = got;
                CHECK(got == want);
            });
            for (std::size_t i = 0; i < data.size(); ++i) // half a step of 1 to 6 times the scale, which is at most a sixth of the largest
                CHECK(std::abs(want[i] - data[i]) <= std::max(std::abs(data[i]) / 5, 0.25f * 4.5f / 6) * 1.1f);
        }
    int64_t const count = 3, width = 37;
    sparse<float> x(count * far_stride);
    sparse<keel::e2m1x2> codes(count * far_stride);
    sparse<keel::e4m3> scales(count * far_stride);
    if (x.data() == nullptr || codes.data() == nullptr || scales.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    guarded_matrix<float> near(count, width, 0, floats(data_kind::normal, count * width, 8));
    owned_nvfp4 want(count, width);
    auto const X = keel::rows(x.data(), count, width, far_stride);
    keel::nvfp4_matrix<> const q{width, keel::rows(codes.data(), count, 19, far_stride), keel::rows(scales.data(), count, 3, far_stride), want.tensor.vec()};
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < width; ++j) X(i, j) = near.get(i, j);
    keel::quantize_nvfp4(keel::cpu{}, X, q).or_throw();
    keel::quantize_nvfp4(keel::cpu{}, near.view(), want.view()).or_throw();
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < 19; ++j) CHECK(q.codes(i, j).bits == want.codes.get(i, j).bits);
}

TEST_CASE("a bad NVFP4 call names the argument and writes nothing") {
    guarded_matrix<float> x(2, 33, 0, floats(data_kind::normal, 66)), y(2, 33);
    owned_nvfp4 q(2, 33);
    auto const quantised = [&](keel::nvfp4_matrix<> out) { return keel::quantize_nvfp4(keel::cpu{}, x.view(), out); };
    auto const with = [&](auto change) {
        auto v = q.view();
        change(v);
        return v;
    };
    CHECK(quantised(with([](auto& v) { v.columns = 34; })).message() == "quantize_nvfp4: out has columns = 34, wanted 33 (bad_shape)");
    CHECK(quantised(with([](auto& v) { v.codes.extent[1] = 16; })).message() ==
          "quantize_nvfp4: out.codes has columns = 16, wanted 17 (bad_shape)");
    CHECK(quantised(with([](auto& v) { v.scales.extent[1] = 2; })).message() ==
          "quantize_nvfp4: out.scales has columns = 2, wanted 3 (bad_shape)");
    CHECK(quantised(with([](auto& v) { v.tensor_scale = {}; })).message() ==
          "quantize_nvfp4: out.tensor_scale has length = 0, wanted 1 (bad_shape)");
    CHECK(quantised(with([](auto& v) { v.codes.stride[0] = 16; })).code == keel::status_code::bad_stride);
    CHECK(quantised(with([](auto& v) { v.codes.stride[1] = 2; })).code == keel::status_code::bad_stride);
    CHECK(quantised(with([](auto& v) { v.scales.stride[0] = 0; })).code == keel::status_code::bad_stride);
    CHECK(quantised(with([](auto& v) { v.scales.data = reinterpret_cast<keel::e4m3*>(v.codes.data); })).code == keel::status_code::overlap);
    CHECK(quantised(with([&](auto& v) { v.codes.data = reinterpret_cast<keel::e2m1x2*>(x.view().data); })).code == keel::status_code::overlap);
    CHECK(quantised(with([&](auto& v) { v.tensor_scale.data = x.view().data; })).code == keel::status_code::overlap);
    CHECK(quantised(with([](auto& v) { v.codes.data = nullptr; })).code == keel::status_code::bad_pointer);
    CHECK(keel::quantize_nvfp4(keel::cpu{}, keel::transposed(x.view()), q.view()).code == keel::status_code::bad_stride);
    owned_nvfp4 const fresh(2, 33);
    CHECK(q == fresh);

    keel::quantize_nvfp4(keel::cpu{}, x.view(), q.view()).or_throw();
    auto const before = y.contents();
    CHECK(keel::dequantize_nvfp4(keel::cpu{}, with([](auto& v) { v.columns = 32; }), y.view()).message() ==
          "dequantize_nvfp4: in has columns = 32, wanted 33 (bad_shape)");
    CHECK(keel::dequantize_nvfp4(keel::cpu{}, with([](auto& v) { v.tensor_scale.data = nullptr; }), y.view()).code ==
          keel::status_code::bad_pointer);
    CHECK(keel::dequantize_nvfp4(keel::cpu{}, with([&](auto& v) { v.tensor_scale.data = y.view().data; }), y.view()).code ==
          keel::status_code::overlap);
    CHECK(y.contents() == before);
}
