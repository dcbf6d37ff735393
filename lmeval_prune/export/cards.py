"""Cards of exported adapters and GGUF files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.cards.card import Card, code, command_section, quoted, table
from lmeval_prune.cards.checkpoint import (
    INHERITED,
    UNTRAINED,
    auto_class,
    plans,
    pruning_tags,
    what_was_removed,
    without,
)
from lmeval_prune.cards.command import without_folders
from lmeval_prune.cards.origin import Origin
from lmeval_prune.checkpoints import embedded

MANIFEST_KEY = "the metadata `lmeval_prune.manifest` of the file"
GGUF_SUFFIX = ".README.md"  # of a GGUF file's card, which stands beside it: several files may share a folder


def gguf_card_path(path: str) -> Path:
    """Return the path of a GGUF file's card."""
    return Path(path).with_suffix(GGUF_SUFFIX)


def adapter_card(export: Any, name: str, heads: Mapping[str, Sequence[int]]) -> Card:
    """Return the card of an adapter of an `AdapterExport`; `heads` are the removed heads by layer."""
    origin, model = Origin.of(export.pretrained, export.revision), export.model_map.model
    count = sum(map(len, heads.values()))
    rows = [{"layer": label, "heads": ", ".join(map(str, numbers))} for label, numbers in heads.items()]
    is_gguf = export.format == "gguf"
    instructions = _with_llamacpp(name) if is_gguf else _with_peft(name, export.pretrained, model, export.dtype)
    limits = (
        f"It fits the weights that it was computed from, in {export.dtype}, and no others: not a fine-tuned, quantised "
        f"or converted copy. Merged in that type, the weights of these heads are exactly zero; a server that does not "
        f"merge leaves rounding errors in 16 bits. Nothing becomes smaller or faster. {UNTRAINED} {INHERITED}"
    )
    return Card(
        name,
        origin,
        "adapter",
        "gguf" if is_gguf else "peft",
        ["lora", "pruned"],
        f"A LoRA adapter that prunes {count} attention head{'s' * (count > 1)} of {origin.text}.",
        {
            "What is pruned": f"{table(rows, 'layer')}\n\nLayers and heads are counted from zero. Rank {export.rank}.",
            "How it was made": command_section(
                "For the output projection W of a layer and the rows A of the identity that select the inputs of the "
                "pruned heads, the update is B·A with B = −W·Aᵀ. It was computed, not trained."
            ),
            "How to load it": instructions,
            "Limits": limits,
        },
        "text-generation" if model.can_generate() and not model.config.is_encoder_decoder else None,
    )


def _with_peft(name: str, pretrained: str, model: Any, dtype: str) -> str:
    shown = without_folders(pretrained)
    if embedded.name_of(pretrained) == pretrained:
        lines = [
            "import torch",
            "from peft import PeftModel",
            "from lmeval_prune import load_pretrained",
            "",
            f"model = load_pretrained({quoted(shown)}, dtype=torch.{dtype})  # the weights that it was computed from",
        ]
    else:
        auto = auto_class(model)
        lines = [
            "import torch",
            "from peft import PeftModel",
            f"from transformers import {auto}",
            "",
            f"model = {auto}.from_pretrained({quoted(shown)}, dtype=torch.{dtype})  # what it was computed from",
        ]
    lines += [
        f"model = PeftModel.from_pretrained(model, {quoted(name)}).merge_and_unload()  # this folder, or its Hub name",
        "print(model(torch.tensor([[1, 2, 3]]))[0].shape)",
    ]
    served = (
        f"`lmeval-prune export adapter` prints the command lines of vLLM and SGLang for it, if they support adapters "
        f"of {model.config.model_type} models."
    )
    return "\n\n".join([code("python", "\n".join(lines)), served])


def _with_llamacpp(name: str) -> str:
    command = f"llama-server -m MODEL.gguf --lora-init-without-apply --lora {shlex.quote(name)}/adapter.gguf"
    return f"{code('bash', command)}\n\nMODEL.gguf is the base model in the same type, not quantised."


def gguf_card(
    path: str, manifest: Mapping[str, Any], origin: Origin, architecture: str, dtype: str, is_trained: bool = False
) -> Card:
    """Return the card of a model as a GGUF file; with an empty list of stages, the unpruned model.

    `is_trained`: whether the model was trained after the last stage.
    """
    name, is_pruned = Path(path).name, bool(manifest["stages"])
    text = f"Architecture `{architecture}`, matrices in {dtype}, not quantised."
    text += f"\n\n{plans(manifest, MANIFEST_KEY)}" if is_pruned else ""
    return Card(
        Path(path).stem,
        origin,
        "finetune" if is_pruned else "quantized",  # the Hub lists conversions to GGUF there
        "gguf",
        ["gguf", *(pruning_tags(manifest) if is_pruned else [])],
        f"{origin.text}{without(manifest)}{', trained further' if is_trained else ''}, for llama.cpp.",
        {
            "What was removed": what_was_removed(manifest, manifest["notes"]) if is_pruned else "Nothing.",
            "How it was made": command_section(text),
            "How to load it": code("bash", f"llama-server -m {shlex.quote(name)}"),
            "Limits": f"{UNTRAINED} {INHERITED}" if is_pruned and not is_trained else INHERITED,
        },
        "text-generation",
    )
