"""Make the rows of smaller_model.py: train a model, and let it answer validation and test problems."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from _record import processor
from _smaller import DENSE, Experiment, Row
from typing_extensions import override

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints.loading import load_pretrained
from lmeval_prune.checkpoints.pruned import read_manifest
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.distillation.language_host import LanguageHost, Rows
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.recursion import distill
from lmeval_prune.errors import InputError
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.pruners.calibration import encode

FOLDS = 5  # of ASDiv-A; those that are not the test are trained on
ANSWERED = 16  # test problems whose answers are timed for an estimate
PROBLEMS = "problems.json"  # documents of all folds, with prompts and answers as lm-eval renders them


def write_problems(experiment: Experiment) -> Path:
    """Write the documents of all folds with their prompts and answers, for machines without lm-eval."""
    path = experiment.work / PROBLEMS
    if path.is_file():
        return path
    seed, folds = experiment.settings["seeds"][0], dict[str, list[dict[str, Any]]]()
    for fold in range(FOLDS):
        host = LanguageHost(experiment.options(Row(DENSE, fold, seed)))
        folds[f"fold{fold}"] = [
            {**document, "rendered": {"prompt": host.prompt(document), "target": host.target(document)}}
            for document in host.rows().test
        ]
    write_text(path, json.dumps(folds) + "\n")
    return path


class PackedHost(LanguageHost):
    """A language model whose problems come from a file; it needs no lm-eval."""

    def __init__(self, options: DistillOptions, problems: Path) -> None:
        super().__init__(options)
        self.problems: dict[str, list[dict[str, Any]]] = read_json(problems)
        if not options.chat:
            raise InputError("the experiment writes prompts in the chat template; give chat: true in each recipe")

    @override
    def rows(self) -> Rows:
        test = str(self.options.test)
        names = [name for name in self.problems if name != test]
        return Rows([row for name in names for row in self.problems[name]], self.problems[test], ", ".join(names))

    @override
    def prompt(self, document: Any) -> str:
        return str(document["rendered"]["prompt"])

    @override
    def target(self, document: Any) -> str:
        return str(document["rendered"]["target"])


def make_row(experiment: Experiment, row: Row, device: str) -> dict[str, Any]:
    """Train a row's model, unless it is there, let it answer, and write the record of the row.

    The answers to the test are stored without being scored. A `limit`, of a rehearsal, is also that of the test.
    """
    begin = time.monotonic()
    again: dict[str, Any] = {}
    if row.recipe != DENSE and not experiment.model(row.dense).is_dir():  # its record came from another machine
        again = {"dense": _answered(experiment, row.dense, device)}
    record = {
        "recipe": row.recipe,
        "fold": row.fold,
        "seed": row.seed,
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "settings": experiment.digest(row),
        **_answered(experiment, row, device),
        **again,
        "seconds": round(time.monotonic() - begin, 1),
    }
    write_text(experiment.path(row), json.dumps(record) + "\n")
    return record


def _answered(experiment: Experiment, row: Row, device: str) -> dict[str, Any]:
    """Train a row's model, unless it is there; return its digest, what was removed, and its answers."""
    host = PackedHost(experiment.options(row), experiment.work / PROBLEMS)
    note = distill(host.options, host)
    model = load_pretrained(str(experiment.model(row))).float().to(device)
    problems = [problem.question.document for problem in host.examples().problems]
    settings = experiment.settings
    greedy = SamplingParams(max_new_tokens=settings["new_tokens"])
    drawn = replace(greedy, do_sample=True, temperature=settings["sample_temperature"])
    return {
        "weights": host.identity(str(experiment.model(row))),
        "parent": note["options"]["pretrained"],
        **shape(experiment.model(row), model),
        "stages": note["stages"],
        "validation": first(answers(host, model, problems, greedy)),
        "sampled": answers(host, model, problems, drawn, settings["samples"]),
        "test": first(answers(host, model, host.rows().test[: host.options.limit], greedy)),
    }


def shape(folder: str | Path, model: Any) -> dict[str, Any]:
    """Return the numbers of a model's parameters, and the plans by which its checkpoint was cut."""
    manifest = read_manifest(Path(folder)) or {"stages": []}
    return {"parameters": list(parameters(model)), "plans": [stage["plan"] for stage in manifest["stages"]]}


def answers(
    host: PackedHost, model: Any, documents: Sequence[Any], params: SamplingParams, samples: int = 1
) -> list[dict[str, Any]]:
    """Return a model's answers to documents."""
    prompts = [tuple(encode(host.tokenizer, host.prompt(document))) for document in documents]
    requests = [
        Request(prompt, params=params, seed=number, tag=place)
        for place, prompt in enumerate(prompts)
        for number in range(samples)
    ]
    texts: list[dict[int, str]] = [{} for _ in prompts]
    for request, tokens in Engine(model, host.tokenizer, deterministic=not params.do_sample).decode(requests):
        texts[request.tag][request.seed] = host.tokenizer.decode(tokens, skip_special_tokens=True)
    return [
        {"id": str(document["id"]), "answers": [by_seed[number] for number in range(samples)]}
        for document, by_seed in zip(documents, texts, strict=True)
    ]


def first(several: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the only answer to each document."""
    return [{"id": entry["id"], "answer": entry["answers"][0]} for entry in several]


def estimated_seconds(experiment: Experiment, row: Row, folder: Path, device: str, limit: int = 48) -> dict[str, float]:
    """Estimate the seconds of a row from one epoch of a few problems, by a model of the same shape.

    A pruner, and a teacher that answers, read no more than these problems, so `rest` takes longer if they read more.
    What was removed is kept in `folder`, so that `speed` can measure the shape before anything is trained.

    Returns:
        Seconds of training, of answering, and of all the rest (scoring, cutting, reading and writing).
    """
    whole = replace(experiment.options(row), pretrained=experiment.pretrained)
    few = replace(whole, output=str(folder / row.key), epochs=1, limit=limit)
    hosts = [PackedHost(options, experiment.work / PROBLEMS) for options in (few, whole)]
    examples = [host.examples() for host in hosts]
    shutil.rmtree(few.output, ignore_errors=True)
    begin = time.monotonic()
    note = distill(few, hosts[0])
    trained = sum(log.get("seconds", 0.0) for stage in note["stages"] for log in stage["log"])
    rest = time.monotonic() - begin - trained
    model = load_pretrained(few.output).float().to(device)
    record = {**asdict(row), "settings": experiment.digest(row), **shape(few.output, model)}
    write_text(folder / f"{row.key}.json", json.dumps(record) + "\n")
    documents = hosts[1].rows().test
    begin = time.monotonic()
    answers(hosts[0], model, documents[:ANSWERED], SamplingParams(max_new_tokens=experiment.settings["new_tokens"]))
    answered = (time.monotonic() - begin) / len(documents[:ANSWERED])
    shutil.rmtree(few.output)
    share = sum(examples[1].lengths) / sum(examples[0].lengths)
    return {
        "training": trained * share * whole.epochs,
        "answering": answered * (len(documents) + len(examples[1].validation)),
        "rest": rest,
    }
