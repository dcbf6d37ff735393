"""`lmeval-prune report sprint`: write the SPRINT paper's tables and figures.

Inputs: outcome stores of sweeps, a fitted router, and lm-eval's samples files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.artefacts import CREATED_BY, digest, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.reporting.documents import render
from lmeval_prune.reporting.statistics import holm, mean_interval, sign_flip_test
from lmeval_prune.reporting.tables import bold, csv, markdown
from lmeval_prune.sprint import figures, policies
from lmeval_prune.sprint.curves import Curve, oracle_curve, policy_curve, random_curve, samples_curve
from lmeval_prune.sprint.head_table import HeadTable, changes, gains, gains_by_chance
from lmeval_prune.sprint.options import ReportOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.router import Router


def write_report(options: ReportOptions) -> Path:
    """Write the report and return the path of its Markdown file.

    Raises:
        InputError: an input is missing, or inputs are of different models or settings.
    """
    folder = Path(options.output)
    if folder.is_file():
        raise InputError(f"{folder} is a file; name a folder for the report")
    test, train, router = _read_inputs(options)
    head_table, change_by_head = HeadTable.of(test, options.by), changes(test)
    measured_gains, chance_gains = gains(head_table), gains_by_chance(test, head_table, seed=options.seed)
    curves = _curves(options, test, train, router)
    bands = [mean_interval(curve.values, 1.0) for curve in curves]
    dense = float(test.accuracy()[test.pool.index(DENSE)])
    significance = _test_router(curves, options.seed) if router else {}
    head_counts = [Counter(order[k] for order in curves[0].heads) for k in range(options.n)] if router else []
    medians = {"measured": _median(measured_gains), "by_luck": _median(chance_gains)}

    figures.pass_at_n(curves, bands, dense, folder / "pass_at_n")
    figures.head_changes(change_by_head, folder / "head_changes")
    figures.head_map(change_by_head, head_table, folder / "head_map")
    figures.violins(measured_gains, chance_gains, folder / "best_head_gains")
    write_text(folder / "pass_at_n.csv", csv(_pass_rows(curves, bands)))
    write_text(folder / "accuracy.csv", csv(head_table.long()))
    numbers = {
        **_pass_json(curves, significance),
        "dense": dense,
        "choices": [dict(counts.most_common()) for counts in head_counts],
        "median_gain_of_best_head": medians,
        "changes": {name: {"change": c, "standard_error": e} for name, (c, e) in change_by_head.items()},
    }
    write_text(folder / "report.json", json.dumps({"created_by": CREATED_BY, **numbers}, indent=1) + "\n")
    text = render(
        Path(__file__).with_name("report.md.jinja"),
        test=test,
        train=train,
        router=router,
        dense=dense,
        passes=_pass_table(curves),
        tests=_difference_table(significance),
        choices=_choice_table(head_counts),
        changes=[change for change, _ in change_by_head.values()],
        beyond=sum(bool(error) and abs(change) > 2 * error for change, error in change_by_head.values()),
        medians=medians,
        groups=head_table.groups,
        tables=head_table.markdown(),
    )
    write_text(folder / "report.md", text)
    return folder / "report.md"


def _read_inputs(options: ReportOptions) -> tuple[Outcomes, Outcomes | None, Router | None]:
    """Read the test store, the training store and the router; raise `InputError` if they do not match."""
    test = OutcomeStore(options.test).read()
    train = OutcomeStore(options.train).read() if options.train else None
    router = Router.load(options.router) if options.router else None
    if router:
        test, train = _split_held_out(test, train, router)
        missing = [name for name in router.pool if name not in test.pool]
        if missing:
            raise InputError(f"the test store lacks {missing[0]} of the router's pool; sweep it too")
    models = {"test": test.model, "train": train.model if train else {}}
    _check_models({**models, "router": router.about.get("model") or {} if router else {}})
    if train:
        _check_disjoint(test, train)
    _check_sizes(options, test, train, router)
    return test, train, router


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


def _check_models(models: dict[str, dict[str, Any]]) -> None:
    identities = {name: identity for name, model in models.items() if (identity := _model_identity(model))}
    if len(set(identities.values())) > 1:
        raise InputError(f"stores and router are of different models ({', '.join(identities)}); use the same model")


def _check_disjoint(test: Outcomes, train: Outcomes) -> None:
    shared = set(test.texts) & set(train.texts)
    if shared:
        raise InputError(
            f"{len(shared)} of the test store's questions are also training questions, e.g. {min(shared)[:60]!r}; use "
            f"disjoint splits"
        )
    for task in sorted(test.tasks.keys() & train.tasks.keys()):
        settings, others = test.tasks[task], train.tasks[task]
        for key in sorted(settings.keys() | others.keys()):
            if settings.get(key) != others.get(key):
                raise InputError(f"the two stores have different settings of {task} ({key}); sweep both alike")


def _check_sizes(options: ReportOptions, test: Outcomes, train: Outcomes | None, router: Router | None) -> None:
    pool = router.pool if router else test.pool
    sizes = {"pool": len(pool), "shortlist (--shortlist)": options.shortlist}
    if train:
        sizes["training store's pool"] = len(set(train.pool) & set(pool))
    for name, size in sizes.items():
        if options.n > size:
            raise InputError(
                f"n={options.n} tries need as many heads, but the {name} has {size}; give --n {size} or less"
            )


def _model_identity(model: dict[str, Any]) -> Any:
    """Return the fingerprint of a model's weights; for a served model its server, dtype and checkpoint."""
    return model.get("weights") or tuple(model[name] for name in ("server", "dtype", "checkpoint") if name in model)


def _curves(options: ReportOptions, test: Outcomes, train: Outcomes | None, router: Router | None) -> list[Curve]:
    n = options.n
    pool = router.pool if router else test.pool
    curves = [policy_curve("SPRINT router", policies.nearest(router), test, n)] if router else []
    if train:
        train = train.columns([name for name in train.pool if name in pool])
        curves.append(policy_curve("best heads of training", policies.best(train), test, n))
        top = policies.random_top(train, min(options.shortlist, len(train.pool)), options.seed).pool
        curves.append(random_curve(f"random of the top {len(top)} heads", top, test, n))
    curves.append(random_curve(f"random of all {len(pool)}", pool, test, n))
    curves += [samples_curve(name, path, test, n) for name, path in options.samples]
    curves.append(oracle_curve("oracle (not a method)", pool, test, n))
    return curves


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


def _median(values: dict[str, list[float]]) -> float:
    return float(np.median(np.concatenate(list(values.values()))))


def _pass_json(curves: Sequence[Curve], tests: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the fields of `report.json` about pass@N: the values of all policies, and the router's tests."""

    def plain(values: np.ndarray) -> list[float | None]:
        return [None if np.isnan(value) else round(float(value), 6) for value in values]

    return {
        "pass": {curve.name: {"estimate": curve.kind, "values": plain(curve.mean)} for curve in curves},
        "router_minus": {name: [test for test in row if not np.isnan(test["p"])] for name, row in tests.items()},
    }


def _pass_table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table of pass@k: a row for each policy."""
    rows = [[c.name, c.kind, *("" if np.isnan(v) else f"{v:.3f}" for v in c.mean)] for c in curves]
    names = ["policy", "estimate", *(f"pass@{k}" for k in range(1, len(rows[0]) - 1))]
    return markdown(pd.DataFrame(rows, columns=names), ["policy", "estimate"])


def _difference_table(tests: dict[str, list[dict[str, float]]]) -> str:
    """Return a Markdown table of the router's differences and p-values; significant ones are bold."""

    def cell(test: dict[str, float]) -> str:
        text = f"{test['difference']:+.3f} ({test['p']:.2g})"
        return "" if np.isnan(test["p"]) else bold(text, test["p_holm"] < 0.05)

    rows = [{"policy": name, **{f"N = {test['n']}": cell(test) for test in row}} for name, row in tests.items()]
    return markdown(pd.DataFrame(rows), ["policy"])


def _choice_table(choices: Sequence[Counter[str]]) -> str:
    """Return a Markdown table of the heads that the router chose for each try."""
    rows = [
        (k, len(counts), ", ".join(f"{name} ({count})" for name, count in counts.most_common(4)))
        for k, counts in enumerate(choices, 1)
    ]
    names = ["try", "different heads", "most frequent (questions)"]
    return markdown(pd.DataFrame(rows, columns=names), [names[0], names[2]])


def _pass_rows(curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """Return pass@N with confidence limits in long format: a row for each policy and N, without unknown values."""
    rows = [
        (curve.name, curve.kind, k + 1, mean, low[k], high[k])
        for curve, (low, high) in zip(curves, bands, strict=True)
        for k, mean in enumerate(curve.mean)
    ]
    return pd.DataFrame(rows, columns=["policy", "estimate", "n", "pass", "low", "high"]).dropna(subset="pass")
