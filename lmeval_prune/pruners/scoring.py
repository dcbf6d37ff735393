"""Score parts of a model by the methods that are chosen for their kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext

from torch import Tensor

from lmeval_prune.architectures import ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.pruners.allocation import COMPOSITION
from lmeval_prune.pruners.base import Pruner, Scores, check_scores, make_pruner
from lmeval_prune.pruners.calibration import CalibrationText
from lmeval_prune.pruners.composition import BLOCKS
from lmeval_prune.pruners.layer_store import Removal
from lmeval_prune.pruners.options import PruneOptions
from lmeval_prune.pruners.parts import CHANNELS, DEPTH_KINDS, HEADS, KINDS, Removed, depth_parts_of, parts_of
from lmeval_prune.pruners.score_store import ScoreStore, Sums


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


def kinds_read_for(
    options: PruneOptions, pruner: Pruner, channel_pruner: Pruner, stored: Mapping[str, Tensor]
) -> list[str]:
    """Return the kinds of parts that resolved options read a text for, as they have no stored scores."""
    pruners = pruners_by_kind(pruner, channel_pruner, options)
    kinds = scored_kinds(options)
    return [kind for kind in kinds if pruners.get(kind, pruner).reads_text and not has_scores_of(stored, kind)]


def score(
    pruners: Mapping[str, Pruner],
    model_map: ModelMap,
    kinds: Collection[str],
    text: CalibrationText | None,
    removed: Removed,
    stored: Mapping[str, Tensor],
    earlier: Plan,
    store: ScoreStore | None = None,
) -> Scores:
    """Score the kinds that have no stored scores, under the `earlier` steps; in one call if one method scores all.

    `store` has the scores of a killed run, and gets those that are computed.
    """
    missing = [kind for kind in kinds if not has_scores_of(stored, kind)]
    values = dict(stored)
    means: Mapping[str, Tensor] | None = None
    has_single_pruner = pruners[HEADS] == pruners[CHANNELS]
    width, depth = [kind for kind in missing if kind in KINDS], [kind for kind in missing if kind in DEPTH_KINDS]
    groups = [width] if has_single_pruner else [[kind] for kind in width]
    for group in filter(None, (*groups, depth)):
        pruner = pruners.get(group[0], pruners[HEADS])
        name = _name_of(pruner, group, text, removed) if store else ""
        stored_scores = store.load(name) if store else None
        if stored_scores:
            scores = Scores(*stored_scores)
        else:
            sums = store.sums(name) if store and {*group} <= {*DEPTH_KINDS} else None
            scores = _computed(pruner, model_map, group, text, removed, earlier, sums)
            if store:
                store.save(name, scores.values, scores.means)
        values |= scores.values
        means = scores.means if has_single_pruner and group is width else means
    return Scores(values, means)


def _computed(
    pruner: Pruner,
    model_map: ModelMap,
    kinds: Collection[str],
    text: CalibrationText | None,
    removed: Removed,
    earlier: Plan,
    sums: Sums | None,
) -> Scores:
    """Score kinds, all of width or all of depth, by one method; arguments as in `score` and `depth_scores`."""
    with earlier.applied_to(model_map.model, model_map) if not pruner.compares_with_unpruned else nullcontext():
        if not {*kinds} <= {*KINDS}:
            before = Removal(removed, dict(earlier.compensation))
            depth = depth_parts_of(model_map, kinds)
            return check_scores(pruner, pruner.depth_scores(model_map, text, depth, before, sums), depth)
        parts = parts_of(model_map, kinds)
        return check_scores(pruner, pruner.scores(model_map, text, parts, removed), parts)


def _name_of(pruner: Pruner, kinds: Collection[str], text: CalibrationText | None, removed: Removed) -> str:
    """Return the name of scores in a store: the kinds, and a digest of what they depend on within a run."""
    read = [text.record(), *(list(ids.shape) for ids, _ in text.batches)] if text else []
    removed_members = {key: sorted(members) for key, members in removed.items() if members}
    return f"{'-'.join(kinds)}-{digest([pruner.identity, read, removed_members])}"


def has_scores_of(scores: Mapping[str, Tensor], kind: str) -> bool:
    """Return whether there are scores of a kind, as in `parts.py`."""
    return any(key.startswith(f"{kind}.") for key in scores)
