// What a person reads goes to stdout, which may be a full disk or a pipe whose reader has left. That ends no training.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstdio>

#include <fcntl.h>

#include "files.hpp"

namespace tiny_lm {

/// For the start of main: a failed write is an error to be told, not a signal that ends the program, and a standard
/// descriptor that was closed is not given to a file, into which the output would then go.
inline void prepare_standard_output() {
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN); // a file beyond the limit of `ulimit -f`
    int opened = 0;
    while (opened >= 0 && opened <= 2) opened = ::open("/dev/null", O_RDONLY); // writing to it fails, as it should
    if (opened > 2) ::close(opened);
}

/// Shows what was printed. The first time that stdout does not take it, says so on stderr; false from then on.
inline bool flush_standard_output() {
    static bool lost = false;
    if (lost) return false;
    bool const flushed = std::fflush(stdout) == 0;
    lost = !flushed || std::ferror(stdout) != 0;
    if (lost)
        std::fprintf(stderr, "tiny_lm: cannot write to stdout%s\n", flushed ? "" : (": " + system_reason()).c_str());
    return !lost;
}

} // namespace tiny_lm
