// Cross-entropy against double, its gradient against finite differences, every backend against the reference.
#include <cmath>
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/cross_entropy.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

double log_sum_exp(std::vector<double> const& x) {
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (double v : x) top = std::max(top, v);
    for (double v : x) sum += std::exp(v - top);
    return top + std::log(sum);
}
std::vector<double> row_of(guarded_matrix<float> const& m, int64_t i) {
    std::vector<double> x;
    for (int64_t j = 0; j < m.columns(); ++j) x.push_back(m.at(i, j));
    return x;
}

} // namespace

TEST_CASE("loss and gradient match the formula in double, z-loss included") {
    for (int64_t columns : {1, 2, 17, 256, 2051}) {
        INFO(columns);
        guarded_matrix<float> logits(3, columns, 2, floats(data_kind::normal, 3 * columns, 4)), d(3, columns, 1), loss(1, 3), lse(1, 3);
        std::vector<int32_t> targets = {0, static_cast<int32_t>(columns - 1), static_cast<int32_t>(columns / 2)};
        keel::cpu be;
        keel::cross_entropy_options const options{.z_loss = 1e-2f, .scale = 0.25f};
        auto const t = keel::vec(targets.data(), 3);
        keel::cross_entropy(be, logits.view(), t, loss.vec(), {.lse = lse.vec()}, options).or_throw();
        keel::cross_entropy_backward(be, logits.view(), t, {.lse = lse.vec()}, d.view(), options).or_throw();
        double const z = static_cast<double>(options.z_loss);
        for (int64_t i = 0; i < 3; ++i) {
            auto x = row_of(logits, i);
            auto const target = static_cast<std::size_t>(targets[static_cast<std::size_t>(i)]);
            auto const f = [&] {
                double const l = log_sum_exp(x);
                return l - x[target] + z * l * l;
            };
            CHECK(loss.at(0, i) == Approx(f()).epsilon(1e-6).margin(2e-6)); // values of O(10): a few ulp of lse
            for (std::size_t j = 0; j < x.size(); ++j) {
                double const keep = x[j], h = 1e-5;
                x[j] = keep + h;
                double const above = f();
                x[j] = keep - h;
                double const below = f();
                x[j] = keep;
                CHECK(d.at(i, static_cast<int64_t>(j)) == Approx(0.25 * (above - below) / (2 * h)).epsilon(1e-5).margin(1e-6));
            }
        }
        CHECK(d.untouched());
    }
}

TEST_CASE("huge, masked and non-finite logits") {
    float const inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    guarded_matrix<float> logits(6, 3, 0, {1000, 999, -1000, -inf, 0, 0, nan, 0, 0, inf, 0, 0, -inf, -inf, -inf, -3e38f, -3e38f, -3e38f});
    guarded_matrix<float> loss(1, 6), lse(1, 6), d(6, 3);
    std::vector<int32_t> const targets = {0, 1, 1, 1, 1, 2};
    keel::cpu be;
    keel::cross_entropy(be, logits.view(), keel::vec(targets.data(), 6), loss.vec(), {.lse = lse.vec()}).or_throw();
    keel::cross_entropy_backward(be, logits.view(), keel::vec(targets.data(), 6), {.lse = lse.vec()}, d.view()).or_throw();
    CHECK(loss.at(0, 0) == Approx(std::log1p(std::exp(-1.0))).epsilon(1e-4)); // 1000 has an ulp of 6e-5
    CHECK(loss.at(0, 1) == Approx(std::log(2.0)).epsilon(1e-6));
    CHECK(d.at(1, 0) == 0.0);
    CHECK(std::isnan(loss.at(0, 2)));
    CHECK(!std::isfinite(loss.at(0, 3)));
    CHECK(lse.at(0, 4) == -std::numeric_limits<double>::infinity());
    CHECK(std::isfinite(lse.at(0, 5)));
}

TEST_CASE("ignored rows cost nothing and pull nothing") {
    guarded_matrix<float> logits(2, 5, 0, floats(data_kind::normal, 10)), d(2, 5, 0, floats(data_kind::normal, 10)), loss(1, 2), lse(1, 2);
    std::vector<int32_t> const targets = {-1, 2};
    keel::cross_entropy(keel::cpu{}, logits.view(), keel::vec(targets.data(), 2), loss.vec(), {.lse = lse.vec()}, {.z_loss = 0.1f}).or_throw();
    keel::cross_entropy_backward(keel::cpu{}, logits.view(), keel::vec(targets.data(), 2), {.lse = lse.vec()}, d.view(), {.z_loss = 0.1f}).or_throw();
    CHECK(loss.at(0, 0) == 0.0);
    for (int64_t j = 0; j < 5; ++j) CHECK(d.at(0, j) == 0.0);
    CHECK(d.at(1, 2) < 0.0);
}

TEST_CASE("cross-entropy keeps its bits on every backend and data") {
    for (data_kind kind : all_kinds) {
        guarded_matrix<keel::bf16> logits(3, 515, 1, floats(kind, 3 * 515, 7)), d(3, 515);
        guarded_matrix<float> loss(1, 3), lse(1, 3);
        std::vector<int32_t> const targets = {514, 0, 77};
        auto const t = keel::vec(targets.data(), 3);
        keel::cross_entropy(keel::reference{}, logits.view(), t, loss.vec(), {.lse = lse.vec()}).or_throw();
        keel::cross_entropy_backward(keel::reference{}, logits.view(), t, {.lse = lse.vec()}, d.view()).or_throw();
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << " " << name_of(kind));
            guarded_matrix<keel::bf16> d2(3, 515, 3);
            guarded_matrix<float> loss2(1, 3), lse2(1, 3);
            keel::cross_entropy(be, logits.view(), t, loss2.vec(), {.lse = lse2.vec()}).or_throw();
            keel::cross_entropy_backward(be, logits.view(), t, {.lse = lse2.vec()}, d2.view()).or_throw();
            CHECK(lse.contents() == lse2.contents());
            CHECK(loss.contents() == loss2.contents());
            CHECK(d.contents() == d2.contents());
        });
    }
}

TEST_CASE("a small loss beside large logits keeps its digits") {
    for (float shift : {0.0f, 128.0f, 4096.0f, 32768.0f}) {
        INFO("shift " << shift);
        guarded_matrix<float> logits(1, 3, 0, {shift + 10, shift, shift - 1}), loss(1, 1), lse(1, 1);
        int32_t const target = 0;
        keel::cross_entropy(keel::cpu{}, logits.view(), keel::vec(&target, 1), loss.vec(), {.lse = lse.vec()}).or_throw();
        double const exact = std::log1p(std::exp(-10.0) + std::exp(-11.0));
        CHECK(std::abs(loss.at(0, 0) - exact) <= 2 * 0x1p-24); // log of a float near 1: the sum's half ulp
    }
}

TEST_CASE("a target out of range is refused before anything is written") {
    guarded_matrix<float> logits(2, 5), loss(1, 2, 0, {7, 7}), lse(1, 2, 0, {7, 7});
    std::vector<int32_t> const targets = {1, 5};
    auto const s = keel::cross_entropy(keel::cpu{}, logits.view(), keel::vec(targets.data(), 2), loss.vec(), {.lse = lse.vec()});
    CHECK(s.message() == "cross_entropy: targets has value = 5, wanted an index in [0, columns), or options.ignored (bad_option)");
    CHECK(loss.at(0, 0) == 7.0);
    CHECK(lse.at(0, 0) == 7.0);
}

TEST_CASE("the gradient of large logits keeps its digits where the rest of lse is saved") {
    // Without the rest p is off by up to 2^-24 |lse|, 6e-3 here. With it: x - lse, its difference from the rest and exp each round at
    // the size of p |log p| <= 1/e or p, so 2^-22 is enough for p <= 1.
    for (float shift : {1e4f, 1e5f, -1e5f, 3e6f}) {
        int64_t const n = shift == 1e5f ? 2051 : 67;
        INFO("shift " << shift);
        auto values = floats(data_kind::normal, 2 * n, 3);
        for (float& v : values) v = shift + 2 * v;
        guarded_matrix<float> logits(2, n, 1, values), lse(1, 2), rest(1, 2), d(2, n);
        std::vector<int32_t> const targets = {5, static_cast<int32_t>(n - 1)};
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name);
            keel::cross_entropy_saved const saved{.lse = lse.vec(), .lse_rest = rest.vec()};
            keel::cross_entropy(be, logits.view(), keel::vec(targets.data(), 2), keel::view<float, 1>{}, saved).or_throw();
            keel::cross_entropy_backward(be, logits.view(), keel::vec(targets.data(), 2), saved, d.view()).or_throw();
            for (int64_t i = 0; i < 2; ++i) {
                double const exact = log_sum_exp(row_of(logits, i));
                CHECK(std::abs(lse.at(0, i) + rest.at(0, i) - exact) <= 8 * 0x1p-24 * 12); // log(n) + a few, not 1e5
                for (int64_t j = 0; j < n; ++j) {
                    double const want = std::exp(logits.at(i, j) - exact) - (targets[static_cast<std::size_t>(i)] == j ? 1 : 0);
                    if (!(std::abs(d.at(i, j) - want) <= 0x1p-21)) FAIL_CHECK(i << "," << j << ": " << d.at(i, j) << " for " << want);
                }
            }
        });
    }
}

TEST_CASE("the gradient does not write over targets or what was saved, and reads what is const") {
    std::vector<float> logits(8, 0.0f), buffer(8), lse(2, 1.4f), d(8);
    auto* const ids = reinterpret_cast<int32_t*>(buffer.data());
    ids[2] = ids[3] = 1;
    auto const x = keel::rows(logits.data(), 2, 4);
    auto const t = keel::vec(static_cast<int32_t const*>(ids + 2), 2);
    float const* const read_only = lse.data();
    auto const backward = [&](float* out) {
        return keel::cross_entropy_backward(keel::cpu{}, x, t, {.lse = keel::vec(read_only, 2)}, keel::rows(out, 2, 4));
    };
    CHECK(backward(buffer.data()).message() == "cross_entropy_backward: dlogits, wanted memory of its own (overlap)");
    CHECK(ids[2] == 1);
    CHECK(keel::cross_entropy_backward(keel::cpu{}, x, t, {.lse = keel::vec(read_only, 2), .lse_rest = keel::vec(d.data(), 2)},
                                       keel::rows(d.data(), 2, 4))
              .code == keel::status_code::overlap);
    CHECK(keel::cross_entropy(keel::cpu{}, x, t, keel::view<float, 1>{}, {.lse = keel::vec(lse.data(), 2), .lse_rest = keel::vec(lse.data() + 1, 2)})
              .code == keel::status_code::overlap);
    CHECK(backward(d.data()).ok());
    CHECK(d[5] < 0);
    // Null data beside elements is a mistake, not an absent argument.
    CHECK(keel::cross_entropy(keel::cpu{}, x, t, keel::vec(static_cast<float*>(nullptr), 2), {.lse = keel::vec(lse.data(), 2)}).message() ==
          "cross_entropy: loss, wanted data, not null (bad_pointer)");
}

TEST_CASE("the gradient in place has the bits of separate memory") {
    guarded_matrix<keel::bf16> logits(3, 131, 1, floats(data_kind::normal, 393, 2)), d(3, 131);
    guarded_matrix<float> lse(1, 3);
    std::vector<int32_t> const targets = {0, -1, 130};
    auto const t = keel::vec(targets.data(), 3);
    keel::cross_entropy(keel::cpu{}, logits.view(), t, keel::view<float, 1>{}, {.lse = lse.vec()}).or_throw();
    keel::cross_entropy_backward(keel::cpu{}, logits.view(), t, {.lse = lse.vec()}, d.view()).or_throw();
    keel::cross_entropy_backward(keel::cpu{}, logits.view(), t, {.lse = lse.vec()}, logits.view()).or_throw();
    CHECK(logits.contents() == d.contents());
    CHECK(logits.untouched());
}

TEST_CASE("without z-loss the square of a large lse does no harm, and options that are no numbers are refused") {
    float x[2] = {1e20f, 0.0f}, loss[1], lse[1], dx[2];
    int32_t const target[1] = {0};
    auto const logits = keel::rows(&x[0], 1, 2);
    auto const call = [&](keel::cross_entropy_options options) {
        return keel::cross_entropy(keel::cpu{}, logits, keel::vec(&target[0], 1), keel::vec(&loss[0], 1),
                                   {.lse = keel::vec(&lse[0], 1)}, options);
    };
    REQUIRE(call({}).ok());
    CHECK(loss[0] == 0.0f);
    REQUIRE(call({.z_loss = 1e-4f}).ok());
    CHECK(std::isinf(loss[0]));
    float const nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (float bad : {nan, inf, -inf}) {
        CHECK(call({.z_loss = bad}).code == keel::status_code::bad_option);
        CHECK(call({.scale = bad}).code == keel::status_code::bad_option);
        CHECK(keel::cross_entropy_backward(keel::cpu{}, logits, keel::vec(&target[0], 1), keel::cross_entropy_kept{keel::vec(&lse[0], 1)},
                                           keel::rows(&dx[0], 1, 2), {.scale = bad})
                  .code == keel::status_code::bad_option);
    }
}
