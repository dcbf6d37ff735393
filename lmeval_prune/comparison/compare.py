"""Compare runs of `lm_eval --log_samples` with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from lmeval_prune.comparison.distance import answer_distances
from lmeval_prune.comparison.runs import Evaluation, Run, different, find_runs
from lmeval_prune.comparison.samples import WEIGHT, choose, columns_of, metric_name
from lmeval_prune.comparison.tables import POOLED, Comparison, Table, merged, rows_of
from lmeval_prune.errors import InputError, did_you_mean, first_few
from lmeval_prune.models.answer_store import cut_off_note

Kind = Literal["questions", "prompts", "settings"]
Evaluations = dict[str, dict[str, Evaluation]]  # by task and run; all runs of a task have the same questions


def compare(
    words: Sequence[str],
    baseline: str | None = None,
    tasks: Sequence[str] = (),
    metric: str | None = None,
    by: Sequence[str] = (),
    allow_different: Collection[Kind] = (),
    seed: int = 0,
    margin: float | None = None,
) -> Comparison:
    """Compare runs with a baseline; arguments as for the command `compare`.

    Without `baseline`, it is the only run of a folder without pruning, else the first.
    """
    runs = {run.name: run for run in find_runs(words)}
    if len(runs) < 2:
        raise InputError(f"{first_few(runs)} is a single run; name another one, too")
    if baseline is None:
        whole = [name for name, run in runs.items() if not run.is_pruned]
        baseline = whole[0] if len(words) == len(whole) == 1 else next(iter(runs))
    elif baseline in words and len(words) == len(runs):  # named by its path
        baseline = list(runs)[list(words).index(baseline)]
    if baseline not in runs:
        raise InputError(f"there is no run {baseline!r} for the baseline; the runs are {first_few(runs)}")
    base = runs.pop(baseline)
    comparison = compare_runs([base, *runs.values()], tasks, metric, by, allow_different, seed, margin=margin)
    about = {run.name: run.about() for run in (base, *runs.values())}
    return replace(comparison, title=f"{first_few(runs, most=3)} against {base.name}", about=about)


def compare_runs(
    runs: Sequence[Run],
    tasks: Sequence[str] = (),
    metric: str | Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    allow_different: Collection[Kind] = (),
    seed: int = 0,
    measured: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    margin: float | None = None,
) -> Comparison:
    """Compare runs with the first of them, the baseline.

    `metric` may be given by task, which each has to have then; `measured` are distances by run and task, see
    `columns.MEASURED`; None: those of the answers from the baseline's.
    """
    base, *others = runs
    names = [run.name for run in runs]
    notes, table_notes = list[str](), list[str]()
    shared = _tasks(tasks, base, others, notes)
    evaluations: Evaluations = {}
    for task in shared:
        by_run = {run.name: run.read(task, by) for run in runs if task in run.tasks}
        own = by_run[base.name]
        metrics = {name: own.metrics[name] for name in own.metrics if all(name in x.metrics for x in by_run.values())}
        if metrics:
            evaluations[task] = by_run | {base.name: replace(own, metrics=metrics)}  # which all runs have
    if without := [task for task in shared if task not in evaluations]:
        notes.append(f"{first_few(without)} left out: lm-eval computes no metric of it by a mean over questions")
    if not evaluations:
        raise InputError(f"no task can be compared; {notes[-1]}")
    for task, by_run in evaluations.items():
        _align(task, by_run, allow_different, notes)
    tables = _tables(evaluations, base, names, metric, by, table_notes)
    rows = rows_of(tables, base.name, seed, margin)
    if margin:
        notes.append(f"p margin: of the hypothesis that a variant loses {margin:g} points or more")
    for run in runs:
        for task in [task for task in tables if (run.name, task) in rows]:
            row = rows[run.name, task]
            lengths = run.lengths([leaf for leaf in _leaves(task, base.groups) if leaf in evaluations])
            if measured is not None:
                row.measured |= measured.get((run.name, task), {})
            elif task in evaluations:
                first, other = (
                    [o.responses for o in evaluations[task][name].outcomes] for name in (base.name, run.name)
                )
                row.measured |= answer_distances(first, None if run is base else other)
            row.measured |= {name: lengths[name] for name in ("mean_tokens", "cut_off") if lengths}
            if lengths and task in evaluations and (reason := cut_off_note(lengths)):
                notes.append(f"{run.name} on {task}: {reason}")
    return Comparison(
        title="",
        baseline=base.name,
        variants=names,
        tables=tables,
        rows=rows,
        answers=lambda name, task: [outcome.answer for outcome in evaluations[task][name].outcomes],
        missing=[
            (name, task, "not evaluated") for task, own in evaluations.items() for name in names if name not in own
        ],
        notes=list(dict.fromkeys([*notes, *table_notes])),
    )


def _tasks(names: Sequence[str], base: Run, others: Sequence[Run], notes: list[str]) -> list[str]:
    """Return the tasks to compare, those of the baseline that another run has; add notes.

    `names` are tasks and groups; empty: all tasks of the baseline.
    """
    available = [*base.groups, *base.tasks]
    chosen = list(dict.fromkeys(task for name in names for task in _leaves(name, base.groups))) or base.tasks
    for task in chosen:
        if task not in base.tasks:
            hint = did_you_mean(task, available) or f"; it has {first_few(available)}"
            raise InputError(f"tasks: {base.name} has no samples of {task!r}{hint}")
    for run in others:
        if set(chosen).isdisjoint(run.tasks):
            raise InputError(
                f"{run.name} has none of the tasks {first_few(chosen)}; it has {first_few(run.tasks)}: evaluate it on "
                f"those of the baseline, {base.name}, or leave it out"
            )
        if extra := [task for task in run.tasks if task not in base.tasks]:
            notes.append(f"{run.name}: {first_few(extra)} left out, which the baseline lacks")
    shared = [task for task in chosen if not others or any(task in run.tasks for run in others)]
    if alone := [task for task in chosen if task not in shared]:
        notes.append(f"{base.name}: {first_few(alone)} left out, which no other run has")
    for run in (base, *others):
        counts = {task: len(run.files_of(task)) for task in shared}
        notes += [
            f"{run.name} on {task}: each question's mean over {n} results files" for task, n in counts.items() if n > 1
        ]
    return shared


# ---------------------------------------------------------------------- what has to agree


def _align(task: str, evaluations: dict[str, Evaluation], allowed: Collection[Kind], notes: list[str]) -> None:
    """Let all runs have the questions of the baseline, the first run, in its order.

    Questions, prompts and settings that differ are refused, or are notes if they are allowed. Of different questions,
    those of all runs are kept.
    """
    baseline, base = next(iter(evaluations.items()))
    first = {outcome.question: outcome.prompt for outcome in base.outcomes}
    for name, evaluation in evaluations.items():
        differences: dict[Kind, str] = {}
        second = {outcome.question: outcome.prompt for outcome in evaluation.outcomes}
        shared, own, other = first.keys() & second.keys(), evaluation.settings, base.settings
        if not len(shared) == len(first) == len(second):
            differences["questions"] = f"{len(second)} and {len(first)}, {len(shared)} of them the same"
        if changed := sum(first[key] != second[key] for key in shared):
            reasons = different(own.prompt, other.prompt, own.lm_eval == other.lm_eval)
            differences["prompts"] = "; ".join([f"{changed} of {len(shared)}", *reasons[:4]])
        if reasons := different(own.other, other.other, own.lm_eval == other.lm_eval):
            differences["settings"] = first_few(reasons, most=4)
        if refused := [kind for kind in differences if kind not in allowed]:
            raise InputError(
                f"{name!r} and the baseline {baseline!r} have different {' and '.join(refused)} of {task} "
                f"({'; '.join(differences[kind] for kind in refused)}); evaluate them alike, or add "
                f"--allow_different {','.join(dict.fromkeys([*allowed, *refused]))}"
            )
        notes += [f"{name} on {task}: different {kind} ({text})" for kind, text in differences.items()]
    common = set.intersection(*(set(evaluation.questions) for evaluation in evaluations.values()))
    if not common:
        raise InputError(f"{first_few(evaluations)} have no question of {task} in common; leave it out with --tasks")
    order = [question for question in base.questions if question in common]
    for name, evaluation in evaluations.items():
        evaluations[name] = evaluation.of(order)


# ---------------------------------------------------------------------- tables


def _tables(
    evaluations: Evaluations,
    base: Run,
    variants: Sequence[str],
    metric: str | Mapping[str, str] | None,
    by: Sequence[str],
    notes: list[str],
) -> dict[str, Table]:
    """Return the tables of tasks, of their parts, of groups and of all tasks, in this order; add notes."""
    tables, has_metric = {}, not isinstance(metric, str)
    for task, runs in evaluations.items():
        named = metric.get(task, metric.get(task.partition("::")[0])) if isinstance(metric, Mapping) else metric
        if isinstance(metric, str):
            columns = columns_of(runs[base.name].values)
            named = metric if any(metric in (column, metric_name(column)) for column in columns) else None
            has_metric |= named is not None
        tables[task] = _table(task, runs, named)
    if not has_metric:
        columns = [column for runs in evaluations.values() for column in runs[base.name].metrics]
        hint = did_you_mean(str(metric), columns) or f"; they have {first_few(sorted(set(columns)))}"
        raise InputError(f"metric: no compared task has {metric!r}{hint}")
    parts = {}
    for task, table in tables.items():
        for position, column in enumerate(by):
            found = [outcome.document[position] for outcome in evaluations[task][base.name].outcomes]
            kinds = sorted({value for value in found if value is not None})
            for value in kinds if len(kinds) > 1 else ():
                rows = np.flatnonzero([own == value for own in found])
                parts[f"{task}, {column}: {value}"] = replace(
                    table,
                    values=table.values[rows],
                    texts=[table.texts[row] for row in rows],
                    numbers=(),
                    weights=table.weights[rows],
                    is_part=True,
                )
    if missing := [column for column in by if not any(f", {column}: " in name for name in parts)]:
        raise InputError(f"by: no compared task has documents of several values of {missing[0]!r}")
    groups = _groups(tables, base.groups, variants, notes)
    members = {task for name in groups for task in _leaves(name, base.groups)}
    tables = {task: replace(table, is_part=task in members) for task, table in tables.items()}
    top_level = [table for table in (*tables.values(), *groups.values()) if table.are_shares and not table.is_part]
    shares = [table for table in tables.values() if table.are_shares]
    if len(top_level) > 1 and len(shares) > 1:  # otherwise all tasks are those of a group
        lower = [task for task, table in tables.items() if table.lower_is_better]
        other = [task for task, table in tables.items() if not table.are_shares and task not in lower]
        notes += [f"{POOLED}: without {', '.join(lower)}, where lower is better"] if lower else []
        notes += [f"{POOLED}: without {', '.join(other)}, whose metric is not a share between 0 and 1"] if other else []
        groups[POOLED] = replace(merged(POOLED, shares, variants, notes), metrics=())
    return tables | parts | groups


def _table(task: str, runs: Mapping[str, Evaluation], metric: str | None) -> Table:
    """Return the values of a task; every run has the metric of each question."""
    base, *_ = runs.values()
    chosen = base.metrics[choose(task, metric, base.metrics)]
    for run in runs.values():
        complete = [column for column in columns_of(run.values) if np.isfinite(run.values[column]).all()]
        choose(task, chosen.column, complete)
    values = np.column_stack([chosen.aggregation.factor * run.values[chosen.column] for run in runs.values()])
    weights = base.values[WEIGHT + chosen.column] if chosen.aggregation.is_weighted else 1.0
    for name, run in runs.items():
        if chosen.aggregation.is_weighted and not np.allclose(run.values[WEIGHT + chosen.column], weights):
            raise InputError(
                f"{name} on {task}: its documents have other numbers of words or bytes than the baseline's"
            )
    texts, numbers = zip(*((outcome.text_key, outcome.number) for outcome in base.outcomes), strict=True)
    return Table(list(runs), values, list(texts), (chosen,), numbers, weights=weights)


def _leaves(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    if name not in groups:
        return [name]
    return list(dict.fromkeys(leaf for member in groups[name] for leaf in _leaves(member, groups)))


def _groups(
    tables: Mapping[str, Table], groups: Mapping[str, Sequence[str]], variants: Sequence[str], notes: list[str]
) -> dict[str, Table]:
    """Return the tables of groups with several compared tasks, inner groups first; add notes.

    Groups with the same tasks as another are left out.
    """
    members = {name: _leaves(name, groups) for name in groups}
    leaves = {name: [task for task in names if task in tables] for name, names in members.items()}
    ordered = sorted((name for name in groups if len(leaves[name]) > 1), key=lambda name: len(leaves[name]))
    merged_tables: dict[str, Table] = {}
    merged_sets = set()
    for name in ordered:
        if frozenset(leaves[name]) in merged_sets:
            continue
        merged_sets.add(frozenset(leaves[name]))
        task_tables = [tables[task] for task in leaves[name]]
        # shares are averaged with each other, other metrics only with the same of another task
        if not all(table.are_shares for table in task_tables) and len({table.metrics for table in task_tables}) > 1:
            notes.append(f"{name}: left out, its tasks have metrics that cannot be averaged")
            continue
        merged_tables[name] = merged(name, task_tables, variants, notes)
        if len(task_tables) < len(members[name]):
            notes.append(f"{name}: {len(task_tables)} of its {len(members[name])} tasks")
    inner = {name for name in merged_tables for other in merged_tables if set(leaves[name]) < set(leaves[other])}
    return {name: replace(table, is_part=name in inner) for name, table in merged_tables.items()}
