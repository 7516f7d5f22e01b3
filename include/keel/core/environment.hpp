// Is floating point set up as keel assumes? Asked by arithmetic, never by touching a control register.
#pragma once

#include <keel/core/lanes.hpp>

namespace keel {

/// What probe() found. Keel's arithmetic needs all of it; its conversions between formats do not.
struct floating_point_environment {
    bool round_to_nearest = false;      ///< ties to even, in both directions
    bool subnormal_operands = false;    ///< false: read as zero (x86: DAZ)
    bool subnormal_results = false;     ///< false: written as zero (x86: FTZ)
    bool fma_correctly_rounded = false; ///< false: two roundings, or one by way of double
    bool compiled_as_written = false;   ///< false: -fassociative-math, -freciprocal-math or -fno-signed-zeros here (clang has no macro)

    KEEL_FN constexpr bool ok() const {
        return round_to_nearest && subnormal_operands && subnormal_results && fma_correctly_rounded && compiled_as_written;
    }
    /// "ok", or the first thing that is wrong.
    KEEL_FN constexpr char const* message() const {
        if (!round_to_nearest) return "rounding is not to nearest";
        if (!subnormal_operands) return "subnormal operands are read as zero (DAZ)";
        if (!subnormal_results) return "subnormal results are written as zero (FTZ)";
        if (!fma_correctly_rounded) return "fma rounds more than once";
        if (!compiled_as_written) return "compiled with flags that reorder sums, multiply by reciprocals or lose signed zeros";
        return "ok";
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Probes the calling thread's floating-point environment with about a dozen operations on volatile operands, so that
/// the machine and not the compiler answers, and asks the compiler what its flags allow it. The environment is per thread:
/// probe in the threads that compute. Reads and changes no control register; raises the inexact and underflow flags.
///
///     if (auto const e = keel::probe(); !e.ok()) std::fprintf(stderr, "%s\n", e.message());
KEEL_FN floating_point_environment probe() {
    auto const opaque = [](float x) {
        float volatile v = x;
        return float(v);
    };
    auto const same = [](float a, float b) { return bits(a) == bits(b); };
    float const one = opaque(1.0f);
    float const ulp = opaque(0x1p-23f);
    float const more_than_half = opaque(0x1.8p-24f);
    float const half = opaque(0x1p-24f);

    floating_point_environment e;
    e.round_to_nearest = same(opaque(one + more_than_half), 1.0f + 0x1p-23f) &&
                         same(opaque(-one - more_than_half), -1.0f - 0x1p-23f) && // towards zero and up fail
                         same(opaque(one + half), 1.0f) && same(opaque(-one - half), -1.0f) &&
                         same(opaque(opaque(one + ulp) + half), 1.0f + 0x1p-22f); // the tie goes to the even neighbour
    e.subnormal_operands = same(opaque(opaque(0x1p-140f) * opaque(0x1p+100f)), 0x1p-40f);
    e.subnormal_results = same(opaque(opaque(0x1p-100f) * opaque(0x1p-40f)), 0x1p-140f);
    // 97 * 172961 = 2^24 + 1, half way between two floats; the addend decides, and is lost in double.
    float const a = opaque(97.0f), b = opaque(172961.0f);
    e.fma_correctly_rounded = same(opaque(fma(a, b, opaque(0x1p-40f))), 0x1p+24f + 2.0f) &&
                              same(opaque(fma(a, b, opaque(-0x1p-40f))), 0x1p+24f);
    // Here the compiler answers, in any rounding: (1 + t) - 1 becomes t where sums are reordered, 41 / 41 as 41 * (1 / 41) falls short
    // of 1, and x + 0 becomes x where zeros have no sign.
    float const tiny = opaque(0x1p-30f), minus_zero = opaque(-0.0f);
    e.compiled_as_written = same((one + tiny) - one, opaque(opaque(one + tiny) - one)) && same(opaque(41.0f) / 41.0f, 1.0f) &&
                            same(minus_zero + 0.0f, opaque(minus_zero + opaque(0.0f)));
    return e;
}

} // namespace keel::inline KEEL_ABI
