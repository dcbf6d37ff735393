"""Write a cut checkpoint and print what was removed."""

from __future__ import annotations

from lmeval_prune.artefacts import check_writable
from lmeval_prune.checkpoints.pruned import check_folder
from lmeval_prune.checkpoints.tokenizer import tokenizer_of
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.profiling.costs import parameters
from lmeval_prune.surgery.cut import Cut, cut_checkpoint


def write_cut(pretrained: str, plan: Plan, output: str, revision: str | None = None, keep_shapes: bool = False) -> Cut:
    """Cut a model by a plan, write its checkpoint, print a summary, and return the `Cut`; `keep_shapes` as in `cut`."""
    check_folder(output, [pretrained])
    check_writable(output, folder=True)
    smaller = cut_checkpoint(pretrained, plan, revision, keep_shapes)
    smaller.save(output, tokenizer_of(pretrained, revision))
    print_cut(output, smaller)
    return smaller


def print_cut(folder: str, cut: Cut) -> None:
    """Print the numbers of parameters before and after a cut, and the notes of the manifest."""
    after, after_without_embeddings = parameters(cut.model)
    before, before_without_embeddings = parameters(cut.parent.model)
    print(f"{folder}: {type(cut.model).__name__}, {after / 1e6:.2f} of {before / 1e6:.2f} million parameters")
    without = 1 - after_without_embeddings / before_without_embeddings
    print(f"  {1 - after / before:.2%} fewer in all, {without:.2%} fewer without embeddings")
    for note in cut.manifest["notes"]:
        print(f"  {note}")
