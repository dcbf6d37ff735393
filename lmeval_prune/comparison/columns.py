"""What is shown of a variant: each column once, for Markdown, CSV, JSON and the page; costs and their Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lmeval_prune.comparison.tables import Row
from lmeval_prune.reporting.documents import p_value, signed, significant
from lmeval_prune.reporting.statistics import pareto


def level(row: Row, value: float) -> str:
    """Format a mean, in per cent for shares."""
    return f"{100 * value:.1f}" if row.unit == "points" else significant(value)


def change(row: Row, value: float | None) -> str:
    """Format a difference, in points for shares and in per cent for perplexities; empty for None."""
    if value is None:
        return ""
    if row.unit == "value":
        return significant(value, 3, sign=True)
    return signed(100 * value) + ("%" if row.unit == "perplexity" else "")


@dataclass(frozen=True)
class Column:
    """A column of test results, or without `text` of what is measured of answers."""

    key: str  # field of a `Row`, or name in `Row.measured`; `{key}_se` is its standard error, if it has one
    title: str
    legend: str = ""  # what it means; empty: not shown in a comparison
    digits: int = 0  # how a measured value is written
    factor: float = 1
    text: Callable[[Row], str] | None = None  # the cell
    interval: Callable[[Row], str] = lambda _: ""  # what the page shows below it

    def measured(self, values: Mapping[str, float | None]) -> str:
        """Format a measured value with its standard error if it is known; empty without a value."""
        known = [x for x in (values.get(self.key), values.get(f"{self.key}_se")) if x is not None]
        return " ± ".join(f"{self.factor * x:.{self.digits}f}" for x in known)


TESTED = (
    Column(
        "mean",
        "mean",
        "in per cent where the metric is a share between 0 and 1; of perplexities weighted by tokens, words or "
        "bytes as in lm-eval",
        text=lambda row: level(row, row.mean),
        interval=lambda row: f"{level(row, row.low)} … {level(row, row.high)}",
    ),
    Column(
        "difference",
        "difference",
        "variant minus baseline, of shares in percentage points, of perplexities relative, in per cent; with its "
        "95% interval over questions, not corrected for several tests, which contains 0 unless p is below 0.05",
        text=lambda row: change(row, row.difference),
        interval=lambda row: " … ".join(
            filter(None, (change(row, x) for x in (row.difference_low, row.difference_high)))
        ),
    ),
    Column(
        "better",
        "+ / −",
        "number of questions on which the variant is better, or the baseline",
        text=lambda row: "" if row.better is None else f"{row.better} / {row.worse}",
    ),
    Column(
        "p",
        "p",
        "exact McNemar test for right and wrong answers, otherwise a test by random sign flips of the questions",
        text=lambda row: p_value(row.p),
    ),
    Column(
        "p_holm",
        "p Holm",
        "corrected by Holm's method for {tests}; bold or coloured below 0.05",
        text=lambda row: p_value(row.p_holm),
    ),
    Column(
        "detectable",
        "detectable",
        "the smallest difference that is significant after this correction with a power of 0.8, if the share of "
        "differing questions is that of this sample; if they are too few for this power, even with all in favour of"
        " one variant, the smallest sufficient number is assumed. It is a bound for planning: a single result below"
        " it can be significant. none: no difference would be significant",
        text=lambda row: change(row, row.detectable).lstrip("+") or ("none" if row.better is not None else ""),
    ),
)
MARGIN = Column(
    "p_margin",
    "p margin",
    "of the hypothesis that the variant loses the margin or more, by Tango's score test, not corrected for several "
    "tests: below 0.05 it loses less",
    4,
)
# Fields of the summaries in `distance.py`, and the lengths of answers.
MEASURED = (
    MARGIN,
    Column(
        "mean_kld",
        "mean KLD",
        "KL divergence of next-token distributions from the same model without interventions, on its greedy "
        "answers, in nats",
        3,
    ),
    Column("median_kld", "median KLD", digits=3),
    Column("kld_99", "99% KLD", digits=2),
    Column("max_kld", "maximum KLD", digits=2),
    Column("same_top", "same top p (%)", "tokens before which both find the same token most probable", 1, 100),
    Column("rms_delta_p", "RMS Δp (%)", digits=1, factor=100),
    Column(
        "same_answers",
        "same answers (%)",
        "questions with the same answer as the baseline, letter by letter, or the same likeliest choice; of several"
        " seeds the mean over pairs of answers, in the baseline's row of its own seeds with each other; beside a "
        "mean KLD, greedy answers that are those of the model without interventions",
        1,
        100,
    ),
    Column("first_difference", "first difference", "median number of the first token that differs"),
    Column(
        "choice_kld",
        "KLD of choices",
        "KL divergence of the probabilities of the choices (their likelihoods, normalised) from the baseline's, in "
        "nats",
        4,
    ),
    Column("mean_tokens", "tokens", "mean length of the run's answers"),
    Column("cut_off", "cut off (%)", "answers that max_gen_toks ended", 0, 100),
)


# ---------------------------------------------------------------------- costs


class Cost(NamedTuple):
    """A measured cost of a variant."""

    label: str
    less_is_better: bool = True
    timed: bool = False  # varies from run to run


COSTS = {
    "parameters": Cost("parameters"),
    "flops_per_token": Cost("FLOPs per token"),
    "decode_tokens_per_second": Cost("tokens per second, decoding", less_is_better=False, timed=True),
    "prefill_tokens_per_second": Cost("tokens per second, prefill", less_is_better=False, timed=True),
    "cache_bytes_per_token": Cost("bytes of cache per token"),
    "weights_bytes": Cost("bytes of weights"),
}


def cost_range(costs: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return the lowest and the highest measured value of a cost; NaN if unknown."""
    if COSTS[key].timed:
        low, high = costs.get("ranges", {}).get(key, (np.nan, np.nan))
        return low, high
    value = costs.get(key)
    return (np.nan if value is None else value,) * 2


def pareto_fronts(costs: Mapping[str, Mapping[str, Any]], gains: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the variants on the Pareto front of each cost in which variants differ, by key of `COSTS`.

    Speeds of several devices, or numbers of threads, have no front. Gains are means by variant; larger is better.
    """
    fronts = {}
    for key, cost in COSTS.items():
        ranges = np.array([cost_range(costs[name], key) for name in gains], dtype=float)
        known = ranges[~np.isnan(ranges).any(1)]
        machines = {(own.get("device"), own.get("threads")) for own in map(costs.__getitem__, gains) if key in own}
        if not (cost.timed and len(machines) > 1) and (known != known[:1]).any():
            front = pareto(ranges if cost.less_is_better else -ranges[:, ::-1], np.array(list(gains.values())))
            fronts[key] = [name for name, is_on in zip(gains, front, strict=True) if is_on]
    return fronts
