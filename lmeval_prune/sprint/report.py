"""`lmeval-prune report sprint`: the SPRINT paper's tables and figures, from stores, a router and samples files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_prune.artefacts import CREATED_BY, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.models.tries import DENSE
from lmeval_prune.sprint import curves as curve
from lmeval_prune.sprint import figures
from lmeval_prune.sprint.head_table import HeadTable, changes, gains, gains_by_luck
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.policies import Best, Nearest, RandomTop
from lmeval_prune.sprint.router import Router, text_key


@dataclass(frozen=True)
class SprintReport:
    """What to report on.

    Attributes:
        test: outcome store of the questions that are asked; of the store that the router was fitted on, the
            questions that were held out, and the others are the training questions.
        output: folder for `report.md`, tables (CSV), figures (PNG, SVG) and `report.json`.
        train: outcome store of training questions: for the baselines `best` and `random_top`.
        router: folder of a fitted router.
        samples: (name, path) of lm-eval samples files of pass@N tasks on the same questions.
        n: tries.
        by: attribute by which questions are grouped.
        shortlist: size of `random_top`'s.
        seed: of the bootstrap, the permutations and the tests.
    """

    test: str
    output: str
    train: str | None = None
    router: str | None = None
    samples: Sequence[tuple[str, str]] = field(default_factory=tuple)
    n: int = 8
    by: str | None = None
    shortlist: int = 16
    seed: int = 0

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
        folder = Path(self.output)
        table = HeadTable.of(test, self.by)
        text = [f"# SPRINT report\n\n{self._about(test, train, router)}"]
        found: dict[str, Any] = {"created_by": CREATED_BY}

        drawn = self._curves(test, train, router)
        dense = float(test.accuracy()[test.pool.index(DENSE)])
        bands = [curve.band(c, self.seed) for c in drawn]
        figures.pass_at_n(drawn, bands, dense, folder / "pass_at_n")
        text.append(self._passes(drawn, dense, found))
        write_text(folder / "pass_at_n.csv", _csv(drawn, bands))
        if router:
            text.append(self._choices(drawn[0].heads, found))

        moved = changes(test)
        figures.head_changes(moved, folder / "head_changes")
        figures.head_map(moved, table, folder / "head_map")
        measured, lucky = gains(table), gains_by_luck(test, table, seed=self.seed)
        figures.violins(measured, lucky, folder / "best_head_gains")
        text.append(self._gains(measured, lucky, moved, found))
        write_text(folder / "accuracy.csv", table.csv())
        text.append("## Accuracy by group, layer and head\n\n" + table.markdown())
        write_text(folder / "report.json", json.dumps(found, indent=1) + "\n")
        write_text(folder / "report.md", "\n\n".join(text) + "\n")
        return folder / "report.md"

    # ------------------------------------------------------------------ parts

    def _check(self, test: Outcomes, train: Outcomes | None, router: Router | None) -> None:
        identities = {"test": test.model, "train": train.model if train else None}
        identities["router"] = router.about.get("model") if router else None
        weights = {name: model["weights"] for name, model in identities.items() if model and "weights" in model}
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

    def _curves(self, test: Outcomes, train: Outcomes | None, router: Router | None) -> list[curve.Curve]:
        n = self.n
        pool = router.pool if router else test.pool
        found = [curve.ordered("SPRINT router", Nearest(router), test, n)] if router else []
        if train:
            there = train.columns([name for name in train.pool if name in pool])
            found.append(curve.ordered("best heads of training", Best.of(there), test, n))
            top = RandomTop.of(there, min(self.shortlist, len(there.pool)), self.seed).pool
            found.append(curve.at_random(f"random of the top {len(top)} heads", top, test, n))
        found.append(curve.at_random(f"random of all {len(pool)}", pool, test, n))
        found += [curve.from_samples(name, path, test, n) for name, path in self.samples]
        found.append(curve.in_hindsight("oracle (not a method)", pool, test, n))
        return found

    def _about(self, test: Outcomes, train: Outcomes | None, router: Router | None) -> str:
        lines = [
            f"Model: {test.model.get('name', '')}. Test: {len(test.questions)} questions of {', '.join(test.tasks)}"
        ]
        lines[0] += f" ({', '.join(sorted({row['split'] for row in test.questions}))}), pool of {len(test.pool)}."
        if train:
            split = ", ".join(sorted({row["split"] for row in train.questions}))
            lines.append(f"Training: {len(train.questions)} questions ({split}).")
        if router:
            a = router.about
            lines.append(
                f"Router: p = {a['p']}, λ = {a['lambda']}, diversity {a['options']['diversity']}; "
                f"{a['questions_no_head_solves']} of {a['questions']} training questions are solved by no head and "
                f"{a['questions_all_heads_solve']} by all; encoder {router.encoder}."
            )
        return "\n".join(lines)

    def _passes(self, drawn: list[curve.Curve], dense: float, found: dict[str, Any]) -> str:
        header = "| policy | estimate | " + " | ".join(f"pass@{k}" for k in range(1, self.n + 1)) + " |"
        lines = ["## pass@N", "", "![pass@N](pass_at_n.png)", "", header, "| --- | --- |" + " ---: |" * self.n]
        for c in drawn:
            lines.append(f"| {c.name} | {c.kind} | " + " | ".join(_number(value) for value in c.mean) + " |")
        lines += ["", f"Unpruned, greedy: {dense:.3f}.", "", _ESTIMATES]
        found["pass"] = {c.name: {"estimate": c.kind, "values": _plain(c.mean)} for c in drawn}
        found["dense"] = dense
        first = drawn[0]
        others = [c for c in drawn[1:] if not c.name.startswith("oracle")]
        if first.name == "SPRINT router" and others:
            lines += ["", "### Is the router better? Paired tests", ""]
            lines += [f"Router minus …, mean difference over questions (two-sided p, {_TEST})", ""]
            lines += [header.replace("| estimate ", "").replace("pass@", "N = "), "| --- |" + " ---: |" * self.n]
            tests = {other.name: curve.paired_test(first, other, self.seed) for other in others}
            family = curve.holm([p for found_tests in tests.values() for _, p in found_tests])
            found["router_minus"] = {}
            for place, (name, pairs) in enumerate(tests.items()):
                adjusted = family[place * self.n : (place + 1) * self.n]
                cells = [
                    "" if np.isnan(d) else ("**{}**" if a < 0.05 else "{}").format(f"{d:+.3f} ({p:.2g})")
                    for (d, p), a in zip(pairs, adjusted, strict=True)
                ]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
                found["router_minus"][name] = [
                    {"n": k + 1, "difference": d, "p": p, "p_holm": a}
                    for k, ((d, p), a) in enumerate(zip(pairs, adjusted, strict=True))
                    if not np.isnan(d)
                ]
            lines += ["", "Bold: below 0.05 after Holm's correction over this table."]
        return "\n".join(lines)

    def _choices(self, orders: Sequence[Sequence[str]], found: dict[str, Any]) -> str:
        tries = [Counter(order[k] for order in orders) for k in range(self.n)]
        found["choices"] = [dict(counts.most_common()) for counts in tries]
        lines = [
            "## What the router chooses",
            "",
            "| try | different heads | most frequent (questions) |",
            "| --- | ---: | --- |",
        ]
        for k, counts in enumerate(tries):
            often = ", ".join(f"{name} ({count})" for name, count in counts.most_common(4))
            lines.append(f"| {k + 1} | {len(counts)} | {often} |")
        lines += ["", "A try that is one head for all questions is not routed by the question."]
        return "\n".join(lines)

    def _gains(
        self,
        measured: dict[str, list[float]],
        lucky: dict[str, list[float]],
        moved: dict[str, tuple[float, float]],
        found: dict[str, Any],
    ) -> str:
        every, luck = (float(np.median(np.concatenate(list(values.values())))) for values in (measured, lucky))
        beyond = [name for name, (change, error) in moved.items() if error and abs(change) > 2 * error]
        found["median_gain_of_best_head"] = {"measured": every, "by_luck": luck}
        found["changes"] = {name: {"change": c, "standard_error": e} for name, (c, e) in moved.items()}
        return (
            "## Single heads\n\n![change in accuracy](head_changes.png)\n\n![layer by head](head_map.png)\n\n"
            f"{sum(change > 0 for change, _ in moved.values())} of {len(moved)} heads raise accuracy when pruned, "
            f"{sum(change < 0 for change, _ in moved.values())} lower it; {len(beyond)} changes are larger than two "
            "standard errors (about one in twenty would be by chance).\n\n![best head](best_head_gains.png)\n\n"
            f"The best head of a layer beats the unpruned model by a median of {every:+.3f} over groups and layers. "
            "**The best of many noisy numbers is optimistic**: with each question's outcomes shuffled among a layer's "
            f"heads and the unpruned model, so that no head matters, the median is {luck:+.3f}."
        )


_TEST = "10,000 random flips of the questions' signs"
_ESTIMATES = (
    "*ordered*: any of the policy's first N is right. *exact*: the expectation over random draws without replacement. "
    "*unbiased*: 1 − C(n−c, N)/C(n, N) over n samples, c of them right. The oracle looks at the test outcomes: an "
    "upper bound, not a method."
)


def _csv(drawn: list[curve.Curve], bands: list[tuple[np.ndarray, np.ndarray]]) -> str:
    lines = ["policy,estimate,n,pass,low,high"]
    for c, (low, high) in zip(drawn, bands, strict=True):
        lines += [
            f'"{c.name}",{c.kind},{k + 1},{mean:.6f},{low[k]:.6f},{high[k]:.6f}'
            for k, mean in enumerate(c.mean)
            if not np.isnan(mean)
        ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.3f}"


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 6) for value in values]
