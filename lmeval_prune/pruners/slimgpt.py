"""Methods that prune layer by layer: Wanda-sp and SlimGPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lmeval_prune.config import Count
from lmeval_prune.pruners.moments import Moments
from lmeval_prune.pruners.parts import Units
from lmeval_prune.pruners.sequential import SequentialPruner


@dataclass(frozen=True)
class WandaSp(SequentialPruner):
    """Scores a column by mean |W_j| · root mean square of its input, and a head by the sum over its columns."""

    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        columns = weight.abs().mean(0) * moments.mean_square.sqrt()
        return columns[torch.tensor(units)].sum(1)


@dataclass(frozen=True)
class SlimGpt(SequentialPruner):
    """Removes the units whose loss the remaining columns can compensate best.

    With H the mean of x·xᵀ over tokens, removing columns S and solving for the others costs tr(W_S·((H⁻¹)_SS)⁻¹·W_Sᵀ).
    The cheapest unit is removed, the others are updated, and so on. Later layers lose more than the first ones.

    Attributes:
        error: of a head: `exact`, or `diagonal`: the reference code's error, which ignores that a head's own columns
            compensate for each other.
        step: minimum number of channels that are removed at once; the first step removes a sixteenth of them, each
            later one half as many.
    """

    allocation: ClassVar[str] = "log"
    compensates: ClassVar[str] = "least_squares"
    needs_second: ClassVar[bool] = True
    remeasure_down: ClassVar[bool] = True
    error: Literal["exact", "diagonal"] = "exact"
    step: Count = 8

    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Return the error of removing each unit first."""
        return self._errors(weight, _inverse(second), units)

    def select(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units, count: int) -> list[int]:
        are_channels = len(units[0]) == 1
        inverse, remaining, selected = _inverse(second), list(range(len(units))), list[int]()
        chunk = max(self.step, len(units) // 16) if are_channels else 1
        while len(selected) < count:
            errors = self._errors(weight, inverse, [units[unit] for unit in remaining])
            number = min(chunk, count - len(selected))
            cheapest = [remaining[index] for index in errors.argsort(stable=True)[:number].tolist()]
            selected += cheapest
            removed = set(cheapest)
            remaining = [unit for unit in remaining if unit not in removed]
            if len(selected) < count:
                columns = [column for unit in cheapest for column in units[unit]]
                weight, inverse = eliminated(weight, inverse, columns)
            chunk = max(self.step, chunk // 2) if are_channels else 1
        return selected

    def _errors(self, weight: Tensor, inverse: Tensor, units: Units) -> Tensor:
        if len(units[0]) == 1:
            columns = [unit[0] for unit in units]
            return weight[:, columns].square().sum(0) / inverse.diagonal()[columns]
        errors = []
        for unit in units:
            removed, factor = weight[:, list(unit)], _factor(inverse, list(unit))
            if self.error == "diagonal":
                errors.append((removed.square().sum(0) / factor.diagonal().square()).sum())
            else:
                errors.append(torch.linalg.solve_triangular(factor, removed.T, upper=False).square().sum())
        return torch.stack(errors)


def eliminated(weight: Tensor, inverse: Tensor, columns: list[int]) -> tuple[Tensor, Tensor]:
    """Remove columns and update the others by least squares.

    `weight` is (outputs, inputs) and `inverse` the inverse of the mean of x·xᵀ over the remaining inputs. Returns both
    after the removal.
    """
    share = torch.cholesky_solve(inverse[columns], _factor(inverse, columns))  # ((H⁻¹)_SS)⁻¹ · (H⁻¹)_S,:
    weight, inverse = weight - weight[:, columns] @ share, inverse - inverse[:, columns] @ share
    weight[:, columns] = 0.0
    return weight, inverse


def _factor(inverse: Tensor, columns: list[int]) -> Tensor:
    return torch.linalg.cholesky(inverse[columns][:, columns])


def _inverse(second: Tensor | None) -> Tensor:
    assert second is not None
    return torch.cholesky_inverse(torch.linalg.cholesky(second))
