"""What the vectors mean, in exact arithmetic: each format is the list of its values, and rounding is a search in that list.

Numbers are pairs (negative, magnitude); a magnitude is a Fraction, INFINITY or NAN. Nothing is ever rounded but where the text
says so, and nothing is taken from the implementation under test.
"""
import bisect
import struct
from fractions import Fraction

INFINITY, NAN = "infinity", "nan"
ROUNDINGS = ["nearest_even", "toward_zero", "upward"]
OVERFLOWS = ["saturate", "saturate_finite", "to_nonfinite"]


def power(exponent):
    return Fraction(2) ** exponent


class Format:
    """values[i] is the worth of code i, without a sign; beyond is what the code after the last one would be worth."""

    def __init__(self, name, digits, values, beyond, nan, infinity=None, sign=None, negative_zero=True):
        self.name, self.digits, self.values, self.beyond = name, digits, values, beyond
        self.nan, self.infinity, self.sign, self.negative_zero = nan, infinity, sign, negative_zero
        self.largest = len(values) - 1
        self.overflows = OVERFLOWS if nan is not None else ["saturate"]

    def text(self, code):
        return f"{code:0{self.digits}x}"

    def signed(self, negative, code):
        if not negative or self.sign is None or (code == 0 and not self.negative_zero):
            return code
        return code | self.sign

    def is_nan(self, code):
        """Any NaN, of either sign and with any payload."""
        if self.nan is None:
            return False
        if self.sign is None or not self.negative_zero:
            return code == self.nan
        return code & (self.sign - 1) > (self.largest if self.infinity is None else self.infinity)

    def decode(self, code):
        if self.is_nan(code):
            return False, NAN
        negative = self.sign is not None and code & self.sign != 0
        code &= ~(self.sign or 0)
        return negative, INFINITY if code == self.infinity else self.values[code]

    def non_finite(self, negative):
        """Where overflow and Inf go when they do not saturate."""
        return self.nan if self.infinity is None else self.signed(negative, self.infinity)

    def encode(self, number, rounding, overflow):
        negative, magnitude = number
        if magnitude == NAN:
            return self.largest if self.nan is None else self.nan
        if self.sign is None and negative and magnitude != 0:
            return self.nan  # a scale has no sign
        if magnitude == INFINITY:
            return self.signed(negative, self.largest) if overflow == "saturate" else self.non_finite(negative)
        code = self.search(negative, magnitude, rounding)
        if code > self.largest:
            truncates = rounding == "toward_zero" or (rounding == "upward" and negative)
            if overflow == "to_nonfinite" and not truncates:
                return self.non_finite(negative)
            code = self.largest
        return self.signed(negative, code)

    def search(self, negative, magnitude, rounding):
        """The index of the value that `magnitude` rounds to; largest + 1 for an overflow."""
        if magnitude >= self.beyond:
            return self.largest + 1
        low = max(bisect.bisect_right(self.values, magnitude) - 1, 0)
        if magnitude <= self.values[low]:  # exact, or below the smallest value of a format without zero
            return low
        above = self.values[low + 1] if low < self.largest else self.beyond
        if rounding == "toward_zero" or (rounding == "upward" and negative):
            return low
        if rounding == "upward":
            return low + 1
        to_low, to_above = magnitude - self.values[low], above - magnitude
        if to_low == to_above:  # e8m0 has one digit, so that the larger of two powers is the even one
            return low + 1 if self.sign is None else low + low % 2
        return low if to_low < to_above else low + 1


def ladder(smallest, binade, largest):
    """Zero, the multiples of the smallest value up to 2 * binade of them, then steps that double every `binade` values."""
    values, step = [Fraction(0)], smallest
    while values[-1] < largest:
        values.append(values[-1] + step)
        if len(values) > 2 * binade and len(values) % binade == 1:
            step *= 2
    assert values[-1] == largest
    return values, values[-1] + step


def minifloat(name, digits, smallest, binade, largest, **rest):
    values, beyond = ladder(smallest, binade, Fraction(largest))
    return Format(name, digits, values, beyond, **rest)


FORMATS = {f.name: f for f in [
    minifloat("bf16", 4, power(-133), 128, (2 - power(-7)) * power(127), nan=0x7FFF, infinity=0x7F80, sign=0x8000),
    minifloat("f16", 4, power(-24), 1024, 65504, nan=0x7FFF, infinity=0x7C00, sign=0x8000),
    minifloat("e4m3", 2, power(-9), 8, 448, nan=0x7F, sign=0x80),
    minifloat("e5m2", 2, power(-16), 4, 57344, nan=0x7F, infinity=0x7C, sign=0x80),
    Format("e8m0", 2, [power(n) for n in range(-127, 128)], power(128), nan=0xFF),
    Format("e2m1", 2, [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)], Fraction(8), nan=None, sign=0x8),
    minifloat("e4m3fnuz", 2, power(-10), 8, 240, nan=0x80, sign=0x80, negative_zero=False),
    minifloat("e5m2fnuz", 2, power(-17), 4, 57344, nan=0x80, sign=0x80, negative_zero=False),
]}


class Source:
    """fp32 or fp64: words in hex on one side, numbers on the other. (Every value of both is a Python float.)"""

    def __init__(self, name, layout, exponent_bits, mantissa_bits):
        self.name, self.layout = name, layout
        self.digits = (1 + exponent_bits + mantissa_bits) // 4
        self.sign = 1 << (exponent_bits + mantissa_bits)
        self.infinity = ((1 << exponent_bits) - 1) << mantissa_bits
        self.nan = self.sign - 1

    def text(self, word):
        return f"{word:0{self.digits}x}"

    def number(self, word):
        negative, magnitude = word & self.sign != 0, word & (self.sign - 1)
        if magnitude > self.infinity:
            return negative, NAN
        if magnitude == self.infinity:
            return negative, INFINITY
        return negative, Fraction(struct.unpack(">" + self.layout[0], struct.pack(">" + self.layout[1], magnitude))[0])

    def word(self, value):
        """The word of a value that is one exactly, sign included."""
        word = struct.unpack(">" + self.layout[1], struct.pack(">" + self.layout[0], float(value)))[0]
        negative, magnitude = self.number(word)
        assert magnitude == abs(Fraction(value)), f"{value} is no {self.name}"
        return word


F32 = Source("f32", "fI", 8, 23)
F64 = Source("f64", "dQ", 11, 52)
SOURCES = {"f32": F32, "f64": F64}


def binade(magnitude):
    """The e with 2^e <= magnitude < 2^(e + 1); for zero, one below all that are asked for."""
    if magnitude == 0:
        return -1000
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if power(exponent) <= magnitude else exponent - 1


def nearest_multiple(magnitude, step):
    steps, rest = divmod(magnitude, step)
    if 2 * rest > step or (2 * rest == step and steps % 2 == 1):
        steps += 1
    return steps * step


def round_to_fp32(magnitude):
    """A positive number to the nearest float, ties to even; 2^128 and more is INFINITY."""
    if magnitude == 0:
        return magnitude
    rounded = nearest_multiple(magnitude, power(max(binade(magnitude), -126) - 23))
    return INFINITY if rounded >= power(128) else rounded


def fp32_word(number):
    """The fp32 word of a number that is a float, Inf or NaN."""
    negative, magnitude = number
    if magnitude == NAN:
        return F32.nan
    word = F32.infinity if magnitude == INFINITY else F32.word(magnitude)
    return word | (F32.sign if negative else 0)


# Scale rules: (scale, multiplier) of a block whose largest finite magnitude is amax, of a source whose largest value is given.


def power_of_two_scale(kind, exponent):
    exponent = max(exponent, -127 if kind == "e8m0" else -126)  # no subnormal in fp32
    return power(exponent), power(-exponent)


def round_up(code, kind, amax, largest_input):
    largest = code.values[-1]
    if kind == "fp32":
        top = max(amax, largest * power(-126))
        return round_to_fp32(top / largest), round_to_fp32(largest / top)
    exponent = binade(amax / largest)
    return power_of_two_scale(kind, exponent + (amax > largest * power(exponent)))


def ocp_floor(code, kind, amax, largest_input):
    return power_of_two_scale(kind, binade(amax) - binade(code.values[-1]))


def mantissa_bits(code):
    return sum(1 <= v < 2 for v in code.values).bit_length() - 1


def ocp_even(code, kind, amax, largest_input):
    return ocp_floor(code, kind, nearest_multiple(amax, power(binade(amax) - mantissa_bits(code))), largest_input)


def nearest(code, kind, amax, largest_input):
    ratio = amax / code.values[-1]
    return power_of_two_scale(kind, binade(ratio) + (ratio**2 >= 2 * power(2 * binade(ratio))))


def deep_gemm(code, kind, amax, largest_input):
    scale = round_to_fp32(max(amax, round_to_fp32(Fraction("0.0001"))) / code.values[-1])
    if kind != "fp32":
        return power_of_two_scale(kind, binade(scale) + (scale != power(binade(scale))))
    return scale, round_to_fp32(1 / scale)


def transformer_engine(code, kind, amax, largest_input):
    multiplier = round_to_fp32(code.values[-1] / amax) if amax else Fraction(1)
    if multiplier == INFINITY:
        multiplier = largest_input
    if kind == "power_of_two":
        multiplier = power(binade(multiplier))
    return round_to_fp32(1 / multiplier), multiplier


def quantise(code, kind, overflow, policy, block, rule=round_up, largest_input=None):
    """(scale as a number, codes) of one block of numbers."""
    finite = [m for _, m in block if m not in (NAN, INFINITY)]
    if policy == "poison" and len(finite) < len(block):
        return (False, NAN), [code.nan] * len(block)
    scale, multiplier = rule(code, kind, max(finite, default=Fraction(0)), largest_input)
    codes = []
    for negative, magnitude in block:
        if magnitude not in (NAN, INFINITY):
            magnitude = round_to_fp32(magnitude * multiplier)
        codes.append(code.encode((negative, magnitude), "nearest_even", overflow))
    return (False, scale), codes


def scale_text(kind, scale):
    if kind == "e8m0":
        e8m0 = FORMATS["e8m0"]
        return e8m0.text(e8m0.encode(scale, "toward_zero", "to_nonfinite"))
    return F32.text(fp32_word(scale))


def dequantise(code, scale, element):
    """One product, rounded once to fp32. `scale` and `element` are numbers; a scale is never zero or infinite."""
    negative, magnitude = element
    if NAN in (magnitude, scale[1]):
        return False, NAN
    return negative, magnitude if magnitude == INFINITY else round_to_fp32(magnitude * scale[1])
