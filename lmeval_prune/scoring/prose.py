r"""Finding the one number that a piece of prose gives.

Of a clause with sides the first counts if it is nothing but a number, else the last. Of a clause without sides the first number
counts that nothing governs (of `18 clips in 2 days` the 18), and that is no part of something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from lmeval_prune.scoring.clauses import UNIT_LETTERS, Clause, Prose, Side
from lmeval_prune.scoring.latex import clean, plain
from lmeval_prune.scoring.numbers import MAX_DIGITS, Number, rounds_to, same_number
from lmeval_prune.scoring.vocabulary import pattern, phrases, words

_CONDITIONS, _REASONS, _CONCLUSIONS = words("conditions"), words("reasons"), words("conclusions")
_STATES = words("states")
_SUPPOSES = pattern("suppositions")
_CHINESE_SUPPOSES = re.compile(phrases("suppositions", "zh"))
_COMPARES = re.compile(phrases("compares"))
_DEPENDS = re.compile(phrases("depends"))
_SHARED = re.compile(rf"(?:^|\W){phrases('shared')}$")
_RESULTS = re.compile(f"(?:{phrases('results_of_it')} )+#")
_LIST_STOPS = frozenset([",", ";", "、", "，", "；"])
_AROUND_A_NUMBER = frozenset(["word", "chinese", "open", "minus", "stop", "money"])
_NOT_AFTER_A_NUMBER = frozenset(["equals", "arrow", "command", "relation"])
_CURRENCY = re.compile(r"(?:US|AU|CA|NZ|HK|NT|[ACRS])?\$|[€£¥₹]|Rs\.?|(?<=-)\s+|^\((.*)\)$")
_DIGITS = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?", re.ASCII)  # no need to read those
_NOT_THE_NUMBER = re.compile(r"\d\s*!|radians?\b|\d\s*(?:['′″…](?!\d))")


def read_number(text: str, last: bool = False) -> tuple[str, Number] | None:
    """Return the one number that a phrase gives, as it is written; None if there is none, or it is part of something else.

    Of `x = 20 - 7 = 13 apples` the 13, of `12 (check: 12 + 8 = 20)` the 12, of `she sold 18 clips in 2 days` the 18. None of
    `12 or 13`, `3, 4`, `5:45`, `half of 18`, `not 18`, `18 more than 5`, `x = 3, y = 5`.

    Args:
        text: plain (see `plain`), and short.
        last: of several clauses the last one counts, as at the end of a solution.
    """
    if _DEPENDS.search(text):
        return None
    prose = Prose(text)
    number = _last_number(prose) if last else _first_number(prose)
    if number is None:
        return None
    token = prose.tokens[number]
    assert token.number
    return _as_written(prose, number), token.number


def _first_number(prose: Prose) -> int | None:
    """Return the number of the first clause that states one, unless others make it one of several."""
    clauses = _stating_clauses(prose)
    for i, clause in enumerate(clauses):
        number = number_of_clause(prose, clause)
        if number is not None:
            return None if _is_one_of_several(prose, clause, number, clauses[i + 1 :]) else number
        following = prose.written(clauses[i + 1].start, clauses[i + 1].stop) if i + 1 < len(clauses) else ""
        if not _RESULTS.match(following) or len(prose.within(clause.start, clause.stop)) < 2:
            return None
    return None


def _stating_clauses(prose: Prose) -> list[Clause]:
    """Return the clauses from the first that is no condition; after a sentence, what it concludes."""
    clauses = prose.clauses()
    if len(clauses) < 2:
        return clauses
    clauses = [clause for clause in clauses if not _is_condition(prose, clause)] or clauses
    if not prose.has_free(clauses[0]):
        clauses = [clause for clause in clauses if prose.has_free(clause)] or clauses
    first, *rest = clauses
    if len(first.sides) > 1 or prose.is_number_alone(first) or not prose.has_verb(first):
        return clauses
    return [clause for clause in rest if _begins_with(prose, clause, _CONCLUSIONS)] or clauses


def _last_number(prose: Prose) -> int | None:
    """Return the number of the last clause that is no supposition, reason or comparison."""
    clauses = [clause for clause in prose.clauses() if not _is_supposed(prose, clause)]
    stated = [clause for clause in clauses if not _is_reason(prose, clause)]
    stated = [c for c in stated if not _COMPARES.match(prose.written(c.start, c.stop))] or stated
    clauses = [clause for clause in stated if prose.has_free(clause)] or stated or clauses
    if _are_listed(prose, clauses[-2:]):
        return None
    return next((n for clause in reversed(clauses) if (n := number_of_clause(prose, clause)) is not None), None)


def _are_listed(prose: Prose, clauses: list[Clause]) -> bool:
    """Return whether two clauses are nothing but numbers with a comma between: 15, 12."""
    if len(clauses) < 2 or clauses[1].opener != "," or clauses[0].stop + 1 != clauses[1].start:
        return False
    return all(prose.is_number_alone(clause) for clause in clauses)


def _is_reason(prose: Prose, clause: Clause) -> bool:
    return clause.opener in ("for", "at", "with") or _begins_with(prose, clause, _REASONS)


def _begins_with(prose: Prose, clause: Clause, begin: frozenset[str]) -> bool:
    return clause.opener in begin or prose.tokens.word(clause.start) in begin


def _is_condition(prose: Prose, clause: Clause) -> bool:
    first = prose.tokens.text(clause.start).lower()
    return (first in _CONDITIONS or bool(_CHINESE_SUPPOSES.match(first))) and not _calculates(prose, clause)


def _is_supposed(prose: Prose, clause: Clause) -> bool:
    return bool(_SUPPOSES.match(prose.tokens.text(clause.start))) and not _calculates(prose, clause)


def _calculates(prose: Prose, clause: Clause) -> bool:
    """Return whether a clause holds a result, whatever it begins with: `if x = 3 then it is 12`."""
    return len(clause.sides) > 2 or " then " in prose.written(clause.start, clause.stop)


def number_of_clause(prose: Prose, clause: Clause) -> int | None:
    """Return the number of a clause: by its sides, or the first that nothing governs."""
    if len(clause.sides) > 1:
        return _number_of_sides(prose, clause)
    return _number_of_phrase(prose, *clause.sides[0]) if clause.sides else None


def _number_of_sides(prose: Prose, clause: Clause) -> int | None:
    tokens, sides = prose.tokens, clause.sides
    if _is_unsolved(prose, sides):
        return None
    first, final = prose.lone(sides[0]), prose.lone(sides[-1], final=True)
    number = None if first is None else tokens[first].number
    bare = first if number and not number.is_quotient and prose.is_bare(sides[0]) else None
    if bare is not None and tokens.kind(sides[0][1]) == "arrow":  # 3 → 12
        return None
    if bare is not None and clause.equates and not (final is not None and prose.same(bare, final)):
        return None if prose.is_unsolved(sides[-1]) else bare
    if final is None and clause.equates and not (number and number.is_quotient and prose.within(*sides[-1])):
        return first
    return final


def _is_unsolved(prose: Prose, sides: tuple[Side, ...]) -> bool:
    """Return whether sides give no value, or several: 2x = x + 15; x = 3 or y = 5."""
    if any(prose.tokens.word(stop - 2) in ("or", "and") for _, stop in sides[1:-1]):
        return True
    names = any(stop - start == 1 and prose.tokens.name(start) for start, stop in sides)
    return prose.is_unsolved(sides[-2]) and not names


def _number_of_phrase(prose: Prose, start: int, stop: int) -> int | None:
    numbers = prose.within(start, stop)
    free = [number for number in numbers if not prose.governed(number, start)]
    if len(free) > 1 and free[0] == start and _counts_others(prose, free[0], start):
        free = free[1:]
    if len(free) > 1 and any(prose.tokens[i].kind == "chinese" for i in range(start, stop)):
        free = _chinese_numbers(prose, free, start, stop)
    elif len(free) > 1 and _SHARED.search(prose.written(start, free[1])):
        free = free[1:]
    number = next(iter(free or numbers), None)
    return None if number is None or prose.is_part(number, start, stop) else number


def _counts_others(prose: Prose, number: int, start: int) -> bool:
    """Return whether a number counts what another is said of: `1 of them costs 12`, 3个箱子装12个."""
    tokens, after = prose.tokens, number + 1
    counted = tokens.kind(after) == "chinese" and not tokens[after].text.startswith("的")
    return (tokens.word(after) == "of" or counted) and not prose.is_part(number, start, len(tokens))


def _chinese_numbers(prose: Prose, free: list[int], start: int, stop: int) -> list[int]:
    """Return, of several numbers of a Chinese clause, the last one, before 才 if there is one; all of 5小时30分."""
    counted = [number for number in free if not prose.written(start, number).endswith("第")] or free
    if any(prose.is_part(number, start, stop) for number in counted[:-1]):
        return counted
    return ([number for number in counted if "才" in prose.written(number + 1, stop)] or counted)[-1:]


def _is_one_of_several(prose: Prose, clause: Clause, number: int, rest: Sequence[Clause]) -> bool:
    """Return whether what follows makes a number one of several: a list, an alternative, or another name's value."""
    if not rest or rest[0].opener not in _LIST_STOPS:
        return False
    following = next((c for c in rest if c.opener not in (",", "、") or _others(prose, c, number)), rest[-1])
    if len(following.sides) == 1:
        return _is_listed(prose, following, number)
    if len(clause.sides) == 1 or not clause.equates or prose.within(*clause.sides[0]):
        return False
    name = prose.written(*following.sides[0]).removeprefix("and ").removeprefix("or ")
    value = number_of_clause(prose, following)
    return len(name.split()) == 1 and value is not None and not prose.same(value, number)


def _is_listed(prose: Prose, clause: Clause, number: int) -> bool:
    """Return whether a clause begins with another number; but `12 eggs, 3 of which are bad`."""
    other = next(iter(_others(prose, clause, number)), None)
    if other is None or prose.is_part(other, clause.start, clause.stop) or _has_verb_after(prose, other, clause):
        return False
    return prose.written(clause.start, other) in ("", "and", "or") and prose.tokens.word(other + 1) != "of"


def _has_verb_after(prose: Prose, number: int, clause: Clause) -> bool:
    """Return whether a clause says something of a number: 8.2 was given."""
    return any(prose.tokens.word(i) in _STATES for i in range(number + 1, clause.stop))


def _others(prose: Prose, clause: Clause, number: int) -> list[int]:
    return [other for other in prose.within(clause.start, clause.stop) if not prose.same(other, number)]


def _as_written(prose: Prose, number: int) -> str:
    tokens = prose.tokens
    written = tokens[number].text
    if written.endswith(("k", "K", "M", "B")):
        return written
    if tokens.kind(number - 1) == "chinese" and tokens[number - 1].text.endswith("负"):
        return f"-{written}"
    return _CURRENCY.sub(r"\1", written).strip()


# --------------------------------------------------------------------------- whole texts


def is_bare_number(text: str) -> bool:
    """Return whether a plain text is nothing but a number, with its name and `=` before it and its unit after it at most."""
    prose = Prose(text)
    if len(prose.numbers) != 1:
        return False
    number, tokens = prose.numbers[0], prose.tokens
    kinds = [token.kind for token in tokens]
    before, after = kinds[:number], kinds[number + 1 :]
    named = before.index("equals") + 1 if "equals" in before else 0
    if not _AROUND_A_NUMBER.issuperset(before[named:]) or not _NOT_AFTER_A_NUMBER.isdisjoint(after):
        return False
    if named > 5 or kinds.count("open") != kinds.count("close") or text.lstrip().startswith("--"):
        return False
    units = [token.text for token in tokens[number + 1 :] if token.kind == "word"]
    introductory = (i for i in range(named, number) if prose.is_word(i))
    return _may_be_units(units) and all(map(prose.may_stand_before, introductory)) and read_number(text) is not None


def _may_be_units(units: list[str]) -> bool:
    return len(units) <= 6 and not any(len(unit) == 1 and unit != "a" and unit not in UNIT_LETTERS for unit in units)


def numbers_in(text: str) -> list[str]:
    """Return all numbers of a plain text, as they are written."""
    prose = Prose(text)
    return [prose.tokens[i].text for i in prose.numbers]


@lru_cache(maxsize=1 << 16)
def number_of(text: str) -> Number | None:
    """Return the number that a text is; None if it is none, or says more."""
    if len(text) > 2 * MAX_DIGITS:
        return None
    if _DIGITS.fullmatch(text):
        return Number((Fraction(text),), len(text.partition(".")[2]))
    flat = " ".join(plain(clean(text)).split()).strip().rstrip(" .。$")
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
