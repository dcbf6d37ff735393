"""Checkpoints of models that were cut: written whole or not at all, loaded by us, by transformers, or not at all."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NotRequired

import transformers
from annotated_types import Len
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedModel,
)
from typing_extensions import TypedDict

from lmeval_prune.architectures import nonfinite_tensor, weights_fingerprint
from lmeval_prune.artefacts import TEMPORARY, content_digest, new_folder, read_artefact, write_artefact
from lmeval_prune.checkpoints import embedded, modeling_pruned
from lmeval_prune.checkpoints.identity import TRAINING, WEIGHTS
from lmeval_prune.errors import InputError, first_few, first_line

_logger = logging.getLogger(__name__)
SCHEMA, VERSION = "lmeval-prune/checkpoint", 1
MANIFEST = "lmeval_prune.json"
_PREFIX = "Pruned"
UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError)  # what transformers raises for what it cannot load
_KINDS = (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel)
_OTHER_KINDS = (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForPreTraining,
)
# inside layers, of no use to the class: buffers of older transformers, which are computed now, and scales of caches
_UNUSED = re.compile(
    r"rotary_emb\.|inv_freq$|position_ids$|(attn|attention)\.(bias|masked_bias)$"
    r"|\.(q|k|v|kv|prob|output)_(scale|zero_point)$"
)
# of layers that predict further tokens, which follow those of the model
_NEXT_TOKENS = re.compile(r"nextn|mtp|(eh_proj|enorm|hnorm|shared_head)\.")


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


def has_own_layers(config: Any) -> bool:
    """Whether it is the configuration of a checkpoint whose layers differ."""
    return isinstance(getattr(config, "pruned_modules", None), dict)


@contextmanager
def refused_as(problem: str) -> Iterator[None]:
    """Refuse in one line whatever transformers raises for files that it cannot read.

    Args:
        problem: what cannot be done, e.g. `cannot read the model NAME`.

    Raises:
        InputError: something was raised inside the block.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers reads a stranger's files, and fails in its own ways
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{problem}: it brings its own code, which only lm-eval's models run, after you have read it: "
                f"--model pruned-hf --model_args pretrained=…,trust_remote_code=true"
            ) from error
        reason = " ".join(str(error).split())[:300]  # the first line of some names a field, and the next what is wrong
        raise InputError(f"{problem} ({type(error).__name__}: {reason})") from error


def read_config(pretrained: str, revision: str | None = None) -> Any:
    """Read a model's configuration, and run no code that the model brings along.

    Args:
        pretrained: a folder, or a name that transformers or `lmeval-prune models` knows.
        revision: of a hub's model.

    Raises:
        InputError: it cannot be read.
    """
    embedded.check_name(pretrained, {"revision": revision})
    with refused_as(f"cannot read the model {pretrained}"):
        return AutoConfig.from_pretrained(embedded.resolve(pretrained), revision=revision, trust_remote_code=False)


def class_of(config: Any) -> Any:
    """Return the class that a checkpoint's weights are of, `Pruned` where its layers differ.

    `architectures` names it. Where that is missing, or transformers has no such class for such a model (a class of the
    checkpoint's own code), it is the family's language model; loading refuses the weights of another class.

    Raises:
        InputError: the configuration names no model class, or transformers cannot build the model.
    """
    stock = named_class(config)
    if has_own_layers(config):
        if stock is None:
            raise InputError(_wrong_name(config))
        return pruned_class(stock)
    found = stock or next((kind for auto in _KINDS if (kind := _of_kind(auto, config))), None)
    if found is None:
        raise InputError(f"it is a {config.model_type} model, which transformers cannot build")
    return found


def named_class(config: Any) -> Any:
    """Return the class of transformers' that `architectures` names; None if there is none for such a model.

    Raises:
        InputError: what it names is no model class.
    """
    names = getattr(config, "architectures", None) or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise InputError(_wrong_name(config))
    own = has_own_layers(config)
    if own and not names[0].startswith(_PREFIX):
        raise InputError(_wrong_name(config))
    found = getattr(transformers, names[0].removeprefix(_PREFIX) if own else names[0], None)
    if found is None:
        return None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise InputError(_wrong_name(config))
    return found if found.config_class is None or isinstance(config, found.config_class) else None


def language_kind(config: Any) -> Any:
    """Return the auto class by which lm-eval loads a language model."""
    return AutoModelForSeq2SeqLM if _of_kind(AutoModelForSeq2SeqLM, config) else AutoModelForCausalLM


def _wrong_name(config: Any) -> str:
    return (
        f"config.json names {config.architectures!r} in `architectures`, which is no class of transformers' for "
        f"{config.model_type} models; name the class of the weights there, or fetch or cut the model again"
    )


def load_weights(kind: Any, pretrained: Any, *inputs: Any, **options: Any) -> Any:
    """Load a model, in evaluation mode, and refuse weights that are another class's or no finite numbers.

    transformers draws at random what a file lacks, and leaves out what the class lacks. What is left out is refused
    where the model would compute something else without it, and is said where it would not.

    Args:
        kind: the class, or an auto class.
        pretrained, inputs, options: of its `from_pretrained`.

    Raises:
        InputError: naming tensors.
    """
    model, report = kind.from_pretrained(pretrained, *inputs, **options, output_loading_info=True)
    left_out = sorted(key for key in report["unexpected_keys"] if not _UNUSED.search(key))
    needed = _needed(model, left_out)
    for keys, fault in ((report["missing_keys"], "lack"), (needed, "have what it has not:")):
        if keys:
            raise InputError(
                f"the weights of {pretrained} are none of {type(model).__name__}, they {fault} "
                f"{first_few(sorted(keys), most=3)}; name their class in `architectures` of config.json, or fetch the "
                f"model again"
            )
    if tensor := nonfinite_tensor(model):
        raise InputError(broken_weights(pretrained, tensor))
    if left_out:
        _logger.warning(
            "%s leaves out weights of %s: %s", type(model).__name__, pretrained, first_few(left_out, most=3)
        )
    return model.eval()


def _needed(model: Any, left_out: list[str]) -> list[str]:
    """Return which tensors that were left out show that their checkpoint computes something else than the class.

    These are parameters that a module of the class can have (a bias), parts of its layers, further layers of the same
    kind, and, where `architectures` does not name the class, heads. Others (a tower of another modality, layers that
    predict further tokens, heads that the named class has not) change nothing that the class computes.
    """
    modules = dict(model.named_modules())
    named = named_class(model.config) is not None
    counts = [count for name, count in model.config.to_dict().items() if _NEXT_TOKENS.search(name)]
    next_tokens = max((count for count in counts if type(count) is int), default=0)

    def parted(key: str) -> tuple[str, list[str]]:
        """Return the innermost module that the model has, and the rest."""
        parts = key.split(".")
        depth = next(n for n in range(len(parts) - 1, -1, -1) if ".".join(parts[:n]) in modules)
        return ".".join(parts[:depth]), parts[depth:]

    def is_needed(key: str) -> bool:
        # a model that was saved without its head has names without the prefix
        module, (part, *rest) = min(
            map(parted, (key, f"{model.base_model_prefix}.{key}")), key=lambda pair: len(pair[1])
        )
        if part.isdecimal():
            layer = key.removesuffix(".".join(rest))
            own = any(_NEXT_TOKENS.match(other.removeprefix(layer)) for other in left_out if other.startswith(layer))
            return not own and int(part) >= len(list(modules[module].children())) + next_tokens
        if (not rest and part in modules[module]._parameters) or re.search(r"\.\d+(\.|$)", module):
            return True
        has_layers = any(re.match(rf"{re.escape(part)}\..*\.\d+\.", other) for other in left_out)
        return not (named or module or has_layers)

    return [key for key in left_out if is_needed(key)]


def broken_weights(pretrained: Any, tensor: str) -> str:
    """Return the message that refuses a model one of whose tensors has values that are no finite numbers."""
    return f"the weights of {pretrained} are broken: {tensor} has NaN or infinite values; fetch the model again"


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


@dataclass(frozen=True)
class Checked:
    """A model class, or an auto class, that loads by `load_weights`."""

    kind: Any

    def from_pretrained(self, *inputs: Any, **options: Any) -> Any:
        """Load a model; see `load_weights`."""
        return load_weights(self.kind, *inputs, **options)


def load_pretrained(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model, stock or one whose layers differ, in evaluation mode.

    Args:
        folder: a folder, or a name that transformers or `lmeval-prune models` knows.
        options: of transformers' `from_pretrained`; weights have their own type unless `dtype` says otherwise.

    Raises:
        InputError: it cannot be loaded.
    """
    kind = class_of(read_config(str(folder)))
    with refused_as(f"the model {folder} cannot be loaded"):
        return load_weights(kind, embedded.resolve(str(folder)), **{"dtype": "auto", **options})


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
    """Files, links and empty folders under a folder, but for the manifest and a lock; their names from there."""
    found = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]
    return [path for path in found if path != MANIFEST and not path.startswith(TEMPORARY)]


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
    try:
        return read_artefact(path, SCHEMA, VERSION, Manifest)[0]
    except InputError as error:
        raise InputError(f"{error}; cut the model again, or remove it") from None


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
    kinds = (*_KINDS, *_OTHER_KINDS)
    names = {kind.__name__: stock for kind in kinds if _of_kind(kind, config) is stock} or {"AutoModel": stock}
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
