#!/usr/bin/env python3
"""The rules of the house that can be read off the text of the tree: who may include whom, what public headers never use,
how long a file may be, and that no file names a place on somebody's machine."""
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

LONGEST = 400  # lines that hold code

# Floors, bottom first. A header includes only headers of its own floor and of those below.
FLOORS = [
    [r"keel/(version|config)\.hpp"],
    [r"keel/core/.*"],
    [r"keel/format/.*"],
    [r"keel/backend/[^/]*\.hpp"],
    [r"keel/backend/(cpu|cuda)/.*"],
    [r"keel/(quantize|norm|attention|moe|optim|nn|guard)/.*"],
    [r"keel/(interop|comm)/.*"],
    [r"keel/(keel|cuda)\.hpp"],
]
FAMILY = re.compile(r"keel/(quantize|norm|attention|moe|optim|nn|guard)/")
CONCRETE_BACKEND = re.compile(r"keel/(backend/(cpu|cuda)/.*|backend/(reference|simt|warp_group)\.hpp|keel\.hpp|cuda\.hpp)")

# (what is looked for, where it may stand, why not elsewhere)
FOREIGN = [
    (r"xsimd/.*", r"keel/backend/cpu/.*", "only backend/cpu sees xsimd"),
    (r"Eigen/.*", r"keel/interop/eigen\.hpp", "only interop/eigen.hpp sees Eigen"),
    (r"cuda.*|cub/.*|nv.*|cublas.*", r"keel/backend/cuda/.*|keel/cuda\.hpp", "only backend/cuda and cuda.hpp see CUDA"),
    (r"immintrin\.h|[a-z]+intrin\.h|arm_neon\.h", r"keel/backend/.*", "intrinsics belong to a backend"),
    (r"omp\.h|thread|mutex|atomic|condition_variable|barrier|latch|semaphore", r"keel/backend/cpu/(executor|thread_pool).*",
     "threads come from the caller's executor"),
    (r"iostream|ostream|istream|fstream|sstream|iomanip|cstdio|stdio\.h|filesystem", r"keel/core/status\.hpp",
     "no input or output"),
    (r"string", r"keel/core/(status|report)\.hpp|keel/.*plan\.hpp", "text is made only where a person asks for it"),
    (r"memory", r"keel/backend/cpu/thread_pool\.hpp", "no allocation"),
    (r"vector|map|unordered_map|set|list|deque|memory_resource|functional|any|regex", r"", "no allocation"),
    (r"random|cmath|math\.h|numeric|algorithm", r"", "libm and std algorithms differ between machines and -march levels"),
]
TOKENS = [
    (r"\bstd::(string|to_string)\b", r"keel/core/(status|report)\.hpp|keel/.*plan\.hpp",
     "text is made only where a person asks for it"),
    (r"\bstd::(vector|map|unordered_map|function|unique_ptr|shared_ptr|make_unique|make_shared)\b",
     r"keel/backend/cpu/thread_pool\.hpp", "no allocation"),
    (r"\bnew\b(?!\s*\()|\bdelete\b\s*(\[\s*\]\s*)?[A-Za-z_]|\b(malloc|calloc|realloc|free|aligned_alloc)\s*\(",
     r"keel/backend/cpu/thread_pool\.hpp", "no allocation"),
    (r"\bstd::(min|max|clamp|minmax|sort|stable_sort|nth_element|accumulate|reduce|transform)\b", r"",
     "std algorithms leave one weak symbol for all -march levels"),
    (r"\bstd::(isnan|isinf|isfinite|signbit|exp|log|pow|tanh|sqrt|fma|abs|fabs|floor|round|nearbyint)\b", r"",
     "no libm in kernels; NaN tests are made on bits"),
    (r"\bthrow\b", r"keel/core/status\.hpp", "only status::or_throw throws"),
    (r"\b(printf|fprintf|puts|fputs|abort|exit)\s*\(", r"keel/core/status\.hpp", "no input or output, and no exit"),
    (r"\bstd::(thread|jthread|mutex|atomic)\b", r"keel/backend/cpu/(executor|thread_pool)\.hpp",
     "threads come from the caller's executor"),
    (r"\b(fesetround|_MM_SET_\w+|_mm_setcsr)\s*\(", r"", "the floating-point environment is left as found"),
    (r"\bthread_local\b", r"", "no global state"),
]
MACHINE_PATH = re.compile(r"(?<![\w.~}$])/(home|root|Users|work|mnt/[a-z])/[\w.-]+")
LEFT_OPEN = re.compile(r"\b(TODO|FIXME|XXX)\b")
TEXT_FILES = {".hpp", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", ".in", ".txt", ".md", ".json", ".yml", ""}


def without_comments(text):
    """The text with comments and the insides of literals blanked, line by line."""
    def blank(match):
        found = match.group(0)
        return "\n" * found.count("\n") if found.startswith("/") else found[0] + found[-1]
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def floor(header):
    for number, patterns in enumerate(FLOORS):
        if any(re.fullmatch(p, header) for p in patterns):
            return number
    return None


def header_faults(header, text):
    """What is wrong with one public header, as sentences."""
    own = floor(header)
    if own is None:
        yield f"{header}: stands on no floor (add its folder to FLOORS in {pathlib.Path(__file__).name})"
        return
    if "#pragma once" not in text:
        yield f"{header}: has no #pragma once"
    code = without_comments(text)
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not match:
            continue
        where, name = f"{header}:{number}", match.group(2)
        if name.startswith("keel/") or match.group(1) == '"':
            if match.group(1) == '"':
                yield f'{where}: includes "{name}"; keel\'s own headers are written <keel/...>'
            elif floor(name) is not None and floor(name) > own:
                yield f"{where}: includes upwards: {name}"
            elif FAMILY.match(header) and CONCRETE_BACKEND.fullmatch(name):
                yield f"{where}: a primitive names no concrete backend: {name}"
            continue
        for pattern, place, why in FOREIGN:
            if re.fullmatch(pattern, name) and not re.fullmatch(place, header):
                yield f"{where}: includes <{name}>: {why}"
    for number, line in enumerate(code.splitlines(), 1):
        if re.match(r"\s*#", line):
            continue
        for pattern, place, why in TOKENS:
            match = re.search(pattern, line)
            if match and not re.fullmatch(place, header):
                yield f"{header}:{number}: uses {match.group(0).strip()}: {why}"


def cycles(includes):
    """Circles in the include graph {header: [headers]}."""
    state, found = {}, []

    def visit(header, path):
        state[header] = "open"
        for name in includes.get(header, []):
            if state.get(name) == "open":
                found.append("includes in a circle: " + " -> ".join(path[path.index(name):] + [name]))
            elif name not in state:
                visit(name, path + [name])
        state[header] = "closed"

    for header in includes:
        if header not in state:
            visit(header, [header])
    return found


def file_faults(path, text):
    """What is wrong with any text file of the tree."""
    if path.suffix in (".hpp", ".cuh", ".cpp", ".cu"):
        lines = sum(1 for line in without_comments(text).splitlines() if line.strip())
        if lines > LONGEST:
            yield f"{path}: {lines} lines of code; a file holds one idea, in at most {LONGEST}"
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: names a place on somebody's machine: {MACHINE_PATH.search(line).group(0)}"
        if LEFT_OPEN.search(line) and path != pathlib.Path("tests/house/rules.py"):
            yield f"{path}:{number}: something is left open"


def tree():
    """All text files of the repository, or of the folder where there is no git."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=house.root, text=True,
                            capture_output=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else [
        p.relative_to(house.root).as_posix() for p in house.root.rglob("*") if p.is_file()]
    paths = [pathlib.Path(n) for n in names if not n.startswith(("build/", ".git/"))]
    return [p for p in paths if p.suffix in TEXT_FILES and (house.root / p).is_file()]


def blind_spots():
    """Each rule is shown something bad; a rule that sees nothing wrong is itself a fault."""
    bad_headers = [
        ("keel/core/a.hpp", "#include <keel/backend/concepts.hpp>"), ("keel/format/a.hpp", "#include <keel/norm/b.hpp>"),
        ("keel/norm/a.hpp", "#include <keel/backend/cpu/cpu.hpp>"), ("keel/moe/a.hpp", "#include <xsimd/xsimd.hpp>"),
        ("keel/nn/a.hpp", "#include <Eigen/Dense>"), ("keel/optim/a.hpp", "#include <cuda_runtime.h>"),
        ("keel/guard/a.hpp", "#include <vector>"), ("keel/guard/a.hpp", '#include "b.hpp"'), ("keel/new/a.hpp", ""),
        ("keel/nn/a.hpp", "auto p = new int;"), ("keel/nn/a.hpp", "auto m = std::max(a, b);"),
        ("keel/nn/a.hpp", "free(p);"), ("keel/nn/a.hpp", "std::vector<float> v;"), ("keel/nn/a.hpp", "throw 1;"),
        ("keel/nn/a.hpp", "if (std::isnan(x)) return;"), ("keel/nn/a.hpp", "std::thread t;"),
    ]
    bad_files = [(pathlib.Path("a.hpp"), "int x;\n" * (LONGEST + 1)), (pathlib.Path("a.py"), "open('/home" + "/me/x')"),
                 (pathlib.Path("a.cpp"), "// TO" + "DO")]
    good = "#pragma once\n// a new idea: std::max\n#include <keel/config.hpp>\nvoid f(int) = delete;\nchar const* s = \"new x\";\n"
    missed = [f"the rules see nothing wrong in {name}: {text}" for name, text in bad_headers
              if not list(header_faults(name, "#pragma once\n" + text))]
    missed += [f"the rules see nothing wrong in a bad {p}" for p, text in bad_files if not list(file_faults(p, text))]
    missed += [f"the rules condemn a good header: {f}" for f in header_faults("keel/core/a.hpp", good)]
    if not cycles({"a": ["b"], "b": ["c"], "c": ["a"]}):
        missed.append("the rules see no circle in a -> b -> c -> a")
    return missed


def main():
    house.arguments().parse_args()
    faults = blind_spots()
    headers = house.headers(cuda=True)
    for header in headers:
        faults += header_faults(header, (house.include / header).read_text())
    faults += cycles({h: [n[1:-1] for n in sorted(house.included(h)) if n.startswith("<keel/")] for h in headers})
    files = tree()
    for path in files:
        faults += file_faults(path, (house.root / path).read_text(errors="replace"))
    return house.report(f"rules: {len(headers)} headers, {len(files)} files", faults)


if __name__ == "__main__":
    sys.exit(main())
