// Windows of text as the model's inputs and targets.
#pragma once

#include <cstdint>
#include <vector>

#include "corpus.hpp"

namespace tiny_lm {

/// Sequences of equal length, end to end: each token, and the one that follows it.
struct batch {
    std::vector<std::int32_t> inputs, targets;

    void clear() { inputs.clear(), targets.clear(); }
    /// A window of n + 1 bytes is a sequence of n tokens.
    void add(byte_span window) {
        inputs.insert(inputs.end(), window.begin(), window.end() - 1);
        targets.insert(targets.end(), window.begin() + 1, window.end());
    }
};

} // namespace tiny_lm
