"""The frozen sentence encoder φ that a router sees a question through."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from lmeval_prune.artefacts import check_finite
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, first_line


def load_encoder(name: str) -> Any:
    """Load a sentence-transformers model, by its name, its folder, or the name of the embedded one.

    Raises:
        InputError: it cannot be loaded.
    """
    folder = embedded.resolve(name)
    from sentence_transformers import SentenceTransformer

    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    try:
        return SentenceTransformer(folder, device="cpu")
    except Exception as error:  # whatever a download or a broken folder raises
        raise InputError(
            f"the sentence encoder {name} cannot be loaded ({first_line(error)}); name a folder, or use "
            f"{embedded.ENCODER} (`lmeval-prune models --get {embedded.ENCODER}`)"
        ) from error


def embed(encoder: Any, texts: Sequence[str]) -> torch.Tensor:
    """φ(x) of each text, float32, shape (texts, width).

    One text at a time: so its embedding, and with it a near-tie between two heads, does not depend on the others.

    Raises:
        InputError: it has numbers that are not finite.
    """
    embeddings = encoder.encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=len(texts) > 500)
    vectors = torch.as_tensor(embeddings).detach().to("cpu", torch.float32).clone()
    check_finite({"vectors": vectors}, "the sentence encoder")
    return vectors


def fingerprint(encoder: Any) -> str:
    """Digest of the encoder's weights: another encoder under the same name is noticed."""
    state = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        state.update(f"{name}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]
