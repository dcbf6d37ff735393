"""The second paper's tables from rows of results, beside its own figures, with paired tests against the dense host.

A row is one model: of which kind, on which split, by which seed, and which questions it answers rightly. What was never
measured is left out; nothing is run here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.artefacts import write_text
from lmeval_prune.distillation import curves, paper
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.statistics import holm, sign_flip_test
from lmeval_prune.reporting.tables import csv, markdown

ALPHAS, LEVELS = tuple(paper.TABLE_3A), ("low", "medium", "high")
DENSE, OURS = "dense", "ours"


@dataclass(frozen=True)
class Variant:
    """One model of a kind, on all splits and seeds that it was measured on.

    Attributes:
        rows: its rows.
        dense: of each, the row of its dense host.
        differences: of each question, right minus right of the dense host, the mean over seeds.
        by_unit: of each split and seed, the mean of these differences.
    """

    rows: list[dict[str, Any]]
    dense: list[dict[str, Any]]
    differences: np.ndarray
    by_unit: np.ndarray

    @classmethod
    def of(cls, rows: list[dict[str, Any]], dense: dict[tuple[str, int], dict[str, Any]]) -> Variant | None:
        """Rows that have a dense host; None if there are none."""
        pairs = [(row, dense[_unit(row)]) for row in rows if _unit(row) in dense]
        if not pairs:
            return None
        units = [_right(row) - _right(other) for row, other in pairs]
        splits: dict[str, list[np.ndarray]] = {}
        for (row, _), unit in zip(pairs, units, strict=True):
            splits.setdefault(row["split"], []).append(unit)
        questions = np.concatenate([np.mean(seeds, axis=0) for seeds in splits.values()])
        return cls([row for row, _ in pairs], [row for _, row in pairs], questions, np.array([x.mean() for x in units]))

    @property
    def accuracy(self) -> float:
        """In %, the mean over splits and seeds."""
        return 100 * float(np.mean([row["accuracy"] for row in self.rows]))

    @property
    def difference(self) -> float:
        """To the dense host, in points: the mean over splits and seeds."""
        return 100 * float(self.by_unit.mean())

    def test(self) -> tuple[float, float]:
        """p of a paired test over questions, and of one over splits and seeds (NaN of a single one)."""
        over_questions = float(sign_flip_test(self.differences[:, None])[0])
        if len(self.by_unit) < 2:
            return over_questions, float("nan")
        return over_questions, float(sign_flip_test(self.by_unit[:, None])[0])

    def fewer(self, name: str) -> float:
        """By how many % a figure is smaller than the dense host's; NaN if it was not measured."""
        pairs = [(row.get(name), other.get(name)) for row, other in zip(self.rows, self.dense, strict=True)]
        known = [1 - mine / theirs for mine, theirs in pairs if mine and theirs]
        return 100 * float(np.mean(known)) if known else float("nan")

    def faster(self) -> float:
        """By how many % it is faster than the dense host that was timed beside it; NaN if it was not."""
        known = [row["seconds"]["dense"] / row["seconds"]["own"] - 1 for row in self.rows if row.get("seconds")]
        return 100 * float(np.mean(known)) if known else float("nan")


def _unit(row: dict[str, Any]) -> tuple[str, int]:
    return row["split"], row["seed"]


def _right(row: dict[str, Any]) -> np.ndarray:
    return np.array([float(mark) for mark in row["right"]])


class Results:
    """What was measured.

    Args:
        content: of a results file.

    Attributes:
        hosts: names, in order.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = list(content["rows"].values())
        self.questions: dict[str, list[dict[str, Any]]] = content["questions"]
        self.hosts = list(dict.fromkeys(row["host"] for row in self.rows))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a results file.

        Raises:
            InputError: it is none.
        """
        if not path.is_file():
            raise InputError(f"no such file: {path}")
        try:
            found = cls(json.loads(path.read_text(encoding="utf-8")))
            for row in found.rows:
                if len(row["right"]) != len(found.questions[row["split"]]):
                    raise ValueError(f"{row['kind']} on {row['split']} has other questions than the file says")
                float(row["ratio"]), float(row["accuracy"]), int(row["seed"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} holds no rows of distillation ({first_line(error)})") from error
        return found

    def dense(self, host: str) -> dict[tuple[str, int], dict[str, Any]]:
        """Rows of the unpruned host by split and seed."""
        return {_unit(row): row for row in self.rows if row["host"] == host and row["kind"] == DENSE}

    def variant(self, host: str, kind: str, ratio: float) -> Variant | None:
        """Rows of one kind at one ratio."""
        rows = [row for row in self.rows if (row["host"], row["kind"], row["ratio"]) == (host, kind, ratio)]
        return Variant.of(rows, self.dense(host))

    def ratios(self, host: str, kind: str = OURS) -> list[float]:
        """Ratios that were measured."""
        return sorted({row["ratio"] for row in self.rows if row["host"] == host and row["kind"] == kind})


def write(results: Path, output: Path) -> list[Path]:
    """Write `tables.md`, a CSV of all rows, and pictures.

    Returns:
        What was written.

    Raises:
        InputError: the file holds no rows.
    """
    found = Results.read(results)
    parts = ["# Recursive distillation: the second paper's tables", _legend(found)]
    for host in found.hosts:
        if not found.dense(host):
            continue
        parts.append(f"## {host}\n\n{_what(found, host)}")
        for title, table in (
            ("Table 1: by share of heads", table_1(found, host)),
            ("Table 3 (a): α, 25% of heads", table_3a(found, host)),
            ("Table 3 (b): complexity, 25% of heads", table_3b(found, host)),
            ("Table 4: ablations, 25% of heads", table_4(found, host)),
        ):
            if table is not None:
                parts.append(f"### {title}\n\n{markdown(table, [table.columns[0]])}")
    sizes = table_2(found)
    if sizes is not None:
        parts.append(f"## Table 2: hosts, 25% of heads\n\n{markdown(sizes, list(sizes.columns[:1]))}")
    parts.append(f"## What the paper's description cannot give\n\n{_arithmetic()}")
    write_text(output / "tables.md", "\n\n".join(parts) + "\n")
    write_text(output / "rows.csv", csv(_flat(found)))
    written = [output / "tables.md", output / "rows.csv"]
    if any(len(found.ratios(host)) > 1 for host in found.hosts):
        _draw(found, output / "ratios")
        written += [output / "ratios.png", output / "ratios.svg"]
    for row in found.rows:
        if row.get("stages") and row["kind"] == OURS and _unit(row) == _unit(found.rows[0]):
            stem = output / f"{_slug(row['host'])}_{round(100 * row['ratio'])}"
            curves.draw(row["stages"], stem)
            written += [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    return written


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_")


def _signed(value: float, digits: int = 1) -> str:
    return "" if np.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")


def _share(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1f}".replace("-", "−")


def _p(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"


def _legend(found: Results) -> str:
    units = len({_unit(row) for row in found.rows})
    return (
        f"{len(found.rows)} rows; pairs of a split and a seed: {units}. Accuracy in %, in brackets the difference to "
        f"the dense host of the same splits and seeds. p: sign-flip tests of these differences, over questions (the "
        f"mean over seeds of each) and over splits and seeds; Holm: the former, corrected for the rows of its table. "
        f"Parameters, FLOPs, memory: by how much smaller; speed: by how much faster than the dense host timed beside "
        f"it; all in %. *paper*: its own figures, whose unpruned rows are another paper's to the digit. Empty: not "
        f"measured."
    )


def _what(found: Results, host: str) -> str:
    rows = [row for row in found.rows if row["host"] == host]
    return "\n".join(sorted({f"{row['task']}; {row['removed_by']}." for row in rows if row["kind"] == OURS}))


def _rows_with_tests(
    named: Sequence[tuple[list[str], Variant | None, list[str]]], head: list[str], tail: list[str]
) -> pd.DataFrame | None:
    """A table of variants, with Holm's correction over those that are tested."""
    measured = [(cells, one, rest) for cells, one, rest in named if one is not None]
    if not measured:
        return None
    tests = [one.test() if not _is_dense(one) else (float("nan"), float("nan")) for _, one, _ in measured if one]
    corrected = holm([test[0] for test in tests])
    lines = []
    for (cells, one, rest), test, adjusted in zip(measured, tests, corrected, strict=True):
        assert one is not None
        change = "" if _is_dense(one) else f" ({_signed(one.difference)})"
        costs = [
            _share(one.fewer("parameters")),
            _share(one.faster()),
            _share(one.fewer("flops")),
            _share(one.fewer("memory")),
        ]
        lines.append(
            [
                *cells,
                str(len(one.rows)),
                f"{one.accuracy:.1f}{change}",
                _p(test[0]),
                _p(adjusted),
                _p(test[1]),
                *costs,
                *rest,
            ]
        )
    columns = [
        *head,
        "runs",
        "accuracy",
        "p questions",
        "Holm",
        "p runs",
        "parameters↓",
        "speed↑",
        "FLOPs↓",
        "memory↓",
        *tail,
    ]
    return pd.DataFrame(lines, columns=columns)


def _is_dense(one: Variant) -> bool:
    return one.rows[0]["kind"] == DENSE


def table_1(found: Results, host: str) -> pd.DataFrame | None:
    """By share of heads."""
    kinds = [kind for kind in dict.fromkeys(row["kind"] for row in found.rows) if kind.startswith(OURS)]
    named: list[tuple[list[str], Variant | None, list[str]]] = [(["0"], found.variant(host, DENSE, 0.0), _paper_1(0.0))]
    for kind in kinds:
        more = kind.removeprefix(OURS)
        for ratio in found.ratios(host, kind):
            named.append(([f"{100 * ratio:.0f}{more}"], found.variant(host, kind, ratio), _paper_1(ratio)))
    return _rows_with_tests(named, ["heads removed, %"], ["paper, ASDiv-A: accuracy, parameters↓, speed↑, FLOPs↓"])


def _paper_1(ratio: float) -> list[str]:
    row = paper.TABLE_1["ASDiv-A"].get(ratio)
    return [", ".join(f"{value:.1f}" for value in row) if row else ""]


def table_2(found: Results) -> pd.DataFrame | None:
    """Hosts of different sizes."""
    lines = []
    for host in found.hosts:
        dense, one = found.variant(host, DENSE, 0.0), found.variant(host, OURS, 0.25)
        if dense and one:
            before = 100 * float(np.mean([row["accuracy"] for row in one.dense]))
            lines.append(
                [
                    host,
                    f"{before:.1f}",
                    f"{one.accuracy:.1f} ({_signed(one.difference)})",
                    _share(one.fewer("parameters")),
                    _share(one.faster()),
                ]
            )
    if not lines:
        return None
    lines += [
        [f"*paper*: {host}, {data}", f"{a:.1f}", f"{b:.1f} ({_signed(b - a)})", f"{c:.1f}", f"{d:.1f}"]
        for (host, data), (a, b, c, d) in paper.TABLE_2.items()
    ]
    return pd.DataFrame(lines, columns=["host", "dense", "25% removed", "parameters↓", "speed↑"])


def table_3a(found: Results, host: str) -> pd.DataFrame | None:
    """By α."""
    kinds = {alpha: OURS if alpha == 0.5 else f"alpha {alpha}" for alpha in ALPHAS}
    named = [
        ([f"{alpha}"], found.variant(host, kind, 0.25), [f"{paper.TABLE_3A[alpha]}"]) for alpha, kind in kinds.items()
    ]
    if sum(one is not None for _, one, _ in named) < 2:
        return None
    return _rows_with_tests(named, ["α"], ["paper, Math23k"])


def table_3b(found: Results, host: str) -> pd.DataFrame | None:
    """By the complexity of problems."""
    one = found.variant(host, OURS, 0.25)
    if one is None:
        return None
    levels = {split: [row.get("complexity") for row in rows] for split, rows in found.questions.items()}
    lines = []
    for level in (*LEVELS, "all"):
        counts, shares = [], []
        for row, dense in zip(one.rows, one.dense, strict=True):
            chosen = np.array([level in ("all", own) for own in levels[row["split"]]], dtype=bool)
            if chosen.any():
                counts.append(int(chosen.sum()))
                shares.append([_right(some)[chosen].mean() for some in (dense, row)])
        was, now = paper.TABLE_3B[level]
        theirs = f"{was} → {now} ({_signed(now - was)})"
        if not shares:
            lines.append([level, "0", "", "", "", theirs])
            continue
        before, after = 100 * np.average(shares, axis=0, weights=counts)
        lines.append([level, str(sum(counts)), f"{before:.1f}", f"{after:.1f}", _signed(after - before), theirs])
    return pd.DataFrame(
        lines, columns=["complexity", "answers", "dense", "25% removed", "difference", "paper, Math23k"]
    )


def table_4(found: Results, host: str) -> pd.DataFrame | None:
    """Ablations."""
    kinds = {"without entropy": "alpha 1.0", "without norm": "alpha 0.0"}
    named: list[tuple[list[str], Variant | None, list[str]]] = []
    for name, theirs in paper.TABLE_4.items():
        ratio = 0.0 if name in (DENSE, "distillation only") else 0.25
        one = found.variant(host, name, ratio) or found.variant(host, kinds.get(name, ""), ratio)
        named.append(([name], one, [f"{theirs}"]))
    named.insert(2, (["pruned, not trained"], found.variant(host, "pruned, not trained", 0.25), [""]))
    if sum(one is not None for _, one, _ in named) < 3:
        return None
    return _rows_with_tests(named, ["strategy"], ["paper, Math23k"])


def _arithmetic() -> str:
    lines = []
    for size, printed in (("base", {0.25: 15.8, 0.3: 18.7}), ("large", {0.25: 17.4})):
        for ratio, theirs in printed.items():
            gone, parameters, share = paper.head_share(size, ratio)
            lines.append(
                f"- ATHENA-{size}, {ratio:.0%} of the encoder's heads: {gone} heads, "
                f"{parameters / 1e6:.2f} million parameters, {share:.1f}% of the model; the paper prints {theirs}%."
            )
    return (
        "A head of 64 numbers is 64 rows of three projections and 64 columns of a fourth, with 192 biases; RoBERTa's "
        "encoder and ATHENA's own modules (56.7 and 100.8 million) make the model.\n\n" + "\n".join(lines) + "\n- Its "
        "rows at 25% have one parameter figure whatever was removed by which score, and the same speed: with heads of "
        "equal size that follows. Reaching its figures takes feed-forward channels, too."
    )


def _flat(found: Results) -> pd.DataFrame:
    names = ("host", "kind", "ratio", "split", "seed", "accuracy", "parameters", "flops", "memory")
    return pd.DataFrame([{name: row.get(name) for name in names} for row in found.rows])


def _draw(found: Results, stem: Path) -> None:
    made, axes = figure(5.5, 3.4, "Accuracy by share of heads removed")
    for colour, host in zip(COLOURS, found.hosts, strict=False):
        variants = [(0.0, found.variant(host, DENSE, 0.0))]
        variants += [(ratio, found.variant(host, OURS, ratio)) for ratio in found.ratios(host)]
        points = [(100 * ratio, one) for ratio, one in variants if one is not None]
        for number, unit in enumerate(sorted({_unit(row) for _, one in points for row in one.rows})):
            own = [(x, 100 * row["accuracy"]) for x, one in points for row in one.rows if _unit(row) == unit]
            axes.plot(
                *zip(*own, strict=True),
                color=colour,
                lw=0.6,
                alpha=0.5,
                marker=".",
                label=None if number else f"{host}: one run",
            )
        axes.plot(
            [x for x, _ in points], [one.accuracy for _, one in points], color=colour, marker="o", label=f"{host}: mean"
        )
    theirs = paper.TABLE_1["ASDiv-A"]
    axes.plot(
        [100 * x for x in theirs],
        [row[0] for row in theirs.values()],
        color=COLOURS[6],
        ls="--",
        marker="s",
        ms=4,
        label="paper, ASDiv-A",
    )
    axes.set_xlabel("heads removed, %")
    axes.set_ylabel("accuracy, %")
    axes.legend(frameon=False, fontsize=7)
    save(made, stem)
