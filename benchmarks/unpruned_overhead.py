"""Time of `pruned-hf` against `hf` on the same requests, alternating, after a check that answers agree.

    python benchmarks/unpruned_overhead.py [--rounds 10] [--threads 1]

Variants: `hf`, twice; `pruned-hf` without heads; with heads.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time

import torch
from _record import environment, write
from lm_eval.models.huggingface import HFLM

from lmeval_prune.checkpoints import embedded
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.tasks import compat, data

HEADS = "L5H3+L15H0"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    machine = environment()

    words, choice = data.load("tiny_words"), data.load("tiny_choice")
    folder = embedded.resolve("smollm2-135m")
    shared = {"device": "cpu", "dtype": "float32", "batch_size": 8}
    models = {
        "hf": HFLM(folder, **shared),
        "hf again": HFLM(folder, **shared),  # by how much two of the same differ
        "pruned-hf": PrunedHFLM(folder, engine="generate", **shared),
        "pruned-hf hook": PrunedHFLM(folder, heads=HEADS, engine="generate", **shared),
    }
    settings = {"until": [], "max_gen_toks": 48, "do_sample": False, "min_new_tokens": 48}

    def run(model: HFLM) -> tuple[list, list, dict[str, float]]:
        generate = [
            compat.request("generate_until", (row["question"], dict(settings)), "t", i) for i, row in enumerate(words)
        ]
        score = [
            compat.request("loglikelihood", (f"Question: {row['question']}\nAnswer:", f" {option}"), "c", i)
            for i, row in enumerate(choice)
            for option in row["choices"]
        ]
        start = time.perf_counter()
        texts = model.generate_until(generate, disable_tqdm=True)
        middle = time.perf_counter()
        values = model.loglikelihood(score, disable_tqdm=True)
        return (
            texts,
            values,
            {"generate_until": middle - start, "loglikelihood": time.perf_counter() - middle},
        )

    answers = {name: run(model)[:2] for name, model in models.items()}  # warm-up and check in one
    assert answers["hf"] == answers["hf again"]
    assert answers["hf"] == answers["pruned-hf"], "unpruned pruned-hf must give hf's answers to the bit"
    assert answers["pruned-hf hook"] != answers["hf"]

    times: dict[str, dict[str, list[float]]] = {name: {"generate_until": [], "loglikelihood": []} for name in models}
    for number in range(options.rounds):
        order = list(models) if number % 2 == 0 else list(reversed(models))
        for name in order:
            for kind, seconds in run(models[name])[2].items():
                times[name][kind].append(seconds)
        print(f"round {number + 1} of {options.rounds}", flush=True)

    table = {
        name: {
            kind: {
                "seconds": [round(s, 4) for s in series],
                "median": round(statistics.median(series), 4),
                "ratio_to_hf": round(
                    statistics.median(a / b for a, b in zip(series, times["hf"][kind], strict=True)), 4
                ),
            }
            for kind, series in kinds.items()
        }
        for name, kinds in times.items()
    }
    for name, kinds in table.items():
        print(
            f"{name:18}",
            *(f"{kind}: {row['median']:.3f} s, {row['ratio_to_hf']:.3f} x hf" for kind, row in kinds.items()),
            sep="  ",
        )
    write(
        "unpruned_overhead",
        {
            **machine,
            "model": "SmolLM2-135M-Instruct, float32",
            "work": "24 generations of 48 tokens and 96 likelihoods, batch size 8; ratios are medians over rounds",
            "checks": {"hf_equals_unpruned_to_the_bit": True},
            "results": table,
        },
    )


if __name__ == "__main__":
    main()
