"""`lmeval-prune report sprint`: write the SPRINT paper's tables and figures.

Inputs: outcome stores of sweeps, a fitted router, and lm-eval's samples files.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.artefacts import CREATED_BY, digest, write_text
from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.attempts import DENSE, is_single_head
from lmeval_prune.reporting.documents import bold, csv, markdown, render
from lmeval_prune.reporting.statistics import holm, mean_interval, sign_flip_test
from lmeval_prune.sprint import figures, policies
from lmeval_prune.sprint.curves import Curve, oracle_curve, policy_curve, random_curve, samples_curve
from lmeval_prune.sprint.head_table import HeadTable, changes, gains, gains_by_chance
from lmeval_prune.sprint.options import ReportOptions
from lmeval_prune.sprint.outcomes import ANSWER_SETTINGS, Outcomes, OutcomeStore, comparable, warn_of_other_code
from lmeval_prune.sprint.router import Router

logger = logging.getLogger(__name__)


def write_report(options: ReportOptions) -> Path:
    """Write the report; return the path of its Markdown file."""
    folder = Path(options.output)
    test, train, router, notes = _read_inputs(options)
    for note in notes:
        logger.warning("%s", note)
    curves = _curves(options, test, train, router)
    bands = [mean_interval(curve.values, 1.0) for curve in curves]
    dense = float(test.accuracy()[test.pool.index(DENSE)])
    significance = _test_router(curves, options.seed) if router else {}
    head_counts = [Counter(row[k] for row in curves[0].attempts) for k in range(options.n)] if router else []
    heads = _heads_section(test, options, folder)

    figures.pass_at_n(curves, bands, dense, folder / "pass_at_n")
    write_text(folder / "pass_at_n.csv", csv(_pass_rows(curves, bands)))
    numbers = {
        **_pass_json(curves, significance),
        "dense": dense,
        "choices": [dict(counts.most_common()) for counts in head_counts],
        "notes": notes,
        **({"median_gain_of_best_head": heads["medians"], "changes": heads.pop("change_by_head")} if heads else {}),
    }
    write_text(folder / "report.json", json.dumps({"created_by": CREATED_BY, **numbers}, indent=1) + "\n")
    text = render(
        Path(__file__).with_name("report.md.jinja"),
        test=test,
        train=train,
        router=router,
        dense=dense,
        passes=pass_table(curves),
        tests=_difference_table(significance),
        choices=_choice_table(head_counts),
        heads=heads,
        notes=notes,
    )
    write_text(folder / "report.md", text)
    return folder / "report.md"


def _heads_section(test: Outcomes, options: ReportOptions, folder: Path) -> dict[str, Any]:
    """Draw the figures of single heads and return their numbers; nothing if the store has no single heads."""
    outcomes = test.columns([name for name in test.pool if name == DENSE or is_single_head(name)])
    if outcomes.pool == [DENSE]:
        return {}
    table, change_by_head = HeadTable.of(outcomes, options.by), changes(outcomes)
    measured, chance = gains(table), gains_by_chance(outcomes, table, seed=options.seed)
    figures.head_changes(change_by_head, folder / "head_changes")
    figures.head_map(change_by_head, table, folder / "head_map")
    figures.violins(measured, chance, folder / "best_head_gains")
    write_text(folder / "accuracy.csv", csv(table.long()))
    return {
        "change_by_head": {name: {"change": c, "standard_error": e} for name, (c, e) in change_by_head.items()},
        "changes": [change for change, _ in change_by_head.values()],
        "beyond": sum(bool(error) and abs(change) > 2 * error for change, error in change_by_head.values()),
        "medians": {"measured": _median(measured), "by_luck": _median(chance)},
        "groups": table.groups,
        "tables": table.markdown(),
    }


def _read_inputs(options: ReportOptions) -> tuple[Outcomes, Outcomes | None, Router | None, list[str]]:
    """Read the test store, the training store and the router; raise `InputError` if they do not match.

    The last item has notes: what is left out.
    """
    test = OutcomeStore(options.test).read()
    train = OutcomeStore(options.train).read() if options.train else None
    router = Router.load(options.router) if options.router else None
    if router:
        test, train = _split_held_out(test, train, router)
    read = [test.model, *([train.model] if train else []), *([router.about.get("model") or {}] if router else [])]
    models = [model for model in read if model]
    known = ("server", "dtype", "checkpoint")  # of a served model, which has no weights
    weights = [model.get("weights") or [model[name] for name in known if name in model] for model in models]
    pruning = [model.get("interventions", []) for model in models]
    if len(set(map(json.dumps, zip(weights, pruning, strict=True)))) > 1:
        raise InputError("stores and router are of different models, or of one under different pruning; use the same")
    notes: list[str] = []
    if train:
        if shared := set(test.texts) & set(train.texts):
            raise InputError(f"{len(shared)} of the test questions are also training questions; use disjoint splits")
        _check_scoring(test, train.tasks, "the two stores")
    if router:
        _check_scoring(test, router.about.get("tasks", {}), "the test store and the router's outcomes")
    if partial := [name for name, column in zip(test.pool, test.observed.T, strict=True) if not column.all()]:
        notes.append(
            f"left out are columns without outcomes of all questions: {first_few(partial, most=3)}; `lmeval-prune "
            f"sweep` over the whole pool gives them"
        )
        test = test.columns([name for name in test.pool if name not in partial])
    return test, train, router, notes


def _split_held_out(test: Outcomes, train: Outcomes | None, router: Router) -> tuple[Outcomes, Outcomes | None]:
    """Keep the test questions that the router was not fitted on; without a training store, the others are its rows."""
    fitted = set(router.about.get("seen", []))
    is_fitted = np.array([digest(text) in fitted for text in test.texts])
    if not is_fitted.any():
        return test, train
    if is_fitted.all() or not router.about.get("held_out"):
        raise InputError(
            f"{is_fitted.sum()} of the test store's {len(is_fitted)} questions were used to fit the router; use a "
            f"store of other questions, or fit with --holdout 0.5"
        )
    return test.rows(np.flatnonzero(~is_fitted)), train or test.rows(np.flatnonzero(is_fitted))


def _check_scoring(test: Outcomes, tasks: Mapping[str, Any], subject: str) -> None:
    """Refuse other scoring of a task than the test store's."""
    for task in sorted(test.tasks.keys() & tasks.keys()):
        settings, others = comparable(test.tasks[task]), comparable(tasks[task])
        keys = sorted((settings.keys() | others.keys()) - {*ANSWER_SETTINGS})
        if different := [key for key in keys if settings.get(key) != others.get(key)]:
            raise InputError(f"{subject} have different settings of {task} ({', '.join(different)}); sweep both alike")
        warn_of_other_code(task, test.tasks[task], tasks[task])


def _pool(test: Outcomes, router: Router | None) -> list[str]:
    return router.pool if router else test.pool


def _curves(options: ReportOptions, test: Outcomes, train: Outcomes | None, router: Router | None) -> list[Curve]:
    """Return the curves: first the router's, then those of training, of samples, and the bound."""
    n, pool = options.n, _pool(test, router)
    curves = [policy_curve("SPRINT router", policies.nearest(router), test, n)] if router else []
    if train:
        curves.append(policy_curve("best of training", policies.best(train), test, n))
        top = policies.random_top(train, min(options.shortlist, len(train.pool)), options.seed).pool
        curves.append(random_curve(f"random of the top {len(top)} heads", top, test, n))
    curves.append(random_curve(f"random of all {len(pool)}", pool, test, n))
    curves += [samples_curve(name, path, test, n) for name, path in options.samples]
    curves.append(oracle_curve("oracle (not a method)", pool, test, n))
    if twice := [name for name, count in Counter(curve.name for curve in curves).items() if count > 1]:
        raise InputError(f"two curves have the name {twice[0]!r}; give another one to --samples")
    return curves


def _test_router(curves: Sequence[Curve], seed: int) -> dict[str, list[dict[str, float]]]:
    """Test the router against each other policy at each N: mean difference, p, and p after Holm's correction."""
    router, *rivals = [curve for curve in curves if not curve.is_bound]
    if not rivals:
        return {}
    n = router.values.shape[1]
    differences = np.concatenate([router.values - rival.values for rival in rivals], axis=1)
    means, p = differences.mean(0).tolist(), sign_flip_test(differences, seed).tolist()
    rows = [
        {"n": i % n + 1, "difference": difference, "p": p_alone, "p_holm": p_holm}
        for i, (difference, p_alone, p_holm) in enumerate(zip(means, p, holm(p), strict=True))
    ]
    return {rival.name: rows[i * n : (i + 1) * n] for i, rival in enumerate(rivals)}


def _median(values: dict[str, list[float]]) -> float:
    return float(np.median(np.concatenate(list(values.values()))))


def _pass_json(curves: Sequence[Curve], tests: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the fields of `report.json` about pass@N: the values of all policies, and the router's tests."""

    def plain(values: np.ndarray) -> list[float | None]:
        return [None if np.isnan(value) else round(float(value), 6) for value in values]

    return {
        "pass": {curve.name: {"estimate": curve.kind, "values": plain(curve.mean)} for curve in curves},
        "tokens": {curve.name: plain(curve.mean_tokens) for curve in curves if curve.mean_tokens is not None},
        "router_minus": {name: [test for test in row if not np.isnan(test["p"])] for name, row in tests.items()},
    }


def pass_table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table of pass@k: a row for each policy."""
    rows = [[c.name, c.kind, *("" if np.isnan(v) else f"{v:.3f}" for v in c.mean)] for c in curves]
    names = ["policy", "estimate", *(f"pass@{k}" for k in range(1, len(rows[0]) - 1))]
    return markdown(pd.DataFrame(rows, columns=names), ["policy", "estimate"])


def _difference_table(tests: dict[str, list[dict[str, float]]]) -> str:
    if not tests:
        return ""

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
