// The numbers of each format against the values that its specification prints, and the promises made about the types.
#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

/// A format from outside, as a user would add it: this alias is all there is to it.
using toy = keel::minifloat<3, 4, 3, keel::specials::ieee>;

template <class T> constexpr bool is_plain = std::is_trivially_copyable_v<T>&& std::is_standard_layout_v<T>&&
    std::is_trivially_default_constructible_v<T>&& scalar_format<T>;
static_assert(is_plain<bf16> && sizeof(bf16) == 2 && alignof(bf16) == 2);
static_assert(is_plain<f16> && sizeof(f16) == 2 && alignof(f16) == 2);
static_assert(is_plain<e4m3> && sizeof(e4m3) == 1);
static_assert(is_plain<e5m2> && sizeof(e5m2) == 1);
static_assert(is_plain<e8m0> && sizeof(e8m0) == 1);
static_assert(is_plain<e4m3fnuz> && sizeof(e4m3fnuz) == 1 && is_plain<e5m2fnuz> && sizeof(e5m2fnuz) == 1);
static_assert(is_plain<e2m1> && sizeof(e2m1) == 1 && sizeof(e2m1x2) == 1 && alignof(e2m1x2) == 1);
static_assert(!scalar_format<e2m1x2> && std::is_trivially_copyable_v<e2m1x2>);
static_assert(is_plain<float> && is_plain<toy>);
static_assert(!scalar_format<int> && !scalar_format<double>);
static_assert(std::is_same_v<decltype(bf16::bits), uint16_t> && std::is_same_v<decltype(e4m3::bits), uint8_t>);
static_assert(e4m3{0x38}.bits == 0x38);

// A number becomes a code by encode alone, and comes back by decode alone: C++20 makes aggregates from parentheses too, so that g++ took
// 3.5f for the code 3.
template <class T> constexpr bool takes_no_number =
    !std::is_constructible_v<T, float> && !std::is_constructible_v<T, double> && !std::is_constructible_v<T, int> &&
    !std::is_constructible_v<float, T> && !std::is_convertible_v<T, float>;
static_assert(takes_no_number<bf16> && takes_no_number<f16> && takes_no_number<e4m3> && takes_no_number<e5m2>);
static_assert(takes_no_number<e8m0> && takes_no_number<e2m1> && takes_no_number<e2m1x2> && takes_no_number<toy>);

// Who has a plain store.
static_assert(has_store_policy<float> && has_store_policy<bf16> && has_store_policy<f16>);
static_assert(!has_store_policy<e4m3> && !has_store_policy<e5m2> && !has_store_policy<e8m0>);
static_assert(!has_store_policy<e4m3fnuz> && !has_store_policy<e5m2fnuz> && !has_store_policy<e2m1>);
static_assert(store_policy<bf16>::out_of_range == overflow::to_nonfinite);

// From the OCP 8-bit specification, IEEE 754 and the papers of the fnuz formats.
static_assert(format_traits<e4m3>::max() == 448.0f && format_traits<e4m3>::min_normal() == 0x1p-6f);
static_assert(format_traits<e4m3>::min_subnormal() == 0x1p-9f && format_traits<e4m3>::epsilon() == 0.125f);
static_assert(!format_traits<e4m3>::has_infinity && format_traits<e4m3>::nan_code == 0x7f);
static_assert(format_traits<e4m3>::nonfinite_code == 0x7f && format_traits<e4m3>::max_code == 0x7e);
static_assert(format_traits<e5m2>::max() == 57344.0f && format_traits<e5m2>::min_normal() == 0x1p-14f);
static_assert(format_traits<e5m2>::min_subnormal() == 0x1p-16f && format_traits<e5m2>::epsilon() == 0.25f);
static_assert(format_traits<e5m2>::has_infinity && format_traits<e5m2>::infinity_code == 0x7c);
static_assert(format_traits<e5m2>::nan_code == 0x7f && format_traits<e5m2>::nonfinite_code == 0x7c);
static_assert(format_traits<f16>::max() == 65504.0f && format_traits<f16>::min_normal() == 0x1p-14f);
static_assert(format_traits<f16>::min_subnormal() == 0x1p-24f && format_traits<f16>::digits == 11);
static_assert(format_traits<f16>::infinity_code == 0x7c00 && format_traits<f16>::nan_code == 0x7fff);
static_assert(format_traits<bf16>::max() == 0x1.fep127f && format_traits<bf16>::min_normal() == 0x1p-126f);
static_assert(format_traits<bf16>::infinity_code == 0x7f80 && format_traits<bf16>::nan_code == 0x7fff);
static_assert(format_traits<bf16>::max_float_bits == 0x7f7f0000u && format_traits<bf16>::digits == 8);
static_assert(format_traits<float>::max_code == 0x7f7fffffu && format_traits<float>::nan_code == 0x7fffffffu);
static_assert(format_traits<float>::digits == 24 && format_traits<float>::max_exponent == 127);
static_assert(format_traits<e8m0>::nan_code == 0xff && format_traits<e8m0>::max() == 0x1p127f);
static_assert(!format_traits<e8m0>::has_sign && format_traits<e8m0>::max_code == 0xfe);
static_assert(format_traits<e4m3fnuz>::max() == 240.0f && format_traits<e4m3fnuz>::min_subnormal() == 0x1p-10f);
static_assert(format_traits<e5m2fnuz>::max() == 57344.0f && format_traits<e5m2fnuz>::min_subnormal() == 0x1p-17f);
static_assert(format_traits<e4m3fnuz>::nan_code == 0x80 && !format_traits<e4m3fnuz>::has_negative_zero);
static_assert(format_traits<e5m2fnuz>::nan_code == 0x80 && !format_traits<e5m2fnuz>::has_negative_zero);
static_assert(format_traits<e2m1>::max() == 6.0f && format_traits<e2m1>::min_subnormal() == 0.5f);
static_assert(!format_traits<e2m1>::has_nan && !format_traits<e2m1>::has_infinity);
static_assert(format_traits<toy>::max() == 15.5f && format_traits<toy>::min_subnormal() == 0x1p-6f);

TEST_CASE("smallest values below float's normal range are built exactly") {
    CHECK(word_of(format_traits<bf16>::min_subnormal()) == 1u << 16); // 2^-133
    CHECK(word_of(format_traits<float>::min_subnormal()) == 1u);      // 2^-149
    CHECK(word_of(format_traits<e8m0>::min_normal()) == 0x00400000u); // 2^-127
    CHECK(word_of(format_traits<float>::max()) == 0x7f7fffffu);
}

TEST_CASE("a new format is one alias") {
    CHECK(encode<toy, overflow::saturate>(1000.0f).bits == 0x6f);
    CHECK(encode<toy, overflow::to_nonfinite>(-1000.0f).bits == 0xf0);
    CHECK(encode<toy, overflow::saturate>(0x1p-6f).bits == 0x01);
    CHECK(encode<toy, overflow::saturate>(1.0625).bits == 0x31);
    CHECK(decode(toy{0x31}) == 1.0625f);
    for (uint32_t code = 0; code < 0x70; ++code) {
        CHECK(to_word(encode<toy, overflow::to_nonfinite>(decode(from_word<toy>(code)))) == code);
    }
}

TEST_CASE("words and codes pass into each other") {
    CHECK(to_word(1.0f) == 0x3f800000u);
    CHECK(to_word(bf16{0x8001}) == 0x8001u);
    CHECK(from_word<e4m3>(0x1238u).bits == 0x38);
    CHECK(from_word<float>(0x40000000u) == 2.0f);
}

// Conversions are constant expressions: tables of codes need no start-up code.
static_assert(to_word(encode<bf16>(1.5f)) == 0x3fc0);
static_assert(to_word(encode<f16, overflow::to_nonfinite, rounding::toward_zero>(-0.1)) == 0xae66);
static_assert(to_word(encode<e4m3, overflow::saturate>(1000.0f)) == 0x7e);
static_assert(to_word(encode<toy, overflow::saturate>(1.0625)) == 0x31);
static_assert(decode(e4m3{1}) == 0x1p-9f);
static_assert(decode(encode<e8m0, overflow::saturate, rounding::upward>(3.0f)) == 4.0f);

} // namespace
