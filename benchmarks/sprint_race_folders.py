"""The settings, folders and questions of a race, and the costs that its stages measure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from _record import timed

from lmeval_prune.artefacts import write_text
from lmeval_prune.sprint import race
from lmeval_prune.sprint.registration import RacePlan
from lmeval_prune.tasks import data

DATA = "asdiv_a"
PROBE = 2


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
    """

    plan: RacePlan
    plan_file: Path
    work: Path
    device: str
    limit: int | None = None
    probe: int = PROBE
    seconds: dict[str, float | None] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        for name in ("seconds", "rates"):
            path = self.work / f"{name}.json"
            setattr(self, name, json.loads(path.read_text()) if path.exists() else {})

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
        names = [f"fold{(number + i) % self.plan.folds}" for i in range(self.plan.folds)]
        tuned = names[2 : 2 + self.plan.finetune_folds]
        return (tuned[0] if self.limit else names[0]), names[1], tuned

    def texts(self, number: int, part: str) -> list[str]:
        """The questions of a fold that choose (`train`) or are tested (`test`), without those that are left out."""
        test, choosing, _ = self.splits(number)
        texts = data.load(DATA, test if part == "test" else choosing)["question"]
        kept = [text for text in dict.fromkeys(texts) if text not in self.twins]
        return random.Random(self.plan.seed).sample(kept, min(self.limit, len(kept))) if self.limit else kept

    @cached_property
    def twins(self) -> dict[str, str]:
        """Questions that are left out, each with its twin."""
        rows = [row for k in range(self.plan.folds) for row in data.load(DATA, f"fold{k}")]
        texts = [row["question"] for row in rows]
        found = race.near_duplicates(texts, [row["fold"] for row in rows], self.plan.twins)
        return {texts[i]: texts[j] for i, j in found.items()}

    def counts(self, folds: Sequence[int]) -> dict[str, int]:
        """Numbers of problems of all fine-tunes, and of questions of each sweep."""
        choosing, tested = ([len(self.texts(k, part)) for k in folds] for part in ("train", "test"))
        tuned = sum(len(data.load(DATA, split)) for k in folds for split in self.splits(k)[2])
        ceiling = sum(min(count, self.plan.ceiling_questions) for count in choosing)
        questions = {"train": sum(choosing), "sampled": sum(choosing), "ceiling": ceiling, "test": sum(tested)}
        return {"finetune": tuned, **questions}

    # ------------------------------------------------------------------ running

    def stage(self, name: str, run: Callable[[], Any], cost: Callable[[], str] | None = None) -> None:
        """Run a stage unless it is done; print its estimated and its measured time."""
        marker = self.work / f"{name.replace(' ', '_')}.done"
        if marker.exists():
            print(f"{name}: done before", flush=True)
            return
        is_whole = name not in self.seconds
        self.note_down("seconds", name, None)
        if cost:
            print(f"{name}: {cost()}", flush=True)
        _, took = timed(run)
        if is_whole:
            self.note_down("seconds", name, round(took, 1))
        marker.touch()
        print(f"{name}: {took:.1f} s" + ("" if is_whole else ", after an interruption"), flush=True)

    def note_down(self, file: str, name: str, value: Any) -> None:
        content = getattr(self, file)
        content[name] = value
        write_text(self.work / f"{file}.json", json.dumps(content, indent=1) + "\n")
