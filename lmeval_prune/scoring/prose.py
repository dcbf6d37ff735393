r"""Finding the one number that a piece of prose gives.

Of a clause with sides the last value counts; the first, if it is nothing but a number. Of a clause without sides the first number
counts that nothing governs (of `18 clips in 2 days` the 18), and that is no part of something larger.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from lmeval_prune.scoring.clauses import CONCLUSIONS, UNIT_LETTERS, VERBS, Clause, Prose
from lmeval_prune.scoring.normalisation import clean, line
from lmeval_prune.scoring.numbers import MAX_DIGITS, Number, find_numbers, rounds_to, same_number
from lmeval_prune.scoring.vocabulary import pattern, phrases, words

# Words that begin a clause; a comparison, two cases, what others share, a result without its subject.
_REASONS = words("reasons")
_SUPPOSES = pattern("suppositions")  # if 3 shirts cost 12
_COMPARES = re.compile(phrases("compares"))  # which is 3 more than 9; attained at x = 2
_DEPENDS = re.compile(phrases("depends"))  # 12 if he won and 13 if not
_STATES = re.compile(rf"\b(?:{'|'.join(words('states'))})\b")  # 3 of which are bad
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
        written = (
            f"-{written}" if prose.outline[position - 1 : position] == "负" else _CURRENCY.sub(r"\1", written).strip()
        )
    return written, prose.numbers[position]


def _first_number(prose: Prose) -> int | None:
    """Return the number of the first clause that states one, unless others make it one of several."""
    clauses = _stating_clauses(prose)
    for i, clause in enumerate(clauses):
        number = number_of_clause(prose, clause)
        if number is not None:
            return None if _has_alternatives(prose, clause, number, clauses[i + 1 :]) else number
    return None


def _stating_clauses(prose: Prose) -> list[Clause]:
    """Return the clauses; after a sentence, those of what it concludes."""
    clauses = prose.clauses()
    if len(clauses) < 2:
        return clauses
    first, *rest = clauses
    if len(first.sides) > 1 or not VERBS.search(prose.outline, first.start, prose.within(*first.sides[0])[0]):
        return clauses
    return [clause for clause in rest if _begins_with(prose, clause, CONCLUSIONS)] or clauses


def _last_number(prose: Prose) -> int | None:
    """Return the number of the last clause that is no supposition, reason, comparison or explaining rate."""
    clauses = prose.clauses()
    # if we add them they are 3 + 4 = 7
    ends = [c for c in clauses[-1:] if prose.results(c) and not prose.first_word(c.stop + 1)]
    clauses = [c for c in clauses if not _is_condition(prose, c)] or ends
    stated = [clause for clause in _without_rates(prose, clauses) if not _is_reason(prose, clause)]
    stated = [c for c in stated if not _COMPARES.match(prose.words(c.start, c.stop))] or stated
    clauses = [clause for clause in stated if prose.free(*clause.sides[-1])] or stated or clauses
    return next((n for clause in reversed(clauses) if (n := number_of_clause(prose, clause)) is not None), None)


def _without_rates(prose: Prose, clauses: list[Clause]) -> list[Clause]:
    """Return clauses without rates after a conclusion, which they explain: so 5 cars, each with 12 seats."""
    conclusions = (c for c in clauses if _CONCLUDES.match(prose.words(c.start, c.stop)))
    start = next((c.start for c in conclusions if prose.free(c.start, c.stop)), len(prose.outline))
    return [c for c in clauses if c.start <= start or not _RATE.match(prose.words(c.start, c.stop))]


def _is_reason(prose: Prose, clause: Clause) -> bool:
    return clause.opener in ("for", "at", "with") or _begins_with(prose, clause, _REASONS)


def _begins_with(prose: Prose, clause: Clause, begin: frozenset[str]) -> bool:
    return clause.opener in begin or prose.first_word(clause.start) in begin


def _is_condition(prose: Prose, clause: Clause) -> bool:
    """Return whether a clause begins as a condition, and holds no result (`if x = 3 then it is 12`)."""
    written = prose.words(clause.start, clause.stop)
    return bool(_SUPPOSES.match(written)) and len(clause.sides) < 3 and " then " not in written


def number_of_clause(prose: Prose, clause: Clause) -> int | None:
    """Return the number of a clause: by its sides, or the first that nothing governs."""
    if len(clause.sides) > 1:
        return _number_of_sides(prose, clause)
    return _number_of_phrase(prose, *clause.sides[0]) if clause.sides else None


def _number_of_sides(prose: Prose, clause: Clause) -> int | None:
    sides = clause.sides
    if any(re.search(r"\b(?:or|and) \S+$", prose.words(*side)) for side in sides[1:-1]):  # x = 3 or y = 5
        return None
    first, final = prose.lone(sides[0]), prose.lone(sides[-1], final=True)
    is_quotient = first is not None and prose.numbers[first].is_quotient
    converts = clause.equates and all(_MEASURE.fullmatch(prose.words(*side)) for side in sides)  # 320 cm = 3.2 m
    is_only = len(prose.within(*sides[0])) == 1
    if first is not None and is_only and not is_quotient and not converts and prose.is_introduced(sides[0][0], first):
        if prose.outline[sides[0][1]] == "→":  # 3 → 12
            return None
        if clause.equates and not (final is not None and prose.same(first, final)):
            return first
    return final


def _number_of_phrase(prose: Prose, start: int, stop: int) -> int | None:
    numbers, free = prose.within(start, stop), prose.free(start, stop)
    if len(free) > 1 and re.search("[\u4e00-\u9fff]", prose.outline[start:stop]):
        free = (
            free if any(prose.is_part(position, start, stop) for position in free[:-1]) else free[-1:]
        )  # all of 5小时30分
    number = next(iter(free or numbers), None)
    return None if number is None or prose.is_part(number, start, stop) else number


def _has_alternatives(prose: Prose, clause: Clause, number: int, later_clauses: Sequence[Clause]) -> bool:
    """Return whether what follows makes a number one of several: a list, an alternative, or another name's value."""
    if not later_clauses or later_clauses[0].opener not in _LIST_STOPS:
        return False
    following = next(
        (c for c in later_clauses if c.opener not in (",", "、") or _others(prose, c, number)), later_clauses[-1]
    )
    if len(following.sides) == 1:
        return _is_listed(prose, following, number)
    if len(clause.sides) == 1 or not clause.equates or prose.within(*clause.sides[0]):
        return False
    name = prose.words(*following.sides[0]).removeprefix("and ").removeprefix("or ")
    value = number_of_clause(prose, following)
    return len(name.split()) == 1 and value is not None and not prose.same(value, number)


def _is_listed(prose: Prose, clause: Clause, number: int) -> bool:
    """Return whether a clause begins with another number; but `12 eggs, 3 of which are bad`, `9.8, 8.2 was given`."""
    other = next(iter(_others(prose, clause, number)), None)
    if other is None or prose.is_part(other, clause.start, clause.stop):
        return False
    after = prose.words(other + 1, clause.stop)
    return (
        prose.words(clause.start, other) in ("", "and", "or")
        and not re.match(r"of\b", after)
        and not _STATES.search(after)
    )


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
    """Return all numbers of a plain text, as they are written."""
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
    """Return whether both texts are numbers, and the same."""
    numbers = number_of(answer), number_of(gold)
    return bool(numbers[0] and numbers[1] and same_number(numbers[0], numbers[1]))


def equals_number(value: Fraction, gold: str) -> bool:
    """Return whether a computed value is the number of a text."""
    number = number_of(gold)
    return number is not None and (same_number(Number((value,), None), number) or rounds_to(value, number))


def readings(text: str) -> tuple[Fraction, ...]:
    """Return the values that a text can mean as one number; none if it is not one."""
    number = number_of(text)
    return number.values if number else ()
