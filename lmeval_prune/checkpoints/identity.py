"""Identify a checkpoint without loading it: by the bytes of its files, or by the commit of a hub model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from lmeval_prune.artefacts import content_digest, digest, read_json
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|py)")  # .py: code of the checkpoint
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt")  # suffixes
_CONFIG = re.compile(r"(generation_)?config\.json")
_READ = re.compile(r".*(token|vocab|merges|template).*|.*\.(model|jinja)")
_IGNORED = ("_name_or_path", "transformers_version")
_TRAINING = re.compile(r"training_args|optimizer|scheduler|rng_state|scaler")  # files of a trainer


def weight_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files in a folder that hold weights or code of the checkpoint, sorted by name."""
    return [folder / name for name in sorted(names) if _WEIGHTS.fullmatch(name) and not _TRAINING.match(name)]


def checkpoint_identity(
    pretrained: str, revision: str | None = None, subfolder: str = "", gguf_file: str | None = None
) -> str:
    """Return a digest of a checkpoint's weights, independent of the folder's name; for a hub model, of name and commit.

    Arguments as for transformers; `pretrained` may be an embedded model.
    """
    embedded.check_name(pretrained, {"gguf_file": gguf_file, "subfolder": subfolder, "revision": revision})
    folder = Path(embedded.resolve(pretrained)).expanduser()
    if folder.is_dir():
        folder = folder / subfolder
        names = [gguf_file] if gguf_file else [path.name for path in folder.iterdir()] if folder.is_dir() else []
        files = [path for path in weight_files(folder, names) if path.is_file()]
        if not files:  # all such folders would have one identity
            raise InputError(f"pretrained={pretrained}: the folder holds no weights")
        return digest([content_digest(path) for path in files])
    config = cached_file(pretrained, gguf_file or "config.json", revision=revision, subfolder=subfolder)
    commit: Any = extract_commit_hash(config, None)
    variant = [name for name in (subfolder, gguf_file) if name]  # a commit may hold several models
    return digest([pretrained, commit or content_digest(str(config)), *variant])


def configuration_files(pretrained: str, subfolder: str = "") -> list[Path]:
    """Return the files beside a checkpoint's weights, sorted by name; none of a hub model, which a commit identifies.

    Besides configuration, tokenizer and chat template there can be files that no model reads.
    """
    folder = Path(embedded.resolve(pretrained)).expanduser() / subfolder
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in files if file.suffix in _BESIDE_WEIGHTS]


def configuration_digests(pretrained: str) -> dict[str, str]:
    """Return digests of a checkpoint's configuration, tokenizer and chat template, by the names of their files.

    Of a configuration's, path and version do not count, which change when a model is written again.
    """
    digests = {}
    for file in configuration_files(pretrained):
        if _CONFIG.fullmatch(file.name):
            values = {name: value for name, value in read_json(file).items() if name not in _IGNORED}
            digests[file.name] = digest(values)
        elif _READ.fullmatch(file.name):
            digests[file.name] = content_digest(file)
    return digests
