#!/usr/bin/env python3
"""All 2^32 floats to every format under every policy, once for each architecture level that this machine executes: by float
alone, by SSE2, and by the packs of each level of tests/bits. AArch64 runs under qemu, where it takes the edges of the runs of
equal codes. What cannot run is skipped aloud. tests/run.sh --all runs this; a level takes a minute of two cores, or less."""
import itertools
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time

here = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(here.parent / "support"), str(here.parent / "odr"), str(here.parent / "bits")]
import house
import run as bits
import symbols

# Plain code: one float at a time, so no compiler may make packs of its own.
SCALAR = ["-DKEEL_SWEEP_SCALAR", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"]


class build:
    """One level: how it is compiled and started."""

    def __init__(self, name, flags, compiler, start=(), arguments=()):
        self.name, self.flags, self.compiler, self.start, self.arguments = name, flags, compiler, start, list(arguments)


def plan():
    """The builds to make; compilers take turns."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    compilers = itertools.cycle(house.compilers())
    if x86:
        levels = [("x86-64", ["-march=x86-64"], set()), *bits.X86_LEVELS]
    else:
        levels = bits.ARM_LEVELS
    builds = [build("float", [*SCALAR, *levels[0][1]], next(compilers))]
    for name, flags, needs in levels:
        if needs and not needs <= symbols.cpu_flags():
            print(f"{name}: this machine does not execute it, skipped")
        else:
            builds.append(build(name, flags, next(compilers)))
    if x86:
        cross, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        if cross and qemu:
            builds.append(build("armv8-a", bits.ARM_LEVELS[0][1], "aarch64-linux-gnu-g++", (qemu,), ["--edges"]))
        else:
            print("aarch64: needs aarch64-linux-gnu-g++ and qemu-aarch64, skipped")
    return builds


def make(job, options):
    """Compiles one build; what went wrong, or nothing."""
    job.binary = options.build / "sweep" / job.name.replace("+", "p")
    job.binary.parent.mkdir(parents=True, exist_ok=True)
    includes = options.foreign if job.start else house.include_flags(options.xsimd)
    launcher = ["env", f"CCACHE_BASEDIR={house.root}", shutil.which("ccache")] if shutil.which("ccache") else []
    target = job.binary.with_suffix(".o")
    for command in ([*launcher, job.compiler, "-std=c++20", "-O2", "-DNDEBUG", *job.flags, *house.WARNINGS, *includes,
                     "-I", here.parent, "-c", here / "floats.cpp", "-o", target],
                    [job.compiler, target, "-o", job.binary, "-pthread", *(["-static"] if job.start else [])]):
        code, output = house.run(command)
        if code != 0:
            return f"{job.name} {job.compiler}: does not build:\n{house.errors(output)}"
    return ""


def sweep(job, options):
    """Runs one build on all cores; what went wrong, or nothing."""
    began = time.monotonic()
    try:
        code, output = house.run([*job.start, job.binary, *job.arguments, "--threads", options.jobs], timeout=3600)
    except subprocess.TimeoutExpired:
        return f"{job.name} {job.compiler}: did not end"
    spent = sum(float(seconds) for seconds in re.findall(r"([\d.]+) s of processors", output))
    print(f"{job.name:16} {job.compiler:24} {' '.join(job.arguments) or 'all floats':12}"
          f"{time.monotonic() - began:7.1f} s, {spent:6.1f} s of processors", flush=True)
    return "" if code == 0 else f"{job.name} {job.compiler}: exit code {code}:\n{output[-1500:]}"


def main():
    parser = house.arguments()
    parser.add_argument("--only", default="", help="the levels whose name contains this")
    options = parser.parse_args()
    builds = [job for job in plan() if options.only in job.name]
    if any(job.start for job in builds):
        options.foreign = bits.foreign_include_flags(options)
    faults = [fault for fault in house.in_parallel(builds, lambda job: make(job, options), options.jobs) if fault]
    if not faults:
        faults = [fault for fault in (sweep(job, options) for job in builds) if fault]
    return house.report(f"sweep: {len(builds)} levels", faults)


if __name__ == "__main__":
    sys.exit(main())
