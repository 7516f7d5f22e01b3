// The published vectors of block quantisers (tests/vectors), every row, on the reference and on the native CPU backend.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/reference.hpp>
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <vectors/blocks.hpp>

using namespace keel_test;
using keel::non_finite_policy;

namespace {

/// Asks under every policy that the row speaks of: how many there were.
template <class X, class Code, class Scale>
int check_policies(question const& q, std::string const& on_overflow, std::string const& on_non_finite) {
    int asked = 0;
    for (auto const policy : {non_finite_policy::isolate, non_finite_policy::poison}) {
        std::string const policy_name = policy == non_finite_policy::isolate ? "isolate" : "poison";
        if (on_non_finite != "any" && on_non_finite != policy_name) continue;
        INFO(policy_name);
        asked += with_overflows(on_overflow, [&]<keel::overflow O>(std::integral_constant<keel::overflow, O>) {
            check_quantise<O, keel::scale_rules::round_up, X, Code, Scale>(keel::reference{}, q, policy);
            check_quantise<O, keel::scale_rules::round_up, X, Code, Scale>(keel::cpu<>{}, q, policy);
        });
    }
    return asked;
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
