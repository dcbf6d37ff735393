"""`lmeval-prune demo`: compare an embedded real model with and without pruned heads in a few minutes, offline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import check_writable, write_text
from lmeval_prune.settings import Count, parse_value

MODEL = "smollm2-135m"
MAX_NEW_TOKENS = 256  # of a GSM8K answer
NEXT_STEPS = """
The model has 135 million parameters and solves hardly any word problem: the demo shows that everything runs, not the
effect of pruning. Next, with your own model:
  lm_eval --model pruned-hf --model_args pretrained=NAME,heads={heads} --tasks prune_gsm8k --apply_chat_template
or, for every head of some layers:
  lmeval-prune sweep --config configs/sprint/smollm2.yaml --limit 20"""


def demo(heads: str = "L5H3+L15H0", limit: int = 50, output: str = "out/demo") -> int:
    """Compare the dense and the pruned model on packaged problems, and on GSM8K if `LMEVAL_PRUNE_DATA` has its files.

    Both variants of a generative task are decoded in the same batches, as in a sweep. Answers are stored: an
    interrupted run resumes, and a second run is quick.

    Args:
        heads: heads of the pruned variant
        limit: number of GSM8K problems
        output: folder for answers and results
    """
    parse_value("limit", limit, Count)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: waiting threads release the processor
    from lmeval_prune.interventions import HeadMask
    from lmeval_prune.models.head_router import DENSE, FixedOrderRouter
    from lmeval_prune.models.pruned_hf import PrunedHFLM
    from lmeval_prune.plugin import registration
    from lmeval_prune.tasks.loading import task_manager

    mask, results = HeadMask(heads), Path(output) / "demo.json"
    check_writable(results)
    registration.register()
    manager = task_manager()
    dense = PrunedHFLM(MODEL, batch_size=16)
    with mask.applied_to(dense.model, dense.model_map):
        pruned = _choices(dense, manager)
    rows = [_row("prune_tiny_choice", list(zip(_choices(dense, manager), pruned, strict=True)))]
    router, answers = FixedOrderRouter([DENSE, heads]), results.parent / "answers"
    routed = PrunedHFLM(dense.model, tokenizer=dense.tokenizer, router=router, responses=str(answers))
    rows.append(_row("prune_tiny_words", *_answers(routed, manager, "prune_tiny_words")))
    if (Path(os.environ.get("LMEVAL_PRUNE_DATA") or "nowhere") / "gsm8k_test.jsonl").is_file():
        limits = {"samples": {"prune_gsm8k": list(range(limit))}, "gen_kwargs": {"max_gen_toks": MAX_NEW_TOKENS}}
        rows.append(_row("prune_gsm8k", *_answers(routed, manager, "prune_gsm8k", **limits)))
    else:
        print("LMEVAL_PRUNE_DATA names no folder with gsm8k_test.jsonl: packaged problems only")
    routed.close()
    write_text(results, json.dumps({"model": MODEL, "heads": heads, "tasks": rows}, indent=1) + "\n")
    print(_table(rows))
    print(NEXT_STEPS.format(heads=heads))
    return 0


def _choices(lm: Any, manager: Any) -> list[float]:
    """Return the accuracy, 0 or 1, of each multiple-choice problem."""
    import lm_eval

    results = lm_eval.simple_evaluate(lm, tasks=["prune_tiny_choice"], task_manager=manager, bootstrap_iters=0)
    return [float(row["acc"]) for row in results["samples"]["prune_tiny_choice"]]


def _answers(lm: Any, manager: Any, name: str, **options: Any) -> tuple[list[Sequence[float]], list[Sequence[str]]]:
    """Return the accuracies and the texts of the dense and the pruned answer to each problem."""
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
    dense, pruned = (sum(column) / len(outcomes) for column in zip(*outcomes, strict=True))
    row = {"task": task, "problems": len(outcomes), "dense": round(dense, 3), "pruned": round(pruned, 3)}
    differences = sum(first != second for first, second in texts or outcomes)
    return {**row, "verdicts differ" if texts is None else "answers differ": differences}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"\n{'task':<20}{'problems':>10}{'dense':>9}{'pruned':>9}   "]
    for row in rows:
        *_, difference = row
        scores = f"{row['dense']:>9.3f}{row['pruned']:>9.3f}"
        lines.append(f"{row['task']:<20}{row['problems']:>10}{scores}   {row[difference]} {difference}")
    return "\n".join(lines)
