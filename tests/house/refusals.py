#!/usr/bin/env python3
"""What must not compile: flags that delete NaN tests or change rounding, and a language before C++20."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

REFUSED = [
    ("g++", ["-std=c++20", "-ffast-math"], "fast-math"),
    ("g++", ["-std=c++20", "-Ofast"], "fast-math"),
    ("g++", ["-std=c++20", "-ffinite-math-only"], "finite-math"),
    ("clang++", ["-std=c++20", "-ffast-math"], "fast-math"),
    ("clang++", ["-std=c++20", "-ffinite-math-only"], "finite-math"),
    ("g++", ["-std=c++17"], "C++20"),
    ("clang++", ["-std=c++17"], "C++20"),
]


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
    return house.report("refusals", failures)


if __name__ == "__main__":
    sys.exit(main())
