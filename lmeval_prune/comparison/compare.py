"""Compare runs of `lm_eval --log_samples` with a baseline, question by question."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd

from lmeval_prune.comparison.distances import distances
from lmeval_prune.comparison.metrics import Metric, columns_of
from lmeval_prune.comparison.rows import Comparison, rows_of
from lmeval_prune.comparison.runs import DOCUMENT, Evaluation, Run, find_runs, numbered_as
from lmeval_prune.comparison.settings import different
from lmeval_prune.comparison.tables import Table, can_be_averaged, merged, pooled, questions_of, read_table
from lmeval_prune.errors import InputError, did_you_mean, first_few

Kind = Literal["questions", "prompts", "settings"]
ADVICE = "name a metric with --metric, or leave the task out with --tasks"


def compare(
    words: Sequence[str],
    baseline: str | None = None,
    tasks: Sequence[str] = (),
    metric: str | None = None,
    by: Sequence[str] = (),
    allow_different: Collection[Kind] = (),
    seed: int = 0,
) -> Comparison:
    """Compare runs with a baseline.

    Args:
        words: `PATH` or `NAME=PATH` of each run; see `find_runs`.
        baseline: name or path of a run; None for the first.
        tasks: tasks and groups to compare; empty for all of the baseline.
        metric: `METRIC` or `METRIC,FILTER` to compare where a task has it; None for each task's default.
        by: columns of the documents; their values divide each task into parts.
        allow_different: what may differ between runs.
        seed: seed of the tests.
    """
    runs = {run.name: run for run in find_runs(words)}
    if len(runs) < 2:
        raise InputError(f"{first_few(runs)} is a single run; name another one, too")
    if baseline is not None and baseline in words and len(words) == len(runs):  # named by its path
        baseline = list(runs)[list(words).index(baseline)]
    if baseline is not None and baseline not in runs:
        raise InputError(f"there is no run {baseline!r} for the baseline; the runs are {first_few(runs)}")
    base = runs[baseline or next(iter(runs))]
    runs = {base.name: base, **runs}
    evaluations, notes = _evaluations(runs, base, tasks, by, allow_different)
    tables, table_notes = _tables(evaluations, base, list(runs), metric, by)
    rows = rows_of(tables, base.name, seed)
    for (name, task), row in rows.items():
        if task in evaluations:
            answers = None if name == base.name else _answers(evaluations, name, task)
            measured = distances(_answers(evaluations, base.name, task), answers)
            rows[name, task] = replace(row, **measured)  # type: ignore[arg-type]
    return Comparison(
        title=f"{first_few(list(runs)[1:], most=3)} against {base.name}",
        baseline=base.name,
        variants=list(runs),
        tables=tables,
        rows=rows,
        answers=partial(_answers, evaluations),
        about={name: run.about() for name, run in runs.items()},
        missing=[
            (name, task, "not evaluated") for task, by_run in evaluations.items() for name in runs if name not in by_run
        ],
        notes=list(dict.fromkeys([*notes, *table_notes])),
    )


def _tasks(names: Sequence[str], base: Run, others: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return the tasks to compare, those of the baseline that another run has, and notes.

    Args:
        names: tasks and groups, which stand for their tasks; empty for all.
        base: the baseline.
        others: the other runs; one without any of the tasks is refused.
    """
    chosen, notes = _named_tasks(names, base), []
    for run in others:
        if set(chosen).isdisjoint(run.tasks):
            raise InputError(
                f"{run.name} has none of the tasks {first_few(chosen)}; it has {first_few(run.tasks)}: evaluate it on "
                f"those of the baseline, {base.name}, or leave it out"
            )
        if extra := [task for task in run.tasks if task not in base.tasks]:
            notes.append(f"{run.name}: {first_few(extra)} left out, which the baseline lacks")
    shared = [task for task in chosen if any(task in run.tasks for run in others)]
    if alone := [task for task in chosen if task not in shared]:
        notes.append(f"{base.name}: {first_few(alone)} left out, which no other run has")
    notes += [
        f"{run.name} on {task}: each question's mean over {count} results files"
        for run in (base, *others)
        for task in shared
        if (count := len(run.files_of(task))) > 1
    ]
    return shared, notes


def _named_tasks(names: Sequence[str], base: Run) -> list[str]:
    """Return the tasks that are named, directly, by their groups, or by the last part of `GROUP::TASK`; else all."""
    available, named = [*base.groups, *base.tasks], dict[str, None]()
    for name in names:
        full_names = [name] if name in available else [known for known in available if known.endswith(f"::{name}")]
        for task in [task for full_name in full_names or [name] for task in _leaves(full_name, base.groups)]:
            if task not in base.tasks:
                hint = did_you_mean(task, available) or f"; it has {first_few(available)}"
                raise InputError(f"tasks: {base.name} has no samples of {task!r}{hint}")
            named[task] = None
    return list(named) or base.tasks


def _evaluations(
    runs: Mapping[str, Run], base: Run, tasks: Sequence[str], by: Sequence[str], allowed: Collection[Kind]
) -> tuple[dict[str, dict[str, Evaluation]], list[str]]:
    """Read the tasks to compare, by task and run, and check that they agree; return notes, too."""
    names, notes = _tasks(tasks, base, [run for run in runs.values() if run is not base])
    evaluations = {
        task: {name: run.read(task, by) for name, run in runs.items() if task in run.tasks} for task in names
    }
    if without := [task for task, by_run in evaluations.items() if not _shared_metrics(by_run.values())]:
        notes.append(f"{first_few(without)} left out: lm-eval computes no metric of it by a mean over questions")
        evaluations = {task: by_run for task, by_run in evaluations.items() if task not in without}
    if not evaluations:
        raise InputError(f"no task can be compared; {notes[-1]}")
    for task, by_run in evaluations.items():
        notes += _check_alike(task, base.name, by_run, allowed)
    return evaluations, notes


# ---------------------------------------------------------------------- what has to agree


def _check_alike(task: str, baseline: str, evaluations: dict[str, Evaluation], allowed: Collection[Kind]) -> list[str]:
    """Refuse questions, prompts and settings that differ from the baseline's, or return notes if they are allowed.

    Of different questions that are allowed, those of all runs are kept in `evaluations`.
    """
    base, notes = evaluations[baseline], []
    for name, own in evaluations.items():
        evaluation = evaluations[name] = numbered_as(base, own)
        if changed := int((evaluation.outcomes["doc_id"] != own.outcomes["doc_id"]).sum()):
            notes.append(
                f"{name} on {task}: {changed} questions have other numbers (doc_id); paired by their documents"
            )
        differences = _differences(base, evaluation)
        if refused := [kind for kind in differences if kind not in allowed]:
            raise InputError(
                f"{name!r} and the baseline {baseline!r} have different {' and '.join(refused)} of {task} "
                f"({'; '.join(differences[kind] for kind in refused)}); evaluate them alike, or add "
                f"--allow-different {','.join(dict.fromkeys([*allowed, *refused]))}"
            )
        notes += [f"{name} on {task}: different {kind} ({text})" for kind, text in differences.items()]
    common = set.intersection(*({*questions_of(evaluation.outcomes)} for evaluation in evaluations.values()))
    if not common:
        raise InputError(f"{first_few(evaluations)} have no question of {task} in common; leave it out with --tasks")
    for name, evaluation in evaluations.items():
        keep = [key in common for key in questions_of(evaluation.outcomes)]
        evaluations[name] = evaluation._replace(outcomes=evaluation.outcomes[keep], answers=evaluation.answers[keep])
    return notes


def _differences(base: Evaluation, compared: Evaluation) -> dict[Kind, str]:
    differences: dict[Kind, str] = {}
    first, second = (
        dict(zip(questions_of(evaluation.outcomes), evaluation.outcomes["prompt"], strict=True))
        for evaluation in (base, compared)
    )
    shared = first.keys() & second.keys()
    if not len(shared) == len(first) == len(second):
        differences["questions"] = f"{len(second)} and {len(first)}, {len(shared)} of them the same"
    has_same_version = base.settings.lm_eval == compared.settings.lm_eval
    if other := sum(first[key] != second[key] for key in shared):
        reasons = different(compared.settings.prompt, base.settings.prompt, has_same_version)
        text = f"{other} of {len(shared)}"
        differences["prompts"] = f"{text}; {first_few(reasons, most=4)}" if reasons else text
    if reasons := different(compared.settings.other, base.settings.other, has_same_version):
        differences["settings"] = first_few(reasons, most=4)
    return differences


# ---------------------------------------------------------------------- tables


def _tables(
    evaluations: Mapping[str, Mapping[str, Evaluation]],
    base: Run,
    variants: Sequence[str],
    metric: str | None,
    by: Sequence[str],
) -> tuple[dict[str, Table], list[str]]:
    tables = _task_tables(evaluations, base.name, metric)
    parts = {
        name: part for task in tables for name, part in _parts(task, tables[task], evaluations[task][base.name], by)
    }
    if missing := [column for column in by if not any(f", {column}: " in name for name in parts)]:
        fields = {field for runs in evaluations.values() for field in runs[base.name].fields}
        hint = did_you_mean(missing[0], fields) or f"; their documents have {first_few(sorted(fields), most=8)}"
        raise InputError(f"by: no compared task has documents of several values of {missing[0]!r}{hint}")
    groups, notes = _groups(tables, base.groups, variants)
    members = {task for name in groups for task in _leaves(name, base.groups)}
    tables = {task: replace(table, is_part=task in members) for task, table in tables.items()}
    top_level = [table for table in (*tables.values(), *groups.values()) if table.are_shares and not table.is_part]
    if len(top_level) > 1:  # otherwise all tasks are those of a group
        all_tasks, pooling_notes = pooled(tables, variants)
        groups |= all_tasks
        notes += pooling_notes
    return tables | parts | groups, notes


def _task_tables(
    evaluations: Mapping[str, Mapping[str, Evaluation]], baseline: str, metric: str | None
) -> dict[str, Table]:
    tables, has_metric = {}, False
    for task, runs in evaluations.items():
        base = runs[baseline]
        named = metric is not None and any(
            metric in (column, column.partition(",")[0]) for column in columns_of(base.outcomes)
        )
        has_metric |= named
        texts = {(task, row.doc_id): row.text_key for row in base.answers.itertuples()}
        outcomes = {name: partial(pd.DataFrame, run.outcomes) for name, run in runs.items()}
        shared_metrics = {task: _shared_metrics(runs.values())}
        tables[task] = read_table(task, baseline, outcomes, shared_metrics, texts, metric if named else None, ADVICE)
    if metric is not None and not has_metric:
        columns = {name for runs in evaluations.values() for name in runs[baseline].metrics}
        hint = did_you_mean(metric, columns) or f"; they have {first_few(sorted(columns))}"
        raise InputError(f"metric: no compared task has {metric!r}{hint}")
    return tables


def _shared_metrics(runs: Collection[Evaluation]) -> dict[str, Metric]:
    """Return the metrics of a task that all runs have, the baseline first, as a function of a mean over questions."""
    first = next(iter(runs))
    return {name: metric for name, metric in first.metrics.items() if all(name in run.metrics for run in runs)}


def _parts(task: str, table: Table, base: Evaluation, by: Sequence[str]) -> list[tuple[str, Table]]:
    """Return the parts of a task, `TASK, COLUMN: VALUE`, for columns of its documents with several values."""
    parts = []
    for column in by:
        values = base.outcomes[DOCUMENT + column]
        if values.nunique() > 1:
            for value in sorted(values.dropna().unique()):
                parts.append((f"{task}, {column}: {value}", table.part(np.flatnonzero(values == value))))
    return parts


def _leaves(name: str, groups: Mapping[str, Sequence[str]], above: tuple[str, ...] = ()) -> list[str]:
    if name not in groups or name in above:
        return [name]
    return list(dict.fromkeys(leaf for member in groups[name] for leaf in _leaves(member, groups, (*above, name))))


def _groups(
    tables: Mapping[str, Table], groups: Mapping[str, Sequence[str]], variants: Sequence[str]
) -> tuple[dict[str, Table], list[str]]:
    """Return the tables of groups with several compared tasks, inner groups first, and notes.

    Groups with the same tasks as another are left out.
    """
    members = {name: _leaves(name, groups) for name in groups}
    leaves = {name: [task for task in names if task in tables] for name, names in members.items()}
    ordered = sorted((name for name in groups if len(leaves[name]) > 1), key=lambda name: len(leaves[name]))
    merged_tables: dict[str, Table] = {}
    notes, merged_sets = list[str](), set()
    for name in ordered:
        if frozenset(leaves[name]) in merged_sets:
            continue
        merged_sets.add(frozenset(leaves[name]))
        task_tables = [tables[task] for task in leaves[name]]
        if not can_be_averaged(task_tables):
            notes.append(f"{name}: left out, its tasks have metrics that cannot be averaged")
            continue
        table, merged_notes = merged(name, task_tables, variants)
        notes += merged_notes
        if len(task_tables) < len(members[name]):
            notes.append(f"{name}: {len(task_tables)} of its {len(members[name])} tasks")
        merged_tables[name] = table
    inner = {name for name in merged_tables for other in merged_tables if set(leaves[name]) < set(leaves[other])}
    return {name: replace(table, is_part=name in inner) for name, table in merged_tables.items()}, notes


def _answers(
    evaluations: Mapping[str, Mapping[str, Evaluation]], variant: str, task: str
) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["task"], row["doc_id"]): row for row in evaluations[task][variant].answers.to_dict("records")}
