"""The blocks of scale_rules.csv: what published scale rules make of inputs around the places where they turn (definitions.py)."""
from fractions import Fraction

import definitions
from block_vectors import BLOCK, CODES, WORDS_OF, Noise, found
from definitions import F32, FORMATS, OVERFLOWS, binade, power, quantise, round_to_fp32, scale_text

FLT_MAX = (2 - power(-23)) * power(127)
LARGEST = {"f32": FLT_MAX, "bf16": FORMATS["bf16"].values[-1], "f16": FORMATS["f16"].values[-1]}
POWERS = ["power_of_two", "e8m0"]
ROUNDED = ["ocp_floor", "ocp_even", "nearest"]  # down, for some blocks: their largest elements may overflow
KINDS = {"deep_gemm": ["fp32", *POWERS], "transformer_engine": ["fp32", "power_of_two"], **dict.fromkeys(ROUNDED, POWERS)}


class RuleBlocks:
    def __init__(self):
        self.rows = []

    def add(self, rules, why, words, codes=("e4m3",), kinds=None, source="f32"):
        """One question for each rule, code and kind, answered under every overflow policy; answers that agree share a row."""
        text = "".join(f"{w:0{WORDS_OF[source].digits}x}" for w in words)
        for rule in rules:
            for code in codes:
                for kind in kinds or KINDS[rule]:
                    answers = {o: self.answer(rule, FORMATS[code], kind, o, words, source) for o in OVERFLOWS}
                    if len(set(answers.values())) == 1:
                        answers = {"any": answers["saturate"]}
                    for overflow, (scales, result) in answers.items():
                        self.rows.append([rule, source, BLOCK[kind], code, kind, overflow, text, scales, result, why])

    @staticmethod
    def answer(rule, code, kind, overflow, words, source):
        scales, result = "", ""
        for first in range(0, len(words), BLOCK[kind]):
            block = [WORDS_OF[source].number(w) for w in words[first:first + BLOCK[kind]]]
            scale, codes = quantise(code, kind, overflow, "isolate", block, getattr(definitions, rule), LARGEST[source])
            scales += scale_text(kind, scale)
            result += "".join(code.text(c) for c in codes)
        return scales, result


def floor_word(magnitude):
    """The largest fp32 word whose value is no more than magnitude."""
    word = F32.word(round_to_fp32(magnitude))
    return word if F32.number(word)[1] <= magnitude else word - 1


def around(magnitude):
    """The fp32 word of a float with its neighbours; of another number the words below and above it."""
    word = floor_word(magnitude)
    return (word - 1, word, word + 1) if F32.number(word)[1] == magnitude else (word, word + 1)


def with_mates(word):
    """A block of this amax: with both signs, and half, a little more than 1 / 512 and nothing of it."""
    return [word, word + 0x80000000, word - (1 << 23), word + 0x80000000 - (9 << 23) + 7, 0]


def root_of_two():
    """A fraction just below sqrt(2), nearer to it than any float or product of floats that is asked for."""
    low, high = Fraction(1), Fraction(2)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle**2 <= 2 else (low, middle)
    return low


def turning_points(code):
    """Mantissas of amax at which some rule goes to the next power, and that of the largest code."""
    digits = definitions.mantissa_bits(code)
    return [("a power of two", Fraction(1)), ("the middle of the last two codes of a binade", 2 - power(-digits - 1)),
            ("the largest code", code.values[-1] / power(binade(code.values[-1]))),
            ("the largest code times sqrt(2)", code.values[-1] * root_of_two() / power(binade(code.values[-1] * root_of_two())))]


def rounded_powers(b):
    for name in CODES:
        code, top = FORMATS[name], binade(FORMATS[name].values[-1])
        for what, mantissa in turning_points(code):
            for word in around(mantissa * power(top + 3)):
                b.add(ROUNDED, f"amax around {what}", with_mates(word), codes=[name])
            for exponent in (-96, 101):
                for word in around(mantissa * power(exponent))[:2]:
                    b.add(ROUNDED, f"amax around {what}", [word, 0x80000000 | word], codes=[name], kinds=["e8m0"])
        # Scale 1 under the floor: the boundary of overflow, from inside and outside.
        edge = F32.word((code.values[-1] + code.beyond) / 2)
        block = [F32.word(power(top + 1)) - 1, edge, edge - 1, 0x80000000 | edge, edge + 1, 0x80000000 | edge + 1, F32.word(code.values[-1]) + 1]
        b.add(["ocp_floor"], "scale 1: what overflows and what does not", block, codes=[name])
        for least in (-127, -126):
            for what, mantissa in turning_points(code):
                for word in around(mantissa * power(least + top))[:2]:
                    b.add(ROUNDED, f"the smallest scales: amax around {what}", [word, 0x80000000 | word // 2], codes=[name])
        b.add(ROUNDED, "all zero with signs", [0, 0x80000000, 0], codes=[name])
        b.add(ROUNDED, "fp32 subnormals", [0x007FFFFF, 0x00400000, 0x80200001, 1], codes=[name])
        b.add(ROUNDED, "the smallest fp32 alone", [0x80000001], codes=[name])
        b.add(["ocp_floor", "nearest"], "FLT_MAX", [0x7F7FFFFF, 0xFF7FFFFF, 0x7E800000, 0x3F800000], codes=[name])
        below = F32.word((2 - power(-definitions.mantissa_bits(code) - 1)) * power(127)) - 1
        b.add(["ocp_even"], "the largest amax that does not round to 2^128", [below, 0x80000000 | below, 0x7E800000], codes=[name])
        b.add(ROUNDED, "nothing but negative", [F32.word(-m * power(-9)) for m in (5, 4, 3, 1)], codes=[name])
        for number, (low, high) in enumerate([(-8, 8), (-126, -112), (90, 126)]):
            b.add(ROUNDED, f"data from 2^{low} to 2^{high + 1}", Noise(300 + number).words(8, low, high, "f32"), codes=[name])
    for amax in (960, 957):
        b.add(ROUNDED, "microxcaling#4: 896 under the floor", [F32.word(amax), F32.word(-amax), F32.word(amax // 4)])
    b.add(ROUNDED, "ao#4725: by way of bf16 one exponent too many", [F32.word(Fraction(1023, 2)), F32.word(-100)])
    b.add(ROUNDED, "a whole block and a partial one", Noise(310).words(35, -4, 3, "f32"), kinds=["e8m0"])


def deep_gemm(b):
    rule, floor, inverse = ["deep_gemm"], round_to_fp32(Fraction("0.0001")), round_to_fp32(1 / Fraction(448))
    b.add(rule, "all zero with signs: the scale of the floor", [0, 0x80000000, 0], codes=CODES)
    b.add(rule, "fp32 subnormals", [0x007FFFFF, 0x80400000, 1], codes=CODES)
    for word in around(floor):
        b.add(rule, "around the floor of 1e-4", with_mates(word), codes=CODES)
    for name in CODES:
        code = FORMATS[name]
        for kind in KINDS["deep_gemm"]:  # the largest block that becomes all zero: half the smallest code, and a tie goes to zero
            multiplier = definitions.deep_gemm(code, kind, Fraction(0), FLT_MAX)[1]
            for word in around(code.values[1] / 2 / multiplier):
                b.add(rule, "DeepGEMM: around the largest amax that the floor flushes to zero", [word, 0x80000000 | word, word // 2], codes=[name],
                      kinds=[kind])
        for exponent in (-12, 0, 100):
            for word in around(code.values[-1] * power(exponent)):
                b.add(rule, f"around {code.values[-1]} * 2^{exponent}", with_mates(word), codes=[name])
        b.add(rule, "FLT_MAX", [0x7F7FFFFF, 0xFF7FFFFF, 0x7E800000, 0x3F800000], codes=[name])
        b.add(rule, "nothing but negative", [F32.word(-m * power(-9)) for m in (5, 4, 3, 1)], codes=[name])
        for number, (low, high) in enumerate([(-13, 8), (90, 127)]):
            b.add(rule, f"data from 2^{low} to 2^{high + 1}", Noise(320 + number).words(8, low, high, "f32"), codes=[name])
    fp32 = {"kinds": ["fp32"]}
    for amax in found(lambda v: round_to_fp32(1 / round_to_fp32(v / 448)) != round_to_fp32(448 / v), 3):
        b.add(rule, "1 / (amax / 448) is not 448 / amax", with_mates(F32.word(amax)), **fp32)
    for amax in found(lambda v: round_to_fp32(v / 448) != round_to_fp32(v * inverse), 3):
        b.add(rule, "amax / 448 is not amax * (1 / 448); PyTorch on CUDA does the latter", with_mates(F32.word(amax)), **fp32)
    for amax in found(lambda v: round_to_fp32(v * round_to_fp32(1 / round_to_fp32(v / 448))) > 448, 2):
        b.add(rule, "amax times the multiplier is above 448: that is no overflow", with_mates(F32.word(amax)), **fp32)
    b.add(rule, "a whole block and a partial one", Noise(330).words(131, -4, 3, "f32"), **fp32)
    b.add(rule, "a whole block and a partial one", Noise(331).words(35, -4, 3, "f32"), kinds=["e8m0"])


def transformer_engine(b):
    rule, fp32 = ["transformer_engine"], {"kinds": ["fp32"]}
    # (source, code, kinds)
    asked = [("f32", "e4m3", None), ("f32", "e5m2", None), ("bf16", "e4m3", None), ("bf16", "e5m2", ["fp32"]), ("f16", "e4m3", None)]
    for source, name, kinds in asked:
        code, words = FORMATS[name], WORDS_OF[source]
        sign, largest = 1 << (4 * words.digits - 1), words.word(LARGEST[source])
        rest = {"codes": [name], "kinds": kinds, "source": source}
        b.add(rule, "all zero with signs: the scale is 1", [0, sign, 0], **rest)
        b.add(rule, "the smallest alone", [sign | 1], **rest)
        b.add(rule, "subnormals", [3, sign | 2, 1, 0], **rest)
        b.add(rule, "the largest", [largest, sign | largest, words.word(1)], **rest)
        for exponent in (-3, 5) if source == "f16" else (-90, 0, 100):  # 448 and 57344 have few digits: words of every source
            edge = words.word(code.values[-1] * power(exponent))
            for word in (edge - 1, edge, edge + 1):
                b.add(rule, f"around {code.values[-1]} * 2^{exponent}", [word, sign | word, words.word(power(exponent + 3))], **rest)
        if source != "f16":
            edge = words.word(code.values[-1] * power(-128))
            for word in (edge - 1, edge, edge + 1):
                b.add(rule, f"TE#786: around amax = {code.values[-1]} / 2^128; below it the quotient is Inf", [word, sign | word, word // 2, 1],
                      **rest)
            tiny = [words.word(round_to_fp32(Fraction(m, 10**38))) for m in (10, 7, 3)]
            b.add(rule, "TE#786: amax about 1e-37", [tiny[0], sign | tiny[1], tiny[2]], **rest)
        b.add(rule, "nothing but negative", [words.word(-m * power(-9)) for m in (5, 4, 3, 1)], **rest)
        if source != "f16":
            for number, (low, high) in enumerate([(-8, 8), (-126, -110), (90, 127)]):
                if source == "f32" or number < 2:
                    b.add(rule, f"data from 2^{low} to 2^{high + 1}", Noise(340 + number).words(8, low, high, source), **rest)
        else:
            b.add(rule, "data in f16", [0x2000 + 1733 * i % 0x3000 + (0x8000 if i % 3 else 0) for i in range(8)], **rest)
    for amax in found(lambda v: round_to_fp32(1 / round_to_fp32(448 / v)) != round_to_fp32(v / 448), 3):
        b.add(rule, "1 / (448 / amax) is not amax / 448", with_mates(F32.word(amax)), **fp32)
    for amax in found(lambda v: round_to_fp32(v * round_to_fp32(448 / v)) > 448, 2):
        b.add(rule, "amax times the multiplier is above 448: that is no overflow", with_mates(F32.word(amax)), **fp32)
    b.add(rule, "a whole block and a partial one", Noise(350).words(131, -4, 3, "bf16"), source="bf16")


def scale_rule_rows():
    blocks = RuleBlocks()
    for part in (rounded_powers, deep_gemm, transformer_engine):
        part(blocks)
    return blocks.rows
