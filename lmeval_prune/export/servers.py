"""Command lines that serve exported adapters and models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from lmeval_prune.checkpoints.loading import has_pruned_layers
from lmeval_prune.export.gguf_format import SERVER_DTYPES
from lmeval_prune.export.vllm_plugin import STOCK
from lmeval_prune.surgery.model_class import unusual_head_dim

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as its largest
# Families whose classes take adapters in vLLM 0.32; of others, some are not served, some without adapters.
FAMILIES_WITH_ADAPTERS = frozenset(
    ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "granite", "cohere", "opt"]
)


def largest_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` of vLLM's that holds a rank.

    Raises:
        StopIteration: it is above all of them.
    """
    return next(known for known in VLLM_RANKS if known >= rank)


def vllm_options(config: Any) -> tuple[str, str]:
    """Return the options by which vLLM loads a model, and a comment for the line before; empty for stock models."""
    if has_pruned_layers(config):
        known = config.architectures[0].removeprefix("Pruned") in STOCK
        return (
            " --trust-remote-code",
            "# without --trust-remote-code where lmeval-prune is installed\n" if known else "",
        )
    return (" --model-impl transformers" if unusual_head_dim(config) else ""), ""


def adapter_lines(
    model: str,
    revision: str | None,
    folder: Path,
    format: str,
    names: Sequence[str],
    rank: int,
    dtype: str,
    projection: str,
    config: Any,
) -> list[str]:
    """Return command lines of the servers that can read adapters, or a remark if none is known to.

    Args:
        model, revision: of the server's `--model`; for llama.cpp a GGUF file.
        folder: of the adapters.
        format: `peft` (vLLM, SGLang) or `gguf` (llama.cpp).
        names: of all adapters in the folder.
        rank: the largest of these adapters.
        dtype: type in which the server is to compute.
        projection: name of an output projection in its layer, e.g. `o_proj`.
        config: of the model.
    """
    if format == "gguf":
        files = " ".join(f"--lora {quote(str(folder.resolve() / name / 'adapter.gguf'))}" for name in names)
        file, remark = quote(model), ""
        if not model.endswith(".gguf"):
            file, remark = "MODEL.gguf", f"# MODEL.gguf: with weights in {dtype}, not quantised\n"
        return [f"{remark}llama-server -m {file} --lora-init-without-apply {files}"]
    if config.model_type not in FAMILIES_WITH_ADAPTERS:
        return [
            f"for PEFT (lm_eval --model hf … peft=FOLDER): {config.model_type} models with adapters are served by none"
        ]
    if dtype not in SERVER_DTYPES:
        return [f"for PEFT (lm_eval --model hf … peft=FOLDER): servers do not compute in {dtype}; give them a --dtype"]
    served = quote(model) + (f" --revision {quote(revision)}" if revision else "")
    slots = len(names) + 1  # the last stays empty: requests without an adapter use it on a CPU
    options, remark = vllm_options(config)
    lines = [
        f"{remark}VLLM_PLUGINS=lora_filesystem_resolver,lmeval_prune VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
        f"VLLM_LORA_RESOLVER_CACHE_DIR={quote(str(folder.resolve()))} vllm serve {served}{options} --dtype {dtype} "
        f"--enable-lora --max-lora-rank {largest_rank(rank)} --max-loras {slots} --max-cpu-loras {slots} "
        f"--lora-target-modules {projection}"
    ]
    if not options:
        paths = " ".join(quote(f"{name}={folder.resolve() / name}") for name in names)
        lines.append(
            f"python -m sglang.launch_server --model-path {served} --dtype {dtype} --enable-lora "
            f"--lora-paths {paths} "
            f"--max-loras-per-batch {slots} --max-lora-rank {rank} --lora-target-modules {projection}"
        )
    return lines


def model_lines(path: str, format: str, config: Any = None) -> list[str]:
    """Return command lines of the servers that can read a model.

    Args:
        path: folder or file.
        format: `checkpoint` (vLLM, SGLang) or `gguf` (llama.cpp).
        config: of the model, for a checkpoint.
    """
    if format == "gguf":
        return [f"llama-server -m {quote(path)}"]
    options, remark = vllm_options(config)
    lines = [f"{remark}vllm serve {quote(path)}{options}"]
    return lines if options else [*lines, f"python -m sglang.launch_server --model-path {quote(path)}"]
