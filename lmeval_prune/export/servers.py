"""The command lines that serve what was exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as its largest


def largest_rank(rank: int) -> int:
    """The smallest rank that vLLM can be set to and that holds this one.

    Raises:
        StopIteration: it is above all of them.
    """
    return next(known for known in RANKS if known >= rank)


def adapter_lines(
    model: str,
    revision: str | None,
    folder: Path,
    format: str,
    names: Sequence[str],
    rank: int,
    dtype: str,
    projection: str,
) -> list[str]:
    """Command lines of the servers that can read adapters of a format.

    Args:
        model, revision: as the server is to be given them; a GGUF file for llama.cpp.
        folder: of the adapters.
        format: `peft` (vLLM, SGLang) or `gguf` (llama.cpp).
        names: of all adapters there.
        rank: the largest of theirs.
        dtype: type in which the server is to compute.
        projection: what the model calls an output projection, without its path.
    """
    where = quote(str(folder.resolve()))
    if format == "gguf":
        files = " ".join(f"--lora {quote(str(folder / name / 'adapter.gguf'))}" for name in names)
        file = quote(model) if model.endswith(".gguf") else "MODEL.gguf"
        return [f"llama-server -m {file} --lora-init-without-apply {files}"]
    served = quote(model) + (f" --revision {quote(revision)}" if revision else "")
    slots = len(names) + 1  # one stays empty: requests without an adapter use it on a CPU
    vllm = (
        "VLLM_PLUGINS=lora_filesystem_resolver,lmeval_prune VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
        f"VLLM_LORA_RESOLVER_CACHE_DIR={where} vllm serve {served} --dtype {dtype} --enable-lora "
        f"--max-lora-rank {largest_rank(rank)} --max-loras {slots} --max-cpu-loras {slots} "
        f"--lora-target-modules {projection}"
    )
    sglang = (
        f"python -m sglang.launch_server --model-path {served} --dtype {dtype} --enable-lora "
        f'--lora-paths $(cd {where} && for one in */; do echo "${{one%/}}=$PWD/${{one%/}}"; done) '
        f"--max-loras-per-batch {slots} --max-lora-rank {rank} --lora-target-modules {projection}"
    )
    return [vllm, sglang]


def model_lines(path: str, format: str, own_code: bool) -> list[str]:
    """Command lines of the servers that can read a model.

    Args:
        path: folder or file.
        format: `checkpoint` (vLLM, SGLang) or `gguf` (llama.cpp).
        own_code: whether its layers differ, so that a class of its own builds it.
    """
    if format == "gguf":
        return [f"llama-server -m {quote(path)}"]
    if own_code:
        return [f"vllm serve {quote(path)} --trust-remote-code   # not needed where lmeval-prune is installed"]
    return [f"vllm serve {quote(path)}", f"python -m sglang.launch_server --model-path {quote(path)}"]
