#!/usr/bin/env python3
"""What must not compile: flags that delete NaN tests or change rounding, a language before C++20, blocks whose scales do not fit
their consumer, numbers that are not encoded, and Newton-Schulz coefficients that are unsafe in their storage type and not named so; with a
word that helps. Where a compiler has no macro for its flag, the probe must tell."""
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

REFUSED = [
    ("g++", ["-std=c++20", "-ffast-math"], "fast-math"),
    ("g++", ["-std=c++20", "-Ofast"], "fast-math"),
    ("g++", ["-std=c++20", "-ffinite-math-only"], "finite-math"),
    ("g++", ["-std=c++20", "-funsafe-math-optimizations"], "associative-math"),
    ("g++", ["-std=c++20", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"], "associative-math"),
    ("g++", ["-std=c++20", "-freciprocal-math"], "reciprocal-math"),
    ("g++", ["-std=c++20", "-fno-signed-zeros"], "signed-zeros"),
    ("clang++", ["-std=c++20", "-ffast-math"], "fast-math"),
    ("clang++", ["-std=c++20", "-ffinite-math-only"], "finite-math"),
    ("g++", ["-std=c++17"], "C++20"),
    ("clang++", ["-std=c++17"], "C++20"),
]

# clang defines no macro for these: the probe's message instead of "ok".
PROBED = [["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"], ["-freciprocal-math"], ["-fno-signed-zeros"],
          ["-funsafe-math-optimizations"]]
PROBE = "#include <cstdio>\n#include <keel/core/environment.hpp>\nint main() { std::puts(keel::probe().message()); }\n"


# The types compile alone, and with none of the refused lines after them; the third word is one that the error says.
TYPES = """#include <keel/backend/reference.hpp>
#include <keel/quantize/quantize.hpp>
using namespace keel;
status microscaling(mx_blocks<e4m3> q, view<float, 2> y) { return dequantize(reference{}, q, y); }
status accepted(view<float, 2> y) { return microscaling(mx_blocks<e4m3>{}, y); }
"""
TYPES_REFUSED = [
    ("an fp32 scale for a consumer of e8m0", "status f(view<float, 2> y) { return microscaling(block_scaled<e4m3, fp32_scale, 1, 32>{}, y); }"),
    ("an fp32 power of two for a consumer of e8m0",
     "status f(view<float, 2> y) { return microscaling(block_scaled<e4m3, power_of_two_scale, 1, 32>{}, y); }"),
    ("ocp_floor with fp32 scales", "status f(view<float, 2> x, row_blocks<> q) { "
     "return quantize<overflow::saturate, scale_rules::ocp_floor>(reference{}, x, q); }", "power_of_two_scale"),
    ("a float as a kind of scale", "block_scaled<e4m3, float, 1, 128> q;", "kind_of_scale"),
    ("a matrix of doubles", "status f(view<double, 2> x, row_blocks<> q) { return quantize<overflow::saturate>(reference{}, x, q); }", "not double"),
    ("bf16 as a code", "status f(view<float, 2> x, row_blocks<minifloat<8, 7, 127, specials::ieee>> q) { "
     "return quantize<overflow::saturate>(reference{}, x, q); }", "e4m3, e5m2 or another format"),
    ("a cast to a format", "e4m3 f(float x) { return e4m3(x); }", "encode"),
    ("a scale cast from a number", "e8m0 f(float x) { return static_cast<e8m0>(x); }", "encode"),
    ("a code as a float", "float f(e4m3 x) { return x; }", "decode"),
    ("arithmetic on codes", "float f(e8m0 x) { return x * 2.0f; }", "decode"),
    ("FP8 without a word on overflow", "e4m3 f(float x) { return encode<e4m3>(x); }", "overflow::saturate"),
    ("codes that are only read, as an output",
     "status f(view<float, 2> x, row_blocks<e4m3 const> q) { return quantize<overflow::saturate>(reference{}, x, q); }"),
]

# As above: every set here compiles by unsafe_coefficients, and those that follow do not by coefficients.
SETS = """#include <keel/optim/newton_schulz.hpp>
#include <keel/format/f16.hpp>
using namespace keel;
newton_schulz_options<float> const safe{.coefficients = coefficients<polar_express>()};
newton_schulz_options<bf16> const named{.coefficients = unsafe_coefficients<cubic_relaxed, bf16>()};
newton_schulz_coefficients<float> const more[] = {unsafe_coefficients<cans>(), unsafe_coefficients<polar_express_raw>(),
                                                  unsafe_coefficients<turbo_aol_early>(), coefficients<cubic_relaxed>()};
newton_schulz_step const own[] = {{3.0f, 0.0f, 0.0f}};
"""
SETS_REFUSED = [(f"{name} in {kind}", f"auto const c = coefficients<{name}, {kind}>();", "certified_set")
                for name, kinds in [("cans", ("float", "f16", "bf16")), ("polar_express_raw", ("float", "f16", "bf16")),
                                    ("turbo_aol_early", ("float", "f16", "bf16")), ("cubic_relaxed", ("bf16",))] for kind in kinds] + [
    ("steps of one's own that nothing has certified", "newton_schulz_coefficients<float> const c{own, 1, \"own\", \"\", {}};"),
    ("coefficients of another type's certificate", "newton_schulz_options<bf16> const o{.coefficients = coefficients<cubic_relaxed>()};"),
]


def probe(compiler, flags, options):
    with tempfile.TemporaryDirectory() as folder:
        program = str(pathlib.Path(folder) / "probe")
        command = [compiler, "-std=c++20", "-O2", *flags, *house.include_flags(options.xsimd), "-x", "c++", "-", "-o", program]
        code, output = house.run(command, PROBE)
        return output if code else house.run([program])[1]


def main():
    options = house.arguments().parse_args()
    text, failures, known = "#include <keel/config.hpp>\n", [], house.compilers()
    for compiler, flags, reason in [r for r in REFUSED if r[0] in known]:
        command = [compiler, "-fsyntax-only", *house.include_flags(options.xsimd), "-x", "c++", "-"]
        code, output = house.run(command + flags, text)
        if code == 0 or "keel" not in output or reason not in output:
            failures.append(f"{compiler} {' '.join(flags)}: not refused with a clear message\n{house.errors(output)}")
        if house.run(command + ["-std=c++20"], text)[0] != 0:
            failures.append(f"{compiler} refuses plain C++20 as well")
    if "clang++" in known:
        if probe("clang++", [], options) != "ok\n":
            failures.append("clang++: the probe finds fault with plain flags")
        failures += [f"clang++ {' '.join(f)}: the probe says ok" for f in PROBED
                     if probe("clang++", f, options) == "ok\n"]
    for compiler in known:
        command = [compiler, "-std=c++20", "-fsyntax-only", *house.include_flags(options.xsimd), "-x", "c++", "-"]
        for what, start, refused in (("blocks that fit", TYPES, TYPES_REFUSED), ("certified sets", SETS, SETS_REFUSED)):
            code, output = house.run(command, start)
            if code != 0:
                failures.append(f"{compiler} refuses {what}\n{house.errors(output)}")
            for wrong, text, *words in refused:
                code, output = house.run(command, start + text)
                if code == 0:
                    failures.append(f"{compiler} takes {wrong}")
                failures += [f"{compiler} refuses {wrong} without a word of {word}\n{house.errors(output)}" for word in words if word not in output]
    return house.report("refusals", failures)


if __name__ == "__main__":
    sys.exit(main())
