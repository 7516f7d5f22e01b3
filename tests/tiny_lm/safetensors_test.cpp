// Checkpoint files of examples/tiny_lm: what is written is read back, and damage anywhere is noticed.
#include "../../examples/tiny_lm/safetensors.hpp"

#include "support/catch.hpp"
#include "temporary.hpp"

#include <csignal>

#include <sys/resource.h>

using namespace tiny_lm;
using keel_test::complaint_of;
using keel_test::contents_of;
using keel_test::temporary_folder;

namespace {

std::vector<std::uint8_t> bytes_of(std::string const& text) { return {text.begin(), text.end()}; }

/// Writes a small file with a tensor of each kind.
std::string small_file(temporary_folder const& folder) {
    std::vector<float> const weights = {1.0f, -0.0f, 3.5f, std::bit_cast<float>(0x7fc12345u), 1e-42f, 6.0f};
    std::vector<std::int64_t> const counts = {-1, std::int64_t{1} << 62};
    std::vector<std::uint8_t> const codes = {0, 127, 255};
    std::vector<keel::bf16> const halves = {keel::bf16{0x3f80}, keel::bf16{0x7fff}};
    write_safetensors(folder.path("small"),
                      {source_of<std::uint8_t>("codes", {3}, codes),
                       source_of<float>("layer.0/weights", {2, 3}, weights),
                       source_of<std::int64_t>("counts", {2, 1}, counts), source_of<float>("none", {0, 7}, {}),
                       source_of<keel::bf16>("halves", {2}, halves)},
                      {{"step", "12"}, {"odd \"key\"", "a\nb"}});
    return folder.path("small");
}

/// The complaint about a file's bytes, always one line.
std::string refusal(std::string const& bytes) {
    std::string const text = complaint_of<user_error>([&] { safetensors("x", bytes_of(bytes)); });
    CHECK(text.find('\n') == text.npos);
    return text;
}

/// A file whose header is the given text after the seal, correctly sealed.
std::string sealed(std::string const& rest, std::string const& data) {
    std::string header = std::string(detail::seal_start) + std::string(16, '0') + rest;
    header.replace(detail::seal_start.size(), 16, detail::seal_of(header));
    std::uint64_t const length = header.size();
    return std::string(reinterpret_cast<char const*>(&length), 8) + header + data;
}

} // namespace

TEST_CASE("tensors and metadata come back bit for bit") {
    temporary_folder const folder;
    auto const file = safetensors::read(small_file(folder));
    CHECK(file.names() == std::vector<std::string>{"codes", "counts", "halves", "layer.0/weights", "none"});
    CHECK(file.metadata() == file_metadata{{"step", "12"}, {"odd \"key\"", "a\nb"}});
    CHECK(file.text("step") == "12");
    std::vector<float> weights(6);
    file.copy<float>("layer.0/weights", {2, 3}, weights);
    CHECK(std::bit_cast<std::uint32_t>(weights[3]) == 0x7fc12345u);
    CHECK(std::bit_cast<std::uint32_t>(weights[1]) == 0x80000000u);
    CHECK(weights[4] == 1e-42f);
    std::vector<std::int64_t> counts(2);
    file.copy<std::int64_t>("counts", {2, 1}, counts);
    CHECK(counts == std::vector<std::int64_t>{-1, std::int64_t{1} << 62});
    std::vector<keel::bf16> halves(2);
    file.copy<keel::bf16>("halves", {2}, halves);
    CHECK(halves[0].bits == 0x3f80);
    CHECK(halves[1].bits == 0x7fff);
    file.copy<float>("none", {0, 7}, {});
}

TEST_CASE("the layout is the format's: length, padded JSON header, aligned tensors without holes") {
    temporary_folder const folder;
    std::string const bytes = contents_of(small_file(folder));
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    CHECK(length % 8 == 0);
    auto const header = json_reader::read(bytes.substr(8, length));
    auto const& offsets = [&](char const* name) {
        auto const& pair = *header.find(name)->find("data_offsets")->as<json::array>();
        return std::pair(*pair[0].as<std::int64_t>(), *pair[1].as<std::int64_t>());
    };
    CHECK(offsets("counts") == std::pair<std::int64_t, std::int64_t>(0, 16));
    CHECK(offsets("layer.0/weights") == std::pair<std::int64_t, std::int64_t>(16, 40));
    CHECK(offsets("none") == std::pair<std::int64_t, std::int64_t>(40, 40));
    CHECK(offsets("halves") == std::pair<std::int64_t, std::int64_t>(40, 44));
    CHECK(offsets("codes") == std::pair<std::int64_t, std::int64_t>(44, 47));
    CHECK(bytes.size() == 8 + length + 47);
    CHECK(*header.find("codes")->find("dtype")->as<std::string>() == "U8");
}

TEST_CASE("a change of any byte is noticed") {
    temporary_folder const folder;
    std::string const sound = contents_of(small_file(folder));
    REQUIRE(refusal(sound).empty());
    int missed = 0;
    for (std::size_t at = 0; at < sound.size(); ++at)
        for (int const flip : {0x01, 0x20, 0x80, 0xff}) {
            std::string damaged = sound;
            damaged[at] = static_cast<char>(damaged[at] ^ flip);
            missed += refusal(damaged).empty();
        }
    CHECK(missed == 0);
}

TEST_CASE("a file cut short or made longer anywhere is noticed") {
    temporary_folder const folder;
    std::string const sound = contents_of(small_file(folder));
    int missed = 0;
    for (std::size_t size = 0; size < sound.size(); ++size) missed += refusal(sound.substr(0, size)).empty();
    CHECK(missed == 0);
    CHECK(refusal(sound + '\0') == R"(checkpoint "x": 1 bytes too long)");
    CHECK(refusal(sound.substr(0, sound.size() - 1)) ==
          R"(checkpoint "x": cut short: tensor "codes" is not all there)");
    CHECK(refusal("") == R"(checkpoint "x": cut short: 0 bytes)");
    std::string damaged = sound;
    damaged.back() ^= 1;
    CHECK(refusal(damaged) == R"(checkpoint "x": tensor "codes" is damaged)");
}

TEST_CASE("headers that lie are refused, however well sealed") {
    std::string const digest = hexadecimal(digest_of(std::string("abcd")));
    auto const one = [&](std::string const& description) {
        return refusal(sealed(R"(","digest of t":")" + digest + R"("},"t":)" + description + "}", "abcd"));
    };
    REQUIRE(one(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})").empty());
    for (char const* lie : {R"({"dtype":"U8","shape":[3],"data_offsets":[0,4]})",
                            R"({"dtype":"F32","shape":[4],"data_offsets":[0,4]})",
                            R"({"dtype":"U8","shape":[4],"data_offsets":[0,5]})",
                            R"({"dtype":"U8","shape":[3],"data_offsets":[1,4]})",
                            R"({"dtype":"U8","shape":[3],"data_offsets":[0,3]})",
                            R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})",
                            R"({"dtype":"U8","shape":[4],"data_offsets":[4,0]})",
                            R"({"dtype":"U8","shape":[4],"data_offsets":[0,4,4]})",
                            R"({"dtype":"U8","shape":[4],"data_offsets":[-4,0]})",
                            R"({"dtype":"U8","shape":[4.0],"data_offsets":[0,4]})",
                            R"({"dtype":"U8","shape":4,"data_offsets":[0,4]})",
                            R"({"dtype":"U8","data_offsets":[0,4]})",
                            R"({"dtype":"F8","shape":[4],"data_offsets":[0,4]})",
                            R"({"dtype":8,"shape":[4],"data_offsets":[0,4]})",
                            R"({"shape":[4],"data_offsets":[0,4]})",
                            R"([])",
                            R"("t")",
                            R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]})",
                            R"({"dtype":"U8","shape":[9223372036854775807,2,2],"data_offsets":[0,4]})",
                            R"({"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,4]})"})
        CHECK(!one(lie).empty());
    CHECK(refusal(sealed(R"("},"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "abcd")) ==
          R"(checkpoint "x": tensor "t" has no digest)");
    CHECK(refusal(sealed(R"(","n":3}})", "")) == R"(checkpoint "x": its metadata "n" is no string)");
    CHECK(refusal(sealed(R"("},"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                         R"("b":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})",
                         "abcd")) == R"(checkpoint "x": its tensors overlap or leave a hole)");
    CHECK(refusal(sealed(R"("},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                         "abcd")) == R"(checkpoint "x": its tensors overlap or leave a hole)");
    // 2^61 elements of 8 bytes: their size is 0 modulo 2^64
    CHECK(refusal(sealed(R"("},"t":{"dtype":"I64","shape":[2305843009213693952],"data_offsets":[0,0]}})", "")) ==
          R"(checkpoint "x": the description of tensor "t" makes no sense)");
    CHECK(refusal(sealed(R"("},)", "")).starts_with(R"(checkpoint "x": its header is no JSON: )"));
    CHECK(refusal(std::string("\x02\0\0\0\0\0\0\0{}", 10)) ==
          R"(checkpoint "x": damaged, or not written by this program)");
    CHECK(refusal(std::string(8, '\xff') + "{}")
              .starts_with(R"(checkpoint "x": damaged, cut short or no safetensors file)"));
}

TEST_CASE("asking for what is not there is refused and copies nothing") {
    temporary_folder const folder;
    auto const file = safetensors::read(small_file(folder));
    std::vector<float> to(6, 7.0f);
    auto const asked = [&](std::string const& name, tensor_shape const& shape) {
        return complaint_of<user_error>([&] { file.copy<float>(name, shape, to); });
    };
    std::string const start = "checkpoint " + quote(folder.path("small")) + ": ";
    CHECK(asked("weights", {2, 3}) == start + R"(it has no tensor "weights")");
    CHECK(asked("layer.0/weights", {3, 2}) == start + R"(tensor "layer.0/weights" is F32 [2,3], wanted F32 [3,2])");
    CHECK(asked("codes", {3}) == start + R"(tensor "codes" is U8 [3], wanted F32 [3])");
    CHECK(to == std::vector<float>(6, 7.0f));
    CHECK(complaint_of<user_error>([&] { file.text("epoch"); }) == start + R"(it has no "epoch")");
    CHECK(complaint_of<std::logic_error>([&] {
              file.copy<float>("layer.0/weights", {2, 3}, std::span(to).first(5));
          }) != "");
}

TEST_CASE("a file that cannot be written leaves the old one and no litter") {
    temporary_folder const folder;
    std::vector<float> const one = {1.0f}, two = {2.0f};
    std::string const path = folder.path("run");
    write_safetensors(path, {source_of<float>("w", {1}, one)}, {});
    std::string const before = contents_of(path);
    ::rlimit old_limit = {};
    ::getrlimit(RLIMIT_FSIZE, &old_limit);
    auto const old_handler = std::signal(SIGXFSZ, SIG_IGN);
    ::rlimit const full = {20, old_limit.rlim_max}; // less than the header: as a disk that fills up meanwhile
    ::setrlimit(RLIMIT_FSIZE, &full);
    std::string const said =
        complaint_of<write_error>([&] { write_safetensors(path, {source_of<float>("w", {1}, two)}, {}); });
    ::setrlimit(RLIMIT_FSIZE, &old_limit);
    std::signal(SIGXFSZ, old_handler);
    CHECK(said == "cannot write " + quote(path) + ": File too large");
    CHECK(contents_of(path) == before);
    CHECK(folder.names() == std::vector<std::string>{"run"});
    write_safetensors(path, {source_of<float>("w", {1}, two)}, {});
    CHECK(contents_of(path) != before);
    CHECK(folder.names() == std::vector<std::string>{"run"});
    CHECK(complaint_of<write_error>([&] { write_safetensors(folder.path("no/such"), {}, {}); }) ==
          "cannot write " + quote(folder.path("no/such")) + ": No such file or directory");
}

TEST_CASE("a file that was written here is known by its header") {
    temporary_folder const folder;
    std::string const path = small_file(folder), sound = contents_of(path);
    CHECK(written_here(path));
    CHECK(written_here(folder.file("torn", sound.substr(0, sound.size() - 1)))); // its tensors may be anything
    for (std::size_t const size : {std::size_t{0}, std::size_t{7}, std::size_t{8}, std::size_t{60}})
        CHECK(!written_here(folder.file("cut", sound.substr(0, size))));
    CHECK(!written_here(folder.file("text", "eight or more bytes of any text, whose first say a length of petabytes")));
    CHECK(!written_here(folder.file("foreign", std::string("\x02\0\0\0\0\0\0\0{}", 10))));
    std::string altered = sound;
    altered[60] ^= 1;
    CHECK(!written_here(folder.file("altered", altered)));
    CHECK(!written_here(folder.path("none")));
}

TEST_CASE("names that would collide are the program's mistake") {
    std::vector<float> const one = {1.0f};
    auto const w = source_of<float>("w", {1}, one);
    temporary_folder const folder;
    CHECK(!complaint_of<std::logic_error>([&] { write_safetensors(folder.path("x"), {w, w}, {}); }).empty());
    CHECK(!complaint_of<std::logic_error>([&] { write_safetensors(folder.path("x"), {w}, {{"digest", ""}}); }).empty());
    CHECK(!complaint_of<std::logic_error>([&] {
               write_safetensors(folder.path("x"), {w}, {{"digest of w", ""}});
           }).empty());
    CHECK(!complaint_of<std::logic_error>([&] { source_of<float>("w", {2}, one); }).empty());
    CHECK(folder.names().empty());
}
