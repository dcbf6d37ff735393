r"""Reading what a statement says, by what kind of answer is expected: one number, mathematics, an expression, or text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmeval_prune.scoring.forms import Form, form_of
from lmeval_prune.scoring.latex import plain
from lmeval_prune.scoring.prose import is_bare_number, number_of, numbers_in, read_number
from lmeval_prune.scoring.statements import CONSENT, CUT_OFF, DENIED, MAX_END, MAX_PHRASE, Reader, sentences
from lmeval_prune.scoring.vocabulary import pattern, phrases

MAX_WORDS = 4  # of a bare answer in words
_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]")
# By pandoc's rule: no space inside the dollars and no digit after them, so `$18 and $20` are prices.
_FORMULA = re.compile(
    r"\$\$((?:\\.|[^$\\])+)\$\$|\$\s*(\\begin[^$]+)\$|(?<!\\)\$(?=\S)((?:\\.|[^$\\\n])+?)(?<=\S)\$(?!\d)"
    r"|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}((?:[^\\]|\\(?!end\{(?:align|equation|gather))[\s\S])+)\\end\{"
)
_PROSE = re.compile(rf"(?<![\\A-Za-z])(?!{phrases('mathematical_words')}\b)[A-Za-z]{{2,}}|[\u4e00-\u9fff]")
_REASON = re.compile(
    rf"[,;,；]?\s{phrases('reasons_after')}\b|[,;，；]?{phrases('reasons_after', 'zh')}", re.IGNORECASE
)
_GIVES_UP = pattern("given_up")
_SUPPOSES = re.compile(
    rf"(?:^|[.!?]\s+)\W*(?:{phrases('supposed_sentence')}|{phrases('supposed_sentence', 'zh')})[^.!?]*[.!?\s$]*$",
    re.IGNORECASE,
)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


# --------------------------------------------------------------------------- numbers

_NOTHING = re.compile(rf"\W*{phrases('nothing')}\b", re.IGNORECASE)
_BULLET = re.compile(r"^\s*(?:[-*•–—>]|\d{1,2}[.)])\s+")
_COURTESY = re.compile(rf"\W*{phrases('courtesies')}\b", re.IGNORECASE)
_ASIDE = re.compile(rf"\b{phrases('offers')}|^\W*(?:{phrases('checks')}|{phrases('checks', 'zh')})", re.IGNORECASE)
_INVERTED = re.compile(phrases("inverted"), re.IGNORECASE)
_FOOTNOTE = re.compile(
    r"(?<=[\w.%)]) ?\[(?:\d{1,2}|[a-z*†]|(?:see|note|from|source|step|table|ref) [^\]\n]{1,40})\](?=[\s.,;:!?]|$)|[†‡¹]"
)
_STATES = re.compile(rf"=|\b{phrases('stating')}\s+(?:about |exactly |only |a total of )?[$£€]?-?\d", re.IGNORECASE)
_PLANS = re.compile(phrases("planned"), re.IGNORECASE)
_IN_ALL = re.compile(
    r",?\s+for (?:a total of (?=[$£€]?\d)|(?=[$£€]?[\d.,]+ (?:in total|altogether|in all)\b))", re.IGNORECASE
)
_CLAUSE = re.compile(
    r",?\s+(?:so|thus|hence|therefore|that|because|since)\s|(?<=[a-z])[,;]\s+(?=there|she|he|they|it|we|the|that)",
    re.IGNORECASE,
)
_NOT_BUT = re.compile(
    r"^.*?\b(?:isn't|is not|not)\b(?:[^,;]|,(?=\d)){1,40}?(?:[,;]\s*(?:it is|it's|rather)|[,;]?\s*but)\s+"
    r"|^.{0,30}?不是(?:[^，,]|,(?=\d)){1,30}[，,](?:而是|是)"
)
_FACTORIAL = re.compile(r"(?<=[\d)])\s?!(?=\s*(?:\$|\\\)|\\\]))")  # in a formula
_UNFINISHED = re.compile(r"[.!?。\n]\s*(?:Next|First|Now|Then)\b[^.!?。\d]*[^.!?。\d\s*)]\s*$")
# What makes a number in mathematics another one: a name, a factorial, minutes of an angle, another number.
_ALGEBRA = (
    r"(?:[A-Za-z](?![A-Za-z])|\s?!\s*$|\s*…|°?\s*(?:and\s*)?(?:\d+\s*)?['′″]|\s*radians?\b"
    r"|\s*;\s*-?\d+\s*(?:$|[;,=])|\s+\d+(?![-\w]))"
)


def _main_clause(sentence: str) -> str:
    """Return the clause of a sentence with its last number, and a question mark after it."""
    clauses = [clause for clause in _CLAUSE.split(sentence) if _DIGIT.search(clause)]
    return clauses[-1] + ("?" if sentence.rstrip().endswith("?") else "") if clauses else sentence


@dataclass(frozen=True)
class NumberReader:
    """Reads one number.

    Attributes:
        algebra: a letter at the digits is a variable and `!` a factorial; else it is a unit, and excitement.
    """

    algebra: bool = False

    def read(self, content: str, how: str) -> str | None:
        """Return the number; of what is no number alone, the whole text; None where nothing is said of a number."""
        content = _FACTORIAL.sub(r" \\factorial", content[:MAX_PHRASE])
        text = plain(content if how == "boxed" else _FOOTNOTE.sub("", content)).strip()
        if how == "boxed":
            text = re.sub(r"(?<=[\d)])\s?!", r" \\factorial ", _flat(text))
        number = None if _GIVES_UP.search(text) or _NOTHING.match(text) else self._number(text)
        says_something = how == "boxed" or _NOTHING.match(text) or _GIVES_UP.search(text) or re.search(r"\d", text)
        return number or (text if text and says_something else None)

    def is_bare(self, content: str) -> bool:
        """Return whether it is a number with its unit."""
        text = plain(content).strip(" .!。")
        return is_bare_number(text) or bool(_NOTHING.match(text))

    def read_end(self, text: str) -> str | None:
        """Return the number of the last sentence that has one, unless doubts follow it."""
        cut_off = CUT_OFF.search(text[-100:]) and not _INVERTED.search(text[-100:])
        if cut_off or _UNFINISHED.search(text[-300:]) or _GIVES_UP.search(text[-300:]):
            return None
        stated = [sentence for sentence in sentences(text) if not _ASIDE.search(sentence)]
        stated = stated if any(map(_DIGIT.search, stated)) else sentences(text)
        for sentence in reversed([_FACTORIAL.sub(r" \\factorial", _FOOTNOTE.sub("", sentence)) for sentence in stated]):
            if _COURTESY.match(sentence) and not _DIGIT.search(sentence):
                continue
            words = _NOT_BUT.sub("", plain(CONSENT.sub("", sentence)))
            if DENIED.search(_main_clause(words)) or (_PLANS.search(words) and not _STATES.search(words)):
                return None
            words = _IN_ALL.sub(", so ", words)
            if self.algebra and len(_PROSE.findall(words)) > 1:
                words = re.sub(r"(?<=\d)!\s*$", "", words)  # It is 9!
            if _DIGIT.search(words):
                return self._number(_BULLET.sub("", words), last=True)
        return None

    def _number(self, text: str, last: bool = False) -> str | None:
        reading = read_number(text, last)
        if reading is None or (self.algebra and re.search(re.escape(reading[0]) + _ALGEBRA, text)):
            return None
        return reading[0]


# --------------------------------------------------------------------------- formulas

_JOINT = re.compile(r"\s*(?:,|and|or|, and|, or)\s*")
_CONDITION = re.compile(rf"\b{phrases('conditions_before')}\b[\w\s]{{0,20}}$", re.IGNORECASE)
_WHY = re.compile(r"\b(?:because|since)\b", re.IGNORECASE)
_NEGATES = re.compile(r"\b(?:not|never|cannot|\w+n't)(?! (?:only|just))(?: \w+){0,3}\s*$", re.IGNORECASE)
_NAME = re.compile(r"\s*(?:[A-Za-z]|\\(?!emptyset|infty|varnothing|pi)[A-Za-z]+)\s*")
_ROWS = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split)\*?\}|&")
_INNER = re.compile(r"\\begin\{(\w*matrix|cases|array)\}[\s\S]*?\\end\{\1\}")
_SAYING = re.compile(  # 'the value of x is', 'triangle ABC has area ='
    rf"^(?:[\w\s]|\\text\s*\{{[^{{}}]*)*?\b{phrases('saying')}s?(?: \w+){{0,3}}?\s?(?:is|are|:)\s*\}}?\s*"
    rf"|^(?:\\?triangle\s*)?[A-Z]*\s*\\text\s*\{{[^{{}}]*\b{phrases('measures')}\s*\}}\s*=?\s*",
    re.IGNORECASE,
)
_UNITS = re.compile(r"(?<=[\d})\]])(?:\s+(?!(?:and|or|pi|sqrt)\b)[A-Za-z]{2,}){1,3}$")
_MATHEMATICAL = re.compile(r"[\d\\^_+=<>()\[\]]|^\W*\w\W*$|\b[A-Za-z] ?- ?[A-Za-z]\b")


def _content(formula: re.Match[str]) -> str:
    return str(next(group for group in formula.groups() if group is not None))


def _result(formula: str) -> str:
    r"""Return what a formula ends with: of `a &= b \\ &= c` the c; else all of it."""
    if _ROWS.search(formula):
        kept = _INNER.sub(lambda inner: inner.group().replace("\\\\", "\0").replace("&", "\1"), formula)
        rows = [row for row in _ROWS.sub(" ", kept).split("\\\\") if row.strip()]
        formula = (rows[-1] if rows else "").replace("\0", "\\\\").replace("\1", "&")
        formula = formula.rpartition("=")[2] if len(rows) > 1 else formula
    return re.sub(r"(?:[ .,]|\\[,;:! ]?)*$", "", _flat(formula))


@dataclass(frozen=True)
class FormulaReader:
    """Reads a formula, or several that are joined; of a sentence without one, its words.

    Attributes:
        words: the answer is words, so formulas count only where the statement begins with one.
    """

    words: bool = False

    def read(self, content: str, how: str) -> str | None:
        """Return the formula; None of a remark that holds none."""
        if how == "boxed":
            return _SAYING.sub("", _flat(content)) or None
        content = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", "", content).replace("`", " ").strip()
        why = _WHY.search(content)
        until = why.start() if why and _PROSE.search(content[: why.start()]) else len(content)
        formulas = [f for f in _FORMULA.finditer(content) if (not self.words or f.start() == 0) and f.start() < until]
        if formulas:
            return None if _NEGATES.search(content[: formulas[0].start()]) else self._joined(content, formulas)
        words = _SAYING.sub("", _REASON.split(content, maxsplit=1)[0]).strip(" $*_").rstrip(" .$!。")
        if not self.words and _MATHEMATICAL.search(words):
            return _UNITS.sub("", words)
        return words if self.words or len(_PROSE.findall(words)) <= MAX_WORDS else None

    def _joined(self, content: str, formulas: list[re.Match[str]]) -> str:
        """Return the first formula, and those that 'and' or a comma joins to it."""
        end = formulas[0].end()
        for formula in formulas[1:]:
            if not _JOINT.fullmatch(content[end : formula.start()]):
                break
            end = formula.end()
        return _result(_FORMULA.sub(_content, content[formulas[0].start() : end]))

    def is_bare(self, content: str) -> bool:
        """Return whether it is a formula, or a few words."""
        if len(content) > MAX_END:
            return False
        if _FORMULA.search(content):
            return not _PROSE.search(_FORMULA.sub("", _REASON.split(content, maxsplit=1)[0]).replace("and", ""))
        return len(_PROSE.findall(content)) <= MAX_WORDS

    def read_end(self, text: str) -> str | None:
        """Return a response that is nothing else, the last sentence's last formula that is no condition, or the words of a line alone."""
        tail = text[-MAX_END:]
        lines = _lines(tail)
        alone = len(lines) == 1 and len(text.strip()) <= MAX_END and self.is_bare(lines[0])
        if alone and (self.words or _MATHEMATICAL.search(lines[0])):
            doubts = any(doubt.search(lines[0]) for doubt in (_GIVES_UP, DENIED, _SUPPOSES))
            return None if doubts else self.read(lines[0], "end")
        if not lines:
            return None
        return self._words_at_end(tail, lines[-1]) if self.words else self._formula_at_end(tail, lines[-1])

    def _words_at_end(self, tail: str, line: str) -> str | None:
        if DENIED.search(line):
            return None
        worded = [formula for formula in _FORMULA.finditer(tail) if "\\text" in _content(formula)]
        if worded:
            return _result(_content(worded[-1]))
        formulas = list(_FORMULA.finditer(line))
        if formulas and not _PROSE.search(line[formulas[-1].end() :]):
            return _result(_content(formulas[-1]))
        return self.read(line, "end") if self.is_bare(line) else None

    def _formula_at_end(self, tail: str, line: str) -> str | None:
        if (CUT_OFF.search(line) or _SUPPOSES.search(line)) and len(_PROSE.findall(line)) > 2:
            return None
        formulas = [formula for formula in _FORMULA.finditer(tail) if not _NAME.fullmatch(_content(formula))]
        meant = [f for f in formulas if not _CONDITION.search(tail[max(0, f.start() - 40) : f.start()])]
        for formula in (meant or formulas)[-1:]:
            rest = tail[formula.end() :]
            if not re.search(r"\d", _FORMULA.sub("", rest)) and not DENIED.search(rest):
                return _result(_content(formula))
        if not DENIED.search(line) and _MATHEMATICAL.search(line) and not _PROSE.search(line):
            return self.read(line, "end")
        return None


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
        """Return the number or, of what is no number alone, the formula."""
        *number, formula = self._readers
        if number and (how != "boxed" or not re.search(r"\d\s*!\s*$", content)):
            text = number[0].read(content, how)
            if text is None or number_of(text):
                return text
        return formula.read(content, how)

    def is_bare(self, content: str) -> bool:
        """Return whether it is nothing but an answer."""
        return any(reader.is_bare(content) for reader in self._readers)

    def read_end(self, text: str) -> str | None:
        """Return the number, or else the formula."""
        return next((answer for reader in self._readers if (answer := reader.read_end(text))), None)


class ExpressionReader(FormulaReader):
    """Reads an expression to be evaluated; unmarked, the last line that has a digit."""

    def read_end(self, text: str) -> str | None:
        """Return that line."""
        return next((line for line in reversed(_lines(text)) if re.search(r"\d", line)), None)


# --------------------------------------------------------------------------- text

_TIME = re.compile(r"\d+(?::\d+)+(?:\s?[ap]\.?\s?m\.?)?", re.IGNORECASE)  # or a ratio
_UNSAID = pattern("unsaid")
_YES_OR_NO = re.compile(r"(?:(?:so|thus|hence|therefore)\b,?\s+)?(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class TextReader:
    """Reads yes or no, a time or ratio, several numbers (`3; 4`), or words; unmarked, from the last line.

    Attributes:
        gold: the gold answer, which says which of them.
    """

    gold: str

    def read(self, content: str, how: str) -> str | None:
        """Return that part of the statement; the whole of it, if it has none."""
        text = _flat(plain(content)).strip(" *_").rstrip(" .。!")
        return self._part(text) or _REASON.split(text, maxsplit=1)[0] or None

    def is_bare(self, content: str) -> bool:
        """Return whether it is a few words."""
        return bool(self._part(content)) or len(_PROSE.findall(content)) <= MAX_WORDS

    def read_end(self, text: str) -> str | None:
        """Return the last line; of times and ratios its last one, of yes and no its first word."""
        lines = _lines(text)
        last = _flat(plain(lines[-1][-MAX_PHRASE:])).strip(" *_") if lines else ""
        return self._part(last) or last or None

    def _part(self, text: str) -> str | None:
        gold = self.gold.strip()
        if gold.lower() in ("yes", "no"):
            answer = _YES_OR_NO.match(text)
            return answer[1].lower() if answer else None
        if _TIME.fullmatch(gold):
            return self._time(_REASON.split(text, maxsplit=1)[0])
        golds, numbers = [number_of(part) for part in gold.split(";")], numbers_in(text)
        if len(golds) < 2 or not all(golds) or len(numbers) != len(golds) or " or " in text or _UNSAID.search(text):
            return None
        return "; ".join(numbers)

    def _time(self, text: str) -> str | None:
        times = list(_TIME.finditer(text))
        if not times or " or " in text or _UNSAID.search(text[: times[-1].start()]):
            return None
        return times[-1].group()


def text_reader(gold: str) -> Reader:
    """Return the reader of an answer that may be one number, or text."""
    return NumberReader() if number_of(gold) else TextReader(gold)
