"""The report of `sprint_race.py`, from its stores; nothing is run here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import sprint_race_choice as race
import sprint_race_guesses as guesses
from _record import environment, write
from lmeval_prune.sprint.choosing import Choices, accuracy_at, extraction_note
from lmeval_prune.sprint.mixes import Mix
from markupsafe import Markup
from scipy import stats
from sprint_race_claims import code_text, outcomes_digest, status, verdict
from sprint_race_plan import NS

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE, Attempt
from lmeval_prune.reporting.documents import render
from lmeval_prune.reporting.statistics import mean_interval
from lmeval_prune.reporting.tables import bold, csv, markdown, p_value
from lmeval_prune.sprint import figures, policies
from lmeval_prune.sprint.curves import Curve, policy_curve
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.policies import Policy
from lmeval_prune.sprint.report import cost_table, pass_table

CHOSEN, SAMPLING = "chosen by training", "sampling"
RULES = ("majority", "variants", "likelihood")  # that are compared
RIVALS = 2  # other policies that are compared: SPRINT as published, and the cover


@dataclass
class Fold:
    """A fold's test outcomes, and what training chose for it."""

    outcomes: Outcomes
    choice: dict[str, Any]
    policy_of: Callable[[str], Policy]

    @cached_property
    def mix(self) -> Mix:
        return Mix.parse(self.choice["mix"])

    @cached_property
    def rival(self) -> Mix:
        return Mix.parse(self.choice["rival"])

    def curve(self, order: str, mix: Mix, n: int) -> Curve:
        return policy_curve(order, self.policy_of(order), self.outcomes, n, mix)


class Report:
    """Figures of a race over its folds."""

    def __init__(self, source: Any, folds: Sequence[int]) -> None:
        self.race, self.plan = source, source.plan
        self.folds = [self._fold(number) for number in folds]

    def _fold(self, number: int) -> Fold:
        outcomes = OutcomeStore(self.race.store(number, "test")).read()
        return Fold(outcomes, self.race.choice(number), cache(partial(self.race.policy, number)))

    # ------------------------------------------------------------------ curves

    def together(self, name: str, curve: Callable[[Fold], Curve]) -> Curve:
        """One curve over the questions of all folds, up to the largest number of tries."""
        parts = [curve(fold) for fold in self.folds]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        kind = parts[0].kind if len({part.kind for part in parts}) == 1 else "unbiased"
        spent = self._wide(tokens) if len(tokens) == len(parts) else None
        return Curve(name, kind, self._wide([part.values for part in parts]), tokens=spent)

    def _wide(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Stack the questions of all folds, with NaN for tries that were not made."""
        rows = np.concatenate(parts)
        return np.pad(rows, ((0, 0), (0, self.plan.most - rows.shape[1])), constant_values=np.nan)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """All policies, the chosen one first."""
        plan, most = self.plan, self.plan.most
        curves: dict[str, Callable[[Fold], Curve]] = {
            CHOSEN: lambda fold: fold.curve(fold.choice["order"], fold.mix, most),
            SAMPLING: lambda fold: race.sampling_curve(fold.outcomes, fold.rival, most),
        }
        for name, (order, mix) in self.rivals.items():
            curves[name] = lambda fold, order=order, mix=mix: fold.curve(order, mix, plan.n)
        return {name: self.together(name, curve) for name, curve in curves.items()}

    @cached_property
    def rivals(self) -> dict[str, tuple[str, Mix]]:
        """The other policies that were tested in all folds."""
        by_fold = [self.race.rivals(fold.choice["fold"]) for fold in self.folds]
        return {name: pair for name, pair in by_fold[0].items() if all(name in fold_rivals for fold_rivals in by_fold)}

    # ------------------------------------------------------------------ comparisons

    def comparisons(self) -> list[race.Comparison]:
        """The primary comparison, then the secondary ones of the plan; `InputError` if one of them is missing."""
        n, chosen, sampling = self.plan.n, self.curves[CHOSEN].values, self.curves[SAMPLING].values
        greedy = np.concatenate([fold.outcomes.columns([DENSE]).z[:, 0] for fold in self.folds])

        def at(k: int, name: str = "", primary: bool = False) -> race.Comparison:
            return race.Comparison(name or f"pass@{k}", chosen[:, k - 1], sampling[:, k - 1], primary)

        result = [at(n, f"pass@{n}, primary", True)]
        result += [at(k) for k in NS if k not in (1, n) and k <= self.plan.most]
        result.append(race.Comparison("pass@1, beside the greedy answer", chosen[:, 0], greedy))
        result.append(race.Comparison(f"at the tokens of {n} tries", chosen[:, n - 1], self.sampled_at_tokens()))
        for rule, (voted, of_samples) in self.without_gold(n).items():
            result.append(race.Comparison(f"{rule} at {n}", voted, of_samples))
            result.append(race.Comparison(f"{rule} at {n}, beside the greedy answer", voted, greedy))
        for name in self.rivals:
            result.append(race.Comparison(f"{name}, pass@{n}", self.curves[name].values[:, n - 1], sampling[:, n - 1]))
        expected = 3 + sum(k not in (1, n) and k <= self.plan.most for k in NS) + 2 * len(RULES) + RIVALS
        if not self.race.note and len(result) != expected:
            raise InputError(
                f"report: {len(result)} comparisons can be made of the plan's {expected}; an answer, a log-probability "
                f"or a policy is missing in some fold"
            )
        return result

    def sampled_at_tokens(self) -> np.ndarray:
        """Pass of as many tries of sampling as have, on average, the tokens of the chosen policy's first n tries.

        Between two numbers of tries it is interpolated: the larger one is made with the probability at which the mean
        number of tokens is the policy's.
        """
        values = []
        for fold in self.folds:
            spent = fold.curve(fold.choice["order"], fold.mix, self.plan.n).mean_tokens
            sampled = race.sampling_curve(fold.outcomes, fold.rival, self.plan.most)
            assert spent is not None and sampled.mean_tokens is not None
            values.append(at_budget(sampled.values, sampled.mean_tokens, float(spent[-1])))
        return np.concatenate(values)

    def cut_off(self) -> dict[str, float]:
        """Share of the answers of each kind that end at the limit of new tokens."""
        kinds: dict[str, Callable[[Attempt], bool]] = {
            "greedy, unpruned": lambda attempt: attempt.variant == DENSE and not attempt.is_sampled,
            "sampled, unpruned": lambda attempt: attempt.variant == DENSE and attempt.is_sampled,
            "under variants": lambda attempt: attempt.variant != DENSE,
        }
        shares = {}
        for kind, is_of in kinds.items():
            tokens = [
                part.columns([name for name in part.pool if is_of(Attempt.named(name))]).tokens
                for part in (fold.outcomes for fold in self.folds)
            ]
            lengths = np.concatenate([part[~np.isnan(part)] for part in tokens if part is not None] or [np.array([])])
            if len(lengths):
                shares[kind] = float((lengths >= self.plan.max_gen_toks).mean())
        return shares

    def solved_only(self) -> dict[str, Any]:
        """What only pruned variants solve, of the choosing questions with most samples."""
        stores = [OutcomeStore(self.race.store(fold.choice["fold"], "train")).read() for fold in self.folds]
        temperatures = [race.temperature_of(fold.rival) for fold in self.folds]
        return race.solved_only(stores, temperatures, self.plan.ceiling_samples)

    @cached_property
    def votes(self) -> dict[str, list[dict[str, Choices]]]:
        """Accuracy at each N by rule and fold, of the chosen policy and of sampling."""
        ns, unpruned = [k for k in NS if k <= self.plan.most], policies.random_order([DENSE])
        return {
            CHOSEN: [accuracy_at(f.policy_of(f.choice["order"]), f.outcomes, ns, f.mix) for f in self.folds],
            SAMPLING: [accuracy_at(unpruned, f.outcomes, ns, f.rival) for f in self.folds],
        }

    def without_gold(self, n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Accuracy at n of the chosen policy and of sampling, by rule."""
        column = [k for k in NS if k <= self.plan.most].index(n)

        def values(name: str, rule: str) -> np.ndarray:
            return np.concatenate([part[rule].values[:, column] for part in self.votes[name]])

        rules = [rule for rule in RULES if all(rule in p for v in self.votes.values() for p in v)]
        return {rule: (values(CHOSEN, rule), values(SAMPLING, rule)) for rule in rules}

    def vote_rows(self) -> pd.DataFrame:
        """Accuracy at N, ties and pass@N of each rule: a row for each policy, rule and N."""
        rows = []
        for name, parts in self.votes.items():
            for rule in [rule for rule in parts[0] if all(rule in part for part in parts)]:
                for column, n in enumerate(k for k in NS if k <= self.plan.most):
                    values, ties = (
                        np.concatenate([getattr(p[rule], key)[:, column] for p in parts]) for key in ("values", "ties")
                    )
                    passed = float(self.curves[name].mean[n - 1])
                    rows.append((name, rule, n, float(values.mean()), float(ties.mean()), passed))
        return pd.DataFrame(rows, columns=["policy", "rule", "n", "accuracy", "ties", "pass"])


def write_race_report(source: Any, folds: Sequence[int]) -> None:
    """Write the report's page, pictures, tables and results file."""
    report, plan = Report(source, folds), source.plan
    output = source.report_folder
    choices, curves = read_json(source.choices_file), list(report.curves.values())
    comparisons = report.comparisons()
    rows = [
        row | {"differing": int((comparison.policy != comparison.sampling).sum())}
        for row, comparison in zip(race.test_comparisons(comparisons, plan.seed), comparisons, strict=True)
    ]
    primary, registered = rows[0] | narrow_interval(comparisons[0]), status(source, folds)
    only = report.solved_only()
    without_model = guesses.passes(source, [f.outcomes.texts for f in report.folds])
    votes = report.vote_rows()
    bands = [mean_interval(curve.values, 1.0) for curve in curves]
    dense = float(np.mean(np.concatenate([f.outcomes.z[:, f.outcomes.pool.index(DENSE)] for f in report.folds])))
    figures.pass_at_n(curves, bands, dense, output / "pass_at_n", SAMPLING)
    figures.pass_at_tokens(curves, output / "pass_at_tokens", SAMPLING)
    by_fold = [
        {"fold": f.choice["fold"], "questions": len(f.outcomes.texts), **fold_figures(f, plan)} for f in report.folds
    ]
    folds_difference, cut_off = over_folds(by_fold), report.cut_off()
    write_text(output / "comparisons.csv", csv(pd.DataFrame(rows)))
    text = render(
        Path(__file__).with_name("sprint_race.md.jinja"),
        status=registered["text"],
        code=code_text(source.code),
        counts={"questions": primary["questions"], "folds": folds, "left_out": len(source.twins)},
        ceiling=only,
        plan=plan,
        choices_link=Markup("[choices.json](choices.json)") if not source.note else Markup("`choices.json`"),
        primary=primary,
        interval_text=interval_text,
        verdict=verdict(primary, bool(registered["commit"]), plan.margin),
        over_folds=folds_difference,
        cut_off=cut_off,
        without_model=without_model,
        power=race.POWER,
        smallest=choices["smallest_difference"],
        chosen=markdown(pd.DataFrame([_formatted(row) for row in by_fold]), ["order", "mix", "rival"]),
        secondary=secondary_table(rows[1:]),
        passes=pass_table(curves),
        dense=dense,
        costs=cost_table(curves),
        without_gold=vote_table(votes),
        extraction=extraction_note(report.folds[0].outcomes.tasks),
        only=only_table(only),
    )
    write_text(output / ("report.md"), text)
    results = {
        "environment": environment(),
        "registration": registered,
        "code": source.code,
        "rehearsal": source.limit,
        "seconds": source.seconds,
        "rates": source.rates,
        "comparisons": [primary, *rows[1:]],
        "folds": by_fold,
        "over_folds": folds_difference,
        "cut_off": cut_off,
        "without_model": without_model,
        "test_outcomes": {str(f.choice["fold"]): outcomes_digest(f.outcomes) for f in report.folds},
        "dense": dense,
        "pass": {curve.name: rounded_values(curve.mean, 6) for curve in curves},
        "tokens": {c.name: rounded_values(c.mean_tokens, 3) for c in curves if c.mean_tokens is not None},
        "without_gold": votes.to_dict("records"),
        "solved_only": only,
    }
    if source.note:
        write_text(output / "results.json", json.dumps(results, indent=1) + "\n")
        print(f"{output / 'report.md'}: {source.note}")
    else:
        write("sprint_race", results)
        print(f"{output / 'report.md'}: {registered['text']}")


def at_budget(values: np.ndarray, tokens: np.ndarray, budget: float) -> np.ndarray:
    """Return pass of sampling at a mean number of tokens, between the two numbers of tries around it.

    Args:
        values: pass@k for k = 1 …, (questions, tries).
        tokens: mean number of tokens of the first k tries, (tries,), increasing.
        budget: mean number of tokens; above that of all tries, they are all made.
    """
    tokens, values = np.append(0.0, tokens), np.pad(values, ((0, 0), (1, 0)))
    upper = min(int(np.searchsorted(tokens, budget)), len(tokens) - 1)
    share = min((budget - tokens[upper - 1]) / (tokens[upper] - tokens[upper - 1]), 1.0)
    return np.asarray(values[:, upper - 1] * (1 - share) + values[:, upper] * share)


def student_interval(values: np.ndarray, level: float) -> tuple[float, float]:
    """Return Student's interval of a mean: its ends have `level` of the probability outside, half on each side."""
    mean, error = float(values.mean()), float(values.std(ddof=1)) / len(values) ** 0.5
    half = float(stats.t.isf(level / 2, len(values) - 1)) * error
    return mean - half, mean + half


def narrow_interval(primary: race.Comparison) -> dict[str, float]:
    """The 90% interval of the primary difference, of two one-sided tests for equivalence."""
    low, high = student_interval(primary.policy - primary.sampling, 2 * race.LEVEL)
    return {"low_90": low, "high_90": high}


def over_folds(by_fold: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Mean of the folds' differences with the 95% interval of Student's t over folds; None for a single fold."""
    differences = np.array([fold["policy"] - fold["sampling"] for fold in by_fold])
    if len(differences) < 2:
        return None
    low, high = student_interval(differences, race.LEVEL)
    return {"mean": float(differences.mean()), "low": low, "high": high}


def rounded_values(values: np.ndarray, digits: int) -> list[float]:
    """The known values of a curve, rounded."""
    return [round(float(value), digits) for value in values if not np.isnan(value)]


def fold_figures(fold: Fold, plan: Any) -> dict[str, Any]:
    """What training chose for a fold, and what the test gave."""
    policy = fold.curve(fold.choice["order"], fold.mix, plan.n)
    sampling = race.sampling_curve(fold.outcomes, fold.rival, plan.n)
    return {
        "order": fold.choice["order"],
        "mix": fold.choice["mix"],
        "rival": str(fold.rival),
        "dense": float(fold.outcomes.columns([DENSE]).z.mean()),
        "policy": float(policy.mean[-1]),
        "sampling": float(sampling.mean[-1]),
    }


def _formatted(row: dict[str, Any]) -> dict[str, str]:
    return {
        name: f"{value:.3f}" if name in ("dense", "policy", "sampling") else str(value) for name, value in row.items()
    }


def interval_text(low: float, high: float, differing: int) -> str:
    """Return the ends of an interval of a difference, and whether none of its questions (or folds) differs."""
    return f"{low:+.3f} to {high:+.3f}" + ("" if differing else ", no question differs")


def secondary_table(rows: Sequence[dict[str, Any]]) -> Any:
    """The secondary comparisons; significant ones are bold."""
    table = [
        {
            "comparison": row["name"],
            "policy": f"{row['policy']:.3f}",
            "sampling": f"{row['sampling']:.3f}",
            "difference": bold(f"{row['difference']:+.3f}", row["p_holm"] < race.LEVEL),
            "95% interval": interval_text(row["low"], row["high"], row["differing"]),
            "p": p_value(row["p"]),
            "p (Holm)": p_value(row["p_holm"]),
        }
        for row in rows
    ]
    return markdown(pd.DataFrame(table), ["comparison"])


def vote_table(votes: pd.DataFrame) -> Any:
    """Accuracy at N by rule, with pass@N below."""
    rows: list[dict[str, str]] = []
    for (policy, rule), part in votes.groupby(["policy", "rule"], sort=False):
        cells = {f"N = {row.n}": f"{row.accuracy:.3f} ({row.ties:.0%})" for row in part.itertuples()}
        rows.append({"policy": policy, "rule": rule, **cells})
    for policy, part in votes.groupby("policy", sort=False):
        first = part.drop_duplicates("n")
        rows.append(
            {
                "policy": policy,
                "rule": "pass@N",
                **{f"N = {n}": f"{p:.3f}" for n, p in zip(first["n"], first["pass"], strict=True)},
            }
        )
    return markdown(pd.DataFrame(rows), ["policy", "rule"])


def only_table(only: dict[str, Any]) -> Any:
    """Shares of questions by who solves them."""
    names = {
        "variants": f"some greedy pruned variant (of {', '.join(map(str, only['greedy_variants']))})",
        "samples": f"the unpruned model, greedily or by some of {only['samples']} samples",
        "only_variants": "only pruned variants",
        "only_samples": "only the unpruned model",
        "both": "both",
        "neither": "neither",
    }
    rows = [
        {
            "solved by": names[name],
            "share": f"{estimate['share']:.3f}",
            "95% interval": f"{estimate['low']:.3f} to {estimate['high']:.3f}",
        }
        for name, estimate in only["shares"].items()
    ]
    return markdown(pd.DataFrame(rows), ["solved by"])
