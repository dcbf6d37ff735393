"""SlimGPT: removes what the output projections miss least once their other columns have made up for it.

With H the mean of x·xᵀ over tokens, removing columns S and solving for the others costs tr(W_S·((H⁻¹)_SS)⁻¹·W_Sᵀ). The
cheapest unit goes, the others make up for it, and so on; later layers lose more than the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lmeval_prune.pruners.moments import Moments
from lmeval_prune.pruners.parts import Units
from lmeval_prune.pruners.sequential import SequentialPruner
from lmeval_prune.settings import Count


@dataclass(frozen=True)
class SlimGpt(SequentialPruner):
    """Selects greedily by the error that is left after least squares.

    Attributes:
        error: of a head, `exact`, or `diagonal`: without what its own columns could make up for each other, as the
            method's reference code computes it.
        step: at least so many channels go at once; more at the beginning, a sixteenth of all and then half as many.
        greedy: compute errors anew when something has gone; `false`: all by the first ones.
    """

    allocation: ClassVar[str] = "log"
    compensates: ClassVar[str] = "least_squares"
    pairs: ClassVar[bool] = True
    afresh: ClassVar[bool] = True
    error: Literal["exact", "diagonal"] = "exact"
    step: Count = 8
    greedy: bool = True

    def unit_scores(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units) -> Tensor:
        """Return errors before anything goes; see the base class."""
        return self._errors(weight, _inverse(second), units)

    def select(self, weight: Tensor, moments: Moments, second: Tensor | None, units: Units, count: int) -> list[int]:
        """Select the cheapest unit after the other, of channels several at once; see the base class."""
        of_channels = len(units[0]) == 1
        inverse, left, selected = _inverse(second), list(range(len(units))), list[int]()
        chunk = max(self.step, len(units) // 16) if of_channels else 1
        while len(selected) < count:
            errors = self._errors(weight, inverse, [units[unit] for unit in left])
            number = min(chunk, count - len(selected)) if self.greedy else count
            cheapest = [left[index] for index in errors.argsort(stable=True)[:number].tolist()]
            columns = [column for unit in cheapest for column in units[unit]]
            selected += cheapest
            gone = set(cheapest)
            left = [unit for unit in left if unit not in gone]
            if len(selected) < count:
                weight, inverse, _ = eliminated(weight, inverse, columns)
            chunk = max(self.step, chunk // 2) if of_channels else 1
        return selected

    def _errors(self, weight: Tensor, inverse: Tensor, units: Units) -> Tensor:
        """Return what removing each unit alone would cost."""
        if len(units[0]) == 1:
            columns = [unit[0] for unit in units]
            return weight[:, columns].square().sum(0) / inverse.diagonal()[columns]
        errors = []
        for unit in units:
            lost, factor = weight[:, list(unit)], _factor(inverse, list(unit))
            if self.error == "diagonal":
                errors.append((lost.square().sum(0) / factor.diagonal().square()).sum())
            else:
                errors.append(torch.linalg.solve_triangular(factor, lost.T, upper=False).square().sum())
        return torch.stack(errors)


def eliminated(weight: Tensor, inverse: Tensor, columns: list[int]) -> tuple[Tensor, Tensor, float]:
    """Remove columns and let the others make up for them.

    Args:
        weight: (outputs, inputs).
        inverse: of the mean of x·xᵀ over the inputs that are left; anything where they are not.
        columns: that go.

    Returns:
        Weight and inverse afterwards, and what it cost: the mean squared error that it adds.
    """
    factor = _factor(inverse, columns)
    share = torch.cholesky_solve(inverse[columns], factor)  # ((H⁻¹)_SS)⁻¹ · (H⁻¹)_S,:
    lost = weight[:, columns]
    error = float(torch.linalg.solve_triangular(factor, lost.T, upper=False).square().sum())
    weight, inverse = weight - lost @ share, inverse - inverse[:, columns] @ share
    weight[:, columns] = 0.0
    return weight, inverse, error


def _factor(inverse: Tensor, columns: list[int]) -> Tensor:
    return torch.linalg.cholesky(inverse[columns][:, columns])


def _inverse(second: Tensor | None) -> Tensor:
    assert second is not None
    return torch.cholesky_inverse(torch.linalg.cholesky(second))
