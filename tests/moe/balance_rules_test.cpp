// The update rules by their formulas: deadband, freezing, sign flips, centring; what a skip and a checkpoint keep.
#include <cmath>
#include <limits>
#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/balance.hpp>
#include <moe/balance_layer.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::balance_rule, keel::status_code;

namespace {

constexpr balance_rule count_rules[] = {balance_rule::sign, balance_rule::centred_sign, balance_rule::proportional};

/// The directions as their definitions say, in double.
std::vector<double> directions(list const& counts, balance_rule rule, double deadband) {
    double const experts = static_cast<double>(counts.size());
    double total = 0, mean_move = 0;
    for (int64_t c : counts) total += static_cast<double>(c);
    double const mean = total / experts;
    std::vector<double> d;
    for (int64_t c : counts) {
        double const short_by = mean - static_cast<double>(c);
        bool const still = std::abs(short_by) <= deadband * mean;
        double const own = rule == balance_rule::proportional ? short_by / total : short_by > 0 ? 1.0 : -1.0;
        d.push_back(still ? 0.0 : own);
        mean_move += d.back() / experts;
    }
    if (rule != balance_rule::sign)
        for (double& x : d) x -= mean_move;
    return d;
}

/// Commits these counts as one step and updates.
void step(layer& l, list counts, int64_t k, keel::balance_options options, keel::step_gate const& gate = keel::open_gate()) {
    int64_t total = 0;
    for (int64_t c : counts) total += c;
    int64_t const next = l.ledger[0];
    keel::commit(keel::cpu{}, l.state(), demand_of(counts, total / k, k), {.step = next}).or_throw();
    update(l, gate, options).or_throw();
}

} // namespace

TEST_CASE("within the deadband an expert asks for nothing, and every rule is its formula with that") {
    // mean 100; 75 and 125 lie on the edge of a deadband of a quarter, 74 and 126 beyond it; those beyond do not sum to 0
    list const counts{75, 74, 125, 126, 100, 150, 60, 90};
    for (balance_rule rule : count_rules)
        for (float deadband : {0.0f, 0.25f, 0.255f, 0.39f, 0.5f, 10.0f}) {
            INFO("rule " << static_cast<int>(rule) << ", deadband " << deadband);
            layer l(8);
            for (std::size_t e = 0; e < 8; ++e) l.bias[e] = 0.125f * static_cast<float>(e);
            layer const start = l;
            step(l, counts, 2, {.rule = rule, .rate = 0.5f, .deadband = deadband});
            auto const wanted = directions(counts, rule, static_cast<double>(deadband));
            int64_t moved = 0;
            for (std::size_t e = 0; e < 8; ++e) {
                double const old = static_cast<double>(start.bias[e]);
                // the direction's division and two conversions, then one rounding of a sum below 2
                CHECK(static_cast<double>(l.bias[e]) == Approx(old + 0.5 * wanted[e]).epsilon(0).margin(0x1p-22));
                moved += l.bias[e] != start.bias[e] ? 1 : 0;
            }
            CHECK(l.ledger[5] == moved);
            CHECK((l.ledger[7] == 1) == (deadband >= 0.5f)); // nobody is further than half from the mean: a still update
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                layer other = start;
                list copy = counts;
                keel::commit(be, other.state(), demand_of(copy, 400, 2), {}).or_throw();
                keel::demand_counts pending;
                keel::pending_demand(other.state(), pending).or_throw();
                keel::update_balance(be, other.state(), keel::reduced_over_ranks(pending), keel::open_gate(),
                                     {.rule = rule, .rate = 0.5f, .deadband = deadband})
                    .or_throw();
                CHECK(other.same(l));
            });
        }
}

TEST_CASE("no deadband stands still at an imbalance of one token, or moves at none, however large the counts") {
    int64_t const most = int64_t{1} << 42;
    for (balance_rule rule : count_rules) {
        layer l(4);
        step(l, {most / 4 + 1, most / 4, most / 4, most / 4 - 1}, 1, {.rule = rule, .rate = 1.0f});
        CHECK(l.bias[0] < 0.0f);
        CHECK(l.bias[1] == 0.0f);
        CHECK(l.bias[3] > 0.0f);
    }
}

TEST_CASE("an expert whose correction turns round is a flip; one that waits in between turns round all the same") {
    layer l(4);
    keel::balance_options const options{.rate = 0.25f, .deadband = 0.25f};
    step(l, {12, 4, 8, 8}, 1, options);
    CHECK(l.signs == list{-1, 1, 0, 0});
    CHECK(l.ledger[8] == 0); // nobody had a direction before
    step(l, {4, 12, 8, 8}, 1, options);
    CHECK(l.signs == list{1, -1, 0, 0});
    CHECK(l.ledger[8] == 2);
    step(l, {8, 8, 12, 4}, 1, options); // the first two wait, the others begin
    CHECK(l.signs == list{1, -1, -1, 1});
    CHECK(l.ledger[8] == 0);
    step(l, {12, 12, 4, 4}, 1, options);
    CHECK(l.signs == list{-1, -1, 1, 1});
    CHECK(l.ledger[8] == 2);
    // A state without signs moves its bias alike and counts no flips.
    layer plain(4), kept(4);
    list counts{12, 4, 8, 8};
    keel::balance_state bare = plain.state();
    bare.signs = {};
    for (int64_t s = 0; s < 2; ++s) {
        keel::commit(keel::cpu{}, bare, demand_of(counts, 32, 1), {.step = s}).or_throw();
        keel::demand_counts pending;
        keel::pending_demand(bare, pending).or_throw();
        keel::update_balance(keel::cpu{}, bare, keel::reduced_over_ranks(pending), keel::open_gate(), options).or_throw();
        step(kept, counts, 1, options);
        counts = {4, 12, 8, 8};
    }
    CHECK(equal_bits(plain.bias, kept.bias));
    CHECK(plain.ledger[8] == 0);
    CHECK(kept.ledger[8] == 2);
}

TEST_CASE("a frozen bias keeps its bytes while steps go on, and counting resumes where it is let go") { // PaddleFormers #4773
    layer l(4);
    step(l, {12, 4, 8, 8}, 1, {.rate = 0.25f});
    layer const before = l;
    for (int64_t s = 1; s < 4; ++s) step(l, {4, 12, 8, 8}, 1, {.rate = 0.25f, .frozen = true});
    CHECK(equal_bits(l.bias, before.bias));
    CHECK(l.signs == before.signs);
    CHECK(l.pending == list(4, 0)); // what was asked for while it was frozen is not owed later
    CHECK(l.ledger[0] == 4);        // the steps are done: a late commit of one of them is late
    CHECK(l.ledger[7] == 0);        // and not a bias that fails to move
    CHECK(l.ledger[9] == 1);
    step(l, {12, 4, 8, 8}, 1, {.rate = 0.25f});
    CHECK(l.ledger[9] == 0);
    layer once(4);
    step(once, {12, 4, 8, 8}, 1, {.rate = 0.25f});
    step(once, {12, 4, 8, 8}, 1, {.rate = 0.25f});
    CHECK(equal_bits(l.bias, once.bias));
    // Frozen and skipped: the step never happened.
    layer const now = l;
    step(l, {4, 12, 8, 8}, 1, {.rate = 0.25f, .frozen = true}, keel::step_gate{});
    CHECK(l.same(now));
}

TEST_CASE("a skipped step leaves the signs too, and the flips of the step before") {
    layer l(4);
    step(l, {12, 4, 8, 8}, 1, {.rate = 0.25f});
    step(l, {4, 12, 8, 8}, 1, {.rate = 0.25f});
    layer const before = l;
    step(l, {12, 4, 6, 10}, 1, {.rate = 0.25f}, keel::step_gate{});
    CHECK(l.same(before));
    CHECK(l.ledger[8] == 2);
}

TEST_CASE("a state restored from its bytes in the middle of a step goes on as if it had never stopped") { // torchtitan #1304, DeepSpeed #8369
    list a{10, 6, 5, 3}, b{1, 2, 3, 6}, c{0, 6, 6, 0};
    auto const rest = [&](layer& l) {
        keel::commit(keel::cpu{}, l.state(), demand_of(a, 12, 2), {.step = 1, .micro_batch = 0}).or_throw(); // recomputed: once
        keel::commit(keel::cpu{}, l.state(), demand_of(b, 6, 2), {.step = 1, .micro_batch = 1}).or_throw();
        update(l, keel::open_gate(), {.rate = 0.25f}).or_throw();
    };
    layer l(4);
    step(l, c, 2, {.rate = 0.25f});
    keel::commit(keel::cpu{}, l.state(), demand_of(a, 12, 2), {.step = 1, .micro_batch = 0}).or_throw();
    layer restored = l; // the bytes of all tensors
    rest(l);
    rest(restored);
    CHECK(l.same(restored));
    CHECK(l.bias[0] == -0.0625f); // by 0, 6, 6, 0 up a quarter; by 11, 8, 8, 9 down a quarter and the mean of -1, 1, 1, 0 of one
    // Back to an older checkpoint: steps that come again are counted again, not taken for late ones.
    layer older(4);
    layer const start = older;
    step(older, c, 2, {.rate = 0.25f});
    auto const first = older.bias;
    older = start;
    step(older, c, 2, {.rate = 0.25f});
    CHECK(equal_bits(older.bias, first));
    // A bias without its ledger, from another trainer, is kept and corrected from there.
    layer foreign(4);
    foreign.bias = {0.5f, 0.25f, -0.25f, -0.5f};
    step(foreign, {12, 4, 8, 8}, 1, {.rule = balance_rule::sign, .rate = 0.25f});
    CHECK(foreign.bias == std::vector<float>{0.25f, 0.5f, -0.25f, -0.5f});
}

TEST_CASE("the mean of a centred bias stays where it was over many steps; that of the sign rule drifts off") {
    // One expert in eight is hot: the sign rule adds 6/8 of the rate to the mean of all, every step.
    list const counts{72, 8, 8, 8, 8, 8, 8, 8};
    for (balance_rule rule : count_rules) {
        layer l(8);
        for (int64_t s = 0; s < 4000; ++s) step(l, counts, 1, {.rule = rule, .rate = 1e-3f});
        double sum = 0;
        for (float b : l.bias) sum += static_cast<double>(b);
        if (rule == balance_rule::sign) CHECK(sum / 8 == Approx(4000 * 1e-3 * 6 / 8).epsilon(1e-3));
        else CHECK(std::abs(sum / 8) < 4000 * 8.0 * 0x1p-24); // each move rounds by half an ulp of a bias below 8 at most
    }
}

TEST_CASE("centre_bias takes away what all share and changes no selection that its digits could tell") { // tt-metal #47914
    int64_t const tokens = 300, experts = 16, k = 3;
    guarded_matrix<float> logits(tokens, experts, 0, floats(data_kind::normal, tokens * experts, 5));
    std::vector<float> const small = floats(data_kind::normal, experts, 6);
    layer l(experts), apart(experts);
    for (std::size_t e = 0; e < 16; ++e) {
        l.bias[e] = 34.5f + std::ldexp(std::nearbyint(std::ldexp(0.14f * small[e], 18)), -18); // all digits fit beside 34.5
        apart.bias[e] = l.bias[e] - 34.5f;                                                     // exact
    }
    keel::centre_bias(keel::cpu{}, l.state()).or_throw();
    double sum = 0;
    for (float b : l.bias) sum += static_cast<double>(b);
    CHECK(std::abs(sum) < 16 * 0x1p-26); // half an ulp of each, all below 0.5
    routed<> centred(tokens, experts, k), wanted(tokens, experts, k);
    centred.run(keel::cpu{}, logits.view(), {.bias = l.state().bias}).or_throw();
    wanted.run(keel::cpu{}, logits.view(), {.bias = apart.state().bias}).or_throw();
    CHECK(centred.ids.contents() == wanted.ids.contents());
    layer const once = l;
    keel::centre_bias(keel::cpu{}, l.state()).or_throw();
    for (std::size_t e = 0; e < 16; ++e) CHECK(l.bias[e] == Approx(once.bias[e]).margin(0x1p-26));

    // Not while a step is open, whose micro-batches were routed with this bias; not what no mean can be taken of.
    list a{10, 6, 5, 3};
    layer open(4);
    open.bias = {1.0f, 2.0f, 3.0f, 4.0f};
    keel::commit(keel::cpu{}, open.state(), demand_of(a, 12, 2), {}).or_throw();
    layer const before = open;
    CHECK(keel::centre_bias(keel::cpu{}, open.state()).code == status_code::bad_state);
    CHECK(open.same(before));
    for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
        layer broken(4);
        broken.bias[2] = bad;
        CHECK(keel::centre_bias(keel::cpu{}, broken.state()).message() ==
              "centre_bias: state.bias has a number that is not finite at expert = 2, wanted none (bad_state)");
    }
    layer none(0);
    CHECK(keel::centre_bias(keel::cpu{}, none.state()).ok());
}

TEST_CASE("a bad rule, rate or deadband, or signs of another shape, are refused before anything moves") {
    list a{10, 6, 5, 3};
    layer l(4);
    keel::commit(keel::cpu{}, l.state(), demand_of(a, 12, 2), {}).or_throw();
    layer const before = l;
    for (float bad : {-0.1f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
        auto const s = update(l, keel::open_gate(), {.deadband = bad});
        CHECK(s.code == status_code::bad_option);
        CHECK(std::string(s.argument) == "options.deadband");
    }
    CHECK(update(l, keel::open_gate(), {.rule = static_cast<balance_rule>(9)}).code == status_code::bad_option);
    keel::balance_state s = l.state();
    s.signs = keel::vec(l.signs.data(), 3);
    CHECK(keel::centre_bias(keel::cpu{}, s).code == status_code::bad_shape);
    s.signs = l.state().pending;
    CHECK(keel::centre_bias(keel::cpu{}, s).code == status_code::overlap);
    CHECK(l.same(before));
}
