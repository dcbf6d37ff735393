"""The demo's figures as curves and tables: distance and accuracy by share of pruned heads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.demo.run import DRAWS, drawn_name, ranked_name
from lmeval_prune.reporting.statistics import clustered_means
from lmeval_prune.reporting.tables import markdown


@dataclass(frozen=True)
class Point:
    """A measured value and the ends of its band."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A quantity by share of pruned heads: the least important ones, and random ones.

    Attributes:
        title: name of the quantity, with its unit.
        short: the same for a column of a table.
        ranked: by share; the band is a standard error over texts or problems.
        random: by share, the mean of the draws; the band reaches from the lowest draw to the highest.
        percent: whether values are shares.
    """

    title: str
    short: str
    ranked: Mapping[float, Point]
    random: Mapping[float, Point]
    percent: bool


def curves(results: Mapping[str, Any]) -> list[Curve]:
    """Return KL divergence, agreement of the top token, and accuracy."""
    distances, right = results["distances"], results["accuracy"]

    def distance(name: str, key: str) -> tuple[float, float]:
        return distances[name][key], distances[name][f"{key}_se"] or 0.0

    def accuracy(name: str) -> tuple[float, float]:
        means, errors = clustered_means(np.array(right[name], float)[:, None], range(len(right[name])))
        return float(means[0]), float(errors[0])

    kld, same_top = (partial(distance, key=key) for key in ("mean_kld", "same_top"))
    return [
        _curve(results, ("KL divergence from the dense model, nats", "KL, nats"), kld, (0.0, 0.0), False),
        _curve(results, ("same top token as the dense model", "same top"), same_top, (1.0, 0.0), True),
        _curve(results, ("problems solved", "solved"), accuracy, accuracy("dense"), True),
    ]


def _curve(
    results: Mapping[str, Any],
    titles: tuple[str, str],
    measured: Callable[[str], tuple[float, float]],
    dense: tuple[float, float],
    percent: bool,
) -> Curve:
    start = Point(dense[0], dense[0] - dense[1], dense[0] + dense[1])
    ranked, random = {0.0: start}, {0.0: start}
    for share in results["shares"]:
        value, error = measured(ranked_name(share))
        ranked[share] = Point(value, value - error, value + error)
        draws = [measured(drawn_name(share, draw))[0] for draw in range(DRAWS)]
        random[share] = Point(sum(draws) / len(draws), min(draws), max(draws))
    return Curve(*titles, ranked, random, percent)


def summary(results: Mapping[str, Any]) -> str:
    """Return the tables and sentences that the command prints."""
    shown = curves(results)
    rows = []
    for share in (0.0, *results["shares"]):
        row = {"heads pruned": f"{share:.0%}"}
        for curve in shown:
            for kind, points in (("least", curve.ranked), ("random", curve.random)):
                value = points[share].value
                row[f"{curve.short}, {kind}"] = f"{value:.0%}" if curve.percent else f"{value:.2f}"
        rows.append(row)
    cut = pd.DataFrame(costs(results), columns=["", "before", "after", "change"])
    return f"""{results["model"]}: the least important heads pruned, or random ones
{markdown(pd.DataFrame(rows), [])}
Least: the least important heads; random: mean of {DRAWS} draws. KL and same top: from the dense model,
{results["texts"]} sentences. Solved: {results["problems"]} problems of {results["task"]}.

{decoding(results)}

{results["cut"]["removed"]:.0%} of heads and channels cut out, not trained since
{markdown(cut, [""])}"""


def decoding(results: Mapping[str, Any]) -> str:
    """Return how long both ways of decoding took, and whether their answers are equal."""
    answers = results["answers"]
    slow, fast, texts = answers["generate_seconds"], answers["engine_seconds"], answers["texts"]
    equal = "all texts are" if answers["identical"] == texts else f"{answers['identical']} of {texts} texts are"
    return (
        f"{texts} answers of at most {answers['new_tokens']} tokens, {answers['prompts']} prompts under "
        f"{answers['masks']} masks: {slow:.1f} s by transformers' generate, one mask after another; {fast:.1f} s by "
        f"the decoding engine, all masks together: {slow / fast:.1f} × as fast, and {equal} equal."
    )


def costs(results: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return rows about the cut model: name with its unit, before the cut, after it, and change."""
    cut, dense = results["cut"], results["accuracy"]["dense"]
    (before, after), (slow, fast), (size, smaller) = cut["parameters"], cut["tokens_per_second"], cut["bytes"]
    least, gain, most = (f"{f(cut['speed_ratios']) - 1:+.0%}" for f in (min, statistics.median, max))
    solved, still = (100 * sum(right) / len(right) for right in (dense, cut["accuracy"]))
    return [
        ("parameters, million", f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", f"{after / before - 1:+.0%}"),
        ("weights in float32, MB", f"{size / 1e6:.0f}", f"{smaller / 1e6:.0f}", f"{smaller / size - 1:+.0%}"),
        ("speed, tokens a second (rounds)", f"{slow:.0f}", f"{fast:.0f}", f"{gain} ({least} to {most})"),
        ("problems solved, %", f"{solved:.0f}", f"{still:.0f}", f"{still - solved:+.0f} points"),
    ]
