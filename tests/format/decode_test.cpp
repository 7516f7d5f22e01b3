// Every code of every format means what its specification says.
#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

TEMPLATE_TEST_CASE("decode gives the value of every code", "", bf16, f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1, e3m2,
                   half_without_infinity, short_bf16, float_bias) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    for (uint32_t code = 0; code < o.codes(); ++code) {
        double const wanted = o.value(code);
        float const got = decode(from_word<TestType>(code));
        if (std::isnan(wanted)) {
            bad.check(wanted, std::isnan(got) ? 1u : 0u, 1u);
        } else {
            bad.check(wanted, word_of(got), word_of(static_cast<float>(wanted))); // every value is a float: exact
        }
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

TEMPLATE_TEST_CASE("decode and encode are inverse on every code", "", bf16, f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1,
                   e3m2, half_without_infinity, short_bf16, float_bias) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    for (uint32_t code = 0; code < o.codes(); ++code) {
        float const x = decode(from_word<TestType>(code));
        for_each_policy<TestType>([&](auto p) {
            bool const is_infinity = std::isinf(x);
            uint32_t const saturated = (code & o.sign_code()) | o.format().max_code;
            uint32_t const kept = is_infinity && p.on_overflow == overflow::saturate ? saturated : code;
            bad.check(static_cast<double>(x), code_of<TestType>(p, x), std::isnan(x) ? o.format().nan_code : kept,
                      p.id);
        });
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

TEST_CASE("decode ignores bits above the code, as a partial load may leave them") {
    CHECK(decode_words<e4m3, float>(0xabcdef38u) == 1.0f);
    CHECK(decode_words<e5m2, float>(0xffffff3cu) == 1.0f);
    CHECK(decode_words<f16, float>(0xffff3c00u) == 1.0f);
    CHECK(decode_words<bf16, float>(0xffff3f80u) == 1.0f);
    CHECK(decode_words<e8m0, float>(0xffffff7fu) == 1.0f);
    CHECK(decode_words<e2m1, float>(0xfffffff2u) == 1.0f);
    CHECK(decode_words<e4m3fnuz, float>(0xffffff40u) == 1.0f);
}

TEST_CASE("a pair of e2m1 has the lower index in its low half") { // __nv_fp4x2_e2m1, torch.float4_e2m1fn_x2
    CHECK(pair_of(encode<e2m1, overflow::saturate>(1.0f), encode<e2m1, overflow::saturate>(-6.0f)).bits == 0xf2);
    int wrong = 0;
    for (uint32_t byte = 0; byte < 256; ++byte) {
        e2m1x2 const pair{static_cast<uint8_t>(byte)};
        e2m1 const low = low_of(pair), high = high_of(pair);
        wrong += low.bits != byte % 16 || high.bits != byte / 16 || pair_of(low, high).bits != byte;
        wrong += word_of(decode(*halves<0>(&pair))) != word_of(decode(low));
        wrong += word_of(decode(*halves<4>(&pair))) != word_of(decode(high));
    }
    CHECK(wrong == 0);
}

TEST_CASE("decode keeps the sign and payload of Inf and NaN where the format has them") {
    CHECK(word_of(decode(bf16{0xff80})) == 0xff800000u);
    CHECK(word_of(decode(f16{0xfc00})) == 0xff800000u);
    CHECK(word_of(decode(e5m2{0x7c})) == 0x7f800000u);
    CHECK(word_of(decode(e4m3{0x7f})) == 0x7fffffffu);
    CHECK(word_of(decode(e4m3{0x80})) == 0x80000000u);
    CHECK(word_of(decode(f16{0x8000})) == 0x80000000u);
}

} // namespace
