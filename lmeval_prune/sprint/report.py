"""`lmeval-prune report sprint`: write the SPRINT paper's tables and figures.

Inputs: outcome stores of sweeps, a fitted router, and lm-eval's samples files.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lmeval_prune.architectures import Head
from lmeval_prune.artefacts import CREATED_BY, digest, read_lines, write_text
from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.head_router import DENSE
from lmeval_prune.reporting.documents import bold, csv, markdown, render
from lmeval_prune.reporting.plot_style import COLOURS, figure, label_ends, save
from lmeval_prune.reporting.statistics import holm, mean_interval, sign_flip_test
from lmeval_prune.sprint.options import ReportOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore, check_tasks, question_field
from lmeval_prune.sprint.router import Policy, Router, best, random_top
from lmeval_prune.tasks.tries import pass_unbiased

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
    curves = [policy_curve("SPRINT router", router, test, n)] if router else []
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
    draw_pass_at_n(curves, bands, dense, folder / "pass_at_n")
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
    means = [[c.name, c.kind, *("" if np.isnan(v) else f"{v:.3f}" for v in c.mean)] for c in curves]
    differences = []
    for name, row in tests.items():
        texts = [bold(f"{each['difference']:+.3f} ({each['p']:.2g})", each["p_holm"] < 0.05) for each in row]
        known = {f"N = {x['n']}": "" if np.isnan(x["p"]) else text for x, text in zip(row, texts, strict=True)}
        differences.append({"policy": name, **known})
    most_frequent = [
        (k, len(counts), ", ".join(f"{name} ({count})" for name, count in counts.most_common(4)))
        for k, counts in enumerate(choices, 1)
    ]
    names = ["policy", "estimate", *(f"pass@{k}" for k in range(1, n + 1))]
    of_choices = ["try", "different heads", "most frequent (questions)"]
    text = render(
        Path(__file__).with_name("report.md.jinja"),
        test=test,
        train=train,
        router=router,
        dense=dense,
        passes=markdown(pd.DataFrame(means, columns=names), names[:2]),
        tests=markdown(pd.DataFrame(differences), ["policy"]) if tests else "",
        choices=markdown(pd.DataFrame(most_frequent, columns=of_choices), of_choices[::2]),
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


# ---------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """pass@k of each question."""

    name: str
    kind: str  # estimator: `ordered`, `exact` (the expectation over random orders) or `unbiased` (over samples)
    values: np.ndarray  # probability that any of k = 1 … N attempts is right, shape (questions, N); NaN if unknown
    attempts: Sequence[Sequence[str]] = ()  # at each question, if a policy chose them
    is_bound: bool = False  # an upper bound, not a method
    tokens: np.ndarray | None = None  # expected number of generated tokens of k attempts, shape (questions, N)

    @property
    def mean(self) -> np.ndarray:
        return self.values.mean(0)

    @property
    def mean_tokens(self) -> np.ndarray | None:
        return None if self.tokens is None else self.tokens.mean(0)


def policy_curve(name: str, policy: Policy | Router, outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of a policy whose try i is the i-th of its order."""
    attempts = [order[:n] for order in policy.order(outcomes.texts)]
    part = outcomes.columns(list(dict.fromkeys(attempt for row in attempts for attempt in row)))
    column_of = {attempt: column for column, attempt in enumerate(part.pool)}
    rows, columns = np.arange(len(attempts))[:, None], np.array([[column_of[a] for a in row] for row in attempts])
    values = np.maximum.accumulate(part.z[rows, columns] == 1, axis=1).astype(float)
    tokens = np.full(values.shape, np.nan) if part.tokens is None else part.tokens[rows, columns].cumsum(1)
    return Curve(name, "ordered", values, attempts, tokens=tokens if np.isfinite(tokens).all() else None)


def oracle_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute pass@k of the oracle: whether any head of the pool solves the question."""
    solved = (outcomes.columns(pool).z == 1).any(axis=1, keepdims=True)
    return Curve(name, "ordered", np.repeat(solved.astype(float), n, axis=1), is_bound=True)


def random_curve(name: str, pool: Sequence[str], outcomes: Outcomes, n: int) -> Curve:
    """Compute the expected pass@k of m heads drawn without replacement, c of them right: 1 − C(m−c, k)/C(m, k)."""
    part = outcomes.columns(pool)
    ks = [min(k, len(pool)) for k in range(1, n + 1)]
    values = np.array([[pass_unbiased(len(pool), int(c), k) for k in ks] for c in (part.z == 1).sum(1)])
    tokens = part.tokens if part.tokens is not None and np.isfinite(part.tokens).all() else None
    return Curve(name, "exact", values, tokens=None if tokens is None else tokens.mean(1)[:, None] * np.array(ks))


def samples_curve(name: str, path: str, outcomes: Outcomes, n: int) -> Curve:
    """Estimate pass@k from a samples file of `lm_eval --log_samples` on a pass@N task, for the outcomes' questions.

    Random samples are exchangeable, so the unbiased estimator is used. The attempts of a routed run are ordered, so its
    reported `pass@k` is used; pass@k that lm-eval did not report is NaN.
    """
    rows: dict[str, np.ndarray] = {}
    settings: dict[str, Any] = {}
    prompts = {row["question"]: row["prompt"] for row in outcomes.questions}
    lengths = {task["generation"].get("max_gen_toks") for task in outcomes.tasks.values() if "generation" in task}
    field = question_field(outcomes.tasks) or "question"
    for sample in read_lines(path):
        (request,) = sample["arguments"].values()
        question, prompt, settings = str(sample["doc"][field]), request["arg_0"], request["arg_1"]
        is_same = digest(prompt) == prompts.get(question) and settings.get("max_gen_toks") in lengths
        if question in prompts and not is_same:
            raise InputError(
                f"{path} has other prompts or another max_gen_toks than the test store; run both with the same chat "
                f"template, few-shot examples and gen_kwargs"
            )
        ks = range(1, n + 1)
        if "attempts" in settings:
            passes = [float(sample.get(f"pass@{k}", np.nan)) for k in ks]
        else:
            tries = len(sample["filtered_resps"][0])  # excludes the copies that pad ranks
            right = round(float(sample["pass@1_unbiased"]) * tries)
            passes = [pass_unbiased(tries, right, k) if k <= tries else np.nan for k in ks]
        rows[question] = np.array(passes)
    if missing := set(outcomes.texts) - rows.keys():
        raise InputError(
            f"{path} lacks {len(missing)} of the test store's {len(outcomes.texts)} questions, "
            f"e.g. {min(missing)[:60]!r}; `lmeval-prune questions` prints them for lm_eval's --samples"
        )
    values = np.array([rows[text] for text in outcomes.texts])
    return Curve(name, "ordered" if "attempts" in settings else "unbiased", values)


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


def _pass_rows(curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """Return pass@N with confidence limits: a row for each policy and N, without unknown values."""
    columns = ["policy", "estimate", "n", "pass", "low", "high", "tokens"]
    rows = []
    for curve, (low, high) in zip(curves, bands, strict=True):
        tokens = np.full(len(low), np.nan) if curve.mean_tokens is None else curve.mean_tokens
        numbers = np.stack([curve.mean, low, high, tokens], axis=1)
        rows += [(curve.name, curve.kind, n, *row) for n, row in enumerate(numbers, 1)]
    return pd.DataFrame(rows, columns=columns).dropna(subset="pass")


# ---------------------------------------------------------------------- single heads


def _heads_section(test: Outcomes, options: ReportOptions, folder: Path) -> dict[str, Any]:
    """Draw the figures of single heads and return their numbers; nothing if the store has no single heads."""
    outcomes = test.columns([name for name in test.pool if "+" not in name])
    if outcomes.pool == [DENSE]:
        return {}
    groups, change_by_head = groups_of(outcomes, options.by), changes(outcomes)
    table = head_table(outcomes, groups)
    measured, chance = gains(table), gains_by_chance(outcomes, groups, seed=options.seed)
    draw_changes(change_by_head, folder / "head_changes")
    draw_gains(measured, chance, folder / "best_head_gains")
    write_text(folder / "accuracy.csv", csv(table))
    of_both = {"measured": measured, "by_luck": chance}
    return {
        "change_by_head": {name: {"change": c, "standard_error": e} for name, (c, e) in change_by_head.items()},
        "changes": [change for change, _ in change_by_head.values()],
        "beyond": sum(bool(error) and abs(change) > 2 * error for change, error in change_by_head.values()),
        "medians": {name: float(np.median(np.concatenate([*each.values()]))) for name, each in of_both.items()},
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
    generator, columns_of, gains_of = np.random.default_rng(seed), defaultdict(list), defaultdict(list)
    for column in outcomes.pool:
        if column != DENSE:
            columns_of[Head.named(column).layer_label].append(column)
    for layer, columns in columns_of.items():
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
            error = float(difference.std(ddof=1) / len(difference) ** 0.5) if len(difference) > 1 else 0.0
            change_of[column] = (float(difference.mean()), error)
    return change_of


# ---------------------------------------------------------------------- figures


def draw_pass_at_n(
    curves: Sequence[Curve], bands: Sequence[tuple[np.ndarray, np.ndarray]], dense: float, stem: Path
) -> None:
    """Draw pass@N of all policies; the first one and the best of the others have 95% intervals (Figure 4)."""
    known = [np.flatnonzero(~np.isnan(curve.mean)) for curve in curves]
    last = [float(curve.mean[columns[-1]]) for curve, columns in zip(curves, known, strict=True)]
    rivals = [i for i, curve in enumerate(curves) if i and not curve.is_bound]
    strongest = max(rivals, key=last.__getitem__, default=0)
    main = {strongest: COLOURS[1], 0: COLOURS[0]}
    drawing, axes = figure(8.2, 4.6, f"pass@N on {len(curves[0].values)} questions; bands: 95%")
    ends, colours = [], iter(COLOURS[2:] * len(curves))
    for i, (curve, columns, (low, high)) in enumerate(zip(curves, known, bands, strict=True)):
        colour = "0.35" if curve.is_bound else main[i] if i in main else next(colours)
        ks, is_main = columns + 1, i in main
        style = {"color": colour, "ls": "-" if curve.kind == "ordered" else "--", "lw": 2.4 if is_main else 1.3}
        marker = {"marker": "o", "ms": 5, "zorder": 4 if i else 5} if is_main else {}
        axes.plot(ks, curve.mean[columns], **style, **marker)
        if is_main:
            axes.fill_between(ks, low[columns], high[columns], color=colour, alpha=0.13, lw=0)
        ends.append((ks[-1], last[i], curve.name, {"color": colour, "weight": "bold" if is_main else "normal"}))
    tries = curves[0].values.shape[1]
    axes.axhline(dense, color="0.35", lw=1, ls=":")
    ends.append((tries, dense, "unpruned, greedy (one attempt)", {"color": "0.35", "weight": "normal"}))
    axes.set(xlabel="attempts N  (dashed: an expectation over draws)", ylabel="pass@N", xlim=(0.8, tries + 0.6))
    axes.set_xticks(np.arange(1, tries + 1))
    axes.grid(axis="y", color="0.92")
    label_ends(axes, ends)
    save(drawing, stem)


def draw_gains(measured: dict[str, list[float]], by_chance: dict[str, list[float]], stem: Path) -> None:
    """Draw the best head's gain in each layer, next to the gain expected by chance (Figure 2)."""
    places = np.arange(len(measured))
    title = "Best head of a layer, by group of questions (line: median)"
    drawing, axes = figure(max(5.5, 1.1 * len(measured) + 2), 4.4, title)
    names = ("measured", "outcomes shuffled among heads: chance alone")
    for offset, values, colour, name in zip((-0.2, 0.2), (measured, by_chance), COLOURS[::6], names, strict=True):
        style: dict[str, Any] = {
            "boxprops": {"facecolor": colour, "alpha": 0.5},
            "medianprops": {"color": colour, "lw": 2},
        }
        points = [values[layer] for layer in measured]
        boxes = axes.boxplot(points, positions=places + offset, widths=0.36, patch_artist=True, **style)["boxes"]
        boxes[0].set_label(name)
    axes.axhline(0, color="0.4", lw=1, ls=":")
    axes.set_xticks(places, list(measured))
    axes.set(xlabel="layer", ylabel="accuracy of the best head − unpruned")
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)  # beside the axes: it hides no box
    save(drawing, stem)


def draw_changes(changes: dict[str, tuple[float, float]], stem: Path) -> None:
    """Draw each head's change in accuracy, sorted, with two standard errors (Figure 5)."""
    ordered = sorted(changes.items(), key=lambda item: item[1][0])
    title = "Accuracy with one head pruned − unpruned (lines: two standard errors)"
    drawing, axes = figure(max(6.0, 0.19 * len(ordered) + 1.5), 4.2, title)
    values = np.array([change for _, (change, _) in ordered])
    errors = np.array([2 * error for _, (_, error) in ordered])
    colours = [COLOURS[0] if value >= 0 else COLOURS[1] for value in values]
    axes.bar(range(len(ordered)), values, color=colours, yerr=errors, ecolor="0.5", error_kw={"lw": 0.8})
    axes.axhline(0, color="0.3", lw=0.8)
    axes.set_xticks(range(len(ordered)), [name for name, _ in ordered], rotation=90, fontsize=7)
    axes.margins(x=0.01)
    axes.set(ylabel="change in accuracy")
    save(drawing, stem)
