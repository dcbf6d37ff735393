"""Names of attempts at a question: `dense`, the unpruned model, or pruned heads as `L5H3` or `L5H3+L15H0`."""

from __future__ import annotations

from collections.abc import Iterable

from lmeval_prune.architectures import Head, head_names

DENSE = "dense"  # the name of the unpruned model


def is_single_head(name: str) -> bool:
    """Return whether an attempt has a single head pruned."""
    return name != DENSE and "+" not in name


def attempt_order(names: Iterable[str]) -> list[str]:
    """Sort unique names: dense, then heads by number, layer and head."""
    heads = {name: [] if name == DENSE else [Head.named(head) for head in head_names(name)] for name in names}
    return sorted(heads, key=lambda name: (len(heads[name]), heads[name]))
