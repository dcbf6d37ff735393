"""When two answers are the same: as text, as expressions, and in mathematics; for numbers see `numbers_equal`.

Mathematical forms that differ are different answers (a tuple is no set, `\\ge 9` no number); of equal ones the parts are
compared, and what is left, single expressions, by math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from lmeval_prune.scoring.expressions import evaluate, has_operator, is_division, reduced_fraction
from lmeval_prune.scoring.forms import Form, assigned, form_of
from lmeval_prune.scoring.normalisation import MAX_LENGTH, clean, line, phrases, plain, spelled, words
from lmeval_prune.scoring.numbers import same_number
from lmeval_prune.scoring.prose import equals_number, number_of, numbers_equal, readings
from lmeval_prune.scoring.verifier import Verdict, shared

_TIME = re.compile(r"0?(\d{1,2}(?::\d\d)+)\s*(?:([ap])\.?\s?m\.?)?")  # 05:45 p.m.
# (c), c, option c, c. helium
_LETTER = re.compile(r"(?:(?:option|choice|answer) )?(?:\(([a-k])\)|([a-k])(?=$|[.:)] ))")
_SEPARATOR = re.compile(r"\s*;\s*|,\s+(?:and\s+)?|,(?!\d{3})|\s+and\s+")  # of several: 3; 4, or 3, 4 and 5


def same_text(answer: str, gold: str) -> bool:
    """Return whether answers are equal as numbers, item by item where a semicolon or comma separates several, as times, or as words."""
    if len(answer) > MAX_LENGTH:
        return False
    golds = re.split(r"\s*;\s*", gold.strip("; "))
    if len(golds) == 1:
        return _same_item(answer, gold)
    answer = plain(clean(answer)).strip()
    items = _SEPARATOR.split(answer)
    return len(items) == len(golds) and all(map(_same_item, items, golds))


def _same_item(answer: str, gold: str) -> bool:
    if numbers_equal(answer, gold):
        return True
    words, gold_words = _words(answer), _words(gold)
    time, gold_time = _TIME.fullmatch(words), _TIME.fullmatch(gold_words)
    if time and gold_time:  # 5:45 p.m. is 5:45 and 17:45, but not 5:45 a.m.
        (clock, half), (gold_clock, gold_half) = _halved(time, gold_time), _halved(gold_time, time)
        return clock == gold_clock and (half or gold_half) == (gold_half or half)
    if letter := _letter(gold_words):
        return _letter(words) == letter
    if re.fullmatch(r"\d+:\d+", gold_words):  # a ratio
        words = re.sub(r"(?<=\d)\s*(?:\bto\b|:)\s*(?=\d)", ":", words)
    return words == gold_words and bool(words)


def _letter(words: str) -> str:
    """Return the letter of a choice with which words begin; empty without one, or with several."""
    match = _LETTER.match(words)
    if not match or re.search(r"\b(?:or|and)\b|\([a-k]\)", words[match.end() :]):
        return ""
    return match[1] or match[2]


def _halved(time: re.Match[str], other: re.Match[str]) -> tuple[str, str | None]:
    """Return a time and its half of the day; beside one with its half, a time of 24 hours in the hours of 12."""
    hour, _, minutes = str(time[1]).partition(":")
    if time[2] or not other[2] or 1 <= int(hour) <= 12:
        return time[1], time[2]
    return f"{int(hour) % 12 or 12}:{minutes}", "p" if int(hour) > 12 else "a"


def _words(text: str) -> str:
    words = re.sub(r"\s+", " ", plain(clean(text))).strip(" .$").lower()
    words = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|,(?!\d)", "", words)
    words = re.sub(rf"^(\d+) (?:of )?({phrases('months')})$", r"\2 \1", words, flags=re.IGNORECASE)
    return re.sub(r"^(?:the|an?|they are|it is|it's|on) (?=\S)", "", words)


def expression_is_right(text: str, target: str, gold: str, names: Mapping[str, Fraction]) -> bool:
    """Return whether the value of an expression is the target, and it is computed.

    Where the gold expression computes something, a number alone is not an expression; nor is the target written as a
    fraction, but where the gold expression is one division.

    Args:
        text: an expression.
        target: its value, as text.
        gold: an expression that has this value; empty if none is known.
        names: values of names such as `n0`.
    """
    value, targets = evaluate(text, names), readings(target)
    copied = reduced_fraction(text) in targets and not is_division(gold)
    computes = not has_operator(gold) or (has_operator(text) and not copied)
    return value is not None and computes and equals_number(value, target)


def same_expression(answer: str, other: str) -> bool:
    """Return whether two expressions have one value, or (with names) are the same text."""
    values = evaluate(answer), evaluate(other)
    keys = [re.sub(r"\s", "", plain(clean(text))) for text in (answer, other)]
    return values[0] == values[1] and (values[0] is not None or keys[0] == keys[1])


# --------------------------------------------------------------------------- mathematics: forms

MAX_PARTS = 40  # of a list that is compared in any order; longer ones are compared in order
Leaf = Callable[[str, str], bool]  # compares single expressions
_NEUTRAL = words("neutral")
_ORDERED = frozenset(["tuple", "matrix", "determinant"])
_EMPTY = re.compile(r"\\emptyset|(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)(?: exists?)?")
_CHOICE = re.compile(r"[a-k]")
MAX_CHOICE_WORDS = 6  # of an answer that is a choice's letter


def compare(answer: Form | str, gold: Form | str, leaf: Leaf) -> bool:
    """Return whether two forms are the same."""
    if isinstance(answer, str) and isinstance(gold, str):
        return leaf(answer, gold)
    a, g = (form if isinstance(form, Form) else Form("single", (form,)) for form in (answer, gold))
    if r"\langle" in (*a.details, *g.details):  # a vector is written as a tuple or a column, too
        a, g = (_as_tuple(form) for form in (a, g))
    if g.kind == "tuple" and g.details == ("(", ")"):
        a = _coordinates(a)
    for kind, same in _COMPARISONS.items():
        if kind in (a.kind, g.kind):
            return same(a, g, leaf)
    are_alike = (a.kind, a.details, len(a.parts)) == (g.kind, g.details, len(g.parts))
    return are_alike and _all_same(a.parts, g.parts, leaf)


def _all_same(answers: Iterable[Form | str], golds: Iterable[Form | str], leaf: Leaf) -> bool:
    """Compare in order; all, so that what a computer algebra system has to compare is known at once."""
    results = [compare(answer, gold, leaf) for answer, gold in zip(answers, golds, strict=True)]
    return all(results)


def _as_tuple(form: Form) -> Form:
    is_vector = form.details[:1] in ((r"\langle",), ("(",)) or (form.kind == "matrix" and "1" in form.details)
    return Form("tuple", form.parts, ("(", ")")) if is_vector else form


def _coordinates(form: Form) -> Form:
    """Return the values of several letters, x = 3 and y = 4, as a tuple in the order of the letters."""
    members = dict(_members(form)) if form.kind == "list" else {}
    is_complete = len(members) == len(_members(form)) > 1 and all(re.fullmatch("[a-z]", name) for name in members)
    return Form("tuple", tuple(members[name] for name in sorted(members)), ("(", ")")) if is_complete else form


def _same_ratios(answer: Form, gold: Form, leaf: Leaf) -> bool:
    """Compare ratios and times; 5:45 is 5:45 pm."""
    same_half = answer.details == gold.details or ("",) in (answer.details, gold.details)
    return (answer.kind, answer.parts) == (gold.kind, gold.parts) and same_half


def _same_equations(answer: Form, gold: Form, leaf: Leaf) -> bool:
    """Compare the values of assignments, unless their names say different things: x = 5 is not y = 5."""
    pair, gold_pair = assigned(answer), assigned(gold)
    if pair is None and gold.kind != "equation":  # an identity
        return _all_same([form_of(str(side)) for side in answer.parts], [gold] * len(answer.parts), leaf)
    if pair is None or gold_pair is None:
        equations = ("=".join(map(str, form.parts)) for form in (answer, gold))
        return leaf(*equations) if answer.kind == gold.kind else False
    (name, value), (gold_name, gold_value) = pair, gold_pair
    if _kind_of_name(name) == _kind_of_name(gold_name) and _bare(name) != _bare(gold_name):
        return False
    return compare(value, gold_value, leaf)


def _bare(name: str) -> str:
    return re.sub(r"[\s{}]", "", name)


def _kind_of_name(name: str) -> str:
    """Return what names have in common that say different things: x and y, f(x) and g(x), AB and CD."""
    kind = re.sub(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![A-Za-z])", r"\\f", _bare(name))
    return re.sub(r"(?<!\\)[A-Za-z]", "a", re.sub(r"\d+", "1", kind))


def _same_lists(answer: Form, gold: Form, leaf: Leaf) -> bool:
    """Compare in any order, or by names: a = 1, b = 2. A set is a list, but no tuple; one thing is a list of one."""
    if {answer.kind, gold.kind} & _ORDERED and "union" not in (*answer.details, *gold.details):
        return False
    members, left = _members(answer), _members(gold)
    if len(members) != len(left):
        return False
    named, gold_named = dict(members), dict(left)
    if named.keys() == gold_named.keys() and len(named) == len(left) > 1:
        return _all_same(named.values(), [gold_named[name] for name in named], leaf)
    if len(members) > MAX_PARTS:
        return _all_same([part for _, part in members], [part for _, part in left], leaf)
    for _, part in members:
        results = [compare(part, other, leaf) for _, other in left]
        if True not in results:
            return False
        left.pop(results.index(True))
    return True


def _members(form: Form) -> list[tuple[str, Form | str]]:
    """Return the members of a list with their names (`x = 1, x = 2`), lists in it (of ±) taken apart."""
    members: list[tuple[str, Form | str]] = []
    for part in form.parts if form.kind in ("list", "single") else (form,):
        name, value = assigned(part) or ("", part)
        values = _members(value) if isinstance(value, Form) and value.kind == "list" else [("", value)]
        members += [(_bare(name), member) for _, member in values]
    return members


def _same_bases(answer: Form, gold: Form, leaf: Leaf) -> bool:
    """Compare digits and bases; where the answer says no base, it is the gold one's, and 10 where the gold one says none."""
    digits = [re.sub(r"[\s,]", "", _text_of(form)).upper() for form in (answer, gold)]
    base, gold_base = ((form.details or ("",))[0] if form.kind == "base" else "" for form in (answer, gold))
    return digits[0] == digits[1] and (not base or base == (gold_base or "10"))


def _text_of(form: Form) -> str:
    return str(form.parts[0]) if form.kind in ("single", "words", "base") else ""


def _same_words(answer: Form, gold: Form, leaf: Leaf) -> bool:
    """Compare but for words that say nothing; of a choice, its letter, unless another is named: (C) 12."""
    said, golds = _separated(answer), _separated(gold)
    if all(_EMPTY.fullmatch(" ".join(each)) for each in (said, golds)):
        return True
    meaning = [word for word in said if word in golds or word not in _NEUTRAL]
    if len(golds) == 1 and _CHOICE.fullmatch(golds[0]):
        others = [word for word in said if _CHOICE.fullmatch(word) and word not in ("a", *golds)]
        names_one = not others and not {"or", "and"} & set(said)
        return names_one and meaning[:1] == golds and len(said) <= MAX_CHOICE_WORDS
    return bool(golds) and meaning == golds


def _separated(form: Form) -> list[str]:
    words_of = re.sub(r"\\text|[{}]", " ", _text_of(form)).lower().split()
    return [word for word in (word.strip(".:-()") for word in words_of) if word]


_COMPARISONS: dict[str, Callable[[Form, Form, Leaf], bool]] = {
    "ratio": _same_ratios,
    "equation": _same_equations,
    "list": _same_lists,
    "base": _same_bases,
    "words": _same_words,
}  # the first that either side is of

# --------------------------------------------------------------------------- verdicts

_KNOWN: dict[tuple[str, str], Verdict] = {}  # of pairs of expressions, what workers have found
_TWICE = re.compile(r"(.{1,40}?) ?\((?:or)? ?([^()]{1,40})\)")  # 49/5 (9.8)
_RADIANS = re.compile(r"\\text\s*\{\s*rad(?:ians?)?\s*\}")
_DEGREES = re.compile(r"(\d[\d./]*)\s*(?:°|\\text\s*\{\s*degrees?\s*\})")  # 45°, 22.5 degrees
# and products, which are not compared: 2 x, 2 \cdot x
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)|\\(?:cdot|times)(?=\s*[^\s\\\d])")
# Or a command, or a unit of two letters at the end.
_VARIABLE = re.compile(
    rf"\\[A-Za-z]+|(?<![A-Za-z])(?=[a-z]{{2}}){phrases('unit_symbols', 'latex')}(?=[\^\d\W]*$)|([A-Za-z])"
)
_FUNCTIONS = words("latex_functions")
_NO_EXPRESSION = re.compile(  # what math-verify cannot read
    r"[\u4e00-\u9fff&;→⇒\x01'′″\"]|\.\.\.|(?<![\\A-Za-z])[A-Za-z]{4,}|\\begin|\\\\"
    r"|\\(?:ldots|cdots|text)(?![A-Za-z])"
)


def verdicts(pairs: Iterable[tuple[str, str]], retry: bool = False) -> list[Verdict]:
    """Compare (answer, gold) pairs; what needs math-verify over all workers at once and only once.

    With `retry`, what timed out or crashed before is compared again.
    """
    for pair in [pair for pair, verdict in _KNOWN.items() if retry and verdict in ("timeout", "crash")]:
        del _KNOWN[pair]
    pairs = list(pairs)
    forms = {text: form_of(text) for pair in pairs for text in pair}
    while True:
        needed: dict[tuple[str, str], None] = {}
        results = [_verdict(answer, gold, forms, needed) for answer, gold in pairs]
        if not needed:
            return results
        _KNOWN.update(zip(needed, shared().verify_many([(gold, answer) for answer, gold in needed]), strict=True))


def _verdict(answer: str, gold: str, forms: dict[str, Form | str], needed: dict[tuple[str, str], None]) -> Verdict:
    """Return a verdict by what is known; put what is not, and taken for different, into `needed`."""
    if not answer.strip() or len(answer) > MAX_LENGTH:
        return "different"
    failed: list[Verdict] = []

    def leaf(expression: str, gold_expression: str) -> bool:
        easy = easy_verdict(expression, gold_expression)
        if easy is not None:
            return easy
        verdict = _KNOWN.get((expression, gold_expression))
        if verdict is None:
            needed[expression, gold_expression] = None
        elif verdict in ("timeout", "crash"):
            failed.append(verdict)
        return verdict == "equal"

    if "pi" in gold:
        answer = _DEGREES.sub(r"\\frac{(\1) \\cdot \\pi}{180}", spelled(_RADIANS.sub("", answer)))
    twice = _TWICE.fullmatch(line(answer)) if "(" in answer else None
    if twice and (number := number_of(twice[1])) and (again := number_of(twice[2])):
        answer = str(twice[1]) if same_number(number, again, exact=True) else answer
    if (same := _same_numbers(answer, gold)) is None:
        same = compare(forms[answer] if answer in forms else form_of(answer), forms[gold], leaf)
    return "equal" if same else failed[0] if failed else "different"


def _same_numbers(answer: str, gold: str) -> bool | None:
    """Return whether two numbers are equal; None if either is none, or both are equations."""
    number, golden = number_of(answer), number_of(gold)
    if not (number and golden) or ("=" in answer and "=" in gold):
        return None
    return same_number(number, golden, exact=True)


def easy_verdict(answer: str, gold: str) -> bool | None:
    """Return what can be said of two expressions without a worker."""
    keys = [_SPACES.sub("", text) for text in (answer, gold)]
    if keys[0] == keys[1]:
        return bool(keys[0])
    if (same := _same_numbers(answer, gold)) is not None:
        return same
    if _variables(answer) != _variables(gold):  # math-verify drops what it takes for a unit: \sqrt{5} h
        return False
    is_known = _FUNCTIONS.issuperset(re.findall(r"\\([A-Za-z]+)", answer + gold))
    unread = any(_NO_EXPRESSION.search(text) or not text.strip() for text in (answer, gold))
    return None if is_known and not unread else False


def _variables(expression: str) -> set[str]:
    return set(_VARIABLE.findall(expression)) - {"", "e", "i"}


def same_mathematics(answer: str, other: str) -> bool:
    """Return whether two answers are the same, `other` as the gold one."""
    return verdicts([(answer, other)])[0] == "equal"
