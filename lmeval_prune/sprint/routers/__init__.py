"""Base classes of routers: a method fits rankers, and a ranker orders the pool for embedded questions.

A method is a frozen dataclass in its own file and one line in `ROUTERS` of `options.py`, or an entry point in
`lmeval_prune.routers` of another package; its fields are its options. It yields a ranker for each combination of
option values, and `fit_embeddings` chooses among them on the validation questions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_origin

from torch import Tensor

from lmeval_prune.config import Settings, annotations_of, union_members


@dataclass(frozen=True, eq=False)
class Ranker(Settings, ABC):
    """A fitted router without its pool: orders the columns of Z for each embedded question.

    Its fields are stored with the router: tensors in `router.safetensors`, other values in `router.json`.
    """

    @abstractmethod
    def order(self, x: Tensor) -> Tensor:
        """Return columns in the order of the attempts, shape (questions, pool), from embeddings (questions, width)."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not isinstance(value, Tensor)}


@dataclass(frozen=True)
class Examples:
    """Questions that a router is fitted and chosen on."""

    x: Tensor  # embeddings of the training questions, shape (questions, width), float32
    z: Tensor  # their outcomes, shape (questions, pool): 1, 0 or NaN (unknown)
    validation_x: Tensor  # of the validation questions, perhaps none
    validation_z: Tensor
    seed: int = 0  # of initial values and of the order of questions


@dataclass(frozen=True)
class Candidate:
    """A ranker for one combination of option values."""

    values: dict[str, Any]  # JSON
    ranker: Ranker
    loss: float  # on the validation (without any, training) questions; decides between candidates with equal pass@k
    about: dict[str, Any] = field(default_factory=dict)  # other details, as JSON, for `router.json`


@dataclass(frozen=True)
class RouterMethod(Settings, ABC):
    """A method of fitting routers; a field with several values is chosen on the validation questions."""

    version: ClassVar[int] = 1  # raise it when the arithmetic changes
    ranker: ClassVar[type[Ranker]]

    def __post_init__(self) -> None:
        for name, annotation in annotations_of(type(self)).items():
            value = getattr(self, name, ())
            if get_origin(union_members(annotation)[0]) is tuple and not isinstance(value, list | tuple):
                object.__setattr__(self, name, (value,))
        super().__post_init__()

    @abstractmethod
    def candidates(self, examples: Examples) -> Iterator[Candidate]:
        """Fit a ranker on the training questions for each combination of option values."""
