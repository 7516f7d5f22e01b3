// The balance line: what it shows of one layer, and when its alarm rings.
#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/health.hpp>
#include <keel/moe/health_text.hpp>
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

TEST_CASE("the line shows demand and served side by side, the bias, and the routed share beside its parameters") {
    layer l(4);
    keel::balance_options const options{.rate = 0.25f};
    step(l, {12, 4, 8, 8}, options);
    step(l, {4, 12, 8, 8}, options);
    l.bias = {0.5f, -0.25f, 0.0f, 0.125f};
    counted c({200, 100, 99, 1}, keel::capacity_limit::factor(5, 4)); // capacity 125
    keel::balance_line line;
    keel::measure_balance(c.demand, c.served, l.state(), line, {.output = 0.2204, .norm = 0.25, .parameters = 0.8975}).or_throw();
    CHECK(line.experts == 4);
    CHECK(line.demand_max == 2.0);
    CHECK(line.served_max == Approx(125 * 4 / 325.0));
    CHECK(line.dropped == Approx(75.0 / 400));
    CHECK(line.bias_spread == 0.75f);
    CHECK(line.bias_moved == 2); // 8 is the mean
    CHECK(line.sign_flips == 0.5);
    CHECK(std::string(keel::balance_text(line).c_str()) ==
          "demand 2.00x (min 0.01, entropy 0.760) | served 1.54x (min 0.01, entropy 0.801) | dropped 18.8% | dead 0 | bias spread 0.7500, "
          "2 of 4 moved, 50.0% turned round | routed 22.0% of the output (norm 25.0%), 89.8% of the parameters");
    // What nobody gave is left out, and what is frozen or broken is said.
    step(l, {12, 4, 8, 8}, {.frozen = true});
    keel::balance_state bare = l.state();
    bare.signs = {};
    keel::measure_balance(c.demand, c.served, bare, line, {.parameters = 0.9}).or_throw();
    CHECK(line.sign_flips != line.sign_flips);
    CHECK(line.bias_frozen);
    CHECK(std::string(keel::balance_text(line).c_str()).ends_with("| dead 0 | bias spread 0.7500, frozen | routed 90.0% of the parameters"));
    line.shares = {.output = -0.05, .norm = 1.0};
    line.bias_nan = 1, line.bias_spread = 1e30f;
    line.still_updates = 2;
    std::string const text = keel::balance_text(line).c_str();
    CHECK(text.find("bias spread over 1e14, frozen | routed -5.0% of the output (norm 100.0%) | ALARM: NaN in the bias | ALARM: capacity") != text.npos);
}

TEST_CASE("a frozen bias is no still bias: it is still by intent, and the line says so") {
    counted c({150, 110, 80, 60}, keel::capacity_limit::factor(1, 1));
    layer l(4);
    for (int s = 0; s < 5; ++s) step(l, c.asked, {.rate = 0.25f, .frozen = true});
    CHECK(line_of(c, l).bias_frozen);
    CHECK_FALSE(line_of(c, l).concealed());
    // At rate 0 nobody has said so.
    for (int s = 0; s < 2; ++s) step(l, c.asked, {.rate = 0.0f});
    CHECK_FALSE(line_of(c, l).bias_frozen);
    CHECK(line_of(c, l).concealed());
}

TEST_CASE("a bias that swings turns many signs each step, one that arrives turns few") {
    layer l(4);
    for (int s = 0; s < 6; ++s) step(l, s % 2 == 0 ? list{12, 4, 12, 4} : list{4, 12, 4, 12}, {.rate = 0.25f});
    counted c({12, 4, 12, 4}, keel::capacity_limit::dropless());
    CHECK(line_of(c, l).sign_flips == 1.0);
    step(l, {5, 11, 7, 9}, {.rate = 0.25f}); // the same way as the last
    CHECK(line_of(c, l).sign_flips == 0.0);
}

TEST_CASE("no tokens: every ratio is 0, none is a division by zero") { // prime-rl's MaxVio of nothing
    counted c({0, 0, 0, 0}, keel::capacity_limit::factor(1, 1));
    layer l(4);
    keel::balance_line const line = line_of(c, l);
    for (double x : {line.demand_max, line.served_max, line.demand_min, line.served_min, line.demand_entropy, line.served_entropy, line.dropped}) CHECK(x == 0.0);
    CHECK(line.dead == 0);
    CHECK_FALSE(line.concealed());
}

TEST_CASE("two layers are two lines: the mean of both would show neither's fault") {
    counted good({10, 10, 10, 10}, keel::capacity_limit::factor(1, 1)), bad({25, 5, 5, 5}, keel::capacity_limit::factor(1, 1));
    layer a(4), b(4);
    list flat{10, 10, 10, 10};
    for (int s = 0; s < 2; ++s) step(a, flat, {}), step(b, flat, {});
    CHECK_FALSE(line_of(good, a).concealed());
    CHECK(line_of(bad, b).concealed());
    // Added up over layers, as some logs do, the same four experts look almost well.
    list sum(4);
    keel::demand_counts both(keel::vec(sum.data(), 4));
    for (int n = 0; n < 3; ++n) keel::add_counts(both, good.demand).or_throw();
    keel::add_counts(both, bad.demand).or_throw();
    CHECK(keel::max_over_mean(both) == Approx(1.375));
    CHECK(line_of(bad, b).demand_max == 2.5);
}
