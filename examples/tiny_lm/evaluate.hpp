// How well the model predicts text that training never sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numbers>

#include "batch.hpp"
#include "corpus.hpp"
#include "model.hpp"

namespace tiny_lm {

struct held_out_score {
    double bits_per_byte = 0;
    std::int64_t windows = 0; ///< contexts that were scored
};

/// Mean over up to `most_windows` contexts, spread evenly over the held-out text; 0: all of it. Experts drop nothing here.
template <class Model>
held_out_score evaluate(Model& m, corpus const& text, std::int64_t sequence, std::int64_t sequences_at_once, std::int64_t most_windows) {
    std::int64_t const all = held_out_windows(text, sequence);
    std::int64_t const count = most_windows > 0 ? std::min(most_windows, all) : all;
    double nats = 0;
    batch work;
    for (std::int64_t first = 0; first < count; first += sequences_at_once) {
        std::int64_t const last = std::min(count, first + sequences_at_once);
        work.clear();
        for (std::int64_t w = first; w < last; ++w) work.add(held_out_window(text, w * all / count, sequence));
        m.forward(work.inputs, sequence, false);
        nats += m.loss(work.targets) * static_cast<double>(last - first);
    }
    return {nats / static_cast<double>(count) / std::numbers::ln2, count};
}

} // namespace tiny_lm
