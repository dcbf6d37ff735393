"""`lmeval-prune export adapter` and `export model`, and the command lines that serve what they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from lmeval_prune.config import command
from lmeval_prune.errors import InputError
from lmeval_prune.export.vllm_plugin import STOCK

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


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
        format: peft (vLLM, lm_eval --model hf) or gguf (llama.cpp)
        served: the server's --model, if not --pretrained; for llama.cpp a GGUF file
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a mask of another model, if it fits
    """
    from lmeval_prune.architectures import Head, map_model
    from lmeval_prune.checkpoints.loading import skeleton_of
    from lmeval_prune.export.adapters import export_adapters
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
    settings, config = export_adapters(pretrained, masks, output, dtype, format, served, revision)
    print(f"\n{_adapter_line(Path(output), settings, config, None if served else revision)}")
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
        format: checkpoint (transformers, vLLM) or gguf (llama.cpp; without a plan: the unpruned model)
        zeroed: set what the plan removes to zero instead of removing it
        dtype: type of the matrices in a GGUF file: bfloat16, float16 or float32 (default: that of the weights)
        splitting: llama.cpp's name of the pre-tokenizer, if it is not recognised
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
        allow_other_model: take a plan of another model, if it fits
    """
    from lmeval_prune.interventions.plan import Plan, load_plan
    from lmeval_prune.surgery.cut import write_cut

    if plan and (blocks or heads):
        raise InputError("--plan, --blocks and --heads say what to remove; give the plan or the others")
    pruned = Plan(heads or (), blocks=blocks or (), allow_empty_layer=allow_empty_layer) if heads or blocks else None
    pruned = load_plan(plan, allow_other_model, allow_empty_layer) if plan else pruned
    if format == "gguf":
        from lmeval_prune.export.gguf import export_gguf

        export_gguf(pretrained, pruned, output, zeroed, dtype, splitting, revision)
        print(f"\nllama-server -m {quote(output)}")
    elif pruned is None:
        raise InputError("name what to remove: --plan FILE, --heads L5H3+L15H0 or --blocks L5")
    elif dtype or splitting:
        raise InputError("--dtype and --splitting are for --format gguf")
    else:
        options, comment = _vllm_options(write_cut(pretrained, pruned, output, revision, zeroed).model.config)
        print(f"\n{comment}vllm serve {quote(output)}{options}")
    return 0


def _adapter_line(output: Path, settings: Mapping[str, Any], config: Any, revision: str | None) -> str:
    """Return the command line that serves the adapters in a folder with these settings."""
    from lmeval_prune.export.manifest import read_adapters

    found = read_adapters(output).values()
    adapters = [each for each in found if all(each.get(name) == value for name, value in settings.items())]
    folder, names = output.resolve(), [adapter["name"] for adapter in adapters]
    served, dtype = settings["base"]["pretrained"], settings["dtype"]
    if settings["format"] == "gguf":
        files = " ".join(f"--lora {quote(str(folder / name / 'adapter.gguf'))}" for name in names)
        model, comment = quote(served), ""
        if not served.endswith(".gguf"):
            model, comment = "MODEL.gguf", f"# MODEL.gguf: the base model in {dtype}, not quantised\n"
        return f"{comment}llama-server -m {model} --lora-init-without-apply {files}"
    served = quote(served) + (f" --revision {quote(revision)}" if revision else "")
    rank, slots = max(adapter["rank"] for adapter in adapters), len(names) + 1  # vLLM on a CPU needs one slot more
    projection = next(iter(adapters[0]["modules"])).rpartition(".")[2]
    options, comment = _vllm_options(config)
    max_rank = next((allowed for allowed in VLLM_RANKS if allowed >= rank), rank)  # vLLM refuses more
    return (
        f"{comment}VLLM_PLUGINS=lora_filesystem_resolver,lmeval_prune VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
        f"VLLM_LORA_RESOLVER_CACHE_DIR={quote(str(folder))} "
        f"vllm serve {served}{options} --dtype {dtype} --enable-lora --max-lora-rank {max_rank} "
        f"--max-loras {slots} --max-cpu-loras {slots} --lora-target-modules {projection}"
    )


def _vllm_options(config: Any) -> tuple[str, str]:
    """Return vLLM's options for loading a model, and a comment line about them. Both are empty for stock models."""
    from lmeval_prune.checkpoints.loading import has_pruned_layers
    from lmeval_prune.surgery.model_class import unusual_head_dim

    if not has_pruned_layers(config):
        return (" --model-impl transformers" if unusual_head_dim(config) else ""), ""
    is_registered = config.architectures[0].removeprefix("Pruned") in STOCK
    comment = "# --trust-remote-code is not needed if lmeval-prune is installed\n" if is_registered else ""
    return " --trust-remote-code", comment
