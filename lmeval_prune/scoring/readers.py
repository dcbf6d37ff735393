r"""Reading what a statement says, by what kind of answer is expected: one number, mathematics, an expression, or text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from lmeval_prune.scoring.expressions import has_operator
from lmeval_prune.scoring.forms import Form, form_of
from lmeval_prune.scoring.formulas import ATOM, Atoms, FormulaReader, is_bare_name, is_formula
from lmeval_prune.scoring.normalisation import line, phrases, plain, words
from lmeval_prune.scoring.prose import is_bare_number, number_of, numbers_in, read_number
from lmeval_prune.scoring.statements import CONSENT, CUT_OFF, DENIED, MAX_END, MAX_PHRASE, OF_OTHERS, Reader
from lmeval_prune.scoring.text import GIVES_UP, TextReader, concluding_sentences, main_clause

_DIGIT = re.compile(r"[\d¼-¾⅐-⅞]")

# --------------------------------------------------------------------------- numbers

_NOTHING = re.compile(rf"(?i)\W*{phrases('nothing')}\b")  # no solution
_BULLET = re.compile(r"^\s*(?:[-*•–—>]|\d{1,2}[.)])\s+")  # 1) 12
_INVERTED = re.compile(rf"(?i){phrases('inverted')}")  # so 12 it is
_FOOTNOTE = re.compile(r"(?<=[\w.%)}*`$]) ?\[\d{1,2}\](?=[\s.,;:!?]|$)|(?<![⁻⁰¹²³⁴-⁹])¹(?![⁰¹²³⁴-⁹])")  # 12 [1]
_DOZENS = re.compile(rf"({phrases('computed')}[\d.,]*) dozens?\b")  # 36/12 = 3 dozen
# is 12
_STATES = re.compile(rf"(?i)=|\b{phrases('stating')}\s+[$£€]?-?\d")
_PLANS = re.compile(rf"(?i){phrases('planned')}")  # next, we add 12
_IN_ALL = re.compile(r"(?i),?\s+for (?=[$£€]?[\d.,]+ in total\b)")  # for 12 in total
_CLAUSE = re.compile(  # so that it is 12
    r"(?i),?\s+(?:so|thus|hence|therefore|that|because|since)\s|(?<=[a-z])[,;]\s+(?=there|she|he|they|it|we|the|that)"
)
# it is not 12 but 15
_NOT_BUT = re.compile(
    r"^.*?\b(?:isn't|not)\b(?:[^,;]|,(?=\d)){1,40}?[,;]?\s*but\s+|^.*?不是[^,;，。]{1,20}[,，]?\s*而是"
)
_CHOSEN = re.compile(  # the correct choice is C; it is option C; I choose C; option C is correct
    rf"(?i)(?:\b(?:the|our|my) (?:(?:only|correct|right|best|final) )*(?:choice|option|answer|letter),? {phrases('announcing_verbs')}|\b(?:it|that)(?: (?:is|leaves))?(?= (?:option|choice))"
    rf"|(?:^|[,;] )(?:{phrases('conclusions')}\b,? )?(?:(?:i|we) (?:would )?)?(?:choose|pick|select))"
    r":? (?:(?:option|choice|answer) )?\(?([A-K])\)?\W*$"
    rf"|(?:^|[,;] )(?:{phrases('conclusions')}\b,? )?(?:the )?(?:option|choice|answer) \(?([A-K])\)? is (?:correct|right)\W*$"
)
_CONDITION = re.compile(rf"(?i)\W*(?:{'|'.join(words('conditions'))})\b")  # since x > 0
_REJECTION = re.compile(  # of another value: we reject 12
    rf"(?i)(?:^|[,;.]\s+)(?:{phrases('conclusions')}\b,? |and )?(?:i|we) {phrases('rejecting')}\b.*?(?=[,;]\s|\band\b|\W*$)"
)
_APPROXIMATION = re.compile(  # of a fraction: 5/6 ≈ 0.833; 5/6, or about 83%
    r"(?<=\d/)(\d+(?: ?[A-Za-z²³]+){0,3})\W*(?:≈|[,(] ?(?:(?:or|that is|which is|i\.e\.),? )?(?:≈|about|approx\w*\.?|roughly|around|nearly))\s*[$£€]?\d.*$"
)
# several values: x = 3, y = 4
_ASSIGNMENTS = re.compile(r"(?:.*\W)?([A-Za-z]) ?= ?-?[\d./]+\W*(?:,|and|,\s*and)\s*(?!\1)[A-Za-z] ?= ?-?[\d./]+\W*")
_BOXED_FACTORIAL = re.compile(r"(?<=[\d)])\s?!(?!\w)")  # 5!
_FACTORIAL = re.compile(r"(?<=[\d)])\s?!(?=\s*(?:\$|\\\)|\\\]))")  # in a formula
# What makes a number in mathematics another one: a name, a factorial, minutes of an angle, another number.
_ALGEBRA = (
    r"(?:[A-Za-z](?![A-Za-z])|\s?!\s*$|\s*…|°?\s*(?:and\s*)?(?:\d+\s*)?['′″]|\s*radians?\b"
    r"|\s*;\s*-?\d+\s*(?:$|[;,=])|\s+\d+(?![-\w]))"
)


@dataclass(frozen=True)
class NumberReader:
    """Reads one number."""

    algebra: bool = False  # a letter at the digits is a variable and `!` a factorial; else it is a unit, and excitement
    exact: bool = False  # beside a fraction, a value that is about the same is no answer

    def read(self, content: str, how: str) -> str | None:
        """Return the number; of what is no number alone, the whole text; None where nothing is said of a number."""
        text = _FACTORIAL.sub(r" \\factorial ", content[:MAX_PHRASE])
        if how == "boxed":
            text = line(_BOXED_FACTORIAL.sub(r" \\factorial ", text))
        else:
            text = plain(_FOOTNOTE.sub("", text)).strip()
        says_nothing = bool(GIVES_UP.search(text) or _NOTHING.match(text))
        number = None if says_nothing else self._number(text)
        return number or (text if how == "boxed" or says_nothing or re.search(r"\d", text) else None) or None

    def is_bare(self, content: str) -> bool:
        if len(content) > MAX_END:
            return False
        text = plain(content).strip(" .!。")
        return is_bare_number(text) or bool(_NOTHING.match(text))

    def read_end(self, text: str) -> str | None:
        """Return the number of the last sentence that has one and is no aside, unless doubts follow it."""
        if (CUT_OFF.search(text[-100:]) and not _INVERTED.search(text[-100:])) or GIVES_UP.search(text[-300:]):
            return None
        rejected: list[str] = []
        for sentence in concluding_sentences(text):
            words = _FOOTNOTE.sub("", CONSENT.sub("", sentence))
            words = _FACTORIAL.sub(r" \\factorial ", words)
            words = _DOZENS.sub(r"\1", _NOT_BUT.sub("", plain(words)))
            others = OF_OTHERS.search(words)
            if others and not _DIGIT.search(words):
                continue
            plans = _PLANS.search(words) and not _STATES.search(words)
            clauses = [clause for clause in _CLAUSE.split(words) if _DIGIT.search(clause)]
            main = clauses[-1] + ("?" if words.rstrip().endswith("?") else "") if clauses else words
            if others or plans or DENIED.search(main):
                return None
            if rejection := _REJECTION.search(words):
                rejected += numbers_in(rejection.group())
                before = words[: rejection.start()]
                is_stated = _DIGIT.search(before) and not _CONDITION.match(before)
                words = before if is_stated else words[rejection.end() :]
            words = _APPROXIMATION.sub(r"\1", words) if self.exact else words
            if self.algebra and _ASSIGNMENTS.fullmatch(words) and not _CONDITION.match(words):
                return None
            if _DIGIT.search(words):
                number = self._number(_BULLET.sub("", _IN_ALL.sub(", so ", words)), last=True)
                return None if number in rejected else number
        return None

    def _number(self, text: str, last: bool = False) -> str | None:
        reading = read_number(text, last)
        if reading is None or (self.algebra and re.search(re.escape(reading[0]) + _ALGEBRA, text)):
            return None
        return reading[0]


# --------------------------------------------------------------------------- mathematics


@dataclass(frozen=True)
class MathematicsReader:
    """Reads a MATH answer: prose, where the gold one is a number, as the number reader does."""

    gold: str

    @cached_property
    def _words(self) -> str:  # of the gold answer; nothing, if it is a formula
        form = form_of(self.gold)
        return str(form.parts[0]) if isinstance(form, Form) and form.kind == "words" else ""

    @cached_property
    def _readers(self) -> list[Reader]:
        if number_of(self.gold) and "=" not in self.gold:
            exact = re.search(r"/|frac", self.gold) is not None
            return [NumberReader(algebra=True, exact=exact), FormulaReader(runs=False)]
        names = is_bare_name(self.gold)
        formulas = FormulaReader(words=bool(self._words), names=names, gold=self.gold)
        return [formulas, TextReader(self._words)] if self._words else [formulas]

    def read(self, content: str, how: str) -> str | None:
        """Return the number or, of what is no number alone, the formula."""
        first, *others = self._readers
        if isinstance(first, NumberReader) and not (how == "boxed" and is_formula(content)):
            text = first.read(content, how)
            if text is None or number_of(text):
                return text
        reader = others[0] if isinstance(first, NumberReader) else first
        return reader.read(content, how)

    def is_bare(self, content: str) -> bool:
        return any(reader.is_bare(content) for reader in self._readers)

    def read_end(self, text: str) -> str | None:
        """Return the number, or else the formula; of a choice, its letter."""
        if re.fullmatch(r"\(?[a-k]\)?", self._words):
            sentence = line(next(concluding_sentences(text), ""))
            clause = main_clause(sentence)
            chosen = _CHOSEN.search(sentence) or _CHOSEN.search(clause)
            if DENIED.search(clause):
                return None
            return chosen[1] or chosen[2] if chosen else self._readers[0].read_end(text)
        return next((answer for reader in self._readers if (answer := reader.read_end(text))), None)


_CONCLUDED = re.compile(rf"(?<=[A-Za-z]):|,\s*{phrases('conclusions')}\b")  # before the expression of a sentence


class ExpressionReader(FormulaReader):
    """Reads an expression to be evaluated; unmarked, the last formula, or the last sentence that has a digit."""

    def read_end(self, text: str) -> str | None:
        """Return the last that computes something; else the last."""
        atoms = Atoms(text[-MAX_END:])
        expressions = []
        for sentence in concluding_sentences(atoms.text):
            letters = re.findall(ATOM, sentence)
            concluded = _CONCLUDED.split(sentence)[-1]
            stated = concluded if has_operator(concluded) and not has_operator(sentence) else sentence
            expressions.append(atoms.formula(letters[-1]) if letters else stated)
        last = next(filter(has_operator, expressions), next(iter(expressions), None))
        return None if last is None or DENIED.search(last) else last


def text_reader(gold: str) -> Reader:
    return NumberReader() if number_of(gold) else TextReader(gold)
