"""The scorers against a corpus of answers, beside lm-eval's own filters and math-verify: what each misses and accepts.

    make scoring-report        or        python benchmarks/scoring_quality.py [--cases 3000]

The corpus is `tests/answers`: forms of an answer with the verdict of a fair reader. Rates are averaged over forms, each
counted once: they say which forms fail, not how often a model uses them. Texts written blind are counted. Published
solutions are judged without their marked last line, beside the publishers' verdicts. Writes
`results/scoring_quality.json` and the tables in `docs/results/scoring/tables.md`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from _record import environment, write, write_table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lmeval_prune.scoring import NumberReader, extract, numbers_equal  # noqa: E402
from tests.answers import BLIND, SLOW, TARGETS, Case, cases, judge, load, rate, sample  # noqa: E402

OURS, STRICT, FLEXIBLE, MINERVA, MATH_VERIFY = "ours", "strict-match", "flexible-extract", "minerva_math", "math-verify"
DOCUMENT = ROOT / "docs/results/scoring/tables.md"
SCORERS = {"number": [OURS, STRICT, FLEXIBLE, MATH_VERIFY], "mathematics": [OURS, MINERVA, MATH_VERIFY]}  # others: ours
SOLUTIONS = Path(os.environ.get("LMEVAL_PRUNE_DATA", "../shared/data")) / "gsm8k_model_solutions.jsonl"
SECONDS = 20.0  # for one comparison of a peer
Scorer = Callable[[Case], bool]

# --------------------------------------------------------------------------- the peers


def gsm8k(filter_name: str) -> Scorer:
    """Return a scorer: one of lm-eval's filters of its task gsm8k, then its metric with that task's settings."""
    from lm_eval import tasks
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    task = yaml.safe_load((Path(tasks.__path__[0]) / "gsm8k" / "gsm8k.yaml").read_text())
    settings = next(entry["filter"][0] for entry in task["filter_list"] if entry["name"] == filter_name)
    regex = RegexFilter(**{key: value for key, value in settings.items() if key != "function"})
    names = ("ignore_case", "ignore_punctuation", "regexes_to_ignore")
    metric = {name: task["metric_list"][0][name] for name in names}

    def right(case: Case) -> bool:
        (((answer,),),) = (regex.apply([[case.text]], [{}]),)
        return bool(exact_match_hf_evaluate([answer], [case.row["target"]], **metric)["exact_match"] == 1)

    return right


def minerva() -> Scorer:
    """Return a scorer, lm-eval's minerva_math: its extraction, normalisation and comparison.

    It reads one phrase and no box, so what the corpus puts in a box to be compared is put in that phrase for it.
    """
    from lm_eval.tasks.minerva_math import utils

    def right(case: Case) -> bool:
        phrase = f"Final Answer: The final answer is ${case.form}$. I hope it is correct."
        text = phrase if case.file in ("equivalents", "near_misses") else case.text
        answer = utils.normalize_final_answer(utils.get_unnormalized_answer(text))
        return bool(utils.is_equiv(answer, utils.normalize_final_answer(case.row["target"])))

    return right


def math_verify() -> Scorer:
    """Return a scorer, math-verify as its documentation shows it: the gold answer in dollars against the response."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return lambda case: bool(verify(parse(f"${case.row['target']}$"), parse(case.text)))


PEERS: dict[str, Callable[[], Scorer]] = {
    STRICT: functools.partial(gsm8k, STRICT),
    FLEXIBLE: functools.partial(gsm8k, FLEXIBLE),
    MINERVA: minerva,
    MATH_VERIFY: math_verify,
}


@functools.cache
def _peer(name: str) -> Scorer:
    return PEERS[name]()


def _verdict(name: str, case: Case) -> bool:
    """Judge a case in a worker process; an exception is a verdict of wrong."""
    try:
        return _peer(name)(case)
    except Exception:
        return False


def verdicts(name: str, chosen: list[Case], pool: Any) -> list[bool]:
    """Judge all cases, the computer algebra systems in worker processes: one that hangs is stopped, and wrong."""
    if name == OURS:
        return [judge(case) for case in chosen]
    if name not in (MINERVA, MATH_VERIFY):
        return [_verdict(name, case) for case in chosen]
    results = pool.map(functools.partial(_verdict, name), chosen, timeout=SECONDS).result()
    out = []
    for _ in chosen:
        try:
            out.append(next(results))
        except (TimeoutError, OSError, RuntimeError):
            out.append(False)
    return out


def unavailable(name: str) -> str:
    """Return why a peer cannot be used here, or nothing."""
    try:
        _peer(name)
    except (ImportError, AssertionError) as problem:
        return str(problem) or type(problem).__name__
    return ""


def scorers_of(name: str) -> list[str]:
    """Return the scorers of a part, of one kind of answer."""
    file = {"perturbed": "standard", "replacing": "taken_back", "neighbours": "wrappings"}.get(name, name)
    return SCORERS.get(load(file)[0]["kind"], [OURS])


# --------------------------------------------------------------------------- the report


def measure(name: str, limit: int, skipped: dict[str, str], pool: Any) -> dict[str, Any]:
    """Score a part of the corpus by every scorer that fits it."""
    all_cases = cases(name)
    entry: dict[str, Any] = {"target": TARGETS[name], "classes": {}, "wrong": {}, "cases": {}}
    by_class: dict[str, dict[str, Any]] = defaultdict(lambda: {"wrong": {}})
    for scorer in scorers_of(name):
        if scorer in skipped:
            continue
        few = name in SLOW or scorer == MATH_VERIFY
        chosen = sample(all_cases, limit) if few else all_cases
        judgements = verdicts(scorer, chosen, pool)
        wrong = [case for case, right in zip(chosen, judgements, strict=True) if right != case.expected]
        entry["wrong"][scorer] = round(rate(chosen, wrong), 5)
        entry["cases"][scorer] = len(chosen)
        for category, of_class in class_rates(chosen, wrong).items():
            by_class[category]["wrong"][scorer] = of_class
    for category, part_of in by_class.items():
        part_of["forms"] = len({case.line for case in all_cases if case.category == category})
    entry["classes"] = dict(by_class)
    entry["forms"] = len({case.line for case in all_cases})
    entry["expected"] = sorted({int(case.expected) for case in all_cases})
    return entry


def class_rates(chosen: list[Case], wrong: list[Case]) -> dict[str, float]:
    """Return the share of each class of cases that is wrong."""
    groups: dict[str, tuple[list[Case], list[Case]]] = defaultdict(lambda: ([], []))
    for column, group in enumerate((chosen, wrong)):
        for case in group:
            groups[case.category][column].append(case)
    return {category: round(rate(*group), 5) for category, group in groups.items()}


def measure_blind(name: str, skipped: dict[str, str], pool: Any) -> dict[str, Any]:
    """Count the answers that are missed and the traps that are accepted of texts written blind, by kind of answer.

    Without minerva_math, which reads one phrase that none of them has.
    """
    entry: dict[str, Any] = {"first_read": {"missed": BLIND[name].missed, "accepted": BLIND[name].accepted}}
    entry |= {"mended": BLIND[name].mended, "kinds": {}}
    for kind in dict.fromkeys(line["kind"] for line in load(name)):
        chosen = [case for case in cases(name) if case.kind == kind]
        answers = sum(case.expected for case in chosen)
        entry["kinds"][kind] = {"answers": answers, "traps": len(chosen) - answers, "wrong": {}}
        for scorer in SCORERS.get(kind, [OURS]):
            if scorer in skipped or scorer == MINERVA:
                continue
            judgements = verdicts(scorer, chosen, pool)
            wrong = [case.expected for case, right in zip(chosen, judgements, strict=True) if right != case.expected]
            counts = {"missed": sum(wrong), "accepted": len(wrong) - sum(wrong)}
            entry["kinds"][kind]["wrong"][scorer] = counts
    return entry


def measure_solutions() -> dict[str, dict[str, int]]:
    """Count, by model and in all, published solutions, and those that are judged at their unmarked end as published."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"solutions": 0, "agree": 0})
    for line in SOLUTIONS.read_text("utf-8").splitlines():
        row = json.loads(line)
        right = numbers_equal(extract(row["text"], NumberReader()).answer, row["target"])
        for name in (row["model"], "all"):
            counts[name]["solutions"] += 1
            counts[name]["agree"] += right == row["correct"]
    return dict(sorted(counts.items(), key=lambda item: item[0] == "all"))


def solutions_table(counts: dict[str, dict[str, int]]) -> str:
    """Return the agreement with published verdicts as a Markdown table."""
    lines = ["| model | solutions | agree | |", "| --- | --- | --- | --- |"]
    for name, count in counts.items():
        share_of = percent(count["agree"] / count["solutions"])
        lines.append(f"| {name} | {count['solutions']} | {count['agree']} | {share_of} |")
    return "\n".join(lines)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}%"


def error_of(entry: dict[str, Any]) -> str:
    return {(1,): "missed", (0,): "accepted"}.get(tuple(entry["expected"]), "judged wrongly")


def table(parts: dict[str, Any]) -> str:
    """Return the parts of the corpus as a Markdown table."""
    columns = [OURS, *PEERS]
    lines = [f"| part | forms | error | target | {' | '.join(columns)} |", "| --- " * (len(columns) + 4) + "|"]
    for name, entry in parts.items():
        shares = [percent(entry["wrong"].get(column)) for column in columns]
        lines.append(
            f"| `{name}` | {entry['forms']} | {error_of(entry)} | {percent(entry['target'])} | {' | '.join(shares)} |"
        )
    return "\n".join(lines)


def blind_table(sets: dict[str, Any]) -> str:
    """Return the texts written blind as a Markdown table: answers missed + traps accepted."""
    columns = [OURS, STRICT, FLEXIBLE, MATH_VERIFY]
    lines = [
        f"| set | answers + traps | when first read | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 3) + "|",
    ]
    for name, entry in sets.items():
        kinds = entry["kinds"]
        total = [sum(kind[key] for kind in kinds.values()) for key in ("answers", "traps")]
        errors = [sum(kind["wrong"][OURS][key] for kind in kinds.values()) for key in ("missed", "accepted")]
        title = f"{name.partition('/')[2]} (mended since: {entry['mended']})"
        rows = [(title, total, tally(entry["first_read"]), ["{} + {}".format(*errors), "", "", ""])]
        for kind, part in kinds.items():
            cells = [tally(part["wrong"].get(column)) for column in columns]
            rows.append((f"— {kind}", [part["answers"], part["traps"]], "", cells))
        lines += [
            f"| {title} | {sizes[0]} + {sizes[1]} | {first} | {' | '.join(cells)} |"
            for title, sizes, first, cells in rows
        ]
    return "\n".join(lines)


def tally(counts: dict[str, int] | None) -> str:
    return f"{counts['missed']} + {counts['accepted']}" if counts else ""


def show_classes(parts: dict[str, Any]) -> None:
    """Print the share of each class that each scorer judges wrongly."""
    width = max(len(category) for entry in parts.values() for category in entry["classes"])
    for name, entry in parts.items():
        columns = list(entry["wrong"])
        print(f"\n{name}, {error_of(entry)} (target {percent(entry['target'])})")
        print(f"  {'':{width}} {'forms':>6}" + "".join(f"{column:>18}" for column in columns))
        for category, part in [*entry["classes"].items(), ("all", entry)]:
            shares = "".join(f"{percent(part['wrong'].get(column)):>18}" for column in columns)
            print(f"  {category:{width}} {part['forms']:>6}{shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=int, default=3000, help="most cases of a part that a computer algebra system judges"
    )
    parts = [*TARGETS, *BLIND, "solutions"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="writes no file if not all")
    options = parser.parse_args()
    if importlib.util.find_spec("pebble") is None:
        raise SystemExit("this needs pebble: pip install pebble")
    from pebble import ProcessPool

    skipped = {name: reason for name in PEERS if (reason := unavailable(name))}
    for name, reason in skipped.items():
        print(f"without {name}: {reason}")
    with ProcessPool(max_workers=2) as pool:
        measured = {name: measure(name, options.cases, skipped, pool) for name in options.parts if name in TARGETS}
        blind = {name: measure_blind(name, skipped, pool) for name in options.parts if name in BLIND}
    if measured:
        show_classes(measured)
    solutions = {}
    if "solutions" in options.parts and SOLUTIONS.is_file():
        solutions = measure_solutions()
    elif "solutions" in options.parts:
        print(f"without published solutions: there is no {SOLUTIONS}")
    tables = {"table": table(measured), "blind": blind_table(blind)}
    tables |= {"solutions": solutions_table(solutions)} if solutions else {}
    print("", *tables.values(), sep="\n\n")
    if set(options.parts) < set(parts):
        return
    results = {"skipped": skipped, "parts": measured, "blind": blind}
    results["solutions"] = solutions
    write("scoring_quality", {"environment": environment()} | results)
    for name, text in tables.items():
        write_table(DOCUMENT, name, text)


if __name__ == "__main__":
    main()
