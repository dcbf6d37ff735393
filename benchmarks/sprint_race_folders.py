"""The settings, folders and questions of a race, and the costs that its stages measure."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import sprint_race_choice as race
from _record import timed
from sprint_race_plan import RacePlan, code_state

from lmeval_prune.artefacts import digest, output_lock, read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.tasks import data

STAGES = ("finetune", "plans", "sweep", "orders", "sampled", "choose", "ceiling", "test", "report")
DATA = "asdiv_a"
PROBE = 2
CODE = ("lmeval_prune", "tasks", "kernels", "pyproject.toml", "benchmarks", ":(exclude)benchmarks/results")
# The first stage that depends on a setting, and all after it do; on the others all stages depend.
FIRST_USE = {
    "plans": "plans",
    **dict.fromkeys(["max_gen_toks", "layers", "random_sets", "variants", "temperatures"], "sweep"),
    **dict.fromkeys(["draws", "twins", "seed"], "sweep"),
    **dict.fromkeys(["orders", "routers", "parts"], "orders"),
    **dict.fromkeys(["mixes", "sampling", "n"], "sampled"),
    **dict.fromkeys(["ceiling_samples", "ceiling_questions"], "ceiling"),
    **dict.fromkeys(["test_samples", "most"], "test"),
    "margin": "report",
}


class LineParser(argparse.ArgumentParser):
    """A parser whose errors are `InputError`s, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line."""
        raise InputError(f"{message.removeprefix('argument ')} (--help lists all options)")


@dataclass
class Folders:
    """The settings, folders and questions of a race, and what its stages cost.

    Attributes:
        plan: the settings.
        work: folder of models, stores and times.
        device: cpu or cuda.
        limit: number of questions of a rehearsal; None: the race.
        probe: number of questions whose answers are timed before a sweep.
        seconds: of each stage; None for one that was interrupted.
        rates: measured costs of the fine-tune and of each sweep.
        code: commits and uncommitted changes of the code at each stage.
    """

    plan: RacePlan
    plan_file: Path
    work: Path
    device: str
    limit: int | None = None
    probe: int = PROBE
    seconds: dict[str, float | None] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)
    code: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.work.is_file():
            raise InputError(f"--work {self.work} is a file; name a folder")
        self.work.mkdir(parents=True, exist_ok=True)
        for name in ("seconds", "rates", "code"):
            path = self.work / f"{name}.json"
            setattr(self, name, json.loads(path.read_text()) if path.exists() else {})

    @property
    def settings(self) -> dict[str, Any]:
        """What answers and choices depend on, as JSON."""
        return dict(json.loads(json.dumps({"limit": self.limit, **asdict(self.plan)})))

    def settings_of(self, stage: str) -> dict[str, Any]:
        """The settings on which a stage depends."""
        until = STAGES[: STAGES.index(stage) + 1]
        return {name: value for name, value in self.settings.items() if FIRST_USE.get(name, STAGES[0]) in until}

    def keep_settings(self) -> None:
        """Keep the settings; refuse others than those of a stage that is done, and of the first if anything is kept."""
        path, now = self.work / "settings.json", self.settings
        is_begun = any(self.work.glob("fold*/*")) or any(self.work.glob("*.done"))
        before = read_json(path) if path.exists() and is_begun else now
        remedies = {STAGES[0]: "give --work another folder"}
        for marker in sorted(self.work.glob("*.done")):
            remedy = f"give --work another folder, or remove {marker.name} and those of later stages to do them again"
            remedies.setdefault(stage_of(marker.stem), remedy)
        for stage, remedy in remedies.items():
            if different := sorted(name for name in self.settings_of(stage) if before.get(name) != now.get(name)):
                raise InputError(f"{self.work} holds a race with another {', '.join(different)}; {remedy}")
        write_text(path, json.dumps(now, indent=1) + "\n")

    # ------------------------------------------------------------------ folders and questions

    @property
    def choices_file(self) -> Path:
        """The file that `choose` writes."""
        return (self.work if self.note else self.plan_file.parent) / "choices.json"

    @property
    def note(self) -> str:
        """Why the race makes no claim; empty if it may."""
        return f"A rehearsal with {self.limit} questions: its figures say nothing." if self.limit else ""

    @property
    def report_folder(self) -> Path:
        """Folder of the report."""
        return self.work / "report" if self.note else self.plan_file.parent

    def model_args(self, number: int) -> dict[str, Any]:
        """Arguments of a fold's model."""
        return {"pretrained": str(self.fold(number) / "model"), "dtype": "float32", "device": self.device}

    def fold(self, number: int) -> Path:
        """Folder of a test fold."""
        return self.work / f"fold{number}"

    def store(self, number: int, part: str) -> Path:
        """Folder of the outcomes of a part; all parts but `test` ask choosing questions and share one."""
        return self.fold(number) / ("test" if part == "test" else "train")

    def splits(self, number: int) -> tuple[str, str, list[str]]:
        """Test split, choosing split and splits of the fine-tune. A rehearsal tests on a split of the fine-tune."""
        fold = self.plan.folds[number]
        tuned = fold["finetune"]
        return (tuned if self.limit else fold["test"]), fold["choosing"], [tuned]

    def texts(self, number: int, part: str) -> list[str]:
        """The questions of a model that choose (`train`) or are tested (`test`), without those that are left out.

        Those that are in both splits are divided by the seed: a share of one by the number of models chooses.
        """
        test, choosing, _ = self.splits(number)
        tested, choosers = (self.questions_of(split) for split in (test, choosing))
        if self.limit:
            texts = tested if part == "test" else choosers
            return random.Random(self.plan.seed).sample(texts, min(self.limit, len(texts)))
        both = set(tested) & set(choosers)
        in_both = [text for text in choosers if text in both]
        drawn = set(random.Random(self.plan.seed).sample(in_both, len(in_both))[number :: len(self.plan.folds)])
        if part == "test":
            return [text for text in tested if text not in drawn]
        return [text for text in choosers if text in drawn or text not in both]

    def questions_of(self, split: str) -> list[str]:
        """The questions of a split without those that are left out."""
        return [text for text in dict.fromkeys(data.load(DATA, split)["question"]) if text not in self.twins]

    @cached_property
    def twins(self) -> dict[str, str]:
        """Questions that are left out, each with its twin."""
        splits = dict.fromkeys(split for fold in self.plan.folds for split in fold.values())
        rows = list({(x["fold"], x["question"]): x for split in splits for x in data.load(DATA, split)}.values())
        texts = [row["question"] for row in rows]
        pairs = race.near_duplicates(texts, [row["fold"] for row in rows], self.plan.twins)
        return {texts[i]: texts[j] for i, j in pairs.items()}

    def check_folds(self) -> None:
        """Refuse a plan by which a model knows questions that choose or are tested, or a question is tested twice."""
        tested: dict[str, int] = {}
        for number, fold in enumerate(self.plan.folds):
            if "finetune" not in fold:
                raise InputError(f"folds: number {number} has no finetune; name the splits that its model is tuned on")
            trained = {*data.load(DATA, fold["finetune"])["question"]}
            for part, name in (("train", "choosing"), ("test", "test")):
                texts = self.texts(number, part)
                if not texts:
                    raise InputError(f"folds: number {number} has no {name} question left; give {name} another split")
                if common := trained & set(texts):
                    raise InputError(
                        f"folds: number {number} is fine-tuned on {len(common)} of its {name} questions; leave "
                        f"{fold[name]} out of {fold['finetune']}"
                    )
            if twice := [tested[text] for text in texts if text in tested]:
                raise InputError(
                    f"folds: {len(twice)} test questions of number {number} are also of number {twice[0]}; test each "
                    f"by one model"
                )
            tested |= dict.fromkeys(texts, number)

    def counts(self, folds: Sequence[int]) -> dict[str, int]:
        """Numbers of problems of all fine-tunes, and of questions of each sweep."""
        choosing, tested = ([len(self.texts(k, part)) for k in folds] for part in ("train", "test"))
        tuned = sum(len(data.load(DATA, split)) for k in folds for split in self.splits(k)[2])
        ceiling = sum(min(count, self.plan.ceiling_questions) for count in choosing)
        questions = {"train": sum(choosing), "sampled": sum(choosing), "ceiling": ceiling, "test": sum(tested)}
        return {"finetune": tuned, **questions}

    # ------------------------------------------------------------------ running

    def marker(self, name: str) -> Path:
        """The file that says that a stage is done, with a digest of the settings that it depends on and its folds."""
        return self.work / f"{name.replace(' ', '_')}.done"

    def stage(
        self,
        name: str,
        run: Callable[[], Any],
        cost: Callable[[], str] | None = None,
        folds: Sequence[int] = (),
    ) -> None:
        """Run a stage unless it is done; print its estimated and its measured time."""
        marker, content = self.marker(name), digest([self.settings_of(stage_of(name)), list(folds)])
        if marker.exists():
            if marker.read_text() != content:
                raise InputError(
                    f"{name} was done with other settings or folds; give --work another folder, or remove {marker}"
                )
            print(f"{name}: done before", flush=True)
            return
        self.note_code(name)
        is_uninterrupted = name not in self.seconds
        self.note_down("seconds", [name], None)
        if cost:
            print(f"{name}: {cost()}", flush=True)
        _, took = timed(run)
        if is_uninterrupted:
            self.note_down("seconds", [name], round(took, 1))
        write_text(marker, content)
        print(f"{name}: {took:.1f} s" + ("" if is_uninterrupted else ", after an interruption"), flush=True)

    def require(self, name: str, stage: str) -> None:
        """Refuse a stage before one that it needs is done."""
        if not self.marker(stage).exists():
            raise InputError(f"{name}: the stage {stage} is not done; run it first, to its end")

    def note_code(self, name: str) -> None:
        """Keep the commit and the uncommitted changes of the code of a stage."""
        state, before = code_state(Path(__file__).parent, CODE), self.code.get(name, [])
        if state not in before:
            self.note_down("code", [name], [*before, state])

    def note_down(self, file: str, names: Sequence[str], value: Any) -> None:
        """Set one entry, e.g. `rates.json`, `("train", "0")`, and keep those that another process has written."""
        path = self.work / f"{file}.json"
        with output_lock(path, timeout=-1):
            setattr(self, file, read_json(path) if path.exists() else {})
            entries = getattr(self, file)
            for name in names[:-1]:
                entries = entries.setdefault(name, {})
            entries[names[-1]] = value
            write_text(path, json.dumps(getattr(self, file), indent=1) + "\n")


def stage_of(name: str) -> str:
    """The stage of a step's name, e.g. `sweep 0`, or of its marker's, `sweep_0`."""
    word = name.replace("_", " ").split()[0]
    return word if word in STAGES else "test"  # the run in lm-eval
