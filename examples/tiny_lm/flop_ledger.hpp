// Where the floating-point operations of a training step go, entry by entry.
//
// The rules, so that "share of peak" means one thing:
//   - a multiply-add is 2 flops; only matrix products count, not norms, softmax, SwiGLU, RoPE or sums;
//   - a parameter counts for the tokens that meet it: top_k of the routed experts, and of those what capacity serves;
//   - an embedding is a lookup: parameters, no flops;
//   - attention is causal and each pair counts once: query i meets i + 1 keys, (sequence + 1) / 2 on average;
//   - backward is twice forward (gradients of both operands), and recomputed products do not count again;
//   - the optimiser's Newton-Schulz products do not count: they are no work on tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "model_shape.hpp"

namespace tiny_lm {

/// One kind of weight: `copies` matrices or vectors of the same logical shape, of which a token meets `met`.
struct ledger_entry {
    char const* name;     ///< for the reader
    std::int64_t outputs; ///< rows
    std::int64_t inputs;  ///< columns; 1 for a vector
    std::int64_t copies;  ///< in the whole model
    std::int64_t met;     ///< of these, by one token
    bool multiplied = true; ///< false: no matrix product (lookups and gains)
    bool routed = false;    ///< belongs to the routed experts

    std::int64_t parameters() const { return outputs * inputs * copies; }
    /// Forward flops a token.
    double flops() const {
        return multiplied ? 2.0 * static_cast<double>(outputs) * static_cast<double>(inputs) * static_cast<double>(met)
                          : 0.0;
    }
};

class flop_ledger {
public:
    flop_ledger(model_shape const& m, std::int64_t sequence) : shape_(m), sequence_(sequence) {
        std::int64_t const L = m.layers, w = m.width, routed = L * m.experts, met = L * m.top_k;
        entries_ = {
            {"embedding", m.vocabulary, w, 1, 1, false},
            {"query", m.query_width(), w, L, L},
            {"key", m.kv_width(), w, L, L},
            {"value", m.kv_width(), w, L, L},
            {"attention gate", m.gate_width(), w, L, L},
            {"attention output", w, m.query_width(), L, L},
            {"router", m.experts, w, L, L},
            {"shared gate", m.shared_width, w, L, L},
            {"shared up", m.shared_width, w, L, L},
            {"shared down", w, m.shared_width, L, L},
            {"expert gate", m.expert_width, w, routed, met, true, true},
            {"expert up", m.expert_width, w, routed, met, true, true},
            {"expert down", w, m.expert_width, routed, met, true, true},
            {"head", m.vocabulary, w, 1, 1},
            {"norm gains", w, 1, 2 * L + 1, 2 * L + 1, false},
            {"qk-norm gains", m.head_dim, 1, 2 * L, 2 * L, false},
        };
    }

    std::int64_t parameters() const {
        std::int64_t sum = 0;
        for (auto const& e : entries_) sum += e.parameters();
        return sum;
    }
    /// The parameters that one token meets.
    std::int64_t active_parameters() const {
        std::int64_t sum = 0;
        for (auto const& e : entries_) sum += e.outputs * e.inputs * e.met;
        return sum;
    }
    /// Share of all parameters that sits in routed experts.
    double routed_parameter_share() const {
        std::int64_t sum = 0;
        for (auto const& e : entries_) sum += e.routed ? e.parameters() : 0;
        return static_cast<double>(sum) / static_cast<double>(parameters());
    }

    /// Flops a token of the two products of attention, forward, in all layers.
    double attention_flops() const {
        return 2.0 * 2.0 * static_cast<double>(shape_.layers * shape_.query_width()) *
               (static_cast<double>(sequence_) + 1) / 2;
    }
    /// Flops a token, forward; `dropped` is the share of expert visits that capacity refused.
    double forward_flops(double dropped = 0) const {
        double sum = attention_flops();
        for (auto const& e : entries_) sum += e.flops() * (e.routed ? 1 - dropped : 1);
        return sum;
    }
    double backward_flops(double dropped = 0) const { return 2 * forward_flops(dropped); }
    /// Flops a token of one training step, the optimiser's not included.
    double training_flops(double dropped = 0) const { return forward_flops(dropped) + backward_flops(dropped); }

private:
    model_shape shape_;
    std::int64_t sequence_;
    std::vector<ledger_entry> entries_;
};

} // namespace tiny_lm
