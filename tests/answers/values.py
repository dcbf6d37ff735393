"""Values of answers, by family: drawn at random, each with neighbours that are not it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from random import Random

from tests.answers import perturbations

NUMBERS, MATHEMATICS = "number", "mathematics"


@dataclass(frozen=True)
class Value:
    """An answer: the gold answer, how it is written, and the gold answers of neighbours that it does not state."""

    kind: str
    target: str
    plain: str
    latex: str
    chinese: str
    neighbours: tuple[str, ...]


def _number(target: str, plain: str = "", latex: str = "", chinese: str = "") -> Value:
    plain = plain or target
    return Value(NUMBERS, target, plain, latex or plain, chinese or plain, perturbations(target))


def _formula(latex: str, plain: str, *neighbours: str) -> Value:
    return Value(MATHEMATICS, latex, plain, latex, plain, neighbours)


def _integer(random: Random) -> Value:
    return _number(str(random.randint(2, 999)))


def _negative(random: Random) -> Value:
    size = random.randint(2, 99)
    return _number(f"-{size}", random.choice(["-", "−"]) + str(size), f"-{size}")


def _decimal(random: Random) -> Value:
    return _number(f"{random.randint(0, 200)}.{random.choice(['5', '25', '4', '07', '36', '125'])}")


def _reduced(random: Random) -> tuple[int, int]:
    bottom = random.randint(2, 12)
    top = random.choice([n for n in range(1, 20) if gcd(n, bottom) == 1])
    return top, bottom


def _fraction(random: Random) -> Value:
    top, bottom = _reduced(random)
    return _number(f"{top}/{bottom}", latex=rf"\frac{{{top}}}{{{bottom}}}")


def _thousands(random: Random) -> Value:
    number = random.randint(1_000, 9_999_999)
    return _number(str(number), f"{number:,}", f"{number:,}".replace(",", random.choice([",", "{,}", r"\,"])))


def _money(random: Random) -> Value:
    number = f"{random.randint(2, 3_000):,}{random.choice(['', '.50', '.75'])}"
    plain, latex, chinese = random.choice(
        [("${}", r"\${}", "{}元"), ("{} dollars", r"{} \text{{ dollars}}", "{}元"), ("€{}", r"€{}", "¥{}")]
    )
    written = [form.format(number) for form in (plain, latex, chinese)]
    return _number(number.replace(",", ""), *written)


def _percent(random: Random) -> Value:
    number = random.choice([str(random.randint(2, 99)), "12.5", "33.3"])
    plain = random.choice(["%", " percent"])
    return _number(number, f"{number}{plain}", rf"{number}\%", f"{number}%")


def _unit(random: Random) -> Value:
    number = random.choice([str(random.randint(2, 400)), f"{random.randint(2, 40)}.5"])
    unit, chinese = random.choice(
        [("apples", "个"), ("km", "千米"), ("hours", "小时"), ("square meters", "平方米"), ("kg", "千克")]
    )
    return _number(number, f"{number} {unit}", rf"{number} \text{{ {unit}}}", f"{number}{chinese}")


def _formula_integer(random: Random) -> Value:
    number = random.randint(2, 400)
    return _formula(str(number), str(number), *perturbations(str(number)))


def _formula_fraction(random: Random) -> Value:
    top, bottom = _reduced(random)
    sign = random.choice(["", "-"])
    latex = rf"{sign}\frac{{{top}}}{{{bottom}}}"
    turned, more = rf"{sign}\frac{{{bottom}}}{{{top}}}", rf"{sign}\frac{{{top + bottom}}}{{{bottom}}}"
    return _formula(latex, f"{sign}{top}/{bottom}", turned, more, f"{sign}{top}")


def _surd(random: Random) -> Value:
    factor, root = random.randint(2, 9), random.choice([2, 3, 5, 7, 11])
    surd = rf"\sqrt{{{root}}}"
    return _formula(f"{factor}{surd}", f"{factor}√{root}", surd, f"{factor}", f"{factor + 1}{surd}")


def _pi(random: Random) -> Value:
    factor = random.randint(2, 40)
    return _formula(rf"{factor}\pi", f"{factor}π", f"{factor}", r"\pi", rf"{factor + 1}\pi")


def _complex(random: Random) -> Value:
    a, b = random.randint(2, 9), random.randint(2, 9)
    return _formula(f"{a} + {b}i", f"{a} + {b}i", f"{a} - {b}i", f"{a}", f"{b}i")


def _interval(random: Random) -> Value:
    low = random.randint(-9, 5)
    high = low + random.randint(1, 9)
    left, right = random.choice(["[)", "(]", "()", "[]"])
    other = "]" if right == ")" else ")"
    latex = f"{left}{low}, {high}{right}"
    return _formula(latex, latex, f"{left}{low}, {high}{other}", f"{left}{low}, {high + 1}{right}", f"{high}")


def _set(random: Random) -> Value:
    numbers = sorted(random.sample(range(-9, 30), 3))
    listed = ", ".join(map(str, numbers))
    fewer, further = ", ".join(map(str, numbers[:2])), ", ".join(map(str, [*numbers[:2], numbers[2] + 1]))
    return _formula(rf"\{{{listed}\}}", f"{{{listed}}}", rf"\{{{fewer}\}}", rf"\{{{further}\}}", str(numbers[2]))


def _pair(random: Random) -> Value:
    x, y = random.sample(range(-9, 20), 2)
    return _formula(f"({x}, {y})", f"({x}, {y})", f"({y}, {x})", f"({x}, {y + 1})", f"{x}")


def _polynomial(random: Random) -> Value:
    a, b, c = (random.randint(2, 9) for _ in range(3))
    sign, turned = random.choice(["+-", "-+"])
    latex = f"{a}x^2 {sign} {b}x + {c}"
    return _formula(latex, latex, f"{a}x^2 {turned} {b}x + {c}", f"{a}x^2 {sign} {b}x", f"{c}")


def _mixed_number(random: Random) -> Value:
    whole, bottom = random.randint(1, 9), random.randint(2, 9)
    top = random.choice([n for n in range(1, bottom) if gcd(n, bottom) == 1])
    target = f"{whole * bottom + top}/{bottom}"
    return _number(target, f"{whole} {top}/{bottom}", rf"{whole}\frac{{{top}}}{{{bottom}}}")


def _degrees(random: Random) -> Value:
    size = random.randint(5, 175)
    return _formula(rf"{size}^\circ", f"{size}°", rf"{size + 1}^\circ", rf"{180 - size}^\circ" if size != 90 else "1")


def _power(random: Random) -> Value:
    base, exponent = random.randint(2, 9), random.randint(11, 40)
    return _formula(f"{base}^{{{exponent}}}", f"{base}^{exponent}", f"{base}{exponent}", f"{base}", f"{exponent}")


def _matrix(random: Random) -> Value:
    a, b, c = random.sample(range(-9, 20), 3)
    columns = (a, b, c), (b, a, c), (a, b, c + 1)
    first, *others = [rf"\begin{{pmatrix}} {x} \\ {y} \\ {z} \end{{pmatrix}}" for x, y, z in columns]
    return _formula(first, f"${first}$", *others)


def _union(random: Random) -> Value:
    low = random.randint(-9, 0)
    high = low + random.randint(1, 9)
    latex = rf"(-\infty, {low}) \cup [{high}, \infty)"
    other = rf"(-\infty, {low}] \cup [{high}, \infty)"
    return _formula(latex, f"(-∞, {low}) ∪ [{high}, ∞)", other, rf"(-\infty, {low})", rf"[{high}, \infty)")


VALUES: dict[str, Callable[[Random], Value]] = {
    "integer": _integer, "negative": _negative, "decimal": _decimal, "fraction": _fraction, "mixed number": _mixed_number,
    "thousands": _thousands, "money": _money, "percent": _percent, "unit": _unit, "MATH: integer": _formula_integer,
    "MATH: fraction": _formula_fraction, "MATH: surd": _surd, "MATH: pi": _pi, "MATH: complex": _complex,
    "MATH: interval": _interval, "MATH: set": _set, "MATH: pair": _pair, "MATH: polynomial": _polynomial,
    "MATH: degrees": _degrees, "MATH: power": _power, "MATH: column": _matrix, "MATH: union": _union,
}  # fmt: skip
