r"""The final answer of a response: its statements, and which of them counts.

A *statement* is a box, a line after `####`, a phrase ('the answer is', 'Answer:', 答案是), or a tag. The last one counts that is not
empty, not a placeholder, not a question or an assumption, and not taken back ('wait', 'that is wrong', …). 'Answer:', `####`
and 'Final Answer' also stand before whole solutions: what follows them counts only if it is nothing but an answer, or if no
number follows it. If no statement counts, the end of the response does: its last sentence that gives an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from lmeval_prune.scoring.plain import clean, plain
from lmeval_prune.scoring.retractions import first_said, taken_back

MARKED = frozenset({"boxed", "hashes", "phrase"})
MAX_QUESTIONS = 5  # that a model asks itself: at so many its answer is looked for before it
MAX_BOX = 2000  # characters of a box
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
    r"(?P<box>(?:\\?\b(?:boxed|framebox|fbox)|(?<![A-Za-z])oxed|\\(?:answer|ans))\s*\{|\\(?:boxed|fbox)\s*(?=[^{\s]))"
    r"|(?P<hashes>^[ \t>*-]{0,4}#{4,6}(?=[ \t]|\S)|#{4})"
    r"|<(?P<tag>final_answer|finalanswer|answer|ans|result)>|\[(?P<bracket>answer|ans)\]"
    r"|\b(?P<call>(?:finish|final_?answer|answer)\[[^\[\]\n]{1,100}\]|(?:final_?answer|answer)\([^()\n]{1,100}\)|print\([^()\n]{1,100}\)$)"
    r"|(?P<phrase>[\"'](?:\w{1,20}[ _])?(?:answer|result|solution|value|output|答案)[\"']\s*:"
    r"|\b(?:answers?|ans)\b(?P<between>[^.\n\d=:：？?;]{0,60}?)"
    r"(?:(?P<is>\b(?:is|are|equals|was|would be|should be|must be|will be|comes to|comes out to|turns out to be|becomes|works out to)\b"
    r"(?:\s+(?:therefore|thus|hence|then|simply|indeed|clearly|just|equal to|still|actually|definitely|exactly))*\s*[:：]?)"
    r"|[\"'”)*_\]]{0,4}\s?(?:[:：→|]|=(?!>))+|[\"'*_ ]{0,4}\s(?:[-–—]>?|=>)(?=\s))"
    r"|\bfinal answer\b[*_ \t]{0,4}(?=\n)"
    r"|(?:最终|正确|最后|所以)?的?(?:答案|结果)(?:[(（][^()（）\n]{0,12}[)）])?[*_ \t]{0,4}"
    r"(?:(?:应该|应当|应|就|即|则)?(?P<shi>[是为])(?!不)|等于|[】\]]?[*_ \t]{0,4}[:：=]|[】\]])"
    r"|^A:(?=\s)|答\s?[:：]|(?<=[\n。，,])答(?=[^案题对错应]))",
    re.IGNORECASE | re.MULTILINE,
)
_BRACE = re.compile(r"\\\\|\\[{}]|[{}]")
_AROUND = re.compile(r"(?:[-=]+>|[ \t*_:：#=\"']|\n\s*>?|[-–—•>](?=[ \t]+[^\s\d])|[-–—•][ \t]+(?=\S))*")
_SENTENCE = re.compile(
    r"(?<!\bMrs)(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bi\.e)(?<!\be\.g)(?<!\bapprox)(?<!\\)[.!?](?=\s+[^a-z\s]|[\s*_\"')]*$)|(?<=[吗呢])\?|[。！？]|\n"
)
_DISPLAY = re.compile(r"\s*(?:\$\$([^$]+)\$\$|\\\[((?:[^\\]|\\(?!\]))+)\\\]|\$\s*\\begin[^$]+\$)")
_PLACEHOLDER = re.compile(
    r"[\s.…?_*$]*|-{2,}|(?:the |your |my |final |correct |numeric(?:al)? |exact |insert |some |a |an )*(?:answer|result|value|number"
    r"|solution|expression|ans|integer|choice|option|letter)s?(?: here| goes here)?|x{3,}|n/?a|tbd|todo|\[\D*\]|<\D*>"
    r"|.*\\?boxed\s*\{\s*\}.*",
    re.IGNORECASE,
)
_REMARK = re.compile(  # what 'the answer is …' also says
    r"(?:(?:also|clearly|not|indeed|now|still) )*(?:correct|incorrect|right|wrong|clear|false|too (?:small|big|large|high|low)\b[^\n]*|as follows"
    r"|(?:shown |given )?(?:above|below|here))[\s.!)]*(?:[,;][^\d\n]*)?"
    r"|(?:given |expressed |written |reported )?in [a-z ]+(?:[,.;][^\n]*)?"
    r"|(?:reasonable|plausible|consistent|valid|(?:greater|less|more|larger|smaller|fewer) than|at (?:least|most)|between)\b[^\n]*"
    r"|not\b(?! (?:less|more|fewer|greater|larger|smaller) than)(?![^\n]*\b(?:but|rather|it is|it's)\b)[^\n]*",
    re.IGNORECASE,
)  # fmt: skip
_NEXT_QUESTION = re.compile(
    r"(?:^|(?<=[.!?。\s]))(?:Q|Question|Problem|Human|User|问题|题目)\s*\d{0,3}\s*[:：]", re.MULTILINE
)
_EXPLAINED = re.compile(
    r"\s*([^\w\s]{0,9}\d[^\n]{0,80})\n\s*(?=(?:\S+\s+){3})(?![\s\S]*(?:=|\b(?:so|thus|hence|therefore|total|finally)\b|所以|因此))"
    r"|\s*(\S[^\n]{0,80})\n\W*(?:explanation|reasoning|solution|here'?s (?:why|how)|justification|because|the \w+ is found|解释|解析|说明|理由)",
    re.IGNORECASE,
)
_ASSUMED = re.compile(
    r"\b(?:(?i:if|suppose|supposing|assume|assuming|whether|unless|imagine|pretend|let's say|thought|guessed|hoped|not that|instead of)"
    r"|(?:[Ss]ome|[Ss]omeone|people|they|students?|others?|he|she|who|classmate|friend|[A-Z][a-z]+)"
    r" (?:might |may |could |would |will |often )?(?:say|says|said|think|thinks|claim|claims|claimed|believe|believes|argue|argues"
    r"|guess|guesses|guessed|answer|answers|answered|thought|got|get|gets)"
    r"|(?i:wrong|incorrect|naive|tempting|initial|first|previous|earlier|old|original|common|mistaken|false|other|textbook|book's"
    r"|book|given|his|her|their|student's|claimed|stated|suggested|approximate|preliminary|tentative)\s*(?:final\s*)?)"
    r"\s*(?:that\s+|the\s+)*$"
    r"|\b(?i:if|suppose|supposing|assume|assuming|whether|unless|imagine|pretend)\b(?![^,;.\n]*\b(?:we|then|you) (?:see|find|get|know|conclude|have)\b)[^,;.\n]*$"
    r"|\b(?i:is|be) to (?:say|answer|claim|think)(?: that)?\s+(?:the\s+)?$|^\s*Had\b|\b(?i:check|test|verify)(?:ing|s)? (?:(?:our|the|this|that|my) )?$"
    r"|(?:如果|假设|假如|若|是否|有人|以为)[^，。；,;\n]*$",
)
_BUT = re.compile(r"[,;]\s*(?:but|however|although|actually|其实|但)", re.IGNORECASE)
_WOULD = re.compile(r"\bwould\b", re.IGNORECASE)
_IF = re.compile(r"\b(?:if|were|had|without)\b", re.IGNORECASE)
CUT_OFF = re.compile(
    r"\b(?:to|to get|we get|and|or|and then(?: \w+)?|of|by|we|the|a|an|is|are|with|in|for|as|that|so|because|from|at)\s*$|[+×÷=]\s*$"
)
_NOT_BUT = re.compile(
    r"\s*not\b(?:[^.;,]|[.,](?=\d)){1,60}?(?:[,;]?\s*but|[,;]\s*(?:it is|it's|rather))\s+", re.IGNORECASE
)
_FIRST_STEP = re.compile(
    r"\A\s*\n(?!\W*(?:check|verif|explanation|note|proof|since|because|reason|let|we can|to see))[^\n]*\d\s*=\s*\S*\d",
    re.IGNORECASE,
)
CONSENT = re.compile(r",?\s*(?:right|correct|ok(?:ay)?|yes)\s*[?？][\s\"')*]*$", re.IGNORECASE)
DENIED = re.compile(
    r"\?\s*$|\b(?:not sure|unsure|don't know|do not know|cannot|can't|unable|unclear|(?:is|are|remains?|still) unknown|impossible to|not enough|insufficient"
    r"|undetermined|no idea|give up|(?:is|are|was|be|seems|looks|am|'s) (?:wrong|incorrect)|(?:a|my) mistake|(?:wrong|incorrect|mistaken) (?:answer|result|value)\b(?! s\b)|isn't|is not|not the answer|no\b[.!]?$|never|might|maybe|perhaps|could be"
    r"|contradiction|(?:it|this|that) fails|does not say|no answer|not able to)\b|不是|不知道|无法|不确定|矛盾|可能",
    re.IGNORECASE,
)


def statements(text: str) -> list[Statement]:
    """All statements of a cleaned response, in order."""
    pairs = _pairs(text)
    found: list[Statement] = []
    for mark in _MARK.finditer(text):
        if found and mark.start() < found[-1].end and found[-1].how == "boxed":
            continue  # in a box
        if mark["box"]:
            if mark["box"].endswith("{"):
                end = pairs.get(mark.end() - 1)
                if end is not None:
                    found.append(
                        Statement("boxed", mark.start(), end + 1, text[mark.end() : min(end, mark.end() + MAX_BOX)])
                    )
            elif word := re.match(r"\$?-?[\w.,/]+", text[mark.end() : mark.end() + 40]):
                found.append(Statement("boxed", mark.start(), mark.end() + word.end(), word[0]))
        elif name := mark["tag"] or mark["bracket"]:
            closing = f"</{name}>" if mark["tag"] else f"[/{name}]"
            end = text.lower().find(closing.lower(), mark.end(), mark.end() + 5 * MAX_PHRASE)
            stop = end if end >= 0 else mark.end() + len(text[mark.end() :].lstrip().partition("\n")[0]) + 1
            found.append(Statement("phrase", mark.start(), stop, text[mark.end() : stop][:MAX_PHRASE].strip()))
        elif mark["call"]:
            found.append(
                Statement("phrase", mark.start(), mark.end(), re.split(r"[\[(]", mark["call"], maxsplit=1)[1][:-1])
            )
        else:
            how = "hashes" if mark["hashes"] is not None else "phrase"
            end, content = _following(text, mark.end())
            found.append(Statement(how, mark.start(), end, content, bool(mark["is"] or mark["shi"])))
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
    """What stands after a mark, and its end: a displayed formula, else the rest of the line, or the next line that is not empty."""
    window = text[place : place + MAX_PHRASE]
    around = _AROUND.match(window)
    start = around.end() if around else 0
    body = window[start:]
    display = _DISPLAY.match(body)
    content = body[: display.end()] if display else body.partition("\n")[0].rstrip(" |\t")
    end = place + start + len(content)
    before = window[:start].rstrip()
    if before.endswith(('"', "'")):  # quoted, or JSON
        quoted = content.partition(before[-1])
        content = quoted[0] if quoted[1] and not quoted[2].strip(" .,;!?}])`") else content
    elif text[max(0, place - 2) : place].strip(": ") in ('"', "'"):
        content = re.split(r"\](?=\s*[,}])" if content.startswith("[") else r"\s*[,}](?!\d)", content, maxsplit=1)[0]
    return end, content


def extract(response: str, reader: Reader) -> Extraction:
    """Find the final answer, by the rule stated above."""
    text = clean(response)
    for another in islice(_NEXT_QUESTION.finditer(text), MAX_QUESTIONS):
        if another.start() and (found := _extract(text[: another.start()], reader)).answer:
            return found
    return _extract(text, reader)


def _extract(text: str, reader: Reader) -> Extraction:
    found = [one for one in statements(text)[-2 * MAX_STATEMENTS :] if not _REMARK.fullmatch(_sentence(one.content))]
    found = found[-MAX_STATEMENTS:]
    rest = text  # in which the end of the response is looked for
    for place in range(len(found) - 1, -1, -1):
        statement = found[place]
        until = found[place + 1].start if place + 1 < len(found) else len(text)
        clause = re.split(r"[.!?。！？\n]", text[max(0, statement.start - 120) : statement.start])[-1]
        if _ASSUMED.search(clause) or (_WOULD.search(text[statement.start : statement.end]) and _IF.search(clause)):
            places = [one.search(text, statement.start, statement.end) for one in (_BUT, _SENTENCE)]
            end = min([one.start() for one in places if one], default=statement.end)
            rest = _blanked(rest, statement.start - len(clause), end)
            continue
        content, following = _said(statement, reader)
        following += text[statement.end : until]
        ends = statement.end == len(text) and not text.rstrip(" *_$").endswith((".", "!", "。"))
        if _says_nothing(content, ends, reader):
            continue
        asks = following.lstrip(" *_\"')").startswith(("?", "？"))
        if back := taken_back(following, content):
            later = reader.read_end(following[back.end() :])
            if later is not None:
                return Extraction(later, "end")
            rest = _blanked(rest, 0, until)
            continue
        answer = None if asks else reader.read(content, statement.how)
        if answer is None:
            rest = _blanked(rest, statement.start, statement.end) if asks else rest
        elif not _begins_a_solution(statement, following, reader):
            return Extraction(answer, statement.how)
    first = _EXPLAINED.match(rest)
    alone = (first[1] or first[2]) if first and not taken_back(rest) else ""
    answer = reader.read(alone, "end") if alone and reader.is_bare(alone) else reader.read_end(rest)
    return Extraction(answer, "end") if answer else Extraction("", "none")


def _blanked(text: str, start: int, end: int) -> str:
    """A text without a part of it, its places as they were."""
    return f"{text[:start]}{' ' * (end - start)}{text[end:]}"


def _says_nothing(content: str, is_end: bool, reader: Reader) -> bool:
    """Whether a statement is empty, a placeholder, or cut off."""
    if _PLACEHOLDER.fullmatch(plain(content).strip(" .$")) or _PLACEHOLDER.fullmatch(content):
        return True
    return is_end and bool(CUT_OFF.search(content)) and not reader.is_bare(content)


def _begins_a_solution(statement: Statement, following: str, reader: Reader) -> bool:
    """Whether what 'Answer:' or `####` introduces is a solution, whose answer comes later."""
    if statement.how == "boxed" or statement.is_sentence:
        return False
    if reader.is_bare(_sentence(statement.content)):
        return "=" in statement.content and bool(_FIRST_STEP.search(following))
    return bool(re.search(r"\d", following))


def _said(statement: Statement, reader: Reader) -> tuple[str, str]:
    """What a statement says, up to the end of its sentence or to where it is taken back; and the rest of it."""
    content = statement.content
    if statement.how == "boxed":
        return content, ""
    negated = _NOT_BUT.match(content)
    content = content[negated.end() :] if negated else content
    content = CONSENT.sub("", content)
    said = _sentence(content) if statement.is_sentence or not reader.is_bare(content) else content
    back = first_said(said)
    first = said[:back].rstrip(" ,，;—–-….(") if back else ""
    if first and reader.is_bare(first):
        said = first
    return said, content[len(said) :]


def _sentence(content: str) -> str:
    """The first sentence; a displayed formula whole."""
    if _DISPLAY.match(content):
        return content
    end = _SENTENCE.search(content)
    return content[: end.start()] if end else content


def sentences(text: str) -> list[str]:
    """The sentences at the end of a text; of a row of a table, its last cell."""
    tail = text[-MAX_END:]
    found, start = [], 0
    for end in _SENTENCE.finditer(tail):
        found.append(tail[start : end.end()])
        start = end.end()
    parts = [part.strip() for sentence in [*found, tail[start:]] for part in re.split(r"(?<!\\)[;；]", sentence)]
    rows = [part.strip("| \t").rpartition("|")[2] if part.startswith("|") else part for part in parts]
    return [row for row in rows if re.search(r"\w|[¼-¾]", row)]
