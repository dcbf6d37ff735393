"""The one idea: an intervention changes how a stock model computes while it is applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lmeval_prune.architectures import AttentionMap, find_attention


class Intervention(ABC):
    """A change to a model's computation. To add a method, write one dataclass and its `attach`."""

    @abstractmethod
    def attach(self, attention: AttentionMap, stack: ExitStack) -> None:
        """Change the model, and leave in `stack` whatever undoes the change.

        Args:
            attention: the model's attention layers.
            stack: its callbacks run, last first, when the intervention ends, by an exception too.
        """

    @contextmanager
    def applied_to(self, model: nn.Module, attention: AttentionMap | None = None) -> Iterator[AttentionMap]:
        """Apply the intervention to `model` inside a `with` block; blocks nest and compose.

        Args:
            model: a stock transformers model.
            attention: its `find_attention`, where it is already at hand or the family needs describing.

        Yields:
            The model's attention layers.

        Raises:
            InputError: the intervention does not fit the model; the model is then unchanged.
        """
        attention = attention or find_attention(model)
        with ExitStack() as stack:
            self.attach(attention, stack)
            yield attention


def add_input_hook(module: nn.Module, change: Any, stack: ExitStack) -> None:
    """Pass the first input of `module` through `change` until `stack` closes."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(inputs[0]), *inputs[1:])

    stack.callback(module.register_forward_pre_hook(hook).remove)
