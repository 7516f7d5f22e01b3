// Every backend that this translation unit's flags allow, for tests that a primitive does the same on all of them.
//
// With KEEL_NATIVE_CPU (CMake's KEEL_EVERY_ARCH=OFF, which saves half of the compile time): of the CPU's the best architecture alone.
// The debug preset has all of them, and tests/bits each at its own level. With KEEL_NATIVE_ONLY (sanitizers, tests/bits/run.py by
// default): without the lockstep warp too.
#pragma once

#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/backend/reference.hpp>
#include <keel/backend/simt.hpp>

namespace keel_test {

/// Whether this build runs every case of a long list. The sanitizers' builds, a hundred times slower, run some of each kind.
#if defined(KEEL_NATIVE_ONLY)
inline constexpr bool every_case = false;
#else
inline constexpr bool every_case = true;
#endif

/// Whether this build looks for races, which one thread has not.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool seeks_races = true;
#elif defined(__has_feature)
inline constexpr bool seeks_races = __has_feature(thread_sanitizer);
#else
inline constexpr bool seeks_races = false;
#endif

/// One thread or two, as one type: a test is compiled once and run on both.
struct one_or_two_threads {
    keel::thread_pool const* pool = nullptr;
    int64_t concurrency() const { return pool == nullptr ? 1 : pool->concurrency(); }
    void run(int64_t chunks, keel::chunk_task task) const {
        if (pool == nullptr) keel::serial{}.run(chunks, task);
        else pool->run(chunks, task);
    }
};

/// fn(name, backend) for the CPU backend of each architecture, on one thread and on two.
template <class Fn> void for_each_cpu(Fn fn) {
    static keel::thread_pool const pool(2);
    static one_or_two_threads const one{}, two{&pool};
    auto const both = [&]<class Arch>(Arch) {
        for (auto const* threads : {&one, &two})
            if (threads == &two || !seeks_races) fn(std::string("cpu ") + Arch::name() + (threads == &two ? " x2" : ""), keel::cpu<Arch, one_or_two_threads>{*threads});
    };
#if defined(KEEL_NATIVE_ONLY) || defined(KEEL_NATIVE_CPU)
    both(keel::native_arch{});
#else
    both(keel::arch::scalar{});
#if defined(__SSE2__)
    both(keel::arch::sse2{});
#endif
#if defined(__SSE4_1__)
    both(keel::arch::sse4{});
#endif
#if defined(__AVX2__) && defined(__FMA__)
    both(keel::arch::avx2{});
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
    both(keel::arch::avx512{});
#endif
#if defined(__aarch64__)
    both(keel::arch::neon{});
#endif
#endif
}

/// fn(name, backend) for the reference, the lockstep warp and every CPU backend.
template <class Fn> void for_each_backend(Fn fn) {
    fn(std::string("reference"), keel::reference{});
#if !defined(KEEL_NATIVE_ONLY)
    fn(std::string("simt<32>"), keel::simt<32>{});
#endif
    for_each_cpu(fn);
}

/// fn(name, backend) for the reference, the lockstep warp and the best CPU backend: for kernels made of parts that other tests try on every
/// architecture. A third of the compile time.
template <class Fn> void for_main_backends(Fn fn) {
    fn(std::string("reference"), keel::reference{});
#if !defined(KEEL_NATIVE_ONLY)
    fn(std::string("simt<32>"), keel::simt<32>{});
#endif
    fn(std::string("cpu ") + keel::native_arch::name(), keel::cpu{});
}

} // namespace keel_test
