r"""Finding the final answer of a response: its statements, and which of them counts.

A *statement* is a box, a line after `####`, a phrase ('the answer is', 'Answer:', 答案是), or a tag. The last one counts that is not
empty, not a placeholder, not a question or an assumption, and not taken back ('wait', 'that is wrong', …). 'Answer:', `####`
and 'Final Answer' also stand before whole solutions: what follows them counts only if it is nothing but an answer, or if no
number follows it. If no statement counts, the end of the response does: its last sentence that gives an answer.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple, Protocol

from lmeval_prune.scoring.normalisation import clean, pattern, phrases, plain

MARKED = frozenset({"boxed", "hashes", "phrase"})
MAX_QUESTIONS = 5  # that a model asks itself: at so many its answer is looked for before it
MAX_BOX = 2000  # characters of a box
MAX_PHRASE = 400  # characters of a statement that are looked at
MAX_STATEMENTS = 20  # from the end, how many are tried
MAX_NOTES = 9  # footnotes at the end
MAX_END = 1500  # characters at the end in which an unmarked answer is looked for


class Extraction(NamedTuple):
    """A final answer and how: `boxed`, `hashes`, `phrase`, `end`, or `none` (empty answer)."""

    answer: str
    how: str


class Reader(Protocol):
    """A reader of what a statement says, by what kind of answer is asked."""

    def read(self, content: str, how: str) -> str | None:
        """Return the answer in a statement; None if it says nothing that could be one."""

    def is_bare(self, content: str) -> bool:
        """Return whether it is nothing but an answer."""

    def read_end(self, text: str) -> str | None:
        """Return the answer that unmarked text ends with."""


class Statement(NamedTuple):
    """A statement of an answer in a response."""

    how: str
    start: int  # of its mark
    end: int
    content: str
    is_sentence: bool = False  # 'is', not a colon, announces it


# --------------------------------------------------------------------------- marks

# What stands between `answer` and its value: emphasis, a key of JSON, a verb, a colon or arrow, a dash.
_EMPHASIS = r"[*_ \t]{0,4}"
_KEY = rf"[\"'](?:(?:\w{{1,20}}[ _])?{phrases('answer_keys')}|{phrases('answer_keys', 'zh')})[\"']\s*:"  # "answer":
_IS = rf"\b{phrases('announcing_verbs')}\b(?:\s+{phrases('announcing_adverbs')})*\s*[:：]?"  # is therefore
_COLON = r"[\"'”)*_\]]{0,4}\s?(?:[:：→|]|=(?!>))+"  # : or =
_DASH = r"[\"'*_ ]{0,4}\s(?:[-–—]>?|=>)(?=\s)"  # - or =>
_MARKS = {
    "box": r"(?:\\?\b(?:boxed|framebox|fbox)|(?<![A-Za-z])oxed|\\(?:answer|ans))\s*\{",
    "bare": r"\\(?:boxed|fbox)\s*(?P<word>\$?-?[\w.,/]+)",
    "hashes": r"^[ \t>*-]{0,4}#{4,6}(?=[ \t]|\S)|#{4}",
    "tag": r"[<\[](?P<name>final_?answer|answer|ans|result)[>\]]"
    r"(?:(?P<tagged>[\s\S]{0,2000}?)[<\[]/(?P=name)[>\]]|\s*(?P<line>[^\n]*))",
    "call": r"\b(?:finish|final_?answer|answer)(?:\[(?P<finished>[^\[\]\n]{1,100})\]|\((?P<called>[^()\n]{1,100})\))"
    r"|\bprint\((?P<printed>[^()\n]{1,100})\)$",
    "phrase": rf"{_KEY}|\b(?:answers?|ans)\b[^.\n\d=:：？?;]{{0,60}}?(?:(?P<is>{_IS})|{_COLON}|{_DASH})"
    rf"|^[^\w\n]{{0,9}}(?:\w+ )?final answer\b{_EMPHASIS}(?=\n)|^A:(?=\s)|{phrases('announced', 'zh')}",
}
_INSIDE = ("word", "tagged", "line", "finished", "called", "printed")
_MARK = re.compile(  # the signs that any mark begins with are looked for first: that is four times as fast
    r"(?:^|(?=[\\#<\[\"'abfop最正所的答结]))(?:" + "|".join(f"(?P<{how}>{mark})" for how, mark in _MARKS.items()) + ")",
    re.IGNORECASE | re.MULTILINE,
)
# Between two boxes: of one answer (25 apples and 30 pears); before one that is only a remark on the first.
_JOINT = re.compile(
    r"[$\s]*(?:\\text\s*\{\s*)?(?:(?!and\b|or\b)[A-Za-z]+\s+){0,2}(?:[,;、]|(?:,\s*)?\b(?:and|or)\b|或|和)[}$\s]*(?:[A-Za-z]\s*=\s*)?"
)
_ASIDE = re.compile(r"[^()\n.]{0,20}\([^()\n.]{0,20}")
_BRACE = re.compile(r"\\\\|\\[{}]|[{}]")
_UNCLOSED = re.compile(r"[^$\n]{1,100}(?=\$)")  # $\boxed{\frac{5}{6}$
# Between a mark and its value: arrows, emphasis, bullets, line ends; the last may be a minus after `####` or `=`.
_AROUND = re.compile(r"(?:[-=]+>|[ \t*_:：#=\"']|\n\s*>?|[-–—•][ \t]+(?=\S))*")
_MINUS = re.compile(r"[#:=] *- +$")
_FIRST_ITEM = re.compile(rf"(?i)1[.)] +(?!{phrases('reasons_after')}\b)(?=[A-Z*][^\n=]*\d)")  # of a list: 1. She has 30
_KEY_END = re.compile(r"[\"']\s*:$")  # of JSON, in which a backslash is written twice
_DISPLAY = re.compile(  # a displayed formula, or one with rows
    r"\s*(?:\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\(?!\]))+)\\\]"
    r"|\$[^$\n]{0,40}\\begin[^$]+\$|\\\([^\n]{0,40}?\\begin(?:[^\\]|\\(?!\)))+\\\))"
)


def statements(text: str) -> list[Statement]:
    """Return all statements of a cleaned response, in order."""
    result: list[Statement] = []
    opened: list[int] = []
    pairs: dict[int, int] = {}  # the closing brace of each opening one
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            pairs[opened.pop()] = brace.start()
    for mark in _MARK.finditer(text):
        in_a_box = result and mark.start() < result[-1].end and result[-1].how == "boxed"
        statement = None if in_a_box else _statement(text, mark, pairs)
        between = text[result[-1].end : statement.start] if statement and result else ""
        if statement and between and result[-1].how == statement.how == "boxed" and _JOINT.fullmatch(between):
            first, second = result[-1].content, statement.content  # a value that is repeated counts once
            content = first if first.strip() == second.strip() else f"{first}{between.replace('$', '')}{second}"
            result[-1] = result[-1]._replace(end=statement.end, content=content[: MAX_BOX + 1])  # too long, if cut
        elif statement and not (result and result[-1].how == "boxed" and _ASIDE.fullmatch(between)):
            result.append(statement)
    return result


def _statement(text: str, mark: re.Match[str], pairs: dict[int, int]) -> Statement | None:
    start, end = mark.span()
    if mark["box"]:
        closing = pairs.get(end - 1)
        content = text[end : min(closing or 0, end + MAX_BOX)]
        if closing is None and (unclosed := _UNCLOSED.match(text, end)):
            closing, content = unclosed.end() - 1, unclosed.group()
        return None if closing is None else Statement("boxed", start, closing + 1, content)
    inside = next((mark[name] for name in _INSIDE if mark[name] is not None), None)
    if inside is not None:
        return Statement("boxed" if mark["word"] else "phrase", start, end, inside[:MAX_PHRASE].strip())
    stop, content = _following(text, end)
    how = "hashes" if mark["hashes"] is not None else "phrase"
    return Statement(how, start, stop, content, bool(mark["is"] or mark["shi"]))


def _following(text: str, start: int) -> tuple[int, str]:
    """Return the end of what stands after a mark, and it: a displayed formula, else the rest of the line, or the next line."""
    window = text[start : start + MAX_PHRASE]
    around = _AROUND.match(window)
    opened = around.end() if around else 0
    if _MINUS.search(text[start - 1 : start] + window[:opened]):  # #### - 12
        opened = window.rindex("-", 0, opened)
    opened += len(item[0]) if "\n" in window[:opened] and (item := _FIRST_ITEM.match(window[opened:])) else 0
    body, before = window[opened:], window[:opened].rstrip()
    display = _DISPLAY.match(body)
    line = body.partition("\n")[0].rstrip()
    content = body[: display.end()] if display else line.rstrip(" |") if line.count("|") % 2 else line  # a cell, or |x|
    end = start + opened + len(content)
    if before.endswith(('"', "'")):  # quoted, or JSON
        quoted, quote, after_quote = content.partition(before[-1])
        content = quoted if quote and not after_quote.strip(" .,;!?}])`") else content
        content = content.replace("\\\\", "\\") if _KEY_END.search(text, max(0, start - 9), start) else content
    elif text[max(0, start - 2) : start].strip(": ") in ('"', "'"):
        content = re.split(r"\](?=\s*[,}])" if content.startswith("[") else r"\s*[,}](?!\d)", content, maxsplit=1)[0]
    return end, content


# --------------------------------------------------------------------------- which counts

_SENTENCE = re.compile(  # where one ends
    r"(?<!\bMrs)(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bi\.e)(?<!\be\.g)(?<!\bapprox)(?<!\\)[.!?](?=\s+[^a-z\s+/×÷^=]|[\s*_\"')]*$)"
    r"|(?<=[吗呢])\?|[。！？]|\n"
)
_PLACEHOLDER = re.compile(  # no answer: dots, `[number]`, `your answer here`, an empty box
    rf"(?i)[\s.…?_*$]*|-{{2,}}|{phrases('placeholder_words')}*{phrases('placeholders')}s?(?: here| goes here)?"
    r"|x{3,}|n/?a|tbd|todo|\[\D*\]|<\D*>|.*\\?boxed\s*\{\s*\}.*"
)
_REMARK = re.compile(rf"(?i){phrases('remarks')}")  # the answer is correct
_NEXT_QUESTION = re.compile(  # that the model asks itself after its answer
    rf"(?m)(?:^(?P<styled>[ >]*[*_#]{{1,6}} ?)?|(?<=[.!?。\s]))(?:{phrases('questions')}|{phrases('questions', 'zh')})\s*\d{{0,3}}\s*[:：]"
    rf"|(?:^|(?<=[.!?。])) *(?i:{phrases('turns_of_others')})"
)
_APPENDIX = re.compile(rf"(?im)^[^\w\n]{{0,12}}{phrases('appendices')}\b[^\n=.]{{0,20}}?(?:[:*_：]|$)")  # tips:
_CONCLUDES = re.compile(rf"=|{pattern('concluding').pattern}", re.IGNORECASE)
_LABEL = rf"{phrases('first_labels')}\s*[:：=]"
_EXPLAINED = re.compile(  # an answer alone in the first line, and no conclusion after it
    rf"(?i)\s*([^\w\s]{{0,9}}\d[^\n]{{0,80}})\n\s*(?!\W*{_LABEL}\W*\d)(?=(?:\S+\s+){{3}})(?![\s\S]*(?:{_CONCLUDES.pattern}))"
    rf"|[\s*_]*(?:{_LABEL}[*_\s]*)?(\S[^\n]{{0,80}})(?:\n\W*|\.\s+(?=[^.:\n]{{0,30}}:))"
    rf"(?:{phrases('explained')}|{phrases('explained', 'zh')})"
)
_ASSUMED = re.compile(  # before a statement, in its sentence
    rf"\b(?:(?i:{phrases('assumed_before')})|{phrases('others')} {phrases('others_say')})\s*(?:that\s+|the\s+)*$"
    rf"|\b(?i:{phrases('supposing')})\b(?![^,;.\n]*\bwe see\b)[^,;.\n]*$"
    rf"|^\s*Had\b|\b(?i:check|verify) (?:our )?$|{phrases('assumed_before', 'zh')}[^，。；,;\n]*$"
)
_BUT = re.compile(rf"(?i)[,;]\s*(?:{phrases('buts')}|{phrases('buts', 'zh')})")  # where an assumed statement ends
CUT_OFF = re.compile(rf"\b{phrases('cut_off')}\s*$|[+×÷=]\s*$")  # an end
# Answer: x = 3, and 3 + 4 = 7 follows
_FIRST_STEP = re.compile(rf"(?i)\A\s*\n(?!\W*{phrases('verifying')})[^\n]*\d\s*=\s*\S*\d")
# not 12 but
_NOT_BUT = re.compile(r"(?i)\s*not\b(?:[^.;,]|[.,](?=\d)){1,60}?(?:[,;]?\s*but|[,;]\s*(?:it is|it's|rather))\s+")
_NOTE_MARK = r"\n[ \t]*(\[\^?\w{1,2}\]|\*{1,3}|[†‡¹²³])(?!\*):?[ \t]*(?=\w)"  # [1] …, * …, † …
_NOTES = re.compile(rf"(?:{_NOTE_MARK}[^\n]*|\n[ \t]*(?=\n|\Z))+\Z")  # footnotes
_OPTION = re.compile(r"(?i)(?:^|(?<=\s))\(?([A-J])[).:](?=\s)")  # B)
_BOLD_END = re.compile(r"(?:\A|[.!?。\n])\s*\*\*([^*\n]{0,30}\d[^*\n]{0,30})\*\*[\s.。]*\Z")  # a bold value alone
_BOLD_SAID = re.compile(  # the profit is **$50**, which is a 25% return
    r"(?i)\*\*([^*\n]{0,40}\d[^*\n]{0,40})\*\*"
    rf"(?=, (?:which|or)\b[^*\n\d=]*[\d.,]*\d(?:\s?%| (?:{phrases('percent')}|{phrases('rates')}|per|an?)\b)[^*\n\d=,.!?]*[.!?]?\s*\Z)"
)
CONSENT = re.compile(rf"(?i),?\s*{phrases('consents')}\s*[?？][\s\"')*]*$")  # , right?
DENIED = re.compile(rf"(?i)\?\s*$|{pattern('denied').pattern}")  # that is not the answer


def extract(response: str, reader: Reader) -> Extraction:
    """Return the final answer, by the rule stated above."""
    text = _without_options(_without_notes(clean(response)))
    if appendix := _APPENDIX.search(text):
        # left out, if an answer stands before it, marked, concluded, bare or a paragraph apart, and none in it
        before, after = text[: appendix.start()], text[appendix.end() :]
        concluded = before.endswith("\n\n") or reader.is_bare(before.strip())
        answer, how = _extract(before, reader)
        ends = how in MARKED or (concluded and not _CONCLUDES.search(after))
        text = before if answer and ends and not statements(after) else text
    for question in islice(_NEXT_QUESTION.finditer(text), MAX_QUESTIONS):
        extraction = _extract(text[: question.start()], reader)
        is_heading = question["styled"] and extraction.how not in MARKED  # before a solution
        if extraction.answer and not is_heading:
            return extraction
    return _extract(text, reader)


def _without_notes(text: str) -> str:
    """Return a text without the footnotes at its end, and without their marks, which stand tight after a word."""
    notes = _NOTES.search(text, max(0, len(text) - MAX_END))
    if not notes:
        return text
    before_notes, marks = text[: notes.start()], 0
    for mark in list(dict.fromkeys(re.findall(_NOTE_MARK, notes.group())))[:MAX_NOTES]:
        mark = re.escape(mark)
        before_notes, count = re.subn(
            rf"(?m)^((?:(?!{mark}).)*[\w.,;%)!?]) ?{mark}(?=[\s.,;:!?]|$)", r"\1", before_notes
        )
        marks += count
    return before_notes if marks else text


def _without_options(text: str) -> str:
    """Return a text without a list of options that it ends with, of which none is chosen."""
    options = list(_OPTION.finditer(text, max(0, len(text) - MAX_END))) if _OPTION.search(_last_line(text)) else []
    letters = "".join(option[1].lower() for option in options)
    first = letters.rfind("a")
    if first < 0 or len(letters) < first + 3 or letters[first:] not in "abcdefghij":
        return text
    listed = text[options[first].start() :]
    return text if "=" in listed else text[: options[first].start()]


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2][:MAX_PHRASE]


def _extract(text: str, reader: Reader) -> Extraction:
    stated = [s for s in statements(text)[-2 * MAX_STATEMENTS :] if not _REMARK.fullmatch(_sentence(s.content))]
    remaining_text = text  # in which the end of the response is looked for
    ends = [statement.start for statement in stated[1:]] + [len(text)]
    for statement, until in reversed(list(zip(stated, ends, strict=False))[-MAX_STATEMENTS:]):
        clause = re.split(r"[.!?。！？\n]", text[max(0, statement.start - 120) : statement.start])[-1]
        if _ASSUMED.search(clause):  # or said by others
            stops = (stop.search(text, statement.start, statement.end) for stop in (_BUT, _SENTENCE))
            end = min((stop.start() for stop in stops if stop), default=statement.end)
            remaining_text = _blanked(remaining_text, statement.start - len(clause), end)
            continue
        content, following = _stated(statement, reader)
        following += text[statement.end : until]
        at_end = statement.end == len(text) and not text.rstrip(" *_$").endswith((".", "!", "。"))
        is_cut_off = at_end and CUT_OFF.search(content) and not reader.is_bare(content)
        if is_cut_off or any(map(_PLACEHOLDER.fullmatch, (plain(content).strip(" .$"), content))):
            continue
        if back := taken_back(following, content):
            later = reader.read_end(_after(following, back))
            if later is not None:
                return Extraction(later, "end")
            remaining_text = _blanked(remaining_text, 0, until)
        elif following.lstrip(" *_\"')").startswith(("?", "？")):
            remaining_text = _blanked(remaining_text, statement.start, statement.end)
        else:
            bold = _BOLD_END.search(following[-100:]) if statement.how != "boxed" else None  # which stands alone
            content = bold[1] if bold and reader.is_bare(bold[1]) else content
            answer = reader.read(content, statement.how)
            if answer is not None and not _begins_a_solution(statement, following, reader):
                return Extraction(answer, statement.how)
    return _end(remaining_text, reader)


def _end(text: str, reader: Reader) -> Extraction:
    """Return the answer of the first line, if an explanation follows it, or of the last sentence."""
    first = _EXPLAINED.match(text)
    alone = (first[1] or first[2]) if first and not taken_back(text) else ""
    line = _last_line(text)
    back = taken_back(line)
    answer = reader.read(alone, "end") if alone and reader.is_bare(alone) else None
    bold = _BOLD_SAID.search(text, max(0, len(text) - MAX_PHRASE))
    text = text[: bold.end()] if bold and reader.is_bare(bold[1]) else text
    answer = answer or (reader.read_end(_after(line, back)) if back else None) or reader.read_end(text)
    return Extraction(answer, "end") if answer else Extraction("", "none")


def _after(text: str, sign: re.Match[str]) -> str:
    return text[sign.end() :].lstrip(" ,:，：—–")


def _blanked(text: str, start: int, end: int) -> str:
    return f"{text[:start]}{' ' * (end - start)}{text[end:]}"


def _begins_a_solution(statement: Statement, following: str, reader: Reader) -> bool:
    """Return whether what 'Answer:' or `####` introduces is a solution, whose answer comes later."""
    if statement.how == "boxed" or statement.is_sentence:
        return False
    if reader.is_bare(_sentence(statement.content)):
        return "=" in statement.content and bool(_FIRST_STEP.search(following))
    return bool(re.search(r"\d", following))


def _stated(statement: Statement, reader: Reader) -> tuple[str, str]:
    """Return what a statement says, up to the end of its sentence or to where it is taken back; and the rest of it."""
    content = statement.content
    if statement.how == "boxed":
        return content, ""
    content = CONSENT.sub("", _NOT_BUT.sub("", content, count=1) if _NOT_BUT.match(content) else content)
    stated = _sentence(content) if statement.is_sentence or not reader.is_bare(content) else content
    wrong, turn = _NUMBER_IS_WRONG.search(stated), _TURN.search(stated) or _CALLED_WRONG.search(stated)
    end = wrong.end() if wrong else turn.start() if turn else 0  # of 12 in `12, no, 15` and `12 is wrong`
    first = stated[:end].rstrip(" ,，;；—–-….(")
    stated = first if first and reader.is_bare(first) else stated
    return stated, content[len(stated) :]


def _sentence(content: str) -> str:
    """Return the first sentence; a displayed formula whole."""
    end = None if _DISPLAY.match(content) else _SENTENCE.search(content)
    return content[: end.start()] if end else content


def sentences(text: str) -> list[str]:
    """Return the sentences at the end of a text; of a row of a table, its last cell."""
    tail = text[-MAX_END:]
    ends = [0, *(end.end() for end in _SENTENCE.finditer(tail)), len(tail)]
    parts = [part.strip() for i, end in enumerate(ends[1:]) for part in re.split(r"(?<!\\)[;；]", tail[ends[i] : end])]
    rows = [part.strip("| \t").rpartition("|")[2] if part.startswith("|") else part for part in parts]
    return [row for row in rows if re.search(r"\w|[¼-¾]", row)]


# --------------------------------------------------------------------------- taken back: called wrong, or turned from to another

WINDOW = 600  # characters after a statement in which it can be taken back
# It says so: wherever this stands.
_CALLED_WRONG = re.compile(f"(?im){phrases('called_wrong')}|{phrases('called_wrong', 'zh')}")
# Of what others say, or of a number in its own sentence: some say 12, but that is not correct.
OF_OTHERS = re.compile(
    rf"(?im)(?:\b{phrases('others_say')}\b(?! (?:so|this|that|it)\b)|\d)[^.;!?\n]*\bbut {phrases('called_wrong')}"
)
# It turns: at the beginning of a clause, and if another answer follows.
_BEGINS = rf"(?:\A|(?<=[.!?。,;:—–(\n-]))[\s*_(\"'-]*(?:{phrases('before_a_turn')}\b[\s,]*)?"
_TURN = re.compile(
    rf"(?i){_BEGINS}(?:\b{phrases('turns')}(?!\w)|{phrases('turns', 'zh')})"
    f"|{phrases('turns_anywhere')}|{phrases('turns_anywhere', 'zh')}"
)
# Another answer: a number or formula that is said of something, not one that counts something in passing.
_OPENED = rf"(?:\*\*|[$£€\"'(\[]|\\boxed\s*\{{|\\[(\[]|\\frac|{phrases('giving_adverbs')})*"
_GIVES = re.compile(
    rf"(?i)(?:=|'s|\b{phrases('giving')}\b|{phrases('giving', 'zh')}|\A[\s,:*—–-]*)"
    rf"\s*{_OPENED}[-−]?(?:\d|\\[a-zA-Z]|[a-z]\b\s*[=^+]|[¼-¾])"
)
_REJECTS = re.compile(  # another: we rejected 40, as it is too big; the post said 40, which is a typo
    rf"\b(?:(?i:{phrases('rejecting')})|{phrases('others')} {phrases('claiming')})\s[^.!?\n]*\d[^.!?\n]*$"
)
_WONDERS = re.compile(rf"(?i)\b{phrases('wondering')}\b[^.!?;\n]*$")  # if it should be 40
_VALUE = re.compile(r"[\d$\\]")  # another
_CONFIRMED = pattern("confirmed")  # after all: yes, that is correct
_NUMBER_IS_WRONG = re.compile(rf"(?im)(-?\d[\d.,/]*)(?= (?:is|was) {phrases('wrong')})")  # 12 is wrong


def taken_back(following: str, content: str = "") -> re.Match[str] | None:
    """Return the last of the words, before another value, with which what follows a statement takes it back.

    None if it does not, or confirms it after all. It does if it calls the statement wrong, or turns to another value.
    A number that is called wrong must be in the `content` of the statement.
    """
    near = following[:WINDOW]
    numbers = (x for x in _NUMBER_IS_WRONG.finditer(near) if x[1] in content)
    others = [x.end() for x in OF_OTHERS.finditer(near)]
    called = (
        x for x in _CALLED_WRONG.finditer(near) if x.end() not in others and not _REJECTS.search(near, 0, x.start())
    )
    turns = (
        x
        for x in _TURN.finditer(near)
        if _GIVES.search(near[x.end() : x.end() + 300]) and not _WONDERS.search(near, 0, x.start())
    )
    signs = [sign for sign in (next(called, None) or next(numbers, None), next(turns, None)) if sign]
    first = min(signs, key=re.Match.start, default=None)
    if first is None or _CONFIRMED.search(following, first.end(), first.end() + 300):
        return None
    later = (sign for kind in (_CALLED_WRONG, _TURN) for sign in kind.finditer(near, first.end()))
    before_value = (sign for sign in later if not _VALUE.search(near, first.end(), sign.start()))
    return max([first, *before_value], key=re.Match.end)  # sorry, I made a mistake: it should be
