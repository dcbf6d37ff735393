r"""Reading answers in words: yes or no, a time, a ratio, a date, several numbers, or words.

The last sentence that concludes something decides, and of it the main clause: without what is aside, a condition or a reason.
It states what it says of its subject ('the winner is Kim') or, where it compares or ranks ('Kim is older than Lee'), its subject.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction

from lmeval_prune.scoring.normalisation import line, pattern, phrases
from lmeval_prune.scoring.prose import number_of, numbers_in, read_number
from lmeval_prune.scoring.statements import DENIED, MAX_PHRASE, sentences

MAX_WORDS = 4  # of a bare answer in words
# Words of prose, in a formula too, but no names of functions.
PROSE = re.compile(rf"(?<![\\A-Za-z])(?!{phrases('mathematical_words')}\b)[A-Za-z]{{2,}}|[\u4e00-\u9fff]")
# What begins a reason after an answer.
REASON = re.compile(rf"(?i)[,;,；]?\s{phrases('reasons_after')}\b|[,;，；]?{phrases('reasons_after', 'zh')}")
GIVES_UP = pattern("given_up")  # there is not enough information
_OFFERS = re.compile(rf"(?i)\b{phrases('offers')}")  # let me know …
_CHECKS = re.compile(rf"(?i)^\W*(?:{phrases('checks')}|{phrases('checks', 'zh')})")
COMPUTED = re.compile(phrases("computed"))  # 9 apples + 3 = 12
_BRACKETED = re.compile(r"[\s*_]*\((?=(?:[^\s()]+ ){3})[^():=]*\)?\W*")  # a remark
_CONCLUDES = pattern("concluding")
_UNSAID, _NEGATED = pattern("unsaid"), re.compile(r"\b(?:not|never|\w+n't)\b(?! (?:only|just))", re.IGNORECASE)
_EXPLAINED = re.compile(  # an explanation after a name
    r"(?i)\s?\((?!or\b)[^()]{5,}\)$|\s[—–-]\s.*$|,\s(?:who|whose|he|she|it|they)\b.*$"
    r"|,(?=[^,]{0,3}[\u4e00-\u9fff][^,]{3})(?![^,]*和).*$"
)
_LABELLED = re.compile(r"\W*(?:\d{1,2}[.)]\s+)?[^\d:=]{1,60}[:=]\s*(\S.{0,30})")  # - Dogs: 20
_BULLET = re.compile(r"\s*[-*•]\s+([^\d=]{1,60}\d[\d./,]*(?<=\d)[^\d=+×÷*/]*)")  # - Anna painted 1/2 of it
_YES_OR_NO = re.compile(  # at the beginning, or after a label or comma
    rf"(?i)(?:|.*[:,，：]\s*)(?:{phrases('conclusions')}\b,?\s+|{phrases('concluding', 'zh')}[,，]?)?"
    rf"(?:(?P<yes>{phrases('yes')}|{phrases('yes', 'zh')})|{phrases('no')}|{phrases('no', 'zh')})"
    r"(?=\s*(?:[^\w\s?]|$)|\s(?:she|he|it|they|we|you|i|the|there)\b)"
)
_TURNED = re.compile(rf"(?i)\W+{phrases('stopping')}(?!\w)")
# 5:45 pm; or a ratio: 3 to 4
_TIME = re.compile(r"(?i)\d+(?:\s*:\s*\d+)+(?:\s?[ap]\.?\s?m\b\.?)?|\d+(?: to \d+)+(?!\d| (?:hours?|minutes?|days?)\b)")
_DATE = re.compile(  # a month and day, or a day of the week
    rf"(?i){phrases('months')}(?: \d{{1,2}}(?:st|nd|rd|th)?)?\b|{phrases('weekdays')}\b"
    rf"|\d{{1,2}}(?:st|nd|rd|th)? (?:of )?{phrases('months')}\b"
)
_CHOICE = re.compile(r"(?i)\([A-J]\)|\b(?:option|choice) [A-J]\b|\b[A-J]\b(?=\W*$)")  # (B), option B
# Before a time or date: it is one end of a range or ruled out; it is said of something else.
_RANGE = re.compile(rf"(?i)\b(?:{phrases('ranges')}|\w+n't)\b")
_GOVERNED = re.compile(rf"(?i)\b{phrases('governing_times')}\b[^,\d]{{0,30}}$")  # after 3:45
# Between two numbers: they are operands, not members of a list.
_NO_LIST = re.compile(rf"\b{phrases('joining_numbers')}\b|[-+×*/÷–<>]|(?<![A-Za-z] )=")
_CONCLUSION = re.compile(  # all up to the words after which the conclusion stands
    rf"(?i)^.*(?:(?:^|[,;:—–]\s)(?:{phrases('conclusions')}|but|that is|which (?:means(?: that)?|(?:simplifies|reduces) to))\b,?\s|\s(?:i\.e\.,?|→|[-=]>)\s|[,;]\s(?:it is|it's)\s(?!\S+ (?:who|that)\b)|\sso\s(?=[A-Z]|the\b))"
)
# if he is late, …
_CONDITION = re.compile(rf"(?i)^(?:{phrases('conditions')}|{phrases('concessions')}|\w+ing)\b[^,]*,\s+")
_ASIDE = re.compile(  # what a clause can do without: brackets, and what follows a comma, `because` or `to`
    rf"(?i)\s*\([^()]{{2,}}\)|(?:[,;]|\s[—–-])\s.*$|\s{phrases('explained_by')}\b.*$|(?<=[\dm.])\sto\s(?!\d).*$"
)
_COPULA = re.compile(  # the subject, and what is said of it
    r"(?i)(.*?)(?:(?<=\bit)'s|(?<=\bthat)'s|\s(?:is|are|was|were|(?:will|would|must) be|becomes?))\s(.*)$"
)
_CLEFT = re.compile(  # it's Sara who picked more; 跑得更快的是 Tom
    r"(?i)it(?:'s| is| was) ((?-i:[A-Z])[\w'-]*(?: (?-i:[A-Z])[\w'-]*){0,2}),? (?:who|that|which)\b(.*)"
    r"|[^不没非否如若还]*[\u4e00-\u9fff]是\s*([A-Z][A-Za-z '-]*)\W*$"
)
# on Monday
_PREPOSITION = re.compile(r"(?i)^(?:(?:now|then|exactly|called|facing|going|on|in|at|to|due)\s)+")
_RANKED = re.compile(rf"(?i)\b{phrases('ranks')}\b")  # is older than Lee
_SUPPOSES = pattern("supposing")  # we ask whether it is Sara
_PRONOUN = re.compile(r"(?i)(?:she|he|it|you|they|we|i|there)\b")  # she
_ARTICLES = frozenset(["the", "a", "an"])


def concluding_sentences(text: str) -> Iterator[str]:
    """Yield the sentences at the end of a text, the last first; checks, offers and mere remarks after all others."""

    def is_beside(sentence: str) -> bool:
        remark = _BRACKETED.fullmatch(sentence) and not _CONCLUDES.search(sentence)
        offers = _OFFERS.search(sentence) and (sentence.endswith("?") or not COMPUTED.search(sentence))
        return bool(remark or offers or _CHECKS.search(sentence))

    parts = sentences(text)[::-1]
    yield from itertools.filterfalse(is_beside, parts)
    yield from filter(is_beside, parts)


def main_clause(sentence: str) -> str:
    """Return what a sentence concludes, without what stands aside, conditions and reasons."""
    return _ASIDE.sub("", _concluded(sentence)).rstrip(" .!。")


def _concluded(sentence: str) -> str:
    return _CONDITION.sub("", _CONCLUSION.sub("", sentence))


def stated_words(sentence: str, length: int) -> str:
    """Return the words that a sentence states: where it ranks its subject, `length` words of that; else what it says of it."""
    cleft = _CLEFT.match(_concluded(sentence))
    if cleft and cleft[1]:
        return str(cleft[1]) if _RANKED.search(cleft[2]) else ""
    if cleft:
        return str(cleft[3])
    clause = main_clause(sentence)
    copula = _COPULA.match(clause)
    if not copula and not _RANKED.search(clause):
        copula = _COPULA.match(sentence.rstrip(" .!。"))
    subject, predicate = copula.groups() if copula else (clause, clause)
    ranked, pronoun = _RANKED.match(predicate) if copula else _RANKED.search(predicate), _PRONOUN.match(subject)
    if copula and _SUPPOSES.search(subject):
        return ""
    if predicate.startswith("neither "):
        return "neither"
    if pronoun and not copula and not ranked:
        return " ".join(predicate.split()[-length:])
    if not ranked:
        return _PREPOSITION.sub("", predicate)
    first, than, _ = predicate.partition(" than ")
    if than and pronoun:  # more red than blue
        return " ".join(first.split()[-length:])
    words = _without_article(re.sub(r"^\w+ing (?=the\b|an?\b)", "", subject, flags=re.IGNORECASE).split())
    goes_on = words[length : length + 1] in (["and"], ["or"], ["of"])
    return clause if goes_on or " and " in first else " ".join(words[:length])


def _without_article(words: list[str]) -> list[str]:
    return words[1:] if len(words) > 1 and words[0].lower() in _ARTICLES else words


class TextReader:
    """Reads yes or no, a time, ratio or date, several numbers (`3; 4`), or words; unmarked, from the last sentence.

    Args:
        gold: the gold answer, which says which of them.
    """

    def __init__(self, gold: str) -> None:
        self.gold = gold
        self._is_yes_or_no = gold.strip().lower() in ("yes", "no")
        self._pattern = next((kind for kind in (_TIME, _DATE, _CHOICE) if kind.fullmatch(gold.strip())), None)
        self._is_words = not (self._is_yes_or_no or self._pattern or ";" in gold)

    def read(self, content: str, how: str) -> str | None:
        """Return that part of the statement; the whole of it, if it has none."""
        text = REASON.split(line(content).strip(" *_").rstrip(" .。!"), maxsplit=1)[0]
        if self._is_words and not _EXPLAINED.search(self.gold):
            text = _EXPLAINED.sub("", text, count=1)
        return self._part(text) or text or None

    def is_bare(self, content: str) -> bool:
        return bool(self._part(content)) or (self._is_words and len(PROSE.findall(content)) <= MAX_WORDS)

    def read_end(self, text: str) -> str | None:
        """Return what the last sentence states; of several numbers, the last line."""
        lines = [row for row in text.splitlines() if row.strip()]
        if self._is_yes_or_no or ";" in self.gold:
            last = lines[-1][-MAX_PHRASE:] if lines else ""
            concluded = next(concluding_sentences(last), "")
            ends = [self._labelled(lines), last, concluded] if ";" in self.gold else concluding_sentences(last)
            return next((part for end in ends if (part := self._part(line(end).strip(" *_")))), None)
        sentence = next(concluding_sentences(text), "")
        words = line(sentence[-MAX_PHRASE:]).strip(" *_")
        clause = main_clause(words)
        if not words or words.endswith("?") or DENIED.search(clause) or GIVES_UP.search(words):
            return None
        if not self._is_words:
            return self._part(clause)
        return None if _NEGATED.search(clause) else stated_words(words, len(_without_article(self.gold.split())))

    def _labelled(self, lines: list[str]) -> str:
        """Return the values of the last lines, if as many as the gold answer has begin with a label, and no more."""
        count = self.gold.count(";") + 1
        rows = [line(row[:MAX_PHRASE]) for row in lines[-count - 1 :]]
        labelled = [_LABELLED.fullmatch(row.strip(" *_")) for row in rows]
        values = [label[1] if label else "" for label in labelled] if any(labelled) else list(map(_bulleted, rows))
        stated = list(filter(None, values))
        return "; ".join(stated) if len(stated) == count and values[-count:] == stated else ""

    def _part(self, text: str) -> str | None:
        if self._is_yes_or_no:
            answer = _YES_OR_NO.match(text)
            turn = answer and _TURNED.match(text, answer.end())  # no, wait: …, so yes
            later = self._part(text[turn.end() :]) if turn else None
            return later or (("yes" if answer["yes"] else "no") if answer else None)
        if self._pattern:
            return _last_free(self._pattern, text)
        golds, numbers = [number_of(part) for part in self.gold.split(";")], numbers_in(text)
        if len(golds) < 2 or not all(golds) or len(numbers) != len(golds) or _UNSAID.search(text):
            return None
        between = re.split("|".join(map(re.escape, numbers)), text)[1:-1]
        return None if any(map(_NO_LIST.search, between)) else "; ".join(numbers)


def _bulleted(row: str) -> str:
    """Return the number that a bullet says of something; nothing if it denies or compares."""
    bullet = _BULLET.fullmatch(row)
    reading = read_number(bullet[1]) if bullet else None
    doubted = bullet and any(doubt.search(bullet[1]) for doubt in (DENIED, _NEGATED, _RANKED))
    return reading[0] if reading and not doubted else ""


def _last_free(kind: re.Pattern[str], text: str) -> str | None:
    """Return the last time or date of a text that nothing governs (`after 3:45`); None of alternatives and ranges."""
    matches = list(kind.finditer(text))
    if " or " in text:  # 3:4, or 6:8
        alternatives = [match.group() for match in matches]
        ratios = [re.fullmatch(r"(\d+)\s*:\s*0*([1-9]\d*)", words) for words in alternatives]
        values = {Fraction(int(x[1]), int(x[2])) if x else y for x, y in zip(ratios, alternatives, strict=True)}
        return alternatives[0] if len(alternatives) > 1 and len(values) == 1 else None
    starts = [0, *(match.end() for match in matches)]
    before = [text[start : match.start()] for start, match in zip(starts, matches, strict=False)]
    if any(map(_RANGE.search, before)) or any(gap.strip() in ("to", "-", "–", "and", ",") for gap in before[1:]):
        return None
    free = (match.group() for match, gap in zip(matches[::-1], before[::-1], strict=True) if not _GOVERNED.search(gap))
    return next(free, None)
