"""What a budget of measured time gains and costs beside one of parameters: plans of SmolLM2, as a user makes them.

    lmeval-prune costs --pretrained smollm2-135m --clock processor --rounds 3 --output out/costs.json
    lmeval-prune prune --pretrained smollm2-135m --method llm_pruner --allocation composition --ffn_multiple 96 \
        --ratio 0.25 --task prune_gsm8k --windows 4 --output out/parameters.json
    lmeval-prune prune --pretrained smollm2-135m --method llm_pruner --allocation composition --budget latency \
        --costs out/costs.json --ratio 0.25 --task prune_gsm8k --windows 4 --output out/latency.json
    python benchmarks/latency_result.py --costs out/costs.json out/parameters.json out/latency.json

The table has every 96th number of channels, and both plans choose among those. Each plan is cut; the models are timed
in turn with the unpruned one, in the workload of the table. Beside the measured time of a model stands what the table
says of its blocks; a model's time has the output head in it, too, which no plan removes. KL divergence and perplexity
are those of `depth_result.py`. Writes `results/latency.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _record import environment, write
from depth_result import MODEL, Work, measured, texts, unpruned_perplexity

from lmeval_prune import Plan, load_pretrained, map_model
from lmeval_prune.checkpoints import embedded
from lmeval_prune.profiling.speed import Workload, measure
from lmeval_prune.pruners.cost_table import CostTable
from lmeval_prune.surgery.cut import cut

UNPRUNED = "unpruned"


def seconds_of_blocks(model: Any, table: CostTable) -> float:
    """Return what the table says of all blocks of a model."""
    model_map = map_model(model)
    costs = [table.cost("attention", f"{x.heads}/{x.kv_heads}") for x in model_map.attention]
    costs += [table.cost("feed_forward", str(x.channels)) for x in model_map.feed_forward]
    return sum(cost for cost in costs if cost is not None)


def kept(model: Any) -> dict[str, Any]:
    """Return how many blocks, key-value groups and channels a model has."""
    model_map = map_model(model)
    return {
        "attention": len(model_map.attention),
        "groups": sum(layer.kv_heads for layer in model_map.attention),
        "feed_forward": len(model_map.feed_forward),
        "channels": sum(block.channels for block in model_map.feed_forward),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--costs", required=True, help="table of `lmeval-prune costs`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=4, help="of calibration text; it is not read here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = CostTable.load(options.costs)
    shape = table.workload
    work = Workload(shape["prompt"], shape["new"], (shape["batch"],), options.rounds, shape["clock"])
    model: Any = load_pretrained(embedded.resolve(MODEL), dtype=torch.float32)
    losses = Work(map_model(model), *texts(options.windows), {})
    plans = {Path(path).stem: Plan.load(path) for path in options.plans}
    results: dict[str, Any] = {name: measured(losses, plan) for name, plan in plans.items()}
    models = {UNPRUNED: model, **{name: cut(model, plan).model for name, plan in plans.items()}}
    whole = seconds_of_blocks(model, table)
    rates = measure(models, work)
    for name, smaller in models.items():
        row = results.setdefault(name, {"perplexity": unpruned_perplexity(losses)})
        row |= {"kept": kept(smaller), "tokens_per_second": rates[name]}
        row["time_of_blocks_by_table"] = seconds_of_blocks(smaller, table) / whole
        row["time"] = seconds(rates[name], work) / seconds(rates[UNPRUNED], work)
        print(name, {key: row[key] for key in ("kept", "time_of_blocks_by_table", "time", "perplexity")})
    removes = {name: plan.provenance["removes"] for name, plan in plans.items()}
    write("latency", {"written": environment(), "table": dict(vars(table)), "plans": removes, "results": results})


def seconds(rates: dict[str, float], work: Workload) -> float:
    """Return the seconds of the workload: its prompts are read, and its new tokens decoded."""
    (batch,) = work.batches
    return batch * (work.prompt / rates[f"prefill_{batch}"] + work.new / rates[f"decode_{batch}"])


if __name__ == "__main__":
    main()
