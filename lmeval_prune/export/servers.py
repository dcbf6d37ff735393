"""Command lines that serve exported adapters and models."""

from __future__ import annotations

from shlex import quote
from typing import Any

from lmeval_prune.checkpoints.loading import has_pruned_layers
from lmeval_prune.export.adapters import AdapterExport
from lmeval_prune.export.manifest import read_adapters
from lmeval_prune.export.vllm_plugin import STOCK
from lmeval_prune.surgery.model_class import unusual_head_dim

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


def adapter_lines(export: AdapterExport, revision: str | None) -> list[str]:
    """Return the command lines that serve the adapters of an export, and earlier ones that the same server can load."""
    settings = {"format": export.format, "base": export.base, "dtype": export.dtype}
    found = read_adapters(export.output).values()
    adapters = [each for each in found if all(each.get(name) == value for name, value in settings.items())]
    folder, names = export.output.resolve(), [adapter["name"] for adapter in adapters]
    if export.format == "gguf":
        files = " ".join(f"--lora {quote(str(folder / name / 'adapter.gguf'))}" for name in names)
        model, comment = quote(export.served), ""
        if not export.served.endswith(".gguf"):
            model, comment = "MODEL.gguf", f"# MODEL.gguf: the base model in {export.dtype}, not quantised\n"
        return [f"{comment}llama-server -m {model} --lora-init-without-apply {files}"]
    served = quote(export.served) + (f" --revision {quote(revision)}" if revision else "")
    rank, slots = max(adapter["rank"] for adapter in adapters), len(names) + 1  # vLLM on a CPU needs one slot more
    projection = next(iter(adapters[0]["modules"])).rpartition(".")[2]
    options, comment = _vllm_options(export.model_map.model.config)
    max_rank = next((allowed for allowed in VLLM_RANKS if allowed >= rank), rank)  # vLLM refuses more
    lines = [
        f"{comment}"
        f"VLLM_PLUGINS=lora_filesystem_resolver,lmeval_prune VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
        f"VLLM_LORA_RESOLVER_CACHE_DIR={quote(str(folder))} "
        f"vllm serve {served}{options} --dtype {export.dtype} --enable-lora --max-lora-rank {max_rank} "
        f"--max-loras {slots} --max-cpu-loras {slots} --lora-target-modules {projection}"
    ]
    if not options:
        paths = " ".join(quote(f"{name}={folder / name}") for name in names)
        lines.append(
            f"python -m sglang.launch_server --model-path {served} --dtype {export.dtype} --enable-lora "
            f"--lora-paths {paths} "
            f"--max-loras-per-batch {slots} --max-lora-rank {rank} --lora-target-modules {projection}"
        )
    return lines


def model_lines(path: str, format: str, config: Any = None) -> list[str]:
    """Return the command lines that serve a checkpoint (with its configuration) or a GGUF file."""
    if format == "gguf":
        return [f"llama-server -m {quote(path)}"]
    options, comment = _vllm_options(config)
    lines = [f"{comment}vllm serve {quote(path)}{options}"]
    return lines if options else [*lines, f"python -m sglang.launch_server --model-path {quote(path)}"]


def _vllm_options(config: Any) -> tuple[str, str]:
    """Return vLLM's options for loading a model, and a comment line about them. Both are empty for stock models."""
    if not has_pruned_layers(config):
        return (" --model-impl transformers" if unusual_head_dim(config) else ""), ""
    is_registered = config.architectures[0].removeprefix("Pruned") in STOCK
    comment = "# --trust-remote-code is not needed if lmeval-prune is installed\n" if is_registered else ""
    return " --trust-remote-code", comment
