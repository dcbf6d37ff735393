"""Identify a checkpoint without loading it: by the bytes of its weights, or by the commit of a hub model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from lmeval_prune.artefacts import content_digest, digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, first_line

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|py)")  # .py: code of the checkpoint
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
        if not files:
            raise InputError(f"pretrained={pretrained}: the folder holds no weights")
        return digest([content_digest(path) for path in files])
    try:
        config = cached_file(pretrained, gguf_file or "config.json", revision=revision, subfolder=subfolder)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model {pretrained}: {first_line(error)}") from error
    commit: Any = extract_commit_hash(config, None)
    variant = [name for name in (subfolder, gguf_file) if name]  # a commit may hold several models
    return digest([pretrained, commit or content_digest(str(config)), *variant])
