#!/usr/bin/env python3
"""Writes the vectors: conversions.csv, decodes.csv, quantisers.csv, dequantisers.csv and scale_rules.csv, always the same bytes.

    python3 make_vectors.py            into this folder
    python3 make_vectors.py FOLDER     elsewhere
    python3 make_vectors.py --check    writes nothing; fails if this folder holds other bytes
"""
import argparse
import pathlib
import sys
from fractions import Fraction

from block_vectors import dequantiser_rows, quantiser_rows
from definitions import F32, F64, FORMATS, NAN, ROUNDINGS, fp32_word, power
from rule_vectors import scale_rule_rows

VERSION = 2

# --- conversions -----------------------------------------------------------------------------------------------------

# Inputs on which published converters have been wrong or have disagreed: target, source, value (text: a word), roundings, why.
NEAREST, UPWARD, DOWN, ALL = ["nearest_even"], ["upward"], ["toward_zero"], ROUNDINGS
PUBLISHED = [
    ("e4m3", F64, -431.99999999999994, NEAREST, "ml_dtypes#401: by way of fp32 -448"),
    ("bf16", F64, 16973823, NEAREST, "ml_dtypes#401: an int64 by way of fp32 4b82"),
    ("e4m3", F64, Fraction(17, 16) + power(-30), ALL, "NumPy casts and c10 by way of fp32: 38"),
    ("e4m3", F32, Fraction(17, 16) + power(-20), ALL, "oneDNN#2361: by way of f16 38"),
    ("e4m3", F32, Fraction("464.03125"), NEAREST, "oneDNN: by way of f16 7e"),
    ("e5m2", F32, 61439, NEAREST, "oneDNN: by way of f16 7c"),
    ("e4m3", F32, power(-10) * (1 + power(-23)), NEAREST, "oneDNN: by way of f16 00"),
    ("bf16", F64, 1 + power(-8) + power(-40), ALL, "Eigen by way of fp32: 3f80"),
    ("e4m3", F32, 465, NEAREST, "pytorch#177870: saturated or NaN by version"),
    ("e4m3", F32, 1000, NEAREST, "pytorch#177870: saturated or NaN by version"),
    ("e4m3", F32, "7f800000", NEAREST, "saturating: CUDA 7e; ml_dtypes 7f"),
    ("e5m2", F32, "7f800000", NEAREST, "triton#5927: Inf stays unless saturation is asked for"),
    ("e4m3", F32, "ffc00000", NEAREST, "-NaN: ff in ml_dtypes; 7f in CUDA"),
    ("e5m2", F32, "7fc00000", NEAREST, "NaN: 7e in ml_dtypes; 7f in CUDA"),
    ("bf16", F32, "ffffffff", NEAREST, "NaN: ffc0 in Eigen; 7fff in CUDA"),
    ("bf16", F32, "7f7fffff", ALL, "the largest float rounds to Inf"),
    ("bf16", F32, "00400000", ALL, "llvm#221052; BFloat16s.jl#125: an instruction flushes subnormals"),
    ("bf16", F32, "3e89ccd5", NEAREST, "universal#1133: cut instead of rounded"),
    ("e4m3", F32, Fraction(5, 2) * power(-9), NEAREST, "ggml: half up gives 03"),
    ("e4m3", F32, power(-6) - power(-11), NEAREST, "ggml: capped at 07"),
    ("e5m2", F32, 9, NEAREST, "triton#5925: a tie goes to the even code"),
    ("e8m0", F32, 0, ALL, "no zero: 00 in CUDA; NaN in ml_dtypes"),
    ("e8m0", F32, -2, ALL, "no sign: NaN in ml_dtypes; CUDA and c10 drop it"),
    ("e8m0", F32, Fraction(9, 8), UPWARD, "onnx#7784: the mask lacked bits"),
    ("e8m0", F32, Fraction(5, 4), ALL, "onnx#7784: the mask lacked bits"),
    ("e8m0", F32, Fraction(3, 2), ALL, "a tie between powers goes to the larger one"),
    ("e8m0", F32, 3, ALL, "a tie between powers goes to the larger one"),
    ("e8m0", F32, 5, UPWARD, "onnx#7784: the mask lacked bits"),
    ("e8m0", F32, "7f800000", ALL, "Inf: fe when CUDA saturates; ff in ml_dtypes"),
    ("e8m0", F32, "7f7fffff", ALL, "oneDNN#5626: saturates and is not NaN"),
    ("e8m0", F32, "00400001", ALL, "just above 2^-127; ml_dtypes rounds it up"),
    ("e8m0", F32, power(-128), ALL, "gfloat#62: 00 and not NaN"),
    ("e8m0", F32, Fraction(1023, 2), ALL, "ao#4725: by way of bf16 one exponent too many"),
    ("e2m1", F32, Fraction(3, 4), NEAREST, "DeepGEMM's host reference: ties to zero"),
    ("e2m1", F32, Fraction(7, 4), NEAREST, "DeepGEMM's host reference: ties to zero"),
    ("e2m1", F32, Fraction(7, 2), NEAREST, "DeepGEMM's host reference: ties to zero"),
    ("e2m1", F32, "7fc00000", NEAREST, "NaN has no code: +6 in CUDA"),
    ("e4m3fnuz", F32, "b3d6bf95", NEAREST, "onnx#5764: 80 is NaN"),
    ("e4m3fnuz", F32, "80000000", ALL, "no -0: 80 is NaN"),
    ("e5m2fnuz", F32, "80000000", ALL, "no -0: 80 is NaN"),
    ("e4m3fnuz", F32, 248, NEAREST, "the first overflow; a tie"),
    ("e5m2fnuz", F32, 61440, NEAREST, "the first overflow; a tie"),
]

SPECIAL_WORDS = [
    (F32, 0x00000000, "zero"), (F32, 0x80000000, "-0"), (F32, 0x00000001, "smallest fp32"), (F32, 0x80000001, "smallest fp32"),
    (F32, 0x007FFFFF, "largest fp32 subnormal"), (F32, 0x807FFFFF, "largest fp32 subnormal"), (F32, 0x00800000, "smallest normal fp32"),
    (F32, 0x7F7FFFFF, "largest fp32"), (F32, 0xFF7FFFFF, "largest fp32"), (F32, 0x7F800000, "Inf"), (F32, 0xFF800000, "-Inf"),
    (F64, 0x0000000000000001, "smallest fp64"), (F64, 0x8000000000000001, "smallest fp64"), (F64, 0x8000000000000000, "-0"),
    (F64, 0x47F0000000000000, "2^128: past fp32"), (F64, 0xC7F0000000000000, "2^128: past fp32"),
    (F64, 0x47EFFFFFF0000000, "rounds to Inf in fp32"), (F64, 0x7FEFFFFFFFFFFFFF, "largest fp64"),
    (F64, 0xFFEFFFFFFFFFFFFF, "largest fp64"), (F64, 0x7FF0000000000000, "Inf"), (F64, 0xFFF0000000000000, "-Inf"),
]
NAN_WORDS = [
    (F32, 0x7FC00000, "NaN"), (F32, 0xFFC00000, "-NaN"), (F32, 0x7F800001, "NaN with a payload below every cut"),
    (F32, 0xFF800001, "NaN with a payload below every cut"), (F32, 0x7FBFFFFF, "signalling NaN"), (F32, 0xFFFFFFFF, "NaN of all ones"),
    (F64, 0x7FF8000000000000, "NaN"), (F64, 0x7FF0000000000001, "NaN with a payload below fp32's"),
    (F64, 0xFFF000001FFFFFFF, "NaN with a payload below fp32's"), (F64, 0xFFFFFFFFFFFFFFFF, "NaN of all ones"),
]


def is_choice(target, number):
    """Where no published specification says what is right: e8m0 of what is not above zero, and NaN where it has no code."""
    negative, magnitude = number
    return magnitude == NAN if target.nan is None else target.sign is None and magnitude != NAN and (negative or magnitude == 0)


class Conversions:
    """Rows without repetition: a question that has been asked keeps its first reason."""

    def __init__(self):
        self.rows, self.asked = [], set()

    def add(self, target, source, word, roundings, why):
        number = source.number(word)
        if is_choice(target, number):
            why = "choice: " + why
        for rounding in roundings:
            if (target.name, source.name, word, rounding) in self.asked:
                continue
            self.asked.add((target.name, source.name, word, rounding))
            answers = {overflow: target.encode(number, rounding, overflow) for overflow in target.overflows}
            if len(answers) > 1 and len(set(answers.values())) == 1:
                answers = {"any": answers["saturate"]}
            for overflow, code in answers.items():
                self.rows.append([source.name, source.text(word), target.name, rounding, overflow, target.text(code), why])

    def around(self, target, source, value, roundings, negative, why):
        """The value and its neighbours in the source's format. negative: all, middle or none of them with a minus, too."""
        middle = source.word(value)
        for word in (middle - 1, middle, middle + 1):
            place = ["just below ", "", "just above "][word - middle + 1]
            self.add(target, source, word, roundings, place + why)
            if negative == "all" or (negative == "middle" and word == middle):
                self.add(target, source, word | source.sign, roundings, place + why)


def places(target):
    """Codes whose upper boundary is asked for, and those of them that are asked for under every rounding."""
    last, name = target.largest, target.name
    if name == "e2m1":
        return range(last + 1), [0, 1, 2, last]
    if name == "e8m0":
        edges = [0, 1, 2, 126, 127, 128, 252, 253, 254]
        return sorted({*edges, *range(7, 254, 17)}), edges
    binade = {"bf16": 128, "f16": 1024, "e4m3": 8, "e5m2": 4, "e4m3fnuz": 8, "e5m2fnuz": 4}[name]
    one = target.values.index(1)
    edges = [0, 1, binade - 1, binade, one, last]
    if binade > 8:  # the two halves of the range, evenly
        return sorted({*edges, 2, 2 * binade - 1, one - 1, one + 1, last - 1, *range(5, last, last // 16)}), edges
    powers = range(binade - 1, last, binade)
    return sorted({*edges, *range(2 * binade), *powers, *range(one, one + binade), *range(last - binade, last)}), edges


def boundary_rows(rows, target):
    all_places, edges = places(target)
    for code in all_places:
        value = target.values[code]
        above = target.values[code + 1] if code < target.largest else target.beyond
        middle = (value + above) / 2
        what = "the first overflow" if code == target.largest else f"the middle of {target.text(code)} and {target.text(code + 1)}"
        edge = code in edges
        rows.around(target, F32, middle, NEAREST, "none" if target.sign is None else "all" if edge else "middle", what)
        if edge or code % 4 == 0:
            rows.around(target, F64, middle, NEAREST, "none", what)
        if edge and code:
            rows.around(target, F32, value, UPWARD + DOWN, "none" if target.sign is None else "all", target.text(code))
            rows.around(target, F64, value, UPWARD + DOWN, "none", target.text(code))
        elif target.sign is None and code:
            rows.around(target, F32, value, UPWARD, "none", target.text(code))
    largest = target.values[-1]
    rows.around(target, F32, largest, ALL, "middle", "the largest value")
    for factor in (2, 1024):
        if largest * factor < power(128):
            rows.add(target, F32, F32.word(largest * factor), ALL, "past the largest value")
            rows.add(target, F32, F32.word(-largest * factor), ALL, "past the largest value")


def conversion_rows():
    rows = Conversions()
    for name, source, value, roundings, why in PUBLISHED:
        word = int(value, 16) if isinstance(value, str) else source.word(Fraction(value))
        rows.add(FORMATS[name], source, word, roundings, why)
    for target in FORMATS.values():
        for source, word, why in SPECIAL_WORDS:
            rows.add(target, source, word, ALL if source is F32 or "smallest" in why or "largest" in why else NEAREST, why)
        for source, word, why in NAN_WORDS:
            rows.add(target, source, word, NEAREST, why)
        boundary_rows(rows, target)
    return rows.rows


# --- decodes ---------------------------------------------------------------------------------------------------------

DECODE_REASONS = {
    ("e4m3", 0x7F): "mlx#4135: NaN and not 480", ("e4m3", 0xFF): "mlx#4135: NaN and not -480",
    ("e8m0", 0x00): "TE#3262; ao#4725; ao#1104: 2^-127; not 0 and not 2^-126", ("e8m0", 0xFF): "TE#3262; ao#4725: NaN and not Inf",
    ("e8m0", 0xFE): "TE#2408: 2^127; its reciprocal is a subnormal", ("e4m3fnuz", 0x80): "onnx#5764: NaN and not -0",
    ("e5m2fnuz", 0x80): "onnx#5764: NaN and not -0",
}
SIXTEEN_BITS = {
    "bf16": [0x0000, 0x0001, 0x0002, 0x003F, 0x0040, 0x007F, 0x0080, 0x0081, 0x3F7F, 0x3F80, 0x3F81, 0x4049, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0,
             0x7FFF],
    "f16": [0x0000, 0x0001, 0x0002, 0x0003, 0x01FF, 0x0200, 0x03FF, 0x0400, 0x0401, 0x3BFF, 0x3C00, 0x3C01, 0x4248, 0x7BFF, 0x7C00, 0x7C01,
            0x7E00, 0x7FFF],
}


def decode_rows():
    rows = []
    for target in FORMATS.values():
        codes = [c | s for s in (0, target.sign) for c in SIXTEEN_BITS[target.name]] if target.digits == 4 else \
            range(16 if target.name == "e2m1" else 256)
        for code in codes:
            number = target.decode(code)
            word = "nan" if number[1] == NAN else F32.text(fp32_word(number))
            rows.append([target.name, target.text(code), word, DECODE_REASONS.get((target.name, code), "")])
    return rows


# --- files -----------------------------------------------------------------------------------------------------------

FILES = {
    "conversions": ("source bits target rounding overflow code why", conversion_rows),
    "decodes": ("format code value why", decode_rows),
    "quantisers": ("source block code scale overflow policy input scales codes why", quantiser_rows),
    "dequantisers": ("code scale scales codes values why", dequantiser_rows),
    "scale_rules": ("rule source block code scale overflow input scales codes why", scale_rule_rows),
}


def text(name):
    columns, make = FILES[name]
    rows = make()
    for row in rows:
        assert len(row) == len(columns.split()) and not any("," in str(cell) for cell in row), row
    head = f"# keel {name} version {VERSION} rows {len(rows)}"
    return "\n".join([head, ",".join(columns.split()), *(",".join(map(str, row)) for row in rows)]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    different = []
    for name in FILES:
        path, made = options.folder / f"{name}.csv", text(name).encode()
        if not options.check:
            path.write_bytes(made)
        elif not path.exists() or path.read_bytes() != made:
            different.append(path.name)
        print(f"{path.name}: {made.decode().splitlines()[0]}, {len(made)} bytes" + (", differs" if path.name in different else ""))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
