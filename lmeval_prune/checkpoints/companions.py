"""Copy the files of a model that stay what they are when it is cut: processors, a sentence encoder's modules, licenses.

Weights, configuration, tokenizer and card are written anew; code of the model is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.errors import HFValidationError
from transformers.utils import cached_file

from lmeval_prune.artefacts import read_json
from lmeval_prune.checkpoints import embedded

_MODULES = "modules.json"  # of sentence-transformers: the folder of each module, e.g. of the pooling
_COMPANIONS = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",  # of a processor; that of a tokenizer is written with it
    *("audio_tokenizer_config.json", "sentence_bert_config.json", "config_sentence_transformers.json", _MODULES),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt", "USE_POLICY.md"),
)
_OF_MODULE = ("config.json", "model.safetensors", "pytorch_model.bin")


def copy_companions(pretrained: str, folder: Path, revision: str | None = None) -> None:
    """Copy those files of a model that are not in the folder yet; `InputError` if the list of modules is broken."""
    source = embedded.resolve(pretrained) if pretrained else ""
    if not _is_stored(source, revision):
        return
    for name in _COMPANIONS:
        _copy(source, name, folder, revision)
    if (folder / _MODULES).is_file():
        for path in _module_paths(folder / _MODULES):
            for name in _OF_MODULE:
                _copy(source, f"{path}/{name}", folder, revision)


def _is_stored(source: str, revision: str | None) -> bool:
    """Return whether a model was loaded from a folder or the Hub, and not built in memory."""
    if not source or Path(source).is_dir():
        return bool(source)
    with suppress(HFValidationError):  # no name on the Hub
        return embedded.cached_file(source, {"revision": revision}) is not None
    return False


def _module_paths(path: Path) -> Iterator[str]:
    """Yield the folders of a sentence encoder's modules, but for that of the transformers model, which is the root."""
    for module in read_json(path, list[dict[str, Any]]):
        folder = PurePosixPath(str(module.get("path") or ""))
        if folder.parts and not folder.is_absolute() and ".." not in folder.parts:
            yield str(folder)


def _copy(source: str, name: str, folder: Path, revision: str | None) -> None:
    optional: dict[str, Any] = {
        "revision": revision,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    file = cached_file(source, name, **optional)
    if file is None or (folder / name).exists():
        return
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, folder / name)
