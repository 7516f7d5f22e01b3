#!/usr/bin/env python3
"""Objects compiled at different -march levels live in one program: they share no weak symbol (the linker would keep one of
them, perhaps with instructions that the machine lacks), they define no strong symbol of keel, and each gives the same bits."""
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

# What -march says, and extensions that no level has or that one lacks: each is code of its own.
LEVELS = {"v2": ["-march=x86-64-v2"], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"],
          "avx2_without_fma": ["-march=x86-64-v2", "-mavx2"], "v3_without_bmi2": ["-march=x86-64-v3", "-mno-bmi2"],
          "avx512f": ["-march=x86-64-v3", "-mavx512f"], "v4_vbmi": ["-march=x86-64-v4", "-mavx512vbmi"]}
PLAIN_LEVELS = {level: LEVELS[level] for level in ("v2", "v3", "v4")}
ARM_LEVELS = {"armv8": ["-march=armv8-a"], "sve": ["-march=armv8.2-a+sve"]}
# What each level must execute; the names are those of the kernel.
V2 = {"sse4_2", "ssse3", "popcnt"}
V3 = V2 | {"avx2", "fma", "bmi2", "f16c"}
V4 = V3 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDS = {"v2": V2, "v3": V3, "v4": V4, "avx2_without_fma": V2 | {"avx2"}, "v3_without_bmi2": V3, "avx512f": V3 | {"avx512f"},
         "v4_vbmi": V4 | {"avx512vbmi"}}
LEAKY = "template <class T> __attribute__((noinline)) T twice(T x) { return x + x; }\nextern \"C\" float KEEL_ENTRY(float x) { return twice(x); }\n"


def cpu_flags():
    """What this machine executes, in the kernel's names; empty where it does not say."""
    try:
        return set(pathlib.Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    except (OSError, IndexError):
        return set()


def executes(level):
    return NEEDS[level] <= cpu_flags()


OF_TESTS = re.compile("_ZN?K?9keel_test") # the mangled names of functions in namespace keel_test


def symbols(path):
    """{(kind, mangled name)} of what an object defines."""
    lines = subprocess.run(["nm", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    return {tuple(line.split()[1:3]) for line in lines.splitlines() if len(line.split()) == 3}


def readable(name):
    return subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()[:200]


def shared(objects, only="", differ=lambda a, b: True):
    """Weak code that two of the objects {label: path} both define. Data (V, u) is the same at any -march. Only names that
    contain `only` count and that are none of the tests' own helpers, and only pairs whose labels `differ` in level."""
    found, labels = [], list(objects)
    weak = {label: {name for kind, name in symbols(objects[label]) if kind == "W" and only in name and not OF_TESTS.match(name)}
            for label in labels}
    for i, a in enumerate(labels):
        for b in [other for other in labels[i + 1:] if differ(a, other)]:
            found += [f"{a} and {b} share a weak symbol: {readable(name)}" for name in sorted(weak[a] & weak[b])]
    return found


def strong(path, label):
    """keel functions that a second object would define again: not inline, in a header."""
    return [f"{label} defines a strong symbol of keel: {readable(name)}" for kind, name in symbols(path)
            if kind in "TDBR" and name.startswith("_Z") and "4keel" in name]


def check(compiler, source, folder, flags, levels=LEVELS):
    """Faults of one source compiled with one compiler at all levels, and the objects."""
    def compile_one(level):
        target = folder / f"{compiler}_{level}.o"
        code, output = house.run([compiler, "-std=c++20", "-O2", *levels[level], *flags,
                                  f"-DKEEL_ENTRY=entry_{level}", "-c", source, "-o", target])
        return (target, None) if code == 0 else (None, f"{compiler} at {level} does not compile:\n{house.errors(output)}")

    built = dict(zip(levels, house.in_parallel(levels, compile_one, os.cpu_count() or 1)))
    faults = [fault for _, fault in built.values() if fault]
    objects = {f"{compiler} {level}": target for level, (target, _) in built.items() if target}
    faults += shared(objects)
    for label, target in objects.items():
        faults += strong(target, label)
    return faults, objects


def one_program(compiler, objects, folder):
    """Links all objects that this machine executes into one program; each must give the same digest."""
    compiled = [label.split()[1] for label in objects]
    levels = [level for level in compiled if executes(level)]
    print(f"{compiler}: one program of {', '.join(levels)}" + "".join(
        f"; {level} is not executed here, skipped" for level in compiled if level not in levels))
    calls = "".join(f'extern "C" unsigned long long entry_{level}();\n' for level in levels)
    calls += "int main() {\n" + "".join(f'    std::printf("{level} %llx\\n", entry_{level}());\n' for level in levels) + "}\n"
    (folder / "main.cpp").write_text("#include <cstdio>\n" + calls)
    binary = folder / f"{compiler}_program"
    code, output = house.run([compiler, folder / "main.cpp", *[objects[f"{compiler} {level}"] for level in levels],
                              "-o", binary, "-pthread"])
    if code == 0:
        code, output = house.run([binary])
    digests = {line.split()[1] for line in output.splitlines() if len(line.split()) == 2}
    if code != 0 or len(digests) != 1 or "0" in digests:
        return [f"{compiler}: the levels in one program do not agree (0: the backends differ):\n{output[:2000]}"]
    return []


def main():
    options = house.arguments().parse_args()
    if platform.machine() not in ("x86_64", "AMD64"):
        print("symbols: the levels are x86-64's, skipped here")
        return house.SKIPPED
    faults = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "leaky.cpp").write_text(LEAKY)
        for i, compiler in enumerate(house.compilers()): # the names of the extensions are the same for all compilers
            levels = LEVELS if i == 0 else PLAIN_LEVELS
            if not check(compiler, folder / "leaky.cpp", folder, [], PLAIN_LEVELS)[0]:
                faults.append(f"{compiler}: a shared weak symbol was shown and not seen")
            found, objects = check(compiler, house.root / "tests/odr/library.cpp", folder, house.include_flags(options.xsimd), levels)
            faults += found or one_program(compiler, objects, folder)
        cross = "aarch64-linux-gnu-g++"
        if shutil.which(cross): # compiled, not run: tests/bits runs that architecture
            print(f"{cross}: objects of {', '.join(ARM_LEVELS)}")
            faults += check(cross, house.root / "tests/odr/library.cpp", folder, house.include_flags(options.xsimd), ARM_LEVELS)[0]
    return house.report("symbols", faults)


if __name__ == "__main__":
    sys.exit(main())
