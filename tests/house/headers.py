#!/usr/bin/env python3
"""Each public header compiles alone, as a stranger would include it: first thing in a file and twice, under all warnings,
without exceptions and RTTI, and after a header that defines min, max and other short names as macros."""
import pathlib
import platform
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

HOSTILE = ["#define min(a, b) macro_of_another_library", "#define max(a, b) macro_of_another_library"]
HOSTILE += [f"#define {name} macro_of_another_library" for name in "small near far interface IN OUT ERROR".split()]


X86 = platform.machine() in ("x86_64", "AMD64")


def belongs_here(header):
    """False for what needs another machine's intrinsics, and for Eigen's header where there is no Eigen."""
    if header.endswith("_neon.hpp"):
        return not X86
    if header.endswith(("_x86.hpp", "_avx512.hpp")):
        return X86
    return not house.needs_eigen(header) or house.eigen_directory() is not None


def source(compiler, header):
    """(what is tried, text, flags) for one header."""
    include = f"#include <{header}>"
    if compiler == "g++":
        return "twice, assertions on", [include, include], []
    # The standard library would not survive the macros either: what keel includes of others comes before them.
    others = sorted(f"#include {name}" for name in house.included_deeply(header)
                    if not name.startswith("<keel/") and (name != "<arm_neon.h>" or not X86))
    return ("without exceptions and RTTI, after hostile macros", others + HOSTILE + [include],
            ["-fno-exceptions", "-fno-rtti", "-DNDEBUG"])


def main():
    options = house.arguments().parse_args()
    headers = [h for h in house.headers() if belongs_here(h)]
    if len(headers) < 3:
        print("headers: hardly any header was found; is the tree complete?")
        return 1

    def compile_one(job):
        compiler, header = job
        name, lines, flags = source(compiler, header)
        if house.needs_eigen(header):
            flags = flags + ["-isystem", house.eigen_directory()]
        code, output = house.run([compiler, "-std=c++20", "-fsyntax-only", *house.WARNINGS, *flags,
                                  *house.include_flags(options.xsimd), "-x", "c++", "-"], "\n".join(lines) + "\n")
        return None if code == 0 else (f"{compiler}, {name}", header, house.errors(output))

    jobs = [(compiler, header) for compiler in house.compilers() for header in headers]
    same_error = {}
    for how, header, errors in filter(None, house.in_parallel(jobs, compile_one, options.jobs)):
        same_error.setdefault((how, errors), []).append(header)
    failures = [f"{', '.join(who)} ({how}):\n{errors}" for (how, errors), who in same_error.items()]
    return house.report(f"headers: {len(jobs)} compilations of {len(headers)} headers", failures)


if __name__ == "__main__":
    sys.exit(main())
