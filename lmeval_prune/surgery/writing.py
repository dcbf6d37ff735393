"""Write a cut checkpoint and print what was removed."""

from __future__ import annotations

import json

from lmeval_prune.architectures import map_model
from lmeval_prune.artefacts import check_writable
from lmeval_prune.checkpoints.pruned import check_folder, is_trained, read_manifest
from lmeval_prune.checkpoints.skeleton import skeleton_of
from lmeval_prune.checkpoints.tokenizer import tokenizer_of
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.surgery.cut import Cut, cut_checkpoint


def write_cut(pretrained: str, plan: Plan, output: str, revision: str | None = None, keep_shapes: bool = False) -> Cut:
    """Cut a model by a plan, write its checkpoint, print a summary, and return the `Cut`; `keep_shapes` as in `cut`."""
    check_folder(output, [pretrained])
    _check_same_cut(output, pretrained, plan, revision)
    check_writable(output, folder=True)
    smaller = cut_checkpoint(pretrained, plan, revision, keep_shapes)
    smaller.save(output, tokenizer_of(pretrained, revision))
    print_cut(output, smaller)
    return smaller


def _check_same_cut(folder: str, pretrained: str, plan: Plan, revision: str | None) -> None:
    """Raise `InputError` if a folder holds a checkpoint of another model or plan, or one that was trained."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    if is_trained(manifest):
        raise InputError(f"{folder} holds a trained checkpoint, which would be lost; name another output, or delete it")
    model_map = map_model(skeleton_of(pretrained, revision))
    stage = manifest["stages"][-1]
    removed = {name: value for name, value in stage["plan"].items() if name != "made"}
    if stage["parent"]["name"] != model_map.name or stage["parent"]["revision"] != model_map.revision:
        raise InputError(f"{folder} was cut from {stage['parent']['name']}; name another output, or delete it")
    if removed != json.loads(json.dumps(plan.fit_to(model_map).settings())):
        raise InputError(f"{folder} was cut by another plan; name another output, or delete it")


def print_cut(folder: str, cut: Cut) -> None:
    """Print the numbers of parameters before and after a cut, and the notes of the manifest."""
    after, after_without_embeddings = parameters(cut.model)
    before, before_without_embeddings = parameters(cut.parent.model)
    print(f"{folder}: {type(cut.model).__name__}, {after / 1e6:.2f} of {before / 1e6:.2f} million parameters")
    without = 1 - after_without_embeddings / before_without_embeddings
    print(f"  {1 - after / before:.2%} fewer in all, {without:.2%} fewer without embeddings")
    for note in cut.manifest["notes"]:
        print(f"  {note}")
