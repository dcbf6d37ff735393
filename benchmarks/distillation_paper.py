"""The figures of Yu et al. (their Tables 1 to 4), and what its parameter figures could be, with the arithmetic."""

from __future__ import annotations

# Table 1, ATHENA-base: accuracy, fewer parameters, faster, fewer FLOPs; all in %
TABLE_1 = {
    "Math23k": {
        0.0: (84.4, 0.0, 0.0, 0.0),
        0.2: (84.2, 12.5, 18.4, 12.3),
        0.25: (84.0, 15.8, 22.7, 15.2),
        0.3: (83.7, 18.7, 27.5, 17.5),
    },
    "ASDiv-A": {
        0.0: (86.4, 0.0, 0.0, 0.0),
        0.2: (86.1, 13.2, 17.2, 11.5),
        0.25: (85.9, 16.2, 21.3, 14.8),
        0.3: (85.5, 19.5, 26.5, 17.2),
    },
}
# Table 2 at 25%: accuracy unpruned, accuracy pruned, fewer parameters, faster
TABLE_2 = {
    ("ATHENA-base", "Math23k"): (84.4, 84.0, 15.8, 22.7),
    ("ATHENA-base", "ASDiv-A"): (86.4, 85.9, 16.2, 21.3),
    ("ATHENA-large", "Math23k"): (86.5, 86.0, 17.4, 23.8),
    ("ATHENA-large", "ASDiv-A"): (91.0, 90.4, 18.1, 22.5),
}
# Table 3, ATHENA-base, Math23k, 25%: accuracy by α; unpruned and pruned accuracy by complexity
TABLE_3A = {0.0: 83.1, 0.3: 83.8, 0.5: 84.0, 0.7: 83.5, 1.0: 71.2}
TABLE_3B = {"low": (89.2, 88.9), "medium": (84.7, 84.2), "high": (79.3, 78.6), "all": (84.4, 84.0)}
# Table 4, the same: accuracy
TABLE_4 = {
    "dense": 84.4,
    "pruning only": 83.6,
    "without entropy": 71.2,
    "without norm": 83.1,
    "response only": 83.8,
    "feature only": 83.9,
    "random": 81.5,
    "global threshold": 82.9,
    "attention visualisation": 83.6,
    "distillation only": 84.5,
    "ours": 84.0,
}
MEMORY = 11.6  # its Table 4: % less of it in each row but dense and distillation only

# width, layers, heads and vocabulary with positions of RoBERTa's encoders; parameters of ATHENA's head part over them
ENCODERS = {"base": (768, 12, 12, 50265 + 514 + 1, 56.7e6), "large": (1024, 24, 16, 50265 + 514 + 1, 100.8e6)}


def head_share(size: str, ratio: float) -> tuple[int, int, float]:
    """What heads are worth in an ATHENA over RoBERTa.

    A head is 64 rows of three projections with their biases, and 64 columns of one.

    Args:
        size: base or large.
        ratio: share of the encoder's heads.

    Returns:
        How many heads go, how many parameters, and their share of all in %.
    """
    width, layers, heads, embedded, head_part = ENCODERS[size]
    heads_removed = int(ratio * layers * heads)
    parameters = heads_removed * (4 * width * 64 + 3 * 64)
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width  # projections, both norms
    pooler = width * width + width
    total = embedded * width + 2 * width + layers * layer + pooler + head_part
    return heads_removed, parameters, 100 * parameters / total
