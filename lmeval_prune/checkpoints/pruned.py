"""Checkpoints of models that were cut: written whole or not at all, loaded by us, by transformers, or not at all."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
)

from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.artefacts import content_digest, put_back, read_artefact, replace_folder, write_artefact
from lmeval_prune.checkpoints import embedded, modeling_pruned
from lmeval_prune.checkpoints.identity import TRAINING, WEIGHTS
from lmeval_prune.errors import DiskError, InputError, disk_error, first_line

_logger = logging.getLogger(__name__)
SCHEMA, VERSION = "lmeval-prune/checkpoint", 1
MANIFEST = "lmeval_prune.json"
_PREFIX = "Pruned"
UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError)  # what transformers raises for what it cannot load
_KINDS = (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel)


def has_own_layers(config: Any) -> bool:
    """Whether it is the configuration of a checkpoint whose layers differ."""
    return isinstance(getattr(config, "pruned_modules", None), dict)


def model_class(config: Any) -> Any:
    """The class of a checkpoint whose layers differ: the stock class that its configuration names, made `Pruned`.

    Raises:
        InputError: the configuration names none.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    stock = getattr(transformers, name.removeprefix(_PREFIX), None)
    if not name.startswith(_PREFIX) or stock is None:
        raise InputError(f"a pruned model's configuration names {name!r} as its class, which transformers has not")
    return pruned_class(stock)


@cache
def pruned_class(stock: type) -> Any:
    """`Pruned` of a stock class."""
    return type(f"{_PREFIX}{stock.__name__}", (modeling_pruned.Pruned, stock), {"__module__": __name__})


def pruned_base_class(config: Any) -> Any:
    """`Pruned` of the stock model without its head, for the configuration of a checkpoint whose layers differ."""
    return pruned_class(_of_kind(AutoModel, config))


def stock_class(model: Any) -> type:
    """The class of transformers' own that a model is, or is a `Pruned` of, whoever loaded it."""
    kinds = type(model).__mro__
    return next((kind for kind in kinds if kind.__module__.startswith("transformers.")), kinds[0])


def load_pretrained(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model, stock or one whose layers differ, in evaluation mode.

    Args:
        folder: a folder, or a name that transformers or `lmeval-prune models` knows.
        options: of transformers' `from_pretrained`; weights have their own type unless `dtype` says otherwise.

    Raises:
        InputError: it cannot be loaded.
    """
    name = str(folder)
    embedded.check_name(name)
    try:
        name = embedded.resolve(name)
        config = AutoConfig.from_pretrained(name)
        kind = model_class(config) if has_own_layers(config) else _stock_kind(config)
        return kind.from_pretrained(name, **{"dtype": "auto", **options}).eval()
    except UNREADABLE as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the model {folder} cannot be loaded ({first_line(error)})") from error


def _stock_kind(config: Any) -> Any:
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    kind = named or next((kind for kind in _KINDS if type(config) in kind._model_mapping), None)
    if kind is None:
        raise InputError(f"it is a {config.model_type} model, which transformers cannot build")
    return kind


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: Any,
    manifest: dict[str, Any],
    tokenizer: Any = None,
    plan: Any = None,
    parents: Collection[str] = (),
) -> None:
    """Write a model, its tokenizer and its manifest as a checkpoint that appears whole.

    All is written into a folder beside it, which takes the place of the last checkpoint at the end: a kill or a full
    disk leaves that one as it is. On systems that cannot exchange two names at once, a kill between two renames leaves
    it beside its place, as `.NAME.before`; the next save puts it back.

    Args:
        folder: where to, or a link to it; an earlier checkpoint of ours there is replaced.
        model: stock, or a `Pruned` one.
        manifest: what to say of it; the files that are written, and their digests, are added.
        tokenizer: kept beside it, with its chat template.
        plan: called with the folder that is being written, to add the plan to it.
        parents: folders of models that it was made from.

    Raises:
        InputError: as of `check_folder`, or nothing can be written.
    """
    folder = Path(folder).resolve()
    put_back(folder)
    check_folder(folder, parents)
    half = folder.parent / f".{folder.name}.partial"  # left by a kill, and made anew
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(half, ignore_errors=True)
        _write_model(half, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(half)
        if plan is not None:
            plan(half)
        files = {path: content_digest(half / path) for path in sorted(_files(half))}
        write_artefact(half / MANIFEST, SCHEMA, VERSION, {**manifest, "files": files})
        for path in half.rglob("*"):
            if path.is_file():
                path.chmod((half / MANIFEST).stat().st_mode)  # weights are written for their owner only
            _sync(path)
        check_folder(folder)  # again: somebody may have written there meanwhile
        replace_folder(half, folder)
    except BaseException as error:
        shutil.rmtree(half, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError) or type(error) is Exception:  # the last is a tokenizer's
            kind = DiskError if disk_error(error, folder) else InputError
            raise kind(
                f"{folder} cannot be written ({first_line(error)}); what was there is as it was, free some space or "
                f"name another folder"
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
    written = (read_manifest(folder) or {}).get("files", {})
    if foreign := sorted(path for path in _files(folder) if path not in written):
        raise InputError(
            f"{folder} has files that are no checkpoint of lmeval-prune's ({foreign[0]}), which would be lost; name "
            f"another folder"
        )
    if changed := next((path for path in written if _is_other(folder / path, written[path])), None):
        raise InputError(
            f"{folder}/{changed} was changed after lmeval-prune wrote it, and would be lost; name another folder"
        )


def _files(folder: Path) -> list[str]:
    """Files, links and empty folders under a folder, but for the manifest; their names from there."""
    found = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]
    return [path for path in found if path != MANIFEST]


def _is_other(path: Path, written: str) -> bool:
    return path.is_file() and content_digest(path) != written


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None if it has none.

    Raises:
        InputError: it is broken.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return None
    found = read_artefact(path, SCHEMA, VERSION)[0]
    try:
        checkpoint_columns(found)
        found["weights"][0], found["files"].items()
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{path} is no whole manifest ({first_line(error)}); cut the model again, or remove it"
        ) from error
    return found


def manifest_of(model: Any) -> dict[str, Any] | None:
    """The manifest in the folder that a model was loaded from; None if there is none, or the model has other weights.

    Raises:
        InputError: it is broken.
    """
    found = read_manifest(getattr(model.config, "_name_or_path", "") or "nowhere")
    return found if found and weights_fingerprint(model) in found["weights"] else None


def manifest_in(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of a checkpoint whose weights are those that it was written with; else None, and a warning.

    Raises:
        InputError: it is broken.
    """
    found = read_manifest(folder)
    if found is None:
        return None
    there = {path.name for path in Path(folder).iterdir()} | found["files"].keys()
    weights = {name: Path(folder) / name for name in there if WEIGHTS.fullmatch(name) and not TRAINING.match(name)}
    if any(not path.is_file() or content_digest(path) != found["files"].get(name) for name, path in weights.items()):
        _logger.warning("%s holds other weights than %s was written for, which is left out", folder, MANIFEST)
        return None
    return found


def checkpoint_columns(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a results file says of a cut checkpoint: its parent, and what was removed in all stages."""
    removed = [stage["removed"] for stage in manifest["stages"]]
    total = {name: sum(one[name] for one in removed) for name in ("heads", "kv_heads", "channels")}
    parent = {name: manifest["stages"][0]["parent"][name] for name in ("name", "revision")}
    return {"parent": parent, "class": manifest["class"], "stages": len(removed), "removed": total}


def removed_from(manifest: dict[str, Any]) -> str:
    """What was removed to make a cut checkpoint, in a line."""
    about = checkpoint_columns(manifest)
    counts = ", ".join(f"{count} {name}" for name, count in about["removed"].items())
    return f"{counts} removed from {about['parent']['name']} in {about['stages']} stage{'s' * (about['stages'] > 1)}"


def _write_model(folder: Path, model: Any) -> None:
    """Weights, configuration and generation configuration; of a `Pruned` model the code that loads it, too."""
    config = model.config
    if not has_own_layers(config):
        _save(model, folder)
        return
    stock = stock_class(model)
    names = {kind.__name__: stock for kind in _KINDS if _of_kind(kind, config) is stock} or {"AutoModel": stock}
    base = _of_kind(AutoModel, config)
    if base is not None:
        names["AutoModel"] = base  # engines build the model without its head
    config.architectures = [f"{_PREFIX}{stock.__name__}"]
    config.auto_map = {kind: f"modeling_pruned.{_PREFIX}{one.__name__}" for kind, one in names.items()}
    _save(model, folder)
    code = Path(modeling_pruned.__file__).read_text(encoding="utf-8")
    for one in dict.fromkeys(names.values()):
        code += (
            f"\n\nfrom transformers import {one.__name__}  # noqa: E402\n\n\n"
            f"class {_PREFIX}{one.__name__}(Pruned, {one.__name__}):\n    pass\n"
        )
    (folder / "modeling_pruned.py").write_text(code, encoding="utf-8")


def _save(model: Any, folder: Path) -> None:
    """By transformers, but for generation settings that it has read and would not write."""
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


def _of_kind(kind: Any, config: Any) -> Any:
    found = kind._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
