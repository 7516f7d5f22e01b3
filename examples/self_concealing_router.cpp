// A router that hides its own fault: one skewed workload, a balancing bias fed with what was asked for, and one fed with what was
// left after tokens were dropped for capacity. Each has its log, and the truth beside it.
//
//     self_concealing_router                prints both, and says what to see; fails where a claim of its text does not hold
//     self_concealing_router numbers.csv    also writes every step; plot_self_concealing_router.py draws it
//
// Only the first of the two is written with keel's update: it takes demand by type, served counts do not compile. The second is
// done by hand here, as trainers do it that count after the drop.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <keel/keel.hpp>

namespace {

using keel::demand_counts, keel::served_counts;

constexpr int64_t tokens = 2048, experts = 16, k = 2, steps = 200;
constexpr float rate = 0.004f;

template <class T> using list = std::vector<T>;
auto count_of(auto const& v) { return static_cast<int64_t>(v.size()); }

/// The router's logits at one step: normal numbers, and a taste that all tokens share, most of all for the last expert.
list<float> logits_of(int64_t step) {
    list<float> z(static_cast<std::size_t>(tokens * experts));
    for (std::size_t i = 0; i < z.size(); ++i) {
        std::size_t const e = i % experts;
        float const taste = 0.04f * static_cast<float>(e) + (e + 1 == experts ? 1.5f : 0.0f);
        z[i] = keel::random_normal({.seed = 7, .step = static_cast<uint32_t>(step)}, i) + taste;
    }
    return z;
}

/// What the bias is told.
enum class told { demand, served, padded };
char const* name_of(told t) { return t == told::demand ? "demand" : t == told::served ? "served" : "padded"; }

/// The sign rule with its deadband on any counts, by hand: keel's own takes demand only.
void hand_update(list<float>& bias, list<int64_t> const& counts, float deadband) {
    double total = 0;
    for (int64_t c : counts) total += static_cast<double>(c);
    double const mean = total / experts;
    for (std::size_t e = 0; e < bias.size(); ++e) {
        double const missing = mean - static_cast<double>(counts[e]);
        if (std::fabs(missing) > static_cast<double>(deadband) * mean) bias[e] += missing > 0 ? rate : -rate;
    }
}

double max_over_mean(list<int64_t> const& counts) {
    double total = 0, top = 0;
    for (int64_t c : counts) total += static_cast<double>(c), top = std::fmax(top, static_cast<double>(c));
    return top * experts / total;
}

/// One router with its bias, its capacity and what it is told.
struct controlled {
    told fed;
    float deadband;
    int64_t quarters; ///< capacity in quarters of the mean load
    bool same = true; ///< the rule by hand and keel's have given the same bits so far

    list<float> bias = list<float>(experts), by_hand = bias;
    list<int64_t> pending = list<int64_t>(experts), signs = pending, ledger = list<int64_t>(keel::balance_ledger_size(1));
    int64_t still = 0; ///< updates in a row that moved nothing
    int64_t rang = 0;  ///< steps with an alarm
    double shown = 0;  ///< busiest expert over the mean in the counts that the bias was told
    keel::balance_line line{};

    keel::balance_state state() {
        return {keel::vec(bias.data(), experts), keel::vec(pending.data(), experts), keel::vec(ledger.data(), count_of(ledger)),
                keel::vec(signs.data(), experts)};
    }

    void step(int64_t number, list<float>& logits) {
        keel::cpu<> const be;
        list<int32_t> ids(tokens * k);
        list<float> weights(tokens * k);
        list<int64_t> asked(experts), given(experts), slots(tokens * k), offsets(experts + 1);
        list<std::byte> scratch(static_cast<std::size_t>(keel::route_workspace(tokens, experts) + keel::apply_capacity_workspace(tokens, experts)));
        keel::workspace const ws{scratch.data(), count_of(scratch)};
        auto const id = keel::rows(ids.data(), tokens, k);

        demand_counts demand(keel::vec(asked.data(), experts));
        served_counts served(keel::vec(given.data(), experts));
        keel::route(be, keel::rows(logits.data(), tokens, experts), {.bias = state().bias}, id, keel::rows(weights.data(), tokens, k), demand,
                    {}, {}, ws)
            .or_throw();
        auto const limit = keel::capacity_limit::factor(quarters, 4);
        keel::apply_capacity(be, id, demand, {keel::rows(slots.data(), tokens, k), keel::vec(offsets.data(), experts + 1)}, served,
                             {.limit = limit}, ws)
            .or_throw();

        list<float> const before = bias;
        if (fed == told::demand) {
            keel::commit(be, state(), demand, {.step = number}).or_throw();
            keel::demand_counts all;
            keel::pending_demand(state(), all).or_throw();
            keel::update_balance(be, state(), keel::reduced_over_ranks(all), keel::open_gate(),
                                 {.rule = keel::balance_rule::sign, .rate = rate, .deadband = deadband})
                .or_throw();
            // keel::update_balance(be, state(), served, keel::open_gate());      does not compile, and so it should be
            hand_update(by_hand, asked, deadband);
            same = same && by_hand == bias;
            shown = keel::max_over_mean(demand);
        } else {
            // Padded: every expert's rows are filled up to its capacity, and the map of the filled rows is what is counted.
            list<int64_t> const counts = fed == told::served ? given : list<int64_t>(experts, limit.tokens_an_expert(tokens, k, experts));
            hand_update(bias, counts, deadband);
            shown = max_over_mean(counts);
        }
        still = bias == before ? still + 1 : 0;
        keel::measure_balance(demand, served, state(), line).or_throw();
        line.still_updates = still, line.deadband = static_cast<double>(deadband); // of the rule by hand too
        rang += line.concealed() ? 1 : 0;
    }
};

void by_hand_on_four_experts() {
    list<int64_t> const demand{10, 6, 5, 3}, served{6, 6, 5, 3}; // capacity 6, the mean of the demand
    list<float> honest(4), fooled(4);
    auto const sign = [](list<int64_t> const& c, list<float>& move) {
        int64_t total = 0;
        for (int64_t n : c) total += n;
        for (std::size_t e = 0; e < 4; ++e) move[e] = static_cast<float>((total > 4 * c[e]) - (total < 4 * c[e]));
    };
    sign(demand, honest), sign(served, fooled);
    std::printf("Four experts of capacity 6 are asked for by 10, 6, 5 and 3 tokens, and serve 6, 6, 5 and 3:\n\n");
    for (auto const* move : {&honest, &fooled})
        std::printf("    %s  %+2.0f %+2.0f %+2.0f %+2.0f\n", move == &honest ? "each bias should move by     " : "told what was served, it does",
                    static_cast<double>((*move)[0]), static_cast<double>((*move)[1]), static_cast<double>((*move)[2]),
                    static_cast<double>((*move)[3]));
    std::printf("\nTwo of four are wrong, and the busiest expert is logged at 1.20 times the mean instead of 1.67.\n\n");
}

int claims_broken = 0;
void claim(bool holds, char const* what) {
    if (holds) return;
    std::printf("DOES NOT HOLD: %s\n", what);
    ++claims_broken;
}

void skewed_work(std::FILE* csv) {
    list<controlled> all;
    for (int64_t quarters : {4, 5})
        for (float deadband : {0.0f, 0.3f})
            for (told fed : {told::demand, told::served, told::padded}) all.push_back({.fed = fed, .deadband = deadband, .quarters = quarters});
    controlled const *const honest = &all[3], *const fooled = &all[4], *const padded = &all[5]; // capacity 1, a deadband

    std::printf("%lld tokens a step choose %lld of %lld experts, one of which they all like more. A bias on each expert moves by %.3f a\n"
                "step against the sign of its load, or only where that is 30 %% off the mean. Busiest expert\nover the mean, capacity 1.00, 30 %%:\n\n",
                static_cast<long long>(tokens), static_cast<long long>(k), static_cast<long long>(experts), static_cast<double>(rate));
    std::printf("%6s | %-19s | %-19s | %-19s\n", "", "told demand", "told served", "told padded");
    std::printf("%6s | %9s %9s | %9s %9s | %9s %9s\n", "step", "log shows", "true", "log shows", "true", "log shows", "true");
    for (int64_t s = 0; s < steps; ++s) {
        auto logits = logits_of(s);
        for (controlled& c : all) {
            c.step(s, logits);
            if (csv != nullptr)
                std::fprintf(csv, "%s,%.2f,%g,%lld,%.6g,%.6g,%.6g\n", name_of(c.fed), static_cast<double>(c.quarters) / 4,
                             static_cast<double>(c.deadband), static_cast<long long>(s), c.shown, c.line.demand_max, c.line.dropped);
        }
        if (s != 0 && (s + 1) % 40 != 0) continue;
        std::printf("%6lld", static_cast<long long>(s + 1));
        for (controlled const* c : {honest, fooled, padded}) std::printf(" | %9.2f %9.2f", c->shown, c->line.demand_max);
        std::printf("\n");
    }

    std::printf("\nAfter %lld steps:\n\n%8s | %8s | %7s | %9s | %6s | %8s | %11s | %s\n", static_cast<long long>(steps), "capacity", "deadband",
                "told", "log shows", "true", "dropped", "bias spread", "steps with keel's alarm");
    for (controlled const& c : all)
        std::printf("%8.2f | %6.0f %% | %7s | %9.2f | %6.2f | %6.1f %% | %11.2f | %lld\n", static_cast<double>(c.quarters) / 4,
                    100 * static_cast<double>(c.deadband), name_of(c.fed), c.shown, c.line.demand_max, 100 * c.line.dropped,
                    static_cast<double>(c.line.bias_spread), static_cast<long long>(c.rang));

    for (controlled const& c : all) {
        bool const wide = c.deadband > 0;
        if (c.fed == told::demand) {
            claim(c.same && c.shown == c.line.demand_max, "by demand, the rule by hand is keel's to the bit, and the log is the truth");
            claim(c.line.demand_max < (wide ? 1.45 : 1.25), "by demand, the load comes to the deadband's edge or to the mean");
            claim(c.rang == 0, "by demand, there is never an alarm");
        }
        if (c.fed == told::served) {
            if (wide || c.quarters == 4) claim(c.shown < c.line.demand_max, "by served counts, the log flatters");
            if (wide) claim(c.line.demand_max > 1.45 && c.shown < 1.35, "by served counts with a deadband, the bias rests while the load is skewed");
            if (wide) claim(c.rang > steps / 4, "by served counts with a deadband, the alarm rings");
        }
        if (c.fed == told::padded) {
            claim(c.line.bias_spread == 0.0f && c.shown == 1.0, "by the padded map, the bias never moves and the log is perfect");
            claim(c.line.demand_max > 4 && c.line.dropped > 0.25 && c.rang > steps - 3, "by the padded map, nothing is corrected, and the alarm rings");
        }
    }
    std::printf(
        "\nWhat to see: told what was asked for, the bias brings the load to the mean, or to the edge of its deadband, and the log is the\n"
        "truth. Told what was served, all that an expert was asked for beyond its capacity is gone before it is counted. The plain sign\n"
        "rule still sees a full expert above the mean of what is left and gets somewhere; with a deadband the flattened counts lie\n"
        "within it, the bias rests, and the log shows a healthy router while one expert is asked for by four times its share. Counted\n"
        "from a map that is padded to capacity, all experts are equal for ever: the bias never moves from 0. That is why keel's\n"
        "update takes demand by type, and why its line prints both and rings where they disagree while the bias is still.\n");
}

} // namespace

int main(int argc, char** argv) {
    if (argc > 2 || (argc == 2 && std::string(argv[1]).starts_with("-"))) {
        std::fputs("self_concealing_router [numbers.csv]: a balancing bias told of demand, and one told of what was served\n", stderr);
        return 2;
    }
    std::FILE* const csv = argc == 2 ? std::fopen(argv[1], "w") : nullptr;
    if (argc == 2 && csv == nullptr) {
        std::fprintf(stderr, "self_concealing_router: cannot write %s\n", argv[1]);
        return 2;
    }
    if (csv != nullptr) std::fputs("told,capacity,deadband,step,shown,true,dropped\n", csv);
    by_hand_on_four_experts();
    skewed_work(csv);
    bool const written = csv == nullptr || (std::ferror(csv) == 0 && std::fclose(csv) == 0);
    if (!written) std::fprintf(stderr, "self_concealing_router: cannot write %s\n", argv[1]);
    return written && claims_broken == 0 ? 0 : 1;
}
