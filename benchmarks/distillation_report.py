"""Write the tables of Yu et al. from rows of results, beside their own figures, with paired tests.

    python benchmarks/distillation_report.py [--results FILE] [--output FOLDER]

A row is one model, as `distillation_result.py` writes it: of which kind, on which split, by which seed, and which
questions it answers rightly. What was never measured is left out; nothing is run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import distillation_paper as paper
import numpy as np
import pandas as pd
from _record import RESULTS
from pydantic import Field
from typing_extensions import TypedDict

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.distillation.recursion import LINES, TITLE
from lmeval_prune.errors import InputError
from lmeval_prune.reporting.documents import escape_markdown
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.statistics import holm, sign_flip_test, two_sample_test
from lmeval_prune.reporting.tables import csv, markdown, p_value, signed
from lmeval_prune.training.curves import draw

ALPHAS, LEVELS = tuple(paper.TABLE_3A), ("low", "medium", "high")
DENSE, OURS = "dense", "ours"


class Seconds(TypedDict):
    """How long a model and the dense one beside it took."""

    dense: float
    own: float


class Row(TypedDict):
    """What is read of a row."""

    host: str
    kind: str
    split: str
    task: str
    removed_by: str
    ratio: float
    accuracy: float
    seed: int
    right: Annotated[str, Field(pattern="^[01]*$")]
    seconds: NotRequired[Seconds | None]
    removed: NotRequired[dict[str, Any] | None]
    stages: NotRequired[list[dict[str, Any]] | None]


class Contents(TypedDict):
    """Fields of a results file."""

    rows: dict[str, Row]
    questions: dict[str, list[dict[str, Any]]]


Chosen = Callable[[dict[str, Any]], Any]  # of a row, which of its questions


Unit = tuple[str, int]  # a split and a seed


@dataclass(frozen=True)
class Variant:
    """One model of a kind, on all splits and seeds that it was measured on.

    Attributes:
        rows: its rows.
        dense: of each, the row of its dense model.
    """

    rows: list[dict[str, Any]]
    dense: list[dict[str, Any]]

    @property
    def units(self) -> set[Unit]:
        """Splits and seeds of its rows."""
        return {_unit(row) for row in self.rows}

    def on(self, units: Collection[Unit]) -> Variant:
        """Return the variant on these splits and seeds."""
        pairs = [pair for pair in zip(self.rows, self.dense, strict=True) if _unit(pair[0]) in units]
        return Variant([row for row, _ in pairs], [row for _, row in pairs])

    def solved(self, chosen: Chosen = lambda row: slice(None)) -> list[np.ndarray]:
        """Return by split, question by question, the share of seeds that answer it rightly.

        Args:
            chosen: which questions of a row.
        """
        splits: dict[str, list[np.ndarray]] = {}
        for row in self.rows:
            splits.setdefault(row["split"], []).append(_right(row)[chosen(row)])
        return [np.mean(seeds, axis=0) for seeds in splits.values()]

    def differences(self, chosen: Chosen = lambda row: slice(None)) -> list[np.ndarray]:
        """Return by split, question by question, right minus right of the dense model, the mean over seeds.

        Args:
            chosen: which questions of a row.
        """
        before = Variant(self.dense, self.dense).solved(chosen)
        return [own - other for own, other in zip(self.solved(chosen), before, strict=True)]

    @property
    def accuracy(self) -> float:
        """In %, the mean over splits of means over seeds."""
        return _mean_accuracy(self.rows)

    @property
    def difference(self) -> float:
        """To the dense model, in points."""
        return self.accuracy - _mean_accuracy(self.dense)

    @property
    def standard_error(self) -> float:
        """Of the difference over splits, in points; NaN of a single split."""
        means = [100 * differences.mean() for differences in self.differences()]
        return float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")

    def test(self, chosen: Chosen = lambda row: slice(None)) -> tuple[float, float]:
        """Return p of a paired test over questions, and of one over splits (NaN of a single split).

        Args:
            chosen: which questions of a row.
        """
        differences = [values for values in self.differences(chosen) if len(values)]
        if not differences:
            return float("nan"), float("nan")
        over_questions = float(sign_flip_test(np.concatenate(differences)[:, None])[0])
        if len(differences) < 2:
            return over_questions, float("nan")
        return over_questions, float(sign_flip_test(np.array([[values.mean()] for values in differences]))[0])

    def removed(self) -> str:
        """Describe what was removed, the mean over rows; empty where rows do not say."""
        counts = [row["removed"] for row in self.rows if row.get("removed")]
        means = [(name, np.mean([count.get(name, 0) for count in counts])) for name in ("heads", "channels") if counts]
        return ", ".join(f"{mean:g} {name}" for name, mean in means)

    def fewer(self, name: str) -> float:
        """Return by how many % a figure is smaller than the dense model's; NaN if it was not measured."""
        pairs = [(row.get(name), other.get(name)) for row, other in zip(self.rows, self.dense, strict=True)]
        savings = [1 - own / dense for own, dense in pairs if own and dense]
        return 100 * float(np.mean(savings)) if savings else float("nan")

    def faster(self) -> float:
        """Return by how many % it is faster than the dense model that was timed beside it; NaN if it was not timed."""
        speedups = [row["seconds"]["dense"] / row["seconds"]["own"] - 1 for row in self.rows if row.get("seconds")]
        return 100 * float(np.mean(speedups)) if speedups else float("nan")


def _unit(row: dict[str, Any]) -> Unit:
    return row["split"], row["seed"]


def _mean_accuracy(rows: Sequence[dict[str, Any]]) -> float:
    splits: dict[str, list[float]] = {}
    for row in rows:
        splits.setdefault(row["split"], []).append(row["accuracy"])
    return 100 * float(np.mean([np.mean(seeds) for seeds in splits.values()]))


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
        results = cls(read_json(path, Contents))
        for row in results.rows:
            if len(row["right"]) != len(results.questions.get(row["split"], ())):
                raise InputError(f"{path}: {row['kind']} on {row['split']} has other questions than the file says")
        return results

    def dense(self, host: str) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the rows of the unpruned host by split and seed."""
        return {_unit(row): row for row in self.rows if row["host"] == host and row["kind"] == DENSE}

    def variant(self, host: str, kind: str, ratio: float) -> Variant | None:
        """Return the rows of a kind at a ratio that have a dense model; None if there are none."""
        dense = self.dense(host)
        rows = [row for row in self.rows if (row["host"], row["kind"], row["ratio"]) == (host, kind, ratio)]
        rows = [row for row in rows if _unit(row) in dense]
        return Variant(rows, [dense[_unit(row)] for row in rows]) if rows else None

    def ratios(self, host: str, kind: str = OURS) -> list[float]:
        """Return the ratios that were measured."""
        return sorted({row["ratio"] for row in self.rows if row["host"] == host and row["kind"] == kind})


def write(file: Path, output: Path) -> list[Path]:
    """Write `tables.md`, a CSV of all rows, and pictures, from a results file.

    Returns:
        The files that were written.

    Raises:
        InputError: the file holds no rows.
    """
    results = Results.read(file)
    parts = ["# Recursive distillation: the tables of Yu et al.", _legend(results)]
    for host in results.hosts:
        if not results.dense(host):
            continue
        parts.append(f"## {escape_markdown(host)}\n\n{_describe(results, host)}")
        shown = len(parts)
        kinds = [kind for kind in dict.fromkeys(row["kind"] for row in results.rows) if kind.startswith(OURS)]
        for title, table in (
            *((f"Table 1: {escape_markdown(kind)}, by share of heads", table_1(results, host, kind)) for kind in kinds),
            ("Table 3 (a): α, 25% of heads", table_3a(results, host)),
            ("Table 3 (b): complexity, 25% of heads", table_3b(results, host)),
            ("Table 4: ablations, 25% of heads", table_4(results, host)),
        ):
            if table is not None:
                parts.append(f"### {title}\n\n{_shown(table)}")
        alone = results.variant(host, DENSE, 0.0)
        if len(parts) == shown and alone:
            parts.append(
                f"Only unpruned: {alone.accuracy:.1f}% "
                f"on {escape_markdown(', '.join(row['split'] for row in alone.rows))}."
            )
    sizes = table_2(results)
    if sizes is not None:
        parts.append(f"## Table 2: models, 25% of heads\n\n{_shown(sizes)}")
    parts.append(f"## What the paper's description cannot give\n\n{_arithmetic()}")
    write_text(output / "tables.md", "\n\n".join(parts) + "\n")
    write_text(output / "rows.csv", csv(_flat(results)))
    written = [output / "tables.md", output / "rows.csv"]
    if any(len(results.ratios(host)) > 1 for host in results.hosts):
        _draw(results, output / "ratios")
        written += [output / "ratios.png", output / "ratios.svg"]
    for row in results.rows:
        if row.get("stages") and row["kind"] == OURS and _unit(row) == _unit(results.rows[0]):
            stem = output / f"{_slug(row['host'])}_{round(100 * row['ratio'])}"
            draw(row["stages"], LINES, TITLE, stem)
            written += [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    return written


def _shown(table: pd.DataFrame) -> str:
    """Return a table as Markdown, and the splits and seeds that all its rows have."""
    units: set[Unit] = table.attrs["units"]
    names = ", ".join(f"{split} seed {seed}" for split, seed in sorted(units))
    return f"On {escape_markdown(names)}.\n\n{markdown(table, [table.columns[0]])}"


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_")


def _share(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1f}".replace("-", "−")


def _legend(results: Results) -> str:
    units = len({_unit(row) for row in results.rows})
    return (
        f"{len(results.rows)} rows; pairs of a split and a seed: {units}. A table has only those that all its rows "
        f"have, and names them; where rows have none in common there is no table. Accuracy in %, the mean over splits "
        f"of means over seeds; in brackets the difference to the dense model of the same splits and seeds. p: sign-"
        f"flip tests of these differences, over questions and over splits (the mean over seeds of each): over n splits "
        f"it cannot be below 2/2ⁿ (five: 0.0625, three: 0.25, two: 0.5), and one over questions knows how problems "
        f"differ, not how trainings do. Holm: the former, corrected for the rows of its table. ± splits: the standard "
        f"error of the difference over splits. *to ours*: the same difference and test, against ours in place of the "
        f"dense model, corrected over what prunes as much and trains. Parameters, FLOPs, memory: by how much less, "
        f"speed: by how much faster than the dense model timed beside it, all in %. Memory is that of a process (of a "
        f"language model measured on a GPU: what it has there), of which a small model is little: a few % either way "
        f"are noise. *paper*: its own figures, whose unpruned rows are another paper's to the digit; in its Table 4 "
        f"each pruned model needs {paper.MEMORY}% less memory. Empty: not measured."
    )


def _describe(results: Results, host: str) -> str:
    """Describe the tasks of a host, and how parameters are removed from it."""
    rows = [row for row in results.rows if row["host"] == host]
    return "\n".join(
        sorted({escape_markdown(f"{row['task']}; {row['removed_by']}.") for row in rows if row["kind"] == OURS})
    )


Named = Sequence[tuple[list[str], Variant | None, list[str]]]  # first cells of a line, what was measured, last cells


def _comparable(variants: Sequence[Variant | None]) -> tuple[list[Variant | None], set[Unit]]:
    """Return variants on the splits and seeds that all of them have; none are left if they have none in common."""
    measured = [variant.units for variant in variants if variant is not None]
    units = set.intersection(*measured) if measured else set()
    return [variant.on(units) if variant is not None and units else None for variant in variants], units


def _rows_with_tests(named: Named, head: str, tail: list[str], least: int = 1) -> pd.DataFrame | None:
    """Return a table of variants, with Holm's correction over those tested; None of fewer than `least`."""
    variants, units = _comparable([variant for _, variant, _ in named])
    measured = [
        (cells, variant, last_cells)
        for (cells, _, last_cells), variant in zip(named, variants, strict=True)
        if variant is not None
    ]
    if len(measured) < least:
        return None
    tests = [variant.test() if not _is_dense(variant) else (float("nan"), float("nan")) for _, variant, _ in measured]
    corrected = holm([test[0] for test in tests])
    lines = []
    for (cells, variant, last_cells), test, adjusted in zip(measured, tests, corrected, strict=True):
        change = "" if _is_dense(variant) else f" ({signed(variant.difference)})"
        costs = [
            _share(variant.fewer("parameters")),
            _share(variant.faster()),
            _share(variant.fewer("flops")),
            _share(variant.fewer("memory")),
        ]
        error = float("nan") if _is_dense(variant) else variant.standard_error
        tested = [
            f"{variant.accuracy:.1f}{change}",
            _share(error),
            p_value(test[0]),
            p_value(adjusted),
            p_value(test[1]),
        ]
        lines.append([*cells, variant.removed(), *tested, *costs, *last_cells])
    costs = ["parameters↓", "speed↑", "FLOPs↓", "memory↓"]
    return _table(
        lines, [head, "removed", "accuracy", "± splits", "p questions", "Holm", "p splits", *costs, *tail], units
    )


def _table(lines: list[list[str]], columns: list[str], units: set[Unit]) -> pd.DataFrame:
    table = pd.DataFrame(lines, columns=columns)
    table.attrs["units"] = units
    return table


def _is_dense(variant: Variant) -> bool:
    return variant.rows[0]["kind"] == DENSE


def table_1(results: Results, host: str, kind: str = OURS) -> pd.DataFrame | None:
    """Return Table 1: accuracy by share of heads."""
    named: list[tuple[list[str], Variant | None, list[str]]] = [
        (["0"], results.variant(host, DENSE, 0.0), _paper_1(0.0))
    ]
    for ratio in results.ratios(host, kind):
        named.append(([f"{100 * ratio:.0f}"], results.variant(host, kind, ratio), _paper_1(ratio)))
    paper_columns = [f"paper, {data}: accuracy, parameters↓, speed↑, FLOPs↓" for data in paper.TABLE_1]
    return _rows_with_tests(named, "heads removed, %", paper_columns, 2)


def _paper_1(ratio: float) -> list[str]:
    rows = [table.get(ratio) for table in paper.TABLE_1.values()]
    return [", ".join(f"{value:.1f}" for value in row) if row else "" for row in rows]


def table_2(results: Results) -> pd.DataFrame | None:
    """Return Table 2: hosts of different sizes."""
    variants, units = _comparable([results.variant(host, OURS, 0.25) for host in results.hosts])
    measured = [(host, variant) for host, variant in zip(results.hosts, variants, strict=True) if variant is not None]
    if not measured:
        return None
    tests = [variant.test() for _, variant in measured]
    lines = [
        [
            host,
            variant.removed(),
            f"{_mean_accuracy(variant.dense):.1f}",
            f"{variant.accuracy:.1f} ({signed(variant.difference)})",
            *(p_value(test[0]), p_value(adjusted), p_value(test[1])),
            *(_share(variant.fewer("parameters")), _share(variant.faster())),
        ]
        for (host, variant), test, adjusted in zip(measured, tests, holm([test[0] for test in tests]), strict=True)
    ]
    lines += [
        [f"paper: {host}, {data}", "", f"{a:.1f}", f"{b:.1f} ({signed(b - a)})", "", "", "", f"{c:.1f}", f"{d:.1f}"]
        for (host, data), (a, b, c, d) in paper.TABLE_2.items()
    ]
    tested = ["p questions", "Holm", "p splits"]
    return _table(lines, ["host", "removed", "dense", "25% removed", *tested, "parameters↓", "speed↑"], units)


def table_3a(results: Results, host: str) -> pd.DataFrame | None:
    """Return Table 3 (a): accuracy by α."""
    kinds = {alpha: OURS if alpha == 0.5 else f"alpha {alpha}" for alpha in ALPHAS}
    named = [
        ([f"{alpha}"], results.variant(host, kind, 0.25), [f"{paper.TABLE_3A[alpha]}"]) for alpha, kind in kinds.items()
    ]
    return _rows_with_tests(named, "α", ["paper, Math23k"], 2)


def table_3b(results: Results, host: str) -> pd.DataFrame | None:
    """Return Table 3 (b): accuracy by the complexity of problems.

    It is of the splits and seeds that Table 1 has: per problem the mean over seeds, then over problems. Whether complex
    problems lose *more*, which is what the paper asks, is a permutation test of the problems' own differences, theirs
    against those of low complexity.
    """
    of_ratios = [results.variant(host, OURS, ratio) for ratio in results.ratios(host)]
    variants, _ = _comparable(of_ratios)
    variant = dict(zip(results.ratios(host), variants, strict=True)).get(0.25)
    if variant is None:
        return None
    levels = {split: [row.get("complexity") for row in rows] for split, rows in results.questions.items()}

    def of_level(level: str) -> Chosen:
        return lambda row: np.array([level in ("all", own) for own in levels[row["split"]]], dtype=bool)

    tests = [variant.test(of_level(level)) for level in (*LEVELS, "all")]
    corrected = [*holm([test[0] for test in tests[:-1]]), float("nan")]  # all of them are tested in Table 1
    differences = {level: np.concatenate(variant.differences(of_level(level))) for level in (*LEVELS, "all")}
    lines = []
    for level, test, adjusted in zip((*LEVELS, "all"), tests, corrected, strict=True):
        was, now = paper.TABLE_3B[level]
        published = f"{was} → {now} ({signed(now - was)})"
        if not len(differences[level]):
            lines.append([level, "0", *[""] * 7, published])
            continue
        before = 100 * float(np.concatenate(Variant(variant.dense, variant.dense).solved(of_level(level))).mean())
        change = 100 * float(differences[level].mean())
        tested = [signed(change), p_value(test[0]), p_value(adjusted), p_value(test[1])]
        more = two_sample_test(differences[level], differences["low"]) if level in ("medium", "high") else float("nan")
        lines.append(
            [
                level,
                str(len(differences[level])),
                f"{before:.1f}",
                f"{before + change:.1f}",
                *tested,
                p_value(more),
                published,
            ]
        )
    tested = ["difference", "p questions", "Holm", "p splits", "p other than low"]
    return _table(lines, ["complexity", "problems", "dense", "25% removed", *tested, "paper, Math23k"], variant.units)


def table_4(results: Results, host: str) -> pd.DataFrame | None:
    """Return Table 4: ablations."""
    kinds = {"without entropy": "alpha 1.0", "without norm": "alpha 0.0"}
    named: list[tuple[list[str], Variant | None, list[str]]] = []
    for name, published in paper.TABLE_4.items():
        ratio = 0.0 if name in (DENSE, "distillation only") else 0.25
        variant = results.variant(host, name, ratio) or results.variant(host, kinds.get(name, ""), ratio)
        named.append(([name], variant, [f"{published}"]))
    named.insert(2, (["pruned, not trained"], results.variant(host, "pruned, not trained", 0.25), [""]))
    table = _rows_with_tests(named, "strategy", ["paper, Math23k"], 3)
    if table is None:
        return None
    return _add_differences(table, {cells[0]: variant for cells, variant, _ in named if variant})


def _add_differences(table: pd.DataFrame, variants: dict[str, Variant]) -> pd.DataFrame:
    """Add to Table 4 how each other way differs from ours, tested over questions: the paper claims that ours is best.

    Holm's correction is over ways that prune as much and train; the others are tested, too, and not corrected.
    """
    units = table.attrs["units"]
    if OURS not in variants or not variants[OURS].on(units).rows:
        return table
    references = {_unit(row): row for row in variants[OURS].on(units).rows}
    pairs = {name: variants[name].on(units) for name in table["strategy"] if name != OURS}
    pairs = {
        name: Variant(variant.rows, [references[_unit(row)] for row in variant.rows]) for name, variant in pairs.items()
    }
    chances = {name: variant.test()[0] for name, variant in pairs.items()}
    family = [name for name in pairs if name not in (DENSE, "distillation only", "pruned, not trained")]
    corrected = dict(zip(family, holm([chances[name] for name in family]), strict=True))
    columns = {
        "to ours": {name: signed(variant.difference) for name, variant in pairs.items()},
        "p to ours": {name: p_value(value) for name, value in chances.items()},
        "Holm to ours": {name: p_value(value) for name, value in corrected.items()},
    }
    for position, (head, cells) in enumerate(columns.items(), list(table.columns).index("p splits") + 1):
        table.insert(position, head, [cells.get(name, "") for name in table["strategy"]])
    return table


def _arithmetic() -> str:
    lines = []
    printed = {("base", ratio): row[1] for ratio, row in paper.TABLE_1["Math23k"].items() if ratio}
    printed["large", 0.25] = paper.TABLE_2["ATHENA-large", "Math23k"][2]
    for (size, ratio), published in printed.items():
        heads_removed, parameters, share = paper.head_share(size, ratio)
        lines.append(
            f"- ATHENA-{size}, {ratio:.0%} of the encoder's heads: {heads_removed} heads, "
            f"{parameters / 1e6:.2f} million parameters, {share:.1f}% of the model; the paper prints {published}%."
        )
    return (
        "A head of 64 numbers is 64 rows of three projections and 64 columns of a fourth, with 192 biases; RoBERTa's "
        "encoder and ATHENA's own modules (56.7 and 100.8 million) make the model.\n\n" + "\n".join(lines) + "\n- Its "
        "rows at 25% have one parameter figure whatever was removed by which score, and the same speed: with heads of "
        "equal size that follows. Reaching its figures takes feed-forward channels, too."
    )


def _flat(results: Results) -> pd.DataFrame:
    names = ("host", "kind", "ratio", "split", "seed", "accuracy", "parameters", "flops", "memory")
    rows = [
        {**{name: row.get(name) for name in names}, **_seconds(row), **_removed_counts(row)} for row in results.rows
    ]
    return pd.DataFrame(rows)


def _seconds(row: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a row's model and of the dense one, which were timed in turn."""
    seconds = row.get("seconds") or {}
    return {"seconds": seconds.get("own"), "seconds_dense": seconds.get("dense")}


def _removed_counts(row: dict[str, Any]) -> dict[str, Any]:
    """Return how many heads and channels were removed, and how many heads of each layer are left."""
    removed, stages = row.get("removed") or {}, row.get("stages") or [{}]
    left = "; ".join(f"{label} {len(heads)}" for label, heads in stages[-1].get("heads", {}).items())
    return {"heads_removed": removed.get("heads"), "channels_removed": removed.get("channels"), "heads_left": left}


def _draw(results: Results, stem: Path) -> None:
    canvas, axes = figure(7, 3.4, "Accuracy by share of heads removed")
    for colour, host in zip(COLOURS, results.hosts, strict=False):
        shares = [0.0, *results.ratios(host)]
        variants, _ = _comparable([results.variant(host, OURS if share else DENSE, share) for share in shares])
        points = [
            (100 * share, variant) for share, variant in zip(shares, variants, strict=True) if variant is not None
        ]
        for number, unit in enumerate(sorted({_unit(row) for _, variant in points for row in variant.rows})):
            own = [(x, 100 * row["accuracy"]) for x, variant in points for row in variant.rows if _unit(row) == unit]
            axes.plot(
                *zip(*own, strict=True),
                color=colour,
                lw=0.6,
                alpha=0.5,
                marker=".",
                label=None if number else f"{host}: one run",
            )
        axes.plot(
            [x for x, _ in points],
            [variant.accuracy for _, variant in points],
            color=colour,
            marker="o",
            label=f"{host}: mean",
        )
    published = paper.TABLE_1["ASDiv-A"]
    axes.plot(
        [100 * x for x in published],
        [row[0] for row in published.values()],
        color=COLOURS[6],
        ls="--",
        marker="s",
        ms=4,
        label="paper, ASDiv-A",
    )
    axes.set_xlabel("heads removed, %")
    axes.set_ylabel("accuracy, %")
    canvas.legend(frameon=False, fontsize=7, loc="outside right center")
    save(canvas, stem)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the tables of Yu et al. from rows of results.")
    parser.add_argument("--results", type=Path, default=RESULTS / "distillation.json")
    parser.add_argument("--output", type=Path, default=RESULTS.parent.parent / "docs/results/distillation")
    options = parser.parse_args(argv)
    try:
        for path in write(options.results, options.output):
            print(path)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
