// The published vectors of block quantisers (tests/vectors), every row, on the reference and on the native CPU backend.
#include <cmath>
#include <type_traits>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/reference.hpp>
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>
#include <vectors/table.hpp>

using namespace keel_test;
using keel::non_finite_policy;
using keel::overflow;

namespace {

template <class T> guarded_matrix<T> matrix_from_hex(std::string const& text) {
    auto const words = words_from_hex(text, 2 * sizeof(T));
    guarded_matrix<T> x(1, static_cast<int64_t>(words.size()));
    for (int64_t j = 0; j < x.columns(); ++j)
        x.set(0, j, keel::from_word<T>(static_cast<uint32_t>(words[static_cast<std::size_t>(j)])));
    return x;
}
template <class T> std::string hex_of(guarded_matrix<T> const& x) {
    std::string text;
    for (int64_t j = 0; j < x.columns(); ++j) text += hex(keel::to_word(x.get(0, j)), 2 * sizeof(T));
    return text;
}

/// Blocks as the vectors have them: 1x128, and 1x32 under e8m0 scales.
template <class Scale> inline constexpr int block_of = std::is_same_v<Scale, keel::e8m0_scale> ? 32 : 128;

template <class Code, class Scale> struct owned_row {
    using blocks = keel::block_scaled<Code, Scale, 1, block_of<Scale>>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    explicit owned_row(int64_t n) : codes(1, n), scales(1, blocks::scale_columns(n)) {}
    blocks view() { return {codes.view(), scales.view()}; }
};

/// One row of the file, whose answer must be the same on both backends.
struct question {
    std::string input, scales, codes;
};

/// Zeros behind the elements change nothing, but make the last block a whole one, for which a backend may have a way of its own.
template <class B, overflow O, class X, class Code, class Scale>
void check_quantise(B const& be, question const& q, non_finite_policy policy) {
    std::size_t const digits = 2 * sizeof(X), block = std::size_t{block_of<Scale>} * digits;
    for (std::size_t const padding : {std::size_t{0}, (block - q.input.size() % block) % block}) {
        INFO(padding / digits << " zeros behind");
        auto x = matrix_from_hex<X>(q.input + std::string(padding, '0'));
        owned_row<Code, Scale> out(x.columns());
        keel::quantize<O>(be, x.view(), out.view(), {.policy = policy}).or_throw();
        CHECK(hex_of(out.scales) == q.scales);
        CHECK(hex_of(out.codes).substr(0, q.codes.size()) == q.codes);
        CHECK((out.codes.untouched() && out.scales.untouched()));
    }
}

/// Asks under every policy that the row speaks of: how many there were.
template <class X, class Code, class Scale>
int check_policies(question const& q, std::string const& on_overflow, std::string const& on_non_finite) {
    int asked = 0;
    for (auto const policy : {non_finite_policy::isolate, non_finite_policy::poison}) {
        std::string const policy_name = policy == non_finite_policy::isolate ? "isolate" : "poison";
        if (on_non_finite != "any" && on_non_finite != policy_name) continue;
        auto const ask = [&]<overflow O>(std::integral_constant<overflow, O>, char const* name) {
            if (on_overflow != "any" && on_overflow != name) return;
            ++asked;
            INFO("as " << name << ", " << policy_name);
            check_quantise<keel::reference, O, X, Code, Scale>(keel::reference{}, q, policy);
            check_quantise<keel::cpu<>, O, X, Code, Scale>(keel::cpu<>{}, q, policy);
        };
        ask(std::integral_constant<overflow, overflow::saturate>{}, "saturate");
        ask(std::integral_constant<overflow, overflow::saturate_finite>{}, "saturate_finite");
        ask(std::integral_constant<overflow, overflow::to_nonfinite>{}, "to_nonfinite");
    }
    return asked;
}

template <class Fn> bool with_code(std::string const& name, Fn fn) {
    if (name == "e4m3") return fn(keel::e4m3{}), true;
    if (name == "e5m2") return fn(keel::e5m2{}), true;
    return false;
}
template <class Fn> bool with_scale(std::string const& name, Fn fn) {
    if (name == "fp32") return fn(keel::fp32_scale{}), true;
    if (name == "power_of_two") return fn(keel::power_of_two_scale{}), true;
    if (name == "e8m0") return fn(keel::e8m0_scale{}), true;
    return false;
}
/// fn(X{}, Code{}, Scale{}) for those types that the vectors have: all but bf16 to e5m2 with scales that are powers of two.
template <class Fn> void with_types(std::vector<std::string> const& row, Fn fn) {
    with_scale(row[3], [&](auto scale) {
        if (row[0] == "f32") with_code(row[2], [&](auto code) { fn(float{}, code, scale); });
        if (row[0] == "bf16" && row[2] == "e4m3") fn(keel::bf16{}, keel::e4m3{}, scale);
    });
    if (row[0] == "bf16" && row[2] == "e5m2" && row[3] == "fp32") fn(keel::bf16{}, keel::e5m2{}, keel::fp32_scale{});
}

} // namespace

TEST_CASE("the vectors of quantisers: every row, on the reference and the native backend") {
    auto const table = read_vectors("quantisers");
    CHECK(table.version == vectors_version);
    CHECK(table.columns == "source,block,code,scale,overflow,policy,input,scales,codes,why");
    REQUIRE(table.rows.size() == 376);
    CHECK(table.rows.size() == table.promised_rows);
    int64_t line = 2;
    for (auto const& row : table.rows) {
        INFO("quantisers.csv line " << ++line);
        REQUIRE(row.size() == 10);
        INFO(row[0] << " to " << row[2] << " with " << row[3] << " scales: " << row[9]);
        int asked = 0;
        with_types(row, [&]<class X, class Code, class Scale>(X, Code, Scale) {
            CHECK(row[1] == std::to_string(block_of<Scale>));
            asked = check_policies<X, Code, Scale>({row[6], row[7], row[8]}, row[4], row[5]);
        });
        CHECK(asked > 0);
    }
}

TEST_CASE("the vectors of dequantisers: every row, on the reference and the native backend") {
    auto const table = read_vectors("dequantisers");
    CHECK(table.version == vectors_version);
    CHECK(table.columns == "code,scale,scales,codes,values,why");
    REQUIRE(table.rows.size() == 28);
    CHECK(table.rows.size() == table.promised_rows);
    int64_t line = 2;
    for (auto const& row : table.rows) {
        INFO("dequantisers.csv line " << ++line);
        REQUIRE(row.size() == 6);
        INFO(row[0] << " with " << row[1] << " scale " << row[2] << ": " << row[5]);
        bool known = false;
        with_code(row[0], [&]<class Code>(Code) {
            known = with_scale(row[1], [&]<class Scale>(Scale) {
                auto codes = matrix_from_hex<Code>(row[3]);
                auto scales = matrix_from_hex<typename Scale::storage>(row[2]);
                guarded_matrix<float> y(1, codes.columns());
                keel::block_scaled<Code, Scale, 1, block_of<Scale>> const in{codes.view(), scales.view()};
                keel::dequantize(keel::reference{}, in, y.view()).or_throw();
                CHECK(hex_of(y) == row[4]);
                keel::dequantize(keel::cpu<>{}, in, y.view()).or_throw();
                CHECK(hex_of(y) == row[4]);
            });
        });
        CHECK(known);
    }
}
