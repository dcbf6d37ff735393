"""Summaries of distances from the dense model, with standard errors over documents, and their table."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.reporting.statistics import clustered_means
from lmeval_prune.reporting.tables import markdown

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


# ---------------------------------------------------------------------- table


# name, column, digits, factor, and whether it has a standard error
_COLUMNS = (
    ("mean_kld", "mean KLD", 3, 1, True),
    ("median_kld", "median KLD", 3, 1, False),
    ("kld_99", "99% KLD", 2, 1, False),
    ("max_kld", "maximum KLD", 2, 1, False),
    ("same_top", "same top p (%)", 1, 100, True),
    ("rms_delta_p", "RMS Δp (%)", 1, 100, True),
    ("same_answers", "same answers (%)", 0, 100, True),
    ("first_difference", "first difference", 0, 1, False),
    ("mean_tokens", "tokens", 0, 1, True),
    ("cut_off", "cut off (%)", 0, 100, False),
)


def table(rows: Mapping[str, Summary]) -> str:
    """Return a Markdown table with a row for each variant, of the columns that a variant has."""
    frame = pd.DataFrame([{"variant": name, **cells(row)} for name, row in rows.items()]).fillna("")
    columns = [column for _, column, *_ in _COLUMNS if column in frame]
    return markdown(frame[["variant", *columns]], ["variant"])


def cells(row: Summary) -> dict[str, str]:
    """Format a summary, by column; estimates with their standard errors if these are known."""
    texts = {}
    for name, column, digits, factor, has_error in _COLUMNS:
        if name in row:
            numbers = [row[name], row[f"{name}_se"] if has_error else None]
            known = [number for number in numbers if number is not None]
            texts[column] = " ± ".join(f"{factor * number:.{digits}f}" for number in known)
    return texts
