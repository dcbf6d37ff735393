"""SPRINT on real problems: sweep, router, all baselines, report.

    python benchmarks/sprint_result.py [--train 300] [--threads 2] [--work out/sprint_result]

The embedded model answers about 7% of ASDiv-A; a short supervised fine-tune on two of its folds (question →
formula and answer) makes the 'dense' model. Two other folds train the router, the fifth is the test. Every stage
is kept under --work and not done again; a stage that was interrupted goes on, and has no time in the results (null).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import environment, timed, write

from lmeval_prune.artefacts import write_text
from lmeval_prune.checkpoints import embedded
from lmeval_prune.tasks import data

STEPS, BATCH, RATE = 90, 8, 1e-4
LONGEST = 48  # new tokens
PROMPT = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TASK, TEST = "prune_asdiv_a", "fold4"


def fine_tune(folder: Path) -> None:
    """Fine-tune all weights, with the loss on the answer only."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    source = embedded.resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = [row for fold in ("fold0", "fold1") for row in data.load("asdiv_a", fold)]
    rows = [row for row in rows if " r" not in row["formula"]]  # no divisions with remainder
    random.Random(0).shuffle(rows)

    def example(row: dict[str, Any]) -> dict[str, list[int]]:
        chat = [{"role": "user", "content": row["question"] + PROMPT}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        start = tokenizer(prompt)["input_ids"]
        answer = tokenizer(f"{row['formula']}\n\\boxed{{{row['target']}}}<|im_end|>")["input_ids"]
        return {"input_ids": start + answer, "labels": [-100] * len(start) + answer}

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(item["input_ids"]) for item in batch)
        filled = {"input_ids": tokenizer.pad_token_id or 0, "labels": -100}
        out = {
            name: torch.tensor([item[name] + [fill] * (longest - len(item[name])) for item in batch])
            for name, fill in filled.items()
        }
        lengths = torch.tensor([len(item["input_ids"]) for item in batch])
        return {**out, "attention_mask": (torch.arange(longest)[None] < lengths[:, None]).long()}

    arguments = TrainingArguments(
        output_dir=str(folder.with_name("trainer")), max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=5, weight_decay=0.0, logging_steps=10,
        save_strategy="no", report_to=[], use_cpu=True, seed=0, data_seed=0, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=[example(row) for row in rows], data_collator=collate).train()
    half = folder.with_name("partial")
    shutil.rmtree(half, ignore_errors=True)
    model.save_pretrained(half)
    tokenizer.save_pretrained(half)
    half.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", type=int, default=300, help="training questions")
    parser.add_argument("--test", type=int, default=200, help="test questions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", default="out/sprint_result")
    parser.add_argument("--output", default="docs/results/sprint")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    clock = work / "seconds.json"
    seconds: dict[str, float | None] = json.loads(clock.read_text()) if clock.exists() else {}

    def stage(name: str, function: Callable[[], Any], done: Callable[[], bool]) -> None:
        if done():
            print(f"{name}: done before", flush=True)
            return
        is_uninterrupted = name not in seconds
        seconds[name] = None
        write_text(clock, json.dumps(seconds))
        _, took = timed(function)
        if is_uninterrupted:
            seconds[name] = round(took, 1)
            write_text(clock, json.dumps(seconds))
        print(f"{name}: {seconds[name]} s", flush=True)

    from lmeval_prune.plugin import registration

    registration.register()
    from lm_eval import simple_evaluate

    from lmeval_prune.sprint.options import FitOptions, ReportOptions, SweepOptions
    from lmeval_prune.sprint.outcomes import OutcomeStore
    from lmeval_prune.sprint.report import write_report
    from lmeval_prune.sprint.router import fit
    from lmeval_prune.sprint.sweep import run_sweep

    model = work / "model"
    stage("fine-tune", lambda: fine_tune(model), model.is_dir)
    arguments = {"pretrained": str(model), "dtype": "float32", "device": "cpu"}
    common: dict[str, Any] = {"apply_chat_template": True, "gen_kwargs": {"max_gen_toks": LONGEST}}

    def sweep(name: str, split: str, limit: int | None) -> None:
        run_sweep(SweepOptions(arguments, (TASK,), str(work / name), split=split, limit=limit, **common))

    for name, split, limit in (
        ("test", TEST, options.test),
        ("train_a", "fold2", options.train // 2),
        ("train_b", "fold3", None),
    ):
        if name == "train_b":
            limit = options.train - options.train // 2
        marker = work / f"{name}.done"
        folder = "test" if name == "test" else "train"

        def run(folder: str = folder, split: str = split, limit: int | None = limit, marker: Path = marker) -> None:
            sweep(folder, split, limit)
            marker.touch()

        stage(f"sweep {name}", run, marker.exists)

    def fit_router() -> None:
        chosen = FitOptions(sizes=(16, 32, 64), weights=(0.0, 1e-4, 1e-3, 1e-2))
        fit(OutcomeStore(work / "train").read(), embedded.ENCODER, chosen).save(work / "router")

    stage("fit", fit_router, (work / "router/router.json").exists)
    samples = []
    for temperature in (0.1, 0.6, 0.9):
        path = work / f"samples_{temperature}.jsonl"

        def sample(temperature: float = temperature, path: Path = path) -> None:
            doc_ids = [row["doc_id"] for row in OutcomeStore(work / "test").read().questions]
            results = simple_evaluate(
                samples={f"{TASK}_pass8": doc_ids},
                model="pruned-hf", model_args={**arguments, "engine": "batched"}, tasks=[f"{TASK}_pass8"],
                gen_kwargs={"max_gen_toks": LONGEST, "temperature": temperature}, apply_chat_template=True,
                log_samples=True,
                metadata={"data_split": TEST}, bootstrap_iters=0,
            )  # fmt: skip
            lines = []
            for item in results["samples"][f"{TASK}_pass8"]:
                (argument,) = item["arguments"]
                item["arguments"] = {"gen_args_0": {"arg_0": argument[0], "arg_1": argument[1]}}
                lines.append(json.dumps(item, default=str) + "\n")
            write_text(path, "".join(lines))

        stage(f"sampling at {temperature}", sample, path.exists)
        samples.append((f"sampling, T = {temperature}", str(path)))
    write_report(
        ReportOptions(
            str(work / "test"), options.output, str(work / "train"), str(work / "router"), tuple(samples), by="grade"
        )
    )
    for name in ("router.json", "router.safetensors"):
        shutil.copy(work / "router" / name, Path(options.output) / name)
    cells = {name: OutcomeStore(work / name).cells() for name in ("train", "test")}
    write(
        "sprint_result",
        {
            "environment": environment(),
            "seconds": seconds,
            "answers": {name: len(rows) for name, rows in cells.items()},
            "answer_tokens": {name: sum(len(row["tokens"]) for row in rows) for name, rows in cells.items()},
            "report": json.loads((Path(options.output) / "report.json").read_text()),
        },
    )


if __name__ == "__main__":
    main()
