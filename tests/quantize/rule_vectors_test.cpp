// The published vectors of scale rules (tests/vectors), every row, on the reference and on the native CPU backend.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/reference.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/quantize.hpp>
#include <vectors/blocks.hpp>

using namespace keel_test;
namespace rules = keel::scale_rules;

namespace {

/// Asks on both backends under every overflow policy that the row speaks of: how many there were.
template <class Rule, class X, class Code, class Scale> int check_row(std::vector<std::string> const& row) {
    CHECK(row[2] == std::to_string(block_of<Scale>));
    question const q{row[6], row[7], row[8]};
    return with_overflows(row[5], [&]<keel::overflow O>(std::integral_constant<keel::overflow, O>) {
        check_quantise<O, Rule, X, Code, Scale>(keel::reference{}, q, keel::non_finite_policy::isolate);
        if constexpr (O == keel::overflow::saturate) // the same kernels; compile time
            check_quantise<O, Rule, X, Code, Scale>(keel::cpu<>{}, q, keel::non_finite_policy::isolate);
    });
}

/// Rules of powers of two alone.
template <class Rule> int check_power_rule(std::vector<std::string> const& row) {
    int asked = 0;
    if (row[1] != "f32" || row[4] == "fp32") return asked;
    with_code(row[3], [&]<class Code>(Code) {
        asked = row[4] == "e8m0" ? check_row<Rule, float, Code, keel::e8m0_scale>(row)
                                 : check_row<Rule, float, Code, keel::power_of_two_scale>(row);
    });
    return asked;
}
int check_deep_gemm(std::vector<std::string> const& row) {
    int asked = 0;
    if (row[1] != "f32") return asked;
    with_code(row[3], [&]<class Code>(Code) {
        with_scale(row[4], [&]<class Scale>(Scale) { asked = check_row<rules::deep_gemm, float, Code, Scale>(row); });
    });
    return asked;
}
template <class X, class Code> int check_transformer_engine(std::vector<std::string> const& row) {
    using rule = rules::transformer_engine;
    if (row[4] == "fp32") return check_row<rule, X, Code, keel::fp32_scale>(row);
    if constexpr (std::is_same_v<X, float> || std::is_same_v<Code, keel::e4m3>)
        if (row[4] == "power_of_two") return check_row<rule, X, Code, keel::power_of_two_scale>(row);
    return 0;
}

int check_rule(std::vector<std::string> const& row) {
    std::string const &rule = row[0], &source = row[1], &code = row[3];
    if (rule == "ocp_floor") return check_power_rule<rules::ocp_floor>(row);
    if (rule == "ocp_even") return check_power_rule<rules::ocp_even>(row);
    if (rule == "nearest") return check_power_rule<rules::nearest>(row);
    if (rule == "deep_gemm") return check_deep_gemm(row);
    if (rule != "transformer_engine") return 0;
    if (source == "f32" && code == "e4m3") return check_transformer_engine<float, keel::e4m3>(row);
    if (source == "f32" && code == "e5m2") return check_transformer_engine<float, keel::e5m2>(row);
    if (source == "bf16" && code == "e4m3") return check_transformer_engine<keel::bf16, keel::e4m3>(row);
    if (source == "bf16" && code == "e5m2") return check_transformer_engine<keel::bf16, keel::e5m2>(row);
    if (source == "f16" && code == "e4m3") return check_transformer_engine<keel::f16, keel::e4m3>(row);
    return 0;
}

} // namespace

TEST_CASE("the vectors of scale rules: every row, on the reference and the native backend") {
    auto const table = read_vectors("scale_rules");
    CHECK(table.version == vectors_version);
    CHECK(table.columns == "rule,source,block,code,scale,overflow,input,scales,codes,why");
    REQUIRE(table.rows.size() == 1154);
    CHECK(table.rows.size() == table.promised_rows);
    int64_t line = 2;
    for (auto const& row : table.rows) {
        INFO("scale_rules.csv line " << ++line);
        REQUIRE(row.size() == 10);
        INFO(row[0] << ": " << row[1] << " to " << row[3] << " with " << row[4] << " scales: " << row[9]);
        CHECK(check_rule(row) > 0);
    }
}
