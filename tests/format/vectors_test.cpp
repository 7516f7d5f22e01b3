// The published vectors of conversions and decodes (tests/vectors), every row.
#include <bit>
#include <cmath>

#include "support/catch.hpp"
#include "vectors/table.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

std::string name_of(rounding r) {
    return r == rounding::nearest_even ? "nearest_even" : r == rounding::toward_zero ? "toward_zero" : "upward";
}
std::string name_of(overflow o) {
    return o == overflow::saturate ? "saturate" : o == overflow::saturate_finite ? "saturate_finite" : "to_nonfinite";
}

/// fn(T{}) for the format of a name; false if there is none.
template <class Fn> bool with_format(std::string const& name, Fn fn) {
    if (name == "bf16") return fn(bf16{}), true;
    if (name == "f16") return fn(f16{}), true;
    if (name == "e4m3") return fn(e4m3{}), true;
    if (name == "e5m2") return fn(e5m2{}), true;
    if (name == "e8m0") return fn(e8m0{}), true;
    if (name == "e2m1") return fn(e2m1{}), true;
    if (name == "e4m3fnuz") return fn(e4m3fnuz{}), true;
    if (name == "e5m2fnuz") return fn(e5m2fnuz{}), true;
    return false;
}

/// Asks keel the question of a row, under each policy that it speaks of: how many there were.
template <class T> int check_row(std::vector<std::string> const& row) {
    std::string const &source = row[0], &round = row[3], &on_overflow = row[4], &want = row[5];
    uint64_t const bits = word_from_hex(row[1]);
    int asked = 0;
    for_each_policy<T>([&](auto p) {
        if (name_of(p.round) != round || (on_overflow != "any" && name_of(p.on_overflow) != on_overflow)) return;
        ++asked;
        INFO("as " << name_of(p.on_overflow));
        if (source == "f32") {
            float const x = float_of(static_cast<uint32_t>(bits));
            CHECK(hex(code_of<T>(p, x), want.size()) == want);
            CHECK(hex(code_of<T>(p, static_cast<double>(x)), want.size()) == want);
        } else {
            CHECK(hex(code_of<T>(p, std::bit_cast<double>(bits)), want.size()) == want);
        }
    });
    return asked;
}

TEST_CASE("the vectors of conversions: every row") {
    auto const table = read_vectors("conversions");
    CHECK(table.version == vectors_version);
    CHECK(table.columns == "source,bits,target,rounding,overflow,code,why");
    REQUIRE(table.rows.size() == 3078);
    CHECK(table.rows.size() == table.promised_rows);
    int64_t line = 2;
    for (auto const& row : table.rows) {
        INFO("conversions.csv line " << ++line);
        REQUIRE(row.size() == 7);
        INFO(row[0] << " " << row[1] << " to " << row[2] << ", " << row[3] << ", " << row[4] << ": " << row[6]);
        REQUIRE((row[0] == "f32" || row[0] == "f64"));
        int asked = 0;
        REQUIRE(with_format(row[2], [&]<class T>(T) { asked = check_row<T>(row); }));
        CHECK(asked > 0);
    }
}

TEST_CASE("the vectors of decodes: every row") {
    auto const table = read_vectors("decodes");
    CHECK(table.version == vectors_version);
    CHECK(table.columns == "format,code,value,why");
    REQUIRE(table.rows.size() == 1366);
    CHECK(table.rows.size() == table.promised_rows);
    int64_t line = 2;
    for (auto const& row : table.rows) {
        INFO("decodes.csv line " << ++line);
        REQUIRE(row.size() == 4);
        INFO(row[0] << " " << row[1] << ": " << row[3]);
        REQUIRE(with_format(row[0], [&]<class T>(T) {
            float const value = decode(from_word<T>(static_cast<uint32_t>(word_from_hex(row[1]))));
            CHECK((std::isnan(value) ? "nan" : hex(word_of(value), 8)) == row[2]);
        }));
    }
}

} // namespace
