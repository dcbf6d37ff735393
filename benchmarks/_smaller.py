"""The experiment of smaller_model.py: its goal, recipes and rows, and what is stored of a row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import yaml
from typing_extensions import TypedDict

from lmeval_prune.artefacts import content_digest, digest, read_json, validate_json, write_text
from lmeval_prune.checkpoints.identity import checkpoint_identity
from lmeval_prune.distillation.corpus import corpus_identity
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.errors import InputError, did_you_mean
from lmeval_prune.training.resuming import result_settings

DENSE = "dense"
SPEEDS = "speed.json"  # measured speeds of rows and estimates
PROMPTS = "prompts.jsonl"  # questions without answers, as the task writes them: a corpus of recipes, in the work folder


class Goal(TypedDict):
    """What is to be reached; the keys are explained in smaller_model.yaml."""

    parameters: float
    speed: float
    batches: list[int]
    prompt: int
    new: int
    dtype: str
    threads: int
    rounds: int
    loss: float
    lower_bound: float


class Settings(TypedDict):
    """Contents of the experiment's file."""

    goal: Goal
    task: str
    new_tokens: int
    samples: int
    sample_temperature: float
    folds: list[int]
    choice_seeds: list[int]
    seeds: list[int]
    prompts: NotRequired[int]
    comparisons: list[list[str]]  # pairs of recipes
    dense: dict[str, Any]
    recipes: dict[str, dict[str, Any]]


class Answer(TypedDict):
    """An answer to a problem: the document's id and the text, or of a row of a results file whether it was right."""

    id: str
    answer: NotRequired[str]
    right: NotRequired[int]


class Samples(TypedDict):
    """Sampled answers to a problem, or of a row of a results file whether any was right."""

    id: str
    answers: NotRequired[list[str]]
    right: NotRequired[int]


class Record(TypedDict):
    """What is stored of a row."""

    recipe: str
    fold: int
    seed: int
    device: str
    settings: str  # digest of the recipe's options and of the weights that are fine-tuned
    weights: str  # digest of the model
    parent: str  # that of the model that was pruned; of a dense row, of the model that was fine-tuned
    seconds: float
    parameters: list[int]  # all, without embeddings
    plans: NotRequired[list[dict[str, Any]]]  # what each stage removed; a row of a results file has none
    stages: list[dict[str, Any]]  # losses and distances, from distillation.json
    validation: list[Answer]
    sampled: list[Samples]  # to the validation problems
    test: list[Answer]
    products: NotRequired[str]  # of the training: float32, tf32 or bfloat16
    answered_by: NotRequired[str]  # engine or generate
    made: NotRequired[list[dict[str, Any]]]  # commit, versions and device of each run that trained the model
    dense: NotRequired[dict[str, Any]]  # answers of the parent, if it is not the model of the dense row


@dataclass(frozen=True)
class Row:
    """One model: a recipe, or the dense model, on one fold by one seed."""

    recipe: str
    fold: int
    seed: int

    @property
    def key(self) -> str:
        """Name of the row's files."""
        return f"{self.recipe}_fold{self.fold}_seed{self.seed}"

    @property
    def dense(self) -> Row:
        """The dense model of the same fold and seed."""
        return Row(DENSE, self.fold, self.seed)


@dataclass(frozen=True)
class Experiment:
    """An experiment and the folder of its rows.

    Attributes:
        file: YAML file with the settings.
        work: folder for models, records and measurements.
        pretrained: the model that is fine-tuned.
        changes: options that replace those of the dense model and of all recipes, for rehearsals.
        recipe_changes: options that replace those of the recipes alone.
        bf16: whether trainings compute in bfloat16. Like the device, it is noted in a record, and is no setting: rows
            of a GPU and of a CPU can be of one verdict, since each is compared with its own dense model.
    """

    file: Path
    work: Path
    pretrained: str = "smollm2-135m"
    changes: dict[str, Any] = field(default_factory=dict)
    recipe_changes: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False

    @cached_property
    def settings(self) -> Any:
        """The contents of the file; `InputError` if they are not of their types."""
        try:
            content = yaml.safe_load(self.file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise InputError(f"{self.file} cannot be read ({str(error).splitlines()[0]})") from None
        settings: Any = validate_json(content, Settings, self.file)
        if DENSE in settings["recipes"]:
            raise InputError(f"{self.file}: a recipe is called {DENSE}, which is the name of the model without pruning")
        if both := set(settings["choice_seeds"]) & set(settings["seeds"]):
            raise InputError(f"{self.file}: seeds of the verdict chose the recipe ({sorted(both)}); take others")
        if odd := [pair for pair in settings["comparisons"] if len(pair) != 2]:
            raise InputError(f"{self.file}: comparisons are pairs of recipes, not {odd[0]}")
        for name in itertools.chain(*settings["comparisons"]):
            if name not in settings["recipes"]:
                raise InputError(
                    f"{self.file}: comparisons name {name}{did_you_mean(name, settings['recipes'])}, no recipe"
                )
        return settings

    @property
    def goal(self) -> Goal:
        """What is to be reached."""
        goal: Goal = self.settings["goal"]
        return goal

    def rows(self, recipes: Sequence[str], seeds: Sequence[int], folds: Sequence[int] = ()) -> Iterator[Row]:
        """Yield the rows of recipes (default: all), seeds and folds (default: all); dense rows come first."""
        self.check_names(recipes, folds, seeds)
        names = [name for name in recipes or self.settings["recipes"] if name != DENSE]
        for seed, fold in itertools.product(seeds, folds or self.settings["folds"]):
            yield from (Row(name, fold, seed) for name in (DENSE, *names))

    def rows_of(self, recipe: str, seeds: Sequence[int], folds: Sequence[int] = ()) -> list[Row]:
        """Return the rows of one recipe, without the dense models that they are made from."""
        return [row for row in self.rows([recipe], seeds, folds) if row.recipe == recipe]

    def check_names(self, recipes: Sequence[str], folds: Sequence[int] = (), seeds: Sequence[int] = ()) -> None:
        """Raise an `InputError` for a recipe, a fold or a seed that does not exist."""
        for name in recipes:
            if name not in self.settings["recipes"] and name != DENSE:
                raise InputError(f"there is no recipe {name}{did_you_mean(name, self.settings['recipes'])}")
        known = {"fold": self.settings["folds"], "seed": [*self.settings["choice_seeds"], *self.settings["seeds"]]}
        for kind, numbers in (("fold", folds), ("seed", seeds)):
            for number in numbers:
                if number not in known[kind]:
                    raise InputError(f"there is no {kind} {number}; {self.file.name} has {known[kind]}")

    @cached_property
    def base(self) -> str:
        """Digest of the weights that are fine-tuned."""
        return checkpoint_identity(self.pretrained)

    def digest(self, row: Row) -> str:
        """Return a digest of all that a row's result depends on, but for its parent.

        Defaults do not count, so that rows stay valid when `distill` gets further options.
        """
        made = {
            field.name: field.default_factory() for field in fields(DistillOptions) if callable(field.default_factory)
        }
        made |= {field.name: field.default for field in fields(DistillOptions) if field.default is not MISSING}
        defaults = json.loads(json.dumps(made))
        options = self._options(row, bf16=False)
        settings = {k: v for k, v in result_settings(options).items() if v != defaults.get(k)}
        settings["pretrained"] = self.base
        if corpus := settings.get("corpus"):
            settings["corpus"] = self._prompts if corpus == str(self.work / PROMPTS) else corpus_identity(corpus)
        answering = [self.settings[name] for name in ("new_tokens", "samples", "sample_temperature")]
        return digest([settings, answering])

    @cached_property
    def _prompts(self) -> str:
        """Digest of the prompts of the work folder."""
        if not (self.work / PROMPTS).is_file():
            raise InputError(f"{self.work} has no {PROMPTS}; write it by the command problems, without --recipes")
        return content_digest(self.work / PROMPTS)

    def options(self, row: Row) -> DistillOptions:
        """Return the options by which a row's model is made; `InputError` if they are invalid."""
        return self._options(row, self.bf16)

    def _options(self, row: Row, bf16: bool) -> DistillOptions:
        is_dense = row.recipe == DENSE
        own = self.settings["dense"] if is_dense else self.settings["recipes"][row.recipe]
        values = {
            **own,
            **self.changes,
            **({} if is_dense else self.recipe_changes),
            "pretrained": self.pretrained if is_dense else str(self.model(row.dense)),
            "output": str(self.model(row)),
            "task": self.settings["task"],
            "test": f"fold{row.fold}",
            "seed": row.seed,
        }
        if values.get("corpus") == PROMPTS:
            values["corpus"] = str(self.work / PROMPTS)
        if bf16:
            values["trainer"] = {**values.get("trainer", {}), "bf16": True}
        if is_dense:  # of `changes`, what is removed is for the recipes
            values |= {name: own[name] for name in ("ratio", "ffn_ratio", "stages") if name in own}
        return DistillOptions.from_dict(values, f"the recipe {row.recipe} of {self.file.name}")

    def model(self, row: Row) -> Path:
        """Return the folder of a row's model."""
        return self.work / "models" / row.key

    def path(self, row: Row) -> Path:
        """Return the file of a row's record."""
        return self.work / "rows" / f"{row.key}.json"

    def record(self, row: Row) -> Any:
        """Read a row's record; None if it is not made yet."""
        path = self.path(row)
        return self._read(path) if path.is_file() else None

    def records(self) -> dict[Row, Any]:
        """Read all records, of whatever recipes."""
        records = [self._read(path) for path in sorted((self.work / "rows").glob("*.json"))]
        return {Row(record["recipe"], record["fold"], record["seed"]): record for record in records}

    def _read(self, path: Path) -> Any:
        """Read a record; `InputError` if it is of other settings or another model."""
        record: Any = read_json(path, Record)
        row = Row(record["recipe"], record["fold"], record["seed"])
        if row.recipe not in (DENSE, *self.settings["recipes"]):
            raise InputError(
                f"{path} is a row of the recipe {row.recipe}, which {self.file.name} has no more; put it back, "
                f"or move the row out of this folder"
            )
        if record["settings"] != self.digest(row):
            raise InputError(
                f"{path} is a row of other settings or of another model than {self.pretrained}; give the --experiment, "
                f"--changes, --recipe_changes and --pretrained that made it, another name for a changed recipe, or "
                f"another folder"
            )
        return record

    def take(self, folder: Path) -> int:
        """Copy the records of another folder, or of another work folder, that are not here; return their number.

        A row whose parent is not the model of the dense row here gets the answers of the dense row there;
        `InputError`, before anything is copied, if that is not its parent, either.
        """
        folder = folder / "rows" if (folder / "rows").is_dir() else folder
        records = {path.name: self._read(path) for path in sorted(folder.glob("*.json")) if path.name != SPEEDS}
        new = {name: record for name, record in records.items() if not (self.work / "rows" / name).is_file()}
        for name, record in new.items():
            row = Row(record["recipe"], record["fold"], record["seed"])
            other_dense = records.get(f"{row.dense.key}.json")
            dense = self.record(row.dense) or other_dense
            if row.recipe == DENSE or record["parent"] == (record.get("dense") or dense or {}).get("weights"):
                continue
            if other_dense is None or other_dense["weights"] != record["parent"]:
                raise InputError(
                    f"the row {folder / name} was pruned from a model whose answers neither {folder} nor {self.work} "
                    f"has; copy its dense row, too, or make the row again"
                )
            new[name] = {**record, "dense": other_dense}
        for name, record in new.items():
            write_text(self.work / "rows" / name, json.dumps(record) + "\n")
        return len(new)

    def give(self, row: Row, folder: Path) -> None:
        """Copy a row's record to another folder."""
        write_text(folder / f"{row.key}.json", self.path(row).read_text(encoding="utf-8"))
