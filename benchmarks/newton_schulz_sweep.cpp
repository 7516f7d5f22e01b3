// Newton-Schulz over form, steps, operand type and shape, on one thread, and what share of a training step it would be. Times are those
// of the thread on its processor, so that a busy machine does not show; medians.
//
//     flop/s           of what the form computes; plain_flop/s: of what the plain form would have
//     error            ||O O^T - I|| / sqrt(short side) of one Gaussian matrix
//     share_4k, ...    of the time of one matrix's training step with so many tokens in its batch that Newton-Schulz would take: beside
//                      it the weight's forward and backward products, 6 rows columns tokens flops, at the speed of such a product
//                      in the same type (fp32 for f16, as the service multiplies it), measured just before
//
// The sets are solved for the steps and the type (optim/coefficient_solver.hpp), down to singular values of 1 / 1000. The label is the plan;
// form 0 lets it choose, 1 is plain, 2 symmetric, 3 gram.
#include <cmath>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/optim/coefficient_solver.hpp>
#include <keel/optim/newton_schulz.hpp>

#include "support/in_turns.hpp"
#include "support/peak.hpp"

namespace {

using namespace keel;

std::vector<float> gaussian(int64_t n) {
    std::mt19937 engine(7);
    std::normal_distribution<float> bell;
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = bell(engine);
    return x;
}

/// Seconds of this thread that a call takes.
template <class Call> double taken(Call const& call) {
    double const start = keel_bench::thread_seconds();
    call();
    benchmark::ClobberMemory();
    return keel_bench::thread_seconds() - start;
}

/// Seconds a flop of activations [512, columns] times a weight [rows, columns] transposed.
template <class T> double seconds_a_flop(int64_t row_count, int64_t column_count) {
    int64_t const tokens = 512;
    std::vector<T> const x(static_cast<std::size_t>(tokens * column_count), encode<T>(0.5f)),
        w(static_cast<std::size_t>(row_count * column_count), encode<T>(0.25f));
    std::vector<float> y(static_cast<std::size_t>(tokens * row_count));
    cpu<> const be;
    std::vector<std::byte> memory(static_cast<std::size_t>(matmul_workspace(be, tokens, row_count, column_count)));
    auto const product = [&] {
        matmul(be, rows(x.data(), tokens, column_count), transposed(rows(w.data(), row_count, column_count)), rows(y.data(), tokens, row_count), {},
               {memory.data(), static_cast<int64_t>(memory.size())})
            .or_throw();
    };
    product();
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(taken(product));
    return keel_bench::median(times) / (2.0 * static_cast<double>(tokens) * static_cast<double>(row_count) * static_cast<double>(column_count));
}

template <class T> newton_schulz_coefficients<T> set_of(int64_t steps) {
    switch (steps) {
    case 3: return unsafe_coefficients<solved_set<T, 3>, T>(); // 3 steps leave 1 / 1000 at 0.4: an image up to 1.6
    case 5: return coefficients<solved_set<T, 5>, T>();
    default: return coefficients<solved_set<T, 8>, T>();
    }
}

template <class T> void sweep(benchmark::State& state) {
    auto const form = static_cast<newton_schulz_form>(state.range(0));
    int64_t const batch = state.range(2), row_count = state.range(3), column_count = state.range(4);
    auto const u = gaussian(batch * row_count * column_count);
    std::vector<float> o(u.size()), error(static_cast<std::size_t>(batch));
    cpu<> const be;
    newton_schulz_options<T> const options{.coefficients = set_of<T>(state.range(1)), .form = form};
    std::vector<std::byte> memory(static_cast<std::size_t>(newton_schulz_workspace<T>(be, row_count, column_count, batch, options)));
    workspace const ws{memory.data(), static_cast<int64_t>(memory.size())};
    auto const in = cube(u.data(), batch, row_count, column_count);
    auto const out = cube(o.data(), batch, row_count, column_count);
    using trained = std::conditional_t<std::is_same_v<T, f16>, float, T>;
    double const trained_flop = seconds_a_flop<trained>(row_count, column_count);
    newton_schulz<T>(be, in, out, {.orthogonality_error = vec(error.data(), batch)}, options, ws).or_throw();
    std::vector<double> times;
    for (auto _ : state) {
        times.push_back(taken([&] { newton_schulz<T>(be, in, out, {}, options, ws).or_throw(); }));
        state.SetIterationTime(times.back());
    }

    auto const plan = plan_newton_schulz<T>(row_count, column_count, options.coefficients, form);
    auto plain = plan;
    plain.form = newton_schulz_form::plain;
    double const items = static_cast<double>(batch), took = keel_bench::median(times) / items;
    state.counters["flop/s"] = plan.flops() / took;
    state.counters["plain_flop/s"] = plain.flops() / took;
    state.counters["error"] = static_cast<double>(error[0]);
    for (auto [name, tokens] : {std::pair<char const*, double>{"share_4k", 4096}, {"share_64k", 65536}, {"share_1M", 1048576}}) {
        double const training = 6.0 * static_cast<double>(row_count * column_count) * tokens * trained_flop;
        state.counters[name] = took / (took + training);
    }
    state.SetLabel(plan.text());
}

void cases(benchmark::internal::Benchmark* b) {
    b->ArgNames({"form", "steps", "batch", "rows", "columns"})->Unit(benchmark::kMillisecond)->UseManualTime();
    struct shape {
        int64_t batch, rows, columns;
    };
    for (shape s : {shape{256, 32, 32}, {64, 64, 64}, {64, 64, 96}, {64, 64, 128}, {16, 128, 128}, {16, 128, 160}, {16, 128, 192}, {16, 128, 256}, {16, 128, 512}, {4, 256, 256}, {4, 256, 1024}, {1, 512, 512},
                    {1, 512, 768}, {1, 512, 1024}, {1, 512, 1536}, {1, 512, 2048}, {1, 768, 3072}, {1, 1024, 1024}, {1, 1024, 4096}, {1, 4096, 1024}})
        for (int64_t steps : {3, 5, 8})
            for (int64_t form : {0, 1, 2, 3}) b->Args({form, steps, s.batch, s.rows, s.columns});
}
BENCHMARK(sweep<float>)->Name("float")->Apply(cases);
BENCHMARK(sweep<bf16>)->Name("bf16")->Apply(cases);
BENCHMARK(sweep<f16>)->Name("f16")->Apply(cases);

} // namespace
