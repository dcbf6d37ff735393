"""`lmeval-prune report sprint`: write the SPRINT paper's tables and figures.

Inputs: outcome stores of sweeps, a fitted router, and lm-eval's samples files.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.architectures import Head
from lmeval_prune.artefacts import CREATED_BY, digest, write_text
from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.reporting.documents import bold, csv, markdown, render
from lmeval_prune.reporting.statistics import holm, mean_interval, sign_flip_test
from lmeval_prune.sprint import figures
from lmeval_prune.sprint.curves import Curve, oracle_curve, policy_curve, random_curve, samples_curve
from lmeval_prune.sprint.options import ReportOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, check_tasks
from lmeval_prune.sprint.router import Router, best, nearest, random_top

logger = logging.getLogger(__name__)
ANSWER_SETTINGS = ("generation", "num_fewshot", "chat_template", "system_instruction")  # others are of the scoring
GROUPINGS = ("subject", "complexity", "grade", "solution_type", "level", "type", "task")


def write_report(options: ReportOptions) -> Path:
    """Write the report; return the path of its Markdown file."""
    folder, n = Path(options.output), options.n
    test, train, router, notes = _read_inputs(options)
    for note in notes:
        logger.warning("%s", note)
    pool = router.pool if router else test.pool
    curves = [policy_curve("SPRINT router", nearest(router), test, n)] if router else []
    if train:
        curves.append(policy_curve("best of training", best(train), test, n))
        top = random_top(train, options.shortlist, options.seed).pool
        curves.append(random_curve(f"random of the top {len(top)} heads", top, test, n))
    curves.append(random_curve(f"random of all {len(pool)}", pool, test, n))
    curves += [samples_curve(name, path, test, n) for name, path in options.samples]
    curves.append(oracle_curve("oracle (not a method)", pool, test, n))
    if twice := [name for name, count in Counter(curve.name for curve in curves).items() if count > 1]:
        raise InputError(f"two curves have the name {twice[0]!r}; give another one to --samples")

    bands = [mean_interval(curve.values, 1.0) for curve in curves]
    dense = float(test.accuracy()[test.pool.index(DENSE)])
    tests = _test_router(curves, options.seed) if router else {}
    choices = [Counter(row[k] for row in curves[0].attempts) for k in range(n)] if router else []
    heads = _heads_section(test, options, folder)
    figures.pass_at_n(curves, bands, dense, folder / "pass_at_n")
    write_text(folder / "pass_at_n.csv", csv(_pass_rows(curves, bands)))
    numbers = {
        "created_by": CREATED_BY,
        "pass": {curve.name: {"estimate": curve.kind, "values": _plain(curve.mean)} for curve in curves},
        "tokens": {curve.name: _plain(curve.mean_tokens) for curve in curves if curve.mean_tokens is not None},
        "router_minus": {name: [test for test in row if not np.isnan(test["p"])] for name, row in tests.items()},
        "dense": dense,
        "choices": [dict(counts.most_common()) for counts in choices],
        "notes": notes,
        **({"median_gain_of_best_head": heads["medians"], "changes": heads.pop("change_by_head")} if heads else {}),
    }
    write_text(folder / "report.json", json.dumps(numbers, indent=1) + "\n")
    text = render(
        Path(__file__).with_name("report.md.jinja"),
        test=test,
        train=train,
        router=router,
        dense=dense,
        passes=_pass_table(curves),
        tests=_difference_table(tests) if tests else "",
        choices=_choice_table(choices),
        heads=heads,
        notes=notes,
    )
    write_text(folder / "report.md", text)
    return folder / "report.md"


# ---------------------------------------------------------------------- inputs


def _read_inputs(options: ReportOptions) -> tuple[Outcomes, Outcomes | None, Router | None, list[str]]:
    """Read the test store, the training store and the router; raise `InputError` if they do not match.

    The last item has notes: what is left out.
    """
    test = OutcomeStore(options.test).read()
    train = OutcomeStore(options.train).read() if options.train else None
    router = Router.load(options.router) if options.router else None
    about = router.about if router else {}
    if fitted := set(about.get("seen", [])):  # those are not the test; without a training store, they are its rows
        is_fitted = np.array([digest(text) in fitted for text in test.texts])
        if is_fitted.any() and (is_fitted.all() or not about.get("held_out")):
            raise InputError(
                f"{is_fitted.sum()} of the test store's {len(is_fitted)} questions were used to fit the router; use a "
                f"store of other questions, or fit with --holdout 0.5"
            )
        if is_fitted.any():
            train = train or test.rows(np.flatnonzero(is_fitted))
            test = test.rows(np.flatnonzero(~is_fitted))

    def identity(model: Mapping[str, Any]) -> str:
        served = [model[name] for name in ("server", "dtype", "checkpoint") if name in model]  # it has no weights
        return json.dumps([model.get("weights") or served, model.get("interventions", [])])

    models = [test.model, train.model if train else {}, about.get("model") or {}]
    if len({identity(model) for model in models if model}) > 1:
        raise InputError("stores and router are of different models, or of one under different pruning; use the same")
    if train and (shared := set(test.texts) & set(train.texts)):
        raise InputError(f"{len(shared)} of the test questions are also training questions; use disjoint splits")
    for subject, tasks in (
        ("the training store", train.tasks if train else {}),
        ("the router", about.get("tasks", {})),
    ):
        check_tasks(subject, tasks, test.tasks, ANSWER_SETTINGS, remedy="use a test store that is swept alike")
    notes = []
    if partial := [name for name, column in zip(test.pool, test.observed.T, strict=True) if not column.all()]:
        notes.append(
            f"left out are columns without outcomes of all questions: {first_few(partial, most=3)}; `lmeval-prune "
            f"sweep` over the whole pool gives them"
        )
        test = test.columns([name for name in test.pool if name not in partial])
    return test, train, router, notes


# ---------------------------------------------------------------------- pass@N


def _test_router(curves: Sequence[Curve], seed: int) -> dict[str, list[dict[str, float]]]:
    """Test the router against each other policy at each N: mean difference, p, and p after Holm's correction."""
    router, *rivals = [curve for curve in curves if not curve.is_bound]
    n = router.values.shape[1]
    differences = np.concatenate([router.values - rival.values for rival in rivals], axis=1)
    means, p = differences.mean(0).tolist(), sign_flip_test(differences, seed).tolist()
    rows = [
        {"n": i % n + 1, "difference": difference, "p": p_alone, "p_holm": p_holm}
        for i, (difference, p_alone, p_holm) in enumerate(zip(means, p, holm(p), strict=True))
    ]
    return {rival.name: rows[i * n : (i + 1) * n] for i, rival in enumerate(rivals)}


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 6) for value in values]


def _pass_table(curves: Sequence[Curve]) -> str:
    rows = [[c.name, c.kind, *("" if np.isnan(v) else f"{v:.3f}" for v in c.mean)] for c in curves]
    names = ["policy", "estimate", *(f"pass@{k}" for k in range(1, len(rows[0]) - 1))]
    return markdown(pd.DataFrame(rows, columns=names), ["policy", "estimate"])


def _difference_table(tests: dict[str, list[dict[str, float]]]) -> str:
    def cell(test: dict[str, float]) -> str:
        text = f"{test['difference']:+.3f} ({test['p']:.2g})"
        return "" if np.isnan(test["p"]) else bold(text, test["p_holm"] < 0.05)

    rows = [{"policy": name, **{f"N = {test['n']}": cell(test) for test in row}} for name, row in tests.items()]
    return markdown(pd.DataFrame(rows), ["policy"])


def _choice_table(choices: Sequence[Counter[str]]) -> str:
    rows = [
        (k, len(counts), ", ".join(f"{name} ({count})" for name, count in counts.most_common(4)))
        for k, counts in enumerate(choices, 1)
    ]
    names = ["try", "different heads", "most frequent (questions)"]
    return markdown(pd.DataFrame(rows, columns=names), [names[0], names[2]])


def _pass_rows(curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """Return pass@N with confidence limits in long format: a row for each policy and N, without unknown values."""
    frames = [
        pd.DataFrame(
            {
                "policy": curve.name,
                "estimate": curve.kind,
                "n": range(1, len(low) + 1),
                "pass": curve.mean,
                "low": low,
                "high": high,
                "tokens": np.nan if curve.mean_tokens is None else curve.mean_tokens,
            }
        )
        for curve, (low, high) in zip(curves, bands, strict=True)
    ]
    return pd.concat(frames, ignore_index=True).dropna(subset="pass")


# ---------------------------------------------------------------------- single heads


def _heads_section(test: Outcomes, options: ReportOptions, folder: Path) -> dict[str, Any]:
    """Draw the figures of single heads and return their numbers; nothing if the store has no single heads."""
    outcomes = test.columns([name for name in test.pool if "+" not in name])
    if outcomes.pool == [DENSE]:
        return {}
    groups, change_by_head = groups_of(outcomes, options.by), changes(outcomes)
    table = head_table(outcomes, groups)
    measured, chance = gains(table), gains_by_chance(outcomes, groups, seed=options.seed)
    figures.head_changes(change_by_head, folder / "head_changes")
    figures.head_map(change_by_head, folder / "head_map")
    figures.violins(measured, chance, folder / "best_head_gains")
    write_text(folder / "accuracy.csv", csv(table))
    medians = {
        name: float(np.median(np.concatenate(list(values.values()))))
        for name, values in (("measured", measured), ("by_luck", chance))
    }
    return {
        "change_by_head": {name: {"change": c, "standard_error": e} for name, (c, e) in change_by_head.items()},
        "changes": [change for change, _ in change_by_head.values()],
        "beyond": sum(bool(error) and abs(change) > 2 * error for change, error in change_by_head.values()),
        "medians": medians,
        "groups": groups,
        "tables": head_tables(table),
    }


def groups_of(outcomes: Outcomes, by: str | None = None) -> dict[str, list[int]]:
    """Group the rows of questions by an attribute.

    Default: the first of `GROUPINGS` with several values that all questions have; else a single group.
    """
    attributes = pd.DataFrame([{**row["attributes"], "task": row["task"]} for row in outcomes.questions], dtype=object)
    for name in [by] if by else GROUPINGS:
        if name in attributes and attributes[name].notna().all() and (by or attributes[name].nunique() > 1):
            rows = attributes.groupby(attributes[name].map(str)).indices
            return {group: indices.tolist() for group, indices in sorted(rows.items())}
    if by:
        names = sorted({name for row in outcomes.questions for name in row["attributes"]})
        raise InputError(f"not all questions have {by!r}; they have {', '.join(names) or 'no attributes'}")
    return {"all": list(range(len(outcomes.questions)))}


def head_table(outcomes: Outcomes, groups: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """Return the accuracy by group, layer and head: a row for each (Tables 1–4)."""
    heads = {column: Head.named(column) for column in outcomes.pool if column != DENSE}
    rows = []
    for group, indices in groups.items():
        accuracy = dict(zip(outcomes.pool, outcomes.rows(indices).accuracy().tolist(), strict=True))
        rows += [(group, len(indices), h.layer_label, h.head, accuracy[c], accuracy[DENSE]) for c, h in heads.items()]
    return pd.DataFrame(rows, columns=["group", "questions", "layer", "head", "accuracy", "dense_accuracy"])


def head_tables(table: pd.DataFrame) -> dict[str, str]:
    """Return a Markdown table for each group: heads by layers, then the unpruned model; a better best is bold."""
    heads = sorted(set(table["head"]))
    tables: dict[str, str] = {}
    for group, rows in table.groupby("group", sort=False):
        columns: dict[str, list[Any]] = {"pruned head": [*map(str, heads), "none"]}
        for layer, part in rows.groupby("layer", sort=False):
            values, dense = dict(zip(part["head"], part["accuracy"], strict=True)), part["dense_accuracy"].iloc[0]
            best_head = max(values.values())
            cells = [bold(f"{values[h]:.3f}", values[h] == best_head > dense) if h in values else "" for h in heads]
            columns[str(layer)] = [*cells, f"{dense:.3f}"]
        tables[str(group)] = markdown(pd.DataFrame(columns), ["pruned head"])
    return tables


def gains(table: pd.DataFrame) -> dict[str, list[float]]:
    """Return for each layer and group the best head's accuracy minus the unpruned model's (Figure 2)."""
    gain = (table["accuracy"] - table["dense_accuracy"]).groupby([table["layer"], table["group"]], sort=False).max()
    return {str(layer): values.tolist() for layer, values in gain.groupby("layer", sort=False)}


def gains_by_chance(
    outcomes: Outcomes, groups: Mapping[str, Sequence[int]], draws: int = 200, seed: int = 0
) -> dict[str, list[float]]:
    """Return the gains after each question's outcomes are shuffled among the unpruned model and a layer's heads.

    After the shuffle no head is better than another, so the best head's gain is chance.
    """
    generator, layers = np.random.default_rng(seed), defaultdict(list)
    for column in outcomes.pool:
        if column != DENSE:
            layers[Head.named(column).layer_label].append(column)
    gains_of: dict[str, list[float]] = defaultdict(list)
    for layer, columns in layers.items():
        part = outcomes.columns([DENSE, *columns])
        for rows in groups.values():
            for _ in range(draws):
                shuffled = np.nanmean(generator.permuted(part.z[rows], axis=1), axis=0)
                gains_of[layer].append(float(shuffled[1:].max() - shuffled[0]))
    return dict(gains_of)


def changes(outcomes: Outcomes) -> dict[str, tuple[float, float]]:
    """Return each head's change in accuracy and the standard error of this paired difference (Figure 5)."""
    dense = outcomes.z[:, outcomes.pool.index(DENSE)]
    change_of = {}
    for i, column in enumerate(outcomes.pool):
        if column != DENSE:
            difference = outcomes.z[:, i] - dense
            difference = difference[~np.isnan(difference)]
            count = len(difference)
            error = float(difference.std(ddof=1) / count**0.5) if count > 1 else 0.0
            change_of[column] = (float(difference.mean()), error)
    return change_of
