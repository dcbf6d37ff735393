"""`lmeval-prune export adapter` and `export model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.options import as_options, either


def adapter(
    pretrained: str,
    output: str,
    heads: Sequence[str] = (),
    mask: Sequence[str] = (),
    layers: tuple[int, ...] = (),
    each: str | None = None,
    dtype: str | None = None,
    format: str = "peft",
    served: str | None = None,
    revision: str | None = None,
    allow_empty_layer: bool = False,
    allow_other_model: bool = False,
) -> int:
    """Export masks as LoRA adapters, and print how to serve them.

    Args:
        pretrained: the model, as for lm_eval
        output: folder for a folder an adapter; adapters of the same weights that are there are kept
        heads: of one adapter, e.g. L5H3+L15H0; may be given several times
        mask: an artefact of one adapter; may be given several times
        layers: an adapter for every head of these layers, as a sweep prunes them
        each: an adapter for each of these heads, e.g. L5H0-3+L10H2
        dtype: type in which the server will compute: bfloat16, float16 or float32 (default: that of the weights)
        format: peft (vLLM, SGLang, lm_eval --model hf) or gguf (llama.cpp)
        served: what the server's --model will be, if not --pretrained; for llama.cpp a GGUF file
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a mask of another model, if it fits
    """
    from lmeval_prune.architectures import Head, map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.export.adapters import AdapterExport
    from lmeval_prune.export.manifest import read_adapters
    from lmeval_prune.export.servers import adapter_lines
    from lmeval_prune.interventions import HeadMask

    with as_options():
        masks = [HeadMask(one, allow_empty_layer=allow_empty_layer) for one in heads]
        masks += [_mask(one, allow_other_model, allow_empty_layer) for one in mask]
        pool = [f"L{layer}H*" for layer in layers] + ([each] if each else [])
        if pool:
            model_map = map_model(skeleton_of(pretrained, revision))
            masks += [HeadMask(str(head), allow_empty_layer=True) for head in Head.parse("+".join(pool), model_map)]
        if not masks:
            raise InputError(
                "name what is to be pruned: --heads L5H3+L15H0, --mask FILE, --layers 5,15 or --each L5H0-3"
            )
        export = AdapterExport(pretrained, masks, output, dtype, format, served, revision)
        written = kept = 0
        try:
            for name, new in export.run():
                written, kept = written + new, kept + (not new)
                if new:
                    print(f"{export.output / name}", flush=True)
        except KeyboardInterrupt:
            print(f"interrupted; the same command goes on in {output}")
            return 130
        alike = {"format": format, "base": export.base, "dtype": export.dtype}
        there = {name: one for name, one in read_adapters(output).items() if alike.items() <= one.items()}
        rank = max(one["rank"] for one in there.values())
        projection = next(iter(next(iter(there.values()))["modules"])).rpartition(".")[2]
        counts = f"{written} adapters written, {kept} kept"
        print(f"{output}: {counts}; rank {export.rank}, {export.dtype}; merged, all are exact")
        config = export.model_map.model.config
        where = (export.served, None if served else revision, export.output)
        lines = adapter_lines(*where, format, list(there), rank, export.dtype, projection, config)
        if any("vllm serve" in line for line in lines):
            size = export.memory(len(there) + 1, rank) / 1e6
            print(f"their slots take {size:.3g} MB in vLLM; with a smaller --max-loras some requests wait")
        for line in lines:
            print(f"\n{line}")
        return 0


@either("plan", "heads")
def model(
    pretrained: str,
    output: str,
    plan: str | None = None,
    heads: str | None = None,
    format: str = "checkpoint",
    zeroed: bool = False,
    dtype: str | None = None,
    splitting: str | None = None,
    revision: str | None = None,
    allow_empty_layer: bool = False,
    allow_other_model: bool = False,
) -> int:
    """Export a model without what a plan removes, and print how to serve it; a checkpoint is what `cut` writes.

    Args:
        pretrained: the model, as for lm_eval
        output: folder of the checkpoint, or the GGUF file
        plan: the plan, or a mask; an artefact
        heads: instead of a plan, e.g. L5H3+L15H0
        format: checkpoint (transformers, vLLM, SGLang) or gguf (llama.cpp; without a plan: the model as it is)
        zeroed: leave what the plan removes in the model, with zero weights
        dtype: type of the matrices in a GGUF file: bfloat16, float16 or float32 (default: that of the weights)
        splitting: what llama.cpp calls the rule by which the tokenizer splits text, where it is not recognised
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a plan of another model, if it fits
    """
    if format not in ("checkpoint", "gguf"):
        raise InputError(f"--format {format} is not known; use checkpoint or gguf")
    from lmeval_prune.export.servers import model_lines
    from lmeval_prune.interventions.plan import Plan, load_plan
    from lmeval_prune.surgery.commands import write_cut

    with as_options():
        wanted = Plan(heads, allow_empty_layer=allow_empty_layer) if heads else None
        wanted = load_plan(plan, allow_other_model, allow_empty_layer) if plan else wanted
        if format == "gguf":
            _gguf(pretrained, wanted, output, zeroed, dtype, splitting, revision)
            config = None
        else:
            if wanted is None:
                raise InputError("name what is to go: --plan FILE or --heads L5H3+L15H0")
            if dtype or splitting:
                raise InputError(
                    "--dtype and --splitting are for --format gguf; a checkpoint keeps its type and tokenizer"
                )
            done = write_cut(pretrained, wanted, output, revision, zeroed)
            config = done.model.config
        for line in model_lines(output, format, config):
            print(f"\n{line}")
        return 0


def _gguf(
    pretrained: str,
    plan: Any,
    output: str,
    zeroed: bool,
    dtype: str | None,
    splitting: str | None,
    revision: str | None,
) -> None:
    """Write a model, cut if there is a plan, as a GGUF file."""
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.pruned import manifest_of
    from lmeval_prune.checkpoints.skeleton import check_plain, skeleton_of, with_weights
    from lmeval_prune.checkpoints.tokenizer import tokenizer_of
    from lmeval_prune.export.gguf_model import check_writable_as_gguf, write_gguf_model
    from lmeval_prune.export.gguf_tensors import TYPES
    from lmeval_prune.export.gguf_tokenizer import check_tokenizer
    from lmeval_prune.surgery.cut import cut_checkpoint, identity_of

    if not output.endswith(".gguf"):
        raise InputError(f"--output {output} must end in .gguf")
    if dtype is not None and dtype not in TYPES:
        raise InputError(f"--dtype {dtype} is not known; use {', '.join(TYPES)}")
    if zeroed and not plan:
        raise InputError("--zeroed needs --plan FILE or --heads L5H3+L15H0")
    bare = skeleton_of(pretrained, revision)
    check_plain(bare, pretrained)
    check_writable_as_gguf(map_model(bare))
    tokenizer = tokenizer_of(pretrained, revision)
    if tokenizer is not None:
        check_tokenizer(tokenizer, splitting)
    check_writable(output)
    if plan:
        done = cut_checkpoint(pretrained, plan, revision, zeroed)
        written, manifest = done.model, done.manifest
    else:
        written = with_weights(bare, pretrained, revision)
        manifest = manifest_of(written) or {"parent": identity_of(map_model(written)), "stages": [], "notes": []}
    notes = [note for note in manifest["notes"] if note != manifest.get("about_class")]  # which is not used here
    manifest = {**manifest, "notes": notes}
    kind = TYPES[dtype] if dtype else None
    architecture = write_gguf_model(output, written, manifest, tokenizer, kind, splitting)
    print(f"{output}: architecture {architecture}{'' if tokenizer else ', no tokenizer'}")
    for note in notes:
        print(f"  {note}")


def _mask(path: str, allow_other_model: bool, allow_empty_layer: bool) -> Any:
    """A mask artefact, or a plan that has nothing but heads."""
    from dataclasses import replace

    from lmeval_prune.interventions import HeadMask, Plan, load_intervention

    loaded = load_intervention(path, allow_other_model)
    found = loaded.converted(HeadMask)
    if not isinstance(found, HeadMask):
        what = "channels or updated weights" if isinstance(loaded, Plan) else "no heads"
        raise InputError(
            f"{path} has {what}, which no adapter of the output projection can do; cut it: "
            f"`lmeval-prune export model --plan {path}`"
        )
    return replace(found, allow_empty_layer=found.allow_empty_layer or allow_empty_layer)
