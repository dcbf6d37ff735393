"""Data sets for tasks, sweeps and distillation.

Rows come from the hub, or from a local folder: `data_dir` (lm-eval: `--metadata data_dir=…`) or the environment
variable `LMEVAL_PRUNE_DATA`. Each document has its row's fields and two more: `question`, the text of the prompt, which
a router embeds, and `target`, the final answer as text.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from lmeval_prune.errors import InputError, did_you_mean, print_input_errors
from lmeval_prune.scoring import complexity, readings
from lmeval_prune.scoring.verifier import require_math_verify
from lmeval_prune.tasks.splits import split_names, split_parts

Row = dict[str, Any]
HERE = Path(__file__).parent
ASDIV_URL = (
    "https://raw.githubusercontent.com/chaochun/nlu-asdiv-dataset/883f90a9a65bf00304ba8f37423910fe743abc47/dataset"
)


@dataclass(frozen=True)
class DataSet:
    """The sources of a data set's splits, and the conversion of rows to documents."""

    files: dict[str, str]  # of each stored split, in this package or a local folder
    document: Callable[[Row], Row | None] = dict  # of a row; None drops it
    hub: Callable[[str], Iterator[Row]] | None = None  # loads a stored split from its public source
    parts: dict[str, Callable[[list[Row]], list[Row]]] = field(default_factory=dict)  # further splits, of split "all"

    @property
    def splits(self) -> list[str]:
        return [*self.files, *self.parts]


def _hub_rows(split: str, path: str, name: str | None = None, train: str | None = None) -> Iterator[Row]:
    return iter(datasets.load_dataset(train if train and split == "train" else path, name, split=split))


def _asdiv_rows(split: str, url: str = ASDIV_URL) -> Iterator[Row]:
    """Yield the rows of ASDiv from its repository: an XML file, and lists of ids for the five folds of ASDiv-A."""
    import xml.etree.ElementTree as ElementTree

    download = datasets.DownloadManager().download
    folds: dict[str, int] = {}
    for fold in range(5):
        text = Path(download(f"{url}/nfolds/asdiv-a/fold{fold}.txt")).read_text(encoding="utf-8")
        folds |= {line.strip(): fold for line in text.splitlines() if line.strip()}
    for problem in ElementTree.parse(download(f"{url}/ASDiv.xml")).iter("Problem"):
        field = {child.tag: (child.text or "").strip() for child in problem}
        identity = problem.get("ID", "")
        yield {
            "id": identity,
            "grade": int(problem.get("Grade", 0)),
            "source": problem.get("Source", ""),
            "body": field["Body"],
            "question": field["Question"],
            "solution_type": field.get("Solution-Type", ""),
            "answer": field["Answer"],
            "formula": field.get("Formula", ""),
            "asdiv_a_fold": folds.get(identity),
        }


def _math(row: Row) -> Row | None:
    if not row["answer"].strip():  # one row of the training set
        return None
    level = int(re.sub(r"\D", "", str(row["level"])) or 0)
    subject = row.get("subject") or row.get("type")
    return {**row, "level": level, "subject": subject, "question": row["problem"], "target": row["answer"]}


def _asdiv(row: Row) -> Row:
    question = f"{row['body']} {row['question']}".strip()
    target = re.sub(r"\s*\((?!\d)[^()]*\)\s*(?=;|$)", "", row["answer"])  # without its unit
    return {**row, "question": question, "target": target}


def _asdiv_a(row: Row) -> Row | None:
    fold = row["asdiv_a_fold"]
    return None if fold is None else {**_asdiv(row), "fold": fold, "complexity": complexity(row["formula"])}


_CONSTANTS = {"x1": "1", "x2": "2", "x3_1416": "157/50"}  # of Math23k's equations; pi is 3.14 there


def _math23k(row: Row) -> Row:
    """Add the complexity and `names`: values of n0, n1, … and of the constants as exact fractions."""
    numbers = {f"n{i}": str(readings(number)[-1]) for i, number in enumerate(row["numbers"]) if readings(number)}
    return {
        **row,
        "question": re.sub(r"\s+", "", row["segmented_text"]),
        "target": repr(float(row["answer"])).removesuffix(".0"),
        "names": {**_CONSTANTS, **numbers},
        "complexity": complexity(row["equation"]),
    }


def stratified(rows: list[Row], part: str, ratios: tuple[int, int, int], by: str, seed: int = 0) -> list[Row]:
    """Return the train, validation or test part of a random split, stratified by the field `by`.

    Each stratum is shuffled with its own generator (seeded by `seed` and the stratum) and cut by the ratios, rounded
    down for validation and test; rows keep their order.
    """
    strata: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        strata.setdefault(row[by], []).append(i)
    chosen: list[int] = []
    for stratum, indices in strata.items():
        random.Random(f"{seed}:{stratum}").shuffle(indices)
        validation, test = (len(indices) * ratio // sum(ratios) for ratio in ratios[1:])
        cuts = {"test": indices[:test], "validation": indices[test : test + validation]}
        chosen += cuts.get(part, indices[test + validation :])
    return [rows[i] for i in sorted(chosen)]


def _where(name: str, value: Any) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row for row in rows if row[name] == value]


def _parts(ratios: tuple[int, int, int], by: str) -> dict[str, Callable[[list[Row]], list[Row]]]:
    strata = {x: partial(stratified, part=x, ratios=ratios, by=by) for x in ("train", "validation", "test")}
    folds = {f"fold{number}": _where("fold", number) for number in range(5)}
    return folds | {f"stratified_{part}": select for part, select in strata.items()}


DATA: dict[str, DataSet] = {
    "gsm8k": DataSet(
        {"train": "gsm8k_train.jsonl", "test": "gsm8k_test.jsonl"},
        lambda row: {**row, "target": row["answer"].rpartition("####")[2].strip()},
        partial(_hub_rows, path="openai/gsm8k", name="main"),
    ),
    "math500": DataSet(
        {"train": "math_train.jsonl", "test": "math500_test.jsonl"},
        _math,
        partial(_hub_rows, path="HuggingFaceH4/MATH-500", train="rasbt/math_full_minus_math500"),
    ),
    "asdiv": DataSet({"test": "asdiv.jsonl"}, _asdiv, _asdiv_rows),
    "asdiv_a": DataSet({"all": "asdiv.jsonl"}, _asdiv_a, _asdiv_rows, _parts((8, 1, 1), "solution_type")),
    "math23k": DataSet(
        {"all": "math23k.jsonl"},
        _math23k,
        parts={
            "train": _where("standard_test", False),
            "test": _where("standard_test", True),
            **_parts((7, 1, 2), "complexity"),
        },
    ),
    "tiny_words": DataSet({"train": "tiny/shots.jsonl", "test": "tiny/words.jsonl"}),
    "tiny_choice": DataSet({"test": "tiny/choice.jsonl"}),
    "tiny_cloze": DataSet(
        {"train": "tiny/cloze_train.jsonl", "test": "tiny/cloze_test.jsonl"},
        lambda row: {**row, "target": row["choices"][row["gold"]]},
    ),
}


def load(name: str, split: str = "test", data_dir: str | os.PathLike[str] | None = None) -> datasets.Dataset:
    """Load a split of a data set.

    Args:
        name: a key of `DATA`.
        split: one of its splits, or slices and sums of them as in `datasets`: `fold0+fold1[:50%]`.
        data_dir: local folder; default: `LMEVAL_PRUNE_DATA`; if that is unset, the public source.
    """
    data = DATA[name]
    folder = data_dir or os.environ.get("LMEVAL_PRUNE_DATA") or ""
    parts = []
    for instruction in split_parts(split):
        [part] = split_names(instruction)
        if part not in data.splits:
            raise InputError(f"data set {name} has no split {part!r}; it has {', '.join(data.splits)}")
        documents = _all_documents(name, data, part, folder)
        if instruction != part:
            [cut] = datasets.ReadInstruction.from_spec(instruction).to_absolute({part: len(documents)})
            documents = documents[cut.from_ : cut.to]
        parts.append(documents)
    keys = [{json.dumps(row, sort_keys=True, default=str) for row in rows} for rows in parts]
    if len(set().union(*keys)) < sum(map(len, keys)):
        raise InputError(f"{name}: parts of {split} have documents in common, which would count twice")
    return datasets.Dataset.from_list([row for rows in parts for row in rows])


def _all_documents(name: str, data: DataSet, split: str, folder: str | os.PathLike[str]) -> list[Row]:
    """Read a file, or the public source, and return the documents of a split."""
    stored = split if split in data.files else "all"
    packaged = HERE / data.files[stored]
    if packaged.is_file() or folder:
        path = packaged if packaged.is_file() else Path(folder) / data.files[stored]
        compressed = path.with_name(f"{path.name}.gz")
        is_compressed = compressed.is_file() and not path.is_file()
        with gzip.open(compressed) if is_compressed else path.open("rb") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    elif data.hub is None:
        raise InputError(f"{name} is not on the hub; name a folder with {data.files[stored]} in LMEVAL_PRUNE_DATA")
    else:
        rows = [*data.hub(stored)]
    documents = [document for row in rows if (document := data.document(row)) is not None]
    for document in documents:  # no response could be right
        if document.get("target", "-").strip().lower() in ("", "nan", "inf", "-inf"):
            raise InputError(f"{name}: an answer is {document['target']!r}")
    return data.parts[split](documents) if split in data.parts else documents


@print_input_errors
def custom_dataset(
    *,
    prune_data: str,
    prune_test: str = "test",
    prune_train: str | None = None,
    data_dir: str | None = None,
    data_split: str | None = None,
    **others: Any,
) -> dict[str, datasets.Dataset]:
    """Load the data of a task for lm-eval: the questions as split `test`, the few-shot examples as `train`.

    Args:
        prune_data: a key of `DATA`.
        prune_test, prune_train: splits of the questions and of the few-shot examples.
        data_dir, data_split: from `--metadata`: local folder; another split for the questions.
        others: other metadata, such as the model_args, is ignored.
    """
    for name in others:  # another split or folder would be read without a word
        if hint := did_you_mean(name, ("data_dir", "data_split", "prune_test", "prune_train"), cutoff=0.8):
            raise InputError(f"unknown metadata {name}{hint}")
    if data_split and prune_train in split_names(data_split):
        raise InputError(
            f"a question could be among its few-shot examples, which are of {prune_train}: name another data_split"
        )
    if prune_data == "math500":
        require_math_verify()
    test = load(prune_data, data_split or prune_test, data_dir)
    return {"test": test} | ({"train": load(prune_data, prune_train, data_dir)} if prune_train else {})
