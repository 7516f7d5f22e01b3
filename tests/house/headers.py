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


def jobs(headers):
    """(what is compiled, compiler, lines, flags): each header alone and twice; all of them without exceptions and RTTI, with
    assertions off, after the macros. The standard library would not survive those either, so what keel includes of others
    comes before them."""
    compilers = house.compilers()
    for header in headers:
        yield header, compilers[0], [f"#include <{header}>"] * 2, []
    others = sorted(set().union(*(house.included(h) for h in headers)))
    others = [f"#include {name}" for name in others if not name.startswith("<keel/") and (name != "<arm_neon.h>" or not X86)]
    for compiler in compilers:
        yield ("all headers, without exceptions and RTTI, after hostile macros", compiler,
               others + HOSTILE + [f"#include <{h}>" for h in headers], ["-fno-exceptions", "-fno-rtti", "-DNDEBUG"])


def main():
    options = house.arguments().parse_args()
    headers = [h for h in house.headers() if belongs_here(h)]
    if len(headers) < 3:
        print("headers: hardly any header was found; is the tree complete?")
        return 1
    eigen = ["-isystem", house.eigen_directory()] if house.eigen_directory() else []

    def compile_one(job):
        what, compiler, lines, flags = job
        code, output = house.run([compiler, "-std=c++20", "-fsyntax-only", *house.WARNINGS, *flags, *eigen,
                                  *house.include_flags(options.xsimd), "-x", "c++", "-"], "\n".join(lines) + "\n")
        return None if code == 0 else (f"{compiler}:\n{house.errors(output)}", what)

    todo = list(jobs(headers))
    same_error = {}
    for errors, what in filter(None, house.in_parallel(todo, compile_one, options.jobs)):
        same_error.setdefault(errors, []).append(what)
    failures = [f"{', '.join(whats)}: {errors}" for errors, whats in same_error.items()]
    return house.report(f"headers: {len(todo)} compilations of {len(headers)} headers", failures)


if __name__ == "__main__":
    sys.exit(main())
