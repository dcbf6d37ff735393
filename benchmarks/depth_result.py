"""What is lost without whole layers and blocks, by score, beside heads and channels at the same share: SmolLM2.

    python benchmarks/depth_result.py [--layers 6] [--windows 4] [--match REGEX] [--seconds N] [--report]

Plans are made on windows of GSM8K's training text, and measured on windows of its test text: KL divergence from the
unpruned model, and perplexity, token by token; no training. K layers are K / 30 of the parameters of all layers; heads
and channels lose the same share. What was measured stands in
`results/depth.json`, row by row, and is not measured again; `--seconds` ends the command after a row. At the end, or
with --report, writes tables and a picture under `docs/results/depth/`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from _record import RESULTS, environment, timed, write
from transformers import AutoTokenizer

from lmeval_prune import Plan, load_pretrained, map_model
from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.calibration import CalibrationText, read_calibration
from lmeval_prune.pruners.options import PruneOptions, TextOptions
from lmeval_prune.pruners.parts import KINDS, depth_parts_of, make_plan, parts_of
from lmeval_prune.pruners.schedule import stages
from lmeval_prune.pruners.sequential import SequentialPruner
from lmeval_prune.reporting.documents import markdown
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.surgery.cut import cut
from lmeval_prune.tasks import data

MODEL, WINDOW = "smollm2-135m", 128
OUTPUT = RESULTS.parent.parent / "docs/results/depth"
SEEDS, SHOWN = 3, (3, 6)  # draws of random layers; numbers of layers that are measured first, and drawn
HEADS_LIMIT = 1 / 6  # all but one group of three of each layer: attention is a quarter of a layer
WIDTH: list[tuple[str, str, dict[str, Any]]] = [
    ("heads and channels by llm_pruner", "llm_pruner", {}),
    ("heads by llm_pruner", "llm_pruner", {"parts": "heads"}),
    ("channels by llm_pruner", "llm_pruner", {"parts": "channels"}),
    ("heads and channels by flap", "flap", {"compensation": "none"}),
    ("heads and channels by flap, with its bias", "flap", {}),
    ("heads and channels by slimgpt", "slimgpt", {}),
]


@dataclass
class Work:
    """The model, its texts, and what was computed so far."""

    model_map: ModelMap
    calibration: CalibrationText
    test: list[torch.Tensor]
    stored: dict[str, Any]  # scores of layers and blocks, and layers of steps, in the results file
    by_method: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # scores of heads and channels
    dense: list[torch.Tensor] = field(default_factory=list)  # log-probabilities of the unpruned model, by batch

    def scores(self, method: str, is_depth: bool) -> dict[str, torch.Tensor]:
        """Return the scores of all parts by a method."""
        pruner, key = make_pruner(method, {}), f"scores of {method}"
        if not is_depth:
            if method not in self.by_method:
                parts = parts_of(self.model_map)
                self.by_method[method] = pruner.scores(self.model_map, self.calibration, parts, {}).values
            return self.by_method[method]
        if key not in self.stored:
            values = pruner.scores(self.model_map, self.calibration, depth_parts_of(self.model_map), {}).values
            self.stored[key] = {name: float(value) for name, value in values.items()}
        return {name: torch.tensor([value]).double() for name, value in self.stored[key].items()}

    def at_once(self, method: str, share: float, parts: str) -> Plan:
        """Return the plan of one stage by scores of the unpruned model."""
        options = PruneOptions(share, parts=parts)  # type: ignore[arg-type]
        return self.plan(method, options, self.scores(method, True))

    def plan(self, method: str, options: PruneOptions, scores: dict[str, torch.Tensor], **settings: Any) -> Plan:
        """Return the last plan of a method's stages."""
        *_, plan = stages(make_pruner(method, settings), self.model_map, options, self.calibration, scores=scores)
        return plan

    def width(self, method: str, share: float, parts: str = "both", **more: Any) -> Plan:
        """Return the plan that removes heads, channels or both of as many parameters as a share of all layers has."""
        kinds = KINDS if parts == "both" else (parts,)
        costs = {
            kind: sum(x.cost("group") * len(x.units("group")) for x in parts_of(self.model_map, [kind]))
            for kind in KINDS
        }
        ratio = share * sum(costs.values()) / sum(costs[kind] for kind in kinds)
        options = PruneOptions(ratio, parts=parts, **more)  # type: ignore[arg-type]
        is_sequential = isinstance(make_pruner(method, {}), SequentialPruner)
        return self.plan(method, options, {} if is_sequential else self.scores(method, False))

    def in_steps(self, method: str, count: int) -> Plan:
        """Return the plan of several stages, each of which removes a layer; earlier stages are stored."""
        chosen = self.stored.setdefault(f"steps of {method}", [])
        while len(chosen) < count:
            removed = {f"layers.{label}": {0} for label in chosen}
            earlier = make_plan(removed if method != "block_kl" else {}, True)
            layers = depth_parts_of(self.model_map, ["layers"])
            with earlier.applied_to(self.model_map.model, self.model_map):
                values = make_pruner(method, {}).scores(self.model_map, self.calibration, layers, removed).values
            chosen.append(min((float(x), key) for key, x in values.items() if key not in removed)[1].partition(".")[2])
        return Plan(blocks=chosen[:count])


def rows(count: int, share: float) -> Iterator[tuple[str, Callable[[Work], Plan]]]:
    """Yield names and plans of the rows that lose as much as some layers have."""
    for method in ("block_influence", "block_kl"):
        yield f"layers by {method}", lambda work, method=method: work.at_once(method, share, "layers")
        yield f"layers by {method}, one by one", lambda work, method=method: work.in_steps(method, count)
        yield f"blocks by {method}", lambda work, method=method: work.at_once(method, share, "blocks")
    for name, method, more in WIDTH:
        if more.get("parts") != "heads" or share < HEADS_LIMIT:
            yield name, lambda work, m=method, o=more: work.width(m, share, **o)
    for seed in range(SEEDS):
        random = PruneOptions(share, parts="layers")
        yield f"random layers, seed {seed}", lambda work, seed=seed, o=random: work.plan("random", o, {}, seed=seed)


def measured(work: Work, plan: Plan) -> dict[str, Any]:
    """Return KL divergence, agreement and perplexity under a plan, and what its cut model has."""
    model, sums = work.model_map.model, dict.fromkeys(("kl", "same", "loss"), 0.0)
    count = 0
    with torch.no_grad():
        if not work.dense:
            work.dense = [model(ids, use_cache=False).logits[:, :-1].log_softmax(-1) for ids in work.test]
        for ids, dense in zip(work.test, work.dense, strict=True):
            with plan.applied_to(model, work.model_map):
                pruned = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            sums["kl"] += float((dense.exp() * (dense - pruned)).sum(-1).double().sum())
            sums["same"] += float((dense.argmax(-1) == pruned.argmax(-1)).sum())
            sums["loss"] -= float(pruned.gather(-1, ids[:, 1:, None]).double().sum())
            count += dense[..., 0].numel()
    smaller = cut(model, plan).model
    before, after = parameters(model)[1], parameters(smaller)[1]
    return {
        "kl": sums["kl"] / count,
        "same_top": sums["same"] / count,
        "perplexity": float(torch.tensor(sums["loss"] / count).exp()),
        "tokens": count,
        "parameters_removed": 1 - after / before,
        "class": type(smaller).__name__,
        "blocks": list(plan.fit_to(work.model_map).blocks),
    }


def unpruned_perplexity(work: Work) -> float:
    """Return the perplexity of the unpruned model, token by token."""
    batches = zip(work.test, work.dense, strict=True)
    losses = [-log_probabilities.gather(-1, ids[:, 1:, None]).double() for ids, log_probabilities in batches]
    return float(torch.cat(losses).mean().exp())


def texts(windows: int) -> tuple[CalibrationText, list[torch.Tensor]]:
    """Return calibration windows of the training problems, and windows of the test problems."""
    tokenizer = AutoTokenizer.from_pretrained(embedded.resolve(MODEL))
    options = TextOptions(task="prune_gsm8k", windows=windows, tokens=WINDOW, batch=windows)
    calibration = read_calibration(tokenizer, options)
    problems = data.load("gsm8k", "test")
    pairs = zip(problems["question"][:60], problems["answer"][:60], strict=True)
    ids = tokenizer("\n\n".join(f"{question}\n{answer}" for question, answer in pairs))["input_ids"]
    rows = torch.tensor(ids[: 8 * WINDOW]).view(8, WINDOW)
    return calibration, list(rows.split(4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="largest number of layers")
    parser.add_argument("--windows", type=int, default=4, help="of calibration text")
    parser.add_argument("--match", default="", help="regular expression of the rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this time")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    path = RESULTS / "depth.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": {}, "stored": {}}
    begin = time.monotonic()
    if not options.report:
        torch.set_num_threads(1)
        model = load_pretrained(embedded.resolve(MODEL), dtype=torch.float32)
        work = Work(map_model(model), *texts(options.windows), results["stored"])
        waiting = [
            (count, name, plan)
            for count in range(1, options.layers + 1)
            for name, plan in rows(count, count / len(work.model_map.attention))
            if re.search(options.match, name) and f"{name}, {count}" not in results["rows"]
        ]
        times: list[float] = []
        for count, name, plan in sorted(waiting, key=lambda row: row[0] not in SHOWN):
            if time.monotonic() - begin > options.seconds:
                break
            key = f"{name}, {count}"
            row, seconds = timed(lambda plan=plan: measured(work, plan(work)))
            times.append(seconds)
            results["rows"][key] = {"name": name, "layers": count, **row, "environment": environment()}
            print(f"{key}: KL {row['kl']:.3f}, perplexity {row['perplexity']:.2f}, {seconds:.0f} s", flush=True)
            results["unpruned"] = {"perplexity": unpruned_perplexity(work)}
            write("depth", results, quiet=True)
        if (missing := len(waiting) - len(times)) and times:
            print(f"{missing} rows are missing, at {sum(times) / len(times):.0f} s each")
    report(results)


def report(results: dict[str, Any]) -> None:
    """Write tables and a picture."""
    frame = pd.DataFrame(results["rows"].values())
    if frame.empty:
        return
    seeds = re.compile(r", seed \d+")
    frame["name"] = frame["name"].str.replace(seeds, "", regex=True)
    order = dict.fromkeys(seeds.sub("", name) for name, _ in rows(1, 1 / 30))
    frame = frame[frame["layers"].isin(SHOWN)]  # few rows are measured at other numbers
    frame = frame.sort_values("name", key=lambda names: names.map(list(order).index), kind="stable")
    tables = ["# Whole layers and blocks left out of SmolLM2, and heads and channels of as many parameters\n"]
    for column, title in (("kl", "KL divergence from the unpruned model"), ("perplexity", "Perplexity")):
        table = frame.pivot_table(index="name", columns="layers", values=column, aggfunc=lambda x: _cell(list(x)))
        table = table.reindex(dict.fromkeys(frame["name"])).fillna("").reset_index()
        table.columns = ["layers of 30, or as many parameters", *map(str, table.columns[1:])]
        dense = f"; unpruned {results['unpruned']['perplexity']:.3g}" if column == "perplexity" else ""
        tables.append(f"{title}{dense}\n\n{markdown(table, ['layers of 30, or as many parameters'])}\n")
    write_text(OUTPUT / "table.md", "\n".join(tables))
    draw(frame)
    print(f"{OUTPUT}/table.md, kl.png")


def draw(frame: pd.DataFrame) -> None:
    """Draw the distances of each kind of removal in a line, for two numbers of layers."""
    names = list(dict.fromkeys(frame["name"]))
    canvas, axes = figure(7.5, 0.9 + 0.25 * len(names), "KL divergence from the unpruned SmolLM2")
    for colour, count in zip(COLOURS, SHOWN, strict=False):
        group = frame[frame["layers"] == count]
        heights = [-names.index(name) for name in group["name"]]
        axes.scatter(group["kl"], heights, s=22, color=colour, label=f"{count} of 30 layers, or as much")
    axes.set_yticks([-number for number in range(len(names))], names, fontsize=8)
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.grid(axis="y", lw=0.3)
    axes.legend(fontsize=7, loc="upper right", bbox_to_anchor=(1, -0.06), ncols=2, frameon=False)
    save(canvas, OUTPUT / "kl")


def _cell(values: list[float]) -> str:
    """Return one value, or the range of several."""
    low, high = min(values), max(values)
    return f"{low:.3g}" if len(values) == 1 else f"{low:.3g} to {high:.3g}"


if __name__ == "__main__":
    main()
