// Ctrl-C asks the run to stop after the current step, when everything can be saved; a second one ends it at once.
#pragma once

#include <csignal>

#include <signal.h>
#include <unistd.h>

#include "files.hpp"

namespace tiny_lm {

/// While one lives, SIGINT and SIGTERM set a flag instead of ending the program. One at a time.
class stop_request {
public:
    stop_request() {
        struct sigaction action = {};
        action.sa_handler = &note;
        action.sa_flags = SA_RESTART; // reads and writes in progress go on
        sigemptyset(&action.sa_mask);
        seen() = 0;
        sigaction(SIGINT, &action, &old_interrupt_);
        sigaction(SIGTERM, &action, &old_terminate_);
    }
    stop_request(stop_request const&) = delete;
    stop_request& operator=(stop_request const&) = delete;
    ~stop_request() {
        sigaction(SIGINT, &old_interrupt_, nullptr);
        sigaction(SIGTERM, &old_terminate_, nullptr);
    }

    /// True once the user has asked to stop.
    explicit operator bool() const { return seen() != 0; }

private:
    static std::sig_atomic_t volatile& seen() {
        static std::sig_atomic_t volatile flag = 0;
        return flag;
    }
    static void note(int signal) {
        if (seen()) {
            partial_file::remove_unfinished();
            _exit(128 + signal);
        }
        seen() = 1;
    }

    struct sigaction old_interrupt_, old_terminate_;
};

} // namespace tiny_lm
