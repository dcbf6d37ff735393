"""Distances of a variant's answers from the baseline's or the dense model's: what accuracy does not show."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from lmeval_prune.comparison.columns import MEASURED
from lmeval_prune.reporting.documents import markdown
from lmeval_prune.reporting.statistics import clustered_means

COLUMNS = ("kld", "same_top", "delta_p", "log_ratio")  # of a token, see `tokens.py`
QUANTILES = {"median_kld": 0.5, "kld_90": 0.9, "kld_95": 0.95, "kld_99": 0.99, "kld_99_9": 0.999, "max_kld": 1.0}
Summary = dict[str, float | None]


@np.errstate(all="ignore")  # a divergence may be infinite
def summarize_tokens(tokens: np.ndarray, documents: Sequence[Hashable]) -> Summary:
    """Summarise distances of tokens.

    Args:
        tokens: `COLUMNS` of each token, (tokens, columns).
        documents: document of each token.

    Returns:
        Means with their standard errors (`…_se`; None for a single document), quantiles, and the numbers of tokens and
        documents. Shares and probabilities are between 0 and 1. What is infinite or undefined is None.
    """
    kld, same_top, delta_p, log_ratio = tokens.T
    means, errors = clustered_means(np.stack([kld, same_top, delta_p, delta_p**2, log_ratio], 1), documents)
    rms, ratio = np.sqrt(means[3]), np.exp(means[4])
    estimates = {
        "mean_kld": (means[0], errors[0]),
        "same_top": (means[1], errors[1]),
        "mean_delta_p": (means[2], errors[2]),
        "rms_delta_p": (rms, errors[3] / (2 * rms) if rms else errors[3]),
        "ppl_ratio": (1 / ratio, errors[4] / ratio),
    }
    quantiles = {name: np.quantile(kld, share) for name, share in QUANTILES.items()}
    return {"documents": len(set(documents)), "tokens": len(tokens), **_with_errors(estimates), **_plain(quantiles)}


def summarize_texts(texts: Sequence[Any]) -> Summary:
    """Summarise the `COLUMNS` of the tokens of texts, a tensor for each; each is a document."""
    return summarize_tokens(
        np.concatenate([rows.numpy() for rows in texts]), [number for number, rows in enumerate(texts) for _ in rows]
    )


def summarize(texts: pd.DataFrame) -> Summary:
    """Summarise the texts of a variant, see `Variant.texts`."""
    documents = list(zip(texts["task"], texts["doc_id"], strict=True))
    tokens = np.stack([np.concatenate(texts[name].to_list()) for name in COLUMNS], 1).astype(float)
    repeated = [document for document, kld in zip(documents, texts["kld"], strict=True) for _ in kld]
    return summarize_tokens(tokens, repeated) | (summarize_answers(texts) if "answer_tokens" in texts else {})


def summarize_answers(texts: pd.DataFrame) -> Summary:
    """Summarise the greedy answers of a variant.

    Returns:
        `same_answers`: share of answers that equal the dense model's; `first_difference`: median number of the first
        token that differs (1 is the first token of an answer), of the answers that differ; `mean_tokens`; `cut_off`:
        share of answers that `max_gen_toks` ended. Standard errors (`…_se`) as in `summarize_tokens`.
    """
    first_differences = texts["first_difference"].dropna()
    columns = pd.DataFrame({"mean_tokens": texts["answer_tokens"], "cut_off": texts["cut_off"]})
    columns.insert(0, "same_answers", texts["first_difference"].isna())
    documents = list(zip(texts["task"], texts["doc_id"], strict=True))
    means, errors = clustered_means(columns.to_numpy(float), documents)
    estimates = dict(zip(columns, zip(means, errors, strict=True), strict=True))
    median = {"first_difference": first_differences.median() if len(first_differences) else np.nan}
    return {"answers": len(texts), **_with_errors(estimates), **_plain(median)}


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the number of the first token that differs, from 1; None for equal sequences."""
    differs = (number for number, (a, b) in enumerate(zip(tokens, others, strict=False), 1) if a != b)
    return next(differs, None if len(tokens) == len(others) else min(len(tokens), len(others)) + 1)


def _with_errors(estimates: Mapping[str, tuple[Any, Any]]) -> Summary:
    return _plain(
        {key: x for name, pair in estimates.items() for key, x in zip((name, f"{name}_se"), pair, strict=True)}
    )


def _plain(values: Mapping[str, Any]) -> Summary:
    return {name: float(value) if np.isfinite(value) else None for name, value in values.items()}


def table(rows: Mapping[str, Summary]) -> str:
    frame = pd.DataFrame([{"variant": name, **cells(row)} for name, row in rows.items()]).fillna("")
    columns = [column.title for column in MEASURED if column.title in frame]
    return markdown(frame[["variant", *columns]], ["variant"])


def cells(row: Summary) -> dict[str, str]:
    """Format a summary, by column; estimates with their standard errors if these are known."""
    return {column.title: column.measured(row) for column in MEASURED if column.key in row}


# ---------------------------------------------------------------------- answers of runs


class Response(NamedTuple):
    """What a run answered to a question, once."""

    prompt: str  # digest
    answer: str  # digest of the generated text, or of the likeliest choice; empty without either
    log_likelihoods: tuple[float, ...]  # of the choices, or of a text; empty for generated answers


Responses = Sequence[Sequence[Response]]  # to each question, one of each results file


def answer_distances(base: Responses, compared: Responses | None = None) -> dict[str, float | None]:
    """Return the distances of a run's answers from the baseline's, see `columns.MEASURED`.

    `same_answers` is the share of equal texts, or of equal likeliest choices. `choice_kld` is the mean KL divergence of
    the probabilities of the choices, in nats. `…_se` are their standard errors over questions. What the answers do not
    have (choices, a text) is left out. A question that was answered several times (seeds) counts with the mean over
    pairs of an answer of each run, of those pairs that answer the same prompt if there are any.

    Args:
        base: responses of the baseline.
        compared: responses of the run to the same questions; None compares the baseline's own with each other.
    """
    same, divergences, has_answers = [], [], False
    for first, second in zip(base, compared or base, strict=True):
        pairs = list(combinations(first, 2) if compared is None else product(first, second))
        pairs = [pair for pair in pairs if pair[0].prompt == pair[1].prompt] or pairs
        if not pairs:
            return {}
        has_answers |= any(one.answer or other.answer for one, other in pairs)
        same.append(float(np.mean([one.answer == other.answer for one, other in pairs])))
        own = [_divergence(one.log_likelihoods, other.log_likelihoods) for one, other in pairs]
        divergences += [float(np.mean(own))] if None not in own else []  # type: ignore[arg-type]
    return {
        **(_mean("same_answers", same) if has_answers else {}),
        **(_mean("choice_kld", divergences) if len(divergences) == len(same) > 0 else {}),
    }


def _mean(name: str, values: list[float]) -> dict[str, float | None]:
    """Return the mean and its standard error; the error of a single value is None."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: float(np.mean(values)), f"{name}_se": error}


def _divergence(first: tuple[float, ...], second: tuple[float, ...]) -> float | None:
    """Return Σ p (log p − log q) over the choices, p and q their normalised likelihoods; None without choices."""
    if not len(first) == len(second) > 1:
        return None
    p, q = log_softmax(np.array([first, second]), axis=1)
    return float(np.exp(p) @ (p - q)) if np.isfinite(p).all() and np.isfinite(q).all() else None
