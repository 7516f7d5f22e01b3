// a*b + c with one rounding, from double arithmetic: for machines without the instruction, and as a test oracle.
#pragma once

#include <bit>

#include <keel/config.hpp>

namespace keel::inline KEEL_ABI::detail {

/// fma(a, b, c) by way of a double rounded to odd.
///
/// The product of two floats is exact in double. Knuth's two-sum gives s = fl(p + c) and its error e. Where e is not
/// zero and the last bit of s is even, s moves one ulp towards e: an odd last bit tells the final rounding to float that
/// something lies beyond it, and with 29 bits to spare (more for subnormals) that rounding is then the only one
/// (Boldo and Melquiond, "Emulation of a FMA and correctly-rounded sums", 2008).
KEEL_FN float exact_fma(float a, float b, float c) {
    double const p = static_cast<double>(a) * static_cast<double>(b);
    double const addend = static_cast<double>(c);
    double const s = p + addend;
    double const t = s - p;
    double const e = (p - (s - t)) + (addend - t); // NaN where s is not finite
    uint64_t word = std::bit_cast<uint64_t>(s);
    uint64_t const error = std::bit_cast<uint64_t>(e);
    uint64_t const size = error & 0x7fffffffffffffffull;
    bool const inexact = size != 0 && size <= 0x7ff0000000000000ull;
    if (inexact && (word & 1) == 0) word += ((word ^ error) >> 63) != 0 ? ~uint64_t{0} : uint64_t{1};
    return static_cast<float>(std::bit_cast<double>(word));
}

} // namespace keel::inline KEEL_ABI::detail
