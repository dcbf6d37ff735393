"""Guesses without a model: expressions over the numbers in a problem's text, in a fixed order.

They show how much of pass@N is a variety of operators: many problems have two numbers and one operator. The order was
written down without any outcome, and is the same for all problems.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from lmeval_prune.tasks import data
from lmeval_prune.tasks.results import equation

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_NUMBER = re.compile(rf"\d+(?:,\d{{3}})*(?:\.\d+)?|\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text, in digits or words up to twelve, in their order."""
    numbers = (match.replace(",", "").lower() for match in _NUMBER.findall(text))
    return [str(WORDS.index(number)) if number in WORDS else number for number in numbers]


def expressions(text: str, count: int) -> list[str]:
    """Return the first guesses at a problem; fewer if its text has few numbers.

    Sum of all numbers; of each pair, in their order: difference, product, quotient and sum, the larger number first;
    product of all.
    """
    numbers = numbers_in(text)
    guesses = ["+".join(numbers)] if len(numbers) > 1 else []
    pairs = [sorted(pair, key=float, reverse=True) for pair in combinations(numbers, 2)]
    for operator in "-*/+":
        guesses += [operator.join(pair) for pair in pairs]
    guesses += ["/".join(reversed(pair)) for pair in pairs] + (["*".join(numbers)] if len(numbers) > 2 else [])
    return list(dict.fromkeys(guesses))[:count]


def passes(source: Any, texts: Sequence[Sequence[str]]) -> list[float]:
    """Return the share of test questions that one of the first N guesses solves, for N = 1 …; empty for other tasks.

    Args:
        source: the race.
        texts: the test questions of each fold.
    """
    if source.plan.task != "prune_asdiv_a_equation":
        return []
    splits = [source.splits(number)[0] for number in range(len(source.plan.folds))]
    documents = {row["question"]: row for split in splits for row in data.load("asdiv_a", split)}
    solved = np.zeros((sum(map(len, texts)), source.plan.most))
    for i, text in enumerate(text for part in texts for text in part):
        document = {**documents[text], "target": str(documents[text]["target"])}
        for k, guess in enumerate(expressions(text, source.plan.most)):
            if equation(document, [f"\\boxed{{{guess}}}"])["exact_match"]:
                solved[i, k:] = 1
                break
    return [round(float(share), 6) for share in solved.mean(0)]
