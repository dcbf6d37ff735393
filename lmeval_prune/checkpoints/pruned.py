"""Save checkpoints of cut models atomically, with a manifest of what was removed, and read the manifests.

Processors, a sentence encoder's modules and licenses are copied from the model that was cut; weights, configuration,
tokenizer and card are written anew; code of the model is left out.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NotRequired

from annotated_types import Len
from huggingface_hub.errors import HFValidationError
from transformers import GenerationConfig
from transformers.utils import cached_file
from typing_extensions import TypedDict

from lmeval_prune.architectures import weights_fingerprint
from lmeval_prune.architectures.names import compact_names
from lmeval_prune.artefacts import (
    TEMPORARY_PREFIX,
    content_digest,
    new_folder,
    read_artefact,
    read_json,
    write_artefact,
)
from lmeval_prune.attributes import replaced
from lmeval_prune.checkpoints import embedded, modeling_pruned
from lmeval_prune.checkpoints.loading import (
    OPTIONAL,
    PREFIX,
    auto_model_class,
    has_pruned_layers,
    stock_class,
    task_classes,
    weight_files,
)
from lmeval_prune.errors import InputError, first_few

_logger = logging.getLogger(__name__)
SCHEMA, VERSION = "lmeval-prune/checkpoint", 1
MANIFEST = "lmeval_prune.json"
PLAN = "plan.json"  # what `cut` removed; a checkpoint that was trained after that has none
_MODULES = "modules.json"  # of sentence-transformers: the folder of each module, e.g. of the pooling
_COMPANIONS = (
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",  # of a processor; that of a tokenizer is written with it
    *("audio_tokenizer_config.json", "sentence_bert_config.json", "config_sentence_transformers.json", _MODULES),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt", "USE_POLICY.md"),
)


class Stage(TypedDict):
    """One cut: what went, and what stays of heads, channels and blocks."""

    parent: dict[str, Any]  # the model that was cut
    plan: dict[str, Any]
    removed: dict[str, Any]  # numbers of removed units, and what stays with zero weights by layer
    removed_blocks: list[str]  # names of the blocks that are gone, also of those that lost all units
    kept_heads: dict[str, list[int]]
    kept_layers: NotRequired[dict[str, str]]  # label before the cut by the label after it, if blocks are absent
    parameters: dict[str, list[int]]  # `before` and `after` the cut: all, and without embeddings


Class = TypedDict("Class", {"class": str})


class Manifest(Class):
    """Fields of a manifest that are read."""

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
    add_files: Callable[[Path], None] | None = None,
    parent: str = "",
    revision: str | None = None,
) -> None:
    """Write a model, its tokenizer and its manifest atomically; an earlier checkpoint of this package is replaced.

    The digests of the written files are added to the manifest.

    Args:
        folder: of the checkpoint.
        model: the model.
        manifest: what was removed.
        tokenizer: of the model; None: the checkpoint has none.
        add_files: writes further files, such as the plan and the card, into the unfinished folder.
        parent: the model that was cut, whose companions are copied and which must not be overwritten.
        revision: of the parent.
    """
    with new_folder(folder, lambda path: check_folder(path, [parent], keeps_trained=False)) as unfinished:
        _write_model(unfinished, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        _copy_companions(embedded.resolve(parent) if parent else "", unfinished, revision)
        if add_files is not None:
            add_files(unfinished)
        files = {path: content_digest(unfinished / path) for path in sorted(_files(unfinished))}
        write_artefact(unfinished / MANIFEST, SCHEMA, VERSION, {**manifest, "files": files})


def check_folder(folder: str | os.PathLike[str], parents: Collection[str] = (), keeps_trained: bool = True) -> None:
    """Raise `InputError` if a folder holds anything but an unchanged checkpoint of this package, or is a parent.

    `keeps_trained`: neither one that was trained.
    """
    folder = Path(folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if any(Path(parent).is_dir() and folder.samefile(parent) for parent in parents if parent):
        raise InputError(f"{folder} is the model that is cut, which would be lost; name another folder")
    manifest = read_manifest(folder) or {"files": {}}
    if keeps_trained and is_trained(manifest):
        raise InputError(f"{folder} holds a trained checkpoint, which would be lost; name another folder")
    digests = {name: content_digest(folder / name) for name in manifest["files"] if (folder / name).is_file()}
    known = {name for name, digest in digests.items() if digest == manifest["files"][name]}
    if foreign := sorted(set(_files(folder)) - known):
        raise InputError(
            f"{folder} holds files that do not belong to a checkpoint of lmeval-prune, or have changed "
            f"({first_few(foreign, most=3)}), which would be lost; name another folder"
        )


def _copy_companions(source: str, folder: Path, revision: str | None) -> None:
    """Copy those files of a model that are not in the folder yet, if it was loaded from a folder or the Hub."""
    is_stored = Path(source).is_dir() if source else False
    if source and not is_stored:
        with suppress(HFValidationError):  # no name on the Hub
            is_stored = embedded.cached_file(source, {"revision": revision}) is not None

    def copy(name: str) -> None:
        file = cached_file(source, name, revision=revision, **OPTIONAL)
        if file is not None and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)

    for name in _COMPANIONS if is_stored else ():
        copy(name)
    modules = read_json(folder / _MODULES, list[dict[str, Any]]) if (folder / _MODULES).is_file() else []
    for path in (PurePosixPath(str(module.get("path") or "")) for module in modules):
        if path.parts and not path.is_absolute() and ".." not in path.parts:  # else the transformers model, or outside
            for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
                copy(f"{path}/{name}")


def _files(folder: Path) -> list[str]:
    """Return relative names of files, links and empty folders under a folder, without the manifest and locks."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    names = (path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if name != MANIFEST and not name.startswith(TEMPORARY_PREFIX)]


def _write_model(folder: Path, model: Any) -> None:
    """Save with transformers, and the code of the class if layers differ.

    Generation settings are written directly, because transformers refuses some that it reads.
    """
    config, settings = model.config, getattr(model, "generation_config", None)
    if has_pruned_layers(config):
        stock = stock_class(model)
        classes: dict[str, Any] = dict.fromkeys(task_classes(stock, config), stock)
        base = auto_model_class("AutoModel", config)  # engines build the model without its head
        if base is not None or not classes:
            classes["AutoModel"] = base or stock
        config.architectures = [f"{PREFIX}{stock.__name__}"]
        config.auto_map = {name: f"modeling_pruned.{PREFIX}{kind.__name__}" for name, kind in classes.items()}
        code = Path(modeling_pruned.__file__).read_text(encoding="utf-8")
        for name in dict.fromkeys(kind.__name__ for kind in classes.values()):
            code += f"\n\nfrom transformers import {name}  # noqa: E402\n\n\n"
            code += f"class {PREFIX}{name}(Pruned, {name}):\n    pass\n"
        (folder / "modeling_pruned.py").write_text(code, encoding="utf-8")
    with replaced(model, generation_config=GenerationConfig()) if settings is not None else nullcontext():
        model.save_pretrained(folder)
    if settings is not None:
        settings.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])


# --------------------------------------------------------------------------- manifests


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, or None if it has none; refuse a damaged manifest (`InputError`)."""
    path = Path(folder) / MANIFEST
    return read_artefact(path, SCHEMA, VERSION, Manifest)[0] if path.is_file() else None


def manifest_of(model: Any) -> dict[str, Any] | None:
    """Return the manifest in the folder of a loaded model; None if there is none, or it is for other weights."""
    manifest = read_manifest(getattr(model.config, "_name_or_path", "") or "nowhere")
    return manifest if manifest and weights_fingerprint(model) in manifest["weights"] else None


def valid_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint if the weights in the folder match it; else None, with a warning."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    digests, path = manifest["files"], Path(folder)
    files = weight_files(path, {file.name for file in path.iterdir()} | digests.keys())
    actual = {file.relative_to(path).as_posix(): content_digest(file) for file in files if file.is_file()}
    if len(actual) < len(files) or any(digests.get(name) != value for name, value in actual.items()):
        _logger.warning("%s holds other weights than %s was written for, which is ignored", folder, MANIFEST)
        return None
    return manifest


def is_trained(manifest: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint was trained after its last cut; a cut of a trained one inherits its questions."""
    return "trained_on" in manifest and PLAN not in manifest["files"]


def checkpoint_columns(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the results file's entry about a cut checkpoint: its parent, and what all stages removed."""
    stages = manifest["stages"]
    always, others = ("heads", "kv_heads", "channels"), ("blocks", "layers")
    total = {name: sum(stage["removed"].get(name, 0) for stage in stages) for name in always + others}
    total = {name: count for name, count in total.items() if count or name in always}
    parent = {name: stages[0]["parent"][name] for name in ("name", "revision")}
    return {"parent": parent, "class": manifest["class"], "stages": len(stages), "removed": total}


def kept_layers(stage: Mapping[str, Any]) -> dict[str, str]:
    """Return the label before a cut of each layer after it, from a manifest's entry about the cut."""
    layers: dict[str, str] = stage.get("kept_layers") or {label: label for label in stage["kept_heads"]}
    return layers


def first_labels(stages: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the label in the model before the first of the cuts of each layer after the last of them."""
    labels: dict[str, str] = {}
    for stage in stages:
        labels = {child: labels.get(parent, parent) for child, parent in kept_layers(stage).items()}
    return labels


def removed_blocks(stages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the blocks that each cut removed as a whole, by their names in the model before the first of the cuts."""
    blocks: list[list[str]] = []
    for number, stage in enumerate(stages):
        labels = first_labels(stages[:number])
        blocks.append([])
        for name in stage["removed_blocks"]:
            label, _, kind = name.rpartition(".")
            layer = label.replace("cross.", "decoder.")  # cross-attention is in a layer of the decoder
            first = labels.get(layer, layer)
            blocks[-1].append(f"{first if layer == label else first.replace('decoder.', 'cross.')}.{kind}")
    return blocks


def removal_summary(manifest: dict[str, Any]) -> str:
    """Return one line about what was removed from a cut checkpoint."""
    columns = checkpoint_columns(manifest)
    counts = ", ".join(f"{count} {name}" for name, count in columns["removed"].items())
    blocks = compact_names(name for names in removed_blocks(manifest["stages"]) for name in names)  # L5-7+L9.attention
    about = f"; blocks: {blocks}" if blocks else ""
    stages = columns["stages"]
    return f"{counts} removed from {columns['parent']['name']} in {stages} stage{'s' * (stages > 1)}{about}"
