"""What Token Filtering costs in quality on real text, and what the same arithmetic costs by masking heads.

    python benchmarks/filter_quality.py [--tokens 2048] [--threads 1] [--work out/filter_quality]

Perplexity by token of SmolLM2-135M on GSM8K's and MATH's texts (windows of 512 tokens), accuracy on prune_tiny_choice;
by ratio, focus, fusion and similarity, with the realised ratio. What was measured is kept under --work and not measured
again. Writes `results/filter_quality.json`, and a table and a picture under `docs/results/token_filtering/`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lm_eval
import torch
from _measures import WINDOW, arithmetic, perplexity, texts
from _record import RESULTS, environment, timed, write
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import HeadMask, map_model
from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.reporting.plot_style import COLOURS, figure, save

RATIOS = (0.1, 0.2, 0.3, 0.5)
SEEDS = 3  # of random heads
OUTPUT = RESULTS.parent.parent / "docs/results/token_filtering"


def accuracy(model: Any, tokenizer: Any, manager: TaskManager) -> float:
    """Return lm-eval's acc_norm on prune_tiny_choice. What is applied to the model stays applied."""
    lm = PrunedHFLM(model, tokenizer=tokenizer, batch_size=8)
    results = lm_eval.simple_evaluate(lm, tasks=["prune_tiny_choice"], task_manager=manager, bootstrap_iters=0)
    lm.close()
    return float(results["results"]["prune_tiny_choice"]["acc_norm,none"])


def variants(model_map: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and settings: `filter` for a token filter, `heads` for a mask."""
    yield "dense", {}
    for ratio in RATIOS:
        for focus in ("tail", "uniform", "head"):
            yield f"{focus} {ratio:.0%}", {"filter": {"ratio": ratio, "focus": focus}}
        yield f"as printed {ratio:.0%}", {"filter": {"ratio": ratio, "fusion": "as_printed"}}
        for similarity in ("key", "value"):
            yield f"{similarity} {ratio:.0%}", {"filter": {"ratio": ratio, "similarity": similarity}}
        yield f"kept {ratio:.0%}", {"filter": {"ratio": ratio, "keep_skipped_kv": True}}
        layers = model_map.attention
        for seed in range(SEEDS):
            for part, part_layers in (("any", layers), ("tail", layers[len(layers) // 2 :])):
                names = [f"{layer.label}H{number}" for layer in part_layers for number in range(layer.heads)]
                count = round(ratio * model_map.total_heads)  # as many heads as a filter spares of their arithmetic
                if count < len(names):
                    yield f"heads {part} {ratio:.0%} {seed}", {"heads": random.Random(seed).sample(names, count)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", default="out/filter_quality")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    machine = environment()
    folder = embedded.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model_map, windows = map_model(model), texts(tokenizer, options.tokens)
    manager = TaskManager()
    path = Path(options.work) / f"{options.tokens}.json"
    stored_rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    planned = dict(variants(model_map))
    for number, (name, setting) in enumerate(planned.items(), 1):
        if stored_rows.get(name, {}).get("setting") == setting:
            continue
        applied: AbstractContextManager[Any] = nullcontext()
        if "filter" in setting:
            applied = TokenFilter(**setting["filter"]).applied_to(model, model_map)
        elif "heads" in setting:
            applied = HeadMask(setting["heads"], allow_empty_layer=True).applied_to(model, model_map)
        with applied:
            quality, seconds = timed(lambda: {text: perplexity(model, ids) for text, ids in windows.items()})
            row: dict[str, Any] = {"setting": setting, "perplexity": quality, "seconds": round(seconds, 1)}
            if "filter" in setting:
                row["skipped"] = interventions_on(model)[0].report(model_map)["token_filter_skipped"]
            row["accuracy"] = accuracy(model, tokenizer, manager)
        stored_rows[name] = row
        write_text(path, json.dumps(stored_rows))
        print(f"{number} of {len(planned)}: {name}: {quality}, accuracy {row['accuracy']:.3f}", flush=True)
    results = {name: stored_rows[name] for name in planned}
    work = arithmetic(model_map, WINDOW // 2)
    write("filter_quality", {"environment": machine, "tokens": options.tokens, "arithmetic": work, "results": results})
    report(results, work)


def report(results: dict[str, Any], work: dict[str, float]) -> None:
    """Write the table and the picture."""
    lines = ["| | realised | GSM8K | MATH | prune_tiny_choice |", "| --- | --- | --- | --- | --- |"]
    for name, row in results.items():
        if name.startswith("heads"):
            continue
        realised = f"{row['skipped']['realised']:.1%}" if "skipped" in row else ""
        lines.append(f"| {name} | {realised} | {cells(row)} |")
    heads: dict[str, list[dict[str, Any]]] = {}
    for name, row in results.items():
        if name.startswith("heads"):
            heads.setdefault(name.rpartition(" ")[0], []).append(row)
    for name, rows in heads.items():
        middle = sorted(rows, key=lambda row: row["perplexity"]["GSM8K"])[len(rows) // 2]
        lines.append(f"| {name}, of {len(rows)} draws the middle one on GSM8K | | {cells(middle)} |")
    write_text(OUTPUT / "table.md", "\n".join(lines) + "\n")

    canvas, axes = figure(7.5, 4.5, "Perplexity by token on GSM8K, SmolLM2-135M")
    percent = [100 * ratio for ratio in RATIOS]
    for colour, focus in zip(COLOURS, ("tail", "uniform", "head"), strict=False):
        values = [results[f"{focus} {ratio:.0%}"]["perplexity"]["GSM8K"] for ratio in RATIOS]
        axes.plot(percent, values, color=colour, marker="o", label=f"tokens filtered, {focus}")
    for colour, part in zip(COLOURS[3:], ("any", "tail"), strict=False):
        names = {100 * ratio: f"heads {part} {ratio:.0%}" for ratio in RATIOS}
        named = {x: heads[name] for x, name in names.items() if name in heads}
        shown = {x: sorted(row["perplexity"]["GSM8K"] for row in rows) for x, rows in named.items()}
        label = f"random heads masked, {'in any layer' if part == 'any' else 'in the last half'}"
        middles = [values[len(values) // 2] for values in shown.values()]
        axes.plot(list(shown), middles, color=colour, ls="--", marker="s", label=label)
        lowest, highest = ([values[end] for values in shown.values()] for end in (0, -1))
        axes.fill_between(list(shown), lowest, highest, color=colour, alpha=0.15, lw=0)
    axes.axhline(results["dense"]["perplexity"]["GSM8K"], color="black", lw=0.8, ls=":", label="dense")
    axes.set_yscale("log")
    share = work["attention_of_a_skipped_token"] * 0.01
    axes.set_xlabel(
        f"per cent of tokens × layers skipped, or of heads masked: the same arithmetic\n"
        f"(a hundredth is {100 * share * 30 / work['model']:.2f} per cent of the model's)"
    )
    axes.set_ylabel("perplexity")
    axes.legend(fontsize=8, frameon=False)
    save(canvas, OUTPUT / "perplexity")


def cells(row: dict[str, Any]) -> str:
    """Return the cells of a row of the table."""
    return f"{row['perplexity']['GSM8K']:.1f} | {row['perplexity']['MATH']:.1f} | {row['accuracy']:.3f}"


if __name__ == "__main__":
    main()
