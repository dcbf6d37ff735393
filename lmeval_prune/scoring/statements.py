r"""The final answer of a response: its statements, and which of them counts.

A *statement* is a box, a line after `####`, a phrase ('the answer is', 'Answer:', 答案是), or a tag. The last one counts that is not
empty, not a placeholder, not a question or an assumption, and not taken back ('wait', 'that is wrong', …). 'Answer:', `####`
and 'Final Answer' also stand before whole solutions: what follows them counts only if it is nothing but an answer, or if no
number follows it. If no statement counts, the end of the response does: its last sentence that gives an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lmeval_prune.scoring.plain import clean, plain

MARKED = frozenset({"boxed", "hashes", "phrase"})
MAX_PHRASE = 400  # characters of a statement that are looked at
MAX_STATEMENTS = 20  # from the end, how many are tried
MAX_END = 1500  # characters at the end in which an unmarked answer is looked for


class Extraction(NamedTuple):
    """A final answer and how: `boxed`, `hashes`, `phrase`, `end`, or `none` (empty answer)."""

    answer: str
    how: str


class Reader(Protocol):
    """Reads what a statement says, by what kind of answer is asked."""

    def read(self, content: str, how: str) -> str | None:
        """The answer in a statement; None if it says nothing that could be one."""

    def is_bare(self, content: str) -> bool:
        """Whether it is nothing but an answer."""

    def read_end(self, text: str) -> str | None:
        """The answer that unmarked text ends with."""


@dataclass(frozen=True)
class Statement:
    """Where a response states an answer.

    Attributes:
        how: of what kind.
        start, end: of the statement, its mark included.
        content: what it says.
        is_sentence: 'is', not a colon, announces it.
    """

    how: str
    start: int
    end: int
    content: str
    is_sentence: bool = False


_MARK = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*(?:\{|(?=\S)))"
    r"|(?P<hashes>^[ \t>*-]{0,4}#{4,6}(?=[ \t]|\S)|#{4})"
    r"|<(?P<tag>final_answer|finalanswer|answer|ans|result)>|\[(?P<bracket>answer|ans)\]"
    r"|(?P<phrase>\b(?:answers?|ans)\b(?P<between>[^.\n\d=:：？?;]{0,60}?)"
    r"(?:(?P<is>\b(?:is|are|equals|was|would be|should be|must be|will be|comes to|comes out to|turns out to be|becomes|works out to)\b"
    r"(?:\s+(?:therefore|thus|hence|then|simply|indeed|clearly|just|equal to|still|actually|definitely|exactly))*\s*[:：]?)|[\"'”)*_\]]{0,4}\s?[:：=→]+|[\"'*_ ]{0,4}\s(?:[-–—]>?|=>)(?=\s))"
    r"|\bfinal answer\b[*_ \t]{0,4}(?=\n)"
    r"|(?:最终|正确|最后|所以)?的?(?:答案|结果)[*_ \t]{0,4}(?:(?:应该|应当|应|就|即|则)?(?P<shi>[是为])(?!不)|等于|[:：=])|答\s?[:：]|(?<=[\n。，,])答(?=[^案题对错应]))",
    re.IGNORECASE | re.MULTILINE,
)
_BRACE = re.compile(r"(?<!\\)[{}]|\\[{}]")
_AROUND = " \t*_:：#>=\"'"
_SENTENCE = re.compile(
    r"(?<!\bMrs)(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bi\.e)(?<!\be\.g)(?<!\bapprox)[.!?](?=\s+[^a-z\s]|[\s*_\"')]*$)|[。！？]|\n"
)
_DISPLAY = re.compile(r"\s*(?:\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\(?!\]))+)\\\])")
_PLACEHOLDER = re.compile(
    r"[\s.…?_*$-]*|(?:the |your |my |final |correct |numeric(?:al)? |exact |insert |some |a |an )*(?:answer|result|value|number|solution|expression|ans|integer|choice|option|letter)s?"
    r"(?: here| goes here)?|x{3,}|n/?a|tbd|todo|\[.*\]|<.*>|\.\.\.",
    re.IGNORECASE,
)
_ASSUMED = re.compile(
    r"\b(?:(?i:if|suppose|supposing|assume|assuming|whether|unless|imagine|pretend|say|let's say|had|were|thought|guess(?:ed)?|hoped|not that|instead of)"
    r"|(?:[Ss]ome|[Ss]omeone|people|they|students?|one|many|others?|he|she|who|you|classmate|friend|[A-Z][a-z]+) (?:might |may |could |would |will |often )?(?:say|says|said|think|thinks|claim|claims|claimed|believe|believes|argue|argues|guess|guesses|guessed|answer|answers|answered|thought|got|get|gets)"
    r"|(?i:wrong|incorrect|naive|tempting|initial|first|previous|earlier|old|original|common|mistaken|false|other|textbook|book's|book|given|his|her|their|your|student's|claimed|stated|suggested|approximate|preliminary|tentative)\s*(?:final\s*)?)\s*(?:that\s+|the\s+)*$"
    r"|\b(?i:if|suppose|supposing|assume|assuming|whether|unless|imagine|pretend)\b[^,;.\n]*$|(?:如果|假设|假如|若|是否)[^，。；\n]*$",
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|hold on|hmm|scratch that|correction|oops|whoops|sorry|apolog(?:y|ies|ize)|my mistake|my bad|mistake|mistaken|miscalculat\w+|misread|i was wrong|on second thought|let me (?:fix|correct|redo|try again|reconsider|recompute|recalculate|rethink)"
    r"|(?:that|this|it|which|answer|[\d.]+)(?:'s| is| was| isn't| is not| can't be| cannot be| seems| must be| looks| doesn't| does not)(?: (?:clearly|obviously|also|actually|not|be))* (?:wrong|incorrect|not right|not correct|right[:;,] no|false|invalid|impossible|off|too (?:big|small|large|high|low)|make sense|work|right|correct)(?<! is right)(?<! is correct)(?<!'s right)(?<!'s correct)(?<!was right)(?<!was correct)"
    r"|is (?:wrong|incorrect|not right|not correct)|no,|nope|not quite|not correct|not right|not \d|incorrect|rather|i mean|make that|actually,? (?:no|it|that|the|we|i|let)|actually\b(?=[^.\n]{0,20}\d)|should (?:actually |really |instead )?(?:be|have been)|revis\w+|updat\w+|corrected|instead)\b"
    r"|等等|等一下|不对|错了|有误|更正|纠正|修正|抱歉|应该是|应为|其实是",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r"\b(?:yes|correct|confirmed|confirms|indeed|checks out|matches|that works|is right|consistent|verified|as expected|so the answer stands|still)\b|没错|正确",
    re.IGNORECASE,
)
DENIED = re.compile(
    r"\?\s*$|\b(?:not sure|unsure|don't know|do not know|cannot|can't|unable|unclear|unknown|impossible to|not enough|insufficient|undetermined|no idea|give up|wrong|incorrect|mistake|isn't|is not|not the answer|no\b[.!]?$|never)\b|不是|不知道|无法|不确定",
    re.IGNORECASE,
)


def statements(text: str) -> list[Statement]:
    """All statements of a cleaned response, in order."""
    pairs = _pairs(text)
    found: list[Statement] = []
    for mark in _MARK.finditer(text):
        if found and mark.start() < found[-1].end and found[-1].how == "boxed":
            continue  # in a box
        kind = mark.lastgroup if mark["phrase"] is None else "phrase"
        if mark["box"]:
            if mark["box"].endswith("{"):
                end = pairs.get(mark.end() - 1)
                if end is None:
                    continue
                found.append(Statement("boxed", mark.start(), end + 1, text[mark.end() : end]))
            else:
                word = re.match(r"\s*(\$?-?[\w.,/]+)", text[mark.end() : mark.end() + 40])
                if word:
                    found.append(Statement("boxed", mark.start(), mark.end() + word.end(), word[1]))
        elif name := mark["tag"] or mark["bracket"]:
            closing = f"</{name}>" if mark["tag"] else f"[/{name}]"
            end = text.lower().find(closing.lower(), mark.end(), mark.end() + 5 * MAX_PHRASE)
            stop = end if end >= 0 else len(text)
            found.append(Statement("phrase", mark.start(), stop, text[mark.end() : stop][:MAX_PHRASE]))
        else:
            how = "hashes" if mark["hashes"] is not None else "phrase"
            start, content = _following(text, mark.end())
            found.append(Statement(how, mark.start(), start + len(content), content, bool(mark["is"] or mark["shi"])))
        del kind
    return found


def _pairs(text: str) -> dict[int, int]:
    """Of each opening brace that is closed, the closing one."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            pairs[opened.pop()] = brace.start()
    return pairs


def _following(text: str, place: int) -> tuple[int, str]:
    """What stands after a mark: a displayed formula, else the rest of the line, or the next line that is not empty."""
    window = text[place : place + MAX_PHRASE]
    body = window.lstrip(_AROUND + "\n")
    start = place + len(window) - len(body)
    if display := _DISPLAY.match(body):
        return start, body[: display.end()]
    return start, body.partition("\n")[0]


def extract(response: str, reader: Reader) -> Extraction:
    """Find the final answer, by the rule stated above."""
    text = clean(response)
    found = statements(text)[-MAX_STATEMENTS:]
    for place in range(len(found) - 1, -1, -1):
        statement = found[place]
        following = text[statement.end : found[place + 1].start if place + 1 < len(found) else len(text)]
        before = text[max(0, statement.start - 120) : statement.start]
        clause = re.split(r"[.!?。！？\n]", before)[-1]
        if _ASSUMED.search(clause) or _asks(statement, text):
            continue
        content = statement.content
        if statement.how != "boxed":
            content = _sentence(content) if statement.is_sentence or not reader.is_bare(content) else content
        if _PLACEHOLDER.fullmatch(plain(content).strip(" .$")):
            continue
        following = statement.content[len(content) :] + following if statement.how != "boxed" else following
        answer = reader.read(content, statement.how)
        if answer is None:
            continue
        begins = statement.how != "boxed" and not statement.is_sentence
        if begins and not reader.is_bare(_sentence(statement.content)) and re.search(r"\d", following):
            continue
        back = _TAKEN_BACK.search(following[:600])
        if back and not _CONFIRMED.search(following[back.start() : back.start() + 300]):
            later = reader.read_end(following[back.start() :])
            if later is not None:
                return Extraction(later, "end")
            if place + 1 == len(found):
                return Extraction("", "none")
        return Extraction(answer, statement.how)
    end = reader.read_end(text)
    return Extraction(end, "end") if end else Extraction("", "none")


def _asks(statement: Statement, text: str) -> bool:
    return statement.how == "phrase" and statement.content.rstrip(" *_\"')").endswith("?")


def _sentence(content: str) -> str:
    """The first sentence; a displayed formula whole."""
    if _DISPLAY.match(content):
        return content
    end = _SENTENCE.search(content)
    return content[: end.start()] if end else content


def sentences(text: str) -> list[str]:
    """The sentences at the end of a text."""
    tail = text[-MAX_END:]
    found, start = [], 0
    for end in _SENTENCE.finditer(tail):
        found.append(tail[start : end.end()])
        start = end.end()
    found = [*found, tail[start:]]
    return [part for sentence in found for part in re.split(r"[;；]", sentence) if part.strip()]
