"""`lmeval-prune export adapter` and `export model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmeval_prune.errors import InputError
from lmeval_prune.options import either


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
        served: what the server's --model will be, if not --pretrained
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

    masks = [HeadMask(one, allow_empty_layer=allow_empty_layer) for one in heads]
    masks += [_mask(one, allow_other_model, allow_empty_layer) for one in mask]
    pool = [f"L{layer}H*" for layer in layers] + ([each] if each else [])
    if pool:
        model_map = map_model(skeleton_of(pretrained, revision))
        masks += [HeadMask(str(head), allow_empty_layer=True) for head in Head.parse("+".join(pool), model_map)]
    if not masks:
        raise InputError("name what is to be pruned: --heads L5H3+L15H0, --mask FILE, --layers 5,15 or --each L5H0-3")
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
    there = read_adapters(output)
    kind = next(iter(there.values()))["dtype"]
    rank = max(one["rank"] for one in there.values())
    projection = next(iter(next(iter(there.values()))["modules"])).rpartition(".")[2]
    print(f"{output}: {written} adapters written, {kept} kept; rank {export.rank}, {kind}; merged, all are exact")
    if format == "peft":
        print(
            f"their slots take {export.memory(len(there) + 1) / 1e6:.0f} MB in vLLM; with a smaller --max-loras some wait"
        )
    for line in adapter_lines(export.served, export.output, format, list(there), rank, kind, projection):
        print(f"\n{line}")
    return 0


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
