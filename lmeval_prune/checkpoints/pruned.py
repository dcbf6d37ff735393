"""Checkpoints of models that were cut: written whole or not at all, with a manifest of what was removed."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Len
from safetensors import SafetensorError
from transformers import GenerationConfig
from typing_extensions import TypedDict

from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.artefacts import TEMPORARY_PREFIX, content_digest, new_folder, read_artefact, write_artefact
from lmeval_prune.checkpoints import modeling_pruned
from lmeval_prune.checkpoints.identity import weight_files
from lmeval_prune.checkpoints.loading import PREFIX, class_of_kind, has_own_layers, stock_class
from lmeval_prune.errors import InputError, first_line

_logger = logging.getLogger(__name__)
SCHEMA, VERSION = "lmeval-prune/checkpoint", 1
MANIFEST = "lmeval_prune.json"
_HEADS = (
    "Seq2SeqLM, CausalLM, MaskedLM, SequenceClassification, TokenClassification, QuestionAnswering, MultipleChoice, "
    "NextSentencePrediction, PreTraining"
)


class Removed(TypedDict):
    """How much a stage has removed, and by layer what stays in place of it."""

    heads: int
    kv_heads: int
    channels: int
    fillers: dict[str, list[int]]


class Parent(TypedDict):
    """The model that a stage was made from."""

    name: str
    revision: str
    channels: dict[str, int]


class Stage(TypedDict):
    """A stage of cutting."""

    parent: Parent
    plan: dict[str, Any]
    removed: Removed
    kept_heads: dict[str, list[int]]


Class = TypedDict("Class", {"class": str})


class Manifest(Class):
    """Fields of a manifest."""

    weights: Annotated[list[str], Len(1)]
    files: dict[str, str]
    notes: list[str]
    stages: Annotated[list[Stage], Len(1)]
    trained_on: NotRequired[list[str]]
    validated_on: NotRequired[list[str]]


# --------------------------------------------------------------------------- writing


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: Any,
    manifest: dict[str, Any],
    tokenizer: Any = None,
    plan: Any = None,
    parents: Collection[str] = (),
) -> None:
    """Write a model, its tokenizer and its manifest as a checkpoint that appears whole, as of `new_folder`.

    Args:
        folder: where to, or a link to it; an earlier checkpoint of ours there is replaced.
        model: stock, or a `Pruned` one.
        manifest: its fields; the files that are written, and their digests, are added.
        tokenizer: kept beside it, with its chat template.
        plan: called with the folder that is being written, to add the plan to it.
        parents: folders of models that it was made from.

    Raises:
        InputError: as of `check_folder`, or nothing can be written.
    """
    try:
        with new_folder(folder, lambda path: check_folder(path, parents)) as growing:
            _write_model(growing, model)
            if tokenizer is not None:
                tokenizer.save_pretrained(growing)
            if plan is not None:
                plan(growing)
            files = {path: content_digest(growing / path) for path in sorted(_files(growing))}
            write_artefact(growing / MANIFEST, SCHEMA, VERSION, {**manifest, "files": files})
    except Exception as error:
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:  # the last is a tokenizer's
            raise InputError(
                f"{folder} cannot be written ({first_line(error)}); what was there is as it was, name another folder"
            ) from error
        raise


def check_folder(folder: str | os.PathLike[str], parents: Collection[str] = ()) -> None:
    """Refuse to write a checkpoint over what is none of ours, or over a model that it is made from.

    Args:
        folder: where it is to be.
        parents: folders of models that it is made from.

    Raises:
        InputError: there is such a file or folder.
    """
    folder = Path(folder)
    if folder.is_file():
        raise InputError(f"{folder} is a file; name a folder for the checkpoint")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if any(Path(parent).is_dir() and folder.samefile(parent) for parent in parents if parent):
        raise InputError(f"{folder} is the model that is cut, which would be lost; name another folder")
    digests = (read_manifest(folder) or {}).get("files", {})
    if foreign := sorted(set(_files(folder)) - set(digests)):
        raise InputError(
            f"{folder} has files that are no checkpoint of lmeval-prune's ({foreign[0]}), which would be lost; name "
            f"another folder"
        )
    for name, digest in digests.items():
        if (folder / name).is_file() and content_digest(folder / name) != digest:
            raise InputError(
                f"{folder}/{name} was changed after lmeval-prune wrote it, and would be lost; name another folder"
            )


def _files(folder: Path) -> list[str]:
    """Return the files, links and empty folders under a folder, but for the manifest and a lock; names from there."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    names = (path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name != MANIFEST and not name.startswith(TEMPORARY_PREFIX)]


def _write_model(folder: Path, model: Any) -> None:
    """Write weights, configuration and generation configuration; of a `Pruned` model the code that loads it, too."""
    config = model.config
    if not has_own_layers(config):
        _save(model, folder)
        return
    stock = stock_class(model)
    heads = [f"AutoModelFor{head}" for head in _HEADS.split(", ")]
    classes = {name: stock for name in heads if class_of_kind(name, config) is stock}
    base = class_of_kind("AutoModel", config)  # engines build the model without its head
    if base is not None or not classes:
        classes["AutoModel"] = base or stock
    config.architectures = [f"{PREFIX}{stock.__name__}"]
    config.auto_map = {name: f"modeling_pruned.{PREFIX}{kind.__name__}" for name, kind in classes.items()}
    _save(model, folder)
    code = Path(modeling_pruned.__file__).read_text(encoding="utf-8")
    for name in dict.fromkeys(kind.__name__ for kind in classes.values()):
        code += (
            f"\n\nfrom transformers import {name}  # noqa: E402\n\n\nclass {PREFIX}{name}(Pruned, {name}):\n    pass\n"
        )
    (folder / "modeling_pruned.py").write_text(code, encoding="utf-8")


def _save(model: Any, folder: Path) -> None:
    """Save by transformers, but for generation settings that it has read and would not write."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        model.save_pretrained(folder)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = settings
    settings.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])


# --------------------------------------------------------------------------- manifests


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint; None if it has none.

    Raises:
        InputError: it is broken.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return None
    try:
        return read_artefact(path, SCHEMA, VERSION, Manifest)[0]
    except InputError as error:
        raise InputError(f"{error}; cut the model again, or remove it") from None


def manifest_of(model: Any) -> dict[str, Any] | None:
    """Return the manifest in the folder that a model was loaded from; None if there is none, or it has other weights.

    Raises:
        InputError: it is broken.
    """
    manifest = read_manifest(getattr(model.config, "_name_or_path", "") or "nowhere")
    return manifest if manifest and weights_fingerprint(model) in manifest["weights"] else None


def manifest_in(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint whose weights are those that it was written with; else None, and a warning.

    Raises:
        InputError: it is broken.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    digests = manifest["files"]
    names = {path.name for path in Path(folder).iterdir()} | digests.keys()
    for path in weight_files(Path(folder), names):
        if not path.is_file() or content_digest(path) != digests.get(path.relative_to(folder).as_posix()):
            _logger.warning("%s holds other weights than %s was written for, which is left out", folder, MANIFEST)
            return None
    return manifest


def checkpoint_columns(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the results file's columns of a cut checkpoint: its parent, and what was removed in all stages."""
    stages = manifest["stages"]
    total = {name: sum(stage["removed"][name] for stage in stages) for name in ("heads", "kv_heads", "channels")}
    parent = {name: stages[0]["parent"][name] for name in ("name", "revision")}
    return {"parent": parent, "class": manifest["class"], "stages": len(stages), "removed": total}


def removed_from(manifest: dict[str, Any]) -> str:
    """Return in a line what was removed to make a cut checkpoint."""
    columns = checkpoint_columns(manifest)
    counts = ", ".join(f"{count} {name}" for name, count in columns["removed"].items())
    stages = columns["stages"]
    return f"{counts} removed from {columns['parent']['name']} in {stages} stage{'s' * (stages > 1)}"
