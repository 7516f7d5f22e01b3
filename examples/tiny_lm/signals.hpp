// Ctrl-C asks the run to stop after the current step, when everything can be saved; a second one ends it at once.
#pragma once

#include <atomic>
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
    /// Set on whichever thread the signal comes to.
    static std::atomic<int>& seen() {
        static std::atomic<int> flag{0};
        static_assert(std::atomic<int>::is_always_lock_free);
        return flag;
    }
    static void note(int signal) {
        if (seen().exchange(1) != 0) {
            partial_file::remove_unfinished();
            _exit(128 + signal);
        }
    }

    struct sigaction old_interrupt_, old_terminate_;
};

} // namespace tiny_lm
