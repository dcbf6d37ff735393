"""What the demo shows of its results: a summary in Markdown, and a page with figures."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup

from lmeval_prune.artefacts import write_text
from lmeval_prune.demo.run import drawn_name, ranked_name
from lmeval_prune.reporting.documents import render
from lmeval_prune.reporting.maps import draw_scores
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.tables import markdown

_HERE = Path(__file__).parent
QUANTITIES = {  # name in the table, title of the figure, and how a value is written
    "KL, nats": ("KL divergence from the dense model, nats", "{x:.2f}"),
    "same top": ("Same top token as the dense model", "{x:.0%}"),
    "solved": ("Problems solved", "{x:.0%}"),
}


def curves(results: Mapping[str, Any]) -> pd.DataFrame:
    """Return each quantity by share of pruned heads, `least` important or `random` ones, in long form.

    `low` and `high` are a standard error from the value, or the lowest and the highest draw.
    """

    def measured(quantity: str, name: str) -> tuple[float, float]:
        if quantity == "solved":
            right = np.array(results["accuracy"][name], float)
            return float(right.mean()), float(right.std(ddof=1) / len(right) ** 0.5)
        key = "mean_kld" if quantity == "KL, nats" else "same_top"
        distance = results["distances"].get(name, {"mean_kld": 0.0, "same_top": 1.0})  # else of the dense model
        return distance[key], distance.get(f"{key}_se") or 0.0

    rows = []
    for quantity in QUANTITIES:
        for share in (0.0, *results["shares"]):
            least, *drawn = [ranked_name(share), *(drawn_name(share, draw) for draw in range(results["draws"]))]
            value, error = measured(quantity, least if share else "dense")
            draws = [measured(quantity, name if share else "dense")[0] for name in drawn]
            rows.append((quantity, "least", share, value, value - error, value + error))
            rows.append((quantity, "random", share, sum(draws) / len(draws), min(draws), max(draws)))
    return pd.DataFrame(rows, columns=["quantity", "heads", "share", "value", "low", "high"])


def summary(results: Mapping[str, Any]) -> str:
    """Return the tables and sentences that the command prints."""
    columns: dict[str, list[str]] = {"heads pruned": [f"{share:.0%}" for share in (0.0, *results["shares"])]}
    for (quantity, heads), line in curves(results).groupby(["quantity", "heads"], sort=False):
        columns[f"{quantity}, {heads}"] = [QUANTITIES[quantity][1].format(x=value) for value in line["value"]]
    cut = results["cut"]
    (before, after), (dense, smaller) = cut["parameters"], cut["tokens_per_second"]
    solved, still = (100 * sum(right) / len(right) for right in (results["accuracy"]["dense"], cut["accuracy"]))
    rows = [
        ("parameters, million", f"{before / 1e6:.1f}", f"{after / 1e6:.1f}", f"{after / before - 1:+.0%}"),
        ("speed, tokens a second", f"{dense:.0f}", f"{smaller:.0f}", f"{smaller / dense - 1:+.0%}"),
        ("problems solved, %", f"{solved:.0f}", f"{still:.0f}", f"{still - solved:+.0f} points"),
    ]
    tables = {"pruned": pd.DataFrame(columns), "cut": pd.DataFrame(rows, columns=["", "before", "after", "change"])}
    texts = {name: markdown(table, [""]) for name, table in tables.items()}
    return render(_HERE / "summary.md.jinja", results=results, **texts)


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Write the page, one self-contained HTML file without scripts, and its figures beside it."""
    points, titles = curves(results), {}
    for (quantity, (title, form)), stem in zip(QUANTITIES.items(), ("kl", "same_top", "solved"), strict=True):
        canvas, axes = figure(4, 3, title)
        lines = points[points["quantity"] == quantity].groupby("heads")
        for (heads, line), colour, style in zip(lines, COLOURS, ("-", "--"), strict=False):
            axes.plot(line["share"], line["value"], color=colour, ls=style, marker="o", label=heads)
            axes.fill_between(line["share"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.yaxis.set_major_formatter(form)
        axes.set_xlabel("heads pruned")
        axes.legend(frameon=False)
        save(canvas, path.with_name(stem))
        titles[title] = path.with_name(f"{stem}.svg")
    scores = {key.partition(".")[2]: values for key, values in results["scores"].items()}
    draw_scores(scores, f"norm + entropy, {results['model']}", path.with_name("heads"))
    page = render(
        _HERE / "page.html.jinja",
        results=results,
        figures={title: _data(file) for title, file in titles.items()},
        heads=_data(path.with_name("heads.svg")),
        least=results["masks"][ranked_name(results["shares"][0])],
        summary=Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(summary(results))),
    )
    write_text(path, page)


def _data(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
