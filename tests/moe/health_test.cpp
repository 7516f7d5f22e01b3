// The balance line: what it shows of one layer, and when its alarm rings.
#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/health.hpp>
#include <moe/balance_layer.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

/// Demand and what was served of it, over memory of its own.
struct counted {
    list asked, given;
    guarded_matrix<int64_t> slots, offsets;
    keel::demand_counts demand;
    keel::served_counts served;

    /// One expert a token, capacity as a factor of the mean.
    counted(list counts, keel::capacity_limit limit)
        : asked(counts), given(counts.size()), slots(sum(counts), 1), offsets(1, static_cast<int64_t>(counts.size()) + 1),
          demand(demand_of(asked, sum(counts), 1)), served(keel::vec(given.data(), static_cast<int64_t>(given.size()))) {
        guarded_matrix<int32_t> ids(sum(counts), 1);
        for (int64_t t = 0, e = 0; e < demand.experts(); ++e)
            for (int64_t i = 0; i < demand[e]; ++i) ids.set(t++, 0, static_cast<int32_t>(e));
        scratch ws(keel::apply_capacity_workspace(sum(counts), demand.experts()));
        keel::apply_capacity(keel::cpu{}, ids.view(), demand, {slots.view(), offsets.vec()}, served, {.limit = limit}, ws.get()).or_throw();
    }
    static int64_t sum(list const& counts) {
        int64_t total = 0;
        for (int64_t c : counts) total += c;
        return total;
    }
};

/// One step of these counts.
void step(layer& l, list counts, keel::balance_options options) {
    keel::commit(keel::cpu{}, l.state(), demand_of(counts, counted::sum(counts), 1), {.step = l.ledger[0]}).or_throw();
    update(l, keel::open_gate(), options).or_throw();
}
keel::balance_line line_of(counted& c, layer& l) {
    keel::balance_line line;
    keel::measure_balance(c.demand, c.served, l.state(), line).or_throw();
    return line;
}

} // namespace

TEST_CASE("a load within the deadband is left alone by intent: no alarm; beyond it a still bias is told something else") {
    keel::balance_options const options{.rate = 0.25f, .deadband = 0.3f};
    counted within({125, 115, 90, 70}, keel::capacity_limit::factor(1, 1)), beyond({150, 110, 80, 60}, keel::capacity_limit::factor(1, 1));
    layer honest(4), fooled(4);
    for (int s = 0; s < 3; ++s) {
        step(honest, within.asked, options);
        step(fooled, beyond.given, options); // 100, 100, 80, 60: nobody is 30% off their mean of 85
    }
    keel::balance_line line = line_of(within, honest);
    CHECK(line.still_updates == 3);
    CHECK(line.deadband == Approx(0.3));
    CHECK(line.demand_max > 1.05 * line.served_max);
    CHECK_FALSE(line.concealed());
    line = line_of(beyond, fooled);
    CHECK(line.still_updates == 3);
    CHECK(line.concealed());
    CHECK(line.demand_max == 1.5);
    CHECK(line.served_max == Approx(100.0 / 85));
}
