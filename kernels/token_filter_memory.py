"""Settings of a filtered layer, and its memory of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import NormalDist

import torch

# Columns of a state. Similarities of the warm-up are stored as their number, mean, and sum of squared deviations.
THRESHOLD, COUNT, SKIPPED, SCORED, MEAN, DEVIATIONS = range(6)
COLUMNS = 6
SIMILARITIES = ("kv", "key", "value", "random")


@dataclass(frozen=True)
class Rule:
    """Settings of a filtered layer.

    Attributes:
        share: target share of skipped tokens, 0 to 1: `P_tail` in eq. 3.
        similarity: the vectors compared with their anchors: `kv`, `key` or `value`; or `random` numbers in their place.
        fusion: `inverse_variance`, or `as_printed` in eq. 1.
        step_size: of the threshold's feedback, eq. 4.
        smoothing: weight of the old anchor in the moving average.
        warmup: number of first tokens that never skip; their similarities set the first threshold.
        initial: the first threshold, in standard deviations from the mean similarity of the warm-up. Default: the value
            that `share` of a normal distribution exceeds.
        phase: `all`; `decode`: no token of a pass of several tokens skips, they are the warm-up, and eq. 4 counts
            the tokens that are decoded after them.
        seed, layer: of `random`.
    """

    share: float
    similarity: str = "kv"
    fusion: str = "inverse_variance"
    step_size: float = 0.05
    smoothing: float = 0.9
    warmup: int = 16
    initial: float | None = None
    phase: str = "all"
    seed: int = 0
    layer: int = 0

    @cached_property
    def quantile(self) -> float:
        """`initial`, or its default; infinite if no token or every token shall skip."""
        if self.initial is not None:
            return self.initial
        if self.share in (0, 1):
            return math.inf if self.share == 0 else -math.inf
        return -NormalDist().inv_cdf(self.share)

    @cached_property
    def kind(self) -> int:
        return SIMILARITIES.index(self.similarity)

    def of_pass(self, tokens: int) -> Rule:
        """Return the rule of a pass of so many tokens."""
        return self if self.phase == "all" else replace(self, warmup=0 if self.may_skip(tokens) else 2**62)

    def may_skip(self, tokens: int) -> bool:
        """Return whether tokens can skip that are read so many in a pass."""
        return self.phase == "all" or tokens == 1

    @property
    def as_printed(self) -> bool:
        return self.fusion == "as_printed"


@dataclass
class Memory:
    """Memory of a filtered layer with a row for each sequence; decisions update it in place."""

    started: torch.Tensor  # whether a sequence has a token, (rows,)
    anchor_key: torch.Tensor  # (rows, key-value heads, width), in float64 on a CPU, at least float32 elsewhere
    anchor_value: torch.Tensor
    states: torch.Tensor  # (rows, `COLUMNS`) in float64; a single row if all sequences share one threshold

    @staticmethod
    @torch.inference_mode(False)  # an inference tensor could not be updated outside of inference mode
    def fresh(rows: int, key: torch.Tensor, value: torch.Tensor) -> Memory:
        """Return the memory of new sequences with keys and values (…, key-value heads, tokens, width)."""
        dtype = torch.promote_types(key.dtype, torch.float32) if key.is_cuda else torch.float64

        def anchor(x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(rows, x.shape[-3], x.shape[-1], dtype=dtype, device=x.device)

        started = torch.zeros(rows, dtype=torch.bool, device=key.device)
        return Memory(started, anchor(key), anchor(value), fresh_states(rows, key.device))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(Memory)]

    @property
    def is_shared(self) -> bool:
        return len(self.states) == 1 < len(self.started)

    def rows(self, rows: torch.Tensor) -> Memory:
        return Memory(*(tensor[rows] for tensor in self.tensors))

    def write(self, rows: torch.Tensor | int, memory: Memory) -> None:
        for tensor, new in zip(self.tensors, memory.tensors, strict=True):
            tensor[rows] = new


@torch.inference_mode(False)
def fresh_states(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return states of new sequences, (rows, `COLUMNS`) in float64."""
    states = torch.zeros(rows, COLUMNS, dtype=torch.float64, device=device)
    states[:, THRESHOLD] = 1
    return states


def begin_answers(states: torch.Tensor, rule: Rule) -> None:
    """Set the first thresholds of answers from the similarities of their prompts, and count from here."""
    if math.isinf(rule.quantile) or rule.similarity == "random":  # whose numbers have mean 0 and variance 1
        states[:, THRESHOLD] = rule.quantile
    else:
        rows = states[:, SCORED] > 0
        deviations = (states[rows, DEVIATIONS] / states[rows, SCORED]).sqrt()
        states[rows, THRESHOLD] = states[rows, MEAN] + deviations * rule.quantile
    states[:, [COUNT, SKIPPED]] = 0
