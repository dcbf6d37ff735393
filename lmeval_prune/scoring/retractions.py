"""Retractions: what follows a statement of an answer takes it back if it says that it is wrong, or turns and gives another."""

from __future__ import annotations

import re

from lmeval_prune.scoring.vocabulary import pattern, phrases

WINDOW = 600  # characters after a statement in which it can be taken back
_FLAGS = re.IGNORECASE | re.MULTILINE
# It says so: wherever this stands.
_CALLED_WRONG = re.compile(f"{phrases('called_wrong')}|{phrases('called_wrong', 'zh')}", _FLAGS)
# Of what others say, or of a number in its own sentence: some say 12, but that is not correct.
_OF_OTHERS = re.compile(
    rf"(?:\b{phrases('others_say')}\b(?! (?:so|this|that|it)\b)|\d)[^.;!?\n]*\bbut {phrases('called_wrong')}", _FLAGS
)
# It turns: at the beginning of a clause, and if another answer follows.
_BEGINS = rf"(?:\A|(?<=[.!?。,;:—–(\n-]))[\s*_(\"'-]*(?:(?:{phrases('before_a_turn')}\b|{phrases('before_a_turn', 'zh')})[\s,]*)?"
_TURN = re.compile(
    rf"{_BEGINS}(?:\b{phrases('turns')}(?!\w)|{phrases('turns', 'zh')})"
    f"|{phrases('turns_anywhere')}|{phrases('turns_anywhere', 'zh')}",
    re.IGNORECASE,
)
# Another answer: a number or formula that is said of something, not one that counts something in passing.
_OPENED = rf"(?:\*\*|[$£€\"'(\[]|\\boxed\s*\{{|\\[(\[]|\\frac|{phrases('giving_adverbs')})*"
_GIVES = re.compile(
    rf"(?:=|≈|→|->|'s|\b{phrases('giving')}\b|{phrases('giving', 'zh')}|\A[\s,:*—–-]*)"
    rf"\s*{_OPENED}[-−]?(?:\d|\\[a-zA-Z]|[a-z]\b\s*[=^+]|[¼-¾])",
    re.IGNORECASE,
)
_REJECTS = re.compile(  # another: we rejected 40, as it is too big; the post said 40, which is a typo
    rf"\b(?:(?i:{phrases('rejecting')})|{phrases('others')} {phrases('claiming')})\s[^.!?\n]*\d[^.!?\n]*$"
)
_WONDERS = re.compile(rf"\b{phrases('wondering')}\b[^.!?;\n]*$", re.IGNORECASE)  # if it should be 40
_VALUE = re.compile(r"[\d$\\]")  # another
_CONFIRMED = pattern("confirmed")  # after all: yes, that is correct
_NUMBER_IS_WRONG = re.compile(  # 12 is wrong
    r"(-?\d[\d.,/]*|\}|\$)(?= (?:is|was|seems|looks|must be|can't be|cannot be)(?: \w+)? " + phrases("wrong") + ")",
    _FLAGS,
)


def taken_back(following: str, content: str = "") -> re.Match[str] | None:
    """Return the last of the words, before another value, with which what follows a statement takes it back.

    None if it does not, or confirms it after all.

    Args:
        following: the text after the statement; its first `WINDOW` characters are looked at.
        content: what was stated: a number that is called wrong must be in it.
    """
    near = following[:WINDOW]
    first = _first_sign(near, content)
    if first is None or _CONFIRMED.search(following, first.end(), first.end() + 300):
        return None
    return _last_sign(near, first)


def _first_sign(near: str, content: str) -> re.Match[str] | None:
    """Return the first words that call `content` wrong, or turn to something that is computed or said."""
    numbers = (number for number in _NUMBER_IS_WRONG.finditer(near) if number[1] in content)
    others = [mistake.end() for mistake in _OF_OTHERS.finditer(near)]
    called = (
        called
        for called in _CALLED_WRONG.finditer(near)
        if called.end() not in others and not _REJECTS.search(near, 0, called.start())
    )
    turns = (turn for turn in _TURN.finditer(near) if _GIVES.search(near[turn.end() : turn.end() + 300]))
    turns = (turn for turn in turns if not _WONDERS.search(near, 0, turn.start()))
    candidates = [sign for sign in (next(called, None) or next(numbers, None), next(turns, None)) if sign]
    return min(candidates, key=lambda sign: sign.start(), default=None)


def mistakes_of_others(sentence: str) -> bool:
    """Return whether a sentence calls wrong what it says itself."""
    return _OF_OTHERS.search(sentence) is not None


def _last_sign(text: str, first: re.Match[str]) -> re.Match[str]:
    """Return the last sign of several before another value: sorry, I made a mistake: it should be."""
    signs = (sign for kind in (_CALLED_WRONG, _TURN) for sign in kind.finditer(text, first.end()))
    following = (sign for sign in signs if not _VALUE.search(text, first.end(), sign.start()))
    return max([first, *following], key=lambda sign: sign.end())


def end_of_first(statement: str) -> int | None:
    """Return where, within a statement, its first answer ends, if it is taken back there (`12, no, 15`; `12 is wrong`)."""
    wrong = _NUMBER_IS_WRONG.search(statement)
    if wrong:
        return wrong.end()
    turn = _TURN.search(statement) or _CALLED_WRONG.search(statement)
    return turn.start() if turn else None
