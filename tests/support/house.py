"""What the scripts among the tests share: where things lie, which compilers there are, and running many jobs at once."""
import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess

root = pathlib.Path(__file__).resolve().parents[2]
include = root / "include"

WARNINGS = "-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wdouble-promotion -Wundef -Werror".split()
SKIPPED = 77  # ctest reads this exit code as "skipped"


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--xsimd", default="", help="include directory of xsimd, where the compiler does not find it")
    parser.add_argument("--build", type=pathlib.Path, default=root / "build" / "scripts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    return parser


def headers(cuda=False):
    """All public headers as written in an #include, without those that need a CUDA compiler."""
    found = sorted(p.relative_to(include).as_posix() for p in include.rglob("*") if p.suffix in (".hpp", ".cuh"))
    return [h for h in found if cuda or not needs_cuda(h)]


def needs_cuda(header):
    return header.endswith(".cuh") or header == "keel/cuda.hpp" or header.startswith("keel/backend/cuda/")


def needs_eigen(header):
    return header == "keel/interop/eigen.hpp"


def included(header):
    """What a public header includes, as written: {'<bit>', '<keel/config.hpp>', ...}."""
    return set(re.findall(r'^[ \t]*#[ \t]*include[ \t]*([<"][^>"]+[>"])', (include / header).read_text(), re.M))


def eigen_directory():
    for place in ("/usr/include/eigen3", "/usr/local/include/eigen3", "/opt/homebrew/include/eigen3"):
        if pathlib.Path(place).is_dir():
            return place
    return None


def compilers():
    """The C++ compilers that are tried: g++ and clang++, those of them that are installed."""
    found = [c for c in ("g++", "clang++") if shutil.which(c)]
    for missing in {"g++", "clang++"} - set(found):
        print(f"{missing}: not installed, skipped")
    return found


def include_flags(xsimd):
    # Directories that a compiler searches anyway stay out: named again they would change the order of the search.
    extra = [d for d in xsimd.split(";") if d and d not in ("/usr/include", "/usr/local/include")]
    return ["-I", str(include)] + [part for d in extra for part in ("-isystem", d)]


def run(command, text=None, timeout=1200, **options):
    """Runs a command to its end; its exit code and all it printed."""
    done = subprocess.run([str(c) for c in command], input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=timeout, **options)
    return done.returncode, done.stdout


def errors(output, most=4):
    """The lines of a compiler's output that matter."""
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
    return "\n".join("    " + line for line in lines[:most])


def in_parallel(jobs, work, count):
    """[work(job) for job in jobs], `count` at a time."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, count)) as pool:
        return list(pool.map(work, jobs))


def report(what, failures):
    """Prints the failures and the closing line, and gives the exit code."""
    for failure in failures:
        print(failure.rstrip())
    print(f"{what}: " + (f"{len(failures)} failed" if failures else "all well"))
    return 1 if failures else 0
