"""Load a checkpoint's tokenizer like lm-eval's `hf`."""

from __future__ import annotations

from typing import Any

from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.loading import as_input_error

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm"),
)


def tokenizer_of(pretrained: str, revision: str | None, add_bos_token: bool | None = None) -> Any:
    """Load a model's tokenizer; return None if it has no tokenizer files (transformers would invent a tokenizer)."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    source = embedded.resolve(pretrained)
    optional: dict[str, Any] = {
        "revision": revision,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if not any(cached_file(source, name, **optional) for name in TOKENIZER_FILES):
        return None
    settings = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    with as_input_error(f"the tokenizer of {pretrained} cannot be read; repair its files, or remove them"):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False, **settings)
