"""Texts that are meant to break a scorer: long runs, deep nesting, half-open marks, odd characters, of any size."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

CHARACTERS = " \t\n\r\v\f\0\\$(){}[]<>#*_`~|&%^=+-/:;,.!?'\"@0９٣a\u00a0\u2009\u200b\u202e\u2067\ufeffé中。，：½∞−😀\ud800\udfff\u0301"
PIECES = [
    r"\boxed{", r"\boxed", r"\boxed{}", r"\boxed{1}", r"\boxed{1", "answer is ", "The answer is ", "The answer is 12. ", "answer is 12, no, ", "Answer: ", "**Answer:** ", "Answer:\n", "####", "#### ", "#### 12\n", "答案是", "答：", "答案是12，",
    "<think>", "</think>", "<think></think>", "<answer>", "<answer></answer>", '{"answer": ', '{"answer": 12}', "[ANSWER]", r"\text{", r"\text{A, ", r"\frac{", r"\frac{1}{", r"\frac12", r"\sqrt{", r"\left(", r"\begin{pmatrix}", r"1 & 2 \\ ",
    "$$", "$1$", "$1", r"\(", r"\[ 1 \]", r"\$", "1 ", "1,", "1,000", "1.", "1/", "1/2", "1-", "1+", "1 + ", "1=", "x = 1, ", "= 12 ", "1 = 1\n", "12\n", "\n\n", "\n- 1", "- ", "| 1 ", "| --- ", "1. a\n", "12 or ", "not ", "No wait, ",
    "Wait, 12. ", "12 (", "(12) ", "half of ", "because ", "12 because ", "12 apples ", "apples ", "ab", "a ", "1a", "١٢", "1\u202f000", "1 000 ", "10^", "e5", "9**", "!", "12!", "2(", ")(", "n0+", "3*(", "5:45 ", "yes ", "3; ",
    "```\n", "```python\n", "~~~\n", "**", "**12** ", "\\\\", "\\ ", "~", "^\\circ", "\\%", "负", "万", "1又1/", "分之", "\u202e12", "\r\n", "&nbsp;", "<b>", "</b>", "\ud83d", "\x00\x01",
]  # fmt: skip
BEFORE_AND_AFTER = [
    (r"\boxed{12", "x}"), (r"\boxed{", "}"), (r"\boxed{", "12}"), ("The answer is ", "12."), ("The answer is 12", "."), ("The answer is 12 ", "apples"), ("#### ", "12"), ("#### 12", ""), ("Answer:", "12"), ("答案是", "12。"), ("$", "12$"),
    ("<answer>", "12</answer>"), ("<think>", "</think>12"), ("12", ""), ("", "12"), ("12 = ", "= 12"), ("12\nSolution: so", ""),
]  # fmt: skip
NESTS = [
    (r"\boxed{", "}"), ("{", "}"), ("(", ")"), ("[", "]"), (r"\frac{1}{", "}"), (r"\text{", "}"), (r"\sqrt{", "}"), (r"\left(", r"\right)"), ("<answer>", "</answer>"), ("<think>", "</think>"), ("**", "**"), ("$", "$"), ("-(", ")"), ("1+(", ")"),
    (r"\begin{pmatrix}", r"\end{pmatrix}"), ("「", "」"), ("（", "）"), ('{"answer": ', "}"), (r"x^{", "}"), ("2(", ")"),
]  # fmt: skip


def texts() -> dict[str, Callable[[int], str]]:
    """Names each hostile text; called with a size, it is about so many characters long."""
    builders: dict[str, Callable[[int], str]] = {}
    for piece in [*CHARACTERS, *PIECES]:
        builders[f"run of {piece!a}"] = partial(_between, "", "", piece)
    for start, end in BEFORE_AND_AFTER:
        for filler in (" ", "\n", "\u00a0", "1", ",", "-", "\\", "{", "very ", "\\,", "**", "```\n", "~~~\n"):
            builders[f"{start!a} and {end!a} with {filler!a} between"] = partial(_between, start, end, filler)
    for start, end in NESTS:
        builders[f"{start!a} nested"] = partial(_nested, start, end)
        builders[f"{start!a} nested in a box"] = partial(_nested, start, end, box=True)
        builders[f"{start!a} nested, half of it closed"] = partial(_nested, start, end, closed=0.5)
    for seed in range(4):
        builders[f"random pieces {seed}"] = partial(_mixed, PIECES, seed)
        builders[f"random characters {seed}"] = partial(_mixed, CHARACTERS, seed)
    builders["random code points"] = lambda size: "".join(map(chr, random.Random(5).choices(range(0x110000), k=size)))
    return builders


def _between(start: str, end: str, filler: str, size: int) -> str:
    return start + filler * (size // len(filler)) + end


def _nested(start: str, end: str, size: int, box: bool = False, closed: float = 1.0) -> str:
    depth = size // (len(start) + len(end))
    text = start * depth + "12" + end * int(depth * closed)
    return rf"\boxed{{{text}}}" if box else text


def _mixed(pieces: Sequence[str], seed: int, size: int) -> str:
    mean = sum(map(len, pieces)) / len(pieces)
    return "".join(random.Random(seed).choices(pieces, k=int(size / mean)))


def superlinear(work: Callable[[str], object], text: Callable[[int], str], sizes: tuple[int, ...]) -> str:
    """Says between which sizes the processor time of `work` grows far faster than the size, or nothing.

    Linear work takes twice as long for twice the size, quadratic work four times as long: a step is bad above three
    times, 50 milliseconds and a fifth of a microsecond a character together, and is then measured again.
    """
    before = _seconds(work, text(sizes[0]))
    for small, large in pairwise(sizes):
        long_text = text(large)
        after = _seconds(work, long_text)
        if after > _bound(before, small, large):
            before, after = _seconds(work, text(small)), min(after, _seconds(work, long_text))
            if after > _bound(before, small, large):
                return f"{before:.2f} s for {small} characters, {after:.2f} s for {large}"
        before = after
    return ""


def _bound(before: float, small: int, large: int) -> float:
    return 1.5 * (large / small) * before + 0.05 + 2e-7 * large


def _seconds(work: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    work(text)
    return time.process_time() - start
