// The command line of examples/tiny_lm: what it accepts, how it refuses, what a resumed run keeps.
#include "../../examples/tiny_lm/options.cpp" // the program's own source file; the test links no program

#include "support/catch.hpp"
#include "temporary.hpp"

#include <algorithm>
#include <initializer_list>

using namespace tiny_lm;
using keel_test::complaint_of;

namespace {

command_line parse(std::initializer_list<char const*> arguments) {
    std::vector<char const*> all = {"tiny_lm"};
    all.insert(all.end(), arguments);
    return parse_command_line(static_cast<int>(all.size()), all.data());
}

/// The complaint of parsing and settling; every one is a single line that main can print as it is.
std::string refusal(std::initializer_list<char const*> arguments, run_settings const& checkpoint = {}) {
    std::string const text = complaint_of<user_error>([&] { settle(parse(arguments), checkpoint); });
    CHECK(text.find('\n') == text.npos);
    return text;
}

} // namespace

TEST_CASE("options are read in both forms and the rest keep their defaults") {
    auto const run = settle(parse({"--text", "a.txt", "b.txt", "--steps=7", "--precision", "fp8", "--capacity", "3/2",
                                   "--learning-rate", "1e-2", "--clip=inf", "--seed", "18446744073709551615"}));
    CHECK(run.text == std::vector<std::string>{"a.txt", "b.txt"});
    CHECK(run.steps == 7);
    CHECK(run.warmup == 7); // the default of 50 gives way
    CHECK(run.mode == precision::fp8);
    CHECK(run.model.capacity == expert_capacity{3, 2});
    CHECK(run.learning_rate == 1e-2);
    CHECK(run.clip == std::numeric_limits<double>::infinity());
    CHECK(run.seed == std::numeric_limits<std::uint64_t>::max());
    CHECK(run.threads >= 1);
    CHECK(run.batch == options{}.batch);
    CHECK(settle(parse({"--text=a", "b", "--capacity", "dropless"})).text.size() == 2);
    CHECK(settle(parse({"--text", "a", "--capacity", "dropless"})).model.capacity.dropless());
    CHECK(settle(parse({"--text", "a", "--capacity", "2"})).model.capacity == expert_capacity{2, 1});
}

TEST_CASE("head sizes that are not given follow from the width") {
    auto const run = settle(parse({"--text", "a", "--width", "120", "--heads", "4", "--kv-heads", "2"}));
    CHECK(run.model.head_dim == 30);
    CHECK(run.model.rotary_dims == 14);
    auto const given =
        settle(parse({"--text", "a", "--width", "100", "--heads", "3", "--kv-heads", "1", "--head-dim", "40"}));
    CHECK(given.model.head_dim == 40);
    CHECK(given.model.rotary_dims == 20);
}

TEST_CASE("each bad argument gets one line that names it, what it was and what was wanted") {
    CHECK(refusal({"--stepps", "3"}) == R"("--stepps": got an unknown option, wanted one that --help lists)");
    CHECK(refusal({"--"}) == R"("--": got an unknown option, wanted one that --help lists)");
    CHECK(refusal({"7"}) == R"("7": got a stray argument, wanted --name VALUE; see --help)");
    CHECK(refusal({"--steps", "7", "8"}) == R"("8": got a stray argument, wanted --name VALUE; see --help)");
    CHECK(refusal({"--steps"}) == "--steps: got nothing, wanted N");
    CHECK(refusal({"--steps", "--batch", "4"}) == "--steps: got nothing, wanted N");
    CHECK(refusal({"--text"}) == "--text: got nothing, wanted FILE...");
    CHECK(refusal({"--save="}) == "--save: got nothing, wanted a file name");
    CHECK(refusal({"--steps", "3", "--steps=4"}) == "--steps: got two of them, wanted one");
    for (char const* bad : {"", "x", "3x", " 3", "3 ", "0", "-1", "1.5", "1e3", "99999999999999999999", "0x10", "+3"})
        CHECK(refusal({"--steps", bad}) ==
              "--steps: got " + quote(bad) + ", wanted a whole number from 1 to 1000000000");
    for (char const* bad : {"", "x", "-0.1", "nan", "inf", "1,5", "11", "1e999"})
        CHECK(refusal({"--learning-rate", bad}) ==
              "--learning-rate: got " + quote(bad) + ", wanted a number from 0 to 10");
    for (char const* bad : {"0", "1e-60", "-1", "nan"}) // 1e-60 is 0 in float
        CHECK(refusal({"--clip", bad}) == "--clip: got " + quote(bad) + ", wanted a number from 1e-30 to inf");
    CHECK(refusal({"--seed", "-1"}) == R"(--seed: got "-1", wanted a whole number from 0 to 18446744073709551615)");
    CHECK(refusal({"--precision", "fp16"}) == R"(--precision: got "fp16", wanted fp32|bf16|fp8)");
    for (char const* bad : {"", "/", "5/", "/4", "0/4", "5/0", "-5/4", "5/4/3", "1.25", "1001/1", "drop"})
        CHECK(refusal({"--capacity", bad}) ==
              "--capacity: got " + quote(bad) +
                  ", wanted a ratio of whole numbers up to 1000, such as 5/4, or dropless");
    CHECK(refusal({"--precision", "a\nb\x1b"}) == R"(--precision: got "a\x0ab\x1b", wanted fp32|bf16|fp8)");
}

TEST_CASE("options that contradict each other are refused") {
    CHECK(refusal({}) == "--text: got nothing, wanted at least one file");
    CHECK(refusal({"--text", "a", "--heads", "6", "--kv-heads", "4"}) ==
          "--kv-heads: got 4, wanted a divisor of --heads 6");
    CHECK(refusal({"--text", "a", "--width", "100", "--heads", "6"}) ==
          "--width: got 100, wanted a multiple of --heads 6, at least twice it, or a --head-dim");
    CHECK(refusal({"--text", "a", "--head-dim", "32", "--rotary-dims", "34"}) ==
          "--rotary-dims: got 34, wanted an even number up to --head-dim 32");
    CHECK(refusal({"--text", "a", "--head-dim", "32", "--rotary-dims", "7"}) ==
          "--rotary-dims: got 7, wanted an even number up to --head-dim 32");
    CHECK(refusal({"--text", "a", "--experts", "4", "--top-k", "5"}) == "--top-k: got 5, wanted at most --experts 4");
    CHECK(refusal({"--text", "a", "--steps", "10", "--warmup", "11"}) == "--warmup: got 11, wanted at most --steps 10");
    CHECK(refusal({"--text", "a", "--batch", "65536", "--sequence", "65536"}) ==
          "--batch: got 65536, wanted at most 16777216 tokens a step with --sequence 65536");
}

TEST_CASE("a checkpoint's settings bring the same run back") {
    auto const first =
        settle(parse({"--text", "a b", "c", "--precision", "fp32", "--width", "96", "--heads", "3", "--kv-heads", "1",
                      "--capacity", "7/5", "--weight-decay", "0.05", "--seed", "9", "--gate", "head"}));
    auto const kept = settings_of(first);
    auto const again = settle(parse({"--resume", "run.safetensors"}), kept);
    CHECK(settings_of(again) == kept);
    CHECK(again.text == first.text);
    CHECK(again.model.head_dim == 32);
    CHECK(again.save == "run.safetensors");
    CHECK(settle(parse({"--resume", "x", "--save", "y"}), kept).save == "y");
}

TEST_CASE("a text may have any name, and a checkpoint brings it back") {
    for (std::string const name : {"plain.txt", "two\nlines.txt", "not\xff\xc3utf8\x80", "back\\slash\\x41\"quote\"",
                                   "d\xc3\xa9j\xc3\xa0", "\n"}) {
        auto const first = settle(parse({"--text", name.c_str(), "other"}));
        REQUIRE(first.text == std::vector<std::string>{name, "other"});
        auto const kept = settings_of(first);
        CHECK(settle(parse({"--resume", "x"}), kept).text == first.text);
        auto const stored = kept.at("text");
        std::size_t at = 0;
        while (at < stored.size() && character_length(std::string_view(stored).substr(at)) > 0)
            at += character_length(std::string_view(stored).substr(at));
        CHECK(at == stored.size()); // UTF-8 throughout, as JSON must be
        CHECK(std::ranges::count(stored, '\n') == 1);
    }
    CHECK(quote("a\xff\xc2\x9b\n\"") == R"("a\xff\xc2\x9b\x0a\"")");
}

TEST_CASE("a shorter run shortens its warmup, unless the command line gives one") {
    auto const kept = settings_of(settle(parse({"--text", "a", "--steps", "100", "--warmup", "60"})));
    CHECK(settle(parse({"--resume", "x"}), kept).warmup == 60);
    CHECK(settle(parse({"--resume", "x", "--steps", "40"}), kept).warmup == 40);
    CHECK(refusal({"--resume", "x", "--steps", "40", "--warmup", "50"}, kept) ==
          "--warmup: got 50, wanted at most --steps 40");
}

TEST_CASE("a resumed run may change its rates and its length, never its shape or its data") {
    auto const kept = settings_of(settle(parse({"--text", "a", "--steps", "100"})));
    auto const longer =
        settle(parse({"--resume", "x", "--steps", "200", "--learning-rate", "0.001", "--text", "moved"}), kept);
    CHECK(longer.steps == 200);
    CHECK(longer.learning_rate == 0.001);
    CHECK(longer.text == std::vector<std::string>{"moved"});
    CHECK(refusal({"--resume", "x", "--width", "96"}, kept) ==
          "--width: got 96, wanted 192, with which the checkpoint was trained");
    CHECK(refusal({"--resume", "x", "--seed", "2"}, kept) ==
          "--seed: got 2, wanted 1, with which the checkpoint was trained");
    CHECK(refusal({"--resume", "x", "--precision", "fp8"}, kept) ==
          "--precision: got fp8, wanted bf16, with which the checkpoint was trained");
    CHECK(refusal({"--resume", "x", "--width", "192"}, kept).empty());
    CHECK(refusal({"--resume", "x"}, {{"color", "red"}}) ==
          R"(--resume: got a checkpoint with the setting "color", wanted one of this program)");
    CHECK(refusal({"--resume", "x"}, {{"text", "a"}, {"layers", "many"}}) ==
          R"(--layers: got "many", wanted a whole number from 1 to 256)");
}

TEST_CASE("help is asked for at any place and lists every option") {
    CHECK(parse({"--steps", "3", "--help", "nonsense"}).values.help);
    CHECK(parse({"-h"}).values.help);
    std::string const text = help_text();
    for (auto const& [name, value] : settings_of(options{})) CHECK(text.find("--" + name + " ") != text.npos);
    CHECK(text.find("--width N                   width of the residual stream [192]\n") != text.npos);
}
