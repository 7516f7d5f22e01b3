// The run as JSON lines: appended, never rewritten, one complete line a write, so that a reader may follow along and
// a crash costs at most the line it hit. Three kinds of record:
//     {"record":"start","attempt":2,"step":400, ...facts of the run}     one at each start and resumption
//     {"record":"step","attempt":2,"step":401,"loss":1.31, ...}         the figures of health.hpp
//     {"record":"held_out","attempt":2,"step":500,"bits_per_byte":1.98, ...}
// The facts are the settings of options.hpp as strings, and what plot_run.py needs besides.
// Numbers are JSON numbers but for "nan", "inf" and "-inf". A start at step 0 begins a new run; one at a later step
// goes on with the run before it, whose records of later steps it replaces.
#pragma once

#include <cerrno>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <sys/stat.h>

#include "error.hpp"
#include "files.hpp"
#include "health.hpp"
#include "json.hpp"
#include "numbers.hpp"

namespace tiny_lm {

/// One line of the log in the making.
class log_record {
public:
    explicit log_record(std::string_view kind) { add("record", kind); }

    log_record& add(std::string_view name, std::string_view text) { return put(name, json_string(text)); }
    log_record& add(std::string_view name, char const* text) { return add(name, std::string_view(text)); }
    log_record& add(std::string_view name, double value) {
        return put(name, std::isfinite(value) ? shortest(value) : json_string(shortest(value)));
    }
    log_record& add(std::string_view name, std::integral auto value) { return put(name, shortest(value)); }

    std::string line() const { return "{" + members_ + "}\n"; }

private:
    log_record& put(std::string_view name, std::string const& value) {
        if (!members_.empty()) members_ += ',';
        members_ += json_string(name) + ':' + value;
        return *this;
    }
    std::string members_;
};

/// The log file; with an empty path it swallows everything.
class run_log {
public:
    /// Reads what is there; the file itself appears with the first record, so that a run that is refused leaves none.
    /// user_error if what is there is no log or cannot be written to.
    explicit run_log(std::string const& path) : path_(path) {
        if (path.empty()) return;
        // Without O_NONBLOCK a pipe would wait here for a reader.
        file_.reset(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NONBLOCK));
        if (!file_ && errno == ENOENT) return;
        if (!file_ && errno == ENXIO)
            throw complaint("--log", quote(path) + ", a pipe that nobody reads", "a file, or a pipe with a reader");
        if (!file_) throw user_error("cannot write " + quote(path) + ": " + system_reason());
        ::fcntl(file_.get(), F_SETFL, O_APPEND); // records do wait for a slow reader
        struct stat there = {};
        if (::fstat(file_.get(), &there) != 0 || !S_ISREG(there.st_mode)) return; // a pipe or a terminal has no past
        auto const bytes = read_file(path);
        std::string_view const before(reinterpret_cast<char const*>(bytes.data()), bytes.size());
        std::string_view constexpr start = R"({"record":"start",)";
        if (!before.empty() && !before.starts_with(start))
            throw complaint("--log", quote(path) + ", which is no log of this program", "a new file or such a log");
        for (std::size_t at = 0; (at = before.find(start, at)) != before.npos; ++at)
            if (at == 0 || before[at - 1] == '\n') ++attempt_;
        torn_ = !before.empty() && before.back() != '\n';
    }

    /// Which start of the run this is, counted from 1 over all that the file holds.
    std::int64_t attempt() const { return attempt_; }
    /// False once a record could not be written.
    bool complete() const { return complete_; }

    /// A record that starts with its kind, the attempt and the step.
    log_record record(std::string_view kind, std::int64_t step) const {
        return log_record(kind).add("attempt", attempt_).add("step", step);
    }
    /// Appends a record. If the system refuses, says so on stderr and swallows everything from then on: a log is not
    /// worth a run.
    void write(log_record const& record) {
        if (path_.empty() || !complete_) return;
        std::string const line = std::string(torn_, '\n') + record.line();
        torn_ = false;
        if (!file_) file_.reset(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
        complete_ = file_ && write_all(file_.get(), std::as_bytes(std::span(line)));
        if (!complete_)
            std::fprintf(stderr, "tiny_lm: cannot write the log %s: %s; the run goes on without it\n",
                         quote(path_).c_str(), system_reason().c_str());
    }
    /// Appends a step's figures.
    void write(health const& h) {
        log_record record("step");
        record.add("attempt", attempt_);
        for_each_figure(h, [&](char const* name, auto value) { record.add(name, value); });
        write(record);
    }

private:
    std::string path_;
    descriptor file_;
    bool complete_ = true;
    bool torn_ = false; ///< the file ends within a line
    std::int64_t attempt_ = 1;
};

} // namespace tiny_lm
