// What capacity costs and what it buys: the capacity factor against the share of assignments dropped, the time of a whole layer of
// experts, forward, and the price of each assignment that the larger factor recovers. One thread, its processor time, in turns with factor 1.
//
//     dropped            share of assignments dropped
//     recovered          share that factor 1 dropped and this one serves
//     of_factor_1        the layer's time as a multiple of that at factor 1
//     us_a_recovered     time on top of factor 1's, for each recovered assignment
//     price              that, over what an assignment costs at factor 1: 1 where the recovered ones cost what the others do
//
// ragged: keel's rows, of served assignments only. padded: experts work on their whole capacity, filled or not, as static shapes
// make them (the products are of experts * capacity rows; gather and sum move the served ones). spare_n: overflow asks a token's n next
// choices before it is dropped, and what they recover counts with what the factor does: at factor 1 it is all theirs. The load: a skew that
// all tokens share, as before a balancing bias has moved.
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/core/random.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/route_weights.hpp>
#include <keel/nn/swiglu.hpp>

#include "support/in_turns.hpp"
#include "support/peak.hpp"

namespace {

using namespace keel;

constexpr int64_t tokens = 2048, experts = 16, k = 2, width = 256, hidden = 256;

template <class T> auto filled(int64_t count, uint32_t seed, float size) {
    keel_bench::aligned_vector<T> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = encode<T>(size * random_normal({.seed = seed}, i));
    return values;
}

/// One layer at one capacity, with all of its buffers.
class layer {
  public:
    layer(capacity_limit limit, bool padded, int64_t spare)
        : limit_(limit), capacity_(limit.tokens_an_expert(tokens, k, experts)), spare_(spare), padded_(padded), x_(filled<bf16>(tokens * width, 1, 1.0f)),
          gate_up_(filled<bf16>(experts * 2 * hidden * width, 2, 0.06f)), down_(filled<bf16>(experts * width * hidden, 3, 0.06f)),
          logits_(filled<float>(tokens * experts, 4, 1.0f)), weights_(size(tokens * k)), choices_(size(tokens * (k + spare))), ids_(size(tokens * k)), asked_(size(experts)),
          given_(size(experts)), slots_(size(tokens * k)), offsets_(size(experts + 1)), blocks_(size(experts + 1)),
          memory_(size(route_workspace(tokens, experts) + reroute_overflow_workspace(tokens, experts, k, spare) +
                       matmul_workspace(cpu<>{}, rows_at_most(), 2 * hidden, width, experts) +
                       matmul_workspace(cpu<>{}, rows_at_most(), width, hidden, experts))),
          rows_(size(rows_at_most() * width)), both_(size(rows_at_most() * 2 * hidden)), active_(size(rows_at_most() * hidden)),
          out_(rows_.size()), y_(x_.size()), demand_(vec(asked_.data(), experts)), served_(vec(given_.data(), experts)) {
        for (std::size_t i = 0; i < logits_.size(); ++i) logits_[i] += 0.1f * static_cast<float>(i % experts);
        for (int64_t e = 0; e <= experts; ++e) blocks_[static_cast<std::size_t>(e)] = e * capacity_;
    }

    void operator()() {
        cpu<> const be;
        auto const choices = rows(choices_.data(), tokens, k + spare_);
        auto const z = rows(logits_.data(), tokens, experts);
        auto const w = rows(weights_.data(), tokens, k);
        expert_slots const where{rows(slots_.data(), tokens, k), vec(offsets_.data(), experts + 1)};
        route(be, z, {}, choices, w, demand_, {}, {.spare = spare_}, ws()).or_throw();
        if (spare_ == 0) apply_capacity(be, choices, demand_, where, served_, {.limit = limit_}, ws()).or_throw();
        else {
            auto const ids = rows(ids_.data(), tokens, k);
            reroute_overflow(be, choices, {}, demand_, ids, where, served_, {}, {.limit = limit_}, ws()).or_throw();
            route_weights(be, z, ids, where.slots, w, {normalise_over::chosen}).or_throw();
        }
        int64_t const taken = served_.total(), worked = padded_ ? experts * capacity_ : taken;
        view<int64_t const, 1> const groups = padded_ ? vec<int64_t const>(blocks_.data(), experts + 1) : view<int64_t const, 1>(where.offsets);
        dispatch(be, rows(x_.data(), tokens, width), where, rows(rows_.data(), taken, width)).or_throw();
        auto const both = rows(both_.data(), worked, 2 * hidden);
        auto const active = rows(active_.data(), worked, hidden);
        grouped_matmul(be, rows(rows_.data(), worked, width), turned(gate_up_.data(), 2 * hidden, width), both, groups, {}, ws()).or_throw();
        swiglu(be, columns(both, 0, hidden), columns(both, hidden, hidden), active).or_throw();
        grouped_matmul(be, active, turned(down_.data(), width, hidden), rows(out_.data(), worked, width), groups, {}, ws()).or_throw();
        combine(be, rows(out_.data(), taken, width), where, w, view<bf16, 2>{}, rows(y_.data(), tokens, width)).or_throw();
    }
    int64_t asked() const { return demand_.total(); }
    int64_t served() const { return served_.total(); }

  private:
    static std::size_t size(int64_t n) { return static_cast<std::size_t>(n); }
    int64_t rows_at_most() const { return padded_ ? experts * capacity_ : tokens * k; }
    workspace ws() { return {memory_.data(), static_cast<int64_t>(memory_.size())}; }
    /// [experts, columns, outputs] of weights stored as [experts, outputs, columns].
    static view<bf16 const, 3> turned(bf16 const* data, int64_t outputs, int64_t columns) {
        view<bf16 const, 3> w = cube(data, experts, outputs, columns);
        std::swap(w.extent[1], w.extent[2]);
        std::swap(w.stride[1], w.stride[2]);
        return w;
    }

    capacity_limit limit_;
    int64_t capacity_, spare_;
    bool padded_;
    keel_bench::aligned_vector<bf16> x_, gate_up_, down_;
    keel_bench::aligned_vector<float> logits_, weights_;
    std::vector<int32_t> choices_, ids_;
    std::vector<int64_t> asked_, given_, slots_, offsets_, blocks_;
    keel_bench::aligned_vector<std::byte> memory_;
    keel_bench::aligned_vector<bf16> rows_, both_, active_, out_, y_;
    demand_counts demand_;
    served_counts served_;
};

void sweep(benchmark::State& state, capacity_limit limit, bool padded, int64_t spare) {
    layer own(limit, padded, spare), first(capacity_limit::factor(1, 1), padded, 0);
    own(), first();
    std::vector<double> seconds, ratio, extra;
    for (auto _ : state) {
        double const start = keel_bench::thread_seconds();
        own();
        double const between = keel_bench::thread_seconds();
        first();
        double const mine = between - start, base = keel_bench::thread_seconds() - between;
        seconds.push_back(mine), ratio.push_back(mine / base), extra.push_back(mine - base);
        state.SetIterationTime(mine);
    }
    auto const served = static_cast<double>(own.served()), recovered = static_cast<double>(own.served() - first.served());
    auto const asked = static_cast<double>(own.asked());
    double const each_at_first = (keel_bench::median(seconds) - keel_bench::median(extra)) / static_cast<double>(first.served());
    state.counters["dropped"] = 1 - served / asked;
    state.counters["recovered"] = recovered / asked;
    state.counters["of_factor_1"] = keel_bench::median(ratio);
    if (recovered > 0) {
        state.counters["us_a_recovered"] = 1e6 * keel_bench::median(extra) / recovered;
        state.counters["price"] = keel_bench::median(extra) / recovered / each_at_first;
    }
}

int const registered = [] {
    for (bool padded : {false, true}) {
        std::string const name = padded ? "padded/" : "ragged/";
        for (int64_t quarters : {4, 5, 6, 8, 12})
            for (int64_t spare : {0, 1, 2}) {
                if (spare > 0 && quarters > 5) continue; // room enough without it
                std::string const factor = std::to_string(quarters / 4) + "." + (quarters % 4 == 0 ? "00" : std::to_string(25 * (quarters % 4)));
                std::string const next = spare == 0 ? "" : "/spare_" + std::to_string(spare);
                benchmark::RegisterBenchmark((name + "factor_" + factor + next).c_str(), sweep, capacity_limit::factor(quarters, 4), padded, spare)
                    ->UseManualTime()
                    ->Unit(benchmark::kMillisecond);
            }
        // Padded, no limit would be all tokens for every expert.
        if (padded) continue;
        benchmark::RegisterBenchmark((name + "dropless").c_str(), sweep, capacity_limit::dropless(), padded, 0)->UseManualTime()->Unit(benchmark::kMillisecond);
    }
    return 0;
}();

} // namespace
