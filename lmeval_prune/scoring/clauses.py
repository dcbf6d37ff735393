r"""Prose cut into clauses, and whether a number in them is part of something larger.

A text is read as its outline, in which each number is a `#`, each minus between operands a `−`, and each arrow a `→`. A clause of it
ends at stops, at remarks in brackets, at dashes, and at words that explain or begin another statement. One with `=`, or with a verb
between two numbers (`3 shirts cost 12`), has *sides*. A number is none of its own if it is part of something larger: of an
expression, a comparison, a list, a time, or of words such as `half of 18` and `18 more than`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from lmeval_prune.scoring.numbers import VULGAR, Number, find_numbers, same_number
from lmeval_prune.scoring.vocabulary import phrases, words

MAX_WORDS = 200  # characters beside a number that are looked at
UNIT_LETTERS = "".join(words("unit_letters"))
_NAME = rf"(?<![A-Za-z\\])(?![aAI{UNIT_LETTERS}])[A-Za-z](?![A-Za-z_])"  # a letter that is a variable
_CHINESE = "[\u4e00-\u9fff]"

# --------------------------------------------------------------------------- the outline

_SPACES = re.compile(r"[ \t]{2,}")  # are one
_THAT_IS = re.compile(r"\bi\.\s?e\.,?", re.IGNORECASE)
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
    rf"""(?:{_OPERATOR}|[<>≤≥≠]|\\[A-Za-z]+|\#)[ ]?@ | [-–—)\]]@ | \#[.:]@ | \{{.*\}}[ ]?@
    | (?:^|[^A-Za-z])(?!(?:{"|".join(words("currencies"))})@)[A-Za-z]+@
    | [(\[{{]\ ?@\ ?(?:\\?[)\]}}]|[,;:.…](?!\s?[A-Za-z])) | [,;]\ ?@\ ?\\?[)\]}}]
    | @\ ?(?:[|∪∩&_<>≤≥≠⁄√±∓{VULGAR}⁰¹²³⁴-⁹]|\\[A-Za-z]) | @(?:\ ?(?!(?:{_EXPLANATIONS})\b)[A-Za-z°']+){{0,3}}\ ?(?:{_OTHER}) | @[-–]\ ?\(
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
    r"(?P<open>\\?[(\[{])|(?P<close>\\?[)\]}])"
    r"|(?P<stop>[;!?，、。；：！？\n…]|(?<!#)[.,:]|[.,:](?!#)|,(?=#\s?[-+*/×·÷−]))"
    rf"|\b(?:{_EXPLANATIONS})\b|{phrases('explanations', 'zh')}"
    rf"|\b(?:for|at|with)(?=\s[a-z]\s?=)|\band(?=\s{phrases('facts')})|(?<=\s)[-–—](?=\s|$)",
    re.IGNORECASE,
)
_REMARK = re.compile(
    rf"(?:(?<=\s)\\?[(\[{{]|\\?[(\[{{](?=[^()\[\]{{}}]*(?:=|{_CHINESE}|[A-Za-z]{{2}})))(?!\s?[\w#]+\s?\\?[)\]}}])",
    re.ASCII,
)
_FACTOR = re.compile(rf"(?:{_OPERATOR}|\\[A-Za-z]+)\s*$")  # before a bracket that is a factor: 3(4)
# of a clause with sides: 3 shirts cost 12
VERBS = re.compile(rf"(?<!to )\b(?:{'|'.join(words('verbs'))})\b|\bget\b", re.IGNORECASE)
_TO_THE_NUMBER = re.compile(rf"\s*(?:{phrases('before_the_number')} ?)*#", re.IGNORECASE)
CONCLUSIONS = words("conclusions")
_WORD = re.compile(rf"(?<!\\)\b[A-Za-z]+(?:['’][A-Za-z]+)*|{_CHINESE}+")  # don't, 答案
_SAID, _CHINESE_SAID = words("said_with_a_number"), re.compile(f"{phrases('said_with_a_number', 'zh')}$")


_COMPUTED = re.compile(rf"#[^#]*{_OPERATOR}\s?[({{]*#|# x #")  # 9 apples + 3

Side = tuple[int, int]  # a range of the outline


class Clause(NamedTuple):
    """A part of a sentence.

    Attributes:
        sides: ranges of the outline.
        opener: the stop or word before it.
        equates: its sides are equated by a sign, not by a verb.
    """

    sides: tuple[Side, ...]
    opener: str
    equates: bool

    @property
    def start(self) -> int:
        """Return where it begins."""
        return self.sides[0][0]

    @property
    def stop(self) -> int:
        """Return where its last side ends."""
        return self.sides[-1][1]


class Prose:
    """A text's outline, numbers and clauses.

    Attributes:
        outline: the text with signs for its numbers.
        numbers: by their place in the outline.
        written: the numbers as they are written.
    """

    def __init__(self, text: str) -> None:
        text = _SPACES.sub(" ", _THAT_IS.sub("that is", text.replace("#", " ").replace("@", " ")))
        located = find_numbers(text)
        ends = [0, *(end for _, end, _ in located)]
        starts = [*(start for start, _, _ in located), len(text)]
        outline = "#".join(text[end:start] for end, start in zip(ends, starts, strict=True))
        outline = (
            outline.translate(_SIGNS).replace("<=", "≤").replace(">=", "≥").replace(":=", "=").replace("# : #", "#∶#")
        )
        if "-" in outline or "–" in outline or "=>" in outline:
            outline = _MINUS.sub(lambda minus: f"{minus['left'] or ''}−", _ARROW.sub("→", outline))
        self.outline = outline
        positions = [position for position, sign in enumerate(outline) if sign == "#"]
        self.numbers: dict[int, Number] = {
            position: number for position, (_, _, number) in zip(positions, located, strict=True)
        }
        self.written = {position: text[start:end] for position, (start, end, _) in zip(positions, located, strict=True)}

    def within(self, start: int, stop: int) -> list[int]:
        """Return where numbers are in a range."""
        return [position for position in self.numbers if start <= position < stop]

    def same(self, position: int, other: int) -> bool:
        """Return whether two numbers are the same."""
        return same_number(self.numbers[position], self.numbers[other])

    def words(self, start: int, stop: int) -> str:
        """Return a range in lower case."""
        return self.outline[start:stop].strip().lower()

    def first_word(self, start: int) -> str:
        """Return the word, in lower case, with which a range begins; nothing if a sign or number does."""
        word = _WORD.match(self.outline, re.compile(r"\s*").match(self.outline, start).end())  # type: ignore[union-attr]
        return word.group().lower() if word else ""

    def clauses(self) -> list[Clause]:
        """Return the clauses that hold a number."""
        return [self._clause(*cut) for cut in self._cuts() if self.within(*cut[:2])]

    def _cuts(self) -> Iterator[tuple[int, int, str]]:
        """Yield where each clause starts and ends, and the stop before it."""
        start, opener, depth = 0, "", 0
        for boundary in _BOUNDARY.finditer(self.outline):
            position = boundary.start()
            has_number = "#" in self.outline[start:position]
            if boundary["open"]:
                ends = depth == 0 and has_number and self._is_remark(position)
            elif boundary["close"]:
                ends = depth <= 1 and opener == "("
            else:
                begins = boundary["stop"] or (opener.isalpha() and boundary.group().lower() in CONCLUSIONS)
                ends = (depth == 0 or opener == "(") and (has_number or bool(begins))
            depth = max(0, depth + bool(boundary["open"]) - bool(boundary["close"]))
            if ends:
                yield start, position, opener
                in_remark = depth > 0 and opener == "(" and not boundary["open"]
                opener = opener if in_remark else boundary.group().lower()
                start = boundary.end()
        yield start, len(self.outline), opener

    def _is_remark(self, position: int) -> bool:
        return bool(_REMARK.match(self.outline, position)) and not _FACTOR.search(
            self.outline[max(0, position - 40) : position]
        )

    def _clause(self, start: int, stop: int, opener: str) -> Clause:
        signs = [i for i in range(start, stop) if self.outline[i] in "=→"]
        equates = any(self.outline[i] == "=" for i in signs)
        verb = self._verb(signs[-1] + 1 if signs else start, stop)
        ends = [(i, i + 1) for i in signs] + ([verb] if verb else [])
        sides = zip([start, *(end for _, end in ends)], [*(begin for begin, _ in ends), stop], strict=True)
        return Clause(tuple(s for s in sides if self.outline[s[0] : s[1]].strip()), opener, equates and not verb)

    def _verb(self, last_side: int, stop: int) -> tuple[int, int] | None:
        """Return the verb between two numbers of a clause's last side."""
        verb = VERBS.search(self.outline, last_side, stop)
        if (
            not verb
            or not self.within(last_side, verb.start())
            or not _TO_THE_NUMBER.match(self.outline, verb.end(), stop)
        ):
            return None
        return verb.span()

    def results(self, clause: Clause) -> bool:
        """Return whether a clause gives what is computed in it: they have 12 + 5 = 17 apples."""
        operands = clause.sides[-2:][0]
        is_quotient = any(self.numbers[position].is_quotient for position in self.within(*operands))
        computed = is_quotient or bool(_COMPUTED.search(self.outline, *operands))
        return clause.equates and computed and self.words(*clause.sides[-1]).startswith("#")

    def governed(self, position: int, start: int) -> bool:
        """Return whether the words before a number say it of something else."""
        return _GOVERNED.search(self.words(max(start, position - MAX_WORDS), position)) is not None

    def free(self, start: int, stop: int) -> list[int]:
        """Return the numbers of a range that nothing governs."""
        return [position for position in self.within(start, stop) if not self.governed(position, start)]

    def lone(self, side: Side, final: bool = False) -> int | None:
        """Return the number of a side that has just one which nothing governs; of a final side its first."""
        free = self.free(*side) or self.within(*side)
        begins = final and self.words(*side).startswith("#")
        return free[0] if free and (len(free) == 1 or begins) and not self.is_part(free[0], *side) else None

    def is_introduced(self, start: int, position: int) -> bool:
        """Return whether a number has only words before it that may stand there: 'about', 答案是."""
        return all(
            word.lower() in _SAID or _CHINESE_SAID.search(word) for word in _WORD.findall(self.outline[start:position])
        )

    def is_part(self, position: int, start: int, stop: int) -> bool:
        """Return whether a number is part of something larger: by what stands at its sides, or by the words around it."""
        before, after = self.outline[max(0, position - 80) : position], self.outline[position + 1 : position + 80]
        if _PART.search(f"{before}@{after}"):
            return True
        following = _NEXT.match(after)
        if following and not self._is_restated(position, position + following.end()):
            return True
        if _CHANGED_BEFORE.search(self.words(max(start, position - MAX_WORDS), position)):
            return True
        changed = _CHANGED_AFTER.match(self.words(position + 1, min(stop, position + MAX_WORDS)))
        alternative = changed and re.match(r"\s*or #", changed.group())
        return bool(changed) and not (
            alternative and self.same(position, position + 1 + self.outline[position + 1 :].index("#"))
        )

    def _is_restated(self, position: int, other: int) -> bool:
        """Return whether a number in brackets says the same as the one before it, 2/5 (0.4), or is a price: 18 $5 bills."""
        written = self.written[other]
        same = self.same(position, other) or self.same(other, position)
        return written.startswith("$") or (written[0] in "([" and other > position + 1 and same)
