"""examples/plot_run.py draws any log that tiny_lm can leave behind, and refuses the rest with one line."""
import contextlib
import importlib.util
import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

root = pathlib.Path(__file__).resolve().parents[2]
script = root / "examples" / "plot_run.py"

spec = importlib.util.spec_from_file_location("plot_run", script)
plot_run = importlib.util.module_from_spec(spec)
sys.dont_write_bytecode = True
spec.loader.exec_module(plot_run)

FIGURES = re.findall(r'visit\("(\w+)"', (root / "examples/tiny_lm/health.hpp").read_text())


def line(kind, step, **members):
    return json.dumps({"record": kind, "attempt": 1, "step": step, **members}) + "\n"


def step(number, value=1.0):
    return line("step", number, **{name: value for name in FIGURES if name != "step"})


START = line("start", 0, precision="bf16", clip="1", gzip_bits_per_byte=2.5, parameters=1000)
WHOLE = START + "".join(map(step, range(1, 9))) + line("held_out", 8, bits_per_byte=2.0)


class Checks:
    def __init__(self, folder):
        self.folder, self.failed = folder, 0

    def expect(self, what, holds):
        if not holds:
            self.failed += 1
            print("FAILED:", what)

    def file(self, text):
        path = self.folder / "run.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def run(self, *arguments, path=None):
        environment = {"PYTHONPATH": str(path)} if path else None
        done = subprocess.run([sys.executable, str(script), *map(str, arguments)], env=environment, cwd=self.folder,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return done.returncode, done.stdout, done.stderr

    def refused(self, what, message, *arguments, path=None):
        code, _, said = self.run(*arguments, path=path)
        self.expect(f"{what}: one line, exit code 2, said {said!r}",
                    code == 2 and said == f"plot_run: {message}\n")


def reads_runs(check):
    """What is taken from a log."""
    read = lambda text: plot_run.Run(plot_run.read_records(check.file(text)))
    check.expect("plain run", read(WHOLE).steps == list(range(1, 9)) and read(WHOLE).held_out == [(8, 2.0)])

    resumed = read(WHOLE + line("start", 5) + step(6, 3.0))
    check.expect("a resumption replaces the steps after its checkpoint",
                 resumed.steps == [1, 2, 3, 4, 5, 6] and resumed.figure("loss")[-2:] == [1.0, 3.0]
                 and resumed.held_out == [] and resumed.resumed_at == [5] and resumed.facts["precision"] == "bf16")
    again = read(WHOLE + START + step(1, 7.0))
    check.expect("a start at step 0 begins anew", again.figure("loss") == [7.0] and again.resumed_at == [])
    torn = read(WHOLE + step(9)[:40] + "\n" + line("start", 8) + step(9))
    check.expect("a torn line is left out", torn.steps == list(range(1, 10)))

    odd = read(START + line("step", 1, loss="nan") + line("step", 2, loss="-inf") + line("step", 3, loss=True)
               + line("step", 4) + line("step", 5, loss="2.5"))
    check.expect("odd figures are gaps", str(odd.figure("loss")) == "[nan, nan, nan, nan, 2.5]")
    skips = read(START + "".join(line("step", s, skipped_steps=n) for s, n in ((1, 0), (2, 1), (3, 1), (4, 3))))
    check.expect("skipped steps are where the count rose", skips.skipped() == [2, 4])
    used = re.findall(r'x\("(\w+)"', script.read_text())
    check.expect("every figure that is drawn is one that is logged", len(used) > 10 and set(used) <= set(FIGURES))
    check.expect("means stay on a slope, to the ends", plot_run.smooth([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 2.0, 3.0, 4.0])
    check.expect("means skip gaps", plot_run.smooth([1.0, float("nan"), 3.0], 1)[::2] == [1.0, 3.0])


def refuses(check):
    """What is wrong is said in one line, and nothing is written."""
    log = check.folder / "run.jsonl"
    check.refused("no argument", "wanted a log and, if you like, a page: plot_run.py run.jsonl [page.png]")
    check.refused("missing log", "cannot read none.jsonl: No such file or directory", "none.jsonl")
    check.refused("a folder", f"cannot read {check.folder}: Is a directory", check.folder)
    for text in ("", "hello\n", "[1]\n", step(1), b"\xff\x00\xfe", "[" * 100000, '{"record":"start","step":"nan"}\n'):
        check.file(text)
        check.refused(f"no log: {text[:20]!r}", f"{log} is no log of tiny_lm", log)
    check.file(START)
    check.refused("no steps", "the log holds no step yet", log)
    check.file(WHOLE)
    check.refused("page over the log", f"{log} is the log itself; name another file for the page", log, log)
    hidden = check.folder / "hidden"
    hidden.mkdir()
    (hidden / "matplotlib.py").write_text("raise ImportError\n")
    remedy = "(Debian: python3-matplotlib; elsewhere: pip install matplotlib)"
    check.refused("no matplotlib", "matplotlib is missing " + remedy, log, path=hidden)
    check.expect("nothing was written", not list(check.folder.glob("*.png")) and log.read_text() == WHOLE)


def draws(check):
    """A page comes out, whatever the figures are."""
    page = check.folder / "page.png"
    for what, text in {
        "one step": START + step(1),
        "non-finite figures": START + step(1, "nan") + step(2, "inf") + step(3, "-inf"),
        "zeros and negative figures": START + step(1, 0) + step(2, -1.0),
        "bare records": line("start", 0) + line("step", 1) + line("step", 2) + line("held_out", 2),
        "a resumed run": WHOLE + step(9, 3.4e38) + line("start", 9) + step(10, 1.4e-45),
    }.items():
        log = check.file(text)
        page.unlink(missing_ok=True)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
            code = plot_run.main([str(log), str(page)])
        sound = page.exists() and page.read_bytes().startswith(b"\x89PNG") and page.stat().st_size > 20000
        check.expect(f"{what}: {[str(w.message) for w in warned]}",
                     code == 0 and not warned and said.getvalue() == f"{page}\n" and sound)
    code, said, complaint = check.run(log, page)  # as a program
    check.expect("drawn by the program itself", (code, said, complaint) == (0, f"{page}\n", ""))
    check.refused("no such folder", f"cannot write {check.folder}/no/page.png: No such file or directory", log,
                  check.folder / "no/page.png")
    code, _, complaint = check.run(log, check.folder / "page.xyz")
    check.expect("an unknown kind of picture", code == 2 and complaint.count("\n") == 1)


def main():
    with tempfile.TemporaryDirectory() as folder:
        check = Checks(pathlib.Path(folder))
        reads_runs(check)
        refuses(check)
        if importlib.util.find_spec("matplotlib"):
            draws(check)
        else:
            print("matplotlib is not installed: no page was drawn, the rest was tested")
    print("plot_run: " + (f"{check.failed} failed" if check.failed else "all well"))
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
