// Inputs on which published converters have disagreed or been wrong, each with the project that reported it.
#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

template <class T, class X> uint32_t ieee(X x) { return to_word(encode<T, overflow::to_nonfinite>(x)); }
template <class T, class X> uint32_t saturated(X x) { return to_word(encode<T, overflow::saturate>(x)); }
template <class T, class X> uint32_t upward(X x) { return to_word(encode<T, overflow::saturate, rounding::upward>(x)); }

TEST_CASE("double rounding through float, f16 or bf16") {
    CHECK(ieee<e4m3>(-431.99999999999994) == 0xfd);       // ml_dtypes#401: -416, through float -448
    CHECK(ieee<bf16>(double{16973823}) == 0x4b81);        // ml_dtypes#401: an int64 through float gives 4B82
    CHECK(ieee<e4m3>(1.0625 + 0x1p-30) == 0x39);          // NumPy's cast and c10 give 38
    CHECK(ieee<e4m3>(1.0625f + 0x1p-20f) == 0x39);        // oneDNN#2361, by way of f16: 38
    CHECK(ieee<bf16>(1 + 0x1p-8 + 0x1p-40) == 0x3f81);    // Eigen gives 3F80
    CHECK(ieee<e4m3>(464.03125f) == 0x7f);                // oneDNN, by way of f16: 7E
    CHECK(ieee<e5m2>(61439.0f) == 0x7b);                  // oneDNN, by way of f16: Inf
    CHECK(ieee<e4m3>(0x1p-10f * (1 + 0x1p-23f)) == 0x01); // oneDNN, by way of f16: 0
}

TEST_CASE("how often a step through f16 or bf16 is wrong for e4m3, as published measurements say") {
    int64_t wrong_f16 = 0, wrong_bf16 = 0, count = 0;
    for (uint32_t i = 0; i < 1u << 20; ++i, ++count) {
        float const x = static_cast<float>(i) * 448.0f / static_cast<float>(1u << 20); // uniform in [0, 448)
        uint32_t const once = saturated<e4m3>(nudged(x, static_cast<int>(i % 7)));
        wrong_f16 += saturated<e4m3>(decode(encode<f16>(nudged(x, static_cast<int>(i % 7))))) != once ? 1 : 0;
        wrong_bf16 += saturated<e4m3>(decode(encode<bf16>(nudged(x, static_cast<int>(i % 7))))) != once ? 1 : 0;
    }
    double const share_f16 = static_cast<double>(wrong_f16) / static_cast<double>(count);
    double const share_bf16 = static_cast<double>(wrong_bf16) / static_cast<double>(count);
    CHECK(std::fabs(share_f16 - 0.0039) < 0.0003); // a tie made in half of the last 1/128 of a place: 2^-8
    CHECK(std::fabs(share_bf16 - 0.0312) < 0.002); // of the last 1/16: 2^-5
}

TEST_CASE("Inf, NaN and overflow") {
    float const infinity = float_of(0x7f800000u);
    CHECK(ieee<e5m2>(infinity) == 0x7c); // triton#5927: kept unless saturation is asked for
    CHECK(saturated<e5m2>(infinity) == 0x7b);
    CHECK(ieee<e4m3>(465.0f) == 0x7f);
    CHECK(saturated<e4m3>(465.0f) == 0x7e);             // pytorch#177870
    CHECK(saturated<e4m3>(infinity) == 0x7e);           // ml_dtypes keeps NaN: that is saturate_finite here
    CHECK(ieee<e4m3>(float_of(0xffc00000u)) == 0x7f);   // -NaN: one NaN, where others give FF
    CHECK(ieee<e5m2>(float_of(0x7fc00000u)) == 0x7f);   // where others give 7E
    CHECK(ieee<bf16>(float_of(0xffffffffu)) == 0x7fff); // Eigen gives FFC0
    CHECK(ieee<bf16>(float_of(0x7f800001u)) == 0x7fff); // a payload below the cut must not become Inf
    CHECK(std::isnan(decode(e4m3{0x7f})));              // mlx#4135: not 480
    CHECK(std::isnan(decode(e4m3{0xff})));
    CHECK(to_word(encode<e4m3fnuz, overflow::saturate>(-1e-7f)) == 0x00); // onnx#5764: 80 is NaN
    CHECK(to_word(encode<e4m3fnuz, overflow::saturate>(-0.0f)) == 0x00);
    CHECK(to_word(encode<e4m3fnuz, overflow::to_nonfinite>(248.0f)) == 0x80);
    CHECK(to_word(encode<e5m2fnuz, overflow::to_nonfinite>(61440.0f)) == 0x80);
}

TEST_CASE("ties, subnormals and truncation") {
    CHECK(decode(encode<e5m2, overflow::to_nonfinite>(9.0f)) == 8.0f); // triton#5925
    CHECK(ieee<e4m3>(2.5f * 0x1p-9f) == 0x02);                         // ggml rounded half up: 03
    CHECK(ieee<e4m3>(0x1p-6f - 0x1p-11f) == 0x08);                     // ggml capped subnormals at 07
    CHECK(decode(encode<bf16>(0.2691408770f)) == 0.26953125f);         // universal#1133: to nearest, not cut
    CHECK(ieee<bf16>(float_of(0x00400000u)) == 0x0040);                // vcvtneps2bf16 flushes it (llvm#221052)
    CHECK(saturated<e2m1>(0.75f) == 2u); // DeepGEMM's host reference rounds these ties to zero
    CHECK(saturated<e2m1>(1.75f) == 4u);
    CHECK(saturated<e2m1>(3.5f) == 6u);
    CHECK(saturated<e2m1>(-3.5f) == 14u);
}

TEST_CASE("scales") {
    CHECK(decode(from_word<e8m0>(upward<e8m0>(1.125f))) == 2.0f); // onnx#7784: the mask lacked bits
    CHECK(decode(from_word<e8m0>(upward<e8m0>(1.25f))) == 2.0f);
    CHECK(decode(from_word<e8m0>(upward<e8m0>(5.0f))) == 8.0f);
    CHECK(upward<e8m0>(0x1p-128f) == 0x00);             // gfloat#62: not NaN
    CHECK(word_of(decode(e8m0{0x00})) == 0x00400000u);  // TE#3262, ao#4725, ao#1104: 2^-127, not 0 and not 2^-126
    CHECK(std::isnan(decode(e8m0{0xff})));              // not Inf
    CHECK(upward<e8m0>(float_of(0x7f7fffffu)) == 0xfe); // oneDNN#5626: saturates, is not NaN
    CHECK(saturated<e8m0>(0.0f) == 0x00);               // ml_dtypes gives NaN
    CHECK(to_word(encode<e8m0, overflow::saturate, rounding::toward_zero>(511.5f)) ==
          127 + 8);                     // ao#4725: 9 by way of bf16
    for (int n = -126; n <= 126; ++n) { // floor and ceil of a float log2 fail here, frexp doubles exact powers
        float const power = power_of_two(n);
        CHECK(upward<e8m0>(power) == static_cast<uint32_t>(n + 127));
        CHECK(upward<e8m0>(nudged(power, 1)) == static_cast<uint32_t>(n + 128));
        CHECK(to_word(encode<e8m0, overflow::saturate, rounding::toward_zero>(nudged(power, -1))) ==
              static_cast<uint32_t>(n + 126));
    }
}

} // namespace
