"""The leaderboard: configs/leaderboard/grid.yaml on three models, with paired tests on all 1,218 problems of ASDiv-A.

    python benchmarks/leaderboard.py [--hosts first,second] [--rows 34] [--work out/leaderboard]    rows not committed
    python benchmarks/leaderboard.py --hosts heads-first,heads-second,speed    single heads; tokens a second
    python benchmarks/leaderboard.py --report           tables, page, rows and pictures of docs/results/leaderboard

Hosts: `embedded`, SmolLM2-135M-Instruct (distances, perplexity, packaged problems); `first` and `second`, SmolLM2
fine-tuned by configs/distillation/smollm2_finetune.yaml on two of ASDiv-A's folds each. They are tested on the other
two folds and on half of fold 2 each, whose other half chooses the single heads, and are pruned by their training texts.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from _record import RESULTS, environment, write, write_table
from safetensors import safe_open
from transformers import AutoTokenizer

from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.cli import main as cli
from lmeval_prune.comparison import report
from lmeval_prune.comparison.columns import MEASURED, change, level, pareto_fronts
from lmeval_prune.comparison.tables import POOLED, Comparison, Row, Table, rows_of
from lmeval_prune.grid.comparison import compare_grid
from lmeval_prune.grid.configuration import Grid
from lmeval_prune.grid.folder import GridFolder
from lmeval_prune.grid.run import run
from lmeval_prune.models.identity import Checkpoint
from lmeval_prune.profiling.speed import Workload, measure
from lmeval_prune.reporting.documents import markdown, p_value
from lmeval_prune.reporting.plot_style import COLOURS, figure, label_ends, save
from lmeval_prune.tasks.data import load
from lmeval_prune.tasks.loading import load_tasks, task_manager
from lmeval_prune.tasks.prompts import prompt_of, target_of

ROOT = RESULTS.parent.parent
CONFIG, OUTPUT = ROOT / "configs/leaderboard", ROOT / "docs/results/leaderboard"
PAGE = ROOT / "docs/results/leaderboard.md"
ASDIV = "configs/leaderboard/asdiv.yaml"
FOLDS = {  # fine-tuned on, tested on, single heads chosen on
    "first": ("fold3+fold4", "fold0+fold1+fold2[:50%]", "fold2[50%:]"),
    "second": ("fold0+fold1", "fold2[50%:]+fold3+fold4", "fold2[:50%]"),
}
HEADS = [f"L{layer}H{head}" for layer in (5, 10, 15, 20, 25) for head in range(9)]
NAME = "ASDiv-A"
MARGIN = 2.0  # points
BATCHES = (1, 32)


def grid_of(host: str, work: Path) -> dict[str, Any]:
    """Return the content of the grid's YAML for a host."""
    content = yaml.safe_load((CONFIG / "grid.yaml").read_text())
    if host == "embedded":
        return content
    variants = {}
    for name, block in content["variants"].items():
        block = copy.deepcopy(block)
        settings = block.get("prepare", {}).get("prune", {})
        if settings.get("task") == "prune_math500":
            continue
        if settings.pop("task", None):
            settings["text"] = str(work / f"{host}.jsonl")
        variants[name] = block
    heads = json.loads((work / f"{host}_heads.json").read_text()) if (work / f"{host}_heads.json").exists() else {}
    variants |= {f"{name} single head of 45": {"heads": head} for name, head in heads.items()}
    return {**content, "variants": variants, "distance": 0, **asdiv(host, FOLDS[host][1], work)}


def asdiv(host: str, split: str, work: Path) -> dict[str, Any]:
    return {
        "model": {"pretrained": str(work / host), "dtype": "float32"},
        "apply_chat_template": True,
        "metadata": {"data_split": split},
        "tasks": [{"task": ASDIV, "gen_kwargs": {"max_gen_toks": 24}}],
    }


def write_texts(host: str, work: Path) -> None:
    """Write the texts that a host was fine-tuned on."""
    (task,) = load_tasks(task_manager(), [ASDIV]).values()
    tokenizer = AutoTokenizer.from_pretrained(embedded.resolve("smollm2-135m"))
    rows = [dict(row) for row in load("asdiv_a", FOLDS[host][0])]
    texts = [f"{prompt_of(task, row, tokenizer)}\\boxed{{{target_of(task, row)}}}<|im_end|>\n" for row in rows]
    write_text(work / f"{host}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))


def choose_heads(host: str, work: Path) -> None:
    """Write which single head of five layers a host answers most and fewest problems without."""
    variants = {"dense": {}, "{heads}": {"heads": {"each": HEADS}}}
    content = {"variants": variants, "batch_size": 64, "measure": False, **asdiv(host, FOLDS[host][2], work)}
    run(Grid.of(content), str(work / f"{host}_heads"))
    rows = compare_grid(work / f"{host}_heads", "dense").rows
    accuracy = {name: row.mean for (name, task), row in rows.items() if name != "dense"}
    chosen = {"best": max(accuracy, key=accuracy.__getitem__), "worst": min(accuracy, key=accuracy.__getitem__)}
    write_text(work / f"{host}_heads.json", json.dumps(chosen))
    print(host, chosen, {name: round(value, 3) for name, value in accuracy.items()})


def train(host: str, work: Path) -> None:
    """Fine-tune a host on its folds, and write its texts."""
    tested = "+".join(f"fold{fold}" for fold in range(5) if f"fold{fold}" not in FOLDS[host][0])
    command = f"distill --config {ROOT}/configs/distillation/smollm2_finetune.yaml --task {ASDIV} --test {tested}"
    cli([*command.split(), "--best_by", "none", "--trainer", '{"bf16": true}', "--output", str(work / host)])
    write_texts(host, work)


def committed_rows() -> pd.DataFrame:
    path = OUTPUT / "rows.parquet"
    return pd.read_parquet(path) if path.exists() else pd.DataFrame(columns=["task", "question", "variant", "value"])


def run_host(host: str, rows: int | None, work: Path) -> None:
    if host != "embedded":
        if not (work / host).exists():
            train(host, work)
        weights = Checkpoint({"pretrained": str(work / host)}).identity()
        if len(committed_rows()) and weights != json.loads((RESULTS / "leaderboard.json").read_text())["weights"][host]:
            raise SystemExit(f"{work / host} is another model than that of the rows in {OUTPUT}; run all without those")
    grid = Grid.of(grid_of(host, work))
    committed = committed_rows()
    known = set(committed.loc[(committed["task"] == NAME) == (host != "embedded"), "variant"]) - {"dense"}
    kept = [variant for variant in grid.variants[:rows] if variant.name not in known]
    machine, began, cpu = environment(), time.perf_counter(), time.process_time()
    summary = run(Grid(**{**vars(grid), "variants": kept}), str(work / "grids" / host))
    path = work / "grids" / f"{host}.json"
    record = json.loads(path.read_text()) if path.exists() else []
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    record.append({"rows": rows, "new": summary.new, **seconds, "environment": machine})
    write_text(path, json.dumps(record, indent=1) + "\n")
    print(host, summary)


def checkpoints(work: Path) -> dict[str, Path]:
    """Return the folders of the embedded model and of its cut checkpoints."""
    folder = GridFolder(work / "grids/embedded")
    prepared = {entry["variant"]: folder.prepared / entry["prepared"] / "model" for entry in folder.read()["cells"]}
    cut = {name: model for name, model in prepared.items() if model.is_dir()}
    return {"dense": Path(embedded.resolve("smollm2-135m")), **cut}


def measure_speed(work: Path) -> None:
    """Measure the embedded model by what was removed; it follows from shapes, so one method does for each part."""
    machine, models = environment(), {"dense": load_pretrained(embedded.resolve("smollm2-135m")).float()}
    for part, method in (
        ("heads and channels", "random"),
        ("layers", "block_influence --task prune_gsm8k --windows 4"),
    ):
        for ratio in (0.1, 0.2, 0.3):
            folder = work / "speed" / f"{part}_{ratio}".replace(" ", "_")
            if not folder.exists():
                command = f"prune --pretrained smollm2-135m --ratio {ratio} --method {method}"
                cli([*command.split(), "--output", f"{folder}.json", "--cut", str(folder)])
            models[f"{part}, {ratio:.0%}"] = load_pretrained(str(folder)).float()
    rates = measure(models, Workload(prompt=16, new=16, batches=BATCHES, rounds=7, clock="processor"))
    write("leaderboard_speed", {"environment": machine, "tokens_per_second": rates})
    rows = [
        {"removed": name}
        | {f"tokens/s, batch {batch}": f"{rate[f'decode_{batch}']:.1f}" for batch in BATCHES}
        | {
            f"× dense, {batch}": f"{rate[f'decode_{batch}'] / rates['dense'][f'decode_{batch}']:.2f}"
            for batch in BATCHES
        }
        for name, rate in rates.items()
    ]
    write_table(PAGE, "speed", markdown(pd.DataFrame(rows), ["removed"]))


# ---------------------------------------------------------------------- report


def pooled(work: Path) -> Comparison:
    """Return the embedded model's comparison with the pooled problems of the fine-tuned models before its tasks.

    Rows of questions that are committed and are not in this folder's grids are those of the same weights, and stay.
    """
    first, second, own = (compare_grid(work / "grids" / host, "dense") for host in ("first", "second", "embedded"))
    task = Path(ASDIV).stem
    parts = [comparison.tables[task] for comparison in (first, second)]
    names = [name for name in first.variants if all(name in part.variants for part in parts)]
    values = np.concatenate([part.values_of(names) for part in parts])
    texts = [text for part in parts for text in part.texts]
    tables = {NAME: Table(names, values, texts, parts[0].metrics, numbers=range(len(values))), **own.tables}
    tables.pop(POOLED, None)
    measured = {key: row.measured for key, row in own.rows.items()}
    for name in names:
        cut_off = [comparison.rows[name, task].measured["cut_off"] for comparison in (first, second)]
        measured[name, NAME] = {"cut_off": float(np.mean(cut_off))}
    costs = {name: costs_of(folder) for name, folder in checkpoints(work).items()}

    known, kept = json.loads((OUTPUT / "comparison.json").read_text()), committed_rows()
    own_fields = {field.name for field in fields(Row)}
    for row in known["rows"]:
        measured.setdefault((row["variant"], row["task"]), {k: v for k, v in row.items() if k not in own_fields})
    for key, table in tables.items():
        before = kept[kept["task"] == key].pivot(index="question", columns="variant", values="value")
        before = before.reindex(range(len(table.values))).drop(columns=table.variants, errors="ignore")
        values = np.concatenate([table.values, before.to_numpy()], 1)
        tables[key] = replace(table, variants=[*table.variants, *before], values=values)
    rows = rows_of(tables, "dense", 0, MARGIN)
    for key, row in rows.items():
        row.measured = {**measured[key], **row.measured}

    order = [variant.name for variant in Grid.of(grid_of("embedded", work)).variants]
    names = sorted(dict.fromkeys(name for name, _ in rows), key=[*order, *names, *kept["variant"].unique()].index)
    costs = {name: costs.get(name) or known["costs"].get(name, {}) for name in names}
    gains: dict[str, dict[str, float]] = {key: {} for key in tables}
    for row in rows.values():
        gains[row.task][row.variant] = -row.mean if row.lower_is_better else row.mean
    return replace(
        own,
        title="Leaderboard: what each method loses, nothing trained",
        variants=names,
        tables=tables,
        rows=rows,
        costs=costs,
        fronts={key: pareto_fronts(costs, own) for key, own in gains.items()},
        commands={},
    )


def costs_of(folder: Path) -> dict[str, Any]:
    """Return the parameters of a checkpoint, and its bytes in float32."""
    count = 0
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return {"parameters": count, "weights_bytes": 4 * count}


def write_report(work: Path) -> None:
    before = json.loads((RESULTS / "leaderboard.json").read_text())
    comparison = pooled(work)
    report.write(comparison, OUTPUT, without_texts=list(comparison.evaluated))
    (OUTPUT / "report.md").unlink()  # the page has it
    frames = [
        pd.DataFrame({"task": task, "question": range(len(table.values)), "variant": name, "value": column})
        for task, table in comparison.tables.items()
        for name, column in zip(table.variants, table.values.T, strict=True)
        if len(table.numbers)
    ]
    pd.concat(frames).to_parquet(OUTPUT / "rows.parquet", compression="zstd", index=False)
    rows = [summary(comparison, name) for name in comparison.variants]
    write_table(PAGE, "leaderboard", markdown(pd.DataFrame(rows).fillna(""), ["variant"]))
    runs = {host: json.loads((work / "grids" / f"{host}.json").read_text()) for host in [*FOLDS, "embedded"]}
    runs = {host: [*(old for old in before["runs"][host] if old not in own), *own] for host, own in runs.items()}
    weights = {host: Checkpoint({"pretrained": str(work / host)}).identity() for host in FOLDS}
    write("leaderboard", {"environment": environment(), "runs": runs, "weights": weights, "rows": rows})
    draw(comparison)


def summary(comparison: Comparison, name: str) -> dict[str, Any]:
    """Return a row of the main table."""
    costs, cells = comparison.costs[name], {"variant": name}
    cells["parameters, million"] = f"{costs['parameters'] / 1e6:.1f}" if costs else ""
    cells["MB"] = f"{costs['weights_bytes'] / 1e6:.0f}" if costs else ""
    for task in [task for task in comparison.evaluated if task.endswith("_text")]:
        if (name, task) in comparison.rows:
            row, label = comparison.rows[name, task], "GSM8K" if "gsm8k" in task else "MATH"
            cells[f"{label}: word perplexity"] = level(row, row.mean)
            for column in MEASURED:
                if column.key in ("mean_kld", "same_top") and column.key in row.measured:
                    cells[f"{label}: {column.title}"] = column.measured(row.measured)
    if (name, NAME) in comparison.rows:
        row = comparison.rows[name, NAME]
        cells[NAME] = level(row, row.mean)
        if row.p is not None:
            interval = " … ".join(change(row, x) for x in (row.difference_low, row.difference_high))
            cells |= {"difference": f"{change(row, row.difference)} ({interval})", "p": p_value(row.p)}
            cells |= {"p Holm": p_value(row.p_holm), f"p loses {MARGIN:g}": p_value(row.measured["p_margin"])}
    return cells


def draw(comparison: Comparison) -> None:
    """Draw accuracy against the share, by method; and accuracy against KLD."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in comparison.variants:
        found = re.match(r"(layers by \w+|random|\w+),? (0\.\d)(, draw \d)?$", name)
        if found and (name, NAME) in comparison.rows:
            row = comparison.rows[name, NAME]
            series.setdefault(found[1], []).append((100 * float(found[2]), 100 * row.mean))
    dense = 100 * comparison.rows["dense", NAME].mean
    canvas, axes = figure(7.5, 4.5, "ASDiv-A solved by fine-tuned SmolLM2, nothing trained after the cut, per cent")
    axes.axhline(dense, color="black", lw=0.8, ls=":")
    axes.axhspan(dense - MARGIN, dense, color="black", alpha=0.08, lw=0)
    ends = []
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        frame = pd.DataFrame(points, columns=["share", "solved"]).groupby("share")["solved"]
        means = frame.mean()
        axes.plot([0, *means.index], [dense, *means], color=colour, marker="o", ms=4)
        axes.fill_between(means.index, frame.min(), frame.max(), color=colour, alpha=0.2, lw=0)
        ends.append((float(means.index[-1]), float(means.iloc[-1]), name, {"color": colour}))
    label_ends(axes, ends)
    axes.set_xlabel("per cent of the parameters of blocks removed")
    save(canvas, OUTPUT / "solved")

    canvas, axes = figure(7.5, 4.5, "Points lost on ASDiv-A against KL divergence on GSM8K, each cut or masked variant")
    (text,) = (task for task in comparison.tables if "gsm8k" in task)
    for name in comparison.variants:
        if (
            (name, NAME) in comparison.rows
            and (name, text) in comparison.rows
            and name not in ("dense", "copy of dense")
        ):
            kld = comparison.rows[name, text].measured.get("mean_kld")
            lost = -100 * (comparison.rows[name, NAME].difference or 0)
            axes.plot(kld, lost, color=COLOURS[0], marker="o", ms=4, ls="")
            axes.annotate(name, (kld, lost), fontsize=5, xytext=(3, 0), textcoords="offset points")
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks := [0.2, 0.5, 1, 2, 5], labels=map(str, ticks))
    axes.set_xlabel("mean KL divergence of the embedded model, nats")
    save(canvas, OUTPUT / "kld")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="first,second,embedded", help="also heads-first, heads-second and speed")
    parser.add_argument("--rows", type=int, help="at most so many rows of the grid, from its beginning")
    parser.add_argument("--work", default="out/leaderboard")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="measure nothing, write what is known")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmeval_prune.grid").setLevel(logging.INFO)
    work = Path(options.work)
    if options.report:
        write_report(work)
        return
    for host in options.hosts.split(","):
        if host == "speed":
            measure_speed(work)
        elif host.startswith("heads-"):
            choose_heads(host.removeprefix("heads-"), work)
        else:
            run_host(host, options.rows, work)


if __name__ == "__main__":
    main()
