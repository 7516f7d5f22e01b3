#!/usr/bin/env python3
"""Every run.sh answers --help, whatever stands beside it, without installing, building or writing anything."""
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import house

FORBIDDEN = ("apt-get", "sudo", "cmake", "ninja", "g++", "clang++", "python3")


def main():
    house.arguments().parse_args()
    failures = []
    for script in ("examples/run.sh", "benchmarks/run.sh", "benchmarks/compare/run.sh", "tests/run.sh"):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            called = folder / "called"
            for tool in FORBIDDEN:
                stub = folder / "bin" / tool
                stub.parent.mkdir(exist_ok=True)
                stub.write_text(f"#!/bin/sh\necho {tool} >>{called}\n")
                stub.chmod(0o755)
            (folder / "keel").mkdir()
            for part in ("examples", "benchmarks", "tests", "cmake"): # a tree without build/, as after unpacking
                (folder / "keel" / part).symlink_to(house.root / part)
            environment = dict(os.environ, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
            for arguments in (["--help"], ["-h"], ["--help", "--anything"]):
                done = subprocess.run(["bash", folder / "keel" / script, *arguments], capture_output=True, text=True,
                                      env=environment, timeout=60)
                if done.returncode != 0 or script not in done.stdout or done.stderr:
                    failures.append(f"{script} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
            if called.exists():
                failures.append(f"{script} --help calls {', '.join(sorted(set(called.read_text().split())))}")
            if (folder / "keel" / "build").exists():
                failures.append(f"{script} --help writes to build/")
    return house.report("scripts: run.sh of examples, benchmarks, comparisons and tests", failures)


if __name__ == "__main__":
    sys.exit(main())
