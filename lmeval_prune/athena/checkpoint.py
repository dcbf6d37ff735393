"""Read and write an ATHENA folder: `athena.json`, the weights of the head part, and a stock transformers encoder.

Commands for model folders (`lmeval-prune heads`, `mask`, …) take `FOLDER/encoder`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from lmeval_prune.architectures import map_model, position_limit
from lmeval_prune.artefacts import ENVELOPE, new_folder, read_artefact, read_tensors, write_artefact, write_bytes
from lmeval_prune.athena.model import Athena, AthenaSettings
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import read_config, save_checkpoint, skeleton, skeleton_of, with_weights
from lmeval_prune.errors import InputError

SCHEMA, SCHEMA_VERSION = "lmeval-prune/athena", 1
SETTINGS, HEAD, ENCODER = "athena.json", "head.safetensors", "encoder"


def begin(name: str, **settings: Any) -> Athena:
    """Make an untrained ATHENA over an encoder (hub name, folder or embedded model), and its other `AthenaSettings`."""
    config, folder = read_config(name), embedded.resolve(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    is_decoder = getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False)
    if is_decoder or tokenizer.mask_token is None:
        raise InputError(f"{name} ({config.model_type}) is no encoder with a mask token, e.g. roberta-base")
    model_map = map_model(skeleton(config, AutoModel))
    sizes = AthenaSettings(
        width=config.hidden_size,
        channels=model_map.feed_forward[0].channels,
        heads=model_map.attention[0].heads,
        max_length=min(filter(None, (position_limit(model_map.model), tokenizer.model_max_length))),
        **settings,
    )
    encoder = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return Athena(sizes, encoder, tokenizer)


def write(
    model: Athena,
    folder: str | os.PathLike[str],
    manifest: dict[str, Any] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Write a model atomically, with the manifest of its encoder's cuts; an existing folder is replaced.

    `add_files` adds further files to the folder while it is written.
    """
    with new_folder(folder) as temporary:
        if manifest is None:
            model.encoder.save_pretrained(temporary / ENCODER)
            model.tokenizer.save_pretrained(temporary / ENCODER)
        else:
            save_checkpoint(temporary / ENCODER, model.encoder, manifest, model.tokenizer)
        data = save(head_state(model))
        write_bytes(temporary / HEAD, data)
        sha256 = hashlib.sha256(data).hexdigest()
        content = {"settings": asdict(model.settings), "head_sha256": sha256, **model.about}
        write_artefact(temporary / SETTINGS, SCHEMA, SCHEMA_VERSION, content)
        if add_files is not None:
            add_files(temporary)


def head_state(model: Athena) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: tensor.contiguous() for name, tensor in state.items() if not name.startswith("encoder.")}


def describe(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of `athena.json`; `InputError` if the folder is not an ATHENA."""
    return read_artefact(Path(folder) / SETTINGS, SCHEMA, SCHEMA_VERSION)[0]


def read_settings(folder: str | os.PathLike[str]) -> AthenaSettings:
    return AthenaSettings.from_dict(describe(folder)["settings"], str(Path(folder) / SETTINGS))


def read(folder: str | os.PathLike[str]) -> Athena:
    """Read a model in evaluation mode."""
    content, settings = describe(folder), read_settings(folder)
    state = read_tensors(Path(folder) / HEAD, content["head_sha256"])
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / ENCODER, trust_remote_code=False)
    encoder = with_weights(skeleton_of(f"{folder}/{ENCODER}"), f"{folder}/{ENCODER}")
    model = Athena(settings, encoder, tokenizer).to(next(iter(state.values())).dtype)
    model.load_state_dict(state, strict=False)
    if set(state) != set(head_state(model)):
        raise InputError(f"the ATHENA in {folder} is incomplete: {HEAD} has other weights; train it again")
    model.about = {key: value for key, value in content.items() if key not in (*ENVELOPE, "settings", "head_sha256")}
    return model.eval()
