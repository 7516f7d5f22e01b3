// A call in turns with a copy of as many bytes by as many threads, so that what disturbs the machine disturbs both, and with the
// same call by AVX2 where the build's own packs are AVX-512. Medians over the rounds:
//
//     GB/s              bytes that the call moves in a nanosecond
//     of_copy           the copy's time as a share of the call's
//     avx2_of_avx512    the call's time as a share of what AVX2 takes
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>

namespace keel_bench {

/// Memory that begins on a cache line, as allocators of tensors give it.
template <class T> struct aligned_allocator {
    using value_type = T;
    aligned_allocator() = default;
    template <class U> aligned_allocator(aligned_allocator<U> const&) {}
    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* p, std::size_t) { ::operator delete(p, std::align_val_t{64}); }
    bool operator==(aligned_allocator const&) const = default;
};
template <class T> using aligned_vector = std::vector<T, aligned_allocator<T>>;

/// memcpy of half the bytes, so that all of them are moved, in one part a thread.
class copying {
  public:
    explicit copying(int64_t bytes) : from_(static_cast<std::size_t>(bytes / 2), 1), to_(from_.size()) {}
    void operator()(keel::thread_pool const& pool) {
        part const all{*this, pool.concurrency()};
        pool.run(all.parts, {&part::copy, &all});
    }

  private:
    struct part {
        copying& own;
        int64_t parts;
        static void copy(void const* context, int64_t index) {
            auto const& self = *static_cast<part const*>(context);
            int64_t const size = static_cast<int64_t>(self.own.from_.size()), each = size / self.parts;
            int64_t const first = each * index, last = index + 1 == self.parts ? size : first + each;
            std::memcpy(self.own.to_.data() + first, self.own.from_.data() + first, static_cast<std::size_t>(last - first));
        }
    };
    aligned_vector<char> from_, to_;
};

template <class Call> double seconds(int64_t times, Call const& call) {
    auto const start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < times; ++i) {
        call();
        benchmark::ClobberMemory();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / static_cast<double>(times);
}

inline double median(std::vector<double> x) {
    auto const middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
    std::nth_element(x.begin(), middle, x.end());
    return *middle;
}

inline constexpr bool beside_avx2 = keel::arch_usable<keel::arch::avx2> && keel::native_arch::width > keel::arch::avx2::width;

/// Work is made from the bytes that one call shall move; bytes() is what it does move, and work(backend) is the call.
template <class Work> void in_turns(benchmark::State& state, int64_t threads, int64_t size) {
    keel::thread_pool const pool(threads, keel::worker_placement::away_from_caller);
    Work work(size);
    copying copy(work.bytes());
    auto const call = [&] { work(keel::cpu(pool)); };
    auto const copy_once = [&] { copy(pool); };
    call(), copy_once();

    int64_t const batch = std::max<int64_t>(1, (int64_t{4} << 20) / work.bytes()); // so that what lies in a cache comes into it again
    std::vector<double> speed, share, avx2;
    while (state.KeepRunningBatch(batch)) {
        double const own = seconds(batch, call);
        state.PauseTiming();
        speed.push_back(static_cast<double>(work.bytes()) / own * 1e-9);
        share.push_back(seconds(batch, copy_once) / own);
        if constexpr (beside_avx2) avx2.push_back(own / seconds(batch, [&] { work(keel::cpu<keel::arch::avx2, keel::thread_pool>(pool)); }));
        state.ResumeTiming();
    }
    state.counters["GB/s"] = median(speed);
    state.counters["of_copy"] = median(share);
    if constexpr (beside_avx2) state.counters["avx2_of_avx512"] = median(avx2);
}

/// Half of a core's second-level cache, or of 1 MB where nobody says.
inline int64_t half_of_l2() {
    for (auto const& cache : benchmark::CPUInfo::Get().caches)
        if (cache.level == 2 && cache.size > 0) return cache.size / 2;
    return int64_t{1} << 19;
}

/// A benchmark for each size and number of threads.
template <class Work> int add(std::string const& name) {
    struct {
        char const* name;
        int64_t bytes;
    } const sizes[] = {{"64KB", int64_t{1} << 16}, {"half_L2", half_of_l2()}, {"256MB", int64_t{1} << 28}};
    for (auto const& size : sizes)
        for (int64_t const threads : {1, 2})
            if (threads <= static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency())))
                benchmark::RegisterBenchmark((name + "/" + size.name + (threads == 1 ? "/1_thread" : "/2_threads")).c_str(),
                                             in_turns<Work>, threads, size.bytes)
                    ->Unit(benchmark::kMicrosecond);
    return 0;
}

} // namespace keel_bench
