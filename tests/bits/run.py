#!/usr/bin/env python3
"""Same bits everywhere: each tests/bits/*.cpp prints lines `<case> <digest>`; this driver builds it for every architecture
level, runs what this machine executes (AArch64 under qemu), and requires equal lines. What cannot run is skipped aloud.

By default each level is built once, by compilers and optimisation in turn, and runs the reference and its own architecture;
--all builds each with both compilers, and runs every backend and every lesser pack in one of them. The objects of one program at
different levels must also share no weak symbol of keel."""
import itertools
import pathlib
import platform
import shutil
import subprocess
import sys
import time

here = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(here.parent / "support"), str(here.parent / "odr")]
import house
import symbols

# (name, -march flags, what /proc/cpuinfo must list)
X86_LEVELS = [
    ("x86-64-v2", ["-march=x86-64-v2"], symbols.NEEDS["v2"]),
    ("x86-64-v3", ["-march=x86-64-v3"], symbols.NEEDS["v3"]),
    ("x86-64-v4", ["-march=x86-64-v4"], symbols.NEEDS["v4"]),
    ("x86-64-v4+bf16", ["-march=x86-64-v4", "-mavx512bf16"], symbols.NEEDS["v4"] | {"avx512_bf16"}),
]
ARM_LEVELS = [("armv8-a", ["-march=armv8-a"], set())]


class build:
    """One program for one level: how it is compiled and started."""

    def __init__(self, program, level, compiler, optimisation, start=(), every_backend=False):
        self.program, self.level, self.compiler, self.optimisation, self.start = program, level, compiler, optimisation, start
        self.every_backend = every_backend
        self.label = f"{level[0]} {compiler} -{optimisation}"


def plan(programs, options):
    """The builds to make. Compilers and optimisation take turns over the levels, so that the default covers both at one price."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    native = X86_LEVELS if x86 else ARM_LEVELS
    here_executed = [level for level in native if not level[2] or level[2] <= symbols.cpu_flags()]
    for level in native:
        if level not in here_executed:
            print(f"{level[0]}: this machine does not execute it, skipped")
    compilers = house.compilers()
    foreign = []
    if x86:
        cross, qemu = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
        if cross and qemu:
            foreign = [(ARM_LEVELS[0], "aarch64-linux-gnu-g++", (qemu,))]
        else:
            print("aarch64: needs aarch64-linux-gnu-g++ and qemu-aarch64, skipped")

    turns = list(zip(reversed(compilers), ("O1", "O2")))
    builds = []
    for program in programs:
        for at, level in enumerate(here_executed):
            chosen = zip(compilers, ("O2", "O1") if at % 2 == 0 else ("O1", "O2")) if options.all else [turns[at % len(turns)]]
            builds += [build(program, level, compiler, optimisation, (), options.all and level == here_executed[-1] and compiler == compilers[0])
                       for compiler, optimisation in chosen]
        for level, compiler, start in foreign:
            builds += [build(program, level, compiler, o, start) for o in (("O1", "O2") if options.all else ("O1",))]
    return builds


def foreign_include_flags(options):
    """xsimd for a compiler of another machine, by way of a link: the folder it lies in may hold this machine's C library."""
    if options.xsimd:
        folder = pathlib.Path(options.xsimd.split(";")[0])
    else:
        _, listing = house.run(["g++", "-x", "c++", "-std=c++20", "-M", "-"], "#include <xsimd/xsimd.hpp>\n")
        found = [w for w in listing.split() if w.endswith("/xsimd/xsimd.hpp")]
        folder = pathlib.Path(found[0]).parents[1] if found else pathlib.Path("/usr/include")
    link = options.build / "bits" / "foreign" / "xsimd"
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(folder / "xsimd")
    return ["-I", str(house.include), "-isystem", str(link.parent)]


def make(job, options):
    """Compiles and runs one build: (job, {case: digest} or None, error text, seconds)."""
    began = time.monotonic()
    folder = options.build / "bits" / job.program.stem
    folder.mkdir(parents=True, exist_ok=True)
    stem = job.label.replace(" ", "_").replace("+", "p")
    target, binary = folder / f"{stem}.o", folder / stem
    includes = house.include_flags(options.xsimd) if not job.start else options.foreign
    launcher = ["env", f"CCACHE_BASEDIR={house.root}", shutil.which("ccache")] if shutil.which("ccache") else []
    compile_command = [*launcher, job.compiler, "-std=c++20", f"-{job.optimisation}", "-DNDEBUG", *job.level[1],
                       *([] if job.every_backend else ["-DKEEL_NATIVE_ONLY"]),
                       *house.WARNINGS, *includes, "-I", str(here.parent), "-c", job.program, "-o", target]
    link_command = [job.compiler, target, "-o", binary, "-pthread", *(["-static"] if job.start else [])]
    for command in (compile_command, link_command):
        code, output = house.run(command)
        if code != 0:
            return job, None, f"does not build:\n{house.errors(output)}", time.monotonic() - began
    job.object = target
    try:
        code, output = house.run([*job.start, binary], timeout=1800)
    except subprocess.TimeoutExpired:
        return job, None, "did not end", time.monotonic() - began
    lines = dict(line.rsplit(" ", 1) for line in output.splitlines() if " " in line)
    if code != 0 or not lines:
        return job, None, f"exit code {code}:\n{output[-1500:]}", time.monotonic() - began
    return job, lines, "", time.monotonic() - began


def compare(results):
    """Sentences about every case that is not the same in all builds of a program."""
    faults = [f"{job.program.name}, {job.label}: {error}" for job, lines, error, _ in results if lines is None]
    good = [(job, lines) for job, lines, _, _ in results if lines is not None]
    for program, group in itertools.groupby(good, key=lambda pair: pair[0].program):
        group = list(group)
        for case in sorted(set().union(*(lines for _, lines in group))):
            by_digest = {}
            for job, lines in group:
                by_digest.setdefault(lines.get(case, "missing"), []).append(job.label)
            if len(by_digest) > 1:
                faults.append(f"{program.name}: {case} differs: " + "; ".join(
                    f"{digest} by {', '.join(labels)}" for digest, labels in by_digest.items()))
        objects = {job.label: job.object for job, _ in group if not job.start}
        at = {label: label.split()[0] for label in objects}
        faults += [f"{program.name}: {text}" for text in symbols.shared(objects, "4keel", lambda a, b: at[a] != at[b])]
    return faults


def main():
    parser = house.arguments()
    parser.add_argument("--all", action="store_true", help="both compilers for each level, and every backend in one build")
    parser.add_argument("--only", default="", help="the programs whose name contains this")
    options = parser.parse_args()
    programs = [p for p in sorted(here.glob("*.cpp")) if options.only in p.name]
    if not programs:
        print("bits: there is no program in tests/bits")
        return 1
    builds = plan(programs, options)
    if any(job.start for job in builds):
        options.foreign = foreign_include_flags(options)
    results = house.in_parallel(builds, lambda job: make(job, options), options.jobs)
    for job, lines, _, seconds in results:
        print(f"{job.program.stem:24} {job.label:36} {len(lines) if lines else 'no':>5} cases {seconds:7.1f} s")
    cases = sum(len(lines) for lines in {job.program: lines for job, lines, _, _ in results if lines}.values())
    return house.report(f"bits: {cases} cases, {len(builds)} builds of {len(programs)} programs", compare(results))


if __name__ == "__main__":
    sys.exit(main())
