// Row primitives beside a copy of the same bytes, measured in the same run: counter "of_copy" is the share of its speed.
// 64 KB stays in the second-level cache, 64 MB comes from memory.
#include <chrono>
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/cross_entropy.hpp>
#include <keel/nn/swiglu.hpp>
#include <keel/norm/rms_norm.hpp>
#include <keel/quantize/quantize.hpp>

namespace {

using namespace keel;

template <class T> struct buffer {
    std::vector<T> memory;
    int64_t width;
    buffer(int64_t rows, int64_t columns) : memory(static_cast<std::size_t>(rows * columns)), width(columns) {
        for (std::size_t i = 0; i < memory.size(); ++i) {
            float const x = static_cast<float>(static_cast<int>(i * 7919 % 2048) - 1024) * 0x1p-9f;
            if constexpr (std::is_same_v<T, float>) memory[i] = x;
            else if constexpr (sizeof(T) > 1) memory[i] = encode<T>(x);
        }
    }
    view<T, 2> all() { return rows(memory.data(), static_cast<int64_t>(memory.size()) / width, width); }
    view<T, 1> vec() { return keel::vec(memory.data(), static_cast<int64_t>(memory.size())); }
};

/// Bytes a second of memcpy over as many bytes as the primitive moves, the median of nine.
double copy_speed(int64_t bytes) {
    auto const half = static_cast<std::size_t>(bytes / 2 < 64 ? 64 : bytes / 2);
    std::vector<char> from(half, 1), to(half);
    double speed[9];
    for (double& s : speed) {
        int const rounds = static_cast<int>(1 + (std::size_t{1} << 24) / half);
        auto const start = std::chrono::steady_clock::now();
        for (int r = 0; r < rounds; ++r) {
            std::memcpy(to.data(), from.data(), half);
            benchmark::ClobberMemory();
        }
        double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        s = 2.0 * static_cast<double>(half) * rounds / seconds;
    }
    for (int i = 0; i < 9; ++i)
        for (int j = i + 1; j < 9; ++j)
            if (speed[j] < speed[i]) std::swap(speed[i], speed[j]);
    return speed[4];
}

/// Runs the call and reports bytes a second and its share of a copy.
template <class Call> void measure(benchmark::State& state, int64_t bytes, Call call) {
    double const copy = copy_speed(bytes);
    auto const start = std::chrono::steady_clock::now();
    for (auto _ : state) {
        call();
        benchmark::ClobberMemory();
    }
    double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    state.SetBytesProcessed(state.iterations() * bytes);
    state.counters["of_copy"] = static_cast<double>(state.iterations() * bytes) / seconds / copy;
}

constexpr int64_t width = 4096;
int64_t row_count(benchmark::State const& state) { return state.range(0) / (2 * width) > 0 ? state.range(0) / (2 * width) : 1; }

void norm_forward(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> x(n, width), y(n, width);
    buffer<float> delta(1, width), r(1, n);
    measure(state, n * width * 4, [&] { rms_norm(cpu{}, x.all(), delta.vec(), y.all(), {.rrms = r.vec()}).or_throw(); });
}
void norm_backward(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> x(n, width), dy(n, width), dx(n, width);
    buffer<float> delta(1, width), r(1, n), ddelta(1, width);
    std::vector<std::byte> ws(static_cast<std::size_t>(rms_norm_backward_workspace(n, width)));
    measure(state, n * width * 6, [&] {
        rms_norm_backward(cpu{}, dy.all(), x.all(), delta.vec(), {.rrms = r.vec()}, {.dx = dx.all(), .ddelta = ddelta.vec()}, {},
                          {ws.data(), static_cast<int64_t>(ws.size())})
            .or_throw();
    });
}
template <class Blocks> void quantise(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> x(n, width);
    buffer<typename Blocks::code> codes(n, width);
    buffer<typename Blocks::scale_storage> scales(Blocks::scale_rows(n), Blocks::scale_columns(width));
    report counts;
    measure(state, n * width * 3, [&] { quantize<overflow::saturate>(cpu{}, x.all(), Blocks{codes.all(), scales.all()}, {}, &counts).or_throw(); });
}
/// Along the rows and along the columns, in one pass.
void quantise_pair(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> x(n, width);
    buffer<e4m3> a(n, width), b(n, width);
    buffer<float> a_scales(n, row_blocks<>::scale_columns(width)), b_scales(column_blocks<>::scale_rows(n), width);
    report counts;
    measure(state, n * width * 4, [&] {
        quantize_pair<overflow::saturate>(cpu{}, x.all(), row_blocks<>{a.all(), a_scales.all()}, column_blocks<>{b.all(), b_scales.all()},
                                          {}, &counts)
            .or_throw();
    });
}
template <class Blocks> void dequantise(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> y(n, width);
    buffer<typename Blocks::code> codes(n, width);
    buffer<typename Blocks::scale_storage> scales(Blocks::scale_rows(n), Blocks::scale_columns(width));
    measure(state, n * width * 3, [&] { dequantize(cpu{}, Blocks{codes.all(), scales.all()}, y.all()).or_throw(); });
}
void swiglu_forward(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> gate(n, width), up(n, width), y(n, width);
    measure(state, n * width * 6, [&] { swiglu(cpu{}, gate.all(), up.all(), y.all()).or_throw(); });
}
void loss_forward(benchmark::State& state) {
    int64_t const n = row_count(state);
    buffer<bf16> logits(n, width);
    buffer<float> loss(1, n), lse(1, n);
    std::vector<int32_t> const targets(static_cast<std::size_t>(n), 7);
    measure(state, n * width * 2, [&] { cross_entropy(cpu{}, logits.all(), vec(targets.data(), n), loss.vec(), {.lse = lse.vec()}).or_throw(); });
}

#define KEEL_SIZES Arg(1 << 16)->Arg(1 << 26)->Unit(benchmark::kMicrosecond)
BENCHMARK(norm_forward)->KEEL_SIZES;
BENCHMARK(norm_backward)->KEEL_SIZES;
BENCHMARK(quantise<row_blocks<e4m3, fp32_scale>>)->KEEL_SIZES;
BENCHMARK(quantise<row_blocks<e4m3, e8m0_scale>>)->KEEL_SIZES;
BENCHMARK(quantise<column_blocks<e4m3, fp32_scale>>)->KEEL_SIZES;
BENCHMARK(quantise<block_scaled<e4m3, fp32_scale, whole, whole>>)->KEEL_SIZES;
BENCHMARK(quantise_pair)->KEEL_SIZES;
BENCHMARK(dequantise<row_blocks<e4m3, fp32_scale>>)->KEEL_SIZES;
BENCHMARK(swiglu_forward)->KEEL_SIZES;
BENCHMARK(loss_forward)->KEEL_SIZES;

} // namespace
