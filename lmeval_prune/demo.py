"""`lmeval-prune demo`: an embedded real model, dense and with heads pruned, side by side, in a few minutes, offline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import check_writable, write_text
from lmeval_prune.errors import InputError

MODEL = "smollm2-135m"
LONGEST = 256  # new tokens of a GSM8K answer
NEXT = """
At 135 million parameters the model answers hardly any word problem: this shows that everything runs, not what pruning
does. Next, on a model of your own:
  lm_eval --model pruned-hf --model_args pretrained=NAME,heads={heads} --tasks prune_gsm8k --apply_chat_template
or, for every head of some layers:
  lmeval-prune sweep --config configs/sprint/smollm2.yaml --limit 20"""


def demo(heads: str = "L5H3+L15H0", limit: int = 50, output: str = "out/demo") -> int:
    """Compare dense and pruned on packaged problems, and on GSM8K where `LMEVAL_PRUNE_DATA` names a folder that has it.

    Both variants of a generative task are decoded together, as in a sweep. Answers are kept: a run that was
    interrupted goes on, and a second one is quick.

    Args:
        heads: heads of the pruned variant
        limit: GSM8K problems, where they are at hand
        output: folder for answers and results
    """
    if limit < 1:
        raise InputError(f"limit must be at least 1, not {limit}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: threads that wait leave the processor to others
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
    both = PrunedHFLM(
        dense.model,
        tokenizer=dense.tokenizer,
        router=FixedOrderRouter([DENSE, heads]),
        responses=str(results.parent / "answers"),
    )
    rows.append(_row("prune_tiny_words", *_tries(both, manager, "prune_tiny_words")))
    if (Path(os.environ.get("LMEVAL_PRUNE_DATA") or "nowhere") / "gsm8k_test.jsonl").is_file():
        first = {"prune_gsm8k": list(range(limit))}
        tries = _tries(both, manager, "prune_gsm8k", samples=first, gen_kwargs={"max_gen_toks": LONGEST})
        rows.append(_row("prune_gsm8k", *tries))
    else:
        print("LMEVAL_PRUNE_DATA names no folder with gsm8k_test.jsonl: packaged problems only")
    both.close()
    write_text(results, json.dumps({"model": MODEL, "heads": heads, "tasks": rows}, indent=1) + "\n")
    print(_table(rows))
    print(NEXT.format(heads=heads))
    return 0


def _choices(lm: Any, manager: Any) -> list[float]:
    """Return for each multiple-choice problem whether it is solved."""
    import lm_eval

    results = lm_eval.simple_evaluate(lm, tasks=["prune_tiny_choice"], task_manager=manager, bootstrap_iters=0)
    return [float(row["acc"]) for row in results["samples"]["prune_tiny_choice"]]


def _tries(lm: Any, manager: Any, name: str, **options: Any) -> tuple[list[Sequence[float]], list[Sequence[str]]]:
    """Return for each problem whether dense and pruned solve it; and their texts."""
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
    differ = sum(of_dense != of_pruned for of_dense, of_pruned in texts or outcomes)
    return {**row, "verdicts differ" if texts is None else "answers differ": differ}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"\n{'task':<20}{'problems':>10}{'dense':>9}{'pruned':>9}   "]
    for row in rows:
        *_, what = row
        lines.append(
            f"{row['task']:<20}{row['problems']:>10}{row['dense']:>9.3f}{row['pruned']:>9.3f}   {row[what]} {what}"
        )
    return "\n".join(lines)
