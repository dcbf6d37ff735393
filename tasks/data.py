"""One loader for the data sets, used by tasks, sweeps and distillation.

Rows come from the hub, or from a local folder named by `data_dir` (lm-eval: `--metadata data_dir=…`) or
by the environment variable `LMEVAL_PRUNE_DATA`. Every row has two fields beside its own: `question`, the
text that is asked and that a router embeds, and `target`, the final answer as text.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from lmeval_prune.errors import InputError, reported

HERE = Path(__file__).parent
ASDIV_URL = (
    "https://raw.githubusercontent.com/chaochun/nlu-asdiv-dataset/883f90a9a65bf00304ba8f37423910fe743abc47/dataset"
)


@dataclass(frozen=True)
class DataSet:
    """Where a data set's splits are and how a row becomes a document.

    Attributes:
        files: local file of each split.
        hub: loads a split from its public source.
        document: makes a document of a row; None drops the row.
        packaged: the files are part of this package.
    """

    files: dict[str, str]
    hub: Callable[[str], Iterator[dict[str, Any]]] | None
    document: Callable[[dict[str, Any], str], dict[str, Any] | None]
    packaged: bool = False


def _hub(path: str, name: str | None = None, **splits: str) -> Callable[[str], Iterator[dict[str, Any]]]:
    def rows(split: str) -> Iterator[dict[str, Any]]:
        yield from datasets.load_dataset(path, name, split=splits.get(split, split))

    return rows


def _asdiv_rows(split: str, url: str = ASDIV_URL) -> Iterator[dict[str, Any]]:
    """ASDiv from its authors' repository: one XML file, and the five folds of ASDiv-A as lists of ids."""
    import xml.etree.ElementTree as ElementTree

    download = datasets.DownloadManager().download
    folds = {}
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


def _gsm8k(row: dict[str, Any], split: str) -> dict[str, Any]:
    return {**row, "target": row["answer"].rpartition("####")[2].strip()}


def _math(row: dict[str, Any], split: str) -> dict[str, Any]:
    return {
        **row,
        "level": int(re.sub(r"\D", "", str(row["level"])) or 0),
        "question": row["problem"],
        "target": row["answer"],
    }


def _asdiv(row: dict[str, Any], split: str) -> dict[str, Any]:
    question = f"{row['body']} {row['question']}".strip()
    return {**row, "question": question, "target": re.sub(r"\s*\([^()]*\)\s*$", "", row["answer"])}


def _asdiv_a(row: dict[str, Any], split: str) -> dict[str, Any] | None:
    return _asdiv(row, split) if row["asdiv_a_fold"] is not None else None


def _math23k(row: dict[str, Any], split: str) -> dict[str, Any] | None:
    if bool(row["standard_test"]) != (split == "test"):
        return None
    question = re.sub(r"\s+", "", row["segmented_text"])
    return {**row, "question": question, "target": repr(float(row["answer"])).removesuffix(".0")}


def _plain(row: dict[str, Any], split: str) -> dict[str, Any]:
    return dict(row)


_MATH23K, _ASDIV = "math23k.jsonl", "asdiv.jsonl"
DATA: dict[str, DataSet] = {
    "gsm8k": DataSet({"train": "gsm8k_train.jsonl", "test": "gsm8k_test.jsonl"}, _hub("openai/gsm8k", "main"), _gsm8k),
    "math500": DataSet({"test": "math500_test.jsonl"}, _hub("HuggingFaceH4/MATH-500"), _math),
    "asdiv": DataSet({"test": _ASDIV}, _asdiv_rows, _asdiv),
    "asdiv_a": DataSet({"test": _ASDIV}, _asdiv_rows, _asdiv_a),
    "math23k": DataSet({"train": _MATH23K, "test": _MATH23K}, None, _math23k),
    "tiny_words": DataSet({"train": "tiny/shots.jsonl", "test": "tiny/words.jsonl"}, None, _plain, packaged=True),
    "tiny_choice": DataSet({"test": "tiny/choice.jsonl"}, None, _plain, packaged=True),
}


def load(name: str, split: str = "test", data_dir: str | os.PathLike[str] | None = None) -> datasets.Dataset:
    """Load one split of a data set.

    Args:
        name: a key of `DATA`.
        split: one of its splits.
        data_dir: local folder; default `LMEVAL_PRUNE_DATA`, and without it the public source.

    Raises:
        InputError: the name or split is unknown, or the file is missing or broken.
    """
    if name not in DATA:
        raise InputError(f"unknown data set {name!r}; known: {', '.join(DATA)}")
    data = DATA[name]
    if split not in data.files:
        raise InputError(f"data set {name} has no split {split!r}; it has {', '.join(data.files)}")
    rows = _rows(name, data, split, data_dir or os.environ.get("LMEVAL_PRUNE_DATA"))
    documents = [document for row in rows if (document := data.document(row, split)) is not None]
    return datasets.Dataset.from_list(documents)


def _rows(name: str, data: DataSet, split: str, folder: str | os.PathLike[str] | None) -> Iterator[dict[str, Any]]:
    if data.packaged:
        yield from _read(HERE / data.files[split])
    elif folder:
        if not Path(folder).is_dir():
            raise InputError(f"data folder {folder} does not exist; correct data_dir or LMEVAL_PRUNE_DATA")
        plain = Path(folder) / data.files[split]
        found = [path for path in (plain, plain.with_name(plain.name + ".gz")) if path.is_file()]
        if not found:
            raise InputError(f"data folder {folder} has no {plain.name} (or {plain.name}.gz), which {name} needs")
        yield from _read(found[0])
    elif data.hub is None:
        raise InputError(
            f"{name} has no source on the hub; name a folder with {data.files[split]} in LMEVAL_PRUNE_DATA or data_dir"
        )
    else:
        try:
            yield from data.hub(split)
        except (OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
            raise InputError(
                f"{name} could not be loaded from its public source ({reason}); "
                f"name a local folder with {data.files[split]} in LMEVAL_PRUNE_DATA or --metadata data_dir=FOLDER"
            ) from error


def _read(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{path}, line {number}, is not JSON: {error}") from None


@reported
def custom_dataset(
    *, prune_data: str, prune_splits: list[str] | None = None, data_dir: str | None = None, **_: Any
) -> dict[str, datasets.Dataset]:
    """lm-eval's `custom_dataset`: the splits of a data set. Other metadata (model_args) is passed over."""
    return {split: load(prune_data, split, data_dir) for split in prune_splits or ["test"]}
