"""The tables of Yu et al., measured: recursive distillation of ATHENA and of SmolLM2, a row at a time.

    python benchmarks/distillation_result.py [--rows 1000] [--match REGEX] [--list] [--report]
        [--unreported] [--speeds]

A row is one model on one fold by one seed. Rows stand in the order of their importance; each is stored under --work
when it is done and never made again, and a row that was killed goes on where it was: the same command can be given
again and again. `--rows 1` makes the next one. Recipes: configs/athena/minilm.yaml and configs/distillation/.
ATHENA's dense hosts of seed 0 are those of `lmeval-prune athena train --test fold0 --output out/athena/dense_fold0`.
Nothing of a fold's test is looked at before its row is tested, by lm_eval. Speed, FLOPs and memory are those of
reading the same test problems and judging their gold graphs, for a search does as much work as it keeps thoughts
(language models: a prompt of 128 tokens; speed with 16 more). Speed: processor time, in turn with the dense host,
medians; rows that were made beside others are timed again alone by `--speeds`, on models of their shapes. Memory:
what a process of its own needs at most above what it has before the model is read. Writes
`results/distillation.json`, and tables beside the paper's own figures, with paired tests, and pictures under
`docs/results/distillation/` (`--report`: nothing is run); what was never measured is left out.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
import yaml
from _record import RESULTS, environment, write
from scipy import stats

from lmeval_prune.artefacts import write_text
from lmeval_prune.athena.problems import GroundedProblem
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import LINES, TITLE
from lmeval_prune.reporting.documents import csv, escape_markdown, markdown, p_value, signed
from lmeval_prune.reporting.plot_style import COLOURS, figure, save
from lmeval_prune.reporting.statistics import holm, sign_flip_test
from lmeval_prune.training.trainer import draw

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
    "response only": {"terms": ["response"]},
    "feature only": {"terms": ["feature"]},
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


CHANNELS = {"pruning": {"ffn_ratio": 0.3, "ffn_method": "random"}}


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
    if row.host == "athena" and not row.seed:  # as `lmeval-prune athena train --test foldN` trains it
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
        tested(folder, row.fold, answers_file)
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
    options["pruning"] = {**recipe(name, "distill").get("pruning", {}), **row.changes.get("pruning", {})}
    if row.changes.get("stages") == 1:  # as many epochs as in all stages of the others
        options["epochs"] *= recipe(name, "distill")["stages"]
    return options


def _removed_by(row: Row) -> str:
    """Describe how a row's parameters are removed."""
    if row.kind == DENSE:
        return "nothing is removed"
    options = _options(row)
    stages, unit = options["stages"], options["pruning"].get("unit", "head")
    return f"unit={unit}, {stages} stage{'s' * (stages > 1)} of {options['epochs']} epochs, rate {options['rate']}"


def tested(model: Path, fold: int, answers_file: Path) -> None:
    """Test a solver on a fold, and write its answers to a file; nothing if that is there."""
    if answers_file.exists():
        return
    from lm_eval import simple_evaluate

    from lmeval_prune.plugin import registration

    registration.register()
    results = simple_evaluate(
        model="athena", model_args={"pretrained": str(model)}, batch_size=32, tasks=[TASK],
        metadata={"data_split": f"fold{fold}"}, bootstrap_iters=0,
    )  # fmt: skip
    rows = [
        {"id": row["doc"]["id"], "right": row["exact_match"], "answer": row["resps"][0][0],
         "steps": (problem := GroundedProblem.of(row["doc"])) and problem.steps(())}
        for row in results["samples"][TASK]
    ]  # fmt: skip
    write_text(answers_file, json.dumps(rows, indent=0) + "\n")


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
    from lmeval_prune.athena.batches import collate, make_examples
    from lmeval_prune.athena.problems import GroundedProblem
    from lmeval_prune.tasks import data

    problems = [problem for row in data.load("asdiv_a", f"fold{fold}") if (problem := GroundedProblem.of(row))][:most]
    examples = make_examples(problems, model.tokenizer, model.settings)
    batch = collate(examples, len(model.settings.constants), model.tokenizer.pad_token_id)
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


# ---------------------------------------------------------------- what the paper prints

# Table 1, ATHENA-base: accuracy, fewer parameters, faster, fewer FLOPs; all in %
TABLE_1 = {
    "Math23k": {
        0.0: (84.4, 0.0, 0.0, 0.0),
        0.2: (84.2, 12.5, 18.4, 12.3),
        0.25: (84.0, 15.8, 22.7, 15.2),
        0.3: (83.7, 18.7, 27.5, 17.5),
    },
    "ASDiv-A": {
        0.0: (86.4, 0.0, 0.0, 0.0),
        0.2: (86.1, 13.2, 17.2, 11.5),
        0.25: (85.9, 16.2, 21.3, 14.8),
        0.3: (85.5, 19.5, 26.5, 17.2),
    },
}
# Table 2 at 25%: accuracy unpruned, accuracy pruned, fewer parameters, faster
TABLE_2 = {
    ("ATHENA-base", "Math23k"): (84.4, 84.0, 15.8, 22.7),
    ("ATHENA-base", "ASDiv-A"): (86.4, 85.9, 16.2, 21.3),
    ("ATHENA-large", "Math23k"): (86.5, 86.0, 17.4, 23.8),
    ("ATHENA-large", "ASDiv-A"): (91.0, 90.4, 18.1, 22.5),
}
# Table 3, ATHENA-base, Math23k, 25%: accuracy by α; unpruned and pruned accuracy by complexity
TABLE_3A = {0.0: 83.1, 0.3: 83.8, 0.5: 84.0, 0.7: 83.5, 1.0: 71.2}
TABLE_3B = {"low": (89.2, 88.9), "medium": (84.7, 84.2), "high": (79.3, 78.6), "all": (84.4, 84.0)}
# Table 4, the same: accuracy
TABLE_4 = {
    "dense": 84.4,
    "pruning only": 83.6,
    "without entropy": 71.2,
    "without norm": 83.1,
    "response only": 83.8,
    "feature only": 83.9,
    "random": 81.5,
    "global threshold": 82.9,
    "attention visualisation": 83.6,
    "distillation only": 84.5,
    "ours": 84.0,
}
MEMORY = 11.6  # its Table 4: % less of it in each row but dense and distillation only

# width, layers, heads and vocabulary with positions of RoBERTa's encoders; parameters of ATHENA's head part over them
ENCODERS = {"base": (768, 12, 12, 50265 + 514 + 1, 56.7e6), "large": (1024, 24, 16, 50265 + 514 + 1, 100.8e6)}


def head_share(size: str, ratio: float) -> tuple[int, int, float]:
    """What heads are worth in an ATHENA over RoBERTa.

    A head is 64 rows of three projections with their biases, and 64 columns of one.

    Args:
        size: base or large.
        ratio: share of the encoder's heads.

    Returns:
        How many heads go, how many parameters, and their share of all in %.
    """
    width, layers, heads, embedded, head_part = ENCODERS[size]
    heads_removed = int(ratio * layers * heads)
    parameters = heads_removed * (4 * width * 64 + 3 * 64)
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width  # projections, both norms
    pooler = width * width + width
    total = embedded * width + 2 * width + layers * layer + pooler + head_part
    return heads_removed, parameters, 100 * parameters / total


# ---------------------------------------------------------------- tables

ALPHAS, LEVELS = tuple(TABLE_3A), ("low", "medium", "high")
Chosen = Callable[[dict[str, Any]], Any]  # of a row, which of its questions


Unit = tuple[str, int]  # a split and a seed


@dataclass(frozen=True)
class Variant:
    """One model of a kind, on all splits and seeds that it was measured on.

    Attributes:
        rows: its rows.
        dense: of each, the row of its dense model.
    """

    rows: list[dict[str, Any]]
    dense: list[dict[str, Any]]

    @property
    def units(self) -> set[Unit]:
        """Splits and seeds of its rows."""
        return {_unit(row) for row in self.rows}

    def on(self, units: Collection[Unit]) -> Variant:
        """Return the variant on these splits and seeds."""
        pairs = [pair for pair in zip(self.rows, self.dense, strict=True) if _unit(pair[0]) in units]
        return Variant([row for row, _ in pairs], [row for _, row in pairs])

    def solved(self, chosen: Chosen = lambda row: slice(None)) -> list[np.ndarray]:
        """Return by split, question by question, the share of seeds that answer it rightly.

        Args:
            chosen: which questions of a row.
        """
        splits: dict[str, list[np.ndarray]] = {}
        for row in self.rows:
            splits.setdefault(row["split"], []).append(_right(row)[chosen(row)])
        return [np.mean(seeds, axis=0) for seeds in splits.values()]

    def differences(self, chosen: Chosen = lambda row: slice(None)) -> list[np.ndarray]:
        """Return by split, question by question, right minus right of the dense model, the mean over seeds.

        Args:
            chosen: which questions of a row.
        """
        before = Variant(self.dense, self.dense).solved(chosen)
        return [own - other for own, other in zip(self.solved(chosen), before, strict=True)]

    @property
    def accuracy(self) -> float:
        """In %, the mean over splits of means over seeds."""
        return _mean_accuracy(self.rows)

    @property
    def difference(self) -> float:
        """To the dense model, in points."""
        return self.accuracy - _mean_accuracy(self.dense)

    @property
    def standard_error(self) -> float:
        """Of the difference over splits, in points; NaN of a single split."""
        means = [100 * differences.mean() for differences in self.differences()]
        return float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else float("nan")

    def test(self, chosen: Chosen = lambda row: slice(None)) -> tuple[float, float]:
        """Return p of a paired test over questions, and of one over splits (NaN of a single split).

        Args:
            chosen: which questions of a row.
        """
        differences = [values for values in self.differences(chosen) if len(values)]
        if not differences:
            return float("nan"), float("nan")
        over_questions = float(sign_flip_test(np.concatenate(differences)[:, None])[0])
        if len(differences) < 2:
            return over_questions, float("nan")
        return over_questions, float(sign_flip_test(np.array([[values.mean()] for values in differences]))[0])

    def removed(self) -> str:
        """Describe what was removed, the mean over rows; empty where rows do not say."""
        counts = [row["removed"] for row in self.rows if row.get("removed")]
        means = [(name, np.mean([count.get(name, 0) for count in counts])) for name in ("heads", "channels") if counts]
        return ", ".join(f"{mean:g} {name}" for name, mean in means)

    def fewer(self, name: str) -> float:
        """Return by how many % a figure is smaller than the dense model's; NaN if it was not measured."""
        pairs = [(row.get(name), other.get(name)) for row, other in zip(self.rows, self.dense, strict=True)]
        savings = [1 - own / dense for own, dense in pairs if own and dense]
        return 100 * float(np.mean(savings)) if savings else float("nan")

    def faster(self) -> float:
        """Return by how many % it is faster than the dense model that was timed beside it; NaN if it was not timed."""
        speedups = [row["seconds"]["dense"] / row["seconds"]["own"] - 1 for row in self.rows if row.get("seconds")]
        return 100 * float(np.mean(speedups)) if speedups else float("nan")


def _unit(row: dict[str, Any]) -> Unit:
    return row["split"], row["seed"]


def _mean_accuracy(rows: Sequence[dict[str, Any]]) -> float:
    splits: dict[str, list[float]] = {}
    for row in rows:
        splits.setdefault(row["split"], []).append(row["accuracy"])
    return 100 * float(np.mean([np.mean(seeds) for seeds in splits.values()]))


def _right(row: dict[str, Any]) -> np.ndarray:
    return np.array([float(mark) for mark in row["right"]])


class Results:
    """What was measured.

    Args:
        content: of a results file.

    Attributes:
        hosts: names, in order.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = list(content["rows"].values())
        self.questions: dict[str, list[dict[str, Any]]] = content["questions"]
        self.hosts = list(dict.fromkeys(row["host"] for row in self.rows))

    def dense(self, host: str) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the rows of the unpruned host by split and seed."""
        return {_unit(row): row for row in self.rows if row["host"] == host and row["kind"] == DENSE}

    def variant(self, host: str, kind: str, ratio: float) -> Variant | None:
        """Return the rows of a kind at a ratio that have a dense model; None if there are none."""
        dense = self.dense(host)
        rows = [row for row in self.rows if (row["host"], row["kind"], row["ratio"]) == (host, kind, ratio)]
        rows = [row for row in rows if _unit(row) in dense]
        return Variant(rows, [dense[_unit(row)] for row in rows]) if rows else None

    def ratios(self, host: str, kind: str = OURS) -> list[float]:
        """Return the ratios that were measured."""
        return sorted({row["ratio"] for row in self.rows if row["host"] == host and row["kind"] == kind})


def report_tables(content: dict[str, Any], output: Path) -> list[Path]:
    """Write `tables.md`, a CSV of all rows, and pictures; return the files that were written."""
    results = Results(content)
    parts = ["# Recursive distillation: the tables of Yu et al.", _legend(results)]
    for host in results.hosts:
        if not results.dense(host):
            continue
        parts.append(f"## {escape_markdown(host)}\n\n{_describe(results, host)}")
        shown = len(parts)
        kinds = [kind for kind in dict.fromkeys(row["kind"] for row in results.rows) if kind.startswith(OURS)]
        for title, table in (
            *((f"Table 1: {escape_markdown(kind)}, by share of heads", table_1(results, host, kind)) for kind in kinds),
            ("Table 3 (a): α, 25% of heads", table_3a(results, host)),
            ("Table 3 (b): complexity, 25% of heads", table_3b(results, host)),
            ("Table 4: ablations, 25% of heads", table_4(results, host)),
        ):
            if table is not None:
                parts.append(f"### {title}\n\n{_shown(table)}")
        alone = results.variant(host, DENSE, 0.0)
        if len(parts) == shown and alone:
            parts.append(
                f"Only unpruned: {alone.accuracy:.1f}% "
                f"on {escape_markdown(', '.join(row['split'] for row in alone.rows))}."
            )
    sizes = table_2(results)
    if sizes is not None:
        parts.append(f"## Table 2: models, 25% of heads\n\n{_shown(sizes)}")
    parts.append(f"## What the paper's description cannot give\n\n{_arithmetic()}")
    write_text(output / "tables.md", "\n\n".join(parts) + "\n")
    write_text(output / "rows.csv", csv(_flat(results)))
    written = [output / "tables.md", output / "rows.csv"]
    if any(len(results.ratios(host)) > 1 for host in results.hosts):
        _draw(results, output / "ratios")
        written += [output / "ratios.png", output / "ratios.svg"]
    for row in results.rows:
        if row.get("stages") and row["kind"] == OURS and _unit(row) == _unit(results.rows[0]):
            stem = output / f"{_slug(row['host'])}_{round(100 * row['ratio'])}"
            draw(row["stages"], LINES, TITLE, stem)
            written += [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    return written


def _shown(table: pd.DataFrame) -> str:
    """Return a table as Markdown, and the splits and seeds that all its rows have."""
    units: set[Unit] = table.attrs["units"]
    names = ", ".join(f"{split} seed {seed}" for split, seed in sorted(units))
    return f"On {escape_markdown(names)}.\n\n{markdown(table, [table.columns[0]])}"


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_")


def _share(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1f}".replace("-", "−")


def _legend(results: Results) -> str:
    units = len({_unit(row) for row in results.rows})
    return (
        f"{len(results.rows)} rows; pairs of a split and a seed: {units}. A table has only those that all its rows "
        f"have, and names them; where rows have none in common there is no table. Accuracy in %, the mean over splits "
        f"of means over seeds; in brackets the difference to the dense model of the same splits and seeds. p: sign-"
        f"flip tests of these differences, over questions and over splits (the mean over seeds of each): over n splits "
        f"it cannot be below 2/2ⁿ (five: 0.0625, three: 0.25, two: 0.5), and one over questions knows how problems "
        f"differ, not how trainings do. Holm: the former, corrected for the rows of its table. ± splits: the standard "
        f"error of the difference over splits. *to ours*: the same difference and test, against ours in place of the "
        f"dense model, corrected over what prunes as much and trains. Parameters, FLOPs, memory: by how much less, "
        f"speed: by how much faster than the dense model timed beside it, all in %. Memory is that of a process (of a "
        f"language model measured on a GPU: what it has there), of which a small model is little: a few % either way "
        f"are noise. *paper*: its own figures, whose unpruned rows are another paper's to the digit; in its Table 4 "
        f"each pruned model needs {MEMORY}% less memory. Empty: not measured."
    )


def _describe(results: Results, host: str) -> str:
    """Describe the tasks of a host, and how parameters are removed from it."""
    rows = [row for row in results.rows if row["host"] == host]
    return "\n".join(
        sorted({escape_markdown(f"{row['task']}; {row['removed_by']}.") for row in rows if row["kind"] == OURS})
    )


Named = Sequence[tuple[list[str], Variant | None, list[str]]]  # first cells of a line, what was measured, last cells


def _comparable(variants: Sequence[Variant | None]) -> tuple[list[Variant | None], set[Unit]]:
    """Return variants on the splits and seeds that all of them have; none are left if they have none in common."""
    measured = [variant.units for variant in variants if variant is not None]
    units = set.intersection(*measured) if measured else set()
    return [variant.on(units) if variant is not None and units else None for variant in variants], units


def _rows_with_tests(named: Named, head: str, tail: list[str], least: int = 1) -> pd.DataFrame | None:
    """Return a table of variants, with Holm's correction over those tested; None of fewer than `least`."""
    variants, units = _comparable([variant for _, variant, _ in named])
    measured = [
        (cells, variant, last_cells)
        for (cells, _, last_cells), variant in zip(named, variants, strict=True)
        if variant is not None
    ]
    if len(measured) < least:
        return None
    tests = [variant.test() if not _is_dense(variant) else (float("nan"), float("nan")) for _, variant, _ in measured]
    corrected = holm([test[0] for test in tests])
    lines = []
    for (cells, variant, last_cells), test, adjusted in zip(measured, tests, corrected, strict=True):
        change = "" if _is_dense(variant) else f" ({signed(variant.difference)})"
        costs = [
            _share(variant.fewer("parameters")),
            _share(variant.faster()),
            _share(variant.fewer("flops")),
            _share(variant.fewer("memory")),
        ]
        error = float("nan") if _is_dense(variant) else variant.standard_error
        tested = [
            f"{variant.accuracy:.1f}{change}",
            _share(error),
            p_value(test[0]),
            p_value(adjusted),
            p_value(test[1]),
        ]
        lines.append([*cells, variant.removed(), *tested, *costs, *last_cells])
    costs = ["parameters↓", "speed↑", "FLOPs↓", "memory↓"]
    return _table(
        lines, [head, "removed", "accuracy", "± splits", "p questions", "Holm", "p splits", *costs, *tail], units
    )


def _table(lines: list[list[str]], columns: list[str], units: set[Unit]) -> pd.DataFrame:
    table = pd.DataFrame(lines, columns=columns)
    table.attrs["units"] = units
    return table


def _is_dense(variant: Variant) -> bool:
    return variant.rows[0]["kind"] == DENSE


def table_1(results: Results, host: str, kind: str = OURS) -> pd.DataFrame | None:
    """Return Table 1: accuracy by share of heads."""
    named: list[tuple[list[str], Variant | None, list[str]]] = [
        (["0"], results.variant(host, DENSE, 0.0), _paper_1(0.0))
    ]
    for ratio in results.ratios(host, kind):
        named.append(([f"{100 * ratio:.0f}"], results.variant(host, kind, ratio), _paper_1(ratio)))
    paper_columns = [f"paper, {data}: accuracy, parameters↓, speed↑, FLOPs↓" for data in TABLE_1]
    return _rows_with_tests(named, "heads removed, %", paper_columns, 2)


def _paper_1(ratio: float) -> list[str]:
    rows = [table.get(ratio) for table in TABLE_1.values()]
    return [", ".join(f"{value:.1f}" for value in row) if row else "" for row in rows]


def table_2(results: Results) -> pd.DataFrame | None:
    """Return Table 2: hosts of different sizes."""
    variants, units = _comparable([results.variant(host, OURS, 0.25) for host in results.hosts])
    measured = [(host, variant) for host, variant in zip(results.hosts, variants, strict=True) if variant is not None]
    if not measured:
        return None
    tests = [variant.test() for _, variant in measured]
    lines = [
        [
            host,
            variant.removed(),
            f"{_mean_accuracy(variant.dense):.1f}",
            f"{variant.accuracy:.1f} ({signed(variant.difference)})",
            *(p_value(test[0]), p_value(adjusted), p_value(test[1])),
            *(_share(variant.fewer("parameters")), _share(variant.faster())),
        ]
        for (host, variant), test, adjusted in zip(measured, tests, holm([test[0] for test in tests]), strict=True)
    ]
    lines += [
        [f"paper: {host}, {data}", "", f"{a:.1f}", f"{b:.1f} ({signed(b - a)})", "", "", "", f"{c:.1f}", f"{d:.1f}"]
        for (host, data), (a, b, c, d) in TABLE_2.items()
    ]
    tested = ["p questions", "Holm", "p splits"]
    return _table(lines, ["host", "removed", "dense", "25% removed", *tested, "parameters↓", "speed↑"], units)


def table_3a(results: Results, host: str) -> pd.DataFrame | None:
    """Return Table 3 (a): accuracy by α."""
    kinds = {alpha: OURS if alpha == 0.5 else f"alpha {alpha}" for alpha in ALPHAS}
    named = [([f"{alpha}"], results.variant(host, kind, 0.25), [f"{TABLE_3A[alpha]}"]) for alpha, kind in kinds.items()]
    return _rows_with_tests(named, "α", ["paper, Math23k"], 2)


def table_3b(results: Results, host: str) -> pd.DataFrame | None:
    """Return Table 3 (b): accuracy by the complexity of problems.

    It is of the splits and seeds that Table 1 has: per problem the mean over seeds, then over problems. Whether complex
    problems lose *more*, which is what the paper asks, is a permutation test of the problems' own differences, theirs
    against those of low complexity.
    """
    of_ratios = [results.variant(host, OURS, ratio) for ratio in results.ratios(host)]
    variants, _ = _comparable(of_ratios)
    variant = dict(zip(results.ratios(host), variants, strict=True)).get(0.25)
    if variant is None:
        return None
    levels = {split: [row.get("complexity") for row in rows] for split, rows in results.questions.items()}

    def of_level(level: str) -> Chosen:
        return lambda row: np.array([level in ("all", own) for own in levels[row["split"]]], dtype=bool)

    tests = [variant.test(of_level(level)) for level in (*LEVELS, "all")]
    corrected = [*holm([test[0] for test in tests[:-1]]), float("nan")]  # all of them are tested in Table 1
    differences = {level: np.concatenate(variant.differences(of_level(level))) for level in (*LEVELS, "all")}
    lines = []
    for level, test, adjusted in zip((*LEVELS, "all"), tests, corrected, strict=True):
        was, now = TABLE_3B[level]
        published = f"{was} → {now} ({signed(now - was)})"
        if not len(differences[level]):
            lines.append([level, "0", *[""] * 7, published])
            continue
        before = 100 * float(np.concatenate(Variant(variant.dense, variant.dense).solved(of_level(level))).mean())
        change = 100 * float(differences[level].mean())
        tested = [signed(change), p_value(test[0]), p_value(adjusted), p_value(test[1])]
        more = float("nan")
        if level in ("medium", "high") and len(differences["low"]):
            more = stats.permutation_test(
                (differences[level], differences["low"]), lambda a, b, axis: a.mean(axis) - b.mean(axis),
                vectorized=True, n_resamples=10_000, batch=500, rng=np.random.default_rng(0),
            ).pvalue  # fmt: skip
        lines.append(
            [
                level,
                str(len(differences[level])),
                f"{before:.1f}",
                f"{before + change:.1f}",
                *tested,
                p_value(more),
                published,
            ]
        )
    tested = ["difference", "p questions", "Holm", "p splits", "p other than low"]
    return _table(lines, ["complexity", "problems", "dense", "25% removed", *tested, "paper, Math23k"], variant.units)


def table_4(results: Results, host: str) -> pd.DataFrame | None:
    """Return Table 4: ablations."""
    kinds = {"without entropy": "alpha 1.0", "without norm": "alpha 0.0"}
    named: list[tuple[list[str], Variant | None, list[str]]] = []
    for name, published in TABLE_4.items():
        ratio = 0.0 if name in (DENSE, "distillation only") else 0.25
        variant = results.variant(host, name, ratio) or results.variant(host, kinds.get(name, ""), ratio)
        named.append(([name], variant, [f"{published}"]))
    named.insert(2, (["pruned, not trained"], results.variant(host, "pruned, not trained", 0.25), [""]))
    table = _rows_with_tests(named, "strategy", ["paper, Math23k"], 3)
    if table is None:
        return None
    return _add_differences(table, {cells[0]: variant for cells, variant, _ in named if variant})


def _add_differences(table: pd.DataFrame, variants: dict[str, Variant]) -> pd.DataFrame:
    """Add to Table 4 how each other way differs from ours, tested over questions: the paper claims that ours is best.

    Holm's correction is over ways that prune as much and train; the others are tested, too, and not corrected.
    """
    units = table.attrs["units"]
    if OURS not in variants or not variants[OURS].on(units).rows:
        return table
    references = {_unit(row): row for row in variants[OURS].on(units).rows}
    pairs = {name: variants[name].on(units) for name in table["strategy"] if name != OURS}
    pairs = {
        name: Variant(variant.rows, [references[_unit(row)] for row in variant.rows]) for name, variant in pairs.items()
    }
    chances = {name: variant.test()[0] for name, variant in pairs.items()}
    family = [name for name in pairs if name not in (DENSE, "distillation only", "pruned, not trained")]
    corrected = dict(zip(family, holm([chances[name] for name in family]), strict=True))
    columns = {
        "to ours": {name: signed(variant.difference) for name, variant in pairs.items()},
        "p to ours": {name: p_value(value) for name, value in chances.items()},
        "Holm to ours": {name: p_value(value) for name, value in corrected.items()},
    }
    for position, (head, cells) in enumerate(columns.items(), list(table.columns).index("p splits") + 1):
        table.insert(position, head, [cells.get(name, "") for name in table["strategy"]])
    return table


def _arithmetic() -> str:
    lines = []
    printed = {("base", ratio): row[1] for ratio, row in TABLE_1["Math23k"].items() if ratio}
    printed["large", 0.25] = TABLE_2["ATHENA-large", "Math23k"][2]
    for (size, ratio), published in printed.items():
        heads_removed, parameters, share = head_share(size, ratio)
        lines.append(
            f"- ATHENA-{size}, {ratio:.0%} of the encoder's heads: {heads_removed} heads, "
            f"{parameters / 1e6:.2f} million parameters, {share:.1f}% of the model; the paper prints {published}%."
        )
    return (
        "A head of 64 numbers is 64 rows of three projections and 64 columns of a fourth, with 192 biases; RoBERTa's "
        "encoder and ATHENA's own modules (56.7 and 100.8 million) make the model.\n\n" + "\n".join(lines) + "\n- Its "
        "rows at 25% have one parameter figure whatever was removed by which score, and the same speed: with heads of "
        "equal size that follows. Reaching its figures takes feed-forward channels, too."
    )


def _flat(results: Results) -> pd.DataFrame:
    names = ("host", "kind", "ratio", "split", "seed", "accuracy", "parameters", "flops", "memory")
    rows = [
        {**{name: row.get(name) for name in names}, **_seconds(row), **_removed_counts(row)} for row in results.rows
    ]
    return pd.DataFrame(rows)


def _seconds(row: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a row's model and of the dense one, which were timed in turn."""
    seconds = row.get("seconds") or {}
    return {"seconds": seconds.get("own"), "seconds_dense": seconds.get("dense")}


def _removed_counts(row: dict[str, Any]) -> dict[str, Any]:
    """Return how many heads and channels were removed, and how many heads of each layer are left."""
    removed, stages = row.get("removed") or {}, row.get("stages") or [{}]
    left = "; ".join(f"{label} {len(heads)}" for label, heads in stages[-1].get("heads", {}).items())
    return {"heads_removed": removed.get("heads"), "channels_removed": removed.get("channels"), "heads_left": left}


def _draw(results: Results, stem: Path) -> None:
    canvas, axes = figure(7, 3.4, "Accuracy by share of heads removed")
    for colour, host in zip(COLOURS, results.hosts, strict=False):
        shares = [0.0, *results.ratios(host)]
        variants, _ = _comparable([results.variant(host, OURS if share else DENSE, share) for share in shares])
        points = [
            (100 * share, variant) for share, variant in zip(shares, variants, strict=True) if variant is not None
        ]
        for number, unit in enumerate(sorted({_unit(row) for _, variant in points for row in variant.rows})):
            own = [(x, 100 * row["accuracy"]) for x, variant in points for row in variant.rows if _unit(row) == unit]
            axes.plot(
                *zip(*own, strict=True),
                color=colour,
                lw=0.6,
                alpha=0.5,
                marker=".",
                label=None if number else f"{host}: one run",
            )
        axes.plot(
            [x for x, _ in points],
            [variant.accuracy for _, variant in points],
            color=colour,
            marker="o",
            label=f"{host}: mean",
        )
    published = TABLE_1["ASDiv-A"]
    axes.plot(
        [100 * x for x in published],
        [row[0] for row in published.values()],
        color=COLOURS[6],
        ls="--",
        marker="s",
        ms=4,
        label="paper, ASDiv-A",
    )
    axes.set_xlabel("heads removed, %")
    axes.set_ylabel("accuracy, %")
    canvas.legend(frameon=False, fontsize=7, loc="outside right center")
    save(canvas, stem)


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
    for path in report_tables(content, OUTPUT):
        print(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1000, help="so many at most")
    parser.add_argument("--match", default="", help="only rows whose name has this regular expression")
    parser.add_argument("--work", default="out/distillation")
    parser.add_argument("--hosts", default="out/athena", help="folder of dense hosts")
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
