"""`lmeval-prune export adapter` and `export model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lmeval_prune.config import command
from lmeval_prune.errors import InputError


@command(resumes=True)
def adapter(
    pretrained: str,
    output: str,
    heads: Sequence[str] = (),
    mask: Sequence[str] = (),
    layers: tuple[int, ...] = (),
    each: str | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    format: Literal["peft", "gguf"] = "peft",
    served: str | None = None,
    revision: str | None = None,
    allow_empty_layer: bool = False,
    allow_other_model: bool = False,
) -> int:
    """Export masks as LoRA adapters, and print how to serve them.

    Args:
        pretrained: the model, as for lm_eval
        output: folder for the adapters' folders; existing adapters of the same weights are kept
        heads: heads of an adapter, e.g. L5H3+L15H0; may be given several times
        mask: artefact with the heads of an adapter; may be given several times
        layers: an adapter for every head of these layers, as a sweep prunes them
        each: an adapter for each of these heads, e.g. L5H0-3+L10H2
        dtype: type in which the server will compute: bfloat16, float16 or float32 (default: that of the weights)
        format: peft (vLLM, SGLang, lm_eval --model hf) or gguf (llama.cpp)
        served: the server's --model, if not --pretrained; for llama.cpp a GGUF file
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a mask of another model, if it fits
    """
    from lmeval_prune.architectures import Head, map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.export.adapters import AdapterExport
    from lmeval_prune.export.servers import adapter_lines
    from lmeval_prune.interventions import HeadMask, load_intervention

    masks = [HeadMask(names, allow_empty_layer=allow_empty_layer) for names in heads]
    for path in mask:
        loaded = load_intervention(path, allow_other_model).converted(HeadMask)  # of a plan that removes only heads
        if not isinstance(loaded, HeadMask):
            raise InputError(f"{path} is no mask of heads alone; cut it: `lmeval-prune export model --plan {path}`")
        masks.append(replace(loaded, allow_empty_layer=loaded.allow_empty_layer or allow_empty_layer))
    pool = [f"L{layer}H*" for layer in layers] + ([each] if each else [])
    if pool:
        model_map = map_model(skeleton_of(pretrained, revision))
        masks += [HeadMask(str(head), allow_empty_layer=True) for head in Head.parse("+".join(pool), model_map)]
    if not masks:
        raise InputError("name heads to prune: --heads L5H3+L15H0, --mask FILE, --layers 5,15 or --each L5H0-3")
    export = AdapterExport(pretrained, masks, output, dtype, format, served, revision)
    written = 0
    for name, is_new in export.run():
        if is_new:
            written += 1
            print(export.output / name, flush=True)
    counts = f"{written} adapters written, {len(export.masks) - written} kept"
    print(f"{output}: {counts}; rank {export.rank}, {export.dtype}; merged, all are exact")
    for line in adapter_lines(export, None if served else revision):
        print(f"\n{line}")
    return 0


def model(
    pretrained: str,
    output: str,
    plan: str | None = None,
    heads: str | None = None,
    blocks: str | None = None,
    format: Literal["checkpoint", "gguf"] = "checkpoint",
    zeroed: bool = False,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    splitting: str | None = None,
    revision: str | None = None,
    allow_empty_layer: bool = False,
    allow_other_model: bool = False,
) -> int:
    """Export a model pruned by a plan, and print how to serve it; a checkpoint is the same as `cut` writes.

    Args:
        pretrained: the model, as for lm_eval
        output: folder of the checkpoint, or the GGUF file
        plan: artefact of a plan or a mask
        heads: instead of a plan, e.g. L5H3+L15H0
        blocks: instead of a plan, or with heads, e.g. L5+L7.attention+L9.feed_forward
        format: checkpoint (transformers, vLLM, SGLang) or gguf (llama.cpp; without a plan: the unpruned model)
        zeroed: set what the plan removes to zero instead of removing it
        dtype: type of the matrices in a GGUF file: bfloat16, float16 or float32 (default: that of the weights)
        splitting: llama.cpp's name of the pre-tokenizer, if it is not recognised
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a plan of another model, if it fits
    """
    from lmeval_prune.export.servers import model_lines
    from lmeval_prune.interventions.plan import Plan, load_plan
    from lmeval_prune.surgery.cut import write_cut

    if plan and (blocks or heads):
        raise InputError("--plan, --blocks and --heads say what to remove; give the plan or the others")
    pruned = Plan(heads or (), blocks=blocks or (), allow_empty_layer=allow_empty_layer) if heads or blocks else None
    pruned = load_plan(plan, allow_other_model, allow_empty_layer) if plan else pruned
    config = None
    if format == "gguf":
        from lmeval_prune.export.gguf_model import export_gguf

        export_gguf(pretrained, pruned, output, zeroed, dtype, splitting, revision)
    elif pruned is None:
        raise InputError("name what to remove: --plan FILE, --heads L5H3+L15H0 or --blocks L5")
    elif dtype or splitting:
        raise InputError("--dtype and --splitting are for --format gguf")
    else:
        config = write_cut(pretrained, pruned, output, revision, zeroed).model.config
    for line in model_lines(output, format, config):
        print(f"\n{line}")
    return 0
