"""What Token Filtering costs on real text, beside tokens skipped by chance and heads masked by chance: SmolLM2-135M.

    python benchmarks/filter_quality.py [--problems 16] [--threads 1]

Perplexity by token of the solutions of GSM8K and MATH-500, after their problem; the problem is read in one pass, the
solution token by token, as if it were decoded. Filters read all of it, or keep the problem (`decode`); each skips its
share of the tokens × layers that it may skip, in the last half of the layers. Random tokens, and random heads with as
much arithmetic as a filter of all tokens saves, are three draws each. What was measured is not measured again. Writes
`results/filter_quality.json`, and a table and a picture under `docs/results/token_filtering/`.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from _record import RESULTS, environment, timed, write
from transformers import AutoTokenizer, DynamicCache

from lmeval_prune import HeadMask, load_pretrained, map_model
from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.token_filter import TokenFilter
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.tasks import data

RATIOS = (0.1, 0.2)
DRAWS = 3
LONGEST = 160  # tokens of a solution
TEXTS = {"GSM8K": ("gsm8k", "answer"), "MATH": ("math500", "solution")}
OUTPUT = RESULTS.parent.parent / "docs/results/token_filtering"


def variants(model_map: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and settings: `filter` for a token filter, `heads` for a mask."""
    yield "dense", {}
    for ratio in RATIOS:
        for phase in ("all", "decode"):
            yield f"filter, {phase}, {ratio:.0%}", {"filter": {"ratio": ratio, "phase": phase}}
            for seed in range(DRAWS):
                settings = {"ratio": ratio, "phase": phase, "similarity": "random", "seed": seed}
                yield f"random tokens, {phase}, {ratio:.0%}, draw {seed}", {"filter": settings}
        names = [f"{layer.label}H{number}" for layer in model_map.attention for number in range(layer.heads)]
        for seed in range(DRAWS):
            chosen = random.Random(seed).sample(names, round(ratio * model_map.total_heads))
            yield f"random heads, {ratio:.0%}, draw {seed}", {"heads": chosen}


def problems(tokenizer: Any, name: str, count: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of the first problems with short solutions, and of these."""
    source, answer = TEXTS[name]
    pairs = []
    for row in data.load(source, "test"):
        prompt, solution = f"Question: {row['question']}\nAnswer:", f" {row[answer]}"
        ids = tokenizer(solution)["input_ids"]
        if len(ids) <= LONGEST:
            pairs.append((tokenizer(prompt)["input_ids"], ids))
    return pairs[:count]


@torch.no_grad()
def perplexity(model: Any, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Return the perplexity of the solutions, all in one batch."""
    widths = [max(map(len, part)) for part in zip(*pairs, strict=True)]
    ids = torch.tensor([[0] * (widths[0] - len(a)) + a + b + [0] * (widths[1] - len(b)) for a, b in pairs])
    real = torch.tensor([[0] * (widths[0] - len(a)) + [1] * len(a + b) + [0] * (widths[1] - len(b)) for a, b in pairs])
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache, logits = DynamicCache(config=model.config), []
    ends = range(widths[0], sum(widths))
    for begin, end in zip([0, *ends], ends, strict=False):
        out = model(
            ids[:, begin:end],
            attention_mask=real[:, :end],
            position_ids=positions[:, begin:end],
            past_key_values=cache,
            logits_to_keep=1,
        )
        logits.append(out.logits[:, -1])
    scores = torch.stack(logits, 1).log_softmax(-1).gather(2, ids[:, widths[0] :, None])[..., 0].double()
    counted = real[:, widths[0] :].bool()
    return float((-scores[counted].mean()).exp())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    machine, folder = environment(), embedded.resolve("smollm2-135m")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_pretrained(folder, dtype=torch.float32).eval()
    texts, model_map = {name: problems(tokenizer, name, options.problems) for name in TEXTS}, map_model(model)
    path = RESULTS / "filter_quality.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    results = known["results"] if known.get("environment", {}).get("commit") == machine["commit"] else {}
    for name, setting in variants(model_map):
        if results.get(name, {}).get("setting") == setting:
            continue
        applied: Any = nullcontext()
        if "filter" in setting:
            applied = TokenFilter(**setting["filter"]).applied_to(model, model_map)
        elif "heads" in setting:
            applied = HeadMask(setting["heads"], allow_empty_layer=True).applied_to(model, model_map)
        with applied:
            quality, seconds = timed(lambda: {text: perplexity(model, pairs) for text, pairs in texts.items()})
            row: dict[str, Any] = {"setting": setting, "perplexity": quality, "seconds": round(seconds, 1)}
            if "filter" in setting:
                row["skipped"] = interventions_on(model)[0].report(model_map)["token_filter_skipped"]
        results[name] = row
        print(f"{name}: {quality}", flush=True)
        write("filter_quality", {"environment": machine, "problems": options.problems, "results": results}, quiet=True)
    report(results)


def report(results: dict[str, Any]) -> None:
    """Write the table and the picture."""
    lines = ["| | skipped, of the tokens that may × all layers | GSM8K | MATH |", "| --- | --- | --- | --- |"]
    for name, row in results.items():
        skipped = f"{row['skipped']['realised']:.1%}" if "skipped" in row else ""
        lines.append(f"| {name} | {skipped} | {' | '.join(f'{x:.1f}' for x in row['perplexity'].values())} |")
    write_text(OUTPUT / "table.md", "\n".join(lines) + "\n")
    canvas, axes = figure(7.5, 4.5, "Perplexity of GSM8K's solutions, SmolLM2-135M")
    percent = [100 * ratio for ratio in RATIOS]
    kinds = {"filter, all": "tokens filtered", "filter, decode": "tokens filtered, problem kept"}
    kinds |= {"random tokens, all": "random tokens", "random tokens, decode": "random tokens, problem kept"}
    for colour, (kind, label) in zip(COLOURS, {**kinds, "random heads": "random heads"}.items(), strict=False):
        names = [[n for n in results if n.startswith(f"{kind}, {p:.0f}%")] for p in percent]
        rows = [[results[name]["perplexity"]["GSM8K"] for name in own] for own in names]
        axes.plot(percent, [sorted(row)[len(row) // 2] for row in rows], color=colour, marker="o", label=label)
        axes.fill_between(percent, list(map(min, rows)), list(map(max, rows)), color=colour, alpha=0.15, lw=0)
    axes.axhline(results["dense"]["perplexity"]["GSM8K"], color="black", lw=0.8, ls=":", label="dense")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_yticks(ticks := [5, 10, 20, 50], labels=map(str, ticks))
    axes.set_xticks(percent)
    axes.set_xlabel("per cent of tokens × layers skipped, or of heads masked (as much arithmetic); bands: three draws")
    axes.legend(fontsize=8, frameon=False)
    save(canvas, OUTPUT / "perplexity")


if __name__ == "__main__":
    main()
