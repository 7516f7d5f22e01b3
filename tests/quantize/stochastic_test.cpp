// Stochastic quantisation: the codes by definition from the published generator, unbiased within the error of the sample, and a function
// of the element's index alone.
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize_stochastic.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;
using keel::whole;

namespace {

constexpr keel::random_key key{.seed = 0x123456789abcdefu, .step = 7, .tensor = 3};

template <class Scale, int Rows, int Columns> void check_definition(int64_t rows, int64_t columns, data_kind kind) {
    using blocks = keel::block_scaled<keel::e4m3, Scale, Rows, Columns>;
    INFO(Rows << "x" << Columns << " on " << rows << "x" << columns << " " << name_of(kind));
    guarded_matrix<float> x(rows, columns, 1, floats(kind, rows * columns, 9));
    guarded_matrix<keel::e4m3> nearest(rows, columns);
    guarded_matrix<typename Scale::storage> scales(blocks::scale_rows(rows), blocks::scale_columns(columns));
    keel::quantize<overflow::saturate>(keel::reference{}, x.view(), blocks{nearest.view(), scales.view()}).or_throw();
    int64_t const first = 1000, pitch = columns + 5;
    for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::e4m3> codes(rows, columns, 2);
        guarded_matrix<typename Scale::storage> own(scales.rows(), scales.columns());
        keel::report seen;
        keel::quantize_stochastic<overflow::saturate>(be, x.view(), blocks{codes.view(), own.view()},
                                                      {key, static_cast<uint64_t>(first), static_cast<uint64_t>(pitch)}, {}, &seen)
            .or_throw();
        CHECK(own.contents() == scales.contents()); // scales are not random
        int64_t wrong = 0, zeros = 0;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                float const scale = static_cast<float>(scales.at(i / Rows, j / Columns)), v = x.get(i, j);
                float multiplier = 1.0f / scale; // exact for powers of two
                if (!Scale::is_power_of_two) {
                    float top = 0; // the rule divides by amax, not by the scale
                    for (int64_t r = i / Rows * Rows; r < std::min<int64_t>(rows, i / Rows * Rows + Rows); ++r)
                        for (int64_t c = j / Columns * Columns; c < std::min<int64_t>(columns, j / Columns * Columns + Columns); ++c)
                            top = std::max(top, std::abs(x.get(r, c)));
                    multiplier = 448.0f / std::max(top, 448.0f * 0x1p-126f);
                }
                uint32_t const noise = keel::random_word(key, static_cast<uint64_t>(first + i * pitch + j));
                auto const want = keel::encode<keel::e4m3, overflow::saturate, keel::rounding::stochastic>(v * multiplier, noise);
                wrong += codes.get(i, j).bits != want.bits;
                zeros += v != 0 && std::isfinite(v) && (want.bits & 0x7f) == 0;
            }
        CHECK(wrong == 0);
        CHECK(seen.flushed == zeros);
        CHECK(codes.untouched());
    });
}

} // namespace

TEST_CASE("stochastic codes are those of the element's own random word, on every backend") { // TE #3281: zeros where the machine had no instruction
    check_definition<keel::fp32_scale, 1, 128>(3, 300, data_kind::normal);
    check_definition<keel::e8m0_scale, 1, 32>(2, 97, data_kind::mixed_scales);
    check_definition<keel::power_of_two_scale, 128, 1>(130, 37, data_kind::normal);
    check_definition<keel::e8m0_scale, 128, 128>(130, 131, data_kind::outlier);
    check_definition<keel::fp32_scale, whole, whole>(3, 500, data_kind::normal);
    check_definition<keel::fp32_scale, 1, whole>(3, 1100, data_kind::mixed_scales);
    check_definition<keel::fp32_scale, 1, 128>(1, 1, data_kind::normal);
    check_definition<keel::fp32_scale, 1, 128>(0, 4, data_kind::normal);
}

TEST_CASE("the mean of stochastic codes is the value, for normal and subnormal codes and at a carry into the exponent") {
    // N draws of a value between neighbours a and b at the share p: the mean's standard deviation is (b - a) sqrt(p (1 - p) / N). Five of
    // them, so a right rounding fails once in two million.
    int64_t const n = 1 << 16;
    for (float value : {1.03f, 0.3f, 15.7f, 0x1.fp-1f, 31.9f, 0.005f, 0.0011f, -2.6f, -0.0009f, 447.0f}) {
        std::vector<float> x(static_cast<std::size_t>(n), value);
        for (std::size_t i = 0; i < x.size(); i += 32) x[i] = 448.0f; // so that the scale is 1
        std::vector<keel::e4m3> codes(x.size());
        std::vector<keel::e8m0> scales(x.size() / 32);
        keel::quantize_stochastic<overflow::saturate>(keel::cpu{}, keel::rows(x.data(), 64, n / 64),
                                                      keel::mx_blocks<>{keel::rows(codes.data(), 64, n / 64), keel::rows(scales.data(), 64, n / 64 / 32)},
                                                      {.key = key})
            .or_throw();
        CHECK(scales[5].bits == 127);
        double sum = 0, low = 1e9, high = -1e9;
        int64_t count = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
            if (i % 32 == 0) continue;
            double const v = static_cast<double>(keel::decode(codes[i]));
            sum += v, low = std::min(low, v), high = std::max(high, v), ++count;
        }
        double const step = high - low, share = (static_cast<double>(value) - low) / step;
        INFO(value << " between " << low << " and " << high);
        CHECK((low < static_cast<double>(value) && static_cast<double>(value) < high));
        CHECK(keel::encode<keel::e4m3, overflow::saturate, keel::rounding::toward_zero>(value).bits ==
              keel::encode<keel::e4m3, overflow::saturate>(value < 0 ? static_cast<float>(high) : static_cast<float>(low)).bits);
        CHECK(std::abs(sum / static_cast<double>(count) - static_cast<double>(value)) <= 5 * step * std::sqrt(share * (1 - share) / static_cast<double>(count)));
    }
}

TEST_CASE("a shard draws what the whole tensor would, in any cut and order") {
    int64_t const rows = 24, columns = 260;
    guarded_matrix<keel::bf16> x(rows, columns, 0, floats(data_kind::normal, rows * columns, 2));
    using blocks = keel::row_blocks<keel::e5m2>;
    guarded_matrix<keel::e5m2> want(rows, columns), got(rows, columns);
    guarded_matrix<float> scales(rows, 3), own(rows, 3);
    keel::cpu be;
    keel::quantize_stochastic<overflow::saturate>(be, x.view(), blocks{want.view(), scales.view()}, {.key = key}).or_throw();
    for (int64_t first : {16, 0, 8}) // rows
        keel::quantize_stochastic<overflow::saturate>(be, keel::slice(x.view(), first, 8), keel::slice(blocks{got.view(), own.view()}, first, 8),
                                                      {.key = key, .first = static_cast<uint64_t>(first * columns)})
            .or_throw();
    CHECK(got.contents() == want.contents());
    guarded_matrix<keel::e5m2> halves(rows, columns);
    for (int64_t first : {128, 0}) { // columns: the pitch of the whole
        int64_t const n = first == 0 ? 128 : columns - 128;
        keel::quantize_stochastic<overflow::saturate>(
            be, keel::columns(x.view(), first, n),
            blocks{keel::columns(halves.view(), first, n), keel::columns(own.view(), first / 128, (n + 127) / 128)},
            {.key = key, .first = static_cast<uint64_t>(first), .pitch = static_cast<uint64_t>(columns)})
            .or_throw();
    }
    CHECK(halves.contents() == want.contents());
    // Another step, tensor or seed draws others.
    for (auto const& other : {keel::random_key{key.seed, 8, 3}, keel::random_key{key.seed, 7, 4}, keel::random_key{key.seed + 1, 7, 3}}) {
        keel::quantize_stochastic<overflow::saturate>(be, x.view(), blocks{got.view(), own.view()}, {.key = other}).or_throw();
        CHECK(got.contents() != want.contents());
    }
}

TEST_CASE("stochastic codes of finite elements are finite unless overflow asks otherwise; NaN and Inf are nobody's chance") {
    auto values = floats(data_kind::normal, 128 * 64, 6);
    guarded_matrix<float> x(64, 128, 0, values);
    guarded_matrix<keel::e5m2> codes(64, 128);
    guarded_matrix<float> scales(64, 1);
    keel::row_blocks<keel::e5m2> const q{codes.view(), scales.view()};
    keel::report seen;
    keel::quantize_stochastic<overflow::saturate_finite, keel::scale_rules::transformer_engine>(keel::cpu{}, x.view(), q, {.key = key}, {}, &seen).or_throw();
    int64_t bad = 0;
    for (int64_t i = 0; i < 64; ++i)
        for (int64_t j = 0; j < 128; ++j) bad += (codes.get(i, j).bits & 0x7f) > 0x7b;
    CHECK(bad == 0);
    x.set(3, 5, std::numeric_limits<float>::quiet_NaN()), x.set(4, 6, -std::numeric_limits<float>::infinity());
    keel::quantize_stochastic<overflow::saturate_finite>(keel::cpu{}, x.view(), q, {.key = key}, {}, &seen).or_throw();
    CHECK(codes.get(3, 5).bits == 0x7f);
    CHECK(codes.get(4, 6).bits == 0xfc);
    CHECK(seen.non_finite == 2);
    CHECK(keel::quantize_stochastic<overflow::saturate>(keel::cpu{}, keel::columns(x.view(), 0, 127), q, {.key = key}).message() ==
          "quantize_stochastic: out.codes has columns = 128, wanted 127 (bad_shape)");
}
