// Whether the machine can hold a run. Without asking, a system that lends more memory than it has would let the run
// start and kill it later without a word.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include <unistd.h>

#include "error.hpp"
#include "flop_ledger.hpp"
#include "numbers.hpp"
#include "options.hpp"

namespace tiny_lm {

/// Bytes that a run needs at the least: parameters with what their optimiser keeps, and what the backward needs of the
/// forward. What lives shortly and what is small is left out.
inline double least_memory(options const& run) {
    auto const& m = run.model;
    auto const real = [](std::int64_t count) { return static_cast<double>(count); };
    bool const halves = run.mode != precision::fp32;
    double const parameter_bytes = halves ? 3 * 4 + 2 : 3 * 4; // master, gradient, momentum; bf16 shadow
    double const attention = 2 * (2 * real(m.query_width()) + 2 * real(m.kv_width()) + real(m.gate_width()));
    double const hidden = real(m.shared_width) + real(m.top_k) * real(m.expert_width);
    double const experts = 6 * hidden + 3 * real(m.top_k) * real(m.width);
    double const token_bytes = real(m.layers) * (4 * real(m.width) + attention + experts) * (halves ? 2 : 4);
    double const parameters = real(flop_ledger(m, run.sequence).parameters());
    return parameters * parameter_bytes + real(run.batch * run.sequence) * token_bytes;
}

/// What was asked for, in words.
inline std::string size_of_run(options const& run) {
    return metric(static_cast<double>(flop_ledger(run.model, run.sequence).parameters())) + " parameters and " +
           shortest(run.batch * run.sequence) + " tokens a step";
}

/// Bytes of memory in this machine; infinite where the system does not say.
inline double machine_memory() {
    long const pages = ::sysconf(_SC_PHYS_PAGES), size = ::sysconf(_SC_PAGESIZE);
    if (pages <= 0 || size <= 0) return std::numeric_limits<double>::infinity();
    return static_cast<double>(pages) * static_cast<double>(size);
}

/// user_error if the run needs more.
inline void require_memory(options const& run, double bytes) {
    if (double const need = least_memory(run); need > bytes)
        throw complaint("memory", size_of_run(run) + ", which need " + metric(need) + " bytes",
                        "at most the " + metric(bytes) + " of this machine");
}

} // namespace tiny_lm
