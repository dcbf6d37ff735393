"""Measure and improve how well probabilities agree with outcomes, over known outcomes (NaN is unknown)."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit
from torch import Tensor


def known_cells(p: Tensor, z: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and outcomes of the known cells, shape (cells,), in float64."""
    is_known = ~z.isnan()
    return p[is_known].double().numpy(), z[is_known].double().numpy()


def log_loss(p: Tensor, z: Tensor) -> float:
    """Return the mean of −log P(outcome); probabilities are limited to 10⁻⁶ … 1 − 10⁻⁶."""
    chance, outcome = known_cells(p, z)
    chance = chance.clip(1e-6, 1 - 1e-6)
    return float(-np.where(outcome == 1, np.log(chance), np.log1p(-chance)).mean())


def brier(p: Tensor, z: Tensor) -> float:
    """Return the Brier score, the mean of (p − z)²."""
    chance, outcome = known_cells(p, z)
    return float(np.square(chance - outcome).mean())


def calibration_error(p: Tensor, z: Tensor, bins: int = 10) -> float:
    """Return the expected calibration error: Σ_b n_b/n |mean p in b − mean z in b| over bins of equal width."""
    chance, outcome = known_cells(p, z)
    index = np.minimum((chance * bins).astype(int), bins - 1)
    gaps = np.bincount(index, weights=chance - outcome, minlength=bins)
    return float(np.abs(gaps).sum() / len(chance))


def scores(p: Tensor, z: Tensor) -> dict[str, float]:
    """Return Brier score, expected calibration error and log loss."""
    return {"brier": brier(p, z), "ece": calibration_error(p, z), "log_loss": log_loss(p, z)}


def platt(p: Tensor, z: Tensor) -> tuple[float, float]:
    """Return slope and offset of Platt scaling: the minimum of the log loss of σ(slope · logit(p) + offset).

    The slope is positive, so that the order by probability stays. A weak penalty, 10⁻³ (log² slope + offset²), keeps
    both finite where all outcomes are equal.
    """
    chance, outcome = known_cells(p, z)
    if not len(chance):
        return 1.0, 0.0
    x, sign = logit(chance.clip(1e-6, 1 - 1e-6)), 2 * outcome - 1

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        slope, offset = np.exp(parameters[0]), parameters[1]
        margin = sign * (slope * x + offset)
        slack = -sign * expit(-margin)  # derivative of the log loss by the logit
        value = np.logaddexp(0, -margin).mean() + 1e-3 * np.square(parameters).sum()
        return float(value), np.array([(slack * slope * x).mean(), slack.mean()]) + 2e-3 * parameters

    slope, offset = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(-5, 5), (-20, 20)]).x
    return float(np.exp(slope)), float(offset)


def rescale(p: Tensor, slope: float, offset: float) -> Tensor:
    """Return σ(slope · logit(p) + offset), p limited to 10⁻⁶ … 1 − 10⁻⁶."""
    return (slope * p.double().logit(1e-6) + offset).sigmoid()


def cross_fitted(p: Tensor, z: Tensor) -> dict[str, Any]:
    """Return scores of probabilities before and after Platt scaling that is fitted on the other half of the rows."""
    after = p.clone()
    for half in (0, 1) if len(z) > 1 else ():
        slope, offset = platt(p[1 - half :: 2], z[1 - half :: 2])
        after[half::2] = rescale(p[half::2], slope, offset)
    return {"before": scores(p, z), "after": scores(after, z)}
