"""The dense host on ASDiv-A: trained fold by fold, tested through lm_eval, then with random heads masked.

    python benchmarks/athena_host.py [--folds 0,1] [--work out/athena]      (a fold: half an hour on one quiet core)

Needs the data (LMEVAL_PRUNE_DATA) and the embedded encoder. What is done is kept under --work and not done again.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _record import environment, write

from lmeval_prune.artefacts import write_text
from lmeval_prune.athena import checkpoint, training
from lmeval_prune.athena.data import GroundedProblem
from lmeval_prune.athena.equations import expression
from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.tasks import data

TASK = "prune_asdiv_a_equation"
RATIOS, DRAWS = (0.1, 0.25, 0.3), (0, 1)


def heads_drawn(encoder: Path, ratio: float, seed: int) -> str:
    """Draw a share of the encoder's heads at random, no layer without any."""
    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of

    layers = map_model(skeleton_of(str(encoder))).attention
    names = [f"L{layer.index}H{head}" for layer in layers for head in range(layer.heads)]
    return "+".join(random.Random(seed).sample(names, int(ratio * len(names))))


def tested(model: Path, fold: int, heads: str | None, answers_file: Path) -> dict[str, Any]:
    """Return the accuracy on a fold: of all, and of problems of one operator and of two; answers are kept in a file."""
    if not answers_file.exists():
        from lm_eval import simple_evaluate

        from lmeval_prune.plugin import registration

        registration.register()
        arguments = {"pretrained": str(model), **({"heads": heads} if heads else {})}
        results = simple_evaluate(
            model="athena", model_args=arguments, batch_size=32, tasks=[TASK],
            metadata={"data_split": f"fold{fold}"}, bootstrap_iters=0,
        )  # fmt: skip
        rows = [
            {"id": row["doc"]["id"], "right": row["exact_match"], "answer": row["resps"][0][0],
             "steps": (problem := GroundedProblem.of(row["doc"])) and problem.steps(())}
            for row in results["samples"][TASK]
        ]  # fmt: skip
        write_text(answers_file, json.dumps(rows, indent=0) + "\n")
    rows = json.loads(answers_file.read_text(encoding="utf-8"))

    def share(answers: list[dict[str, Any]]) -> float:
        return round(sum(answer["right"] for answer in answers) / len(answers), 4)

    by_steps = {f"steps_{steps}": share([row for row in rows if row["steps"] == steps]) for steps in (3, 5)}
    return {"problems": len(rows), "accuracy": share(rows), **by_steps}


def equations() -> dict[str, Any]:
    """Count ASDiv-A's equations over the numbers of their problems, and those that would be scored as right."""
    rows = data.load("asdiv_a", "all")
    grounded = [problem for row in rows if (problem := GroundedProblem.of(row))]
    written = [expression(problem.equation.root, problem.problem.numbers) for problem in grounded]
    return {
        "problems": len(rows),
        "grounded": len(grounded),
        "by_steps": dict(sorted(Counter(problem.steps(()) for problem in grounded).items())),
        "right": sum(problem.is_solved_by(text) for problem, text in zip(grounded, written, strict=True)),
    }


def sizes(folder: Path) -> dict[str, int]:
    """Return the numbers of parameters of the encoder and of the head part."""
    model = checkpoint.read(folder)
    encoder = sum(parameter.numel() for parameter in model.encoder.parameters())
    return {"encoder": encoder, "head": sum(parameter.numel() for parameter in model.parameters()) - encoder}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folds", default="0")
    parser.add_argument("--work", default="out/athena")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work, folds = Path(options.work), {}
    for fold in map(int, options.folds.split(",")):
        folder = work / f"dense_fold{fold}"
        training.train(TrainOptions(output=str(folder), test=f"fold{fold}"))
        description = checkpoint.describe(folder)
        masked = {
            f"{ratio:.0%}": [
                tested(folder, fold, heads_drawn(folder / "encoder", ratio, seed), work / f"{fold}_{ratio}_{seed}.json")
                for seed in DRAWS
            ]
            for ratio in RATIOS
        }
        folds[f"fold{fold}"] = {
            "dense": tested(folder, fold, None, work / f"{fold}_dense.json"),
            "random_heads_masked": masked,
            "problems": description["problems"],
            "best_epoch": description["best_epoch"],
            "options": description["options"],
            "log": description["log"],
        }
    accuracies = [fold_results["dense"]["accuracy"] for fold_results in folds.values()]
    write(
        "athena_host",
        {
            "environment": environment(),
            "equations": equations(),
            "parameters": sizes(work / f"dense_{next(iter(folds))}"),
            "mean_accuracy": round(sum(accuracies) / len(accuracies), 4),
            "folds": folds,
        },
    )


if __name__ == "__main__":
    main()
