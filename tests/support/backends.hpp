// Every backend that this translation unit's flags allow, for tests that a primitive does the same on all of them.
#pragma once

#include <string>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/backend/reference.hpp>
#include <keel/backend/simt.hpp>

namespace keel_test {

/// fn(name, backend) for the CPU backend of each architecture, on one thread and on two.
template <class Fn> void for_each_cpu(Fn fn) {
    static keel::thread_pool const pool(2);
    auto const both = [&]<class Arch>(Arch) {
        fn(std::string("cpu ") + Arch::name(), keel::cpu<Arch>{});
        fn(std::string("cpu ") + Arch::name() + " x2", keel::cpu<Arch, keel::thread_pool>{pool});
    };
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
}

/// fn(name, backend) for the reference, the lockstep warp and every CPU backend.
template <class Fn> void for_each_backend(Fn fn) {
    fn(std::string("reference"), keel::reference{});
    fn(std::string("simt<32>"), keel::simt<32>{});
    for_each_cpu(fn);
}

} // namespace keel_test
