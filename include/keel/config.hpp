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
// The instruction set is a word for the reader and a digit for each extension that a compiler may use unasked.
#if defined(__AVX512F__)
#define KEEL_TAG_ISA _avx512
#elif defined(__AVX2__)
#define KEEL_TAG_ISA _avx2
#elif defined(__AVX__)
#define KEEL_TAG_ISA _avx
#elif defined(__SSE2__)
#define KEEL_TAG_ISA _sse
#elif defined(__aarch64__)
#define KEEL_TAG_ISA _aarch64
#else
#define KEEL_TAG_ISA _scalar
#endif

// KEEL_BIT(macro): 1 where the macro is defined as 1, else 0.
#define KEEL_BIT_1 0,
#define KEEL_BIT_SECOND(a, b, ...) b
#define KEEL_BIT_OF(junk_or_comma) KEEL_BIT_SECOND(junk_or_comma 1, 0, 0)
#define KEEL_BIT_AFTER(value) KEEL_BIT_OF(KEEL_BIT_##value)
#define KEEL_BIT(macro) KEEL_BIT_AFTER(macro)
#define KEEL_DIGITS_(a, b, c, d, e, f, g, h) _##a##b##c##d##e##f##g##h
#define KEEL_DIGITS(a, b, c, d, e, f, g, h) KEEL_DIGITS_(a, b, c, d, e, f, g, h)
#define KEEL_BITS(a, b, c, d, e, f, g, h)                                                                              \
    KEEL_DIGITS(KEEL_BIT(a), KEEL_BIT(b), KEEL_BIT(c), KEEL_BIT(d), KEEL_BIT(e), KEEL_BIT(f), KEEL_BIT(g), KEEL_BIT(h))

#if defined(__aarch64__)
#define KEEL_TAG_BITS_A                                                                                                \
    KEEL_BITS(__ARM_FEATURE_SVE, __ARM_FEATURE_SVE2, __ARM_FEATURE_ATOMICS, __ARM_FEATURE_FP16_VECTOR_ARITHMETIC,      \
              __ARM_FEATURE_FP16_FML, __ARM_FEATURE_BF16_VECTOR_ARITHMETIC, __ARM_FEATURE_DOTPROD,                     \
              __ARM_FEATURE_MATMUL_INT8)
#define KEEL_TAG_BITS_B                                                                                                \
    KEEL_BITS(__ARM_FEATURE_BF16, __ARM_FEATURE_SVE_BF16, __ARM_FEATURE_COMPLEX, __ARM_FEATURE_QRDMX,                  \
              __ARM_FEATURE_FRINT, __ARM_FEATURE_CRC32, __ARM_FEATURE_MOPS, __ARM_FEATURE_SME)
// Some of these have values of their own, which come into the name as they are.
#if defined(__ARM_FEATURE_RCPC)
#define KEEL_TAG_RCPC __ARM_FEATURE_RCPC
#else
#define KEEL_TAG_RCPC 0
#endif
#define KEEL_TAG_BITS_C KEEL_DIGITS(KEEL_TAG_RCPC, KEEL_BIT(__ARM_FEATURE_CSSC), 0, 0, 0, 0, 0, 0)
#define KEEL_TAG_BITS_D
#else
#define KEEL_TAG_BITS_A KEEL_BITS(__SSE3__, __SSSE3__, __SSE4_1__, __SSE4_2__, __POPCNT__, __SSE4A__, __MOVBE__, __LZCNT__)
#define KEEL_TAG_BITS_B KEEL_BITS(__BMI__, __BMI2__, __TBM__, __F16C__, __FMA__, __FMA4__, __XOP__, __AVX2__)
#define KEEL_TAG_BITS_C                                                                                                \
    KEEL_BITS(__AVX512CD__, __AVX512BW__, __AVX512DQ__, __AVX512VL__, __AVX512IFMA__, __AVX512VBMI__,                  \
              __AVX512VBMI2__, __AVX512VNNI__)
#define KEEL_TAG_BITS_D                                                                                                \
    KEEL_BITS(__AVX512BITALG__, __AVX512VPOPCNTDQ__, __AVX512BF16__, __AVX512FP16__, __GFNI__, __AVXVNNI__, __APX_F__, \
              __CMPCCXADD__)
#endif

#if defined(__CUDACC__)
#define KEEL_TAG_CUDA _cuda
#else
#define KEEL_TAG_CUDA
#endif
#define KEEL_JOIN_(major, minor, isa, a, b, c, d, cuda, checks, exceptions)                                            \
    v##major##_##minor##isa##a##b##c##d##cuda##checks##exceptions
#define KEEL_JOIN(major, minor, isa, a, b, c, d, cuda, checks, exceptions)                                             \
    KEEL_JOIN_(major, minor, isa, a, b, c, d, cuda, checks, exceptions)
#define KEEL_ABI                                                                                                       \
    KEEL_JOIN(KEEL_VERSION_MAJOR, KEEL_VERSION_MINOR, KEEL_TAG_ISA, KEEL_TAG_BITS_A, KEEL_TAG_BITS_B, KEEL_TAG_BITS_C, \
              KEEL_TAG_BITS_D, KEEL_TAG_CUDA, KEEL_TAG_ASSERT, KEEL_TAG_EXCEPTIONS)

namespace keel {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

} // namespace keel
