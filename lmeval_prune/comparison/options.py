"""Options of `distance`. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from lmeval_prune.config import Count, Natural, Seed, Settings, Use
from lmeval_prune.errors import InputError

OF_TASK = ("limit", "num_fewshot", "gen_kwargs", "apply_chat_template", "system_instruction", "metadata")


@dataclass(frozen=True)
class DistanceOptions(Settings):
    """Texts and settings of a measurement.

    Attributes:
        task: generative or log-likelihood task. Compared are the tokens of the dense model's greedy answers, or of the
            task's continuations
        limit: number of documents of the task
        num_fewshot: as for lm_eval
        gen_kwargs: as for lm_eval, e.g. max_gen_toks=256
        apply_chat_template: as for lm_eval
        system_instruction: as for lm_eval
        metadata: as for lm_eval, e.g. data_split=train
        text: text file, or .jsonl file with a field `text`, instead of a task: all tokens of its windows but the first
            are compared
        windows: number of windows of the text, which are read in random order of its paragraphs
        tokens: tokens of a window
        seed: seed of this order
        model_args: further arguments of the models, as for lm_eval, e.g. dtype=float32
        device: cpu or cuda; default: a GPU if there is one
    """

    uses: ClassVar[tuple[Use, ...]] = (
        Use("a task (--task)", lambda options: options.task is not None, OF_TASK),
        Use("a text (--text)", lambda options: options.text is not None, ("windows", "tokens", "seed")),
    )
    task: str | None = None
    limit: Count | None = None
    num_fewshot: Natural | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    windows: Count = 16
    tokens: Annotated[int, Ge(2)] = 256
    seed: Seed = 0
    model_args: dict[str, Any] = field(default_factory=dict)
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.task is None) == (self.text is None):
            raise InputError("name what is compared: either --task NAME or --text FILE")
