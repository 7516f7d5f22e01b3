// Where examples/tiny_lm may write, and what it leaves of what was there.
#include "../../examples/tiny_lm/outputs.hpp"
#include "../../examples/tiny_lm/memory_need.hpp"
#include "../../examples/tiny_lm/signals.hpp"

#include "support/catch.hpp"
#include "temporary.hpp"

#include <algorithm>
#include <fstream>

#include <sys/wait.h>

using namespace tiny_lm;
using keel_test::complaint_of;
using keel_test::contents_of;
using keel_test::temporary_folder;
namespace fs = std::filesystem;

namespace {

void replace_by(std::string const& path, std::string const& text) {
    std::span<std::byte const> const piece = std::as_bytes(std::span(text));
    replace_file(path, std::span(&piece, 1));
}
std::string a_checkpoint(std::string const& path) {
    write_safetensors(path, {}, {{"step", "3"}});
    return path;
}
::mode_t mode_of(std::string const& path) {
    struct stat there = {};
    REQUIRE(::stat(path.c_str(), &there) == 0);
    return there.st_mode & 07777;
}
/// The complaint about a run with these outputs, without the part that says what is wanted.
std::string refusal(options const& run) {
    std::string const text = complaint_of<user_error>([&] { check_outputs(run); });
    return text.substr(0, text.find(", wanted"));
}

} // namespace

TEST_CASE("a replaced file keeps its mode, a new one goes by the umask") {
    temporary_folder const folder;
    std::string const path = folder.file("run", "old");
    for (::mode_t const mode : {0600u, 0640u, 0664u, 0444u}) {
        REQUIRE(::chmod(path.c_str(), mode) == 0);
        replace_by(path, "new");
        CHECK(mode_of(path) == mode);
    }
    ::mode_t const mask = ::umask(027);
    replace_by(folder.path("fresh"), "new");
    ::umask(mask);
    CHECK(mode_of(folder.path("fresh")) == 0640);
}

TEST_CASE("a link stays a link, and the file behind it is replaced") {
    temporary_folder const folder;
    fs::create_directory(folder.path("far"));
    std::string const target = folder.file("far/run", "old");
    fs::create_symlink("far/run", folder.path("relative"));
    fs::create_symlink(folder.path("relative"), folder.path("chain"));
    fs::create_symlink("far/none", folder.path("dangling"));
    for (char const* link : {"relative", "chain"}) {
        replace_by(folder.path(link), link);
        CHECK(fs::is_symlink(folder.path(link)));
        CHECK(contents_of(target) == link);
    }
    replace_by(folder.path("dangling"), "made");
    CHECK(fs::is_symlink(folder.path("dangling")));
    CHECK(contents_of(folder.path("far/none")) == "made");
    fs::create_symlink("circle", folder.path("circle"));
    CHECK(!complaint_of<write_error>([&] { replace_by(folder.path("circle"), "x"); }).empty());
    CHECK(fs::is_symlink(folder.path("circle")));
}

TEST_CASE("a file grows under a name that nobody else has") {
    temporary_folder const folder;
    std::string const taken = ".tiny_lm-" + std::to_string(::getpid()) + "-0"; // say, the same process number elsewhere
    folder.file(taken, "another's");
    replace_by(folder.path("run"), "mine");
    CHECK(contents_of(folder.path("run")) == "mine");
    CHECK(contents_of(folder.path(taken)) == "another's");
    CHECK(folder.names().size() == 2);
}

TEST_CASE("what is no regular file is not replaced") {
    temporary_folder const folder;
    REQUIRE(::mkfifo(folder.path("pipe").c_str(), 0600) == 0);
    fs::create_directory(folder.path("folder"));
    for (char const* name : {"pipe", "folder"}) {
        CHECK(!complaint_of<write_error>([&] { replace_by(folder.path(name), "x"); }).empty());
        CHECK(!fs::is_regular_file(folder.path(name)));
    }
    CHECK(folder.names().size() == 2);
}

TEST_CASE("a second interrupt during a save leaves no unfinished file") {
    temporary_folder const folder;
    ::pid_t const child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        stop_request const stop;
        partial_file file;
        if (!file.create(folder.path("run")) || folder.names().size() != 1) _exit(1);
        ::raise(SIGINT);
        ::raise(SIGINT);
        _exit(2);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WEXITSTATUS(status) == 128 + SIGINT);
    CHECK(folder.names().empty());
}

TEST_CASE("one file by two names is one file") {
    temporary_folder const folder;
    std::string const file = folder.file("a", "x");
    fs::create_hard_link(file, folder.path("hard"));
    fs::create_symlink("a", folder.path("soft"));
    fs::create_symlink("none", folder.path("dangling"));
    for (char const* name : {"a", "hard", "soft", "./a", "x/../a"}) CHECK(same_file(file, folder.path(name)));
    CHECK(same_file(folder.path("none"), folder.path("./none")));
    CHECK(same_file(folder.path("none"), folder.path("dangling")));
    CHECK(!same_file(file, folder.file("b", "x")));
    CHECK(!same_file(folder.path("none"), folder.path("none2")));
}

TEST_CASE("a relative name is one file however it is spelled, before it exists and after") {
    temporary_folder const folder;
    fs::path const before = fs::current_path();
    fs::current_path(folder.path(""));
    std::string const here = fs::current_path().string();
    bool const same = same_file("fresh", "./fresh") && same_file("fresh", here + "/fresh") && !same_file("fresh", "other");
    options run;
    run.text = {"text"}, run.save = "fresh", run.log = "./fresh";
    std::ofstream("text") << "some words";
    std::string const refused = refusal(run);
    fs::current_path(before);
    CHECK(same);
    CHECK(!refused.empty());
}

TEST_CASE("a checkpoint is saved over a checkpoint or in a new file") {
    temporary_folder const folder;
    std::string const good = a_checkpoint(folder.path("good"));
    fs::create_symlink("good", folder.path("link"));
    REQUIRE(::mkfifo(folder.path("pipe").c_str(), 0600) == 0);
    auto const refused = [&](std::string const& path) {
        return complaint_of<user_error>([&] { require_checkpoint_or_none("--save", path); });
    };
    CHECK(refused(good).empty());
    CHECK(refused(folder.path("link")).empty());
    CHECK(refused(folder.path("new")).empty());
    CHECK(refused("new").empty());
    CHECK(refused(folder.path("new/")).ends_with("wanted a file in a folder that exists"));
    CHECK(refused(folder.path("no/such")) ==
          "--save: got " + quote(folder.path("no/such")) + ", wanted a file in a folder that exists");
    std::string const wanted = ", wanted a new file or a checkpoint of this program";
    for (auto const& [path, what] : {std::pair{folder.file("essay", "years of work, in plain words"), ", which is neither"},
                                     std::pair{folder.file("empty", ""), ", which is neither"},
                                     std::pair{folder.path("pipe"), ", which is no regular file"},
                                     std::pair{std::string("/dev/null"), ", which is no regular file"},
                                     std::pair{folder.path(), ", a folder"},
                                     std::pair{folder.path(std::string(300, 'x')), ": File name too long"}})
        CHECK(refused(path) == "--save: got " + quote(path) + what + wanted);
    if (::geteuid() == 0) return; // root may write everywhere
    fs::permissions(good, fs::perms::owner_read);
    CHECK(refused(good) == "--save: got " + quote(good) + ", which is protected from writing" + wanted);
    fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
    CHECK(refused(folder.path("new")).ends_with("wanted a file in a folder that can be written to"));
    fs::permissions(folder.path(), fs::perms::owner_all);
}

TEST_CASE("no output is one of the run's other files, under whatever name") {
    temporary_folder const folder;
    std::string const text = folder.file("text", "some text"), saved = a_checkpoint(folder.path("saved"));
    fs::create_hard_link(text, folder.path("hard"));
    fs::create_symlink("text", folder.path("soft"));
    auto const run = [&](std::string const& save, std::string const& log, std::string const& resume = "") {
        options o;
        o.text = {folder.file("other", "other text"), text};
        o.save = save, o.log = log, o.resume = resume;
        return o;
    };
    CHECK(refusal(run(saved, folder.path("log"), saved)).empty());
    CHECK(refusal(run(saved, "")).empty());
    for (char const* name : {"text", "hard", "soft", "./text"}) {
        std::string const path = folder.path(name);
        CHECK(refusal(run(path, "")) == "--save: got " + quote(path) + ", the same file as a --text");
        CHECK(refusal(run(saved, path)) == "--log: got " + quote(path) + ", the same file as a --text");
    }
    CHECK(refusal(run(folder.path("new"), folder.path("./new"))) ==
          "--log: got " + quote(folder.path("./new")) + ", the same file as --save");
    CHECK(refusal(run(folder.path("new"), saved, saved)) ==
          "--log: got " + quote(saved) + ", the same file as --resume");
    CHECK(refusal(run(saved, folder.path())) == "--log: got " + quote(folder.path()) + ", a folder");
    CHECK(refusal(run(saved, "/dev/null")).empty());
    CHECK(contents_of(text) == "some text");
}

TEST_CASE("a run that the machine cannot hold is refused with what it would need") {
    options run;
    double const small = least_memory(run);
    CHECK(small > 12.0 * 256 * static_cast<double>(run.model.width)); // the embedding alone
    require_memory(run, small);
    CHECK(complaint_of<user_error>([&] { require_memory(run, small / 2); })
              .starts_with("memory: got " + size_of_run(run)));
    run.model.experts *= 2;
    double const more = least_memory(run);
    CHECK(more > small);
    run.batch *= 2;
    CHECK(least_memory(run) > more);
    run.model = {.layers = 256, .width = 65536, .heads = 1024, .kv_heads = 1024, .head_dim = 1024, .experts = 4096,
                 .top_k = 64, .expert_width = 65536, .shared_width = 65536, .capacity = {}}; // the largest that the options allow
    CHECK(least_memory(run) > 1e17);
}
