"""Score parts of a model by the methods that are chosen for their kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import COMPOSITION
from lmeval_prune.pruners.base import Pruner, Scores, make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.composition import BLOCKS
from lmeval_prune.pruners.layer_store import Removal
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, DEPTH_KINDS, HEADS, KINDS, Removed, depth_parts_of, parts_of


def scored_kinds(options: PruneOptions) -> tuple[str, ...]:
    """Return the kinds of parts that resolved options need scores of: for a composition, also of blocks."""
    blocks = tuple(BLOCKS[kind] for kind in options.kinds) if options.allocation == COMPOSITION else ()
    return (*options.kinds, *blocks)


def pruners_by_kind(pruner: Pruner, channel_pruner: Pruner, options: PruneOptions) -> dict[str, Pruner]:
    """Return the methods that score each kind of part; a missing kind is scored by that of heads."""
    pruners = {HEADS: pruner, CHANNELS: channel_pruner}
    if options.allocation != COMPOSITION:
        return pruners
    return pruners | dict.fromkeys(BLOCKS.values(), make_pruner(options.depth_method, {}))


def score(
    pruners: Mapping[str, Pruner],
    model_map: ModelMap,
    kinds: Collection[str],
    text: CalibrationText | None,
    removed: Removed,
    stored: Mapping[str, Tensor],
    earlier: Plan,
) -> Scores:
    """Score the kinds that have no stored scores, under the `earlier` steps; in one call if one method scores all."""
    missing = [kind for kind in kinds if not has_scores_of(stored, kind)]
    values, means = dict(stored), None
    is_one_method = pruners[HEADS] == pruners[CHANNELS]
    width, depth = [kind for kind in missing if kind in KINDS], [kind for kind in missing if kind in DEPTH_KINDS]
    groups = [width] if is_one_method else [[kind] for kind in width]
    for together in filter(None, (*groups, depth)):
        pruner = pruners.get(together[0], pruners[HEADS])
        with earlier.applied_to(model_map.model, model_map) if not pruner.compares_with_unpruned else nullcontext():
            if together[0] in DEPTH_KINDS:
                before = Removal(removed, dict(earlier.compensation))
                scores = pruner.depth_scores(model_map, text, depth_parts_of(model_map, together), before)
            else:
                scores = pruner.scores(model_map, text, parts_of(model_map, together), removed)
                means = scores.means if is_one_method else None
        values |= scores.values
    return Scores(values, means)


def has_scores_of(scores: Mapping[str, Tensor], kind: str) -> bool:
    """Return whether there are scores of a kind, as in `parts.py`."""
    return any(key.startswith(f"{kind}.") for key in scores)
