r"""Prose cut into clauses, and whether a number in them is the number of something else.

A clause ends at stops, at remarks in brackets, at dashes, and at words that explain. One with `=`, or with a verb between two
numbers (`3 shirts cost 12`), has *sides*. A number is none of its own if it is part of something else: of an expression, a
comparison, a list, a time, or of words such as `half of 18` and `18 more than`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import same_number
from lmeval_prune.scoring.tokens import Tokens
from lmeval_prune.scoring.vocabulary import phrases, words

# In these patterns a clause is lower-case words with single spaces, its numbers written #.
_CHANGED_BEFORE = re.compile(rf"(?:^|\W){phrases('changed_before')}$|{phrases('changed_before', 'zh')}$")
_CHANGED_AFTER = re.compile(f"{phrases('changed_after')}|{phrases('changed_after', 'zh')}")
_GOVERNED = re.compile(rf"(?:^|\W){phrases('governors')}$|{phrases('governing_clauses')}")
_TO_THE_NUMBER = re.compile(rf"(?:{phrases('before_the_number')} ?)*#")
_FACT = re.compile(f"{phrases('facts')}")
_VERBS, _CONDITIONS, _EXPLANATIONS = words("verbs"), words("conditions"), words("explanations")
_CHINESE_EXPLANATIONS = tuple(_EXPLANATIONS)
_CURRENCIES, UNIT_LETTERS = words("currencies"), words("unit_letters")
_SAID = words("said_with_a_number")
_CHINESE_SAID = re.compile(f"{phrases('said_with_a_number', 'zh')}$")
_NO_NAMES = UNIT_LETTERS | {"a", "A", "I"}  # letters that are no variables
_JOINED = frozenset(["pi", "sqrt", *"π∞'′″"])  # right after a number
_SUBTRACTABLE = frozenset(["number", "digits", "open", "command"])

Side = tuple[int, int]  # a range of tokens


class Clause(NamedTuple):
    """A part of a sentence.

    Attributes:
        sides: ranges of tokens.
        opener: the stop or word before it.
        equates: its sides are equated by a sign, not by a verb.
    """

    sides: tuple[Side, ...]
    opener: str
    equates: bool

    @property
    def start(self) -> int:
        """Return its first token."""
        return self.sides[0][0]

    @property
    def stop(self) -> int:
        """Return the end of its last side."""
        return self.sides[-1][1]


class Prose:
    """A text's tokens, numbers and clauses."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = Tokens(text)
        self.numbers = [i for i, token in enumerate(self.tokens) if token.number]

    def within(self, start: int, stop: int) -> list[int]:
        """Return where numbers are in a range of tokens."""
        return [i for i in self.numbers if start <= i < stop]

    def same(self, i: int, j: int) -> bool:
        """Return whether two numbers are the same."""
        number, other = self.tokens[i].number, self.tokens[j].number
        return bool(number and other and same_number(number, other))

    def written(self, start: int, stop: int) -> str:
        """Return tokens in lower case with single spaces, numbers as #."""
        return " ".join("#" if token.number else token.text.lower() for token in self.tokens[start:stop])

    # ------------------------------------------------------------------ clauses

    def clauses(self) -> list[Clause]:
        """Return the clauses that hold a number."""
        cuts: list[tuple[int, int, str]] = []  # first token, end, stop before
        start, opener, depth, seen = 0, "", 0, False  # seen: a number
        for i, token in enumerate(self.tokens):
            if token.number:
                seen = True
                continue
            ends = self._ends_a_clause(i, opener, depth, seen)
            depth = max(0, depth + (token.kind == "open") - (token.kind == "close"))
            if ends:
                cuts.append((start, i, opener))
                in_remark = depth > 0 and opener == "(" and token.kind != "open"
                opener = token.text.lower() if (i > start or opener == "") and not in_remark else opener
                start, seen = i + 1, False
        cuts.append((start, len(self.tokens), opener))
        return [self._clause(first, end, before) for first, end, before in cuts if self.within(first, end)]

    def _ends_a_clause(self, i: int, opener: str, depth: int, seen: bool) -> bool:
        tokens, token = self.tokens, self.tokens[i]
        if token.kind == "open":  # a remark
            is_factor = tokens.kind(i - 1) in ("operator", "minus", "command")
            return (
                depth == 0
                and seen
                and not is_factor
                and (token.spaced or self._says(i))
                and tokens.kind(i + 2) != "close"
            )
        if token.kind == "close":
            return depth <= 1 and opener == "("
        if depth > 0 and opener != "(":
            return False
        return self._stops(i) if token.kind == "stop" else seen and self._explains(i)

    def _explains(self, i: int) -> bool:
        """Return whether a dash or word begins an explanation, or a case: `91 for n = 4`."""
        tokens, word = self.tokens, self.tokens.word(i)
        if tokens.kind(i) == "minus":
            return tokens[i].spaced and tokens.spaced(i + 1) and not self._subtracts(i)
        if word == "and":
            return self._has_verb_of_its_own(i + 1)
        if not word:
            return tokens.kind(i) == "chinese" and tokens[i].text.startswith(_CHINESE_EXPLANATIONS)
        if word in ("for", "at", "with") and tokens.name(i + 1) and tokens.kind(i + 2) == "equals":
            return True
        return word in _EXPLANATIONS or (word == "i" and tokens.kind(i + 1) == "stop")

    def _has_verb_of_its_own(self, start: int) -> bool:
        """Return whether what 'and' joins states a number of its own: 'and makes #', 'and # are left'."""
        return bool(_FACT.match(self.written(start, min(start + 8, len(self.tokens)))))

    def _subtracts(self, i: int) -> bool:
        """Return whether a dash with space at both sides is a minus: between numbers, or after a letter."""
        if (
            self.tokens.name(i - 1)
            or self.tokens.kind(i - 1) == "command"
            or self.tokens.text(i - 1) in ("π", "∞", "θ")
        ):
            return True
        tokens = self.tokens
        if tokens.kind(i + 1) != "number":
            return False
        after = [token.kind for token in tokens[i + 1 : i + 30] if token.kind in ("equals", "stop")]
        measured = tokens.kind(i - 2) == "number" and tokens.text(i - 1) == tokens.text(i + 2)  # 9 cm - 5 cm
        return tokens.kind(i - 1) == "number" or measured or after[:1] == ["equals"]  # 60 miles - 35 miles = 25

    def _says(self, opened: int) -> bool:
        """Return whether a bracket holds words or an equation, and is no factor."""
        for token in self.tokens[opened + 1 : opened + 40]:
            if token.kind == "close":
                return False
            if token.kind in ("equals", "chinese") or (token.kind == "word" and len(token.text) > 1):
                return True
        return False

    def _stops(self, i: int) -> bool:
        """Return whether a stop ends a clause: not a point or colon between digits."""
        token, tokens = self.tokens[i], self.tokens
        tight = not tokens.spaced(i + 1) and not token.spaced
        between = tokens.kind(i + 1) == tokens.kind(i - 1) == "number"
        computes = token.text == "," and tokens.kind(i + 2) in ("operator", "minus")  # 109,27+136=163
        return not (tight and token.text in ".,:" and between) or computes

    def _clause(self, start: int, stop: int, opener: str) -> Clause:
        tokens = self.tokens
        signs = [i for i in range(start, stop) if tokens[i].kind in ("equals", "arrow")]
        equates = any(tokens[i].kind == "equals" for i in signs)
        verb = self._verb(start, signs[-1] + 1 if signs else start, stop)
        if verb is not None:
            signs, equates = [*signs, verb], False
        sides = zip([start, *(i + 1 for i in signs)], [*signs, stop], strict=True)
        return Clause(tuple((first, end) for first, end in sides if first < end), opener, equates)

    def _verb(self, start: int, last_side: int, stop: int) -> int | None:
        """Return the verb between two numbers of a clause's last side."""
        tokens = self.tokens
        verbs = (
            i
            for i in range(last_side, stop)
            if tokens.word(i) in _VERBS and (tokens.word(i - 1) != "to" or tokens.word(i) == "get")
        )
        verb = next(verbs, None)
        if verb is None or not self.within(last_side, verb) or not _TO_THE_NUMBER.match(self.written(verb + 1, stop)):
            return None
        if tokens[last_side].number:
            after = last_side + 1
            if last_side > start and tokens.word(start) not in _CONDITIONS:  # not `for x = 3 the value is 12`
                return None
            if tokens.word(after) == "and" and tokens.kind(after + 1) != "number":  # 18 and the change is 7
                return None
        return verb

    # ------------------------------------------------------------------ numbers

    def governed(self, number: int, start: int) -> bool:
        """Return whether the words before a number say it of something else."""
        return _GOVERNED.search(self.written(start, number)) is not None

    def has_free(self, clause: Clause) -> bool:
        """Return whether a number of the clause's last side is governed by nothing."""
        start, stop = clause.sides[-1]
        return any(not self.governed(number, start) for number in self.within(start, stop))

    def lone(self, side: Side, final: bool = False) -> int | None:
        """Return the number of a side that has just one which nothing governs; of a final side its first."""
        numbers = self.within(*side)
        free = [number for number in numbers if not self.governed(number, side[0])] or numbers
        if free and (len(free) == 1 or (final and free[0] == side[0])) and not self.is_part(free[0], *side):
            return free[0]
        return None

    def is_bare(self, side: Side) -> bool:
        """Return whether no words but those that may stand before a number do."""
        first = self.within(*side)[0]
        return all(self.may_stand_before(i) for i in range(side[0], first) if self.is_word(i))

    def is_word(self, i: int) -> bool:
        """Return whether a token is an English word or Chinese ones."""
        return self.tokens.kind(i) in ("word", "chinese")

    def may_stand_before(self, i: int) -> bool:
        """Return whether words may stand before a number that is said alone: 'about', 答案是."""
        return self.tokens[i].text.lower() in _SAID or bool(_CHINESE_SAID.search(self.tokens[i].text))

    def is_number_alone(self, clause: Clause) -> bool:
        """Return whether a clause is nothing but a number."""
        return self.written(clause.start, clause.stop) == "#"

    def has_verb(self, clause: Clause) -> bool:
        """Return whether a verb stands before its number."""
        first = self.within(*clause.sides[0])[0]
        return any(self.tokens.word(i) in _VERBS for i in range(clause.start, first))

    def is_unsolved(self, side: Side) -> bool:
        """Return whether a side computes with a name: 2x, x^2, |x|, x + 15."""
        for i in range(*side):
            name = self.tokens.name(i)
            if name and name not in _NO_NAMES and self._computes_with(i, side):
                return self.tokens.text(i + 1) != "_"
        return False

    def _computes_with(self, i: int, side: Side) -> bool:
        signs = ("operator", "raised", "minus")
        two_before, before, after, two_after = (
            self.tokens.kind(k) if side[0] <= k < side[1] else "" for k in (i - 2, i - 1, i + 1, i + 2)
        )
        if before == "number" and after in ("number", "minus", "money") and self.tokens.word(i) == "x":  # 3 x 4
            return False
        tight = before == "number" and not self.tokens[i].spaced
        return (
            tight
            or after == "raised"
            or (before in signs and two_before == "number")
            or (after in signs and two_after in ("number", ""))
        )

    # ------------------------------------------------------------------ parts of something else

    def is_part(self, number: int, start: int, stop: int) -> bool:
        """Return whether a number is part of something else: by the tokens at its sides, or by the words around it."""
        tokens = self.tokens
        return (
            (tokens.kind(number - 1) == "open" and tokens.kind(number + 1) == "close")  # a pair (1,100)
            or self._joined_before(number - 1, number)
            or self._joined_after(number + 1)
            or self._computes_after_unit(number + 1)
            or _CHANGED_BEFORE.search(self.written(start, number)) is not None
            or self._changed_after(number, stop)
        )

    def _joined_before(self, before: int, number: int) -> bool:
        tokens = self.tokens
        text, tight = tokens.text(before), not tokens.spaced(number)
        match tokens.kind(before):
            case "operator" | "relation" | "command" | "number" | "digits":
                return True
            case "minus":
                return tight or self._subtracts(before)
            case "close":  # x(4), \\frac{x}{4}
                return tight or (text == "}" and any(token.text == "{" for token in tokens[:before]))
            case "word":
                return tight and text.lower() not in _CURRENCIES
            case "stop":
                return tight and text in ".:" and tokens.kind(before - 1) == "number"
            case "open":
                return tokens.kind(number + 1) == "stop" and tokens.kind(number + 2) != "word"
        return False

    def _joined_after(self, after: int) -> bool:
        tokens = self.tokens
        text, tight, following = tokens.text(after), not tokens.spaced(after), tokens.kind(after + 1)
        match tokens.kind(after):
            case "operator" | "relation" | "command":  # but a rate
                return text != "/" or following != "word" or (tokens.name(after + 1) or "m") not in UNIT_LETTERS
            case "minus":
                return self._is_subtracted_from(after)
            case "raised" | "vulgar":
                return True
            case "number" | "digits":  # 18 12-ounce cans, 18 $5 bills
                if (
                    text[0] in "([" and not tight and (self.same(after - 1, after) or self.same(after, after - 1))
                ):  # 2/5 (0.4)
                    return False
                return (following != "minus" or tokens.spaced(after + 1)) and text[0] != "$"
            case "stop":
                return self._stop_joins(after)
            case "open":
                return tight and not self._says(after)
            case "close":
                return tokens.kind(after - 2) == "stop" and tokens[after - 2].text in ",;"
            case "word" if len(text) == 1:
                return tight and text not in UNIT_LETTERS
        return tight and text.lower() in _JOINED

    def _computes_after_unit(self, after: int) -> bool:
        """Return whether a number with its unit is an operand: 9 cm + 5 cm, 30° - 15°, 9 boxes * 4."""
        tokens = self.tokens
        end = next(
            (i for i in range(after, after + 4) if tokens.kind(i) != "word" and tokens.text(i) not in "°'"), after
        )
        if end == after or tokens.kind(end) not in ("operator", "minus"):
            return False
        following = tokens.kind(end + 1)
        if tokens.kind(end) == "operator":
            return tokens.text(end) != "/" or following == "number"
        return following == "command" or (following == "number" and self._subtracts(end))

    def _stop_joins(self, stop: int) -> bool:
        """Return whether a stop joins digits: 5:45, 3,4; 1 … 9."""
        tokens, following = self.tokens, self.tokens.kind(stop + 1)
        if tokens[stop].text == "!":
            return following in ("operator", "minus", "raised")
        if tokens[stop].text == "…":
            return "number" in (following, tokens.kind(stop + 2))
        tight = not tokens.spaced(stop + 1)
        if self._stops(stop):
            return following == "number" and tokens[stop].text == ":" and tokens[stop].spaced  # 9 : 3
        return following == "number" and tokens[stop].spaced != tight and (tight or tokens[stop].text == ":")  # 9 : 3

    def _is_subtracted_from(self, minus: int) -> bool:
        while self.tokens.kind(minus) == "minus":
            minus += 1
        name = self.tokens.name(minus)
        return (name not in "aAI") if name else self.tokens.kind(minus) in _SUBTRACTABLE

    def _changed_after(self, number: int, stop: int) -> bool:
        changed = _CHANGED_AFTER.match(self.written(number + 1, min(stop, number + 8)))
        if not changed or changed.group() != "or #":
            return changed is not None
        return not self.same(number, number + 2)  # 0.5 or 1/2
