"""`lmeval-prune demo`: compare a small packaged model with and without pruned heads in a few minutes, offline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import check_writable, write_text
from lmeval_prune.settings import Count, parse_value

MODEL = "smollm2-135m"
MAX_NEW_TOKENS = 256  # largest length of a GSM8K answer
NEXT_STEPS = """
The model has 135 million parameters and solves hardly any word problem: the demo shows that everything runs, not the
effect of pruning. Next, with your own model:
  lm_eval --model pruned-hf --model_args pretrained=NAME,heads={heads} --tasks prune_gsm8k --apply_chat_template
or prune each head of some layers, one after another:
  lmeval-prune sweep --config configs/sprint/smollm2.yaml --limit 20"""


def demo(heads: str = "L5H3+L15H0", limit: int = 50, output: str = "out/demo") -> int:
    """Compare the dense and the pruned model on packaged problems, and on GSM8K if `LMEVAL_PRUNE_DATA` has its files.

    On generative tasks, both models answer in the same batches, as in a sweep. Answers are stored, so that an
    interrupted run resumes and a second run is quick.

    Args:
        heads: heads of the pruned variant
        limit: number of GSM8K problems
        output: folder for answers and results
    """
    parse_value("limit", limit, Count)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # set before torch starts: idle OpenMP threads sleep soon
    from lmeval_prune.interventions import HeadMask
    from lmeval_prune.models.head_router import DENSE, FixedOrderRouter
    from lmeval_prune.models.pruned_hf import PrunedHFLM
    from lmeval_prune.plugin import registration
    from lmeval_prune.tasks.loading import task_manager

    mask = HeadMask(heads)
    results = Path(output) / "demo.json"
    check_writable(results)
    registration.register()
    manager = task_manager()
    dense = PrunedHFLM(MODEL, batch_size=16)
    dense_choices = _choices(dense, manager)
    with mask.applied_to(dense.model, dense.model_map):
        pruned_choices = _choices(dense, manager)
    rows = [_row("prune_tiny_choice", list(zip(dense_choices, pruned_choices, strict=True)))]
    router = FixedOrderRouter([DENSE, heads])
    answers = results.parent / "answers"
    routed = PrunedHFLM(dense.model, tokenizer=dense.tokenizer, router=router, responses=str(answers))
    rows.append(_row("prune_tiny_words", *_answers(routed, manager, "prune_tiny_words")))
    data = os.environ.get("LMEVAL_PRUNE_DATA")
    if data and (Path(data) / "gsm8k_test.jsonl").is_file():
        limits = {"samples": {"prune_gsm8k": list(range(limit))}, "gen_kwargs": {"max_gen_toks": MAX_NEW_TOKENS}}
        rows.append(_row("prune_gsm8k", *_answers(routed, manager, "prune_gsm8k", **limits)))
    else:
        print("GSM8K is left out: set LMEVAL_PRUNE_DATA to a folder with gsm8k_test.jsonl to include it")
    routed.close()
    write_text(results, json.dumps({"model": MODEL, "heads": heads, "tasks": rows}, indent=1) + "\n")
    print(_table(rows))
    print(NEXT_STEPS.format(heads=heads))
    return 0


def _choices(lm: Any, manager: Any) -> list[float]:
    """Return 1.0 for each multiple-choice problem that the model solves, 0.0 for the others."""
    import lm_eval

    results = lm_eval.simple_evaluate(lm, tasks=["prune_tiny_choice"], task_manager=manager, bootstrap_iters=0)
    return [float(row["acc"]) for row in results["samples"]["prune_tiny_choice"]]


def _answers(lm: Any, manager: Any, name: str, **options: Any) -> tuple[list[Sequence[float]], list[Sequence[str]]]:
    """Return for each problem the scores of the dense and the pruned answer, and their texts."""
    import lm_eval

    from lmeval_prune.sprint.swept_task import swept

    task = swept(manager.load([name])["tasks"][name])
    task.set_config(key="repeats", value=2)
    results = lm_eval.simple_evaluate(
        lm, tasks=[task], task_manager=manager, bootstrap_iters=0, apply_chat_template=True, **options
    )
    rows = results["samples"][name]
    return [row["outcomes"] for row in rows], [row["resps"][0] for row in rows]


def _row(
    task: str, outcomes: Sequence[Sequence[float]], texts: Sequence[Sequence[str]] | None = None
) -> dict[str, Any]:
    """Return a task's row of the table: both accuracies, and how many answers (or scores, without texts) differ."""
    dense, pruned = (sum(column) / len(outcomes) for column in zip(*outcomes, strict=True))
    row = {"task": task, "problems": len(outcomes), "dense": round(dense, 3), "pruned": round(pruned, 3)}
    differences = sum(first != second for first, second in texts or outcomes)
    return {**row, "verdicts differ" if texts is None else "answers differ": differences}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a text table."""
    lines = [f"\n{'task':<20}{'problems':>10}{'dense':>9}{'pruned':>9}   "]
    for row in rows:
        difference = list(row)[-1]  # "answers differ" or "verdicts differ"
        scores = f"{row['dense']:>9.3f}{row['pruned']:>9.3f}"
        lines.append(f"{row['task']:<20}{row['problems']:>10}{scores}   {row[difference]} {difference}")
    return "\n".join(lines)
