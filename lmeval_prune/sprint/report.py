"""`lmeval-prune report sprint`: the SPRINT paper's tables and figures, from stores, a router and samples files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.models.tries import DENSE
from lmeval_prune.reporting.documents import render
from lmeval_prune.reporting.statistics import holm, mean_interval, sign_flip_test
from lmeval_prune.reporting.tables import bold, csv, markdown
from lmeval_prune.sprint import figures
from lmeval_prune.sprint.curves import Curve, at_random, from_samples, in_hindsight, ordered
from lmeval_prune.sprint.head_table import HeadTable, changes, gains, gains_by_luck
from lmeval_prune.sprint.options import ReportOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.policies import Best, Nearest, RandomTop
from lmeval_prune.sprint.router import Router, text_key


class SprintReport(ReportOptions):
    """Writes what the options ask for."""

    def write(self) -> Path:
        """Write the report.

        Returns:
            Its Markdown file.

        Raises:
            InputError: something is missing or does not belong together.
        """
        if Path(self.output).is_file():
            raise InputError(f"{self.output} is a file; name a folder for the report")
        if self.n < 1:
            raise InputError(f"n must be at least 1, not {self.n}")
        test = OutcomeStore(self.test).read()
        train = OutcomeStore(self.train).read() if self.train else None
        router = Router.load(self.router) if self.router else None
        if router:
            test, train = self._unseen(test, train, router)
        self._check(test, train, router)

        heads, moved = HeadTable.of(test, self.by), changes(test)
        measured, lucky = gains(heads), gains_by_luck(test, heads, seed=self.seed)
        curves = self._curves(test, train, router)
        bands = [mean_interval(curve.values, 1.0) for curve in curves]
        dense = float(test.accuracy()[test.pool.index(DENSE)])
        tests = self._tests(curves) if router else {}
        choices = [Counter(order[k] for order in curves[0].heads) for k in range(self.n)] if router else []
        medians = {name: _median(values) for name, values in (("measured", measured), ("by_luck", lucky))}

        folder = Path(self.output)
        figures.pass_at_n(curves, bands, dense, folder / "pass_at_n")
        figures.head_changes(moved, folder / "head_changes")
        figures.head_map(moved, heads, folder / "head_map")
        figures.violins(measured, lucky, folder / "best_head_gains")
        write_text(folder / "pass_at_n.csv", csv(_long(curves, bands)))
        write_text(folder / "accuracy.csv", csv(heads.long()))
        numbers = {
            "created_by": CREATED_BY,
            "pass": {c.name: {"estimate": c.kind, "values": _plain(c.mean)} for c in curves},
            "dense": dense,
            "router_minus": {name: [t for t in row if not np.isnan(t["p"])] for name, row in tests.items()},
            "choices": [dict(counts.most_common()) for counts in choices],
            "median_gain_of_best_head": medians,
            "changes": {name: {"change": c, "standard_error": e} for name, (c, e) in moved.items()},
        }
        write_text(folder / "report.json", json.dumps(numbers, indent=1) + "\n")
        text = render(
            Path(__file__).with_name("report.md.jinja"),
            test=test,
            cut_off=[(name, one.cut_off) for name, one in (("Test", test), ("Training", train)) if one and one.cut_off],
            train=train,
            router=router,
            dense=dense,
            passes=self._passes(curves),
            tests=self._differences(tests),
            choices=_choices(choices),
            changes=[change for change, _ in moved.values()],
            beyond=sum(bool(error) and abs(change) > 2 * error for change, error in moved.values()),
            medians=medians,
            groups=heads.groups,
            tables=heads.markdown(),
        )
        write_text(folder / "report.md", text)
        return folder / "report.md"

    def _check(self, test: Outcomes, train: Outcomes | None, router: Router | None) -> None:
        identities = {"test": test.model, "train": train.model if train else None}
        identities["router"] = router.about.get("model") if router else None
        weights = {name: _computed_by(model) for name, model in identities.items() if model and _computed_by(model)}
        if len(set(weights.values())) > 1:
            raise InputError(f"stores and router are of different models ({', '.join(weights)}); use those of one")
        shared = set(test.texts) & set(train.texts) if train else set()
        if shared:
            raise InputError(
                f"{len(shared)} of the test store's questions are training questions too, e.g. "
                f"{min(shared)[:60]!r}; take disjoint splits"
            )
        missing = [name for name in router.pool if name not in test.pool] if router else []
        if missing:
            raise InputError(f"the router's pool holds {missing[0]}, which the test store lacks; sweep it too")
        pool = router.pool if router else test.pool
        sizes = {"pool": len(pool), "shortlist (--shortlist)": self.shortlist}
        if train:
            sizes["training store's pool"] = len(set(train.pool) & set(pool))
        for name, size in sizes.items():
            if self.n > size:
                raise InputError(
                    f"n={self.n} tries need as many heads, and the {name} has {size}; give --n {size} or less"
                )
        others = train.tasks if train else {}
        for task in test.tasks.keys() & others.keys():
            for key in sorted(test.tasks[task].keys() | others[task].keys()):
                if test.tasks[task].get(key) != others[task].get(key):
                    raise InputError(
                        f"the two stores were made with different settings of {task} ({key}); sweep them alike"
                    )

    def _unseen(self, test: Outcomes, train: Outcomes | None, router: Router) -> tuple[Outcomes, Outcomes | None]:
        """Of the test store the questions that the router was not fitted on; the others train the baselines."""
        seen = set(router.about.get("seen", []))
        is_seen = [text_key(text) in seen for text in test.texts]
        if not any(is_seen):
            return test, train
        if all(is_seen) or not router.about.get("held_out"):
            raise InputError(
                f"{sum(is_seen)} of the test store's {len(is_seen)} questions were used to fit the router; take a "
                f"store of other questions, or fit with --holdout 0.5"
            )
        fitted = test.rows([i for i, used in enumerate(is_seen) if used])
        return test.rows([i for i, used in enumerate(is_seen) if not used]), train or fitted

    def _curves(self, test: Outcomes, train: Outcomes | None, router: Router | None) -> list[Curve]:
        n = self.n
        pool = router.pool if router else test.pool
        found = [ordered("SPRINT router", Nearest(router), test, n)] if router else []
        if train:
            there = train.columns([name for name in train.pool if name in pool])
            found.append(ordered("best heads of training", Best.of(there), test, n))
            top = RandomTop.of(there, min(self.shortlist, len(there.pool)), self.seed).pool
            found.append(at_random(f"random of the top {len(top)} heads", top, test, n))
        found.append(at_random(f"random of all {len(pool)}", pool, test, n))
        found += [from_samples(name, path, test, n) for name, path in self.samples]
        found.append(in_hindsight("oracle (not a method)", pool, test, n))
        return found

    def _tests(self, curves: Sequence[Curve]) -> dict[str, list[dict[str, float]]]:
        """The router against each rival, at each N: mean difference and p, alone and after Holm's correction."""
        first, *others = [curve for curve in curves if not curve.is_bound]
        differences = np.concatenate([first.values - other.values for other in others], axis=1)
        means, p = differences.mean(0).tolist(), sign_flip_test(differences, self.seed).tolist()
        rows = zip(means, p, holm(p), strict=True)
        every = [{"n": i % self.n + 1, "difference": d, "p": p, "p_holm": h} for i, (d, p, h) in enumerate(rows)]
        return {other.name: every[i * self.n : (i + 1) * self.n] for i, other in enumerate(others)}

    def _passes(self, curves: Sequence[Curve]) -> str:
        rows = [[c.name, c.kind, *("" if np.isnan(v) else f"{v:.3f}" for v in c.mean)] for c in curves]
        names = ["policy", "estimate", *(f"pass@{k}" for k in range(1, self.n + 1))]
        return markdown(pd.DataFrame(rows, columns=names), ["policy", "estimate"])

    def _differences(self, tests: dict[str, list[dict[str, float]]]) -> str:
        def cell(test: dict[str, float]) -> str:
            shown = f"{test['difference']:+.3f} ({test['p']:.2g})"
            return "" if np.isnan(test["p"]) else bold(shown, test["p_holm"] < 0.05)

        rows = [[name, *map(cell, row)] for name, row in tests.items()]
        return markdown(pd.DataFrame(rows, columns=["policy", *(f"N = {k}" for k in range(1, self.n + 1))]), ["policy"])


def _choices(choices: Sequence[Counter[str]]) -> str:
    def often(counts: Counter[str]) -> str:
        return ", ".join(f"{name} ({count})" for name, count in counts.most_common(4))

    rows = [(k + 1, len(counts), often(counts)) for k, counts in enumerate(choices)]
    names = ["try", "different heads", "most frequent (questions)"]
    return markdown(pd.DataFrame(rows, columns=names), [names[0], names[2]])


def _long(curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """A row for each policy and number of tries whose pass@N is known."""
    rows = [
        (curve.name, curve.kind, k + 1, mean, low[k], high[k])
        for curve, (low, high) in zip(curves, bands, strict=True)
        for k, mean in enumerate(curve.mean)
    ]
    return pd.DataFrame(rows, columns=["policy", "estimate", "n", "pass", "low", "high"]).dropna(subset="pass")


def _median(values: dict[str, list[float]]) -> float:
    return float(np.median(np.concatenate(list(values.values()))))


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 6) for value in values]


def _computed_by(model: dict[str, Any]) -> Any:
    """By what a model is known: its weights, in their type; one that is served by its files, server and type."""
    return model.get("weights") or tuple(model[name] for name in ("server", "dtype", "checkpoint") if name in model)
