// The health line and the log of examples/tiny_lm: figures a person can read, and the same for a program.
#include "../../examples/tiny_lm/health.hpp"
#include "../../examples/tiny_lm/pace.hpp"
#include "../../examples/tiny_lm/run_log.hpp"

#include "support/catch.hpp"
#include "temporary.hpp"

#include <csignal>
#include <sstream>

using namespace tiny_lm;
using keel_test::complaint_of;
using keel_test::contents_of;
using keel_test::temporary_folder;

namespace {

health ordinary() {
    return {.step = 120,
            .steps = 1500,
            .loss = 1.83214,
            .gradient_norm = 0.812,
            .update_to_weight = 0.0021,
            .learning_rate = 0.02,
            .largest_activation = 18.4,
            .largest_gain = 1.12,
            .largest_logit = 7.31,
            .first_token_share = 0.083,
            .first_token_uniform = 0.0239,
            .demand_max_over_mean = 1.42,
            .served_max_over_mean = 1.25,
            .largest_bias_change = 0.001,
            .dropped_share = 0.012,
            .dead_experts = 0,
            .routed_output_share = 0.31,
            .routed_parameter_share = 0.682,
            .skipped_steps = 0,
            .non_finite = 0,
            .tokens_per_second = 21432,
            .share_of_peak = 0.312,
            .seconds_left = 161};
}

std::vector<std::string> words(std::string const& line) {
    std::istringstream in(line);
    std::vector<std::string> out;
    for (std::string word; in >> word;) out.push_back(word);
    return out;
}
std::vector<json> records(std::string const& path) {
    std::istringstream in(contents_of(path));
    std::vector<json> out;
    for (std::string line; std::getline(in, line);) out.push_back(json_reader::read(line));
    return out;
}

} // namespace

TEST_CASE("a health line stands under its titles") {
    CHECK(health_header() ==
          "      step     loss  bit/byte  |grad|  upd/wt      lr     act   gain   logit  1st/even%  asked/served  "
          "drop%  dead  routed/par%  skip  nonfin   tok/s  peak%     left");
    CHECK(health_line(ordinary()) ==
          "  120/1500   1.8321     2.643   0.812  2.1e-3  0.0200    18.4   1.12    7.31    8.3/2.4     1.42/1.25  "
          "  1.2     0        31/68     0       0   21.4k     31     2:41");
    CHECK(words(health_header()).size() == words(health_line(ordinary())).size());
    CHECK(health_line(ordinary()).size() <= 200);
}

TEST_CASE("columns keep their place over the range of a run") {
    health h = ordinary();
    std::size_t const width = health_header().size();
    for (double const scale : {1e-30, 1e-6, 1e-3, 0.5, 7.77777, 123.456, 9999.4, 9999.6, 1e6, 1e30, -1e5}) {
        h.gradient_norm = h.update_to_weight = h.learning_rate = h.largest_activation = h.largest_logit = scale;
        CHECK(health_line(h).size() == width);
    }
    for (double const share : {0.0, 1e-9, 0.0994, 0.0996, 0.5, 1.0}) {
        h.first_token_share = h.first_token_uniform = h.dropped_share = h.routed_output_share = share;
        CHECK(health_line(h).size() == width);
    }
    for (double const left : {0.0, 59.6, 3599.0, 3600.0, 86400.0, 1e9, unknown, -1.0}) {
        h.seconds_left = left;
        CHECK(words(health_line(h)).size() == words(health_header()).size());
    }
    h = health{.step = 123456789, .steps = 999999999}; // wider than its column: the cells never run together
    CHECK(words(health_line(h)).size() > words(health_header()).size() - 1);
    CHECK(words(health_line(h))[0] == "123456789/999999999");
}

TEST_CASE("unknown and non-finite figures are shown as such") {
    CHECK(health_line(health{}) ==
          "       0/0      nan       nan     nan     nan     nan     nan    nan     nan    nan/nan  "
          "     nan/nan    nan     0      nan/nan     0       0     nan    nan        -  ! loss is nan");
    health h = ordinary();
    h.gradient_norm = -unknown;
    h.loss = std::numeric_limits<double>::infinity();
    CHECK(words(health_line(h))[1] == "inf");
    CHECK(words(health_line(h))[3] == "nan"); // whatever the sign of the NaN
}

TEST_CASE("alarms say what is wrong, and a sound step raises none") {
    CHECK(alarms(ordinary()).empty());
    health h = ordinary();
    h.largest_gain = 41;
    CHECK(alarms(h) == "a norm's gain is above 40");
    CHECK(health_line(h).ends_with("  ! a norm's gain is above 40"));
    h = ordinary();
    h.concealed_layer = 0;
    CHECK(alarms(h) == "capacity hides an imbalance of layer 0, whose bias stands still");
    h = ordinary();
    h.non_finite = 3;
    CHECK(alarms(h) == "step skipped");
}

TEST_CASE("the uniform share of the first token is the mean of 1 over the keys seen") {
    CHECK(uniform_first_token_share(1) == 1.0);
    CHECK(uniform_first_token_share(4) ==
          Approx((1 + 1.0 / 2 + 1.0 / 3 + 1.0 / 4) / 4).epsilon(1e-15));  // a few roundings
    CHECK(uniform_first_token_share(256) == Approx(0.0239).margin(5e-5)); // published to four digits
    CHECK(uniform_first_token_share(4096) == Approx(0.0022).margin(5e-5));
    CHECK(uniform_first_token_share(0) == 0.0);
}

TEST_CASE("log lines are JSON with every figure, non-finite ones as strings") {
    temporary_folder const folder;
    std::string const path = folder.path("log.jsonl");
    {
        run_log log(path);
        CHECK(log.attempt() == 1);
        log.write(log.record("start", 0).add("text", "a \"b\"\n\xff").add("held_out_bytes", 275286).add("gzip", 2.58));
        health h = ordinary();
        h.gradient_norm = -std::numeric_limits<double>::infinity();
        h.loss = unknown;
        log.write(h);
    }
    auto const lines = records(path);
    REQUIRE(lines.size() == 2);
    CHECK(*lines[0].find("record")->as<std::string>() == "start");
    CHECK(*lines[0].find("text")->as<std::string>() == "a \"b\"\n\xef\xbf\xbd"); // JSON cannot say the byte
    CHECK(*lines[0].find("held_out_bytes")->as<std::int64_t>() == 275286);
    CHECK(*lines[1].find("attempt")->as<std::int64_t>() == 1);
    CHECK(*lines[1].find("step")->as<std::int64_t>() == 120);
    CHECK(*lines[1].find("gradient_norm")->as<std::string>() == "-inf");
    CHECK(*lines[1].find("bits_per_byte")->as<std::string>() == "nan");
    CHECK(*lines[1].find("update_to_weight")->as<double>() == 0.0021);
    std::size_t figures = 0;
    for_each_figure(ordinary(), [&](char const* name, auto) {
        CHECK(lines[1].find(name));
        ++figures;
    });
    CHECK(lines[1].as<json::object>()->size() == figures + 2); // record and attempt
}

TEST_CASE("a log is only ever appended to, and counts its starts") {
    temporary_folder const folder;
    std::string const path = folder.path("log.jsonl");
    for (int attempt = 1; attempt <= 3; ++attempt) {
        std::string const before = contents_of(path);
        run_log log(path);
        CHECK(log.attempt() == attempt);
        CHECK(contents_of(path) == before); // opening changes nothing
        log.write(log.record("start", 10 * attempt).add("note", R"({"record":"start",)"));
        CHECK(contents_of(path).starts_with(before));
    }
    CHECK(records(path).size() == 3);
}

TEST_CASE("a line that a crash tore does not spoil the next") {
    temporary_folder const folder;
    std::string const path =
        folder.file("log.jsonl", "{\"record\":\"start\",\"attempt\":1,\"step\":0}\n{\"record\":\"step\",\"atte");
    run_log log(path);
    log.write(log.record("start", 4));
    log.write(log.record("held_out", 5).add("bits_per_byte", 2.0));
    CHECK(contents_of(path).ends_with("\"atte\n{\"record\":\"start\",\"attempt\":2,\"step\":4}\n{\"record\":\"held_"
                                      "out\",\"attempt\":2,\"step\":5,\"bits_per_byte\":2}\n"));
}

TEST_CASE("a file that is no log is refused and left alone") {
    temporary_folder const folder;
    std::string const path = folder.file("notes.txt", "do not touch\n");
    CHECK(complaint_of<user_error>([&] { run_log log(path); }) ==
          "--log: got " + quote(path) + ", which is no log of this program, wanted a new file or such a log");
    CHECK(contents_of(path) == "do not touch\n");
    CHECK(complaint_of<user_error>([&] { run_log log(folder.path()); }) ==
          "cannot write " + quote(folder.path()) + ": Is a directory");
    run_log nowhere("");
    nowhere.write(ordinary());
    CHECK(nowhere.complete());
}

TEST_CASE("a log file appears with its first record, not before") {
    temporary_folder const folder;
    std::string const path = folder.path("log.jsonl");
    run_log log(path);
    CHECK(folder.names().empty());
    log.write(log.record("start", 0));
    CHECK(records(path).size() == 1);
}

TEST_CASE("a pipe takes a log while somebody reads it, and never holds up the start") {
    temporary_folder const folder;
    std::string const path = folder.path("pipe");
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    CHECK(complaint_of<user_error>([&] { run_log log(path); }) ==
          "--log: got " + quote(path) + ", a pipe that nobody reads, wanted a file, or a pipe with a reader");
    descriptor reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK));
    run_log log(path);
    log.write(log.record("start", 0));
    char text[100];
    ::ssize_t const got = ::read(reader.get(), text, sizeof text);
    CHECK(std::string_view(text, got > 0 ? static_cast<std::size_t>(got) : 0) ==
          "{\"record\":\"start\",\"attempt\":1,\"step\":0}\n");
    auto const old_handler = std::signal(SIGPIPE, SIG_IGN);
    reader.close();
    log.write(log.record("held_out", 1)); // says so on stderr
    std::signal(SIGPIPE, old_handler);
    CHECK(!log.complete());
}

TEST_CASE("a log that can grow no more swallows the rest") {
    run_log log("/dev/full");
    CHECK(log.complete());
    for (int i = 0; i < 2; ++i) log.write(ordinary()); // says so once on stderr
    CHECK(!log.complete());
}

TEST_CASE("numbers keep their width and their value") {
    CHECK(compact(0) == "0");
    CHECK(compact(0.00999) == "1.0e-2");
    CHECK(compact(0.01) == "0.0100");
    CHECK(compact(0.9996) == "1.000");
    CHECK(compact(12.34) == "12.3");
    CHECK(compact(1053.2) == "1053");
    CHECK(compact(12345) == "1.2e4");
    CHECK(compact(-1.5e-10) == "-1.5e-10");
    CHECK(metric(0) == "0");
    CHECK(metric(870.4) == "870");
    CHECK(metric(999.6) == "1.00k");
    CHECK(metric(21432) == "21.4k");
    CHECK(metric(1.234e6) == "1.23M");
    CHECK(metric(1.82e11) == "182G");
    CHECK(duration(0) == "0:00");
    CHECK(duration(59.6) == "1:00");
    CHECK(duration(161) == "2:41");
    CHECK(duration(754) == "12:34");
    CHECK(duration(3661) == "1:01:01");
    CHECK(duration(unknown) == "-");
    CHECK(*parse_number<double>(shortest(0.1)) == 0.1);
    CHECK(fixed(1e300, 2).size() == 304);
}

TEST_CASE("the time left follows the recent steps") {
    pace steps;
    steps.add(2.0);
    CHECK(steps.seconds_left(10) == Approx(20.0).epsilon(1e-12)); // one step is the mean
    for (int i = 0; i < 200; ++i) steps.add(1.0);
    CHECK(steps.seconds_left(10) == Approx(10.0).epsilon(1e-3)); // 0.95^200 = 4e-5 of the first is left
}
