r"""What a statement says, by what kind of answer is asked: one number, mathematics, an expression, or text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmeval_prune.scoring.mathematics import Form, form_of
from lmeval_prune.scoring.plain import plain
from lmeval_prune.scoring.prose import is_bare_number, number_of, numbers_in, read_number
from lmeval_prune.scoring.statements import CONSENT, CUT_OFF, DENIED, MAX_END, MAX_PHRASE, Reader, sentences

# By pandoc's rule: no space inside the dollars and no digit after them, so `$18 and $20` are prices.
_FORMULA = re.compile(
    r"\$\$((?:\\.|[^$\\])+)\$\$|\$\s*(\\begin[^$]+)\$|(?<!\\)\$(?=\S)((?:\\.|[^$\\\n])+?)(?<=\S)\$(?!\d)|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}((?:[^\\]|\\(?!end\{(?:align|equation|gather))[\s\S])+)\\end\{"
)
_BULLET = re.compile(r"^\s*(?:[-*•–—>]|\d{1,2}[.)])\s+")
_JOINT = re.compile(r"\s*(?:,|and|or|, and|, or)\s*")
_CONDITION = re.compile(r"\b(?:for|where|since|because|when|if|with|let|of)\b[\w\s]{0,20}$", re.IGNORECASE)
_REASON = re.compile(
    r"[,;，；]?\s(?:because|since|which|where|as|so|i\.e\.|given|after|but|not)\b|[,;，；]?(?:因为|所以)", re.IGNORECASE
)
_NAME = re.compile(r"\s*(?:[A-Za-z]|\\(?!emptyset|infty|varnothing|pi)[A-Za-z]+)\s*")
_ROWS = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split)\*?\}|&")
_INNER = re.compile(r"\\begin\{(\w*matrix|cases|array)\}[\s\S]*?\\end\{\1\}")
_SAYING = re.compile(
    r"^(?:[\w\s]|\\text\s*\{[^{}]*)*?\b(?:answer|value|result|solution)s?(?: \w+){0,3}?\s?(?:is|are|:)\s*\}?\s*"
    r"|^(?:\\?triangle\s*)?[A-Z]*\s*\\text\s*\{[^{}]*\b(?:area|length|volume|perimeter|measure|value|is|are|equals|equal to)\s*\}\s*=?\s*",
    re.IGNORECASE,
)
_PROSE = re.compile(
    r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|lcm|gcd|max|min|infty|frac)\b)[A-Za-z]{2,}|[\u4e00-\u9fff]"
)
_UNITS = re.compile(r"(?<=[\d})\]])(?:\s+(?!(?:and|or|pi|sqrt)\b)[A-Za-z]{2,}){1,3}$")
_MATHEMATICAL = re.compile(r"[\d\\^_+=<>()\[\]]|^\W*\w\W*$|\b[A-Za-z] ?- ?[A-Za-z]\b")
_TIME = re.compile(r"\d+(?::\d+)+(?:\s?[ap]\.?\s?m\.?)?", re.IGNORECASE)  # or a ratio
_UNSAID = re.compile(r"\b(?:not|between|never|before|after|if|is the answer|\w+n't)\b", re.IGNORECASE)
_YES_OR_NO = re.compile(r"(?:(?:so|thus|hence|therefore)\b,?\s+)?(yes|no)\b", re.IGNORECASE)
# What makes a number in mathematics another one.
_ALGEBRA = r"(?:[A-Za-z](?![A-Za-z])|\s?!\s*$|\s*…|°?\s*(?:and\s*)?(?:\d+\s*)?['′″]|\s*radians?\b|\s*;\s*-?\d+\s*(?:$|[;,=])|\s+\d+(?![-\w]))"
_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]")
_COURTESY = re.compile(
    r"\W*(?:let me know|feel free|would you|does that|does this|do you|shall|should we|hope|i hope|please|if you|any questions|thank|is there"
    r"|good luck)\b", re.IGNORECASE,
)  # fmt: skip
_OFFER = re.compile(
    r"\W*(?:let me know|feel free|would you|do you (?:have|want|need)|shall (?:i|we)|should (?:i|we)|any questions)\b",
    re.IGNORECASE,
)
_SAYS = re.compile(
    r"=|\b(?:is|are|was|equals|get|gets|obtain|find|gives|makes|total of|leaves)\s+(?:about |exactly |only |a total of )?[$£€]?-?\d",
    re.IGNORECASE,
)
_IN_ALL = re.compile(
    r",?\s+for (?:a total of (?=[$£€]?\d)|(?=[$£€]?[\d.,]+ (?:in total|altogether|in all)\b))", re.IGNORECASE
)
_CLAUSE = re.compile(
    r",?\s+(?:so|thus|hence|therefore|that|because|since)\s|(?<=[a-z])[,;]\s+(?=there|she|he|they|it|we|the|that)",
    re.IGNORECASE,
)
_WHY = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)
_NEGATES = re.compile(r"\b(?:not|never|cannot|\w+n't)(?! (?:only|just))(?: \w+){0,3}\s*$", re.IGNORECASE)
_SUPPOSES = re.compile(
    r"(?:^|[.!?]\s+)\W*(?:let(?:'s| us) (?:assume|try|say|suppose)|suppose|assume|is the answer|a (?:common )?wrong answer|设|假设)[^.!?]*[.!?\s$]*$",
    re.IGNORECASE,
)
_PLANS = re.compile(
    r"\b(?:need|have|want|going|asked|try) to (?:find|know|solve|determine|calculate|compute|figure)\b"
    r"|^\W*(?:to (?:solve|find|answer)\b|(?:next|first|then|now),? (?:we )?(?:add|subtract|multiply|divide|take|look)\b)",
    re.IGNORECASE,
)
_NOTHING = re.compile(r"\W*(?:unknown|zero|none|nothing|undefined|null|n/a|no solution)\b", re.IGNORECASE)
_GIVES_UP = re.compile(
    r"\b(?:(?:do not|don't|cannot|can't|not able to|unable to) (?:know|solve|determine|answer|say|find|tell)|(?:cannot|can't) be (?:determined|solved"
    r"|found|known|answered)|not enough information|insufficient|(?:is|are) (?:unknown|undetermined)|no answer|(?:can't|cannot) help|more information|no idea|not sure|impossible to (?:say|tell"
    r"|know|determine))\b|无法|不知道|不能确定|没有答案", re.IGNORECASE,
)  # fmt: skip
_NOT_BUT = re.compile(
    r"^.*?\b(?:isn't|is not|not)\b(?:[^,;]|,(?=\d)){1,40}[,;]\s*(?:it is|it's|but|rather)\s+|^.{0,30}?不是(?:[^，,]|,(?=\d)){1,30}[，,](?:而是|是)"
)
_UNFINISHED = re.compile(r"[.!?。\n]\s*(?:Next|First|Now|Then)\b[^.!?。\d]*[^.!?。\d\s*)]\s*$")
MAX_WORDS = 4  # of a bare answer in words


def _flat(text: str) -> str:
    return " ".join(text.split())


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _main_clause(sentence: str) -> str:
    """Of a sentence, the clause with its last number, and a question mark after it."""
    clauses = [clause for clause in _CLAUSE.split(sentence) if _DIGIT.search(clause)]
    ends = sentence[-2:] if sentence.rstrip().endswith("?") else ""
    return clauses[-1] + ends if clauses else sentence


@dataclass(frozen=True)
class NumberReader:
    """Reads one number.

    Attributes:
        algebra: a letter at the digits is a variable and `!` a factorial; else it is a unit, and excitement.
    """

    algebra: bool = False

    def read(self, content: str, how: str) -> str | None:
        """The number; of what is no number alone, the whole text; None where nothing is said of a number."""
        text = plain(content[:MAX_PHRASE]).strip()
        text = _flat(text) if how == "boxed" else text
        if _GIVES_UP.search(text) or _NOTHING.match(text):
            return text
        if found := self._number(text):
            return found
        return text if text and (how == "boxed" or re.search(r"\d", text)) else None

    def is_bare(self, content: str) -> bool:
        """Whether it is a number with its unit."""
        text = plain(content).strip(" .!。")
        return is_bare_number(text) or bool(_NOTHING.match(text))

    def read_end(self, text: str) -> str | None:
        """The number of the last sentence that has one, unless doubts follow it."""
        if CUT_OFF.search(text[-100:]) or _UNFINISHED.search(text[-300:]) or _GIVES_UP.search(text[-300:]):
            return None
        for sentence in reversed(sentences(text)):
            if _OFFER.match(sentence) or (_COURTESY.match(sentence) and not _DIGIT.search(sentence)):
                continue
            raised = re.search(r"\d\s*!\s*(?:\$|\\\))", sentence)  # a factorial
            sentence = _NOT_BUT.sub("", plain(CONSENT.sub("", sentence)))
            if DENIED.search(_main_clause(sentence)) or (_PLANS.search(sentence) and not _SAYS.search(sentence)):
                return None
            sentence = _IN_ALL.sub(", so ", sentence)
            if self.algebra and len(_PROSE.findall(sentence)) > 1 and not raised:  # It is 9!
                sentence = re.sub(r"(?<=\d)!\s*$", "", sentence)
            if _DIGIT.search(sentence):
                return self._number(_BULLET.sub("", sentence), last=True)
        return None

    def _number(self, text: str, last: bool = False) -> str | None:
        found = read_number(text, last)
        if found is None or (self.algebra and re.search(re.escape(found[0]) + _ALGEBRA, text)):
            return None
        return found[0]


@dataclass(frozen=True)
class FormulaReader:
    """Reads a formula, or several that are joined; of a sentence without one, its words.

    Attributes:
        words: the answer is words, so formulas count only where the statement begins with one.
    """

    words: bool = False

    def read(self, content: str, how: str) -> str | None:
        """The formula; None of a remark that holds none."""
        if how == "boxed":
            return _SAYING.sub("", _flat(content)) or None
        content = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", "", content).replace("`", " ").strip()
        why = _WHY.search(content)
        until = why.start() if why and _PROSE.search(content[: why.start()]) else len(content)
        spans = [s for s in _FORMULA.finditer(content) if (not self.words or s.start() == 0) and s.start() < until]
        if spans:
            if _NEGATES.search(content[: spans[0].start()]):
                return None
            end = spans[0].end()
            for span in spans[1:]:
                if not _JOINT.fullmatch(content[end : span.start()]):
                    break
                end = span.end()
            return _result(_FORMULA.sub(_content, content[spans[0].start() : end]))
        said = _SAYING.sub("", _REASON.split(content, maxsplit=1)[0]).strip(" $*_").rstrip(" .$!。")
        if self.words or not _MATHEMATICAL.search(said):
            return said if self.words or len(_PROSE.findall(said)) <= MAX_WORDS else None
        return _UNITS.sub("", said)

    def is_bare(self, content: str) -> bool:
        """Whether it is a formula, or a few words."""
        if len(content) > MAX_END:
            return False
        if _FORMULA.search(content):
            return not _PROSE.search(_FORMULA.sub("", _REASON.split(content, maxsplit=1)[0]).replace("and", ""))
        return len(_PROSE.findall(content)) <= MAX_WORDS

    def read_end(self, text: str) -> str | None:
        """The whole response if it is nothing else; the last sentence's last formula that is no condition; words of a line alone."""
        lines = _lines(text[-MAX_END:])
        if (
            len(lines) == 1
            and len(text.strip()) <= MAX_END
            and self.is_bare(lines[0])
            and (self.words or _MATHEMATICAL.search(lines[0]))
        ):
            if any(refusal.search(lines[0]) for refusal in (_GIVES_UP, DENIED, _SUPPOSES)):
                return None
            return self.read(lines[0], "end")
        if self.words:
            if not lines or DENIED.search(lines[-1]):
                return None
            worded = [span for span in _FORMULA.finditer(text[-MAX_END:]) if "\\text" in _content(span)]
            if worded:
                return _result(_content(worded[-1]))
            said = list(_FORMULA.finditer(lines[-1]))
            if said and not _PROSE.search(lines[-1][said[-1].end() :]):
                return _result(_content(said[-1]))
            return self.read(lines[-1], "end") if self.is_bare(lines[-1]) else None
        if lines and (CUT_OFF.search(lines[-1]) or _SUPPOSES.search(lines[-1])) and len(_PROSE.findall(lines[-1])) > 2:
            return None
        tail = text[-MAX_END:]
        spans = [span for span in _FORMULA.finditer(tail) if not _NAME.fullmatch(_content(span))]
        meant = [
            span for span in spans if not _CONDITION.search(tail[max(0, span.start() - 40) : span.start()])
        ] or spans
        if (
            meant
            and not re.search(r"\d", _FORMULA.sub("", tail[meant[-1].end() :]))
            and not DENIED.search(tail[meant[-1].end() :])
        ):
            return _result(_content(meant[-1]))
        if lines and not DENIED.search(lines[-1]) and _MATHEMATICAL.search(lines[-1]) and not _PROSE.search(lines[-1]):
            return self.read(lines[-1], "end")
        return None


def _content(span: re.Match[str]) -> str:
    return str(next(group for group in span.groups() if group is not None))


def _result(formula: str) -> str:
    r"""What a formula ends with: of `a &= b \\ &= c` the c; else all of it."""
    if _ROWS.search(formula):
        kept = _INNER.sub(lambda found: found.group().replace("\\\\", "\0").replace("&", "\1"), formula)
        rows = [row for row in _ROWS.sub(" ", kept).split("\\\\") if row.strip()]
        formula = (rows[-1] if rows else "").replace("\0", "\\\\").replace("\1", "&")
        formula = formula.rpartition("=")[2] if len(rows) > 1 else formula
    return re.sub(r"(?:[ .,]|\\[,;:! ]?)*$", "", _flat(formula))


@dataclass(frozen=True)
class MathematicsReader:
    """Reads a MATH answer: prose, where the gold one is a number, as the number reader does.

    Attributes:
        gold: the gold answer.
    """

    gold: str

    @property
    def _readers(self) -> list[Reader]:
        if number_of(self.gold) and "=" not in self.gold:
            return [NumberReader(algebra=True), FormulaReader()]
        form = form_of(self.gold)
        return [FormulaReader(words=isinstance(form, Form) and form.kind == "words")]

    def read(self, content: str, how: str) -> str | None:
        """The number or, of what is no number alone, the formula."""
        *number, formula = self._readers
        if number and (how != "boxed" or not re.search(r"\d\s*!\s*$", content)):
            text = number[0].read(content, how)
            if text is None or number_of(text):
                return text
        return formula.read(content, how)

    def is_bare(self, content: str) -> bool:
        """Whether it is nothing but an answer."""
        return any(reader.is_bare(content) for reader in self._readers)

    def read_end(self, text: str) -> str | None:
        """As the first of number and formula that finds one."""
        return next((found for reader in self._readers if (found := reader.read_end(text))), None)


class ExpressionReader(FormulaReader):
    """Reads an expression to be evaluated; unmarked, the last line that has a digit."""

    def read_end(self, text: str) -> str | None:
        """That line."""
        return next((line for line in reversed(_lines(text)) if re.search(r"\d", line)), None)


@dataclass(frozen=True)
class TextReader:
    """Reads yes or no, a time or ratio, several numbers (`3; 4`), or words; unmarked, from the last line.

    Attributes:
        gold: the gold answer, which says which of them.
    """

    gold: str

    def read(self, content: str, how: str) -> str | None:
        """That part of the statement; the whole of it, if it has none."""
        text = _flat(plain(content)).strip(" *_").rstrip(" .。!")
        return self._part(text) or _REASON.split(text, maxsplit=1)[0] or None

    def is_bare(self, content: str) -> bool:
        """Whether it is a few words."""
        return bool(self._part(content)) or len(_PROSE.findall(content)) <= MAX_WORDS

    def read_end(self, text: str) -> str | None:
        """The last line; of times and ratios its last one, of yes and no its first word."""
        lines = _lines(text)
        last = _flat(plain(lines[-1][-MAX_PHRASE:])).strip(" *_") if lines else ""
        return self._part(last) or last or None

    def _part(self, text: str) -> str | None:
        gold = self.gold.strip()
        stated = _REASON.split(text, maxsplit=1)[0]
        if gold.lower() in ("yes", "no"):
            found = _YES_OR_NO.match(text)
            return found[1].lower() if found else None
        if _TIME.fullmatch(gold):
            found_times = list(_TIME.finditer(stated))
            return (
                found_times[-1].group()
                if found_times and " or " not in stated and not _UNSAID.search(stated[: found_times[-1].start()])
                else None
            )
        asked = [number_of(part) for part in gold.split(";")]
        if len(asked) > 1 and all(asked) and len(found_numbers := numbers_in(text)) == len(asked):
            return None if _UNSAID.search(text) or " or " in text else "; ".join(found_numbers)
        return None


def text_reader(gold: str) -> Reader:
    """The reader of an answer that may be one number, or text."""
    return NumberReader() if number_of(gold) else TextReader(gold)
