"""What a filter remembers of a sequence beside its anchors (see `naive.State`), as columns of numbers.

A row for each sequence, or one for a whole run. Similarities of the warm-up are kept as their number, mean, and sum of
squared deviations.
"""

import torch

THRESHOLD, SEEN, SKIPPED, KNOWN, MEAN, DEVIATIONS = range(6)
COLUMNS = 6


def fresh(rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """States of sequences that have not begun, (rows, `COLUMNS`) in float64."""
    states = torch.zeros(rows, COLUMNS, dtype=torch.float64, device=device)
    states[:, THRESHOLD] = 1
    return states
