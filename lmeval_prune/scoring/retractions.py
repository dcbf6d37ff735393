r"""Whether what follows a statement of an answer takes it back: says that it is wrong, or turns and gives another one."""

from __future__ import annotations

import re

WINDOW = 600  # characters after a statement in which it can be taken back
_WRONG = r"(?:wrong|incorrect|not right|not correct|false|invalid|off|too (?:big|small|large|high|low))"
_IS = r"(?:'s| is| was| can't be| cannot be| seems| must be| looks)"
# It says so: wherever this stands.
_CALLED_WRONG = re.compile(
    r"(?<!think )(?<!thinks )(?<!believe )(?<!if )(?<!that )\b(?:that|this|it|which|(?:the|my|this|that) (?:\w+ )?(?:answer|number|result|value|total)|answer)"
    rf"(?:{_IS}(?: (?:clearly|obviously|also|actually|just))* {_WRONG}"
    r"|(?: isn't| is not| doesn't| does not| can't| cannot)(?: \w+)? (?:right|correct|make sense|work))(?!\w)(?! to\b)"
    r"|(?<!if i )(?<!if i have )(?<!i've )\b(?:made|found|spotted|see) (?:a|an|my)(?: \w+)? (?:mistake|error)\b"
    r"|\b(?:that|this|it) (?:was|is) an? (?:\w+ )?(?:mistake|error|typo)\b"
    r"|\b(?:(?:scratch|strike) that|never ?mind|my mistake|my bad|i was (?:wrong|mistaken)|i (?:am|'m) (?:wrong|mistaken)|miscalculat\w+|misread|miscount\w+|we forgot|i forgot"
    r"|(?:wait|actually),? no|no,? wait|not quite)\b(?! need)"
    r"|\A[\s$.,]*(?:\\text\s*\{)?\s*(?:is|was) (?:\w+ )?(?:wrong|incorrect|not)\b"
    r"|(?:^|[.!?(]\s*)(?:(?:wrong|incorrect|not correct|not right|mistake)\s*[.!:;,)]|(?:no|nope)\s*[.!])"
    r"|不对|不正确|错了|是错|(?<!如)(?<!没)有错|错的|错误的|(?<!如)有误|(?<!要)(?<!别)算错",
    re.IGNORECASE | re.MULTILINE,
)  # fmt: skip
# It turns: at the beginning of a clause, and if another answer follows.
_TURN = re.compile(
    r"(?:\A|(?<=[.!?。,;:—–(\n-]))[\s*_(\"'-]*(?:(?:(?:but|oh|or|ah|well|hm+|so|and|then|however|sorry)\b|[哦啊噢])[\s,]*)?"
    r"(?:\b(?:wait(?! for)|hold on|hm+|no(?=[,.;:!])|nope|actually|correction|updated?|edit(?=:)|better(?=:)|oops|whoops|sorry(?! for the (?:long|length)| if)"
    r"|(?:i |my |we )?apolog(?:y|ies|ize)|on second thought|re-?(?:checking|considering|reading)|(?:let me|let us|let's|i(?:'ll| will)) (?:\w+ )?(?:fix|correct|redo|try again|re-?check|reconsider|recompute|recalculate|rethink|re-?do)"
    r"|upon (?:review|reflection)|at first, but|rather(?! than)|i mean(?:t)?|make that|revis\w+|corrected|correct answer|mistaken\w*"
    r"|(?:it|that|this|which|answer) should (?:actually |really |instead )?(?:be|have been))(?!\w)"
    r"|等等|等一下|更正|纠正|修正|抱歉|应该是|应为|其实是|其实|不(?=[，,]))"
    r"|\b(?:it|that|this|which|answer) should (?:actually |really |instead )?(?:be|have been)\b|\bat first,? but\b|应该是|应为|其实是|,\s*or rather\b",
    re.IGNORECASE,
)
# Another answer: a number or formula that is said of something, not one that counts something in passing.
_GIVES = re.compile(
    r"(?:=|≈|→|->|'s|\b(?:is|are|be|been|was|were|equals|gets?|got|obtain|have|has|had|makes?|gives?|leaves?|left|to|means|need|needs|with|say|find|found|total|answer|only|actually|really|just|about|exactly|it|that|not)\b|[:：是为得有应]|\A[\s,:*—–-]*)"
    r"\s*(?:\*\*|[$£€\"'(\[]|\\boxed\s*\{|\\[(\[]|\\frac|actually |really |only |just |about |exactly |instead |a total of )*[-−]?(?:\d|\\[a-zA-Z]|[a-z]\b\s*[=^+]|[¼-¾])",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r"(?<!not )(?<!n't )(?<!the )\b(?:yes|correct|confirmed|confirms|indeed|checks out|matches|that works|(?<!\d )is right|consistent|verified"
    r"|as expected|so the answer stands)\b|没错|(?<!不)正确",
    re.IGNORECASE,
)
_NUMBER_IS_WRONG = re.compile(
    rf"(-?\d[\d.,/]*|\}}|\$)(?= (?:is|was|seems|looks|must be|can't be|cannot be)(?: \w+)? {_WRONG})", re.IGNORECASE
)


def taken_back(following: str, content: str = "") -> re.Match[str] | None:
    """Where what follows a statement takes it back, unless it confirms it after all.

    Args:
        following: the text after the statement; its first `WINDOW` characters are looked at.
        content: what was stated: a number that is called wrong must be in it.
    """
    near = following[:WINDOW]
    called = (one for one in _NUMBER_IS_WRONG.finditer(near) if one[1] in content)
    found = _CALLED_WRONG.search(near) or next(called, None)
    turn = next((one for one in _TURN.finditer(near) if _GIVES.search(near[one.end() : one.end() + 300])), None)
    places = [one for one in (found, turn) if one]
    if not places:
        return None
    place = min(places, key=lambda one: one.start())
    return None if _CONFIRMED.search(following, place.end(), place.end() + 300) else place


def first_said(said: str) -> int | None:
    """Where, within a statement, its first answer ends, if it is taken back there (`12, no, 15`; `12 is wrong`)."""
    wrong = _NUMBER_IS_WRONG.search(said)
    if wrong:
        return wrong.end()
    turn = _TURN.search(said) or _CALLED_WRONG.search(said)
    return turn.start() if turn else None
