#!/usr/bin/env python3
"""tiny_lm as a user runs it: the same bits on one thread and on two, after a stop and a resumption; clear refusals that change
nothing; and a run that goes on, and says so, where its output cannot be written."""
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile

SKIPPED = 77
PROGRAM = pathlib.Path(os.environ.get("KEEL_BUILD_DIR", "build")) / "examples" / "tiny_lm"
SMALL = ("--batch 2 --sequence 32 --layers 2 --width 40 --heads 4 --kv-heads 2 --expert-width 24 --shared-width 32 --experts 4 "
         "--eval-every 0 --sample 20 --warmup 2").split()
SMALLEST = ("--batch 1 --sequence 2 --layers 1 --width 1 --heads 1 --kv-heads 1 --head-dim 2 --rotary-dims 0 --experts 1 --top-k 1 "
            "--expert-width 1 --shared-width 1 --gate head --warmup 0 --sample 5 --steps 2").split()
failures = []


def expect(condition, what):
    if not condition:
        failures.append(what)


def run(*arguments, stdout=subprocess.PIPE, **options):
    return subprocess.run([PROGRAM, *arguments_of(arguments)], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, **options)


def arguments_of(values):
    return [value if isinstance(value, bytes) else str(value) for value in values]


def limited(kind, size):
    """For preexec_fn: the process may have so much and no more."""
    return lambda: resource.setrlimit(kind, (size, size))


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
        lines = [r for r in map(json.loads, log.read_text().splitlines()) if r["record"] == "balance"]
        expect([r["layer"] for r in lines] == [0, 1] and all(r["step"] == 8 and r["demand_max_over_mean"] >= 1 for r in lines),
               f"{precision}: the log has no balance line for each layer")
        # Four experts, whose parts sum to the routed share but for the rounding of fp32 sums.
        expect(all(4 * r["least_expert_share"] <= r["routed_output_share"] + 1e-5 <= 4 * r["largest_expert_share"] + 2e-5 for r in lines),
               f"{precision}: the experts' shares do not frame their sum")
        expect(saved[1][2].count("experts of layer") == 2, f"{precision}: no balance line for each layer is printed")
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


def check_smallest(folder, text):
    """Every size at its least: a matrix of one row is a matrix all the same."""
    for precision in ("fp32", "bf16", "fp8"):
        path = folder / "smallest.safetensors"
        done = run("--text", text, *SMALLEST, "--precision", precision, "--threads", 1, "--save", path)
        expect(done.returncode == 0, f"{precision}, smallest: {done.stderr}")
        done = run("--resume", path, "--steps", 3, "--sample", 5, "--threads", 1)
        expect(done.returncode == 0 and "3/3" in done.stdout, f"{precision}, smallest, resumed: {done.stderr}")


def snapshot(folder):
    return {path.name: path.lstat().st_mode if path.is_fifo() else path.read_bytes() for path in folder.iterdir()}


def check_refusals(folder, text):
    good = folder / "bf161.safetensors"
    short = folder / "short.safetensors"
    short.write_bytes(good.read_bytes()[:-100])
    empty = folder / "empty.txt"
    empty.write_bytes(b"")
    other = folder / "other.txt"
    other.write_text(text.read_text() + "one line more")
    log, pipe, link = folder / "new.jsonl", folder / "pipe", folder / "link"
    os.mkfifo(pipe)
    link.symlink_to(text)
    (folder / "bf161.safetensors.partial").write_text("a user's own file")
    before = snapshot(folder)
    for arguments, word in (
        (("--text", folder / "none.txt"), "none.txt"),
        (("--text", empty), "empty"),
        (("--text", text, "--heads", 6, "--kv-heads", 4), "--kv-heads"),
        (("--text", text, "--steps", "many"), "--steps"),
        (("--text", text, "--precison", "bf16"), "--precison"),
        (("--resume", short), "short.safetensors"),
        (("--resume", good, "--width", 44), "--width"),
        (("--text", text, "--save", folder / "no" / "folder.safetensors"), "folder.safetensors"),
        (("--text", text, "--save", text), "--save"),
        (("--text", text, "--save", link), "--save"),
        (("--text", text, "--save", other), "--save"),
        (("--text", text, "--save", pipe), "--save"),
        (("--text", text, "--save", "/dev/null"), "--save"),
        (("--text", text, "--save", log, "--log", log), "--log"),
        (("--text", text, "--save", folder / "new", "--log", text), "--log"),
        (("--text", text, "--save", folder / "new", "--log", good), "--log"),
        (("--text", text, "--save", folder / "new", "--log", pipe), "--log"),
        (("--resume", good, "--log", good), "--log"),
        (("--resume", good, "--log", log, "--text", other), "--text"),
        (("--resume", good, "--log", log, "--steps", 7), "--steps"),
        (("--text", text, "--clip", "1e-60"), "--clip"),
        (("--text", text, "--width", 65536, "--heads", 64, "--layers", 256, "--experts", 4096, "--sequence", 32,
          "--save", folder / "new", "--log", log), "memory"),
    ):
        done = run(*arguments, "--threads", 1)
        expect(done.returncode == 2, f"{arguments}: exit code {done.returncode}")
        expect(done.stderr.count("\n") == 1 and word in done.stderr, f"{arguments}: {done.stderr!r}")
    done = run("--text", text, "--save", folder / "new", "--log", log, "--threads", 1, "--width", 1536, "--layers", 2, "--sequence", 32,
               preexec_fn=limited(resource.RLIMIT_AS, 400 << 20))
    expect(done.returncode == 2 and done.stderr.startswith("tiny_lm: memory"), f"little memory: {done.returncode}, {done.stderr!r}")
    expect(snapshot(folder) == before, "a refused run has changed a file")
    done = run("--resume", good, "--sample", 0, "--threads", 1, "--eval-every", 0)
    expect(done.returncode == 0 and "held out" in done.stdout, f"a run that is done already: {done.stderr}")
    expect(snapshot(folder) == before, "a run that had nothing to do has changed a file")


def check_lost_output(folder, text):
    """Where output cannot be written, the run goes on, saves what it can, says so once and ends with 1."""
    wanted = (folder / "bf161.safetensors").read_bytes()
    path = folder / "lost.safetensors"
    common = ("--text", text, *SMALL, "--steps", 8, "--threads", 1, "--save", path)

    def check(what, done, complaint, saved=wanted):
        expect(done.returncode == 1, f"{what}: exit code {done.returncode}")
        expect(done.stderr.count("\n") == 1 and complaint in done.stderr, f"{what}: {done.stderr!r}")
        expect((path.read_bytes() if path.exists() else None) == saved, f"{what}: another checkpoint than that of an undisturbed run")
        path.unlink(missing_ok=True)

    check("a full log", run(*common, "--log", "/dev/full"), "/dev/full")
    with open("/dev/full", "w") as full:
        check("a full stdout", run(*common, stdout=full), "stdout")
        expect(run("--help", stdout=full).returncode == 1, "--help to a full stdout counts as shown")
    reader, writer = os.pipe()
    os.close(reader)
    check("a closed pipe", run(*common, stdout=writer), "stdout")
    os.close(writer)
    check("a closed stdout", run(*common, preexec_fn=lambda: os.close(1)), "stdout")
    path.write_bytes(wanted)
    done = run(*common, "--seed", 2, preexec_fn=limited(resource.RLIMIT_FSIZE, len(wanted) // 2))
    expect("=>" in done.stdout, "a run that cannot save shows no text")
    check("a checkpoint that does not fit", done, "lost.safetensors")
    expect(not [name for name in os.listdir(folder) if name.startswith(".tiny_lm")], "an unfinished file is left")


def check_interrupt_while_writing(folder, text):
    path = folder / "sample.safetensors"
    endless = ["1000000" if before == "--sample" else value for before, value in zip([None, *SMALL], SMALL)]
    process = subprocess.Popen([PROGRAM, "--text", text, *endless, "--steps", "2", "--threads", "1", "--save", path],
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("held out"): # the last thing before the text
            break
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    expect(process.returncode == -signal.SIGINT and path.exists(), "the first Ctrl-C does not end the writing of text")


def check_odd_names(folder, text):
    """A text may have any name that the system allows, and the checkpoint's header stays JSON in UTF-8."""
    odd = os.fsencode(folder) + b"/two\nlines, \xff and \xc3(.txt"
    with open(odd, "wb") as file:
        file.write(text.read_bytes())
    path, log = folder / "odd.safetensors", folder / "odd.jsonl"
    done = run("--text", odd, *SMALL, "--steps", 2, "--threads", 1, "--save", path, "--log", log)
    expect(done.returncode == 0, f"an odd name: {done.stderr}")
    contents = path.read_bytes()
    json.loads(contents[8:8 + int.from_bytes(contents[:8], "little")].decode("utf-8"))
    start = json.loads(log.read_text(encoding="utf-8").splitlines()[0])
    expect(start["layers"] == "2" and start["clip"] == "1" and "two\\x0alines" in start["text"], f"facts of a run in its log: {start}")
    done = run("--resume", path, "--steps", 3, "--threads", 1, "--log", log, "--sample", 0)
    expect(done.returncode == 0 and len(losses(log)) == 3, f"an odd name, resumed: {done.stderr}")
    os.rename(odd, folder / "elsewhere")
    done = run("--resume", path, "--threads", 1)
    expect(done.returncode == 2 and done.stderr.count("\n") == 1, f"an odd name that is gone: {done.stderr!r}")


def check_shared_checkpoint(folder, text):
    """Two runs that save to one file: the last one counts, and neither disturbs the other."""
    path = folder / "shared.safetensors"
    both = [subprocess.Popen([PROGRAM, "--text", text, *SMALL, "--steps", "40", "--seed", seed, "--threads", "1", "--save-every", "1",
                              "--save", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for seed in "12"]
    for process in both:
        said = process.communicate(timeout=300)[1]
        expect(process.returncode == 0 and not said, f"two runs with one checkpoint: {process.returncode}, {said!r}")
    expect(run("--resume", path, "--sample", 0, "--eval-every", 0, "--threads", 1).returncode == 0, "the shared checkpoint is damaged")


def main():
    if not PROGRAM.exists():
        print("tiny_lm is not built here: skipped")
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        text = folder / "text.txt"
        text.write_text("".join(f"{i} times {i % 13} is {i * (i % 13)}, and so it goes on.\n" for i in range(600)))
        check_bits(folder, text)
        check_smallest(folder, text)
        check_refusals(folder, text)
        check_lost_output(folder, text)
        check_interrupt_while_writing(folder, text)
        check_odd_names(folder, text)
        check_shared_checkpoint(folder, text)
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"tiny_lm runs: {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
