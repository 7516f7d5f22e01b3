"""The blocks of quantisers.csv and dequantisers.csv: which inputs, and what they should become (definitions.py)."""
from fractions import Fraction

from definitions import F32, FORMATS, NAN, OVERFLOWS, dequantise, fp32_word, power, quantise, round_to_fp32, scale_text

BLOCK = {"fp32": 128, "power_of_two": 128, "e8m0": 32}
POLICIES = ["isolate", "poison"]
KINDS, CODES = list(BLOCK), ["e4m3", "e5m2"]
E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]


class Sixteen:
    """Words of a format of 16 bits, as a source."""
    digits = 4

    def __init__(self, name):
        self.name, self.number, self.encode = name, FORMATS[name].decode, FORMATS[name].encode

    def word(self, value):
        return self.encode((value < 0, abs(Fraction(value))), "nearest_even", "to_nonfinite")


BF16, F16 = Sixteen("bf16"), Sixteen("f16")
WORDS_OF = {"f32": F32, "bf16": BF16, "f16": F16}


class Blocks:
    def __init__(self):
        self.rows = []

    def add(self, why, words, codes=("e4m3",), kinds=tuple(KINDS), source="f32"):
        """One question for each code and kind, answered under every policy; answers that agree share a row."""
        for code in codes:
            for kind in kinds:
                answers = {(o, p): self.answer(FORMATS[code], kind, o, p, words, WORDS_OF[source]) for p in POLICIES for o in OVERFLOWS}
                for (overflow, policy), (scales, result) in merged(answers).items():
                    text = "".join(f"{w:0{WORDS_OF[source].digits}x}" for w in words)
                    self.rows.append([source, BLOCK[kind], code, kind, overflow, policy, text, scales, result, why])

    def add_values(self, why, values, source="f32", **rest):
        self.add(why, [WORDS_OF[source].word(v) for v in values], source=source, **rest)

    @staticmethod
    def answer(code, kind, overflow, policy, words, source):
        scales, result = "", ""
        for first in range(0, len(words), BLOCK[kind]):
            scale, codes = quantise(code, kind, overflow, policy, [source.number(w) for w in words[first:first + BLOCK[kind]]])
            scales += scale_text(kind, scale)
            result += "".join(code.text(c) for c in codes)
        return scales, result


def merged(answers):
    if len(set(answers.values())) == 1:
        return {("any", "any"): answers["saturate", "isolate"]}
    rows = {}
    for policy in POLICIES:
        if len({answers[o, policy] for o in OVERFLOWS}) == 1:
            rows["any", policy] = answers["saturate", policy]
        else:
            rows.update({(o, policy): answers[o, policy] for o in OVERFLOWS})
    return rows


class Noise:
    """Words that look like data, from a multiplicative generator: the same everywhere."""

    def __init__(self, seed):
        self.state = seed

    def next(self, bits):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> (64 - bits)

    def words(self, count, lowest, highest, source):
        """Magnitudes from 2^lowest to 2^(highest + 1), every binade as often, both signs."""
        mantissa, sign = (23, 0x80000000) if source == "f32" else (7, 0x8000)
        words = []
        for _ in range(count):
            exponent = lowest + 127 + self.next(16) % (highest - lowest + 1)
            words.append(exponent << mantissa | self.next(mantissa) | (sign if self.next(1) else 0))
        return words


def found(holds, count):
    """The first fp32 values in [1, 2), a step of 7919 ulp apart, of which something holds."""
    values = (1 + step * 7919 * power(-23) for step in range(1059))
    return [v for v, _ in zip((v for v in values if holds(v)), range(count))]


def zeros_and_small_blocks(b):
    b.add("all zero", [0] * 4, codes=CODES)
    b.add("all zero with signs", [0x80000000, 0, 0x80000000])
    b.add("all zero", [0, 0x8000, 0], source="bf16")
    for kind in KINDS:
        zeros = [0] * BLOCK[kind]
        b.add_values("slime#2256; ao#4713: a zero block beside another", zeros + [1, -3], kinds=[kind])
        b.add_values("slime#2256; ao#4713: a zero block after another", [2] + zeros[1:] + [0, 0], kinds=[kind])
    for amax in ("5e-35", "1e-37", "1e-40"):
        tiny = [Fraction(amax) * f for f in (1, Fraction(1, 3), Fraction(-7, 9), 0)]
        b.add_values(f"flashinfer#2440: amax about {amax}", tiny, source="bf16")
        b.add_values(f"flashinfer#2440: amax about {amax}", tiny, source="bf16", codes=["e5m2"], kinds=["fp32"])
    b.add("TE#786; MS-AMP#131: amax about 1e-37", [0x020081CE, 0x80000000, 0x81000000])
    b.add("fp32 subnormals", [0x007FFFFF, 0x00400000, 0x80200001, 0x00000001], codes=CODES)
    b.add("the smallest fp32 alone", [0x00000001], codes=CODES)
    b.add("the smallest bf16 alone", [0x8001], source="bf16")
    for power_of_two in (-127, -126):
        middle = F32.word(E4M3.values[-1] * power(power_of_two))
        for word in (middle - 1, middle, middle + 1):
            b.add(f"around 448 * 2^{power_of_two}: the smallest scales", [word, middle // 2])
    small = [F32.word(Fraction(m, 16) * power(-29)) for m in (17, 16, -9, 5, 1)]
    b.add("ROCm/TE#737: gradients of 2e-9; a floor of 1e-4 would flush them", small, codes=CODES)
    b.add("DeepGEMM: below 2.18e-10; a floor of 1e-4 would make it zero", [w - (4 << 23) for w in small])


def edges_of_scales(b):
    for code in CODES:
        largest = FORMATS[code].values[-1]
        for exponent in (-100, -1, 0, 101):
            edge = F32.word(largest * power(exponent)) if largest * power(exponent) < power(128) else None
            for word in () if edge is None else (edge - 1, edge, edge + 1):
                mate = F32.word(largest * power(exponent - 9))
                b.add(f"around {largest} * 2^{exponent}: ceil(log2f) fails just above", [word, 0x80000000 | word, mate], codes=[code],
                      kinds=KINDS if exponent == 0 else ["power_of_two", "e8m0"])
    for exponent in (-120, -100, 0, 100, 120):
        just_above = F32.word(power(exponent)) + 1
        b.add(f"just above 2^{exponent}", [just_above, just_above - 2], kinds=["power_of_two", "e8m0"])
    for amax in (960, 957, Fraction(1023, 2)):
        b.add_values("microxcaling#4: OCP's floor would clip this block", [amax, -amax / 2, amax / 4], kinds=["power_of_two", "e8m0"])
    b.add("FLT_MAX", [0x7F7FFFFF, 0xFF7FFFFF, 0x7E800000, 0x3F800000, 0x00000001], codes=CODES)
    b.add("huge", [0x7F000000, 0xFF000001, 0x7EFFFFFF, 0x7B000000])
    b.add("the largest bf16", [0x7F7F, 0xFF00, 0x7B80, 0x3F80, 0x8001], source="bf16")
    b.add("the largest bf16", [0x7F7F, 0xFF00, 0x7B80, 0x3F80, 0x8001], source="bf16", codes=["e5m2"], kinds=["fp32"])
    fp32 = {"kinds": ["fp32"]}
    inverse = round_to_fp32(1 / Fraction(448))
    over = found(lambda v: round_to_fp32(v * round_to_fp32(448 / v)) > 448, 2)
    b.add_values("amax times the multiplier is just above 448: that is no overflow", over, **fp32)
    for amax in found(lambda v: round_to_fp32(v / 448) != round_to_fp32(v * inverse), 3):
        b.add_values("amax / 448 is not amax * (1 / 448)", [amax, 1], **fp32)


def rounding_of_elements(b):
    """Where the definition's own roundings show: the multiplier, the product in fp32, then the code."""
    fp32 = {"kinds": ["fp32"]}

    def code(magnitude):
        return E4M3.encode((False, magnitude), "nearest_even", "saturate")

    amaxes = [Fraction(3, 2) + power(-23) * k for k in range(1, 4000, 97)]
    divided, doubly = [], []
    for amax in amaxes:
        scale, multiplier = round_to_fp32(amax / 448), round_to_fp32(448 / amax)
        for low, high in zip(E4M3.values[8:-1], E4M3.values[9:]):
            middle = F32.word(round_to_fp32((low + high) / 2 / multiplier))
            for word in range(middle - 1, middle + 2):
                x = F32.number(word)[1]
                product = x * multiplier
                if code(round_to_fp32(product)) != code(round_to_fp32(x / scale)):
                    divided.append((amax, x))
                if code(round_to_fp32(product)) != code(product):
                    doubly.append((amax, x))
    for amax, x in divided[::max(len(divided) // 4, 1)][:4]:
        b.add_values("x * (448 / amax) is not x / scale", [amax, x], **fp32)
    for amax, x in doubly[::max(len(doubly) // 4, 1)][:4]:
        b.add_values("the product is rounded to fp32 and then to the code", [amax, x], **fp32)
    assert divided and doubly
    for name in CODES:
        values = FORMATS[name].values
        middles = [(low + high) / 2 for low, high in zip(values[:-1], values[1:])]
        b.add_values("scale 1 and ties", [values[-1], *middles[:6], *(-m for m in middles[-6:])], codes=[name], kinds=["e8m0"])
        block = [m if i % 3 else -m for i, m in enumerate([values[-1], *middles])]  # no more than 128: a whole block, or nearly
        for source in ("f32", "bf16"):
            b.add_values("scale 1 and every tie", block, source=source, codes=[name], kinds=["fp32"])
        words = [F32.word(m) for m in block[1:]]
        for step, place in ((-1, "below"), (1, "above")):
            b.add(f"scale 1 and just {place} every tie", [F32.word(values[-1]), *(w + step for w in words)], codes=[name],
                  kinds=["power_of_two"])
    half = power(-10)
    b.add_values("what flushes to zero: half the smallest code and less; signs stay",
                 [448, half, -half, half * (1 + power(-23)), -half * (1 - power(-24)), power(-140), -power(-140)])


def events(b):
    nan, infinity, minus = 0x7FC00000, 0x7F800000, 0xFF800000
    three, half = F32.word(3), F32.word(Fraction(-1, 2))
    odd = (("NaN with a payload", 0xFFC12345), ("signalling NaN", 0x7F800001))
    for what, word in (("NaN", nan), ("Inf", infinity), ("-Inf", minus), *odd):
        b.add(f"{what} among others", [three, word, half], codes=CODES if word in (nan, infinity) else ["e4m3"])
    b.add("NaN in the first place", [nan, three, half], kinds=["e8m0"])
    b.add("Inf in the last place", [three, half, infinity], kinds=["e8m0"])
    b.add("NaN and both Inf", [nan, three, infinity, minus, half])
    b.add("nothing but NaN", [nan, nan | 0x80000000], kinds=["fp32", "e8m0"])
    b.add("Inf beside zeros", [0, infinity, 0x80000000], kinds=["fp32", "e8m0"])
    b.add("Inf beside FLT_MAX", [0x7F7FFFFF, infinity], kinds=["fp32", "e8m0"])
    b.add("Inf beside 2^117: mates must not flush", [infinity, F32.word(power(117)), F32.word(-power(110))], kinds=["fp32", "e8m0"])
    b.add("NaN beside subnormals", [0x00000003, nan, 0x80001000], kinds=["fp32", "e8m0"])
    b.add("NaN among others", [0x4040, 0x7FC0, 0xBF00], source="bf16", kinds=["e8m0"])
    b.add("Inf among others", [0x4040, 0xFF80, 0xBF00], source="bf16", kinds=["e8m0"])
    for kind in KINDS:
        data = Noise(5).words(BLOCK[kind] + 3, -4, 2, "bf16")
        data[-2] = 0x7FC0
        b.add("NaN in a partial second block: the first is untouched", data, source="bf16", kinds=[kind])


def shapes_and_data(b):
    for kind in KINDS:
        size = BLOCK[kind]
        for count in (1, size - 1, size, size + 1):
            b.add(f"compressed-tensors#547: {count} elements", Noise(count).words(count, -3, 3, "bf16"), source="bf16", kinds=[kind])
        outlier = Noise(11).words(size, -4, -1, "bf16")
        outlier[size // 2] = BF16.word(3000)
        b.add("one outlier", outlier, source="bf16", kinds=[kind])
        quiet = Noise(12).words(size, -4, -1, "bf16")
        b.add("the outlier belongs to the next block", quiet + [BF16.word(3000)], source="bf16", kinds=[kind])
    for number, (low, high) in enumerate([(-4, 3), (-30, 0), (-126, -110), (90, 127), (-8, 8)]):
        for source in ("f32", "bf16"):
            b.add(f"data from 2^{low} to 2^{high + 1}", Noise(100 + number).words(20, low, high, source), source=source,
                  codes=CODES if source == "f32" else ["e4m3"])
    b.add("data in a whole block of fp32", Noise(200).words(128, -10, 3, "f32"))
    b.add("data in a whole block of bf16", Noise(201).words(128, -12, 3, "bf16"), source="bf16", codes=CODES, kinds=["fp32"])
    b.add_values("equal elements", [Fraction(47, 128)] * 5, source="bf16")


def quantiser_rows():
    blocks = Blocks()
    for part in (zeros_and_small_blocks, edges_of_scales, rounding_of_elements, events, shapes_and_data):
        part(blocks)
    return blocks.rows


def dequantiser_rows():
    rows = []

    def add(code, kind, scale, codes, why):
        number = FORMATS["e8m0"].decode(scale) if kind == "e8m0" else F32.number(scale)
        values = [fp32_word(dequantise(FORMATS[code], number, FORMATS[code].decode(c))) for c in codes]
        digits = 2 if kind == "e8m0" else 8
        rows.append([code, kind, f"{scale:0{digits}x}", "".join(f"{c:02x}" for c in codes), "".join(F32.text(v) for v in values), why])

    e4m3 = [0x38, 0xB8, 0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x7E, 0xFE, 0x7F, 0xFF]
    e5m2 = [0x3C, 0xBC, 0x00, 0x80, 0x01, 0x81, 0x03, 0x04, 0x7B, 0xFB, 0x7C, 0xFC, 0x7D, 0x7E, 0x7F, 0xFF]
    reasons = {0x00: "TE#3262; ao#4725; ao#1104: byte 00 is 2^-127; not 0 and not 2^-126", 0x01: "2^-126", 0x7F: "1", 0x80: "2",
               0xF7: "the largest byte that e4m3 blocks of floats have", 0xFE: "TE#2408: 2^127; products past fp32 are Inf",
               0xFF: "TE#3262; ao#4725: byte ff is NaN and not Inf"}
    for scale, why in reasons.items():
        add("e4m3", "e8m0", scale, e4m3, why)
        add("e5m2", "e8m0", scale, e5m2, why)
    for scale, why in ((0x00800000, "2^-126"), (0x3F800000, "1"), (0x7F000000, "2^127"), (F32.nan, "a poisoned block")):
        add("e4m3", "power_of_two", scale, e4m3, why)
    inexact = [c for c in range(0x40, 0x50)]
    for scale, why in ((0x3B124925, "1 / 448: one rounding"), (0x00800000, "the scale of a zero block"), (0x3DCCCCCD, "0.1: one rounding"),
                       (0x7F7FFFFF, "products past fp32 are Inf"), (F32.nan, "a poisoned block")):
        add("e4m3", "fp32", scale, e4m3 + (inexact if "rounding" in why else []), why)
        add("e5m2", "fp32", scale, e5m2, why)
    return rows
