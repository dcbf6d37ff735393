"""Score parts of a model by the methods that are chosen for their kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import Work, digest
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.base import Pruner, Scores, check_scores
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, HEADS, KINDS, Removal, Removed, depth_parts_of, parts_of
from lmeval_prune.pruners.stores import load_scores, save_scores, sums


def kinds_read_for(
    options: PruneOptions, pruner: Pruner, channel_pruner: Pruner, stored: Mapping[str, Tensor]
) -> list[str]:
    """Return the kinds of parts that resolved options read a text for, as they have no stored scores."""
    return [
        kind
        for kind in options.kinds
        if (channel_pruner if kind == CHANNELS else pruner).reads_text and not has_scores_of(stored, kind)
    ]


def score(
    pruners: Mapping[str, Pruner],
    model_map: ModelMap,
    kinds: Collection[str],
    text: CalibrationText | None,
    removed: Removed,
    stored: Mapping[str, Tensor],
    earlier: Plan,
    store: Work | None = None,
) -> Scores:
    """Score the kinds that have no stored scores, under the `earlier` steps; in one call if one method scores all.

    `store` has the scores of a killed run, and gets those that are computed.
    """
    missing = [kind for kind in kinds if not has_scores_of(stored, kind)]
    values = dict(stored)
    means: Mapping[str, Tensor] | None = None
    has_depth, has_single_pruner = not {*missing} <= {*KINDS}, pruners[HEADS] == pruners[CHANNELS]
    for group in filter(None, [missing] if has_depth or has_single_pruner else [[kind] for kind in missing]):
        pruner = pruners.get(group[0], pruners[HEADS])
        name = _name_of(pruner, group, text, removed) if store else ""
        if known := load_scores(store, name) if store else None:
            scores = Scores(*known)
        else:
            applied = nullcontext() if pruner.compares_with_unpruned else earlier.applied_to(model_map.model, model_map)
            with applied:
                if has_depth:
                    begun = sums(store, name) if store else None
                    before, depth = Removal(removed, dict(earlier.compensation)), depth_parts_of(model_map, group)
                    scores = check_scores(pruner, pruner.depth_scores(model_map, text, depth, before, begun), depth)
                else:
                    parts = parts_of(model_map, group)
                    scores = check_scores(pruner, pruner.scores(model_map, text, parts, removed), parts)
            if store:
                save_scores(store, name, scores.values, scores.means)
        values |= scores.values
        means = scores.means if has_single_pruner and not has_depth else means
    return Scores(values, means)


def _name_of(pruner: Pruner, kinds: Collection[str], text: CalibrationText | None, removed: Removed) -> str:
    read = [text.record(), *(list(ids.shape) for ids, _ in text.batches)] if text else []
    removed_members = {key: sorted(members) for key, members in removed.items() if members}
    return f"{'-'.join(kinds)}-{digest([pruner.identity, read, removed_members])}"


def has_scores_of(scores: Mapping[str, Tensor], kind: str) -> bool:
    """Return whether there are scores of a kind, as in `parts.py`."""
    return any(key.startswith(f"{kind}.") for key in scores)
