#!/usr/bin/env python3
"""Every ```cpp block of README.md that holds a main() compiles without warnings, runs, and exits with 0."""
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house


def main():
    options = house.arguments().parse_args()
    readme = house.root / "README.md"
    if not readme.exists():
        print("readme: there is no README.md")
        return house.SKIPPED
    programs = [block for block in re.findall(r"^```cpp\n(.*?)^```", readme.read_text(), re.M | re.S) if "int main(" in block]
    failures = [] if programs else ["README.md shows no program"]
    compiler = house.compilers()[0]
    with tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(programs, 1):
            binary = pathlib.Path(folder) / f"program{number}"
            code, output = house.run([compiler, "-std=c++20", "-O1", *house.WARNINGS, *house.include_flags(options.xsimd),
                                      "-pthread", "-x", "c++", "-", "-o", binary], program)
            if code == 0:
                code, output = house.run([binary], cwd=folder)
            if code != 0:
                failures.append(f"program {number} of README.md fails:\n{output[:3000]}")
    return house.report(f"readme: {len(programs)} programs", failures)


if __name__ == "__main__":
    sys.exit(main())
