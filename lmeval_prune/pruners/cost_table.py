"""The table of measured costs by shape: seconds that attention and feed-forward blocks of some sizes take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from scipy.optimize import isotonic_regression
from typing_extensions import TypedDict

from lmeval_prune.architectures import ModelMap
from lmeval_prune.architectures.sublayers import ATTENTION
from lmeval_prune.artefacts import digest, read_artefact, write_artefact
from lmeval_prune.errors import InputError
from lmeval_prune.profiling.costs import SAME_BLOCKS

SCHEMA, VERSION = "lmeval-prune/costs", 1


class Shapes(TypedDict):
    """Facts of a model on which the costs of its blocks depend."""

    model_type: str
    hidden_size: int
    head_dim: int
    dtype: str


class Measured(TypedDict):
    """What is timed: reading prompts and decoding, on a small model."""

    batch: int
    prompt: int
    new: int
    clock: str
    layers: Annotated[int, Ge(1)]  # with the measured block
    rounds: Annotated[int, Ge(1)]


class Environment(TypedDict):
    """Where it is timed."""

    device: str
    threads: int
    torch: str
    transformers: str


class Seconds(TypedDict):
    """Times in each round by size: heads and key-value heads, `9/3`, or channels, `1536`; `0` without the block."""

    attention: dict[str, list[float]]
    feed_forward: dict[str, list[float]]


class CostContents(TypedDict):
    """Fields of the artefact."""

    shapes: Shapes
    workload: Measured
    environment: Environment
    seconds: Seconds


@dataclass(frozen=True)
class CostTable:
    """Measured costs of a model's blocks.

    Attributes:
        shapes, workload, environment: what the times are of.
        seconds: of one generation by a small model in which some layers have the block, by kind and size.
    """

    shapes: Shapes
    workload: Measured
    environment: Environment
    seconds: Seconds

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table; refuse a missing or damaged file (`InputError`)."""
        content, _ = read_artefact(path, SCHEMA, VERSION, CostContents)
        return cls(*(content[name] for name in ("shapes", "workload", "environment", "seconds")))

    def save(self, path: str | Path) -> None:
        """Write the table."""
        write_artefact(path, SCHEMA, VERSION, dict(vars(self)))

    def check(self, model_map: ModelMap, path: str, any_dtype: bool = False) -> None:
        """Refuse a table of other blocks than a model's, or an unfinished one; `any_dtype`: whatever their dtype."""
        shapes = block_shapes(model_map)
        if any_dtype:
            shapes["dtype"] = self.shapes["dtype"]
        if _comparable(shapes) != _comparable(self.shapes):
            raise InputError(
                f"{path} has costs of other blocks ({_listed(self.shapes)}) than this model's ({_listed(shapes)}); "
                f"measure them by `lmeval-prune costs`"
            )
        for sizes in (self.seconds["attention"], self.seconds["feed_forward"]):
            if "0" not in sizes or {*map(len, sizes.values())} != {self.workload["rounds"]}:
                raise InputError(f"{path} is not complete; run the same `lmeval-prune costs` again")

    def cost(self, kind: str, size: str) -> float | None:
        """Return the seconds of one block, of kind `attention` or `feed_forward`; None if its size is not measured.

        It is the median over rounds of the difference to the same model without the block, fitted so that no block is
        cheaper than a smaller one (isotonic regression): a plan would choose the sizes that noise makes cheap.
        """
        sizes = self.sizes(kind)
        if size not in sizes:
            return None
        ascending = sorted(sizes, key=lambda name: int(name.partition("/")[0]))
        medians = [
            statistics.median(time - base for time, base in zip(sizes[name], sizes["0"], strict=True))
            for name in ascending
        ]
        fitted = isotonic_regression(medians).x
        return max(0.0, float(fitted[ascending.index(size)])) / int(self.workload["layers"])

    def sizes(self, kind: str) -> dict[str, list[float]]:
        """Return the times of a kind of block, by size."""
        return self.seconds["attention"] if kind == ATTENTION else self.seconds["feed_forward"]

    @property
    def record(self) -> dict[str, Any]:
        """What a plan stores about the table."""
        facts = {"workload": dict(self.workload), "environment": dict(self.environment)}
        return {**facts, "sha256": digest([facts, dict(self.seconds)])}


def _listed(shapes: Shapes) -> str:
    return ", ".join(f"{name} {value}" for name, value in shapes.items())


def _comparable(shapes: Shapes) -> dict[str, Any]:
    """Return facts of blocks with one name for classes with the same blocks."""
    return {**shapes, "model_type": SAME_BLOCKS.get(shapes["model_type"], shapes["model_type"])}


def block_shapes(model_map: ModelMap) -> Shapes:
    """Return the facts of a model on which the costs of its blocks depend; refuse blocks that are not alike."""
    config = model_map.model.config.get_text_config()
    widths = {layer.head_dim for layer in model_map.attention}
    if model_map.stacks != ("",) or len(widths) > 1 or not model_map.feed_forward:
        raise InputError(
            f"costs are measured for models of one stack with heads of one width and dense feed-forward blocks; this "
            f"{model_map.model_type} model has others"
        )
    return {
        "model_type": model_map.model_type,
        "hidden_size": config.hidden_size,
        "head_dim": model_map.attention[0].head_dim,
        "dtype": str(model_map.model.dtype).removeprefix("torch."),
    }
