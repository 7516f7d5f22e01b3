#!/usr/bin/env python3
"""Scores implementations against conversions.csv: how many rows each converts as the vectors say, and where it does not.

    python3 score.py                       what is installed of ml_dtypes, NumPy, JAX and PyTorch (each is missed aloud)
    python3 score.py --markdown            as a table: how many rows differ of how many
    python3 score.py --command "PROGRAM"   any other: PROGRAM reads lines `f32 3f800000 e4m3 nearest_even saturate` and writes
                                           a line with the code in hex for each, or `-` for what it does not do

Libraries round to nearest, ties to even, and have no word for what they do past the largest value. So each is shown the largest
fp32 value and Inf first, and is scored on the rows of the policy that its answers are those of. Where the vectors want a NaN any
NaN is right; NaNs with other bits are counted apart, and so are rows where the specifications leave a choice.
"""
import argparse
import csv
import datetime
import importlib
import pathlib
import re
import subprocess
import sys

from definitions import F32, FORMATS, SOURCES

FOLDER = pathlib.Path(__file__).resolve().parent
DTYPES = {"bf16": "bfloat16", "f16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu",
          "e2m1": "float4_e2m1fn", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz"}


def read_rows():
    with open(FOLDER / "conversions.csv", newline="") as file:
        version = int(file.readline().split()[4])
        return version, list(csv.DictReader(file))


# --- libraries: convert(source name, words, target name) -> codes, or None where there is no such conversion ------------


class MlDtypes:
    name = "ml_dtypes"

    def __init__(self):
        self.np = importlib.import_module("numpy")
        self.module = importlib.import_module("ml_dtypes")
        self.version = f"{self.module.__version__}, NumPy {self.np.__version__}"

    def array(self, source, words):
        np = self.np
        return np.array(words, dtype=np.uint32 if source == "f32" else np.uint64).view(np.float32 if source == "f32" else np.float64)

    def codes(self, array):
        return self.np.asarray(array).view(self.np.uint8 if array.dtype.itemsize == 1 else self.np.uint16).tolist()

    def convert(self, source, words, target):
        dtype = getattr(self.module, DTYPES[target], None)
        with self.np.errstate(all="ignore"):
            return None if dtype is None else self.codes(self.array(source, words).astype(dtype))


class NumPy(MlDtypes):
    name = "NumPy"

    def __init__(self):
        self.np = importlib.import_module("numpy")
        self.version = self.np.__version__

    def convert(self, source, words, target):
        with self.np.errstate(all="ignore"):
            return self.codes(self.array(source, words).astype(self.np.float16)) if target == "f16" else None


class Jax(MlDtypes):
    name = "JAX"

    def __init__(self):
        super().__init__()
        self.jax = importlib.import_module("jax")
        self.jax.config.update("jax_platforms", "cpu")
        self.jax.config.update("jax_enable_x64", True)
        self.version = f"{self.jax.__version__}, CPU"

    def convert(self, source, words, target):
        dtype = getattr(self.jax.numpy, DTYPES[target], None)
        return None if dtype is None else self.codes(self.np.asarray(self.jax.numpy.asarray(self.array(source, words)).astype(dtype)))


class PyTorch:
    name = "PyTorch"

    def __init__(self):
        self.torch = importlib.import_module("torch")
        self.version = f"{self.torch.__version__}, CPU"

    def convert(self, source, words, target):
        torch, dtype = self.torch, getattr(self.torch, DTYPES[target], None)
        if dtype is None:
            return None
        bits = 32 if source == "f32" else 64
        signed = [w - (1 << bits) if w >> (bits - 1) else w for w in words]
        x = torch.tensor(signed, dtype=torch.int32 if bits == 32 else torch.int64).view(torch.float32 if bits == 32 else torch.float64)
        y = x.to(dtype)
        return [c % (1 << (8 * y.element_size())) for c in y.view(torch.uint8 if y.element_size() == 1 else torch.int16).tolist()]


def evident_policy(convert, target):
    """The policy whose answers to the largest fp32 value and to Inf a library gives; None if it gives those of none."""
    format = FORMATS[target]
    got = convert("f32", [0x7F7FFFFF, F32.infinity], target)
    for overflow in ["to_nonfinite", "saturate_finite", "saturate"]:
        if overflow in format.overflows:
            want = [format.encode(F32.number(w), "nearest_even", overflow) for w in (0x7F7FFFFF, F32.infinity)]
            if all(g == w or format.is_nan(g) and format.is_nan(w) for g, w in zip(got, want)):
                return overflow
    return None


def ask_library(library, rows):
    """[(target, policy, rows asked, answers)] of a library."""
    results = []
    for target in FORMATS:
        try:
            if library.convert("f32", [0x3F800000], target) is None:
                continue
            policy = evident_policy(library.convert, target)
            asked = [r for r in rows if r["target"] == target and r["rounding"] == "nearest_even" and r["overflow"] in ("any", policy)]
            answers = {}
            for source in SOURCES:
                words = [int(r["bits"], 16) for r in asked if r["source"] == source]
                answers.update(zip(((source, w) for w in words), library.convert(source, words, target)))
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            print(f"{library.name}: {target} left out: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        results.append((target, policy or "none of the three", asked, [answers[r["source"], int(r["bits"], 16)] for r in asked]))
    return results


def ask_command(command, rows):
    """The same of a program that is told every policy: an `any` row is put once under each."""
    asked = [dict(r, overflow=o) for r in rows for o in (FORMATS[r["target"]].overflows if r["overflow"] == "any" else [r["overflow"]])]
    questions = "".join(" ".join(r[k] for k in ("source", "bits", "target", "rounding", "overflow")) + "\n" for r in asked)
    run = subprocess.run(command, shell=True, input=questions, capture_output=True, text=True)
    lines = run.stdout.split()
    if run.returncode != 0:
        raise SystemExit(f"score: `{command}` ended with {run.returncode}\n{run.stderr[-1000:]}")
    if len(lines) != len(asked):
        raise SystemExit(f"score: {len(asked)} questions, {len(lines)} answers")
    for question, line in zip(questions.splitlines(), lines):
        if line != "-" and not re.fullmatch("(0x)?[0-9a-fA-F]+", line):
            raise SystemExit(f"score: `{question}` was answered by {line!r}, which is neither a code in hex nor -")
    results = []
    for target in FORMATS:
        pairs = [(r, int(line, 16)) for r, line in zip(asked, lines) if r["target"] == target and line != "-"]
        if pairs:
            results.append((target, "as told", [r for r, _ in pairs], [code for _, code in pairs]))
    return results


# --- the score -------------------------------------------------------------------------------------------------------


class Score:
    """One implementation and target: rows tried and rows that differ, by source; choices and NaN bits apart."""

    def __init__(self, name, target, policy, asked, answers):
        self.name, self.target, self.policy, format = name, target, policy, FORMATS[target]
        self.tried, self.differ, self.examples = dict.fromkeys(SOURCES, 0), dict.fromkeys(SOURCES, 0), []
        self.choices = self.other_choices = self.other_nans = 0
        for row, got in zip(asked, answers):
            want, is_choice = int(row["code"], 16), row["why"].startswith("choice:")
            same_nan = format.is_nan(got) and format.is_nan(want)
            self.other_nans += same_nan and got != want
            if is_choice:
                self.choices += 1
                self.other_choices += got != want and not same_nan
                continue
            self.tried[row["source"]] += 1
            if got != want and not same_nan:
                self.differ[row["source"]] += 1
                self.examples.append(f"{question_text(row)} {row['rounding']}: wanted {row['code']}, got {format.text(got)}: {row['why']}")

    def counts(self):
        return ", ".join(f"{source} {self.differ[source]} of {self.tried[source]}" for source in SOURCES if self.tried[source])


def question_text(row):
    number = SOURCES[row["source"]].number(int(row["bits"], 16))
    value = number[1] if isinstance(number[1], str) else f"{float(number[1]):.{9 if row['source'] == 'f32' else 17}g}"
    return f"{row['source']} {row['bits']} ({'-' if number[0] else ''}{value})"


def show(scores, few):
    for s in scores:
        print(f"{s.name}: {s.target}, {s.policy}: differ {s.counts()}; other choices {s.other_choices} of {s.choices}; "
              f"NaNs with other bits {s.other_nans}")
        for example in s.examples[:few]:
            print("    " + example)


def show_markdown(scores):
    """Rows that differ of those tried, fp32 then fp64; a policy that is not to_nonfinite is named."""
    names = list(dict.fromkeys(s.name for s in scores))
    print("| target | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for target in FORMATS:
        cells = []
        for name in names:
            found = [s for s in scores if (s.name, s.target) == (name, target)]
            cells.append("".join(s.counts() + ("" if s.policy in ("to_nonfinite", "as told") else f" ({s.policy})") for s in found) or "-")
        print(f"| {target} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--few", type=int, default=3, help="how many disagreements are shown")
    options = parser.parse_args()
    version, rows = read_rows()
    if options.command:
        scores = [Score(options.command, *r) for r in ask_command(options.command, rows)]
    else:
        scores = []
        for kind in (MlDtypes, NumPy, Jax, PyTorch):
            try:
                library = kind()
            except ImportError as error:
                print(f"{kind.name}: skipped, not installed ({error})", file=sys.stderr)
                continue
            scores += [Score(f"{library.name} {library.version}", *r) for r in ask_library(library, rows)]
    print(f"conversions.csv version {version}, {datetime.date.today()}\n")
    if not scores:
        raise SystemExit("nothing was scored")
    show_markdown(scores) if options.markdown else show(scores, options.few)


if __name__ == "__main__":
    main()
