r"""The one number that a piece of prose gives.

Prose is cut into *clauses*: at stops, at remarks in brackets, at dashes, and at words that explain. A clause with `=`, or with a
verb between two numbers (`3 shirts cost 12`), has *sides*: its first side counts if it is nothing but a number, else its last one.
Of a clause without sides the first number counts that nothing governs (of `18 clips in 2 days` the 18). A number is none of its own
if it is part of something else: of an expression, a comparison, a list, a time, or of words such as `half of 18` and `18 more than`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from lmeval_prune.scoring.numbers import (
    MAX_DIGITS,
    Number,
    Token,
    has_kind,
    is_pair,
    is_spaced,
    number_at,
    rounds_to,
    same_number,
    tokens,
    word_at,
)
from lmeval_prune.scoring.plain import clean, plain

# A number is part of something else if one of these stands before it (its clause up to it, numbers written #), …
_CHANGED_BEFORE = re.compile(
    r"(?:^|\W)(?:"
    r"(?:not|never|neither|nor|cannot|\w+n['’]t)(?![^#]{0,40}\b(?:so|thus|hence|therefore|that|because)\b)(?! (?:only|counting|including|count|include|(?:less|more|fewer|greater|larger|smaller) than)\b)(?: (?!(?:is|are|was|were|equals)\b)[a-z]+){0,4}|anything but|either|too [a-z]+ (?:to be|for)"
    r"|(?<!no )(?<!not )(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower|longer|shorter|older|younger|rather) than"
    r"|(?<!add )(?<!adds )(?<!added )(?<!adding )(?<!sum )(?<!sums )(?<!total )(?<!totals )(?<!come )(?<!comes )up to"
    r"|between|twice|thrice|double|triple|quadruple|half|sqrt|log|ln|exp|sin|cos|tan|gcd|lcm|max|min|mod|modulo"
    r"|plus|minus|times|over|under|above|below|beyond|past|except|without|versus|vs|instead of|out of|every"
    r"|(?:roots?|powers?|square|cube|factorial|multiples?|divisors?|factors?|reciprocal|inverse|logarithm|half|halves|thirds?"
    r"|quarters?|fourths?|fifths?|sixths?|eighths?|tenths?|none|any|some|part|remainder|product|negative|opposite) of(?: the)?"
    r"|(?:multiplied|divided|raised) (?:by|to)(?: the)?"
    r"|step|question|problem|part|example|exercise|case|equation|eq|chapter|page|section|figure|table|method|solution|option|stage"
    r"|(?<!from )# to|# (?:by|of|times|plus|minus|or|and)"
    r"|# (?:hours?|hrs?|h|minutes?|mins?|feet|foot|ft|pounds?|lbs?|dollars?|weeks?|days?)(?: and)?"
    r")$"
    r"|(?:不是|不等于|不可能是|并非|大于|小于|多于|少于|超过|不到|不足|比|(?<![得达分找拿收买做看付要])到|至|根号|第|步骤|除以|乘以|加上|减去"
    r"|的[一二三四五六七八九十]倍|# 的)$"
)
# … or one of these after it.
_CHANGED_AFTER = re.compile(
    r"(?:or|to(?! # (?:significant|decimal))|of|by|and|times|plus|minus|vs|versus|over(?! # [a-z])|divided by|multiplied by|out of|x|r|remainder|choose) #"
    r"|(?:[a-z]+ )?and #"
    r"|(?!(?:in|on|at|for|per|by|each|every|after|from|within|with|of|to|a|until|over|during|before|among|across)\b)"
    r"[a-z]+ # [a-z]+(?: *$| ?[.,;])"
    r"|(?:or|and) (?:(?:an? |one )?(?:half|third|quarter)|more|less|fewer)\b"
    r"|(?:[a-z]+ )?(?:more|less|fewer|greater|larger|smaller|higher|lower|older|younger) than #"
    r"|(?:squared|cubed|factorial|mod|modulo|pi|sqrt|with (?:a )?remainder|remainder|minus|plus|negative|times table)\b"
    r"|(?:st|nd|rd|th) (?:of|one)\b|to the (?:power|\w+th|second|third)\b|half$|less$|[xyznk]\b(?! [a-z])|π"
    r"|[\u4e00-\u9fff]{0,3}?(?:的?(?:一半|平方(?!分?千?厘?毫?米|公里)|立方(?!分?千?厘?毫?米)|[一二三四五六七八九十]分之|几分之|开方|阶乘"
    r"|[一二三四五六七八九十两]倍)|分之|以上|以下|次方)|[\u4e00-\u9fff]?半|打(?![\u4e00-\u9fff])"
    r"|(?:小时|时|分钟?|秒|元|角|米|厘米|分米|千米|公里|吨|千克|公斤|斤|克|岁|天|年|个?月|周)零? ?#|(?:或|到|至|和|加|减|乘|除|比)|(?:[\u4e00-\u9fff]{0,2}吗|是错)"
)
# What governs a number: it is said of something else, where there is another one.
_GOVERNED = re.compile(
    r"(?:^|\W)(?:in|on|at|for|from|after|by|every|within|per|until|during|before|since|with|among|into|(?<!total )of|the|these|those|all|both|than"
    r"|his|her|their|its|each|another|first|last|next|other|remaining|original|days?|weeks?|months?|years?|hours?|step|level|room|compared to)$"
    r"|^(?:(?:so|then|thus|now|and|first|next|finally) )*(?!total)[a-z]+ing(?: (?:the|these|those|all))?$"
    r"|(?:^|\W)(?:of|for|with|from|between|by) #(?: [a-z]+){1,2} and$"
    r"|(?:^|\W)(?:after|before|by|without|from) [a-z]+ing(?: [a-z]+)?(?: \$)?$"
)
_VERBS = frozenset(
    ["is", "are", "was", "were", "be", "equals", "equal", "makes", "make", "gives", "give", "leaves", "leave", "yields", "costs", "cost",
     "has", "have", "had", "holds", "hold", "weighs", "weigh", "contains", "contain", "takes", "take", "needs", "need", "totals", "come",
     "comes", "becomes", "get", "gets", "left", "totaling", "totalling"]
)  # fmt: skip
_TO_THE_NUMBER = re.compile(
    r"(?:(?:about|approximately|exactly|only|just|a|the|total|of|also|then|now|thus|therefore|equal|to|us|him|her|them|out|\$) ?)*#"
)
# Words at which an answer ends and its explanation begins, or, at the beginning of a clause, a condition stands.
_EXPLAINS = frozenset(
    ["because", "since", "as", "when", "if", "where", "which", "so", "given", "while", "but", "though", "although", "whereas",
     "assuming", "provided", "hence", "thus", "therefore", "namely", "check", "note", "see", "not"]
)  # fmt: skip
_CONDITIONS = frozenset(
    ["for", "when", "if", "with", "at", "given", "let", "where", "suppose", "assume", "using", "from", "since", "because", "as", "after",
     "before", "out", "every", "in", "setting"]
)  # fmt: skip
_REASONS = frozenset(
    ["(", "because", "since", "as", "given", "if", "when", "where", "while", "though", "although", "assuming", "provided", "check", "see",
     "not", "whereas", "enough"]
)  # fmt: skip
_SO = frozenset(["so", "thus", "hence", "therefore"])
_SHARED = re.compile(
    r"(?:^|\W)(?:takes?|took|costs?|gives?|gave) # (?!(?:hours?|days?|weeks?|minutes?|feet|foot|dollars?|years?)\b)[a-z]+$"
)
_SUPPOSED = re.compile(r"(?i:when|if|where|let|suppose|assume|given|had)\b|若|如果|假设|假如|设")
_IF = re.compile(r"如果|若|假如|当")
_COMPARES = re.compile(
    r"(?:and )?(?:(?:that|which|it) (?:is|was) )?# (?:[a-z]+ )?(?:more|less|fewer|greater|larger|smaller|higher|lower|older|younger) than\b"
)
_CURRENCIES = frozenset(["usd", "eur", "gbp", "rmb", "cny", "inr", "us", "rs", "rm", "hk", "aud", "cad", "nt", "sgd"])
_UNITS = frozenset("mgslhcLJNWVKCFT")  # letters at the digits that are a unit
_ABOUT = frozenset(
    ["about", "approximately", "exactly", "only", "roughly", "around", "just", "total", "a", "of", "is", "the", "equals", "negative",
     "minus", "x", "y", "n", "to", "equal"]
)  # fmt: skip
_CHINESE_ABOUT = re.compile(r"(?:答案?|是|为|共|约|负|等于|有|得)$")


@dataclass(frozen=True)
class _Clause:
    """A part of a sentence: its sides, each a range of tokens, and the stop before it."""

    sides: tuple[tuple[int, int], ...]
    opener: str
    equates: bool  # by a sign, not by a verb


class _Prose:
    """The tokens, numbers and clauses of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found = tokens(text)
        self.numbers = _numbers(self.found)
        self.ends = {number.first: number.last for number in self.numbers}

    def within(self, start: int, stop: int) -> list[Number]:
        return [number for number in self.numbers if start <= number.first and number.last < stop]

    def written(self, start: int, stop: int) -> str:
        """Tokens in lower case with single spaces, numbers as #."""
        parts, at = [], start
        while at < stop:
            parts.append("#" if at in self.ends else self.found[at].text.lower())
            at = self.ends.get(at, at) + 1
        return " ".join(parts)

    # ------------------------------------------------------------------ clauses

    def clauses(self) -> list[_Clause]:
        """Cut at stops, at remarks in brackets, at dashes, and at words that explain, once there was a number."""
        found = self.found
        inside = {i for first, last in self.ends.items() for i in range(first, last + 1)}
        cuts: list[tuple[int, int, str]] = []  # first token, end, stop before
        start, opener, depth, seen = 0, "", 0, False
        for i, token in enumerate(found):
            ends = False
            if i in inside:
                seen = True
                continue
            if token.kind == "open":
                remark = depth == 0 and seen and (token.spaced or self._says(i)) and not has_kind(found, i + 2, "close")
                depth += 1
                ends = remark
            elif token.kind == "close":
                depth = max(0, depth - 1)
                ends = depth == 0 and opener == "("
            elif depth == 0 or opener == "(":
                if token.kind == "stop":
                    ends = self._stops(i)
                elif token.kind == "minus":
                    ends = seen and token.spaced and is_spaced(found, i + 1) and not self._subtracts(i, inside)
                elif token.kind == "word" and seen:
                    ends = token.text.lower() in _EXPLAINS or (token.text == "i" and has_kind(found, i + 1, "stop"))
                    is_case = len(word_at(found, i + 1)) == 1 and has_kind(found, i + 2, "equals")  # 91 for n = 4
                    ends = ends or (is_case and token.text.lower() in ("for", "at", "with"))
                elif token.kind == "chinese" and seen:
                    ends = token.text.startswith(("因为", "所以", "即"))
            if ends:
                cuts.append((start, i, opener))
                inside_remark = depth > 0 and opener == "(" and token.kind != "open"
                opener = token.text.lower() if (i > start or opener == "") and not inside_remark else opener
                start, seen = i + 1, False
        cuts.append((start, len(found), opener))
        return [self._clause(a, b, before) for a, b, before in cuts if self.within(a, b)]

    def _subtracts(self, i: int, inside: set[int]) -> bool:
        """Whether a dash with space at both sides is a minus: between numbers, or after a letter."""
        if i + 1 in inside:  # 60 miles - 35 miles = 25
            rest = [token.kind for token in self.found[i + 1 : i + 30] if token.kind in ("equals", "stop")]
            if rest[:1] == ["equals"]:
                return True
        return (i + 1 in inside and i - 1 in inside) or len(word_at(self.found, i - 1)) == 1

    def _says(self, opened: int) -> bool:
        """Whether a bracket holds words or an equation, and is no factor."""
        for token in self.found[opened + 1 : opened + 40]:
            if token.kind == "close":
                return False
            if token.kind in ("equals", "chinese") or (token.kind == "word" and len(token.text) > 1):
                return True
        return False

    def _stops(self, i: int) -> bool:
        """Whether a stop ends a clause: not a point or colon between digits."""
        token = self.found[i]
        if token.text == "\n":
            return True
        tight = not is_spaced(self.found, i + 1) and not token.spaced
        between = has_kind(self.found, i + 1, "digits") and has_kind(self.found, i - 1, "digits")
        return not (tight and token.text in ".,:" and between)

    def _clause(self, start: int, stop: int, opener: str) -> _Clause:
        found = self.found
        places = [i for i in range(start, stop) if found[i].kind in ("equals", "arrow")]
        equates = any(found[i].kind == "equals" for i in places)
        final = places[-1] + 1 if places else start
        verb = next(
            (
                i
                for i in range(final, stop)
                if word_at(found, i) in _VERBS and (word_at(found, i - 1) != "to" or word_at(found, i) == "get")
            ),
            None,
        )
        leading = next((number for number in self.numbers if number.first == final), None)
        starts = leading is not None and (
            # not of a case, `for x = 3 the value is 12`; but of `18 and the change is 7`
            (bool(places) and word_at(found, start).lower() not in _CONDITIONS)
            or (word_at(found, leading.last + 1) == "and" and leading.last + 2 not in self.ends)
        )
        if (
            verb is not None
            and not starts
            and self.within(final, verb)
            and _TO_THE_NUMBER.match(self.written(verb + 1, stop))
        ):
            places, equates = [*places, verb], False
        sides = zip([start, *(i + 1 for i in places)], [*places, stop], strict=True)
        return _Clause(tuple((a, b) for a, b in sides if a < b), opener, equates)

    # ------------------------------------------------------------------ numbers

    def of_clause(self, clause: _Clause) -> Number | None:
        """Its number: by its sides, or the first that nothing governs."""
        sides = clause.sides
        if not sides:
            return None
        if len(sides) > 1:
            if any(word_at(self.found, stop - 2) in ("or", "and") for _, stop in sides[1:-1]):  # x = 3 or y = 5
                return None
            is_named = any(stop - start == 1 and len(word_at(self.found, start)) == 1 for start, stop in sides)
            if self._is_unsolved(sides[-2]) and not is_named:
                return None
            if (
                has_kind(self.found, sides[0][1], "arrow") and self.lone(sides[0]) and self._is_bare(*sides[0])
            ):  # 3 → 12
                return None
            first, final = self.lone(sides[0]) if clause.equates else None, self.lone(sides[-1], final=True)
            if first and self._is_bare(*sides[0]) and not (final and same_number(first, final)):
                return None if self._is_unsolved(sides[-1]) else first
            return final or first
        own = self.within(*sides[0])
        free = [n for n in own if not _GOVERNED.search(self.written(sides[0][0], n.first))]
        if len(free) > 1 and free[0].first == sides[0][0] and self._counts_others(free[0], sides[0][0]):
            free = free[1:]
        if len(free) > 1 and any(token.kind == "chinese" for token in self.found[sides[0][0] : sides[0][1]]):
            free = self._of_chinese(free, *sides[0])
        elif len(free) > 1 and _SHARED.search(self.written(sides[0][0], free[1].first)):
            free = free[1:]
        for number in free or own:
            return None if self.is_part(number, *sides[0]) else number
        return None

    def _of_chinese(self, free: list[Number], start: int, stop: int) -> list[Number]:
        """Of several numbers of a Chinese clause the last one, before 才 if there is one; all of 5小时30分."""
        counted = [n for n in free if not self.written(start, n.first).endswith("第")] or free
        if any(self.is_part(number, start, stop) for number in counted[:-1]):
            return counted
        before = [n for n in counted if "才" in self.written(n.last + 1, stop)]
        return (before or counted)[-1:]

    def has_free(self, clause: _Clause) -> bool:
        """Whether a number of the clause's last side is governed by nothing."""
        start, stop = clause.sides[-1]
        return any(not _GOVERNED.search(self.written(start, n.first)) for n in self.within(start, stop))

    def _is_unsolved(self, side: tuple[int, int]) -> bool:
        """Whether a side computes with a name: 2x, x^2, |x|, x + 15."""
        for i in range(*side):
            if (
                len(word_at(self.found, i)) == 1
                and self.found[i].text not in "aAI"
                and self.found[i].text not in _UNITS
            ):
                sides = [self.found[k].kind if side[0] <= k < side[1] else "" for k in (i - 2, i - 1, i + 1, i + 2)]
                times = (
                    sides[1] == "digits" and sides[2] in ("digits", "minus", "money") and word_at(self.found, i) == "x"
                )
                signs = {"operator", "raised", "minus"}
                computes = (sides[1] in signs and sides[0] == "digits") or (
                    sides[2] in signs and sides[3] in ("digits", "")
                )
                if not times and (
                    (sides[1] == "digits" and not self.found[i].spaced) or computes or sides[2] == "raised"
                ):
                    return not has_kind(self.found, i + 1, "operator") or self.found[i + 1].text != "_"
        return False

    def _counts_others(self, number: Number, start: int) -> bool:
        """`1 of them costs 12`, 3个箱子装12个."""
        after = number.last + 1
        counted = has_kind(self.found, after, "chinese") and not self.found[after].text.startswith("的")
        return (word_at(self.found, after) == "of" or counted) and not self.is_part(number, start, len(self.found))

    def lone(self, side: tuple[int, int], final: bool = False) -> Number | None:
        """The number of a side that has just one which nothing governs, and computes nothing; of a final side its first."""
        own = self.within(*side)
        free = [n for n in own if not _GOVERNED.search(self.written(side[0], n.first))] or own
        if free and (len(free) == 1 or (final and free[0].first == side[0])) and not self.is_part(free[0], *side):
            return free[0]
        return None

    def _is_bare(self, start: int, stop: int) -> bool:
        """Whether no words but those that may stand before a number do."""
        first = self.within(start, stop)[0].first
        words = [token for token in self.found[start:first] if token.kind in ("word", "chinese")]
        return all(word.text.lower() in _ABOUT or _CHINESE_ABOUT.search(word.text) for word in words)

    def is_part(self, number: Number, start: int, stop: int) -> bool:
        """Whether a number is part of something else: by the token at its side, or by words around it."""
        found, before, after = self.found, number.first - 1, number.last + 1
        while has_kind(found, before, "open") and has_kind(found, after, "close"):  # (12), {12}, but (1,100) is a pair
            if is_pair(found[number.last].text, found[before].text):
                return True
            before, after = before - 1, after + 1
        return (
            self._joined_before(before, number, start)
            or self._joined_after(after)
            or bool(_CHANGED_BEFORE.search(self.written(start, number.first)))
            or self._changed_after(number, after, stop)
        )

    def _joined_before(self, before: int, number: Number, start: int) -> bool:
        found = self.found
        tight = not is_spaced(found, number.first)
        if before < 0:
            return False
        match found[before].kind:
            case "operator" | "relation" | "command" | "digits":
                return True
            case "minus":
                return (
                    has_kind(found, before - 1, "digits")
                    or not is_spaced(found, before + 1)
                    or len(word_at(found, before - 1)) == 1
                )
            case "word":
                return tight and found[before].text.lower() not in _CURRENCIES
            case "stop":
                return tight and found[before].text in ".:" and has_kind(found, before - 1, "digits")
            case "arrow":
                return False
            case "open":
                return has_kind(found, number.last + 1, "stop") and not has_kind(found, number.last + 2, "word")
        return False

    def _joined_after(self, after: int) -> bool:
        found = self.found
        if after >= len(found):
            return False
        token, tight = found[after], not found[after].spaced
        following_digits = has_kind(found, after + 1, "digits")
        match token.kind:
            case "operator" | "relation" | "command":
                return not (token.text == "/" and has_kind(found, after + 1, "word"))  # a rate
            case "minus":
                following = after
                while has_kind(found, following, "minus"):
                    following += 1
                variable = len(word_at(found, following)) == 1 and found[following].text not in "aAI"
                return variable or any(has_kind(found, following, kind) for kind in ("digits", "open", "command"))
            case "raised" | "vulgar":
                return True
            case "digits":  # 18 12-ounce cans
                return not (has_kind(found, after + 1, "minus") and not is_spaced(found, after + 1))
            case "stop":
                if token.text == "…":
                    return following_digits or has_kind(found, after + 2, "digits")
                return tight and following_digits and not is_spaced(found, after + 1)
            case "open":
                return following_digits and has_kind(found, after + 2, "close")
            case "close":
                return has_kind(found, after - 2, "stop") and found[after - 2].text in ",;"
            case "word" if tight:
                return (len(token.text) == 1 and token.text not in _UNITS) or token.text.lower() in ("pi", "sqrt")
            case "other":
                return tight and token.text in "π∞'′″"
        return False

    def _changed_after(self, number: Number, after: int, stop: int) -> bool:
        rest = self.written(after, min(stop, after + 7))
        changed = _CHANGED_AFTER.match(rest)
        if not changed or changed.group() != "or #":
            return bool(changed)
        following = next((other for other in self.numbers if other.first > number.last), None)  # 0.5 or 1/2
        return not (following and same_number(following, number))

    def is_listed(self, clause: _Clause) -> bool:
        """Whether a clause is a number alone."""
        return self.written(clause.sides[0][0], clause.sides[-1][1]) == "#"

    def is_sentence(self, clause: _Clause) -> bool:
        """Whether a verb stands before its number."""
        start, stop = clause.sides[0]
        first = self.within(start, stop)[0].first
        return any(word_at(self.found, i) in _VERBS for i in range(start, first))

    def _repeats(self, clause: _Clause, number: Number) -> bool:
        own = self.within(clause.sides[0][0], clause.sides[-1][1])
        return all(same_number(other, number) for other in own) and clause.opener in (",", "、")

    def goes_on(self, clause: _Clause, number: Number, rest: Sequence[_Clause]) -> bool:
        """Whether what follows makes the number one of several: a list, an alternative, or another name's value."""
        if not rest or rest[0].opener not in (",", ";", "、", "，", "；"):
            return False
        following = next((c for c in rest if not self._repeats(c, number)), rest[-1])
        start, stop = following.sides[0][0], following.sides[-1][1]
        others = [n for n in self.within(start, stop) if not same_number(n, number)]
        if others and len(following.sides) == 1 and not self.is_part(others[0], start, stop):
            counts = word_at(self.found, others[0].last + 1) == "of"  # 12 eggs, 3 of which are bad
            if self.written(start, others[0].first) in ("", "and", "or") and not counts:
                return True
        if len(clause.sides) > 1 and clause.equates and not self.within(*clause.sides[0]):
            name = self.written(*following.sides[0]).removeprefix("and ").removeprefix("or ")
            value = self.of_clause(following)
            several = len(following.sides) > 1 and len(name.split()) == 1
            return several and value is not None and not same_number(value, number)
        return False


def _numbers(found: Sequence[Token]) -> list[Number]:
    """The numbers of a text, from left to right."""
    numbers: list[Number] = []
    at = 0
    while at < len(found):
        number = number_at(found, at) if not has_kind(found, at, "minus") or _is_sign(found, at) else None
        if number is None and has_kind(found, at, "minus") and (at == 0 or has_kind(found, at - 1, "equals")):
            positive = number_at(found, at + 1)  # = - 12
            number = positive and Number(tuple(-v for v in positive.values), positive.decimals, at, positive.last)
        if number is not None and has_kind(found, at - 1, "chinese") and found[at - 1].text.endswith("负"):
            number = Number(tuple(-value for value in number.values), number.decimals, at, number.last)
        if number is not None:
            numbers.append(number)
            at = number.last
        at += 1
    return numbers


def _is_sign(found: Sequence[Token], at: int) -> bool:
    """Whether a minus can be a sign: nothing that could be subtracted from stands before it."""
    if at == 0 or found[at - 1].kind in ("equals", "open", "operator", "relation", "stop", "chinese", "money", "arrow"):
        return True
    return found[at].spaced and found[at - 1].kind in ("word", "other", "close")


_DEPENDS = re.compile(r"\bif\b[^.\n]*\b(?:and|or|but)\b[^.\n]*\d[^.\n]*\bif\b")  # 12 if he won and 13 if not
_RESULTS = re.compile(
    r"(?:(?:which|that|so|or|thus|hence|therefore|it|this|giving|i|e|\.|is|equals|makes|gives|means) )+#"
)


def read_number(text: str, last: bool = False) -> tuple[str, Number] | None:
    """The one number that a phrase gives, as it is written; None if it gives none, or one that is part of something else.

    Of `x = 20 - 7 = 13 apples` the 13, of `12 (check: 12 + 8 = 20)` the 12, of `she sold 18 clips in 2 days` the 18. None of
    `12 or 13`, `3, 4`, `5:45`, `half of 18`, `not 18`, `18 more than 5`, `x = 3, y = 5`.

    Args:
        text: plain (see `plain`), and short.
        last: of several clauses the last one counts, as at the end of a solution.
    """
    prose = _Prose(text)
    clauses = prose.clauses()
    if _DEPENDS.search(text):
        return None
    if last or len(clauses) > 1:
        starts = [prose.found[clause.sides[0][0]] for clause in clauses]
        skipped = [
            bool(_SUPPOSED.match(s.text)) if last else s.text.lower() in _CONDITIONS or bool(_IF.match(s.text))
            for s in starts
        ]
        texts = [prose.written(clause.sides[0][0], clause.sides[-1][1]) for clause in clauses]
        calculates = [len(clause.sides) > 2 or " then " in said for clause, said in zip(clauses, texts, strict=True)]
        skipped = [skip and not result for skip, result in zip(skipped, calculates, strict=True)]
        kept = [clause for clause, skip in zip(clauses, skipped, strict=True) if not skip]
        clauses = kept if last else kept or clauses
    if last:
        given = [c for c in clauses if {c.opener, word_at(prose.found, c.sides[0][0])}.isdisjoint(_REASONS)]
        given = [c for c in given if c.opener not in ("for", "at", "with")]
        said = [c for c in given if not _COMPARES.match(prose.written(c.sides[0][0], c.sides[-1][1]))]
        given = said or given
        clauses = [c for c in given if prose.has_free(c)] or given or clauses
        adjacent = (
            len(clauses) > 1 and clauses[-2].sides[-1][1] + 1 == clauses[-1].sides[0][0] and clauses[-1].opener == ","
        )
        if adjacent and all(prose.is_listed(clause) for clause in clauses[-2:]):  # 15, 12
            return None
    elif len(clauses) > 1:
        clauses = clauses if prose.has_free(clauses[0]) else [c for c in clauses if prose.has_free(c)] or clauses
        later = [c for c in clauses[1:] if {c.opener, word_at(prose.found, c.sides[0][0])} & _SO]
        if later and not prose.is_listed(clauses[0]) and len(clauses[0].sides) == 1 and prose.is_sentence(clauses[0]):
            clauses = later
    for place, clause in reversed(list(enumerate(clauses))) if last else enumerate(clauses):
        number = prose.of_clause(clause)
        if number is None:
            if last:
                continue
            following = clauses[place + 1] if place + 1 < len(clauses) else None
            results = following and _RESULTS.match(prose.written(following.sides[0][0], following.sides[-1][1]))
            computes = len(prose.within(clause.sides[0][0], clause.sides[-1][1])) > 1
            if not results or not computes:
                return None
            continue
        if not last and prose.goes_on(clause, number, clauses[place + 1 :]):
            return None
        written = text[prose.found[number.first].start : prose.found[number.last].end]
        negated = has_kind(prose.found, number.first - 1, "chinese") and prose.found[number.first - 1].text.endswith(
            "负"
        )
        if written.endswith(("k", "K", "M", "B")):
            return written, number
        return f"-{written}" if negated else re.sub(
            r"(?:US|AU|CA|NZ|HK|NT|[ACRS])?\$|[€£¥₹]|Rs\.?|(?<=-)\s+|^\((.*)\)$", r"\1", written
        ).strip(), number
    return None


def is_bare_number(text: str) -> bool:
    """Whether a plain text is nothing but a number, with its name and `=` before it and its unit after it at most."""
    prose = _Prose(text)
    if len(prose.numbers) != 1:
        return False
    number = prose.numbers[0]
    before, after = prose.found[: number.first], prose.found[number.last + 1 :]
    named = next((i + 1 for i, token in enumerate(before) if token.kind == "equals"), 0)
    words = [token for token in before[named:] if token.kind in ("word", "chinese")]
    if named > 5 or any(t.text.lower() not in _ABOUT and not _CHINESE_ABOUT.search(t.text) for t in words):
        return False
    if any(token.kind not in ("word", "chinese", "open", "minus", "stop", "money") for token in before[named:]):
        return False
    if any(token.kind in ("equals", "arrow", "command", "relation") for token in after):
        return False
    brackets = [token.kind for token in prose.found]
    if brackets.count("open") != brackets.count("close") or text.lstrip().startswith("--"):
        return False
    units = [token.text for token in after if token.kind == "word"]
    if any(len(unit) == 1 and unit not in _UNITS and unit != "a" for unit in units):
        return False
    return len(units) <= 6 and read_number(text) is not None


def numbers_in(text: str) -> list[str]:
    """All numbers of a plain text, as they are written."""
    prose = _Prose(text)
    return [text[prose.found[number.first].start : prose.found[number.last].end] for number in prose.numbers]


@lru_cache(maxsize=1 << 16)
def number_of(text: str) -> Number | None:
    """The number that a text is; None if it is none, or says more."""
    if len(text) > 2 * MAX_DIGITS:
        return None
    if _DIGITS.fullmatch(text):
        return Number((Fraction(text),), len(text.partition(".")[2]), 0, 0)
    flat = " ".join(plain(clean(text)).split()).strip().rstrip(" .。$")
    if not is_bare_number(flat) or _NOT_THE_NUMBER.search(flat):
        return None
    found = read_number(flat)
    return found[1] if found else None


_DIGITS = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?", re.ASCII)  # no need to read those
_NOT_THE_NUMBER = re.compile(r"\d\s*!|radians?\b|\d\s*(?:['′″…](?!\d))")


def numbers_equal(answer: str, gold: str) -> bool:
    """Whether both texts are numbers, and the same."""
    numbers = number_of(answer), number_of(gold)
    return bool(numbers[0] and numbers[1] and same_number(numbers[0], numbers[1]))


def equals_number(value: Fraction, gold: str) -> bool:
    """Whether a computed value is the number of a text."""
    number = number_of(gold)
    return number is not None and (same_number(Number((value,), None, 0, 0), number) or rounds_to(value, number))


def readings(text: str) -> tuple[Fraction, ...]:
    """Values that a text can mean as one number; empty if it is not one."""
    found = number_of(text)
    return found.values if found else ()
