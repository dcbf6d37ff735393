"""How SmolLM2's recipes of distillation were chosen: on training folds alone, the second standing for the test.

    python benchmarks/distillation_recipes.py [--work out/recipes]

Folds 2 to 4 are learned, fold 1 is asked through lm_eval; fold 0, the test of `distillation_result.py`, is not looked
at. First the dense host by epochs and rate, then, under the best one, three stages to 30% of the heads. What is done
is kept under --work. Writes `results/distillation_recipes.json`; what is best stands in configs/distillation/.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from _record import environment, write
from distillation_result import recipe, tested_language

from lmeval_prune.artefacts import write_text
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.plugin import registration

DENSE = ((3, 1e-4), (3, 2e-4), (8, 5e-5), (8, 1e-4), (8, 2e-4))  # epochs and rate
STAGES = ((1, 1e-4), (3, 1e-4), (3, 2e-4))
FOLDS = {"test": "fold1", "train": ("fold2", "fold3", "fold4")}


def try_recipe(name: str, options: dict[str, Any], work: Path) -> dict[str, Any]:
    """Train and test a model by a recipe, unless that was done; return its accuracy and losses."""
    result_file = work / f"{name}.result"
    if not result_file.exists():
        folder, answers = work / name, work / f"{name}.answers"
        distill(DistillOptions(**{**options, **FOLDS, "output": str(folder), "seed": 0}))
        tested_language(folder, 1, answers)
        right = [row["right"] for row in json.loads(answers.read_text(encoding="utf-8"))]
        log = json.loads((folder / "distillation.json").read_text(encoding="utf-8"))["stages"][-1]["log"]
        content = {"name": name, "accuracy": sum(right) / len(right), "given": options, "log": log}
        write_text(result_file, json.dumps({**content, "environment": environment()}) + "\n")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    print(f"{name}: {result['accuracy']:.1%}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="out/recipes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    registration.register()
    work = Path(options.work)
    base = recipe("distillation/smollm2_finetune", "distill")
    dense = [
        try_recipe(f"dense_{epochs}_{rate}", {**base, "epochs": epochs, "rate": rate}, work) for epochs, rate in DENSE
    ]
    best = max(dense, key=lambda result: result["accuracy"])
    base = {**recipe("distillation/smollm2", "distill"), "ratio": 0.3, "pretrained": str(work / best["name"])}
    under = f"under_{best['name']}"
    stages = [
        try_recipe(f"{under}_{epochs}_{rate}", {**base, "epochs": epochs, "rate": rate}, work)
        for epochs, rate in STAGES
    ]
    write("distillation_recipes", {"written": environment(), "folds": FOLDS, "dense": dense, "stages": stages})


if __name__ == "__main__":
    main()
