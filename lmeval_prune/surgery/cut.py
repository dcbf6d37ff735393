"""Cut heads, channels and blocks out of a model by a plan.

The remaining tensors are computed by name: rows of the projections that compute a head or a channel, columns of the
projection that reads it. `kept.py` finds what stays, and `model_class.py` chooses a model class for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import (
    FAMILIES,
    ModelMap,
    loadable_fingerprints,
    map_model,
    recognise,
    tiny_model,
    uncuttable,
    weights_fingerprint,
)
from lmeval_prune.architectures.blocks import columns_of, is_transposed, layers_in
from lmeval_prune.artefacts import check_writable
from lmeval_prune.checkpoints.loading import (
    PLAN,
    check_folder,
    check_unquantised,
    manifest_of,
    save_checkpoint,
    skeleton_of,
    tokenizer_of,
    with_weights,
)
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.plan import Plan, find_projection
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.surgery.card import write_checkpoint_card
from lmeval_prune.surgery.kept import Kept, is_inside
from lmeval_prune.surgery.model_class import models_with

_HISTORY = "_lmeval_prune_history"  # attribute of a cut model in memory: its stages, and what it was trained on


@dataclass(frozen=True)
class Cut:
    """A smaller model and its provenance."""

    model: Any  # the smaller model, in evaluation mode
    manifest: dict[str, Any]  # manifest of its checkpoint
    plan: Plan  # the plan that was executed
    parent: ModelMap = field(repr=False)  # the model that was cut

    def save(self, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write the model as a checkpoint with its plan and its card; see `save_checkpoint`."""
        origin = (getattr(self.parent.model.config, "_name_or_path", ""), self.parent.revision or None)

        def add_files(unfinished: Path) -> None:
            self.plan.save(unfinished / PLAN, self.parent)
            title = Path(folder).resolve().name
            write_checkpoint_card(unfinished, title, self.model, self.manifest, origin, tokenizer is not None)

        save_checkpoint(folder, self.model, self.manifest, tokenizer, add_files, *origin)

    def report(self, folder: str) -> None:
        """Print the numbers of parameters before and after the last cut, and the notes of the manifest."""
        sizes = self.manifest["stages"][-1]["parameters"]
        (before, before_without_embeddings), (after, after_without_embeddings) = sizes["before"], sizes["after"]
        print(f"{folder}: {type(self.model).__name__}, {after / 1e6:.2f} of {before / 1e6:.2f} million parameters")
        without = 1 - after_without_embeddings / before_without_embeddings
        print(f"  {1 - after / before:.2%} fewer in all, {without:.2%} fewer without embeddings")
        for note in self.manifest["notes"]:
            print(f"  {note}")


def cut(model: Any, plan: Plan | HeadMask, keep_shapes: bool = False, revision: str | None = None) -> Cut:
    """Build a new model without the heads, channels and blocks that a plan removes; the old model does not change.

    Args:
        model: a transformers model of a known family, which may have been cut before; or the name or folder of one.
        plan: a plan, or a head mask, for this model.
        keep_shapes: zero the weights of removed units and keep the shapes, for engines that support no other shapes.
        revision: of the model, if it is loaded from the Hub.
    """
    if isinstance(model, str):
        model = with_weights(skeleton_of(model, revision), model, revision)
    model_map = map_model(model)
    plan = Plan.from_mask(plan) if isinstance(plan, HeadMask) else plan
    check_cuttable(model_map, bool(plan.heads) and not keep_shapes)
    return _cut_fitted(model_map, plan.fit_to(model_map), keep_shapes)


def cut_to(folder: str | os.PathLike[str], model: Any, plan: Plan | HeadMask, tokenizer: Any = None) -> Cut:
    smaller = cut(model, plan)
    smaller.save(folder, tokenizer)
    return smaller


def write_cut(pretrained: str, plan: Plan, output: str, revision: str | None = None, keep_shapes: bool = False) -> Cut:
    """Load and cut a model, write its checkpoint with its tokenizer, and print a summary; arguments as in `cut`."""
    check_folder(output, pretrained)
    check_writable(output, folder=True)
    smaller = cut(pretrained, plan, keep_shapes, revision)
    smaller.save(output, tokenizer_of(pretrained, revision))
    smaller.report(output)
    return smaller


def check_cuttable(model_map: ModelMap, heads: bool) -> None:
    """Raise `InputError` if a model, with or without weights, cannot be cut; `heads`: whether heads are removed."""
    reason = uncuttable(model_map)
    if heads and reason:
        raise InputError(
            f"heads cannot be cut out of this {model_map.model_type} model: {reason}; evaluate the plan by plan=FILE, "
            f"or remove channels only"
        )
    check_unquantised(model_map.model, model_map.name)
    if model_map.model_type in FAMILIES:
        return
    # of a family that is not in the table, a tiny random model is cut and compared with its plan
    tiny_map = map_model(tiny_model(model_map.model, recognise(model_map.model).depth))
    tokens = torch.arange(3, 10)[None]
    groups = [f"{layer.label}H0-{layer.group_size - 1}" for layer in tiny_map.attention if layer.kv_heads > 1]
    channels = {block.label: [0, 5] for block in tiny_map.feed_forward}
    for removed in (groups, groups[:1]):  # layers that are alike, and that differ
        if not (heads and removed) and not channels:
            continue
        plan = Plan(heads=removed if heads else (), channels=channels).fit_to(tiny_map)
        try:
            with torch.no_grad():
                with plan.applied_to(tiny_map.model, tiny_map):
                    expected = tiny_map.model(tokens, use_cache=False)[0]
                actual = _cut_fitted(tiny_map, plan, False).model(tokens, use_cache=False)[0]
            difference = (actual - expected).abs().max()
            is_same, reason = difference <= 1e-5 * expected.abs().max(), f"differs from its plan by {difference:.2g}"
        except Exception as error:  # model classes raise errors of any type
            is_same, reason = False, f"does not run ({first_line(error)})"
        if not is_same:
            raise InputError(f"a tiny {model_map.model_type} model {reason} when cut; evaluate the plan by plan=FILE")


def _cut_fitted(model_map: ModelMap, plan: Plan, keep_shapes: bool) -> Cut:
    kept, reason = Kept.of(model_map, plan, keep_shapes), ""
    tensors, family = _kept_tensors(model_map, plan, kept), model_map.attention[0].family
    with torch.random.fork_rng(devices=[]):  # building a class draws random weights, which are then replaced
        for smaller, about_class in models_with(tensors, kept):
            note, reason = about_class, kept.why_different(smaller)  # compared if blocks are removed
            if not reason:
                break
    if reason:
        raise InputError(f"this model without these blocks {reason}; keep its first layer, or evaluate by plan=FILE")
    notes = [note] if note else []
    fillers = {heads.layer.label: list(heads.fillers) for heads in kept.heads if heads.fillers}
    count = sum(map(len, fillers.values()))
    if keep_shapes:
        stay = f"{count} heads, {sum(map(len, kept.zeroed.values()))} channels and {len(kept.zeroed_outputs)} blocks"
        notes.append(f"{stay} stay with zero weights: nothing is removed")
    elif fillers:
        notes.append(f"{count} pruned heads stay as zeroed fillers, so that groups are equal: they are not removed")
    removed = {
        "heads": model_map.total_heads - sum(len(heads.heads) for heads in kept.heads),
        "heads_total": model_map.total_heads,
        "kv_heads": sum(x.kv_heads for x in model_map.attention) - sum(len(heads.kv_heads) for heads in kept.heads),
        "channels": sum(model_map.channels().values()) - sum(map(len, kept.channels.values())),
        "fillers": fillers,
        "zeroed_channels": {label: len(channels) for label, channels in kept.zeroed.items() if channels},
    }
    if kept.removed:
        removed |= {"blocks": len(kept.removed), "layers": len(kept.layers)}
    stage = {
        "parent": model_map.record(),
        "removed_blocks": list(kept.removed),
        "plan": {**plan.settings(), "made": dict(plan.provenance)},
        "removed": removed,
        "kept_heads": {heads.layer.label: list(heads.heads) for heads in kept.heads},
        "notes": notes,
        "parameters": {"before": list(parameters(model_map.model)), "after": list(parameters(smaller))},
    }
    if kept.absent or kept.layers:  # layers have new numbers if the class has fewer
        staying = [x.label for x in layers_in(model_map.model, family) if x.name not in kept.layers]
        after = [x.label for x in layers_in(smaller, family)]
        stage["kept_layers"] = dict(zip(after if len(after) == len(staying) else staying, staying, strict=True))
    earlier = getattr(model_map.model, _HISTORY, None) or manifest_of(model_map.model) or {}
    questions = {name: earlier[name] for name in ("trained_on", "validated_on") if name in earlier}
    history = {"stages": [*earlier.get("stages", []), stage], **questions}
    setattr(smaller, _HISTORY, history)
    weights = loadable_fingerprints(smaller, weights_fingerprint(smaller))
    about = {"class": type(smaller).__name__, "weights": weights, "notes": notes, "about_class": note}
    return Cut(smaller, {**about, **history}, plan, model_map)


def _kept_tensors(model_map: ModelMap, plan: Plan, kept: Kept) -> dict[str, Tensor]:
    """Return the tensors of the smaller model by name, with the compensation of the plan."""
    names = {module: name for name, module in model_map.model.named_modules()}
    tensors: dict[str, Tensor] = {name: x.detach() for name, x in model_map.model.state_dict().items()}

    def keep(name: str, numbers: Sequence[int], axis: int) -> None:
        if name in tensors:
            index = torch.tensor(numbers, device=tensors[name].device)
            tensors[name] = tensors[name].index_select(axis, index)

    def keep_rows(pieces: Iterable[tuple[nn.Module, Iterable[int]]]) -> None:
        """Keep rows of projections, in the order that they have."""
        kept_rows: dict[nn.Module, list[int]] = {}
        for module, numbers in pieces:
            kept_rows.setdefault(module, []).extend(numbers)
        for module, rows in kept_rows.items():
            keep(f"{names[module]}.weight", sorted(rows), int(is_transposed(module)))
            keep(f"{names[module]}.bias", sorted(rows), 0)

    def keep_columns(module: nn.Module, numbers: Sequence[int], zeroed: Sequence[int]) -> None:
        """Keep columns, and zero some of those that stay, by their new numbers."""
        name, axis = f"{names[module]}.weight", int(not is_transposed(module))
        if len(numbers) < tensors[name].shape[axis]:
            keep(name, numbers, axis)
        if zeroed:
            index = torch.tensor(zeroed, device=tensors[name].device)
            tensors[name] = tensors[name].index_fill(axis, index, 0)

    for name in sorted(plan.compensation):
        module = find_projection(name, model_map)
        path = f"{names[module]}.{name.rpartition('.')[2]}"
        tensor = plan.compensation[name].to(tensors[f"{names[module]}.weight"], copy=True)
        if name.endswith(".weight"):
            tensors[path] = tensor.T.contiguous() if is_transposed(module) else tensor
        else:
            tensors[path] = tensors[path] + tensor if path in tensors else tensor
    for heads in kept.heads:
        layer = heads.layer
        if not heads.unchanged:
            parts = (("q", heads.heads), ("k", heads.kv_heads), ("v", heads.kv_heads))
            spans = [layer.rows(part, number) for part, numbers in parts for number in numbers]
            keep_rows((span.module, range(span.start, span.stop)) for span in spans)
            for path, part in layer.family.head_parameters:
                keep(f"{names[layer.module]}.{path}", heads.heads if part == "q" else heads.kv_heads, 0)
        fillers = columns_of(layer, map(heads.heads.index, heads.fillers))
        keep_columns(layer.o_proj, columns_of(layer, heads.heads), fillers)
    for block in model_map.feed_forward:
        if block.label in kept.channels:
            channels, zeroed = kept.channels[block.label], kept.zeroed[block.label]
            if len(channels) < block.channels:
                starts = [(span.module, span.start) for span in map(block.rows, block.parts)]
                keep_rows((module, [start + channel for channel in channels]) for module, start in starts)
            keep_columns(block.down, channels, [index for index, channel in enumerate(channels) if channel in zeroed])
    for name in [f"{names[module]}.{part}" for module in kept.zeroed_outputs for part in ("weight", "bias")]:
        if name in tensors:
            tensors[name] = torch.zeros_like(tensors[name])
    absent = [*kept.absent, *kept.layers]
    return {name: tensor for name, tensor in tensors.items() if not is_inside(name, absent)}
