"""Finding the final answer in a response."""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import NUMBER, SCALES, normalise, readings

MARKED = frozenset({"boxed", "hashes", "phrase"})
MAX_PHRASE = 300  # characters after 'the answer is' that are looked at
MAX_PHRASES = 20  # from the end, how many such phrases are tried

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"[{}]")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
# Only where a phrase begins; the rest is cut and read in plain steps, so no pattern can backtrack over it.
_PREFIX = re.compile(
    r"\banswers?[*_]{0,2}[ \t]{0,4}(?:[:：=]|(?:is|are)\b)|答案[*_]{0,2}[ \t]{0,4}[是为:：]", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\bMrs)(?<!\bMr)(?<!\bMs)(?<!\bDr)\.(?=\s+[^a-z\s]|\s*$)|。")
_REASON = re.compile(r"[,;，；]?\s*(?:\b(?:because|since|which|where|i\.e\.)|因为|所以)")
_REMARK = re.compile(r"(?:in)?correct\b|right\b|wrong\b|below\b|as follows\b", re.IGNORECASE)
# By pandoc's rule: no space inside the dollars and no digit after them, so `$18 and $20` are prices.
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(?=\S)((?:\\.|[^$\\])+?)(?<=\S)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_JOINT = re.compile(r"\s*(?:,|and|or|, and|, or)\s*")
_WRAPPER = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")
_QUANTITY = re.compile(
    rf"(?:\d+(?:\s+\d+\s?/\s?\d+|\s?\(\d+\s?/\s?\d+\))|{NUMBER.pattern})(?:\s?(?:{'|'.join(SCALES)})(?![A-Za-z]))?",
    re.IGNORECASE,
)
# What makes a number part of something else: LaTeX, a power, a product or difference, a variable (`2x`), a time
# (`5:45`), an alternative (`12 or 13`), a quantity in two units (`5 hours and 30 minutes`, `5小时30分`).
_PART_BEFORE = re.compile(r"[\w\\^_{(.]\s?$|[-+*/×÷√]\s*$")
_PART_AFTER = re.compile(
    r"\s*[\\^_{}*/×÷+√]|\s*-\s*[\d(\\]|\s*[xX]\s*\d|[A-Za-z](?![A-Za-z])|[:.]\d|\s+or\s+\d"
    r"|\s*[A-Za-z]+,?\s+(?:and\s+)?\d[\d.]*\s+[A-Za-z]+\s*(?:[,.;]|$)|[\u4e00-\u9fff]{1,3}\d"
)


class Extraction(NamedTuple):
    """A final answer and how it was found: `boxed`, `hashes`, `phrase`, `number`, or `none` (empty answer)."""

    answer: str
    how: str


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` whose braces balance; one pass over the text."""
    starts = {found.end() for found in _BOX.finditer(text)}
    if not starts:
        return None
    opened: list[int] = []
    best: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text, min(starts)):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in starts:
            best = max(best or (start, brace.start()), (start, brace.start()))
    return text[best[0] + 1 : best[1]].strip() if best else None


def extract(response: str, numbers: bool = True) -> Extraction:
    r"""Find the final answer.

    The last balanced `\boxed{}`, else what follows the last `####`, else what follows the last 'the answer
    is' (`Answer:`, 答案是), else the last number.

    Args:
        response: what the model wrote.
        numbers: the answer is one number, so of a phrase its number is taken ('18, because 20 - 2 is' gives
            18), or all of it if its first number is part of something else (`3\sqrt{5}`, `12 or 13`, `5 hours
            and 30 minutes`). Otherwise the answer is the phrase's formula, or its words.
    """
    boxed = last_boxed(response)
    if boxed:
        return Extraction(boxed, "boxed")
    hashes = _HASHES.findall(response)
    if hashes and hashes[-1].strip():
        return Extraction(hashes[-1].strip(), "hashes")
    for prefix in list(_PREFIX.finditer(response))[: -MAX_PHRASES - 1 : -1]:
        phrase = _phrase(response, prefix.end())
        if answer := _number(phrase) if numbers else _formula(phrase):
            return Extraction(answer, "phrase")
    found = [quantity.group() for quantity in _QUANTITY.finditer(normalise(response))]
    return Extraction(found[-1], "number") if found else Extraction("", "none")


def _phrase(response: str, start: int) -> str:
    """The sentence that begins at `start`; where the line ends there, the next line if it is the last."""
    line, *more = [part.strip(" \t*_:：") for part in response[start : start + MAX_PHRASE].split("\n")]
    rest = [part for part in more if part]
    if not line and len(rest) == 1 and start + MAX_PHRASE >= len(response):
        line = rest[0]
    line = line.replace("**", "")
    end = _SENTENCE_END.search(line)
    return line[: end.start()].strip() if end else line


def _head(phrase: str) -> str:
    """A phrase without the reason that it goes on to give."""
    reason = _REASON.search(phrase)
    return phrase[: reason.start()] if reason and reason.start() else phrase


def _formula(phrase: str) -> str:
    """The formula in a phrase, or formulas joined by 'and' or a comma; its words if it has none."""
    spans = list(_FORMULA.finditer(phrase))
    if not spans:
        return "" if _REMARK.match(phrase) else _head(phrase).strip(" $").rstrip(" .$")
    end = spans[0].end()
    for span in spans[1:]:
        if not _JOINT.fullmatch(phrase[end : span.start()]):
            break
        end = span.end()
    return _FORMULA.sub(_content, phrase[spans[0].start() : end]).strip().rstrip(" .")


def _content(span: re.Match[str]) -> str:
    return str(next(group for group in span.groups() if group is not None))


def _number(phrase: str) -> str:
    """The number that a phrase gives, the first or the one after `=`; the phrase itself if it gives none alone."""
    for text in (_head(phrase), phrase):
        plain = _WRAPPER.sub(r" \1 ", re.sub(r"\$|\\[()\[\]]", "", normalise(text))).strip().rstrip(" .")
        if readings(plain):
            return plain
        for part in (plain.rpartition("=")[2], plain.partition("=")[0]):
            found = _QUANTITY.search(part)
            if found and _alone(part, found):
                return found.group()
    return phrase if re.search(r"\d", phrase) else ""


def _alone(text: str, found: re.Match[str]) -> bool:
    before, after = text[: found.start()], text[found.end() :]
    if before.endswith("(") and after.startswith(")"):
        before, after = before[:-1], after[1:]
    return not _PART_BEFORE.search(before) and not _PART_AFTER.match(after)
