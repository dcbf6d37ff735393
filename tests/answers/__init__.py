"""How models write their final answers, and what a fair reader would make of it: a corpus for the scorers.

Each `.jsonl` file here is one question put to them; each of its lines is a form with the verdict that is expected and why:

| file | what its forms are | expected |
| --- | --- | --- |
| `standard` | one number, stated as the answer | right; with a perturbed gold answer (`perturbed`), wrong |
| `held` | texts that hold the gold number and do not answer with it | wrong |
| `taken_back` | an answer that is taken back for another | wrong; for the other (`replacing`), right |
| `wrappings` | a gold answer of MATH, stated as the answer | right; with a neighbour's gold answer (`neighbours`), wrong |
| `equivalents` | another form of a gold answer of MATH, in a box | right |
| `near_misses` | what is nearly a gold answer of MATH, in a box | wrong |
| `text` | words, times, ratios, several numbers | both |
| `equations` | expressions, whose value counts | both |
| `scoring_md` | named texts that were scored wrongly once, or are read in a certain way | both |
| `blind/first`, `blind/second` | texts written without sight of code and corpus; what was misread was mended | both |
| `blind/third` | the same, first read after that | both |
| `blind/fourth`, `blind/fifth` | the same, written and first read after all earlier mending | both |

A form that names no gold answer is filled with each of `golds.jsonl` of its kind (of the classes in its `golds`, if it has
any). `{gold}` stands for the gold answer as it is written in prose, `{latex}` in LaTeX, `{target}` as the data set has it,
`{other}` for another answer, and for numbers `{part}`, `{sum}` and `{double}` for 5 less, 8 more and twice as much.
Numbers in words ("twelve") are not expected to be read, so no form has one alone.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMMON = ("integer", "negative", "decimal", "fraction", "percent", "large")  # a number form without `golds`

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A response, the row it answers, and the verdict that is expected.

    Attributes:
        line: the number of the line that it was made from.
        row: what the scorer is given; `target` is the gold answer.
    """

    file: str
    line: int
    kind: str
    category: str
    form: str
    text: str
    row: Row
    expected: bool
    why: str
    name: str = ""


# What is checked of a file, the share of it that may be judged otherwise, averaged over its forms.
TARGETS = {
    "standard": 0.005, "perturbed": 0.0002, "held": 0.05, "taken_back": 0.10, "replacing": 0.10, "wrappings": 0.005,
    "neighbours": 0.005, "equivalents": 0.03, "near_misses": 0.005, "text": 0.02, "equations": 0.02,
}  # fmt: skip


@dataclass(frozen=True)
class Blind:
    """A set of texts written without sight of code and corpus."""

    missed: int  # answers of the set, when it was first read
    accepted: int  # texts that only look like answers, then
    mended: str  # what was mended for the set since


# The same answers and traps, by kind, were asked for in each: plain forms that models write, and what is nearly one.
BLIND = {
    "blind/first": Blind(18, 6, "all"),
    "blind/second": Blind(29, 1, "all but numbers in words, dozens, decimal commas"),
    "blind/third": Blind(2, 1, "a refusal, a Chinese yes"),
    "blind/fourth": Blind(13, 3, "all but numbers in words, a value in two units, a name cut off"),
    "blind/fifth": Blind(7, 4, "all but numbers in words"),
}
SLOW = ("wrappings", "neighbours", "equivalents", "near_misses")  # compared by a computer algebra system


@cache
def load(name: str) -> tuple[Row, ...]:
    """Reads the lines of a file of the corpus."""
    return tuple(json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())


def cases(name: str) -> list[Case]:
    """Makes all cases of one of `TARGETS`, or of `scoring_md`."""
    if name == "perturbed":
        return [other for case in cases("standard") for other in _perturbed(case)]
    if name == "neighbours":
        return [case for case in _filled("wrappings", shift=1) if case.form.count("{latex}")]
    if name == "replacing":
        return list(_filled("taken_back", swap=True))
    return list(_filled(name))


def sample(population: list[Case], size: int) -> list[Case]:
    """Draw cases, always the same, from all forms alike: each once before any a second time."""
    if size >= len(population):
        return population
    by_form: dict[int, list[Case]] = defaultdict(list)
    for case in population:
        by_form[case.line].append(case)
    order = random.Random(12)
    groups = list(by_form.values())
    order.shuffle(groups)
    for group in groups:
        order.shuffle(group)
    rounds = ([group[turn] for group in groups if turn < len(group)] for turn in range(max(map(len, groups))))
    return [case for turn in rounds for case in turn][:size]


def _filled(name: str, shift: int = 0, swap: bool = False) -> Iterator[Case]:
    """Fill the forms of a file: with `shift`, scored against a neighbour's gold answer; with `swap`, {gold} for {other}."""
    for number, line in enumerate(load(name), start=1):
        kind, form = line["kind"], line["form"]
        expected = bool(line["expected"]) != swap
        template = _swapped(form) if swap else form
        case = Case(name, number, kind, line["class"], form, template, {}, expected, line["why"], line.get("name", ""))
        if "gold" in line:
            text = rf"So the answer is $\boxed{{{form}}}$." if name in ("equivalents", "near_misses") else form
            yield replace(case, text=text, row=_row(kind, line))
            continue
        for gold, others in _golds(kind, line.get("golds")):
            text = template
            for placeholder, value in _places(gold, others).items():
                text = text.replace(placeholder, value)
            if shift and not others:
                continue
            yield replace(
                case,
                text=text,
                row=_row(kind, others[shift - 1] if shift else gold),
                expected=case.expected and not shift,
            )


def _swapped(form: str) -> str:
    return form.replace("{gold}", "\0").replace("{other}", "{gold}").replace("\0", "{other}")


def _golds(kind: str, classes: Iterable[str] | None) -> Iterator[tuple[Row, list[Row]]]:
    """The gold answers of a kind and some classes, each with the others of its class that follow it."""
    by_class: dict[str, list[Row]] = defaultdict(list)
    for gold in load("golds"):
        if gold["kind"] == kind:
            by_class[gold["class"]].append(gold)
    for category in classes or (COMMON if kind == "number" else by_class):
        group = by_class[category]
        assert group, f"no gold answers of kind {kind} and class {category}"
        for i, gold in enumerate(group):
            yield gold, group[i + 1 :] + group[:i]


def _row(kind: str, gold: Row) -> Row:
    if kind == "mathematics":
        return {"target": gold["gold"], "level": 1, "subject": "Algebra"}
    if kind == "equation":
        names = gold.get("names", {})
        return {"target": gold["gold"], "equation" if names else "formula": gold["formula"], "names": names}
    return {"target": gold["gold"]}


def _places(gold: Row, others: list[Row]) -> dict[str, str]:
    """Return what stands for each placeholder."""
    target: str = gold["gold"]
    plain: str = gold.get("plain", target)
    places = {"{gold}": plain, "{latex}": gold.get("latex", plain), "{target}": target, "{value}": target}
    if gold["kind"] == "number":
        value = Fraction(target)
        grouped = "," in plain
        steps = {"{other}": value + 17, "{part}": value - 5, "{sum}": value + 8, "{double}": 2 * value}
        places |= {placeholder: written(number, grouped) for placeholder, number in steps.items()}
    elif others:
        places["{other}"] = others[0]["gold"]
    return places


def written(value: Fraction, grouped: bool = False) -> str:
    """Writes a number as digits: whole, decimal if that ends, else as a fraction."""
    if value.denominator == 1:
        return f"{value.numerator:,}" if grouped else str(value.numerator)
    places = next((n for n in range(1, 9) if (value * 10**n).denominator == 1), None)
    if places is None:
        return f"{value.numerator}/{value.denominator}"
    return f"{float(value):,.{places}f}" if grouped else f"{float(value):.{places}f}"


# --------------------------------------------------------------------------- wrong gold answers


@cache
def perturbations(target: str) -> tuple[str, ...]:
    """Numbers that are not the target but near it: one off, ten times, the sign, two digits swapped, one dropped."""
    value = Fraction(target)
    near = [value + 1, value - 1, 10 * value, -value]
    if "/" in target:
        top, bottom = value.numerator, value.denominator
        near += [Fraction(top + 1, bottom), Fraction(top, bottom + 1), 1 / value]
    else:
        if "." in target:
            step = Fraction(1, 10 ** len(target.partition(".")[2]))
            near += [value + step, value - step]
        digits = [i for i, character in enumerate(target) if character.isdigit()]
        for i, j in pairwise(digits):
            if target[i] != target[j]:
                near.append(Fraction(target[:i] + target[j] + target[i + 1 : j] + target[i] + target[j + 1 :]))
        if len(digits) > 1:
            near += [Fraction(_dropped(target, i)) for i in (digits[0], digits[len(digits) // 2], digits[-1])]
    return tuple(dict.fromkeys(written(number) for number in near if number != value))


def _dropped(target: str, i: int) -> str:
    return re.sub(r"\.$", "", target[:i] + target[i + 1 :])


def _perturbed(case: Case) -> Iterator[Case]:
    for target in perturbations(case.row["target"]):
        yield replace(case, row={"target": target}, expected=False, why="the gold answer is another number")


# --------------------------------------------------------------------------- judging


def score(case: Case) -> dict[str, Any]:
    """Scores a case as the project's tasks do."""
    from lmeval_prune.tasks import scorers

    scorers: dict[str, Callable[[Row, list[str]], dict[str, Any]]] = {
        "number": scorers.number,
        "mathematics": scorers.mathematics,
        "text": scorers.text_or_number,
        "equation": scorers.equation,
    }
    return scorers[case.kind](case.row, [case.text])


def judge(case: Case) -> bool:
    """Says whether the project's scorer takes the response for right."""
    return score(case)["exact_match"] == 1


def offending(population: Iterable[Case], verdict: Callable[[Case], bool] = judge) -> list[Case]:
    """Find the cases that are judged otherwise than expected."""
    return [case for case in population if verdict(case) != case.expected]


def rate(population: Iterable[Case], wrong: Iterable[Case]) -> float:
    """Return the share of cases that are wrong, averaged over forms, so that each form counts alike."""
    total, bad = Counter(case.line for case in population), Counter(case.line for case in wrong)
    return sum(bad[line] / count for line, count in total.items()) / len(total)


def show(wrong: Iterable[Case], examples: int = 1) -> str:
    """List wrong cases by class and form: how many, and what was made of the first of each form."""
    by_form: dict[tuple[str, int, str], list[Case]] = defaultdict(list)
    for case in wrong:
        by_form[case.category, case.line, case.form].append(case)
    lines = []
    for (category, line, form), group in sorted(by_form.items()):
        where = f"{group[0].file}.jsonl:{line}"
        lines.append(f"{category}: {form!r} is judged wrongly {len(group)} times ({group[0].why}; {where})")
        for case in group[:examples]:
            scores = score(case)
            lines.append(
                f"    {'missed' if case.expected else 'accepted'}: {case.text!r} for {case.row['target']!r}"
                f" (extracted {scores['extracted']!r}, {scores['how']})"
            )
    return "\n".join(lines)
