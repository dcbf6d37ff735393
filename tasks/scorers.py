"""What scores responses: functions for `process_results`, and a filter, metrics and aggregations for any lm-eval task.

The functions compare a response with the `target` of its document. Each returns `exact_match` and `strict_match`, the
answer (`extracted`), where it was found (`how`), and if that was the end of the response, without a mark (`unmarked`).
`exact_match` accepts such an answer; `strict_match` requires a marked one (a box, `####`, or 'the answer is').

```yaml
filter_list:
  - {name: answer, filter: [{function: prune_answer}, {function: take_first}]}
metric_list:
  - {metric: prune_equal, aggregation: mean, higher_is_better: true}
```

The filter reads the answers, the metrics compare them with the gold answer. Both take `kind`: `number` (the default),
`text` or `mathematics`. With `repeats: N` and without `take_first`, `prune_equal` is the share of right answers,
`prune_pass` gives pass@k and `prune_maj` maj@N.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import jinja2
from lm_eval.api.filter import Filter
from lm_eval.api.metrics import mean
from lm_eval.api.registry import register_filter

from lmeval_prune.errors import InputError, print_input_errors
from lmeval_prune.scoring import (
    MARKED,
    ExpressionReader,
    Extraction,
    MathematicsReader,
    NumberReader,
    Reader,
    expression_is_right,
    extract,
    numbers_equal,
    readings,
    require_math_verify,
    same_expression,
    same_mathematics,
    same_text,
    text_reader,
    verdicts,
)
from lmeval_prune.tasks.tries import majority, pass_scores, pass_unbiased

MAX_CHECKED = 100  # documents whose gold answers are looked at before a run
logger = logging.getLogger(__name__)
Document = dict[str, Any]
Scores = dict[str, Any]
Answers = str | Sequence[str]  # one answer, or those of several repeats


@dataclass(frozen=True)
class Kind:
    """How answers of a kind are read and compared."""

    reader: Callable[[str], Reader]  # for a gold answer
    same: Callable[[str, str], bool]
    reads_gold: bool = True  # the reader depends on the gold answer


KINDS = {
    "number": Kind(lambda _: NumberReader(), numbers_equal, reads_gold=False),
    "text": Kind(text_reader, same_text),
    "mathematics": Kind(MathematicsReader, same_mathematics),
}


# --------------------------------------------------------------------------- functions for process_results


def _scored(extraction: Extraction, correct: bool) -> Scores:
    return {
        "exact_match": float(correct),
        "strict_match": float(correct and extraction.how in MARKED),
        "unmarked": float(extraction.how == "end"),
        "extracted": extraction.answer,
        "how": extraction.how,
    }


def number(doc: Document, results: Sequence[str]) -> Scores:
    """Score an answer that is one number."""
    (response,) = results
    extraction = extract(response, NumberReader())
    return _scored(extraction, numbers_equal(extraction.answer, doc["target"]))


def text_or_number(doc: Document, results: Sequence[str]) -> Scores:
    """Score an answer that is one or more numbers (`3; 4`), a time, a ratio or a word."""
    (response,) = results
    extraction = extract(response, text_reader(doc["target"]))
    return _scored(extraction, same_text(extraction.answer, doc["target"]))


@print_input_errors
def mathematics(doc: Document, results: Sequence[str]) -> Scores:
    """Score a MATH answer: of the same form as the gold answer, with parts equal as numbers or by math-verify."""
    (response,) = results
    extraction = extract(response, MathematicsReader(doc["target"]))
    verdict = verdicts([(extraction.answer, doc["target"])])[0]
    return _scored(extraction, verdict == "equal") | {"timeouts": float(verdict in ("timeout", "crash"))}


def equation(doc: Document, results: Sequence[str]) -> Scores:
    """Score an arithmetic expression; see `expression_is_right`."""
    (response,) = results
    extraction = extract(response, ExpressionReader())
    names = {name: Fraction(number) for name, number in (doc.get("names") or {}).items() if number}
    gold = doc.get("formula") or doc.get("equation") or ""
    return _scored(extraction, expression_is_right(extraction.answer, doc["target"], gold, names))


def ending(doc: Document, results: Sequence[str]) -> Scores:
    """Score the completion of a sentence: its first words, as many as the gold ending has."""
    (response,) = results
    words = re.findall(r"\w+", response)[: len(re.findall(r"\w+", doc["target"]))]
    extraction = Extraction(" ".join(words), "end" if words else "none")
    return _scored(extraction, same_text(extraction.answer, doc["target"]))


# By scoring function: how to compare two answers that it extracted.
EQUALITIES: dict[Callable[..., Scores], Callable[[str, str], bool]] = {
    number: numbers_equal,
    text_or_number: same_text,
    mathematics: same_mathematics,
    equation: same_expression,
    ending: same_text,
}


# --------------------------------------------------------------------------- filters


def _kind(name: str) -> Kind:
    if name == "mathematics":
        require_math_verify()
    return KINDS[name]


def gold_answer(text: Any, kind: Kind) -> str:
    """Return the gold answer in a document's target, which may be a solution that ends with `#### 18` or a box."""
    text = str(text)
    if "####" in text or r"\boxed" in text:
        return extract(text, kind.reader(text)).answer
    return text.strip()


class AnswerFilter(Filter):
    """Replaces each response by the answer in it; the answer is empty where none is found.

    Args:
        kind: a key of `KINDS`.
        gold: field of the document with the gold answer, or a template; needed by `text` and `mathematics`.
    """

    @print_input_errors
    def __init__(self, kind: str = "number", gold: str | None = None) -> None:
        self.kind, self.gold = _kind(kind), gold
        if self.kind.reads_gold and not gold:
            raise InputError(f"filter prune_answer with kind: {kind} needs gold: FIELD, where the gold answer is")

    @print_input_errors
    def apply(self, resps: Iterable[Answers], docs: Sequence[Document]) -> list[Answers]:
        """Read the answers in responses to each document, which are texts or lists of texts."""
        field = self.gold or ""
        template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(field) if "{" in field else None
        golds = [""] * len(docs)
        if self.kind.reads_gold:
            texts = (template.render(**doc) if template else doc[field] for doc in docs)
            golds = [gold_answer(text, self.kind) for text in texts]
        answers = _read(resps, map(self.kind.reader, golds))
        if self.kind is KINDS["mathematics"]:
            _compare_at_once(answers, golds)
        return answers


@register_filter("prune_verdicts")
class Verdicts(Filter):
    """Compares all answers of a task in one call, before `mathematics` scores each; returns the responses unchanged.

    Several responses to a question are also compared with each other, for `maj@N` and `distinct`.
    """

    @print_input_errors
    def apply(self, resps: Iterable[Answers], docs: Sequence[Document]) -> list[Answers]:
        resps, golds = list(resps), [doc["target"] for doc in docs]
        _compare_at_once(_read(resps, map(MathematicsReader, golds)), golds)
        return resps


def _read(resps: Iterable[Answers], readers: Iterable[Reader]) -> list[Answers]:
    return [
        extract(texts, reader).answer if isinstance(texts, str) else [extract(text, reader).answer for text in texts]
        for texts, reader in zip(resps, readers, strict=True)
    ]


def _compare_at_once(read: Sequence[Answers], golds: Sequence[str]) -> None:
    """Compare the answers to each question with the gold one and each other; the metrics then find the verdicts."""
    pairs: list[tuple[str, str]] = []
    for answers, gold in zip(read, golds, strict=True):
        distinct = dict.fromkeys(filter(None, [answers] if isinstance(answers, str) else answers))
        pairs += [(answer, other) for other, answer in itertools.combinations([gold, *distinct], 2)]
    verdicts(pairs, retry=True)


# --------------------------------------------------------------------------- metrics


def as_metric(function: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Make a metric for `metric_list` of a function of a document's gold answers, its responses and arguments."""

    @functools.wraps(function)
    @print_input_errors
    def compute(references: Sequence[Any], predictions: Sequence[Any], **arguments: Any) -> dict[str, float]:
        golds, responses = references[0] if isinstance(references[0], list) else references, predictions[0]
        return function(golds, [responses] if isinstance(responses, str) else list(responses), **arguments)

    return compute


def _right(golds: Sequence[Any], answers: Sequence[str], kind: str) -> list[bool]:
    answer_kind = _kind(kind)
    texts = [gold_answer(gold, answer_kind) for gold in golds]
    return [any(bool(answer) and answer_kind.same(answer, text) for text in texts) for answer in answers]


@as_metric
def equal(golds: Sequence[Any], answers: Sequence[str], kind: str = "number") -> dict[str, float]:
    return {"prune_equal": float(mean(_right(golds, answers, kind)))}


@as_metric
def pass_at_ks(golds: Sequence[Any], answers: Sequence[str], kind: str = "number") -> dict[str, float]:
    """Return `pass@k` and `pass@k_unbiased` of N answers, for k = 1, 2, 4, …, N."""
    right = _right(golds, answers, kind)
    return defaultdict(
        lambda: float(any(right)), pass_scores(right)
    )  # for several gold answers by the metric's own name


@as_metric
def majority_at_n(golds: Sequence[Any], answers: Sequence[str], kind: str = "number") -> dict[str, float]:
    """Return `maj@N` of N answers: whether the most frequent is right; and how many differ, as `distinct`."""
    right = _right(golds, answers, kind)
    winner, distinct = majority(answers, _kind(kind).same)
    score = float(winner is not None and right[winner])
    return defaultdict(lambda: score, {f"maj@{len(answers)}": score, "distinct": float(distinct)})


# --------------------------------------------------------------------------- aggregations


def mean_pass(items: Iterable[Sequence[bool]], k: int) -> float:
    """Return the mean of unbiased pass@k over questions, from a list for each that says which answers are right."""
    return float(mean([pass_unbiased(len(right), sum(map(bool, right)), k) for right in items]))


PASS_AT = {k: partial(mean_pass, k=k) for k in (1, 2, 4, 8, 16, 32, 64)}
pass_at_1, pass_at_2, pass_at_4, pass_at_8, pass_at_16, pass_at_32, pass_at_64 = PASS_AT.values()


# --------------------------------------------------------------------------- checks


def check_scorers(task: Any) -> None:
    """Refuse a loaded task in which no response could be right, as lm-eval would score it all the same.

    That is one whose filter reads another kind of answer than its metrics compare, or that compares numbers and whose
    first gold answers are none; where only some are none, a warning says so.
    """
    steps = [partial(step) for pipeline in getattr(task, "_filters", ()) for step in pipeline.filters]
    reads = {step.keywords.get("kind", "number") for step in steps if step.func is AnswerFilter}
    compares = {
        task._metric_fn_kwargs[name].get("kind", "number")
        for name, function in getattr(task, "_metric_fn_list", {}).items()
        if getattr(function, "__module__", "") == __name__
    }
    name = task.config.task
    if reads and not compares <= reads:
        raise InputError(
            f"task {name}: filter prune_answer reads kind: {' and '.join(sorted(reads))}, "
            f"metrics compare kind: {' and '.join(sorted(compares))}; give both one"
        )
    if "number" not in compares and task.get_config("process_results") not in (number, equation):
        return
    others, documents = [], [*itertools.islice(iter(task.eval_docs), MAX_CHECKED)]
    for document in documents:
        golds = task.doc_to_target(document) if "number" in compares else document.get("target")
        texts = [gold_answer(gold, KINDS["number"]) for gold in (golds if isinstance(golds, list) else [golds])]
        others += texts[:1] if not any(map(readings, texts)) else []
    if others:
        counts = f"task {name}: {len(others)} of the first {len(documents)} gold answers are no numbers ({others[0]!r})"
        if len(others) == len(documents):
            raise InputError(f"{counts}; compare them as text or mathematics")
        logger.warning("%s, so no response to them is right", counts)
