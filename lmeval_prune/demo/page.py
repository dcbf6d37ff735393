"""The demo's page: one self-contained HTML file without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import write_text
from lmeval_prune.demo.figures import Curve, Point, costs, curves, decoding
from lmeval_prune.demo.run import DRAWS, ranked_name
from lmeval_prune.reporting.documents import render

WIDTH, HEIGHT = 250, 160  # of a plot, without its margins, with which it fits a phone unscaled
LEFT, BOTTOM = 46, 42
CELL = 16  # of the map of heads


def write_page(results: Mapping[str, Any], path: Path) -> None:
    """Write the page of the demo's results."""
    template = Path(__file__).with_name("page.html.jinja")
    page = render(
        template,
        results=results,
        plots=[_plot(curve, results["shares"]) for curve in curves(results)],
        map=_head_map(results),
        costs=costs(results),
        decoding=decoding(results),
        draws=DRAWS,
    )
    write_text(path, page)


# --------------------------------------------------------------------------- curves


def _plot(curve: Curve, shares: list[float]) -> dict[str, Any]:
    """Return the coordinates of a plot."""
    points = [*curve.ranked.values(), *curve.random.values()]
    top = 1.0 if curve.percent else 1.1 * max(point.high for point in points)
    last = max(shares)

    def x(share: float) -> float:
        return round(LEFT + WIDTH * share / last, 1)

    def y(value: float) -> float:
        return round(10 + HEIGHT * (1 - value / top), 1)

    def line(kind: Mapping[float, Point]) -> dict[str, Any]:
        low = [(x(share), y(max(0.0, point.low))) for share, point in kind.items()]
        high = [(x(share), y(min(top, point.high))) for share, point in kind.items()]
        band = " ".join(f"{a},{b}" for a, b in [*high, *reversed(low)])
        marks = [
            {"x": x(share), "y": y(point.value), "label": f"{share:.0%} of the heads: {_number(curve, point.value)}"}
            for share, point in kind.items()
        ]
        return {"band": band, "line": " ".join(f"{m['x']},{m['y']}" for m in marks), "marks": marks}

    ticks = [top * n / 4 for n in range(5)] if curve.percent else _round_ticks(top)
    return {
        "title": curve.title,
        "width": LEFT + WIDTH + 14,
        "height": HEIGHT + BOTTOM + 14,
        "left": LEFT,
        "right": LEFT + WIDTH,
        "bottom": 10 + HEIGHT,
        "x_ticks": [{"x": x(share), "label": f"{share:.0%}"} for share in (0.0, *shares)],
        "y_ticks": [{"y": y(value), "label": _number(curve, value)} for value in ticks],
        "lines": {"ranked": line(curve.ranked), "random": line(curve.random)},
    }


def _round_ticks(top: float) -> list[float]:
    """Return at most five round numbers from 0 up to the top."""
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 1e9) if top / s <= 5)
    return [n * step for n in range(int(top / step) + 1)]


def _number(curve: Curve, value: float) -> str:
    return f"{value:.0%}" if curve.percent else f"{value:.2f}"


# --------------------------------------------------------------------------- map of heads


def _head_map(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of the map, layers from left to right: colour by rank, and the share at which a head goes."""
    labels = [key.partition(".")[2] for key in results["scores"]]
    layers = list(results["scores"].values())
    ranked = sorted((score, i, j) for i, heads in enumerate(layers) for j, score in enumerate(heads))
    pruned = {share: set(results["masks"][ranked_name(share)]) for share in results["shares"]}
    cells = []
    for rank, (score, layer, head) in enumerate(ranked):
        name = f"{labels[layer]}H{head}"
        first = next((share for share, heads in pruned.items() if name in heads), None)
        when = f"pruned from {first:.0%} on" if first else "not pruned here"
        label = f"{name}: norm + entropy {score:.2f}, rank {rank + 1} of {len(ranked)}; {when}"
        cells.append(
            {
                "x": LEFT + layer * CELL,
                "y": 6 + head * CELL,
                "opacity": round(0.08 + 0.92 * rank / max(1, len(ranked) - 1), 3),
                "first": first is not None,
                "label": label,
            }
        )
    heads = max(map(len, layers))
    return {
        "cells": cells,
        "size": CELL - 2,
        "width": LEFT + len(layers) * CELL + 10,
        "height": heads * CELL + 30,
        "layers": [{"x": LEFT + n * CELL + CELL / 2 - 1, "label": labels[n]} for n in range(0, len(layers), 5)],
        "heads": [{"y": 6 + n * CELL + CELL - 4, "label": f"head {n}"} for n in range(0, heads, 4)],
        "bottom": heads * CELL + 22,
    }
