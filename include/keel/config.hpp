// What every header needs first: function qualifiers, the ABI tag, assertions, and the flags keel refuses.
#pragma once

#include <cstddef>
#include <cstdint>

#include <keel/version.hpp>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "keel: -ffast-math and -ffinite-math-only delete NaN tests and change rounding; compile this file without them"
#endif
#if defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__) // gcc; clang tells nobody: probe()
#error "keel: -fassociative-math, -freciprocal-math and -fno-signed-zeros change sums, quotients and zeros; compile without them"
#endif
static_assert(__cplusplus >= 202002L, "keel needs C++20");

// KEEL_FN marks small functions that are inlined everywhere, so no architecture-dependent symbol is left to the linker;
// KEEL_HOST those of them that make no sense on a device.
#if defined(__CUDACC__)
#define KEEL_FN __host__ __device__ __forceinline__
#define KEEL_HOST inline __attribute__((always_inline))
#define KEEL_DEVICE_CODE 1
#else
#define KEEL_FN inline __attribute__((always_inline))
#define KEEL_HOST KEEL_FN
#define KEEL_DEVICE_CODE 0
#endif

// Inlines every call inside a row entry: a lambda left out of line costs more than the row it serves.
#if defined(__CUDACC__)
#define KEEL_FLATTEN
#else
#define KEEL_FLATTEN __attribute__((flatten))
#endif

// KEEL_ASSERT guards against keel's own mistakes, in debug builds; a caller's mistakes come back as a status.
#if !defined(NDEBUG)
#include <cassert>
#define KEEL_ASSERT(condition) assert(condition)
#define KEEL_TAG_ASSERT _checked
#else
#define KEEL_ASSERT(condition) static_cast<void>(0)
#define KEEL_TAG_ASSERT
#endif

#if defined(__cpp_exceptions)
#define KEEL_HAS_EXCEPTIONS 1
#define KEEL_TAG_EXCEPTIONS
#else
#define KEEL_HAS_EXCEPTIONS 0
#define KEEL_TAG_EXCEPTIONS _noexcept
#endif

// Algorithms live in an inline namespace named after all that changes their code: version, instruction set,
// assertions, exceptions, compiler driver. Objects built with different flags then share no keel symbol.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#if defined(__AVX512BF16__)
#define KEEL_TAG_ISA _avx512bf16
#elif defined(__AVX512VBMI2__)
#define KEEL_TAG_ISA _avx512vbmi2
#else
#define KEEL_TAG_ISA _avx512
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#define KEEL_TAG_ISA _avx2
#elif defined(__AVX__)
#define KEEL_TAG_ISA _avx
#elif defined(__SSE4_1__)
#define KEEL_TAG_ISA _sse4
#elif defined(__SSE2__)
#define KEEL_TAG_ISA _sse2
#elif defined(__aarch64__)
#define KEEL_TAG_ISA _neon
#else
#define KEEL_TAG_ISA _scalar
#endif
#if defined(__CUDACC__)
#define KEEL_TAG_CUDA _cuda
#else
#define KEEL_TAG_CUDA
#endif
#define KEEL_JOIN_(major, minor, isa, cuda, checks, exceptions) v##major##_##minor##isa##cuda##checks##exceptions
#define KEEL_JOIN(major, minor, isa, cuda, checks, exceptions) KEEL_JOIN_(major, minor, isa, cuda, checks, exceptions)
#define KEEL_ABI                                                                                                       \
    KEEL_JOIN(KEEL_VERSION_MAJOR, KEEL_VERSION_MINOR, KEEL_TAG_ISA, KEEL_TAG_CUDA, KEEL_TAG_ASSERT, KEEL_TAG_EXCEPTIONS)

namespace keel {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

} // namespace keel
