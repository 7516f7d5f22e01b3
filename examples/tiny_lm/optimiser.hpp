// Who updates what: Muon the matrices of the layers, AdamW the embedding, the router, the head and the gains. Both obey one gate.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <keel/optim/adamw.hpp>
#include <keel/optim/muon.hpp>

#include "memory.hpp"
#include "parameters.hpp"

namespace tiny_lm {

/// Of one step.
struct learning_rates {
    double muon, adamw, weight_decay;
};

template <class Backend> class optimiser {
public:
    /// The parameters must stay where they are.
    explicit optimiser(parameter_list& parameters) {
        changes_.resize(parameters.size());
        std::size_t i = 0;
        for (auto& p : parameters) {
            keel::step_change* const change = &changes_[i++];
            if (p.optimiser == updated_by::adamw) {
                adamw_.push_back({&p, change});
                continue;
            }
            std::vector<keel::row_part> parts;
            for (auto const rows : p.parts) parts.push_back({"", rows, 1});
            auto const plan = keel::plan_muon(p.copies, p.rows, p.columns, parts.data(), static_cast<std::int64_t>(parts.size()));
            auto const stack = [&](auto& values) { return keel::cube(values.data(), p.copies, p.rows, p.columns); };
            keel::muon_parameter<> m{plan, stack(p.gradient), stack(p.master), stack(p.momentum), {}, change};
            if (!p.shadow.empty()) m.shadow = stack(p.shadow);
            muon_.push_back(m);
        }
    }

    /// One step of everything, or of nothing if the gate is closed. Returns the largest ||update|| / ||weight|| of Muon's matrices.
    double step(Backend const& be, keel::step_gate const& gate, learning_rates const& rates, scratch& ws) {
        auto const list = keel::vec<keel::muon_parameter<> const>(muon_.data(), static_cast<std::int64_t>(muon_.size()));
        keel::muon_step(be, list, gate,
                        {.learning_rate = static_cast<float>(rates.muon), .weight_decay = static_cast<float>(rates.weight_decay)},
                        ws(keel::muon_step_workspace(be, list)))
            .or_throw();
        for (auto const& [p, change] : adamw_) {
            keel::adamw_weights<> weights{.master = p->vector()};
            if (!p->shadow.empty()) weights.shadow = keel::vec(p->shadow.data(), p->size());
            keel::adamw_step(be, p->vector_gradient(), weights,
                             {.m = keel::vec(p->momentum.data(), p->size()), .v = keel::vec(p->second.data(), p->size()), .applied = &p->applied},
                             gate,
                             {.learning_rate = static_cast<float>(rates.adamw), .beta2 = 0.95f, .weight_decay = static_cast<float>(rates.weight_decay)},
                             change, ws(keel::adamw_step_workspace(p->size())))
                .or_throw();
        }
        double largest = 0;
        for (auto const& m : muon_) largest = std::max(largest, m.change->ratio());
        return largest;
    }

private:
    struct adamw_parameter {
        parameter* weights;
        keel::step_change* change;
    };
    std::vector<keel::muon_parameter<>> muon_;
    std::vector<adamw_parameter> adamw_;
    std::vector<keel::step_change> changes_;
};

} // namespace tiny_lm
