// Where the floating-point operations of a training step go, entry by entry.
//
// The rules, so that "share of peak" means one thing:
//   - a multiply-add is 2 flops; only matrix products count, not norms, softmax, SwiGLU, RoPE or sums;
//   - a parameter counts for the tokens that meet it: top_k of the routed experts, and of those what capacity serves;
//   - an embedding is a lookup: parameters, no flops;
//   - attention is causal and each pair counts once: query i meets i + 1 keys, (sequence + 1) / 2 on average;
//   - backward is twice forward (gradients of both operands), and recomputed products do not count again;
//   - the optimiser's Newton-Schulz products are an account of their own: they are no work on tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model_shape.hpp"
#include "numbers.hpp"

namespace tiny_lm {

enum class updated_by { muon, adamw };

/// One kind of weight: `copies` matrices or vectors of the same logical shape, of which a token meets `met`.
struct ledger_entry {
    std::string name;
    std::int64_t outputs; ///< rows
    std::int64_t inputs;  ///< columns; 1 for a vector
    std::int64_t copies;  ///< in the whole model
    std::int64_t met;     ///< of these, by one token
    updated_by optimiser;
    bool multiplied = true; ///< false: no matrix product (lookups and gains)
    bool routed = false;    ///< belongs to the routed experts

    std::int64_t parameters() const { return outputs * inputs * copies; }
    /// Forward flops a token.
    double flops() const {
        return multiplied ? 2.0 * static_cast<double>(outputs) * static_cast<double>(inputs) * static_cast<double>(met)
                          : 0.0;
    }
};

/// How the products of Newton-Schulz are formed: as ordinary products, with X X^T and its square computed as
/// symmetric, or on the small Gram matrix alone (without restarts).
enum class orthogonalisation { plain, symmetric, gram };

class flop_ledger {
public:
    flop_ledger(model_shape const& m, std::int64_t sequence) : shape_(m), sequence_(sequence) {
        using enum updated_by;
        std::int64_t const L = m.layers, w = m.width, routed = L * m.experts, met = L * m.top_k;
        entries_ = {
            {"embedding", m.vocabulary, w, 1, 1, adamw, false},
            {"query", m.query_width(), w, L, L, muon},
            {"key", m.kv_width(), w, L, L, muon},
            {"value", m.kv_width(), w, L, L, muon},
            {"attention gate", m.gate_width(), w, L, L, muon},
            {"attention output", w, m.query_width(), L, L, muon},
            {"router", m.experts, w, L, L, adamw},
            {"shared gate", m.shared_width, w, L, L, muon},
            {"shared up", m.shared_width, w, L, L, muon},
            {"shared down", w, m.shared_width, L, L, muon},
            {"expert gate", m.expert_width, w, routed, met, muon, true, true},
            {"expert up", m.expert_width, w, routed, met, muon, true, true},
            {"expert down", w, m.expert_width, routed, met, muon, true, true},
            {"head", m.vocabulary, w, 1, 1, adamw},
            {"norm gains", w, 1, 2 * L + 1, 2 * L + 1, adamw, false},
            {"qk-norm gains", m.head_dim, 1, 2 * L, 2 * L, adamw, false},
        };
    }

    std::vector<ledger_entry> const& entries() const { return entries_; }

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

    /// Flops a step (not a token) of orthogonalising every matrix of Muon in so many iterations. With n the smaller
    /// and m the larger side, plain: 4 m n^2 + 2 n^3 an iteration; symmetric: 3 m n^2 + n^3; gram: 3 m n^2 in all and
    /// 4 n^3 an iteration, less 3 n^3.
    double newton_schulz_flops(std::int64_t iterations, orthogonalisation form = orthogonalisation::plain) const {
        double sum = 0;
        for (auto const& e : entries_) {
            if (e.optimiser != updated_by::muon) continue;
            auto const n = static_cast<double>(e.outputs < e.inputs ? e.outputs : e.inputs);
            auto const m = static_cast<double>(e.outputs < e.inputs ? e.inputs : e.outputs);
            auto const t = static_cast<double>(iterations);
            double const one = form == orthogonalisation::plain       ? t * (4 * m * n * n + 2 * n * n * n)
                               : form == orthogonalisation::symmetric ? t * (3 * m * n * n + n * n * n)
                                                                      : 3 * m * n * n + (4 * t - 3) * n * n * n;
            sum += static_cast<double>(e.copies) * one;
        }
        return sum;
    }

    /// The ledger as a table.
    std::string table() const {
        std::string out = row("weights", "shape", "copies", "met", "parameters", "flop/token");
        for (auto const& e : entries_)
            out += row(e.name, shortest(e.outputs) + " x " + shortest(e.inputs), shortest(e.copies), shortest(e.met),
                       metric(static_cast<double>(e.parameters())), metric(e.flops()));
        out += row("attention", "causal", "", "", "", metric(attention_flops()));
        out += row("forward", "", "", "", metric(static_cast<double>(parameters())), metric(forward_flops()));
        return out + row("forward + backward", "", "", "", "", metric(training_flops()));
    }

private:
    static std::string row(std::string name, std::string const& shape, std::string const& copies,
                           std::string const& met, std::string const& parameters, std::string const& flops) {
        name.resize(20, ' ');
        auto const right = [](std::string const& text, std::size_t width) {
            return std::string(text.size() < width ? width - text.size() : 0, ' ') + text;
        };
        return name + right(shape, 12) + right(copies, 8) + right(met, 6) + right(parameters, 12) + right(flops, 12) +
               '\n';
    }

    model_shape shape_;
    std::int64_t sequence_;
    std::vector<ledger_entry> entries_;
};

} // namespace tiny_lm
