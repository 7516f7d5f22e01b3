// The probe sees what a caller, or a library the caller loaded, did to the floating-point environment.
#include <cfenv>
#include <string>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <keel/core/environment.hpp>

#include "support/catch.hpp"

namespace {

/// Probes under another rounding direction, which is put back.
keel::floating_point_environment probe_rounding(int direction) {
    int const before = std::fegetround();
    std::fesetround(direction);
    auto const e = keel::probe();
    std::fesetround(before);
    return e;
}

} // namespace

TEST_CASE("the default environment passes the probe") {
    auto const e = keel::probe();
    CHECK(e.round_to_nearest);
    CHECK(e.subnormal_operands);
    CHECK(e.subnormal_results);
    CHECK(e.fma_correctly_rounded);
    CHECK(e.compiled_as_written);
    CHECK(e.ok());
    CHECK(e.message() == std::string("ok"));
}

TEST_CASE("the probe sees directed rounding") {
    for (int const direction : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
        auto const e = probe_rounding(direction);
        CHECK_FALSE(e.round_to_nearest);
        CHECK(e.compiled_as_written); // no flag's doing
        CHECK_FALSE(e.ok());
        CHECK(e.message() == std::string("rounding is not to nearest"));
    }
    CHECK(probe_rounding(FE_TONEAREST).ok());
}

#if defined(__SSE2__)
TEST_CASE("the probe tells flushed operands from flushed results, and leaves the control register as it was") {
    unsigned const before = _mm_getcsr();
    constexpr unsigned flags = 0x3f, daz = 0x40, ftz = 0x8000;
    struct {
        unsigned bit;
        bool operands, results;
    } const rows[] = {{0, true, true}, {daz, false, true}, {ftz, true, false}, {daz | ftz, false, false}};
    for (auto const& r : rows) {
        _mm_setcsr(before | r.bit);
        auto const e = keel::probe();
        unsigned const after = _mm_getcsr();
        _mm_setcsr(before);
        CHECK(e.round_to_nearest);
        CHECK(e.subnormal_operands == r.operands);
        CHECK(e.subnormal_results == r.results);
        CHECK(e.ok() == (r.bit == 0));
        CHECK((after & ~flags) == ((before | r.bit) & ~flags));
    }
    CHECK(keel::probe().ok());
}
#endif
