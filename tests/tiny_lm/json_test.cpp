// The JSON reader of examples/tiny_lm reads what is JSON, refuses what is not, and survives everything.
#include "../../examples/tiny_lm/json.hpp"

#include "support/catch.hpp"

#include <random>

using namespace tiny_lm;

namespace {

bool refused(std::string_view text) {
    try {
        json_reader::read(text);
    } catch (json_error const&) {
        return true;
    }
    return false;
}
std::string string_in(std::string_view text) { return *json_reader::read(text).as<std::string>(); }

} // namespace

TEST_CASE("JSON values are read") {
    CHECK(*json_reader::read(" 42 ").as<std::int64_t>() == 42);
    CHECK(*json_reader::read("-0").as<std::int64_t>() == 0);
    CHECK(*json_reader::read("9223372036854775807").as<std::int64_t>() == 9223372036854775807);
    CHECK(*json_reader::read("9223372036854775808").as<double>() == 9223372036854775808.0);
    CHECK(*json_reader::read("-1.5e2").as<double>() == -150.0);
    CHECK(*json_reader::read("true").as<bool>());
    CHECK(json_reader::read("null").as<std::nullptr_t>());
    CHECK(json_reader::read("[]").as<json::array>()->empty());
    CHECK(json_reader::read("{ }").as<json::object>()->empty());
    auto const nested = json_reader::read("{\"a\" : [1, {\"b\":\tfalse}],\n\"c\":\"d\"}\r\n");
    REQUIRE(nested.find("a")->as<json::array>()->size() == 2);
    CHECK(!*nested.find("a")->as<json::array>()->at(1).find("b")->as<bool>());
    CHECK(*nested.find("c")->as<std::string>() == "d");
    CHECK(!nested.find("d"));
    CHECK(!json_reader::read("3").find("a"));
}

TEST_CASE("JSON strings are read and written") {
    CHECK(string_in(R"("\"\\\/\b\f\n\r\t")") == "\"\\/\b\f\n\r\t");
    CHECK(string_in(R"("\u0041\u00e9\u20ac\ud83d\ude00")") == "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    std::string all;
    for (int c = 0; c < 128; ++c) all += static_cast<char>(c);
    all += "\xc2\x80\xc3\xa9\xe2\x82\xac\xed\x9f\xbf\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf";
    CHECK(string_in(json_string(all)) == all);
    // What is no UTF-8 (a lone byte, an overlong form, a surrogate, too large, cut off): a replacement for each byte.
    for (std::string bad : {"\x80", "\xff", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"}) {
        std::string want = "<";
        for (std::size_t i = 0; i < bad.size(); ++i) want += "\xef\xbf\xbd";
        CHECK(string_in(json_string("<" + bad + ">")) == want + ">");
    }
}

TEST_CASE("what is not JSON is refused") {
    for (char const* bad : {"",
                            " ",
                            "01",
                            "-",
                            "+1",
                            "1.",
                            ".5",
                            "1e",
                            "1e+",
                            "0x1",
                            "nan",
                            "tru",
                            "[",
                            "[1",
                            "[1,",
                            "[1,]",
                            "[,1]",
                            "{",
                            "{\"a\"",
                            "{\"a\":",
                            "{a:1}",
                            "{1:2}",
                            "{\"a\":1,}",
                            "\"",
                            "\"\\\"",
                            "\"\\x\"",
                            "\"\\u12\"",
                            "\"\\u12g4\"",
                            "\"\\ud800\"",
                            "\"\\ud800\\u0041\"",
                            "\"\\udc00\"",
                            "1 2",
                            "{} x",
                            "\"a\nb\"",
                            "{\"a\":1,\"a\":2}",
                            "1e999",
                            "'a'",
                            "[1 2]",
                            "\xef\xbb\xbf{}"})
        CHECK(refused(bad));
    CHECK(refused(std::string("\"a\0b\"", 5)));
}

TEST_CASE("deep nesting is refused before it costs the stack") {
    CHECK(!refused(std::string(60, '[') + std::string(60, ']')));
    CHECK(refused(std::string(1000000, '[')));
    std::string deep;
    for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
    CHECK(refused(deep));
}

TEST_CASE("damaged JSON is refused or read, never worse") {
    std::string const sound =
        R"({"__metadata__":{"digest":"00ff","k":"\u00e9\n"},"t":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
        R"("x":-1.5e3})";
    std::mt19937 random(1);
    auto const below = [&](std::size_t n) { return random() % n; };
    int read = 0;
    for (int round = 0; round < 20000; ++round) {
        std::string text = sound;
        for (std::size_t change = 1 + below(4); change > 0; --change) {
            std::size_t const at = below(text.size());
            if (below(3) == 0)
                text.erase(at, 1 + below(5));
            else if (below(2) == 0)
                text[at] = static_cast<char>(random());
            else
                text.insert(at, text.substr(below(text.size()), below(9)));
            if (text.empty()) text.assign(1, '0');
        }
        read += !refused(text);
    }
    CHECK(read > 100); // damage within strings and numbers passes here; digests catch it
    CHECK(read < 15000);
}
