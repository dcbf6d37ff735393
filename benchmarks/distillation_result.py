"""The tables of Yu et al., measured: recursive distillation of ATHENA and of SmolLM2, a row at a time.

    python benchmarks/distillation_result.py [--rows 1000] [--match REGEX] [--list] [--report]
        [--unreported] [--speeds]

A row is one model on one fold by one seed. Rows stand in the order of their importance; each is stored under --work
when it is done and never made again, and a row that was killed goes on where it was: the same command can be given
again and again. `--rows 1` makes the next one. Recipes: configs/athena/minilm.yaml and configs/distillation/.
Nothing of a fold's test is looked at before its row is tested, by lm_eval. Speed, FLOPs and memory are those of
reading the same test problems and judging their gold graphs, for a search does as much work as it keeps thoughts
(language models: a prompt of 128 tokens; speed with 16 more). Speed: processor time, in turn with the dense host,
medians; rows that were made beside others are timed again alone by `--speeds`, on models of their shapes. Memory:
what a process of its own needs at most above what it has before the model is read. Writes
`results/distillation.json`, and tables and pictures under `docs/results/distillation/`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from _record import RESULTS, environment, write
from athena_host import tested

from lmeval_prune.artefacts import write_text
from lmeval_prune.distillation.options import DistillOptions

ROOT = RESULTS.parent.parent
OUTPUT = ROOT / "docs/results/distillation"
TASK = "prune_asdiv_a_equation"
JUDGED, ROUNDS = 96, 7  # problems whose gold graphs are judged, and how often
BUSY = 1.5  # load of a machine on which `--speeds`, which is one process of one thread, was not alone
OURS, DENSE = "ours", "dense"

# what differs from "ours", which follows the recipe
ABLATIONS: dict[str, dict[str, Any]] = {
    "pruning only": {"distill_weight": 0.0, "task_weight": 1.0},
    "random": {"method": "random"},
    "response only": {"feature": False},
    "feature only": {"response": False},
    "alpha 1.0": {"options": {"alpha": 1.0}},
    "alpha 0.0": {"options": {"alpha": 0.0}},
    "global threshold": {"method": "global_threshold", "stages": 1},
    "attention visualisation": {"method": "confidence"},
    "distillation only": {"ratio": 0.0},
    "pruned, not trained": {"epochs": 0},
}


@dataclass(frozen=True)
class Row:
    """One model that is made and tested."""

    host: str  # athena or smollm2
    kind: str
    ratio: float
    fold: int
    seed: int = 0
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.host}, fold{self.fold}, {self.kind}, {self.ratio:.0%}, seed {self.seed}"

    @property
    def folder(self) -> str:
        return re.sub(r"\W+", "_", self.key)


CHANNELS = {"ffn_ratio": 0.3, "ffn_method": "random"}


def rows() -> Iterator[Row]:
    """Yield the rows, what matters most first.

    Table 1 fold by fold, Table 4 on two folds, α, the language model; then more seeds.
    """
    for fold in range(5):
        yield from _table_1("athena", fold)
        if fold == 1:  # what the method is made of, before more folds
            yield from _table_4()
            for alpha in (0.3, 0.7):
                for other_fold in (0, 1):
                    yield Row("athena", f"alpha {alpha}", 0.25, other_fold, changes={"options": {"alpha": alpha}})
            yield from _table_1("smollm2", 0)
            yield Row("smollm2", f"{OURS} + channels", 0.3, 0, changes=CHANNELS)
            yield Row("athena", f"{OURS} + channels", 0.3, 0, changes=CHANNELS)
    for seed in (1, 2):
        for fold in (0, 1):
            yield Row("athena", DENSE, 0.0, fold, seed)
            yield Row("athena", OURS, 0.25, fold, seed)
        yield from _table_4(seed)
        if seed == 1:
            for fold in range(5):
                yield from [row for row in _table_1("athena", fold, seed) if fold > 1 or row.ratio not in (0, 0.25)]
                yield Row("athena", f"{OURS} + channels", 0.3, fold, seed, CHANNELS)
            for fold in (2, 3):  # the recipe was chosen on fold 1
                yield from _table_1("smollm2", fold)
                yield Row("smollm2", f"{OURS} + channels", 0.3, fold, changes=CHANNELS)


def _table_1(host: str, fold: int, seed: int = 0) -> Iterator[Row]:
    yield Row(host, DENSE, 0.0, fold, seed)
    for ratio in (0.25, 0.3, 0.2):
        yield Row(host, OURS, ratio, fold, seed)


def _table_4(seed: int = 0) -> Iterator[Row]:
    for kind, changes in ABLATIONS.items():
        for fold in (0, 1):
            yield Row("athena", kind, changes.get("ratio", 0.25), fold, seed, changes)


def recipe(name: str, section: str) -> dict[str, Any]:
    """Return the options of a section of a recipe of the package."""
    options: dict[str, Any] = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))[section]
    return options


def make_model(row: Row, work: Path, hosts: Path) -> tuple[Path, Path]:
    """Return the folders of a row's model and of its dense host; what is missing is made."""
    dense = work / "models" / Row(row.host, DENSE, 0.0, row.fold, row.seed).folder
    if row.host == "athena" and not row.seed:  # the same that athena_host.py trains
        dense = hosts / f"dense_fold{row.fold}"
    _train_dense(row, dense)
    if row.kind == DENSE:
        return dense, dense
    folder = work / "models" / row.folder
    options = _options(row) | {"pretrained": str(dense), "output": str(folder), "seed": row.seed}
    if row.host == "smollm2":
        options["test"] = f"fold{row.fold}"
    from lmeval_prune.distillation.recursion import distill

    distill(DistillOptions(**options))
    return folder, dense


def _train_dense(row: Row, folder: Path) -> None:
    """Train a dense host, or check that it was trained by the same recipe."""
    if row.host == "athena":
        from lmeval_prune.athena import training
        from lmeval_prune.athena.options import TrainOptions

        options = {**recipe("athena/minilm", "athena"), "output": str(folder), "test": f"fold{row.fold}"}
        training.train(TrainOptions(**options, seed=row.seed))
    else:
        from lmeval_prune.distillation.recursion import distill

        options = {**recipe("distillation/smollm2_finetune", "distill"), "output": str(folder), "seed": row.seed}
        distill(DistillOptions(**{**options, "test": f"fold{row.fold}"}))


# ---------------------------------------------------------------- what it is worth


def measured(row: Row, folder: Path, dense: Path, work: Path) -> dict[str, Any]:
    """Test a row's model and measure its costs; return what is stored of it."""
    answers_file = work / "answers" / f"{row.folder}.json"
    if row.host == "athena":
        tested(folder, row.fold, None, answers_file)
        costs = athena_costs(folder, dense, row.fold)
    else:
        tested_language(folder, row.fold, answers_file)
        costs = language_costs(folder, dense)
    answers = json.loads(answers_file.read_text(encoding="utf-8"))
    right = "".join(str(int(answer["right"])) for answer in answers)
    note = json.loads((folder / "distillation.json").read_text()) if (folder / "distillation.json").exists() else {}
    stages = note.get("stages", [])
    removed = {name: sum(stage["removed"][name] for stage in stages) for name in ("heads", "kv_heads", "channels")}
    return {
        "host": {"athena": "ATHENA over MiniLM", "smollm2": "SmolLM2-135M"}[row.host],
        "task": TASK,
        "kind": row.kind,
        "ratio": row.ratio,
        "split": f"fold{row.fold}",
        "seed": row.seed,
        "accuracy": right.count("1") / len(right),
        "right": right,
        "removed": removed,
        **costs,
        "stages": stages,
    }


def _options(row: Row) -> dict[str, Any]:
    """Return the options by which a row's model is made from its dense host."""
    name = "distillation/minilm" if row.host == "athena" else "distillation/smollm2"
    options = {**recipe(name, "distill"), "ratio": row.ratio, **row.changes}
    if row.changes.get("stages") == 1:  # as many epochs as in all stages of the others
        options["epochs"] *= recipe(name, "distill")["stages"]
    return options


def _removed_by(row: Row) -> str:
    """Describe how a row's parameters are removed."""
    if row.kind == DENSE:
        return "nothing is removed"
    options = _options(row)
    stages = options["stages"]
    return (
        f"unit={options.get('unit', 'head')}, {stages} stage{'s' * (stages > 1)} of {options['epochs']} epochs, "
        f"rate {options['rate']}"
    )


def tested_language(folder: Path, fold: int, answers_file: Path) -> None:
    """Test a language model on a fold, and write its answers to a file; nothing if that is there."""
    if answers_file.exists():
        return
    from lm_eval import simple_evaluate

    from lmeval_prune.plugin import registration

    registration.register()
    results = simple_evaluate(
        model="pruned-hf", model_args={"pretrained": str(folder), "dtype": "float32"}, batch_size=8, tasks=[TASK],
        metadata={"data_split": f"fold{fold}"}, bootstrap_iters=0, apply_chat_template=True,
        gen_kwargs="max_gen_toks=48",
    )  # fmt: skip
    samples = [
        {"id": sample["doc"]["id"], "right": sample["exact_match"], "answer": sample["resps"][0][0]}
        for sample in results["samples"][TASK]
    ]
    write_text(answers_file, json.dumps(samples, indent=0) + "\n")


def judged(model: Any, fold: int, most: int = JUDGED) -> dict[str, Any]:
    """Return a batch of test problems with their gold graphs, which a model judges, whatever it would have searched."""
    from lmeval_prune.athena.batches import Collator, make_examples
    from lmeval_prune.athena.data import GroundedProblem
    from lmeval_prune.tasks import data

    problems = [problem for row in data.load("asdiv_a", f"fold{fold}") if (problem := GroundedProblem.of(row))][:most]
    examples = make_examples(problems, model.tokenizer, model.settings)
    batch = Collator(len(model.settings.constants), model.tokenizer.pad_token_id)(examples)
    return {name: value for name, value in batch.items() if name != "labels"}


def athena_costs(folder: Path, dense: Path, fold: int) -> dict[str, Any]:
    """Measure a solver's parameters, arithmetic, time and memory."""
    from torch.utils.flop_counter import FlopCounterMode

    from lmeval_prune.athena import checkpoint
    from lmeval_prune.interventions.attention_call import eager_attention

    models = {"dense": checkpoint.read(dense), "own": checkpoint.read(folder)}
    own, batch = models["own"], judged(models["own"], fold)
    with torch.no_grad():
        with eager_attention(own.encoder), FlopCounterMode(display=False) as counter:
            own(**batch)
        seconds = _in_turn({name: lambda model=model: model(**batch) for name, model in models.items()})
    costs = {
        "parameters": sum(parameter.numel() for parameter in own.parameters()),
        "flops": int(counter.get_total_flops()),
        "seconds": seconds,
    }
    del models, own
    gc.collect()
    return {**costs, "memory": _memory_of(_judge, str(folder), fold)}


def shaped_like(row: dict[str, Any], model: Any) -> Any:
    """Cut a dense transformers model to the shapes of a row's; channels go evenly from all blocks.

    How long it takes does not depend on weights, so that a row can be timed where its model is not.

    Raises:
        KeyError: the row does not say which heads of a layer are left.
    """
    from lmeval_prune import Plan, cut, map_model

    model_map = map_model(model)
    every_head = {layer.label: range(layer.heads) for layer in model_map.attention}
    remaining_heads = row["stages"][-1]["heads"] if row["stages"] else every_head
    removed = [
        f"{layer.label}H{head}"
        for layer in model_map.attention
        for head in range(layer.heads)
        if head not in remaining_heads[layer.label]
    ]
    blocks = list(model_map.channels())
    share, more = divmod(row["removed"]["channels"], len(blocks))
    channels = {
        block: list(range(share + (index < more))) for index, block in enumerate(blocks) if share + (index < more)
    }
    return cut(model, Plan(heads=tuple(removed), channels=channels)).model if removed or channels else model


def speeds(done: dict[str, dict[str, Any]], dense: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Time again each row that was not timed alone; yield it with its time and the environment of that.

    Shapes are all that differs, so that one fold's host and 32 of its problems serve for all folds.

    Raises:
        ValueError: a model that is made for it has another number of parameters than the row's.
    """
    machine = environment()
    for key, row in done.items():
        if row.get("timed_at_load", BUSY) >= BUSY:
            timing = _athena_speed(row, dense) if row["host"] == "ATHENA over MiniLM" else _language_speed(row)
            if timing.pop("parameters") != row["parameters"]:
                raise ValueError(f"{key}: another shape than that of the row")
            yield key, {**row, **timing, "timed_in": machine, "timed_at_load": os.getloadavg()[0]}


def _athena_speed(row: dict[str, Any], dense: Path) -> dict[str, Any]:
    from lmeval_prune.athena import checkpoint

    models = {"dense": checkpoint.read(dense), "own": checkpoint.read(dense)}
    own = models["own"]
    own.encoder = shaped_like(row, own.encoder)
    batch = judged(own, 0, 32)
    with torch.no_grad():
        seconds = _in_turn({name: lambda model=model: model(**batch) for name, model in models.items()})
    return {"seconds": seconds, "parameters": sum(parameter.numel() for parameter in own.parameters())}


def _language_speed(row: dict[str, Any]) -> dict[str, Any]:
    from lmeval_prune import load_pretrained
    from lmeval_prune.checkpoints import embedded
    from lmeval_prune.profiling.costs import parameters

    models = {name: load_pretrained(embedded.resolve("smollm2-135m")) for name in ("dense", "own")}
    models["own"] = shaped_like(row, models["own"])
    return {**_timed(models), "parameters": parameters(models["own"])[0]}


def _in_turn(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the processor time of each run, the median of several rounds after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            if number:
                times[name].append(time.process_time() - begun)
    return {name: round(statistics.median(all_), 5) for name, all_ in times.items()}


def _memory_of(function: Callable[..., int], *arguments: Any) -> int:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _judge(folder: str, fold: int) -> int:
    from lmeval_prune.athena import checkpoint
    from lmeval_prune.profiling.speed import peak_memory_of_process
    from lmeval_prune.tasks import data

    torch.set_num_threads(1)
    checkpoint.describe(folder)
    data.load("asdiv_a", f"fold{fold}")
    before = psutil.Process().memory_info().rss
    model = checkpoint.read(folder)
    with torch.no_grad():
        model(**judged(model, fold))
    return peak_memory_of_process() - before


WORK = {"prompt": 128, "new": 16, "batches": (1,), "rounds": ROUNDS, "clock": "processor"}  # of a language model


def language_costs(folder: Path, dense: Path) -> dict[str, Any]:
    """Measure a language model's parameters, arithmetic, time and memory."""
    from lmeval_prune import load_pretrained
    from lmeval_prune.profiling.costs import counted_flops, parameters
    from lmeval_prune.profiling.speed import Workload, peak_memory

    models = {"dense": load_pretrained(dense), "own": load_pretrained(folder)}
    costs = {
        "parameters": parameters(models["own"])[0],
        "flops": counted_flops(models["own"], WORK["prompt"]),
        **_timed(models),
    }
    del models
    gc.collect()
    return {**costs, "memory": int(peak_memory(str(folder), Workload(**WORK)) * 2**20)}


def _timed(models: dict[str, Any]) -> dict[str, Any]:
    """Return the processor time of a prompt and new tokens, and the speeds that it is made of."""
    from lmeval_prune.profiling.speed import Workload, measure

    rates = measure(models, Workload(**WORK))
    seconds = {
        name: round(WORK["prompt"] / rate["prefill_1"] + WORK["new"] / rate["decode_1"], 4)
        for name, rate in rates.items()
    }
    return {"seconds": seconds, "speeds": rates}


# ---------------------------------------------------------------- rows in a file


def done_rows(work: Path) -> dict[str, dict[str, Any]]:
    """Return the rows that are done."""
    done = {}
    for row in rows():
        path = work / "rows" / f"{row.folder}.json"
        if path.exists():
            done[row.key] = {**json.loads(path.read_text(encoding="utf-8")), "removed_by": _removed_by(row)}
    return done


def finish(work: Path) -> None:
    """Write what is known, each row with the run that measured it."""
    done = done_rows(work)
    if not done:
        print("no row is done yet")
        return
    from distillation_report import write as report

    from lmeval_prune.tasks import data

    environments: list[dict[str, Any]] = []
    for row in done.values():
        for name in [name for name in ("environment", "timed_in") if name in row]:
            own = {key: value for key, value in row[name].items() if key not in ("command", "load_before")}
            if own not in environments:  # rows differ by --match and have their own load
                environments.append(own)
            row[name] = environments.index(own)
    splits = sorted({row["split"] for row in done.values()})
    questions = {
        split: [{"id": problem["id"], "complexity": problem["complexity"]} for problem in data.load("asdiv_a", split)]
        for split in splits
    }
    content = {"written": environment(), "environments": environments, "questions": questions, "rows": done}
    write("distillation", content)
    for path in report(RESULTS / "distillation.json", OUTPUT):
        print(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000, help="so many at most")
    parser.add_argument("--match", default="", help="only rows whose name has this regular expression")
    parser.add_argument("--work", default="out/distillation")
    parser.add_argument("--hosts", default="out/athena", help="folder of the dense hosts of athena_host.py")
    parser.add_argument("--list", action="store_true", help="show rows and whether they are done")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what is known")
    parser.add_argument("--unreported", action="store_true", help="write no report: for several processes at once")
    parser.add_argument("--speeds", action="store_true", help="only time again what is done, of equal shapes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    work = Path(options.work)
    selected = [row for row in rows() if re.search(options.match, row.key)]
    done = done_rows(work)
    if options.list:
        for row in selected:
            print(("done  " if row.key in done else "      ") + row.key)
        return
    if options.speeds:
        folders = {row.key: row.folder for row in rows()}
        for key, timed_row in speeds(done, Path(options.hosts) / "dense_fold0"):
            write_text(work / "rows" / f"{folders[key]}.json", json.dumps(timed_row) + "\n")
            print(key, timed_row["seconds"], flush=True)
    elif not options.report:
        for row in [row for row in selected if row.key not in done][: options.rows]:
            begun, machine = time.time(), environment()
            print(f"--- {row.key}", flush=True)
            folder, dense = make_model(row, work, Path(options.hosts))
            result = {**measured(row, folder, dense, work), "environment": machine, "load": os.getloadavg()[0]}
            write_text(work / "rows" / f"{row.folder}.json", json.dumps(result) + "\n")
            minutes = (time.time() - begun) / 60
            print(f"--- {row.key}: {result['accuracy']:.1%}, {minutes:.1f} min in this run", flush=True)
    if not options.unreported:
        finish(work)


if __name__ == "__main__":
    main()
