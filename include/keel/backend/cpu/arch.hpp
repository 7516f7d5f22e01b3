// Instruction sets as types. A translation unit may name any of them and use those that its compiler flags allow.
#pragma once

#include <xsimd/xsimd.hpp>

#include <keel/config.hpp>

namespace keel::arch {

/// Plain float code, on any machine.
struct scalar {
    using xsimd_arch = void;
    static constexpr int width = 1; ///< floats a pack
    static constexpr char const* name() { return "scalar"; }
};
struct sse2 {
    using xsimd_arch = xsimd::sse2;
    static constexpr int width = 4;
    static constexpr char const* name() { return "sse2"; }
};
/// SSE4.1 (x86-64-v2).
struct sse4 {
    using xsimd_arch = xsimd::sse4_1;
    static constexpr int width = 4;
    static constexpr char const* name() { return "sse4"; }
};
/// AVX2 with FMA (x86-64-v3).
struct avx2 {
    using xsimd_arch = xsimd::avx2;
    static constexpr int width = 8;
    static constexpr char const* name() { return "avx2"; }
};
/// AVX-512 F, BW, DQ and VL (x86-64-v4).
struct avx512 {
    using xsimd_arch = xsimd::avx512bw;
    static constexpr int width = 16;
    static constexpr char const* name() { return "avx512"; }
};
/// As avx512, on machines that also have the bf16 dot product (pair_dot.hpp); its conversions are not used, which lose subnormals.
struct avx512bf16 {
    using xsimd_arch = xsimd::avx512bw;
    static constexpr int width = 16;
    static constexpr char const* name() { return "avx512bf16"; }
};
/// AArch64 Advanced SIMD.
struct neon {
    using xsimd_arch = xsimd::neon64;
    static constexpr int width = 4;
    static constexpr char const* name() { return "neon"; }
};

} // namespace keel::arch

namespace keel::inline KEEL_ABI {

/// Whether this translation unit may use packs of A.
template <class A> inline constexpr bool arch_usable = false;
template <> inline constexpr bool arch_usable<arch::scalar> = true;
#if defined(__SSE2__)
template <> inline constexpr bool arch_usable<arch::sse2> = true;
#endif
#if defined(__SSE4_1__)
template <> inline constexpr bool arch_usable<arch::sse4> = true;
#endif
#if defined(__AVX2__) && defined(__FMA__)
template <> inline constexpr bool arch_usable<arch::avx2> = true;
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
template <> inline constexpr bool arch_usable<arch::avx512> = true;
#if defined(__AVX512BF16__)
template <> inline constexpr bool arch_usable<arch::avx512bf16> = true;
#endif
#endif
#if defined(__aarch64__)
template <> inline constexpr bool arch_usable<arch::neon> = true;
#endif

namespace detail {
template <class A, class... Worse> struct first_usable : first_usable<Worse...> {};
template <class A, class... Worse>
    requires arch_usable<A>
struct first_usable<A, Worse...> {
    using type = A;
};
} // namespace detail

/// The best instruction set that this translation unit was compiled for.
using native_arch = typename detail::first_usable<arch::avx512bf16, arch::avx512, arch::avx2, arch::sse4, arch::sse2,
                                                  arch::neon, arch::scalar>::type;

} // namespace keel::inline KEEL_ABI
