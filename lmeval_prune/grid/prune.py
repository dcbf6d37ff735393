"""The preparation `prune`: a plan by any pruner, or the smaller checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any, ClassVar

from lmeval_prune.artefacts import content_digest, final_path
from lmeval_prune.config import Count, Seed, Use
from lmeval_prune.errors import InputError, check_exists
from lmeval_prune.grid.preparations import Preparation
from lmeval_prune.grid.task_identity import training_digest
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import WINDOW, AnswerOptions, PruneOptions, TextOptions
from lmeval_prune.pruners.parts import HEADS
from lmeval_prune.registry import class_record

logger = logging.getLogger(__name__)
READING = ("windows", "tokens", "batch", "seed", "apply_chat_template")  # settings of any text


@dataclass(frozen=True)
class Prune(Preparation):
    """A plan as `lmeval-prune prune` makes it, or the checkpoint cut by the plan.

    Attributes:
        method: name of the pruner.
        ratio: share to remove, in units of `budget`.
        budget: `parameters` or `heads`.
        options: options of the pruner.
        more: other settings of the plan: `unit`, `allocation`, `compensation`, …
        task, text: calibration text: the training split of a task, or a file.
        windows, tokens, batch, seed: settings of the calibration text.
        apply_chat_template: format the calibration questions of `task` as a chat; default: the grid's setting.
        own_answers: calibrate on the model's own answers to `windows` questions of `task`: options of
            `lmeval-prune prune --calibrate_on own`, e.g. `{max_gen_toks: 256}`; `{}`: with their defaults.
        cut: evaluate the smaller checkpoint, to measure its speed and memory; otherwise the plan is applied by hooks.
    """

    uses: ClassVar[tuple[Use, ...]] = (
        Use("a calibration text (task or text)", lambda options: options.task or options.text, READING),
        Use("a text that is not of own answers", lambda options: options.own_answers is None, ("tokens",)),
    )
    method: str
    ratio: float
    budget: str = "parameters"
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    text: str | None = None
    windows: Count = TextOptions.windows
    tokens: Count = WINDOW
    batch: Count = TextOptions.batch
    seed: Seed = 0
    apply_chat_template: bool = False
    own_answers: dict[str, Any] | None = None
    cut: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        make_pruner(self.method, self.options)
        self.prune_options()
        if self.task and self.text:
            raise InputError("prune: give the calibration text by task or by text, not both")
        if self.own_answers is not None:
            AnswerOptions.from_dict(self.own_answers, "prune.own_answers")
            self.text_options()

    def prune_options(self) -> PruneOptions:
        """Return the options of the plan."""
        if duplicates := {"ratio", "budget"} & self.more.keys():
            raise InputError(f"prune.more has no {min(duplicates)!r}; it is a setting beside `more`")
        values = {**self.more, "ratio": self.ratio, "budget": self.budget}
        return PruneOptions.from_dict(values, "prune.more")

    def text_options(self, add_bos_token: bool | None = None) -> TextOptions:
        """Return the options of the calibration text."""
        source_options: dict[str, Any] = {"tokens": self.tokens}
        if self.own_answers is not None:
            source_options = {**self.own_answers, "calibrate_on": "own"}
        reading = {name: getattr(self, name) for name in ("task", "text", "windows", "batch", "seed")}
        return TextOptions(
            **reading, **source_options, apply_chat_template=self.apply_chat_template, add_bos_token=add_bos_token
        )

    def settings(self) -> dict[str, Any]:
        """Return the fields, and a digest of the text file."""
        settings = super().settings()
        if self.text:
            check_exists(self.text, file=True)
            settings["text_content"] = content_digest(self.text)
        return settings

    def identity(self) -> dict[str, Any]:
        """Return everything that the result depends on, with the pruner's version and a task's training problems."""
        problems = {"problems": training_digest(self.task)} if self.task else {}
        pruner = make_pruner(self.method, self.options)
        record = class_record(type(pruner))
        elsewhere = {"pruner": record} if record else {}
        return {**super().identity(), "method": pruner.version, **elsewhere, **problems}

    def check(self, model_map: Any) -> None:
        """Refuse options that do not suit the method or the model, and a missing text; see `Preparation.check`."""
        from lmeval_prune.pruners.schedule import resolve_options
        from lmeval_prune.surgery.cut import check_cuttable

        pruner = make_pruner(self.method, self.options)
        options = resolve_options(self.prune_options(), pruner, model_map, pruner, bool(self.task or self.text))
        if self.cut:
            check_cuttable(model_map, HEADS in options.kinds)

    def make(self, lm: Any, folder: Path) -> None:
        """Write the plan, and the checkpoint if `cut`."""
        from lmeval_prune.planning.own_answers import text_source
        from lmeval_prune.pruners.schedule import stages
        from lmeval_prune.surgery.cut import cut_to

        pruner, model_map = make_pruner(self.method, self.options), lm.model_map
        answers_folder = final_path(folder).with_name(f".{folder.name}.responses")  # a killed run resumes here, too
        text, renew = None, None
        if self.task or self.text:
            source = text_source(lm.model, lm.tokenizer, self.text_options(lm.add_bos_token), answers_folder)
            text, renew = source(lm.model)
        work = final_path(folder).with_name(f".{folder.name}.scoring")  # a killed run resumes here
        *_, plan = stages(pruner, model_map, self.prune_options(), text, progress=logger.info, work=work, renew=renew)
        plan.save(folder / "plan.json", model_map)
        if self.cut:
            cut_to(folder / "model", model_map.model, plan, lm.tokenizer)
        for finished in (work, answers_folder):
            rmtree(finished, ignore_errors=True)

    def model_args(self, folder: Path) -> dict[str, Any]:
        """Return the checkpoint, or the plan."""
        return {"pretrained": str(folder / "model")} if self.cut else {"plan": str(folder / "plan.json")}
