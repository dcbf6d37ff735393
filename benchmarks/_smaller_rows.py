"""Make the rows of smaller_model.py: train a model, and let it answer validation and test problems."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _record import environment, processor
from _smaller import DENSE, PROMPTS, Experiment, Row
from typing_extensions import override

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints.identity import checkpoint_identity
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
PROBLEMS = "problems.json"  # documents of all folds, with prompts and answers as lm-eval renders them
ROWS = 256  # answers of a batch of `generate`
PRODUCTS = {"cpu": "float32", "cuda": "tf32"}  # of a training, unless it is in bfloat16


def write_problems(experiment: Experiment) -> Path:
    """Write the documents of all folds with their prompts and answers, for machines without lm-eval."""
    path = experiment.work / PROBLEMS
    if path.is_file():
        return path
    seed, folds = experiment.settings["choice_seeds"][0], dict[str, list[dict[str, Any]]]()
    for fold in range(FOLDS):
        host = LanguageHost(experiment.options(Row(DENSE, fold, seed)))
        folds[f"fold{fold}"] = [
            {**document, "rendered": {"prompt": host.prompt(document), "target": host.target(document)}}
            for document in host.rows().test
        ]
    write_text(path, json.dumps(folds) + "\n")
    return path


def write_prompts(experiment: Experiment, recipes: Sequence[str] = ()) -> None:
    """Write the prompts without answers, if one of the recipes (default: any) reads them."""
    path, seed = experiment.work / PROMPTS, experiment.settings["choice_seeds"][0]
    experiment.check_names(recipes)
    rows = [Row(name, experiment.settings["folds"][0], seed) for name in recipes or experiment.settings["recipes"]]
    if path.is_file() or all(experiment.options(row).corpus != str(path) for row in rows):
        return
    write_text(path, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in unanswered_prompts(experiment)))


def unanswered_prompts(experiment: Experiment) -> list[str]:
    """Return prompts of problems that are in no fold, as the task writes them, as many as the experiment names.

    They are ASDiv's problems outside ASDiv-A, then GSM8K's training problems, the shortest first.
    """
    from lmeval_prune.tasks.data import load

    host = LanguageHost(experiment.options(Row(DENSE, 0, experiment.settings["choice_seeds"][0])))
    folder = host.options.data_dir
    folds = "+".join(f"fold{fold}" for fold in range(FOLDS))
    inside = {document["id"] for document in load("asdiv_a", folds, folder)}
    outside = [document for document in load("asdiv", "test", folder) if document["id"] not in inside]
    further = sorted(load("gsm8k", "train", folder), key=lambda document: len(document["question"]))
    documents = [*outside, *further][: experiment.settings.get("prompts", 0)]
    return [str(host.task.doc_to_text(dict(document))) for document in documents]


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


def make_row(experiment: Experiment, row: Row, device: str, resumable: bool = True) -> dict[str, Any]:
    """Train a row's model, unless it is there, let it answer, and write the record of the row.

    The answers to the test are stored without being scored. A `limit`, of a rehearsal, is also that of the test.
    Without `resumable` a training that was killed begins again, and its checkpoints are a third as large.
    """
    begin = time.monotonic()
    record = {
        "recipe": row.recipe,
        "fold": row.fold,
        "seed": row.seed,
        "device": device_name(device),
        "settings": experiment.digest(row),
        "products": products(experiment, device),
        "answered_by": "generate" if device == "cuda" else "engine",
        **({} if row.recipe == DENSE else _other_parent(experiment, row.dense, device, resumable)),
        **_answered(experiment, row, device, resumable),
        "seconds": round(time.monotonic() - begin, 1),
    }
    write_text(experiment.path(row), json.dumps(record) + "\n")
    return record


def _other_parent(experiment: Experiment, dense: Row, device: str, resumable: bool) -> dict[str, Any]:
    """Return the answers of the dense model of this machine, if it is not that of the dense row; train it if need be.

    The record of a dense row can come from another machine, its model does not. The answers of a model that was trained
    anew are kept beside it.
    """
    record, folder = experiment.record(dense), experiment.model(dense)
    if record is None:
        raise InputError(f"{dense.key} has no row; make it first, by train --recipes {DENSE}")
    weights = checkpoint_identity(str(folder)) if folder.is_dir() else None
    if weights == record["weights"]:
        _check_products(experiment, dense, record, device)
        return {}
    path = folder.with_name(f"{dense.key}.answers.json")
    answered = read_json(path) if path.is_file() else {}
    if weights is None or answered.get("weights") != weights:
        answered = {**_answered(experiment, dense, device, resumable), "products": products(experiment, device)}
        write_text(path, json.dumps(answered) + "\n")
    _check_products(experiment, dense, answered, device)
    return {} if answered["weights"] == record["weights"] else {"dense": answered}


def _check_products(experiment: Experiment, dense: Row, record: dict[str, Any], device: str) -> None:
    """Raise an `InputError` if a dense model was trained in other products than the model that is pruned from it."""
    now = products(experiment, device)
    if record.get("products", now) != now:
        raise InputError(
            f"{experiment.model(dense)} was trained in {record['products']}, and this row would be in {now}; "
            f"give --bf16 (or none) as for the dense model, or another --work"
        )


def products(experiment: Experiment, device: str) -> str:
    """Return the number type of the products of a training."""
    return "bfloat16" if experiment.bf16 else PRODUCTS[device]


def device_name(device: str) -> str:
    """Return the name of the processor or GPU."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def _trained_by(experiment: Experiment, row: Row, device: str) -> list[dict[str, Any]]:
    """Note commit, versions and device before a model is trained; return those of all runs that trained it."""
    path = experiment.model(row).with_name(f"{row.key}.made.json")
    runs: list[dict[str, Any]] = read_json(path, list[dict[str, Any]]) if path.is_file() else []
    facts = {**environment(), "device": device_name(device)}
    run = {name: facts[name] for name in ("commit", "device", "threads", "python", "versions")}
    if not experiment.model(row).is_dir() and run not in runs:
        runs.append(run)
        write_text(path, json.dumps(runs) + "\n")
    return runs


def _answered(experiment: Experiment, row: Row, device: str, resumable: bool) -> dict[str, Any]:
    """Train a row's model, unless it is there; return its digest, what was removed, and its answers."""
    host = PackedHost(replace(experiment.options(row), resumable=resumable), experiment.work / PROBLEMS)
    runs = _trained_by(experiment, row, device)
    note = distill(host.options, host)
    torch.cuda.empty_cache()  # for other processes
    model = load_pretrained(str(experiment.model(row))).float().to(device)
    problems = [problem.question.document for problem in host.examples().problems]
    greedy, drawn = answering(experiment)
    return {
        "made": runs,
        "weights": host.identity(str(experiment.model(row))),
        "parent": note["options"]["pretrained"],
        **shape(experiment.model(row), model),
        "stages": note["stages"],
        "validation": first(answers(host, model, problems, greedy)),
        "sampled": answers(host, model, problems, drawn, experiment.settings["samples"]),
        "test": first(answers(host, model, host.rows().test[: host.options.limit], greedy)),
    }


def answering(experiment: Experiment) -> tuple[SamplingParams, SamplingParams]:
    """Return how a model answers greedily, and how it is sampled."""
    greedy = SamplingParams(max_new_tokens=experiment.settings["new_tokens"])
    return greedy, replace(greedy, do_sample=True, temperature=experiment.settings["sample_temperature"])


def shape(folder: str | Path, model: Any) -> dict[str, Any]:
    """Return the numbers of a model's parameters, and the plans by which its checkpoint was cut."""
    manifest = read_manifest(Path(folder)) or {"stages": []}
    return {"parameters": list(parameters(model)), "plans": [stage["plan"] for stage in manifest["stages"]]}


def answers(
    host: PackedHost, model: Any, documents: Sequence[Any], params: SamplingParams, samples: int = 1
) -> list[dict[str, Any]]:
    """Return a model's answers to documents: by the engine on a CPU, by `generate` on a GPU.

    On a GPU the engine was slow for cut models in several processes, probably as each compiles kernels for each number
    of heads.
    """
    prompts = [tuple(encode(host.tokenizer, host.prompt(document))) for document in documents]
    by_prompt = (generated if model.device.type == "cuda" else decoded)(host, model, prompts, params, samples)
    return [{"id": str(document["id"]), "answers": texts} for document, texts in zip(documents, by_prompt, strict=True)]


def decoded(
    host: PackedHost, model: Any, prompts: Sequence[tuple[int, ...]], params: SamplingParams, samples: int
) -> list[list[str]]:
    """Return the texts of answers by the engine; sample n of each prompt has the seed n."""
    requests = [
        Request(prompt, params=params, seed=sample, tag=index)
        for index, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    texts: list[dict[int, str]] = [{} for _ in prompts]
    for request, tokens in Engine(model, host.tokenizer, deterministic=not params.do_sample).decode(requests):
        texts[request.tag][request.seed] = host.tokenizer.decode(tokens, skip_special_tokens=True)
    return [[by_seed[sample] for sample in range(samples)] for by_seed in texts]


def generated(
    host: PackedHost, model: Any, prompts: Sequence[tuple[int, ...]], params: SamplingParams, samples: int
) -> list[list[str]]:
    """Return the texts of answers by `generate`, in batches padded on the left; all samples share a seed."""
    sampling: dict[str, Any] = {"do_sample": params.do_sample, "max_new_tokens": params.max_new_tokens}
    if params.do_sample:
        sampling |= {"temperature": params.temperature, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    texts: list[list[str]] = []
    padding = host.tokenizer.eos_token_id  # not each tokenizer has a padding token
    torch.manual_seed(0)
    size = max(1, ROWS // samples)
    for batch in (prompts[start : start + size] for start in range(0, len(prompts), size)):
        longest = max(map(len, batch))
        ids = torch.tensor([[padding] * (longest - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
        tokens = model.generate(**inputs, **sampling, pad_token_id=padding)
        answers = host.tokenizer.batch_decode(tokens[:, longest:], skip_special_tokens=True)
        texts += [answers[start : start + samples] for start in range(0, len(answers), samples)]
    torch.cuda.empty_cache()  # keys and values, for other processes
    return texts


def first(entries: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the only answer to each document."""
    return [{"id": entry["id"], "answer": entry["answers"][0]} for entry in entries]
