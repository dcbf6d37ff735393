"""The frozen sentence encoder φ, which embeds questions for a router."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lmeval_prune.artefacts import check_finite
from lmeval_prune.checkpoints import embedded

logger = logging.getLogger(__name__)

# embeddings by encoder and text: routers that share an encoder embed the same questions
_EMBEDDINGS: MutableMapping[Any, dict[str, torch.Tensor]] = WeakKeyDictionary()


def load_encoder(name: str) -> Any:
    """Load a sentence-transformers model by name or folder, once for all routers."""
    folder = embedded.resolve(name)
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file()) if Path(folder).is_dir() else []
    return _loaded(folder, name, tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@lru_cache(maxsize=2)
def _loaded(folder: str, name: str, files: tuple[tuple[str, int, int], ...]) -> Any:
    """Load an encoder; `files` of its folder, with times and sizes, so that a changed encoder is read again."""
    from sentence_transformers import SentenceTransformer

    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    return SentenceTransformer(folder, device="cpu")


def embed(encoder: Any, texts: Sequence[str]) -> torch.Tensor:
    """Return φ(x) of each text in float32, shape (texts, width); `InputError` if a number is not finite.

    Texts are embedded one at a time, so that rounding, which may decide a ranking, does not depend on other texts.
    """
    vectors_by_text = _EMBEDDINGS.setdefault(encoder, {})
    new = [text for text in dict.fromkeys(texts) if text not in vectors_by_text]
    if new:
        embeddings = encoder.encode(new, batch_size=1, convert_to_tensor=True, show_progress_bar=len(new) > 500)
        vectors = torch.as_tensor(embeddings).detach().to("cpu", torch.float32).clone()
        check_finite({"vectors": vectors}, "the sentence encoder")
        vectors_by_text.update(zip(new, vectors, strict=True))
    return torch.stack([vectors_by_text[text] for text in texts]) if texts else torch.empty(0)


def warn_of_long_texts(encoder: Any, texts: Sequence[str]) -> None:
    """Warn of texts of which an encoder reads the beginning alone."""
    from transformers import PreTrainedTokenizerBase

    limit, tokenizer = encoder.max_seq_length, encoder.tokenizer
    if not limit or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    count = sum(len(ids) > limit for ids in tokenizer(list(texts), verbose=False)["input_ids"])
    if count:
        logger.warning(
            "%d of %d questions are longer than the %d tokens that the sentence encoder reads: it knows their "
            "beginnings alone; another --encoder, or a shorter --question_field, reads more",
            *(count, len(texts), limit),
        )


def fingerprint(encoder: Any) -> str:
    """Return a digest of the encoder's weights, to detect another encoder with the same name."""
    state = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        state.update(f"{name}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]
