r"""Reading one number as people and models write it, and comparing two.

Two numbers are the same if their values are, up to the noise of a float. A gold number with two decimals or more is also equalled
by one that is given to more digits and rounds to it (33.33 by 100/3, 0.67 by 0.6667), and one that has no end (1/3) by its
rounding to two decimals or more. A percentage is read both ways, `80%` as 80 and as 0.8, since gold answers write it either way;
`5 million` is 5,000,000.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lmeval_prune.scoring.plain import clean, plain

MAX_DIGITS = 400
NOISE = Fraction(1, 10**6)  # of a float, absolute and relative
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_CHINESE_SCALES = {"百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8, "百万": 10**6, "千万": 10**7, "万万": 10**8}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SPACE = "\u00a0\u2007\u2009\u202f"  # between groups of digits
_VULGAR = "".join(map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F))))

_TOKEN = re.compile(
    rf"""
      (?P<digits>
        (?:[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:['’]\d{{3}})+|(?:[{_SPACE} ]\d{{3}})+|(?:,\d\d)+,\d{{3}})(?!\d)|\d+)(?:\.\d+)?
        | \.\d+
      )(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?![A-Za-z\d]))?
    | (?P<vulgar>[{_VULGAR}])
    | (?P<word>[A-Za-z]+(?:['’][A-Za-z]+)*)
    | (?P<scale>(?:(?<=\d)|(?<=\d[ ]))(?!千米|千克|千瓦|百分|千分)(?:[百千万]?万|亿|[百千]))
    | (?P<chinese>[\u4e00-\u9fff]+)
    | (?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)
    | (?P<command>\\[A-Za-z]+)
    | (?P<arrow>[-=]>|[→⇒])
    | (?P<equals>:=|[=≈≃≅≡])
    | (?P<relation><=|>=|[<>≤≥≠])
    | (?P<minus>[-\u2010\u2011\u2212\u2013\u2014])
    | (?P<operator>\*\*|[+*/⁄^×·⋅∙÷√±∓|∪∩&_])
    | (?P<open>[(\[{{])
    | (?P<close>[)\]}}])
    | (?P<money>[$€£¥₹])
    | (?P<percent>[%％])
    | (?P<degree>°)
    | (?P<stop>[,;:.!?，、。；：！？\n…])
    | (?P<other>\S)
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Token:
    """A piece of a text: its kind, where it is, and whether white space stands before it."""

    kind: str
    text: str
    start: int
    end: int
    spaced: bool


def tokens(text: str) -> list[Token]:
    """Cut a text into tokens."""
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        before = found[-1].end if found else 0
        kind = match.lastgroup or "other"
        found.append(
            Token("digits" if kind == "exponent" else kind, match.group(), *match.span(), match.start() > before)
        )
    return found


@dataclass(frozen=True)
class Number:
    """A number that a text gives.

    Attributes:
        values: what it can mean.
        decimals: after the point; None for a fraction.
        first, last: its tokens, the last one included.
    """

    values: tuple[Fraction, ...]
    decimals: int | None
    first: int
    last: int


def number_at(found: Sequence[Token], place: int) -> Number | None:
    """The number that begins with a token: sign, currency, digits, fraction, power of ten, percentage and scale."""
    at, sign = place, 1
    if _word(found, at) == "negative" or (_word(found, at) == "minus" and _may_begin(found, at)):
        at, sign = at + 1, -1
    for _ in range(3):
        if _is(found, at, "minus") and sign > 0 and not _spaced(found, at + 1) and found[at].text not in "–—":
            at, sign = at + 1, -1
        elif _is(found, at, "money") or (_is(found, at, "operator") and found[at].text == "+" and at == place):
            at += 1
        else:
            break
    bracket = at if _is(found, at, "open") else None
    inner = _core(found, at + (bracket is not None))
    if inner is None or (bracket is not None and "," in found[at + 1].text):  # (1,100) is a pair
        return None
    value, decimals, at = inner
    if bracket is not None:
        if not _is(found, at + 1, "close"):
            return None
        at += 1
    value, decimals, at = _power(found, value, decimals, at)
    values = (sign * value,)
    if _is(found, at + 1, "percent") or _word(found, at + 1) in ("percent", "percentage"):
        at, values = at + 1, (sign * value, sign * value / 100)
    elif _word(found, at + 1) == "per" and _word(found, at + 2) == "cent":
        at, values = at + 2, (sign * value, sign * value / 100)
    elif (scale := SCALES.get(_word(found, at + 1).removesuffix("s"))) is not None:
        at, values, decimals = at + 1, (sign * value * scale,), None
    elif _is(found, at + 1, "scale"):
        at, values, decimals = at + 1, (sign * value * _CHINESE_SCALES[found[at + 1].text],), None
    return Number(values, decimals, place, at)


def _may_begin(found: Sequence[Token], at: int) -> bool:
    """Whether nothing that could be subtracted from stands before."""
    return (
        at == 0
        or found[at - 1].kind in ("equals", "stop", "open")
        or _word(found, at - 1) in ("is", "are", "was", "be", "equals")
    )


def _core(found: Sequence[Token], at: int) -> tuple[Fraction, int | None, int] | None:
    """Value, decimals and last token of digits, a fraction or a mixed number."""
    if at >= len(found):
        return None
    if found[at].kind == "vulgar":
        return _vulgar(found[at]), None, at
    if found[at].kind == "minus" and not _spaced(found, at + 1):  # (-3)
        inner = _core(found, at + 1)
        return None if inner is None else (-inner[0], inner[1], inner[2])
    if found[at].kind != "digits" or len(found[at].text) > MAX_DIGITS:
        return None
    value, decimals = _digits(found[at])
    if _is(found, at + 1, "command") and found[at + 1].text == "\\overline" and _is(found, at + 3, "digits"):
        cycle = found[at + 3].text
        value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**decimals)
        return value, None, at + 4
    if (fraction := _fraction(found, at)) is not None:
        return fraction, None, at + 2
    if _is(found, at + 1, "vulgar"):
        return value + _vulgar(found[at + 1]), None, at + 1
    if decimals == 0:
        for gap, opened in ((1, False), (2, False), (2, True)):
            top = at + gap
            if gap == 2 and not (found[at + 1 : at + 2] and found[at + 1].text in (("(",) if opened else ("又", "+"))):
                continue
            if gap == 1 and not _spaced(found, top):
                continue
            part = _fraction(found, top)
            if part is not None and part < 1 and (not opened or _is(found, top + 3, "close")):
                return value + part, None, top + 2 + opened
        words = [_word(found, at + i) for i in (1, 2, 3)]
        if words[:2] == ["and", "a"] and words[2] in ("half", "quarter", "third"):
            return value + Fraction(1, {"half": 2, "quarter": 4, "third": 3}[words[2]]), None, at + 3
    return value, decimals, at


def _fraction(found: Sequence[Token], at: int) -> Fraction | None:
    """`3/4`, but not a part of a date."""
    if not (_is(found, at, "digits") and _is(found, at + 1, "operator") and _is(found, at + 2, "digits")):
        return None
    if found[at + 1].text not in "/⁄" or (_is(found, at + 3, "operator") and found[at + 3].text == "/"):
        return None
    if max(len(found[at].text), len(found[at + 2].text)) > MAX_DIGITS:
        return None
    (top, _), (bottom, _) = _digits(found[at]), _digits(found[at + 2])
    return top / bottom if bottom else None


def _power(found: Sequence[Token], value: Fraction, decimals: int | None, at: int) -> tuple[Fraction, int | None, int]:
    """Times a power of ten: `5 × 10^3`, `5 x 10³`."""
    ten = at + 2
    times = (_is(found, at + 1, "operator") and found[at + 1].text in "×*·⋅") or _word(found, at + 1) == "x"
    if not (times and _is(found, ten, "digits") and found[ten].text == "10"):
        return value, decimals, at
    if _is(found, ten + 1, "raised"):
        return value * _ten(found[ten + 1].text.translate(_SUPERSCRIPTS)), None, ten + 1
    if _is(found, ten + 1, "operator") and found[ten + 1].text in ("^", "**"):
        rest = [token for token in found[ten + 2 : ten + 6]]
        text = "".join(token.text for token in rest)
        if power := re.match(r"[({]?([-\u2212]?\d{1,3})[)}]?", text):
            length = len(power.group())
            for number, token in enumerate(rest):
                length -= len(token.text)
                if length <= 0:
                    return value * _ten(power[1].replace("\u2212", "-")), None, ten + 2 + number
    return value, decimals, at


def _ten(exponent: str) -> Fraction:
    return Fraction(10) ** int(exponent or 0) if re.fullmatch(r"-?\d{1,3}", exponent) else Fraction(1)


def _digits(token: Token) -> tuple[Fraction, int]:
    text, _, exponent = token.text.lower().partition("e")
    plain = re.sub(rf"[,'’ {_SPACE}]", "", text)
    value = Fraction(plain) * (Fraction(10) ** int(exponent) if exponent else 1)
    return value, len(plain.partition(".")[2]) if not exponent else 0


def _vulgar(token: Token) -> Fraction:
    return Fraction(unicodedata.numeric(token.text)).limit_denominator(100)


def _is(found: Sequence[Token], place: int, kind: str) -> bool:
    return 0 <= place < len(found) and found[place].kind == kind


def _spaced(found: Sequence[Token], place: int) -> bool:
    return place >= len(found) or found[place].spaced


def _word(found: Sequence[Token], place: int) -> str:
    return found[place].text.lower() if _is(found, place, "word") else ""


def same_number(answer: Number, gold: Number) -> bool:
    """Whether a reading of one equals a reading of the other, as stated above."""
    return any(_close(a, answer.decimals, g, gold.decimals) for a in answer.values for g in gold.values)


def _close(answer: Fraction, digits: int | None, gold: Fraction, gold_digits: int | None) -> bool:
    if abs(answer - gold) <= NOISE * min(1, abs(gold)):
        return True
    if gold.denominator == 1:
        return False
    if _ends(gold) and gold_digits is not None and not _is_cut(gold, gold_digits):  # 33.33: given to more digits
        if gold_digits < 2 or (digits is not None and digits <= gold_digits):
            return False
        return abs(answer - gold) <= Fraction(1, 2 * 10**gold_digits)
    if _ends(gold) and gold_digits is None:  # 3/8
        return False
    if digits is None or digits < 2:  # no end: the answer's own rounding of it, up or down
        return False
    shifted, written = abs(gold) * 10**digits, abs(answer) * 10**digits
    return answer * gold > 0 and (abs(shifted - written) <= Fraction(1, 2) or written == shifted.__floor__())


def _is_cut(value: Fraction, digits: int) -> bool:
    """Whether decimals are the beginning of some that do not end: many, or repeating."""
    written = str(abs(value.numerator * 10**digits // value.denominator))[-digits:] if digits else ""
    return digits > 8 or (digits > 4 and re.search(r"(\d+?)\1{2,}\d?$", written) is not None)


def _ends(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


# --------------------------------------------------------------------------- the number that a piece of prose gives

# A number is part of something else if one of these stands before it (its clause up to it, numbers written #), …
_CHANGED_BEFORE = re.compile(
    r"(?:^|\W)(?:"
    r"(?:not|isn't|aren't|wasn't|never|neither|nor|cannot|can't)(?: (?:be|equal|equal to|really|just|quite|exactly|simply|the))?"
    r"|(?<!no )(?<!not )(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower|longer|shorter|older|younger|rather) than"
    r"|(?<!add )(?<!adds )(?<!added )(?<!adding )(?<!sum )(?<!sums )(?<!total )(?<!totals )(?<!come )(?<!comes )up to"
    r"|either|between|twice|thrice|double|triple|quadruple|half|sqrt|log|ln|exp|sin|cos|tan|gcd|lcm|max|min|mod|modulo"
    r"|plus|minus|times|over|under|above|below|beyond|past|except|without|versus|vs|instead of|out of"
    r"|(?:roots?|powers?|square|cube|factorial|multiples?|divisors?|factors?|reciprocal|inverse|logarithm|half|halves|thirds?"
    r"|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?|none|any|remainder|product|negative|opposite) of(?: the)?"
    r"|(?:multiplied|divided|raised) (?:by|to)(?: the)?"
    r"|step|question|problem|part|example|case|equation|eq|chapter|page|section|figure|table|method|solution|option|stage"
    r"|# (?:to|by|of|times|plus|minus|or|and)"
    r")$"
    r"|(?:不是|不等于|并非|大于|小于|多于|少于|超过|不到|不足|比|(?<![得达分找拿收买做看付要])到|至|根号|第|步骤|除以|乘以|加上|减去|的[一二三四五六七八九十]倍)$"
)
# … or one of these after it.
_CHANGED_AFTER = re.compile(
    r"(?:or|to(?! # (?:significant|decimal))|of|by|and|times|plus|minus|over|divided by|multiplied by|out of|x|r|remainder) #"
    r"|(?:[a-z]+ )?and #"
    r"|(?!(?:in|on|at|for|per|by|each|every|after|from|within|with|of|to|a|until|over|during|before|among|across)\b)[a-z]+ # [a-z]+(?: *$| ?[.,;])"
    r"|(?:or|and) (?:(?:an? |one )?(?:half|third|quarter)|more|less|fewer)\b"
    r"|(?:[a-z]+ )?(?:more|less|fewer|greater|larger|smaller|higher|lower|older|younger) than #"
    r"|(?:squared|cubed|factorial|mod|modulo|pi|sqrt|with (?:a )?remainder|remainder|minus|plus|negative)\b"
    r"|(?:st|nd|rd|th) of\b|to the (?:power|\w+th|second|third)\b|half$|less$|[xyznk]\b(?! [a-z])"
    r"|[\u4e00-\u9fff]{0,3}?(?:的?(?:一半|平方(?!分?千?厘?毫?米|公里)|立方(?!分?千?厘?毫?米)|[一二三四五六七八九十]分之|几分之|开方|阶乘|[一二三四五六七八九十两]倍)|分之|以上|以下|次方)"
    r"|[\u4e00-\u9fff]{1,3} ?#|(?:或|到|至|和|加|减|乘|除|比)"
)
# What governs a number: it is said of something else, where there is another one.
_GOVERNED = re.compile(
    r"(?:^|\W)(?:in|on|at|for|from|after|by|every|within|per|until|during|before|since|with|among|into|of|the|these|those|all|both"
    r"|his|her|their|its|each|another|first|last|next|other|remaining|original|another)$"
)
# Words at which an answer ends and its explanation begins, or, at the beginning of a clause, a condition stands.
_EXPLAINS = frozenset(
    [
        "because",
        "since",
        "as",
        "when",
        "if",
        "where",
        "which",
        "so",
        "given",
        "while",
        "but",
        "though",
        "although",
        "whereas",
        "assuming",
        "provided",
        "hence",
        "thus",
        "therefore",
        "namely",
        "check",
        "note",
        "see",
        "not",
    ]
)
_CONDITIONS = frozenset(
    ["for", "when", "if", "with", "at", "given", "let", "where", "suppose", "assume", "using", "from"]
)
_CURRENCIES = frozenset(["usd", "eur", "gbp", "rmb", "cny", "inr", "us", "rs", "rm", "hk", "aud", "cad", "nt", "sgd"])
_UNITS = frozenset("mgslhLJNWVKCFT")  # letters at the digits that are a unit


@dataclass(frozen=True)
class _Clause:
    """A part of a sentence: its sides of `=`, each a range of tokens."""

    sides: tuple[tuple[int, int], ...]
    opener: str  # the stop before it


def read_number(text: str, last: bool = False) -> tuple[str, Number] | None:
    """The one number that a phrase gives, as it is written; None if it gives none, or one that is part of something else.

    Of `x = 20 - 7 = 13 apples` the 13, of `12 (check: 12 + 8 = 20)` the 12, of `she sold 18 clips in 2 days` the 18. None of
    `12 or 13`, `3, 4`, `5:45`, `half of 18`, `not 18`, `18 more than 5`, `x = 3, y = 5`.

    Args:
        text: plain (see `plain`), and short.
        last: of several clauses the last one counts, as at the end of a solution.
    """
    found = tokens(text)
    numbers = _numbers(found)
    clauses = [
        clause for clause in _clauses(found, numbers) if _within(numbers, clause.sides[0][0], clause.sides[-1][1])
    ]
    if not last and len(clauses) > 1:
        clauses = [c for c in clauses if _word(found, c.sides[0][0]) not in _CONDITIONS] or clauses
    for place, clause in reversed(list(enumerate(clauses))) if last else enumerate(clauses):
        number = _of_clause(found, numbers, clause)
        if number is None:
            if last:
                continue
            return None
        if not last and _goes_on(found, numbers, clause, number, clauses[place + 1 :]):
            return None
        written = text[found[number.first].start : found[number.last].end]
        negated = _is(found, number.first - 1, "chinese") and found[number.first - 1].text.endswith("负")
        return f"-{written}" if negated else written, number
    return None


def _numbers(found: Sequence[Token]) -> list[Number]:
    """The numbers of a text, from left to right."""
    numbers: list[Number] = []
    at = 0
    while at < len(found):
        number = number_at(found, at) if not _is(found, at, "minus") or _is_sign(found, at) else None
        if number is None and _is(found, at, "minus") and _is(found, at - 1, "equals") and _spaced(found, at + 1):
            positive = number_at(found, at + 1)  # = - 12
            number = positive and Number(tuple(-v for v in positive.values), positive.decimals, at, positive.last)
        if number is not None and _is(found, at - 1, "chinese") and found[at - 1].text.endswith("负"):
            number = Number(tuple(-value for value in number.values), number.decimals, at, number.last)
        if number is not None:
            numbers.append(number)
            at = number.last
        at += 1
    return numbers


def _is_sign(found: Sequence[Token], at: int) -> bool:
    """Whether a minus can be a sign: nothing that could be subtracted from stands before it."""
    if at == 0 or found[at - 1].kind in ("equals", "open", "operator", "relation", "stop", "chinese", "money"):
        return True
    return found[at].spaced and found[at - 1].kind in ("word", "other", "close")


def _within(numbers: Sequence[Number], start: int, stop: int) -> list[Number]:
    return [number for number in numbers if start <= number.first and number.last < stop]


def _clauses(found: Sequence[Token], numbers: Sequence[Number]) -> list[_Clause]:
    """Cut at stops, at remarks in brackets, at dashes, and at words that explain, once there was a number."""
    inside = {i for number in numbers for i in range(number.first, number.last + 1)}
    cuts: list[tuple[int, int, str]] = []  # first token, end, stop before
    start, opener, depth, seen = 0, "", 0, False
    for i, token in enumerate(found):
        ends = False
        if i in inside:
            seen = True
            continue
        if token.kind == "open":
            remark = depth == 0 and seen and (token.spaced or _says(found, i)) and not _is(found, i + 2, "close")
            depth += 1
            ends = remark
        elif token.kind == "close":
            depth = max(0, depth - 1)
            ends = depth == 0 and opener == "("
        elif depth == 0 or opener == "(":
            if token.kind == "stop":
                ends = _stops(found, i)
            elif token.kind == "minus":
                ends = seen and token.spaced and _spaced(found, i + 1) and not (i + 1 in inside and i - 1 in inside)
            elif token.kind == "word" and seen:
                ends = token.text.lower() in _EXPLAINS or (token.text.lower() == "i" and _is(found, i + 1, "stop"))
            elif token.kind == "chinese" and seen:
                ends = token.text.startswith(("因为", "所以", "即"))
        if ends:
            cuts.append((start, i, opener))
            start, opener, seen = i + 1, token.text, False
    cuts.append((start, len(found), opener))
    return [_Clause(_sides(found, a, b), before) for a, b, before in cuts if a < b]


def _says(found: Sequence[Token], opened: int) -> bool:
    """Whether a bracket holds words or an equation, and is no factor."""
    for token in found[opened + 1 : opened + 40]:
        if token.kind == "close":
            return False
        if token.kind in ("equals", "chinese") or (token.kind == "word" and len(token.text) > 1):
            return True
    return False


def _stops(found: Sequence[Token], i: int) -> bool:
    """Whether a stop ends a clause: not a point or colon between digits."""
    if found[i].text == "\n":
        return True
    tight = not _spaced(found, i + 1) and not found[i].spaced
    return not (tight and found[i].text in ".,:" and _is(found, i + 1, "digits") and _is(found, i - 1, "digits"))


def _sides(found: Sequence[Token], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    places = [i for i in range(start, stop) if found[i].kind == "equals"]
    return tuple(zip([start, *(i + 1 for i in places)], [*places, stop], strict=True))


def _of_clause(found: Sequence[Token], numbers: Sequence[Number], clause: _Clause) -> Number | None:
    """The number of a clause: of an equation the first side if it is a number alone, else the last one."""
    sides = [side for side in clause.sides if side[0] < side[1]]
    if len(sides) > 1:
        if any(len(_word(found, stop - 1)) == 1 for _, stop in sides[1:-1]):  # x = 3 or y = 5
            return None
        return _lone(found, numbers, sides[0]) or _lone(found, numbers, sides[-1])
    own = _within(numbers, *sides[0]) if sides else []
    free = [n for n in own if not _GOVERNED.search(_before(found, numbers, n, sides[0][0]))]
    for number in free or own:
        return None if _is_part(found, numbers, number, sides[0][0]) else number
    return None


def _lone(found: Sequence[Token], numbers: Sequence[Number], side: tuple[int, int]) -> Number | None:
    """The number of a side that has just one, and computes nothing."""
    own = _within(numbers, *side)
    if len(own) == 1 and not _is_part(found, numbers, own[0], side[0]):
        return own[0]
    return None


def _before(found: Sequence[Token], numbers: Sequence[Number], number: Number, start: int) -> str:
    return _written(found, numbers, start, number.first)


def _written(found: Sequence[Token], numbers: Sequence[Number], start: int, stop: int) -> str:
    """Tokens in lower case with single spaces, numbers as #."""
    ends = {number.first: number.last for number in numbers}
    parts, at = [], start
    while at < stop:
        parts.append("#" if at in ends else found[at].text.lower())
        at = ends.get(at, at) + 1
    return " ".join(parts)


def _is_part(found: Sequence[Token], numbers: Sequence[Number], number: Number, start: int) -> bool:
    """Whether a number is part of something else: by the token at its side, or by words around it."""
    before, after = number.first - 1, number.last + 1
    while _is(found, before, "open") and _is(found, after, "close"):  # (12), {12}, but (1,100) is a pair
        if "," in found[number.last].text and found[before].text != "{":
            return True
        before, after = before - 1, after + 1
    if _is(found, before, "operator") or _is(found, before, "relation") or _is(found, before, "command"):
        return True
    if _is(found, before, "minus") and (_is(found, before - 1, "digits") or not _spaced(found, before + 1)):
        return True
    tight = not _spaced(found, number.first)
    if _is(found, before, "word") and tight and found[before].text.lower() not in _CURRENCIES:
        return True
    if _is(found, before, "digits") or (_is(found, before, "stop") and tight and found[before].text in ".:" and before):
        return True
    if (_is(found, before, "stop") and _is(found, after, "close")) or (
        _is(found, before, "open") and _is(found, after, "stop")
    ):
        return True
    if _is(found, after, "operator") or _is(found, after, "relation") or _is(found, after, "command"):
        a_rate = found[after].text == "/" and _is(found, after + 1, "word")
        return not a_rate
    following = after
    while _is(found, following, "minus"):
        following += 1
    if following > after and any(_is(found, following, kind) for kind in ("digits", "open", "command")):
        return True
    if (_is(found, before, "arrow") and _within(numbers, start, before)) or _is(found, after, "arrow"):
        return True
    if _is(found, after, "raised"):
        return True
    if _is(found, after, "digits") and not (
        _is(found, after + 1, "minus") and not _spaced(found, after + 1)
    ):  # 18 12-ounce cans
        return True
    if (
        _is(found, after, "stop")
        and not found[after].spaced
        and _is(found, after + 1, "digits")
        and not _spaced(found, after + 1)
    ):
        return True
    if _is(found, after, "stop") and found[after].text == "…" and _is(found, after + 2, "digits"):
        return True
    if _is(found, after, "open") and _is(found, after + 1, "digits") and _is(found, after + 2, "close"):
        return True
    if _is(found, after, "word") and not found[after].spaced:
        unit = found[after].text
        if (len(unit) == 1 and unit not in _UNITS) or unit.lower() in ("pi", "sqrt"):
            return True
    if _CHANGED_BEFORE.search(_before(found, numbers, number, start)):
        return True
    rest = _written(found, numbers, after, min(len(found), after + 7))
    changed = _CHANGED_AFTER.match(rest)
    return bool(changed) and not _repeats(found, numbers, number, changed.group())


def _repeats(found: Sequence[Token], numbers: Sequence[Number], number: Number, words: str) -> bool:
    """`0.5 or 1/2`: the alternative is the same number."""
    following = next((other for other in numbers if other.first > number.last), None)
    return words == "or #" and following is not None and same_number(following, number)


def _goes_on(
    found: Sequence[Token], numbers: Sequence[Number], clause: _Clause, number: Number, rest: Sequence[_Clause]
) -> bool:
    """Whether what follows makes the number one of several: a list, an alternative, or another name's value."""
    if not rest:
        return False
    following = rest[0]
    start, stop = following.sides[0][0], following.sides[-1][1]
    others = [n for n in _within(numbers, start, stop) if not same_number(n, number)]
    if following.opener in (",", ";", "、", "，", "；") and others:
        written = _before(found, numbers, others[0], start)
        counts = _word(found, others[0].last + 1) == "of"  # 12 eggs, 3 of which are bad
        if written in ("", "and", "or") and len(following.sides) == 1 and not counts:
            return True
    named = len(clause.sides) > 1 and not _within(numbers, *clause.sides[0])
    if named and following.opener in (",", ";", "，", "；"):
        name = _written(found, numbers, *following.sides[0]).removeprefix("and ").removeprefix("or ")
        value = _of_clause(found, numbers, following)
        return (
            len(following.sides) > 1 and len(name.split()) == 1 and value is not None and not same_number(value, number)
        )
    return False


_CHINESE_LEADS = re.compile(r"(?:答案?|是|为|共|约|负|等于|有|得)$")
_LEADS = frozenset(
    [
        "about",
        "approximately",
        "exactly",
        "only",
        "roughly",
        "around",
        "just",
        "total",
        "a",
        "of",
        "is",
        "the",
        "equals",
        "negative",
        "minus",
        "x",
        "y",
        "n",
    ]
)


def is_bare_number(text: str) -> bool:
    """Whether a plain text is nothing but a number, with its name and `=` before it and its unit after it at most."""
    found = tokens(text)
    first = next((i for i, token in enumerate(found) if token.kind in ("digits", "vulgar")), None)
    if first is None:
        return False
    named = next((i for i, token in enumerate(found[:first]) if token.kind == "equals"), -1)
    words = [t for t in found[named + 1 : first] if t.kind in ("word", "chinese")]
    if any(word.text.lower() not in _LEADS and not _CHINESE_LEADS.search(word.text) for word in words) or named > 4:
        return False
    if any(token.kind == "equals" for token in found[first:]) or sum(t.kind == "word" for t in found) > 7:
        return False
    return read_number(text) is not None


def numbers_in(text: str) -> list[str]:
    """All numbers of a plain text, as they are written."""
    found = tokens(text)
    return [text[found[number.first].start : found[number.last].end] for number in _numbers(found)]


def number_of(text: str) -> Number | None:
    """The number that a text is; None if it is none, or says more."""
    if len(text) > 2 * MAX_DIGITS:
        return None
    flat = " ".join(plain(clean(text)).split()).strip("$ ").rstrip(" .。$")
    if not is_bare_number(flat) or re.search(r"\d\s*!", flat):
        return None
    found = read_number(flat)
    return found[1] if found else None


def numbers_equal(answer: str, gold: str) -> bool:
    """Whether both texts are numbers, and the same."""
    numbers = number_of(answer), number_of(gold)
    return bool(numbers[0] and numbers[1] and same_number(numbers[0], numbers[1]))


def equals_number(value: Fraction, gold: str) -> bool:
    """Whether a computed value is the number of a text."""
    number = number_of(gold)
    return number is not None and same_number(Number((value,), None, 0, 0), number)


def readings(text: str) -> tuple[Fraction, ...]:
    """Values that a text can mean as one number; empty if it is not one."""
    found = number_of(text)
    return found.values if found else ()
