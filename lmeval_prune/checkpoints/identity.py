"""By what a checkpoint is known again without being loaded: the bytes of its weights, or a hub's commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from lmeval_prune.artefacts import content_digest, digest
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, first_line

WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|py)")  # and code that a checkpoint brings along
TRAINING = re.compile(r"training_args|optimizer|scheduler|rng_state|scaler")  # what a trainer leaves beside them


def checkpoint_identity(pretrained: str, revision: str | None = None) -> str:
    """A digest of a checkpoint's weights, whatever its folder is called; of a hub's model, of its name and commit.

    Args:
        pretrained: as for lm_eval, or the name of an embedded model.
        revision: of a hub's model.

    Raises:
        InputError: there is no such model, or a folder has no weights.
    """
    embedded.check_name(pretrained)
    folder = Path(embedded.resolve(pretrained)).expanduser()
    if folder.is_dir():
        files = sorted(one for one in folder.iterdir() if WEIGHTS.fullmatch(one.name) and not TRAINING.match(one.name))
        if not files:
            raise InputError(f"pretrained={pretrained}: the folder holds no weights")
        return digest([content_digest(one) for one in files])
    try:
        config = cached_file(pretrained, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model {pretrained}: {first_line(error)}") from error
    commit: Any = extract_commit_hash(config, None)
    return digest([pretrained, commit or content_digest(str(config))])
