// Newton-Schulz, five steps of Polar Express on one thread: each form and type by shape, and Eigen's plain form on the same work.
// flop/s counts what the form computes; "plain_flop/s" what the plain form would have, so a form's gain shows.
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include <Eigen/Core>
#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/optim/newton_schulz.hpp>

#include "support/peak.hpp"

namespace {

using namespace keel;

std::vector<float> gradient(int64_t n) {
    std::mt19937 engine(7);
    std::normal_distribution<float> bell;
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = bell(engine);
    return x;
}

void count(benchmark::State& state, newton_schulz_plan const& plan, int64_t batch) {
    newton_schulz_plan plain = plan;
    plain.form = newton_schulz_form::plain;
    auto const items = static_cast<double>(batch);
    using benchmark::Counter;
    state.counters["flop/s"] = Counter(items * plan.flops(), Counter::kIsIterationInvariantRate);
    state.counters["plain_flop/s"] = Counter(items * plain.flops(), Counter::kIsIterationInvariantRate);
    state.counters["of_peak"] = Counter(items * plan.flops() / keel_bench::fma_peak(), Counter::kIsIterationInvariantRate);
}

template <class T> void orthogonalise(benchmark::State& state, newton_schulz_form form) {
    int64_t const batch = state.range(0), row_count = state.range(1), column_count = state.range(2);
    auto const u = gradient(batch * row_count * column_count);
    std::vector<float> o(u.size()), error(static_cast<std::size_t>(batch));
    cpu<> const be;
    newton_schulz_options<T> const options{.form = form};
    std::vector<std::byte> memory(static_cast<std::size_t>(newton_schulz_workspace<T>(be, row_count, column_count, batch, options)));
    workspace const ws{memory.data(), static_cast<int64_t>(memory.size())};
    auto const in = cube(u.data(), batch, row_count, column_count);
    auto const out = cube(o.data(), batch, row_count, column_count);
    for (auto _ : state) {
        newton_schulz<T>(be, in, out, {}, options, ws).or_throw();
        benchmark::ClobberMemory();
    }
    newton_schulz<T>(be, in, out, {.orthogonality_error = vec(error.data(), batch)}, options, ws).or_throw();
    auto const plan = plan_newton_schulz<T>(row_count, column_count, options.coefficients, form);
    count(state, plan, batch);
    state.counters["error"] = static_cast<double>(error[0]);
    state.SetLabel(plan.text());
}
void fp32_plan(benchmark::State& state) { orthogonalise<float>(state, newton_schulz_form::automatic); }
void fp32_plain(benchmark::State& state) { orthogonalise<float>(state, newton_schulz_form::plain); }
void fp32_symmetric(benchmark::State& state) { orthogonalise<float>(state, newton_schulz_form::symmetric); }
void fp32_gram(benchmark::State& state) { orthogonalise<float>(state, newton_schulz_form::gram); }
void bf16_plan(benchmark::State& state) { orthogonalise<bf16>(state, newton_schulz_form::automatic); }
void bf16_symmetric(benchmark::State& state) { orthogonalise<bf16>(state, newton_schulz_form::symmetric); }

/// In a loop of its own: gcc 12 warns of its own AVX-512 intrinsics inside Eigen's reduction.
float squares(float const* x, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; ++i) s += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    return static_cast<float>(s);
}
void eigen_plain(benchmark::State& state) {
    using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    int64_t const batch = state.range(0), row_count = state.range(1), column_count = state.range(2);
    auto const u = gradient(batch * row_count * column_count);
    auto const set = coefficients<polar_express>();
    matrix x, y, a, b;
    for (auto _ : state)
        for (int64_t item = 0; item < batch; ++item) {
            x = Eigen::Map<matrix const>(u.data() + item * row_count * column_count, row_count, column_count);
            if (row_count > column_count) x = matrix(x.transpose());
            x *= 1.0f / std::sqrt(squares(x.data(), x.size()));
            for (int t = 0; t < set.count; ++t) {
                a.noalias() = x * x.transpose();
                b = set.step[t].b * a;
                b.noalias() += set.step[t].c * a * a;
                y = set.step[t].a * x;
                y.noalias() += b * x;
                x.swap(y);
            }
            benchmark::DoNotOptimize(x.data());
        }
    count(state, plan_newton_schulz<float>(row_count, column_count, set, newton_schulz_form::plain), batch);
}

void shapes(benchmark::internal::Benchmark* b) {
    b->ArgNames({"batch", "rows", "columns"});
    for (auto [batch, r, c] : {std::tuple<int64_t, int64_t, int64_t>{64, 64, 64}, {64, 64, 128}, {16, 128, 128}, {16, 128, 160}, {16, 128, 192},
                               {16, 128, 256}, {4, 256, 256}, {4, 256, 384}, {4, 256, 1024}, {1, 512, 512}, {1, 768, 960}, {1, 768, 1152}})
        b->Args({batch, r, c});
    for (auto [r, c] : {std::pair<int64_t, int64_t>{1024, 1024}, {768, 3072}, {3072, 768}, {1024, 4096}}) b->Args({1, r, c});
}
BENCHMARK(fp32_plan)->Apply(shapes)->Unit(benchmark::kMillisecond);
BENCHMARK(fp32_plain)->Apply(shapes)->Unit(benchmark::kMillisecond);
BENCHMARK(fp32_symmetric)->Apply(shapes)->Unit(benchmark::kMillisecond);
BENCHMARK(fp32_gram)->Apply(shapes)->Unit(benchmark::kMillisecond);
BENCHMARK(bf16_plan)->Apply(shapes)->Unit(benchmark::kMillisecond);
BENCHMARK(bf16_symmetric)->Apply(shapes)->Unit(benchmark::kMillisecond);
BENCHMARK(eigen_plain)->Apply(shapes)->Unit(benchmark::kMillisecond);

} // namespace
