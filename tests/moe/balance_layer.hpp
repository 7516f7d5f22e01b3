// One layer's balancing state in memory of the test's own, and short ways to commit and update.
#pragma once

#include <vector>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/balance.hpp>
#include <support/data.hpp>

namespace keel_test {

using list = std::vector<int64_t>;

/// One layer's state over bytes that can be compared.
struct layer {
    std::vector<float> bias;
    list pending, ledger, signs;
    explicit layer(int64_t experts, int64_t micro_batches = 4)
        : bias(static_cast<std::size_t>(experts)), pending(bias.size()),
          ledger(static_cast<std::size_t>(keel::balance_ledger_size(micro_batches))), signs(bias.size()) {}
    keel::balance_state state() {
        return {keel::vec(bias.data(), static_cast<int64_t>(bias.size())), keel::vec(pending.data(), static_cast<int64_t>(pending.size())),
                keel::vec(ledger.data(), static_cast<int64_t>(ledger.size())), keel::vec(signs.data(), static_cast<int64_t>(signs.size()))};
    }
    bool same(layer const& o) const {
        return equal_bits(bias, o.bias) && pending == o.pending && ledger == o.ledger && signs == o.signs;
    }
};

inline keel::demand_counts demand_of(list& counts, int64_t tokens, int64_t k) {
    keel::demand_counts d;
    keel::demand_from_counts(keel::vec(counts.data(), static_cast<int64_t>(counts.size())), tokens, k, d).or_throw();
    return d;
}

inline keel::status update(layer& l, keel::step_gate const& gate = keel::open_gate(), keel::balance_options options = {}) {
    keel::demand_counts pending;
    keel::status const s = keel::pending_demand(l.state(), pending);
    return s.ok() ? keel::update_balance(keel::cpu{}, l.state(), keel::reduced_over_ranks(pending), gate, options) : s;
}

} // namespace keel_test
