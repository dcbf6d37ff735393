"""Finding the final answer in a response."""

from __future__ import annotations

import re
from typing import NamedTuple

from lmeval_prune.scoring.numbers import NUMBER, SCALES, WRAPPER, plain, readings

MARKED = frozenset({"boxed", "hashes", "phrase"})
MAX_PHRASE = 300  # characters after 'the answer is' that are looked at
MAX_PHRASES = 20  # from the end, how many such phrases are tried
MAX_TAIL = 2000  # characters at the end in which formulas are looked for
MAX_WORDS = 4  # of an answer in words that more lines follow

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BRACE = re.compile(r"[{}]")
# Only where an answer is announced; the rest is cut and read in plain steps, so no pattern can backtrack over it.
# `is` begins a sentence; the others stand before an answer or, as often, before a whole solution.
_HASHES = re.compile(r"####")
_PREFIX = re.compile(
    r"\banswers?[*_]{0,2}[ \t]{0,4}(?:[:：=]|(?P<is>is|are)\b)|答案[*_]{0,2}[ \t]{0,4}(?:[:：]|(?P<shi>[是为]))|答[:：]"
    r"|\bfinal answer[*_]{0,2}[ \t]{0,4}(?=\r?\n)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?:(?:the )?(?:final )?answer|答案?)[*_ \t]{0,4}(?:[:：=是为]|is\b)[*_ \t]{0,4}", re.IGNORECASE)
_AROUND = " \t\r\n*_:：#>"
_DISPLAY = re.compile(r"\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\[^\]])+)\\\]")
_SENTENCE_END = re.compile(r"(?<!\bMrs)(?<!\bMr)(?<!\bMs)(?<!\bDr)\.(?=\s+[^a-z\s]|\s*$)|。")
_REASON = re.compile(r"[,;，；]?\s*(?:\b(?:because|since|which|where|i\.e\.)|因为|所以)")
_REMARK = re.compile(r"(?:in)?correct\b|right\b|wrong\b|below\b|as follows\b", re.IGNORECASE)
# By pandoc's rule: no space inside the dollars and no digit after them, so `$18 and $20` are prices.
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|(?<!\\)\$(?=\S)((?:\\.|[^$\\\n])+?)(?<=\S)\$(?!\d)|\\\(((?:[^\\]|\\[^)])+)\\\)|\\\[((?:[^\\]|\\[^\]])+)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}((?:[^\\]|\\(?!end\{(?:align|equation|gather))[\s\S])+)\\end\{"
)
_ROWS = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|split)\*?\}|&")
_INNER = re.compile(r"\\begin\{(\w*matrix|cases|array)\}[\s\S]*?\\end\{\1\}")
_CONDITION = re.compile(r"\b(?:for|where|since|because|when|if|with)\b[\w\s]{0,20}$", re.IGNORECASE)
_JOINT = re.compile(r"\s*(?:,|and|or|, and|, or)\s*")
_QUANTITY = re.compile(
    rf"(?:\d+(?:\s+\d+\s?/\s?\d+|\s?\(\d+\s?/\s?\d+\))|{NUMBER.pattern})(?:\s?(?:{'|'.join(SCALES)})(?![A-Za-z]))?",
    re.IGNORECASE,
)
# What makes a number part of something else: LaTeX, a power, a product or difference, a variable (`2x`), a time
# (`5:45`), an alternative (`12 or 13`), a list, a range, a quantity in two units (`5 hours and
# 30 minutes`, `5小时30分`).
_PART_BEFORE = re.compile(
    r"[A-Za-z_^{(.]$|\\[A-Za-z]*[ \t]*$|(?:[-+*/×÷√]|(?<![-=])[<>]|[≤≥≠])[ \t]*$|\d[ \t]*[xX][ \t]*$"
    r"|\d(?:[ \t]*[,;]|[ \t]+or\b)[ \t]*(?:[A-Za-z][ \t]*=?[ \t]*)?$|\b(?:between|from)\s+\S+\s+(?:and|to)[ \t]*$"
    r"|\b(?:sin|cos|tan|log|ln|sqrt|mod|negative|minus|plus|times|between|from|either|not|half|twice|double"
    r"|(?:half|third|quarter) of|(?<!\bno )(?<!\bnot )(?:less|more|fewer|greater) than)[ \t]*$",
    re.IGNORECASE,
)
_PART_AFTER = re.compile(
    r"[ \t]*(?:[\\^_{}*/×÷+√²³½¼¾⅓⅔π]|-+[ \t]*[\d(\\]|[xX][ \t]*\d|[,;][ \t]*\d)|[A-Za-z](?![A-Za-z])|[:.]\d"
    r"|[ \t]+\d+[ \t]*$"
    r"|[ \t]*to[ \t]+\d+(?!\d|[ \t]+(?:significant|decimal))|[ \t]*times\b(?=[ \t]*[\d(\\])"
    r"|[ \t]*(?:pi|sqrt|mod|plus|minus|less|factorial|negative|half|squared|cubed|(?:multiplied|divided)[ \t]+by)\b"
    r"|[ \t]*and[ \t]+(?:\$?\d|(?:an?[ \t]+|one[ \t]+)?(?:half|third|quarter)\b)|[ \t]*or\b.*\d"
    r"|[ \t]*[A-Za-z]+,?[ \t]+(?:and[ \t]+)?\d[\d.]*[ \t]+[A-Za-z]+[ \t]*(?:[,.;]|$)|[\u4e00-\u9fff]{1,3}\d",
    re.IGNORECASE,
)
_SEVERAL = re.compile(r"\b([A-Za-z])\s*=[^=]*\d\W*(?:\bor\b|,|;)\s*(?:or\s+)?\1\s*=")  # x = 3 or x = 5
_TAG = re.compile(r"</?[A-Za-z]{1,12}>|[-=]{1,3}>")  # and arrows
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


class Extraction(NamedTuple):
    """A final answer and how: `boxed`, `hashes`, `phrase`, `formula`, `number`, or `none` (empty answer)."""

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
    is' (`Answer:`, 答案是), else the last number, or the formula that it stands in.

    `####`, `Answer:` and a heading 'Final Answer' also stand before whole solutions: what follows them counts only
    if it is nothing but an answer, or one sentence that ends the response.

    Args:
        response: what the model wrote.
        numbers: the answer is one number, so of a box, a line or a phrase its number is taken ('18, because 20 -
            2 is' gives 18), or all of it if its first number is part of something else (`3\sqrt{5}`, `12 or 13`,
            `5 hours and 30 minutes`). Otherwise the answer is the phrase's formula, or its words, and an unmarked
            number counts only if it is not part of something else.
    """
    boxed = last_boxed(response)
    if boxed:
        return Extraction(boxed if not numbers or readings(boxed) else _number(boxed) or boxed, "boxed")
    for how, mark in (("hashes", _HASHES), ("phrase", _PREFIX)):
        for found in list(mark.finditer(response))[: -MAX_PHRASES - 1 : -1]:
            if answer := _after(response, found, numbers):
                return Extraction(answer, how)
    return _last(response, numbers)


def _last(response: str, numbers: bool) -> Extraction:
    """The last number; where the answer may be more, the formula that holds it."""
    text = response[-MAX_TAIL:] if not numbers else response
    text = re.sub(r"\*\*|__|\\boxed\{", " ", text)
    if not numbers:
        formulas = [span for span in _FORMULA.finditer(text) if not re.fullmatch(r"\s*[A-Za-z]\s*", _content(span))]
        meant = [span for span in formulas if not _CONDITION.search(text[: span.start()])] or formulas
        if meant and not re.search(r"\d", _FORMULA.sub("", text[meant[-1].end() :])):
            return Extraction(_result(_content(meant[-1])), "formula")
    text = re.sub(r"(?<=\d)!(?=\s|$)", "", plain(text))
    quantities = list(_QUANTITY.finditer(text))
    if not quantities or not (numbers or _alone(text, quantities[-1])):
        return Extraction("", "none")
    return Extraction(quantities[-1].group(), "number")


def _result(formula: str) -> str:
    """What a formula ends with: of `a &= b \\ &= c` the c, of `18 = n` and `x = 18` the 18; else all of it."""
    if _ROWS.search(formula):
        kept = _INNER.sub(lambda found: found.group().replace("\\\\", "\0").replace("&", "\1"), formula)
        rows = [row for row in _ROWS.sub(" ", kept).split("\\\\") if row.strip()]
        formula = (rows[-1] if rows else "").replace("\0", "\\\\").replace("\1", "&")
        formula = formula.rpartition("=")[2] if len(rows) > 1 else formula
    left, _, right = (" ".join(part.split()).rstrip(" .,") for part in formula.rpartition("="))
    if re.fullmatch("[A-Za-z]", left) and (readings(right) or WRAPPER.match(right)):
        return right
    return left if left and re.fullmatch("[A-Za-z]", right) else f"{left} = {right}" if left else right


def _after(response: str, mark: re.Match[str], numbers: bool) -> str:
    """The answer that follows a mark; empty if none does."""
    text = response[mark.end() : mark.end() + MAX_PHRASE]
    body = text.lstrip(_AROUND)
    start = len(text) - len(body)
    if label := mark.re is _HASHES and _LABEL.match(body):
        body = body[label.end() :]
        start += label.end()
    if display := _DISPLAY.match(body):
        content = " ".join(_content(display).split())
        return _number(content) if numbers else content.rstrip(" .")
    line = body.partition("\n")[0]
    is_last = not response[mark.end() + start + len(line) :].strip(_AROUND)
    is_sentence = mark.lastgroup is not None and "\n" not in text[:start]
    line = line.replace("**", "").strip(_AROUND)
    end = _SENTENCE_END.search(line)
    phrase = line[: end.start()].strip() if end else line
    if is_sentence or _bare(phrase, numbers) or (is_last and not line[len(phrase) :].strip(" .。")):
        if mark.re is _HASHES and not numbers and not is_last:
            return ""
        return _number(phrase) if numbers else _formula(phrase)
    return ""


def _bare(phrase: str, numbers: bool) -> bool:
    """Whether a phrase is nothing but an answer: a number with its unit, a formula, a few words."""
    if numbers:
        return "=" not in phrase and bool(readings(re.sub(r"\\[()\[\]]", "", phrase)))
    if _FORMULA.search(phrase):
        return not _WORDS.search(_FORMULA.sub("", _head(phrase)).replace("and", ""))
    return len(_WORDS.findall(phrase)) <= MAX_WORDS


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
    """The number that a text gives, the first or the one after `=`; the text itself if it gives none alone."""
    for text in (_head(phrase), phrase):
        whole = plain(_TAG.sub(" ", re.sub(r"(?<!\\)\$|\\[()\[\]]", "", text))).strip().rstrip(" .。!")
        if readings(whole):
            return whole
        if _SEVERAL.search(whole):
            continue
        for part in (whole.rpartition("=")[2], whole.partition("=")[0]):
            found = _QUANTITY.search(part)
            if found and _alone(part, found):
                return found.group()
    return phrase if re.search(r"\d", phrase) else ""


def _alone(text: str, found: re.Match[str]) -> bool:
    before, after = (
        text[max(0, found.start() - MAX_PHRASE) : found.start()],
        text[found.end() : found.end() + MAX_PHRASE],
    )
    if before.endswith("(") and after.startswith(")"):
        before, after = before[:-1], after[1:]
    return not _PART_BEFORE.search(before) and not _PART_AFTER.match(after)
