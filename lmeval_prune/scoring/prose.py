r"""Prose cut into clauses, and the one number that it gives.

A text is read as its outline, in which each number is a `#`, each minus between operands a `−`, and each arrow a `→`. A clause of it
ends at stops, at remarks in brackets, at dashes, and at words that explain or begin another statement. One with `=`, or with a verb
between two numbers (`3 shirts cost 12`), has *sides*. A number is none of its own if it is part of something larger: of an
expression, a comparison, a list, a time, or of words such as `half of 18` and `18 more than`.

Of a clause with sides the last value counts; the first, if it is nothing but a number. Of a clause without sides the first number
counts that nothing governs (of `18 clips in 2 days` the 18), and that is no part of something larger.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from lmeval_prune.scoring.normalisation import clean, line, pattern, phrases, words
from lmeval_prune.scoring.numbers import MAX_DIGITS, VULGAR, Number, find_numbers, rounds_to, same_number

MAX_WORDS = 200  # characters beside a number that are looked at
UNIT_LETTERS = "".join(words("unit_letters"))
_CHINESE = "[\u4e00-\u9fff]"

# --------------------------------------------------------------------------- the outline

_SPACES = re.compile(r"[ \t]{2,}")  # are one
_THAT_IS = re.compile(r"(?i)\bi\.\s?e\.,?")
_ARROW = re.compile(r"[-=]{1,3}>")  # ->, ==>
_SIGNS = str.maketrans("⇒≈≃≅≡", "→====")
_MINUS = re.compile(  # between operands, before a command, between operands of one unit, or in an equation
    r"(?:(?<=[#∞πθ])|(?<![A-Za-z][A-Za-z])(?<=[A-Za-z]))\s*[-–]+\s*(?=#|\(|\\|[b-zB-HJ-Z](?![A-Za-z]))"
    r"|(?<=[\w°)])\s*[-–]\s+(?=\\)|(?<=\s)[-–](?=\s#[^.,;:=\n]{0,80}=)|(?P<left>#\s?(?P<unit>[A-Za-z°]+)|\\[a-z]+)\s*[-–]\s*(?=#\s?(?(unit)(?P=unit)(?![A-Za-z])))"
)

# --------------------------------------------------------------------------- parts of something larger

_OPERATOR = r"[+*/⁄^×·⋅∙÷√±∓|∪∩&_−∶]"
_OTHER = rf"[+*^×·⋅÷−∶]|/(?!\s?(?:[A-Za-z]{{2}}|[{UNIT_LETTERS}]))"  # operators, but no rates
_EXPLANATIONS = "|".join(word for word in words("explanations") if word.isascii())
_PART = re.compile(  # the number is an @, others are #
    rf"""(?:{_OPERATOR}|[<>≤≥≠]|\\[A-Za-z]+)[ ]?@ | [-–—)\]]@ | \#[.:]@ | \{{.*\}}[ ]?@
    | (?:^|[^A-Za-z])[A-Za-z]+@
    | [(\[{{]\ ?@\ ?(?:\\?[)\]}}]|[,;:.…]) | [,;]\ ?@\ ?\\?[)\]}}]
    | @\ ?(?:[|∪∩&_<>≤≥≠⁄√±∓{VULGAR}⁰¹²³⁴-⁹]|\\[A-Za-z]) | @(?:\ ?(?!(?:{_EXPLANATIONS})\b)[A-Za-z°']+){{0,3}}\ ?(?:{_OTHER})
    | @[,.:]\#(?!\s?[-+*/×·÷−]) | @\ ?=\s*$ | @\ ?…+\ ?,?\ ?\# | @\ ?!\ ?[-+*/×·÷^−⁰-⁹] | @!\ {phrases("counted")} | @\\?[(\[{{](?![^)\]}}]*(?:=|{_CHINESE}|[A-Za-z]{{2}}))
    | @(?![{UNIT_LETTERS}])[A-Za-z](?![A-Za-z]) | @\ \(mod\b | @(?:pi|sqrt|[π∞'′″])""",
    re.VERBOSE,
)
_NEXT = re.compile(r"\s?#(?!-\w)")  # but 18 12-ounce cans
# In these patterns a clause is lower-case words.
_CHANGED_BEFORE = re.compile(rf"(?:^|\W){phrases('changed_before')}\s*$|{phrases('changed_before', 'zh')}\s*$")
_CHANGED_AFTER = re.compile(rf"\s*(?:{phrases('changed_after')}|{phrases('changed_after', 'zh')})")  # 18 more than 5
_GOVERNED = re.compile(rf"(?:^|\W){phrases('governors')}\s*$|{phrases('governing_clauses')}")  # in 18, after 18

# --------------------------------------------------------------------------- clauses

# Where a clause ends, which brackets hold a remark, which are a factor; the verb between two numbers.
_BOUNDARY = re.compile(
    r"(?i)(?P<open>\\?[(\[{])|(?P<close>\\?[)\]}])"
    r"|(?P<stop>[;!?，、。；：！？\n…]|(?<!#)[.,:]|[.,:](?!#)|,(?=#\s?[-+*/×·÷−]))"
    rf"|\b(?:{_EXPLANATIONS})\b|{phrases('explanations', 'zh')}"
    rf"|\b(?:for|at|with)(?=\s[a-z]\s?=)|\band(?=\s{phrases('facts')})|(?<=\s)[-–—](?=\s|$)"
)
_REMARK = re.compile(
    rf"(?:(?<=\s)\\?[(\[{{]|\\?[(\[{{](?=[^()\[\]{{}}]*(?:=|{_CHINESE}|[A-Za-z]{{2}})))(?!\s?[\w#]+\s?\\?[)\]}}])",
    re.ASCII,
)
_FACTOR = re.compile(rf"(?:{_OPERATOR}|\\[A-Za-z]+)\s*$")  # before a bracket that is a factor: 3(4)
# of a clause with sides: 3 shirts cost 12
VERBS = re.compile(rf"(?i)(?<!to )\b(?:{'|'.join(words('verbs'))})\b|\bget\b")
_TO_THE_NUMBER = re.compile(rf"(?i)\s*(?:{phrases('before_the_number')} ?)*#")
CONCLUSIONS = words("conclusions")
_WORD = re.compile(rf"\b[A-Za-z]+(?:['’][A-Za-z]+)*|{_CHINESE}+")  # don't, 答案
_FIRST_WORD = re.compile(rf"\s*({_WORD.pattern})")
_SAID, _CHINESE_SAID = words("said_with_a_number"), re.compile(f"{phrases('said_with_a_number', 'zh')}$")
_COMPUTED = re.compile(rf"#[^#]*{_OPERATOR}\s?[({{]*#|# x #")  # 9 apples + 3

Side = tuple[int, int]  # a range of the outline


class Clause(NamedTuple):
    """A part of a sentence."""

    sides: tuple[Side, ...]
    opener: str  # the stop or word before it
    equates: bool  # its sides are equated by a sign, not by a verb

    @property
    def start(self) -> int:
        return self.sides[0][0]

    @property
    def stop(self) -> int:
        return self.sides[-1][1]


class Prose:
    """A text's outline, its numbers by their place in that, as they are written too, and its clauses."""

    def __init__(self, text: str) -> None:
        text = _SPACES.sub(" ", _THAT_IS.sub("that is", text.replace("#", " ").replace("@", " ")))
        located = find_numbers(text)
        ends = [0, *(end for _, end, _ in located)]
        starts = [*(start for start, _, _ in located), len(text)]
        outline = "#".join(text[end:start] for end, start in zip(ends, starts, strict=True)).translate(_SIGNS)
        outline = outline.replace("<=", "≤").replace(">=", "≥").replace(":=", "=").replace("# : #", "#∶#")
        if "-" in outline or "–" in outline or "=>" in outline:
            outline = _MINUS.sub(lambda minus: f"{minus['left'] or ''}−", _ARROW.sub("→", outline))
        self.outline = outline
        self.numbers: dict[int, Number] = {}
        self.written: dict[int, str] = {}
        positions = (position for position, sign in enumerate(outline) if sign == "#")
        for position, (start, end, number) in zip(positions, located, strict=True):
            self.numbers[position], self.written[position] = number, text[start:end]

    def within(self, start: int, stop: int) -> list[int]:
        """Return where numbers are in a range."""
        return [position for position in self.numbers if start <= position < stop]

    def same(self, position: int, other: int) -> bool:
        return same_number(self.numbers[position], self.numbers[other])

    def words(self, start: int, stop: int) -> str:
        return self.outline[start:stop].strip().lower()

    def first_word(self, start: int) -> str:
        """Return the word, in lower case, with which a range begins; nothing if a sign or number does."""
        word = _FIRST_WORD.match(self.outline, start)
        return word[1].lower() if word else ""

    def begins_with(self, clause: Clause, begin: frozenset[str]) -> bool:
        """Return whether a clause begins with one of some words, or one stands before it."""
        return clause.opener in begin or self.first_word(clause.start) in begin

    def clauses(self) -> list[Clause]:
        """Return the clauses that hold a number."""
        cuts: list[tuple[int, int, str]] = []
        start, opener, depth = 0, "", 0
        for boundary in _BOUNDARY.finditer(self.outline):
            position = boundary.start()
            has_number = "#" in self.outline[start:position]
            if boundary["open"]:
                is_factor = _FACTOR.search(self.outline[max(0, position - 40) : position])
                ends = depth == 0 and has_number and bool(_REMARK.match(self.outline, position)) and not is_factor
            elif boundary["close"]:
                ends = depth <= 1 and opener == "("
            else:
                begins = boundary["stop"] or (opener.isalpha() and boundary.group().lower() in CONCLUSIONS)
                ends = (depth == 0 or opener == "(") and (has_number or bool(begins))
            depth = max(0, depth + bool(boundary["open"]) - bool(boundary["close"]))
            if ends:
                cuts.append((start, position, opener))
                in_remark = depth > 0 and opener == "(" and not boundary["open"]
                opener = opener if in_remark else boundary.group().lower()
                start = boundary.end()
        cuts.append((start, len(self.outline), opener))
        return [self._clause(*cut) for cut in cuts if self.within(*cut[:2])]

    def _clause(self, start: int, stop: int, opener: str) -> Clause:
        ends = [(i, i + 1) for i in range(start, stop) if self.outline[i] in "=→"]
        equates = any(self.outline[i] == "=" for i, _ in ends)
        last_side = ends[-1][1] if ends else start
        verb = VERBS.search(self.outline, last_side, stop)  # between two numbers of the last side
        if verb and self.within(last_side, verb.start()) and _TO_THE_NUMBER.match(self.outline, verb.end(), stop):
            ends.append(verb.span())
            equates = False
        sides = zip([start, *(end for _, end in ends)], [*(begin for begin, _ in ends), stop], strict=True)
        return Clause(tuple(s for s in sides if self.outline[s[0] : s[1]].strip()), opener, equates)

    def results(self, clause: Clause) -> bool:
        """Return whether a clause gives what is computed in it: they have 12 + 5 = 17 apples."""
        operands = clause.sides[-2:][0]
        is_quotient = any(self.numbers[position].is_quotient for position in self.within(*operands))
        computed = is_quotient or bool(_COMPUTED.search(self.outline, *operands))
        return clause.equates and computed and self.words(*clause.sides[-1]).startswith("#")

    def free(self, start: int, stop: int) -> list[int]:
        """Return the numbers of a range that nothing governs: no words before them say them of something else."""
        numbers = self.within(start, stop)
        return [i for i in numbers if not _GOVERNED.search(self.words(max(start, i - MAX_WORDS), i))]

    def lone(self, side: Side, final: bool = False) -> int | None:
        """Return the number of a side that has just one which nothing governs; of a final side its first."""
        free = self.free(*side) or self.within(*side)
        begins = final and self.words(*side).startswith("#")
        return free[0] if free and (len(free) == 1 or begins) and not self.is_part(free[0], *side) else None

    def is_introduced(self, start: int, position: int) -> bool:
        said = _WORD.findall(self.outline[start:position])
        return all(word.lower() in _SAID or _CHINESE_SAID.search(word) for word in said)

    def is_part(self, position: int, start: int, stop: int) -> bool:
        before, after = self.outline[max(0, position - 80) : position], self.outline[position + 1 : position + 80]
        if _PART.search(f"{before}@{after}"):
            return True
        if following := _NEXT.match(after):
            other = position + following.end()
            same = self.same(position, other) or self.same(other, position)
            is_repeated = self.written[other][0] in "([" and other > position + 1 and same  # 2/5 (0.4)
            if not is_repeated and not self.written[other].startswith("$"):  # 18 $5 bills
                return True
        if _CHANGED_BEFORE.search(self.words(max(start, position - MAX_WORDS), position)):
            return True
        changed = _CHANGED_AFTER.match(self.words(position + 1, min(stop, position + MAX_WORDS)))
        is_alternative = changed and re.match(r"\s*or #", changed.group())
        other = self.outline.find("#", position + 1)
        return bool(changed) and not (is_alternative and self.same(position, other))


# --------------------------------------------------------------------------- the number that counts

# Words that begin a clause; a comparison, two cases, what others share, a result without its subject.
_REASONS = words("reasons")
_SUPPOSES = pattern("suppositions")  # if 3 shirts cost 12
_COMPARES = re.compile(phrases("compares"))  # which is 3 more than 9; attained at x = 2
_DEPENDS = re.compile(phrases("depends"))  # 12 if he won and 13 if not
_CONCLUDES = re.compile(rf"{phrases('conclusions')}\b|{phrases('concluding', 'zh')}")  # so they need 5 cars
_RATE = re.compile(rf"{phrases('rates')}\b|{phrases('rates', 'zh')}")  # each with 12 seats
_MEASURE = re.compile(r"# ?[a-z]+\.?")  # 3.2 m
_LIST_STOPS = frozenset([",", ";", "、", "，", "；"])
# What is not written in an answer.
_CURRENCY = re.compile(r"(?:US|AU|CA|NZ|HK|NT|[ACRS])?\$|[€£¥₹]|Rs\.?|(?<=-)\s+|^\((.*)\)$")
_DIGITS = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?", re.ASCII)  # no need to read those
# A factorial, or an angle, is another number.
_NOT_THE_NUMBER = re.compile(r"\d\s*!|radians?\b|\d\s*(?:['′″…](?!\d))")
# Nothing but a number: a name and `=` may stand before it, and its unit after it.
_BARE = re.compile(
    r"(?P<name>[^#=]{0,60}=)?(?P<before>[A-Za-z'’\u4e00-\u9fff(\[{\s,;:.!?，。：！？…–—-]*)#(?P<after>[^#=→\\<>≤≥≠]*)"
)


def read_number(text: str, last: bool = False) -> tuple[str, Number] | None:
    """Return the one number that a phrase gives, as it is written; None if there is none, or it is part of something larger.

    Of `x = 20 - 7 = 13 apples` the 13, of `12 (check: 12 + 8 = 20)` the 12, of `she sold 18 clips in 2 days` the 18. None of
    `12 or 13`, `3, 4`, `5:45`, `half of 18`, `not 18`, `18 more than 5`, `x = 3, y = 5`.

    Args:
        text: plain (see `plain`), and short.
        last: of several clauses the last one counts, as at the end of a solution.
    """
    if _DEPENDS.search(text):
        return None
    prose = Prose(text)
    position = _last_number(prose) if last else _first_number(prose)
    if position is None:
        return None
    written = prose.written[position]
    if not written.endswith(("k", "K", "M", "B")):
        is_negative = prose.outline[position - 1 : position] == "负"
        written = f"-{written}" if is_negative else _CURRENCY.sub(r"\1", written).strip()
    return written, prose.numbers[position]


def _first_number(prose: Prose) -> int | None:
    """Return the number of the first clause that states one, unless others make it one of several."""
    clauses = prose.clauses()
    if len(clauses) > 1 and len(clauses[0].sides) == 1:
        first = prose.within(*clauses[0].sides[0])[0]
        if VERBS.search(prose.outline, clauses[0].start, first):  # a sentence, of which what it concludes counts
            clauses = [x for x in clauses[1:] if prose.begins_with(x, CONCLUSIONS)] or clauses
    for i, clause in enumerate(clauses):
        number = number_of_clause(prose, clause)
        if number is not None:
            return None if _has_alternatives(prose, clause, number, clauses[i + 1 :]) else number
    return None


def _last_number(prose: Prose) -> int | None:
    """Return the number of the last clause that is no supposition, reason, comparison or explaining rate."""

    def is_condition(clause: Clause) -> bool:  # that holds no result, as `if x = 3 then it is 12` does
        written = prose.words(clause.start, clause.stop)
        return bool(_SUPPOSES.match(written)) and len(clause.sides) < 3 and " then " not in written

    clauses = prose.clauses()
    # if we add them they are 3 + 4 = 7
    ends = [c for c in clauses[-1:] if prose.results(c) and not prose.first_word(c.stop + 1)]
    clauses = [c for c in clauses if not is_condition(c)] or ends
    conclusions = (c for c in clauses if _CONCLUDES.match(prose.words(c.start, c.stop)))
    end = next((c.start for c in conclusions if prose.free(c.start, c.stop)), len(prose.outline))
    stated = [  # without reasons, and rates that explain a conclusion: so 5 cars, each with 12 seats
        c
        for c in clauses
        if (c.start <= end or not _RATE.match(prose.words(c.start, c.stop)))
        and c.opener not in ("for", "at", "with")
        and not prose.begins_with(c, _REASONS)
    ]
    stated = [c for c in stated if not _COMPARES.match(prose.words(c.start, c.stop))] or stated
    clauses = [clause for clause in stated if prose.free(*clause.sides[-1])] or stated or clauses
    return next((n for clause in reversed(clauses) if (n := number_of_clause(prose, clause)) is not None), None)


def number_of_clause(prose: Prose, clause: Clause) -> int | None:
    """Return the number of a clause: by its sides, or the first that nothing governs."""
    sides = clause.sides
    if len(sides) == 1:
        numbers, free = prose.within(*sides[0]), prose.free(*sides[0])
        if len(free) > 1 and re.search(_CHINESE, prose.outline[clause.start : clause.stop]):  # all of 5小时30分
            free = free if any(prose.is_part(number, *sides[0]) for number in free[:-1]) else free[-1:]
        number = next(iter(free or numbers), None)
        return None if number is None or prose.is_part(number, *sides[0]) else number
    if any(re.search(r"\b(?:or|and) \S+$", prose.words(*side)) for side in sides[1:-1]):  # x = 3 or y = 5
        return None
    first, final = prose.lone(sides[0]), prose.lone(sides[-1], final=True)
    converts = clause.equates and all(_MEASURE.fullmatch(prose.words(*side)) for side in sides)  # 320 cm = 3.2 m
    if (
        first is not None
        and len(prose.within(*sides[0])) == 1
        and not (prose.numbers[first].is_quotient or converts)
        and prose.is_introduced(sides[0][0], first)
    ):
        if prose.outline[sides[0][1]] == "→":  # 3 → 12
            return None
        if clause.equates and not (final is not None and prose.same(first, final)):
            return first
    return final


def _has_alternatives(prose: Prose, clause: Clause, number: int, later_clauses: Sequence[Clause]) -> bool:
    """Return whether what follows makes a number one of several: a list, an alternative, or another name's value."""
    if not later_clauses or later_clauses[0].opener not in _LIST_STOPS:
        return False
    changes = (c for c in later_clauses if c.opener not in (",", "、") or _others(prose, c, number))
    following = next(changes, later_clauses[-1])
    if (
        len(following.sides) == 1
    ):  # another number; but of `12 eggs, 3 of which are bad`, `9.8, 8.2 was given` the first
        other = next(iter(_others(prose, following, number)), None)
        if other is None or prose.is_part(other, following.start, following.stop):
            return False
        after = prose.words(other + 1, following.stop)
        return prose.words(following.start, other) in ("", "and", "or") and not re.search(r"^of\b|\bwas\b", after)
    if len(clause.sides) == 1 or not clause.equates or prose.within(*clause.sides[0]):
        return False
    name = prose.words(*following.sides[0]).removeprefix("and ").removeprefix("or ")
    value = number_of_clause(prose, following)
    return len(name.split()) == 1 and value is not None and not prose.same(value, number)


def _others(prose: Prose, clause: Clause, number: int) -> list[int]:
    return [other for other in prose.within(clause.start, clause.stop) if not prose.same(other, number)]


# --------------------------------------------------------------------------- whole texts


def is_bare_number(text: str) -> bool:
    """Return whether a plain text is nothing but a number, with its name and `=` before it and its unit after it at most."""
    prose = Prose(text)
    bare = _BARE.fullmatch(prose.outline)
    if not bare or len(re.findall(r"[(\[{]", prose.outline)) != len(re.findall(r"[)\]}]", prose.outline)):
        return False
    units = re.findall(r"[A-Za-z]+", bare["after"])
    if len(units) > 6 or any(len(unit) == 1 and unit not in UNIT_LETTERS + "a" for unit in units):
        return False
    return prose.is_introduced(bare.start("before"), bare.end("before")) and read_number(text) is not None


def numbers_in(text: str) -> list[str]:
    return [text[start:end] for start, end, _ in find_numbers(text)]


@lru_cache(maxsize=1 << 16)
def number_of(text: str) -> Number | None:
    """Return the number that a text is; None if it is none, or says more."""
    if len(text) > 2 * MAX_DIGITS:
        return None
    if _DIGITS.fullmatch(text):
        return Number((Fraction(text),), len(text.partition(".")[2]))
    flat = line(clean(text)).rstrip(" .。$")
    if not is_bare_number(flat) or _NOT_THE_NUMBER.search(flat):
        return None
    reading = read_number(flat)
    return reading and reading[1]


def numbers_equal(answer: str, gold: str) -> bool:
    numbers = number_of(answer), number_of(gold)
    return bool(numbers[0] and numbers[1] and same_number(numbers[0], numbers[1]))


def equals_number(value: Fraction, gold: str) -> bool:
    number = number_of(gold)
    return number is not None and (same_number(Number((value,), None), number) or rounds_to(value, number))


def readings(text: str) -> tuple[Fraction, ...]:
    """Return the values that a text can mean as one number; none if it is not one."""
    number = number_of(text)
    return number.values if number else ()
