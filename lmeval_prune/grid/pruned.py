"""A plan by any pruner, and where it is wanted the smaller checkpoint: made once, then evaluated like any variant."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from shutil import rmtree
from typing import Any

from lmeval_prune.artefacts import content_digest, final_path
from lmeval_prune.errors import InputError, nearest
from lmeval_prune.grid.preparations import Preparation
from lmeval_prune.pruners.base import make_pruner
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.settings import typed, types_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pruned(Preparation):
    """Prunes a model, as `lmeval-prune prune` does.

    Attributes:
        method: of the scores.
        ratio: share that is removed, by default of the parameters of what the method removes.
        budget: what the ratio counts, `parameters` or `heads`.
        options: of the method.
        more: what else is set of a plan: `unit`, `allocation`, `compensation`, …
        task, text: calibration text: the training split of a task, or a file.
        windows, tokens, batch, seed: of the calibration text.
        apply_chat_template: of the calibration text; left open, it is the grid's where `task` is read.
        cut: evaluate the smaller checkpoint, so that its speed and memory are measured; else the plan, tried out.

    Raises:
        InputError: something is unknown or does not suit.
    """

    method: str
    ratio: float
    budget: str = "parameters"
    options: Any = field(default_factory=dict)
    more: Any = field(default_factory=dict)
    task: str | None = None
    text: str | None = None
    windows: int = 128
    tokens: int = 128
    batch: int = 8
    seed: int = 0
    apply_chat_template: bool = False
    cut: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        make_pruner(self.method, self.options)
        self.wanted()
        if self.task and self.text:
            raise InputError("prune: give the calibration text by task or by text, not both")

    def wanted(self) -> PruneOptions:
        """What is set of the plan.

        Raises:
            InputError: something is unknown, or not of its type.
        """
        own = {one.name for one in fields(PruneOptions)} - {"ratio", "budget"}
        kinds = types_of(PruneOptions)
        if not isinstance(self.more, Mapping):
            raise InputError(f"prune.more={self.more!r} is no dictionary of settings such as unit: head")
        for name in self.more:
            if name not in own:
                raise InputError(f"prune.more has no {name!r}{nearest(name, own)}")
        given = {name: typed(f"prune.more.{name}", value, kinds[name]) for name, value in self.more.items()}
        return PruneOptions(**{"ratio": self.ratio, "budget": self.budget, **given})

    def settings(self) -> dict[str, Any]:
        """The fields, and the content of a text file; see the base class."""
        path = Path(self.text) if self.text else None
        return super().settings() | ({"text_content": content_digest(path)} if path and path.is_file() else {})

    def identity(self) -> dict[str, Any]:
        """With the version of the method; see the base class."""
        return {**super().identity(), "method": make_pruner(self.method, self.options).version}

    def make(self, lm: Any, folder: Path) -> None:
        """Write the plan, and the checkpoint if it is wanted; see the base class."""
        from lmeval_prune.pruners.calibration import check_length, read_calibration
        from lmeval_prune.pruners.schedule import check_methods, settled, stages
        from lmeval_prune.surgery.cut import cut_to

        pruner, model_map, text = make_pruner(self.method, self.options), lm.model_map, None
        options = settled(self.wanted(), pruner, model_map)
        check_methods(pruner, pruner, model_map, options, bool(self.task or self.text))
        if self.task or self.text:
            check_length(model_map.model, self.tokens)
            reading = (self.windows, self.tokens, self.batch, self.seed, self.apply_chat_template, lm.add_bos_token)
            text = read_calibration(lm.tokenizer, self.text, self.task, *reading)
        work = final_path(folder).with_name(f".{folder.name}.layers")  # a run that was killed goes on there
        *_, plan = stages(pruner, model_map, options, text, progress=logger.info, work=work)
        plan.save(folder / "plan.json", model_map)
        if self.cut:
            cut_to(folder / "model", model_map.model, plan, lm.tokenizer)
        rmtree(work, ignore_errors=True)

    def model_args(self, folder: Path) -> dict[str, Any]:
        """The checkpoint, or the plan; see the base class."""
        return {"pretrained": str(folder / "model")} if self.cut else {"plan": str(folder / "plan.json")}
