#!/usr/bin/env python3
"""tiny_lm as a user runs it: the same bits on one thread and on two, after a stop and a resumption, and clear refusals."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

SKIPPED = 77
PROGRAM = pathlib.Path(os.environ.get("KEEL_BUILD_DIR", "build")) / "examples" / "tiny_lm"
SMALL = ("--batch 2 --sequence 32 --layers 2 --width 40 --heads 4 --kv-heads 2 --expert-width 24 --shared-width 32 --experts 4 "
         "--eval-every 0 --sample 20 --warmup 2").split()
failures = []


def expect(condition, what):
    if not condition:
        failures.append(what)


def run(*arguments, **options):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


def losses(log):
    return [(r["step"], r["loss"]) for r in map(json.loads, log.read_text().splitlines()) if r["record"] == "step"]


def check_bits(folder, text):
    for precision in ("fp32", "bf16", "fp8"):
        saved = {}
        for threads in (1, 2):
            path, log = folder / f"{precision}{threads}.safetensors", folder / f"{precision}{threads}.jsonl"
            done = run("--text", text, *SMALL, "--precision", precision, "--steps", 8, "--threads", threads, "--save", path, "--log", log)
            expect(done.returncode == 0, f"{precision}: {done.stderr}")
            saved[threads] = path.read_bytes(), losses(log), done.stdout.split("held out")[-1]
        expect(saved[1] == saved[2], f"{precision}: one thread and two differ")
        expect(len(saved[1][1]) == 8 and saved[1][1][-1][1] < saved[1][1][0][1], f"{precision}: the loss does not fall")
        # Three steps, then on: the schedule depends on --steps, so the first part is stopped, not shortened.
        path, log = folder / f"{precision}.part.safetensors", folder / f"{precision}.part.jsonl"
        process = subprocess.Popen([PROGRAM, "--text", text, *SMALL, "--precision", precision, "--steps", "8", "--threads", "1", "--save", path,
                                    "--save-every", "1", "--log", log], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.strip().startswith("3/8"):
                process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
        expect(process.returncode == 0, f"{precision}: a stopped run ends with {process.returncode}")
        done = run("--resume", path, "--threads", 2, "--log", log, "--sample", 20, "--eval-every", 0)
        expect(done.returncode == 0, f"{precision}: {done.stderr}")
        expect(path.read_bytes() == saved[1][0], f"{precision}: a resumed run ends elsewhere")
        expect(losses(log)[-1] == saved[1][1][-1], f"{precision}: a resumed run has other losses")


def check_refusals(folder, text):
    good = folder / "bf161.safetensors"
    before = good.read_bytes()
    short = folder / "short.safetensors"
    short.write_bytes(before[:-100])
    empty = folder / "empty.txt"
    empty.write_bytes(b"")
    for arguments, word in (
        (("--text", folder / "none.txt"), "none.txt"),
        (("--text", empty), "empty"),
        (("--text", text, "--heads", 6, "--kv-heads", 4), "--kv-heads"),
        (("--text", text, "--steps", "many"), "--steps"),
        (("--text", text, "--precison", "bf16"), "--precison"),
        (("--resume", short), "short.safetensors"),
        (("--resume", good, "--width", 44), "--width"),
        (("--text", text, "--save", folder / "no" / "folder.safetensors"), "folder.safetensors"),
    ):
        done = run(*arguments, "--threads", 1)
        expect(done.returncode == 2, f"{arguments}: exit code {done.returncode}")
        expect(done.stderr.count("\n") == 1 and word in done.stderr, f"{arguments}: {done.stderr!r}")
    expect(good.read_bytes() == before and short.read_bytes() == before[:-100], "a refused run has written to a checkpoint")


def main():
    if not PROGRAM.exists():
        print("tiny_lm is not built here: skipped")
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = folder / "text.txt"
        text.write_text("".join(f"{i} times {i % 13} is {i * (i % 13)}, and so it goes on.\n" for i in range(600)))
        check_bits(folder, text)
        check_refusals(folder, text)
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"tiny_lm runs: {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
