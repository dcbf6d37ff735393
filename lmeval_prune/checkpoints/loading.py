"""Load and write checkpoints: classes, models with weights or without, tokenizers, identities, manifests of cuts.

A cut model is saved atomically, with a manifest of what was removed. Processors, a sentence encoder's modules and
licenses are copied from the model that was cut; weights, configuration, tokenizer and card are written anew; code of
the model is left out.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from lmeval_prune.architectures import nonfinite_tensor, weights_fingerprint
from lmeval_prune.architectures.names import compact_names
from lmeval_prune.artefacts import (
    TEMPORARY_PREFIX,
    content_digest,
    digest,
    new_folder,
    read_artefact,
    read_json,
    write_artefact,
)
from lmeval_prune.attributes import replaced
from lmeval_prune.checkpoints import embedded, modeling_pruned
from lmeval_prune.errors import InputError, brief, first_few

_logger = logging.getLogger(__name__)
PREFIX = "Pruned"  # begins the class names of checkpoints whose layers differ
_LANGUAGE_AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
# Tensors in layers that the class does not need: buffers of older transformers versions, and scales of caches.
_UNUSED_TENSORS = re.compile(
    r"rotary_emb\.|inv_freq$|position_ids$|(attn|attention)\.(bias|masked_bias)$"
    r"|\.(q|k|v|kv|prob|output)_(scale|zero_point)$"
)
# Names of multi-token-prediction layers, which follow the model's own layers.
_MULTI_TOKEN_PREDICTION = re.compile(r"nextn|mtp|(eh_proj|enorm|hnorm|shared_head)\.")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|py)")  # .py: code of the checkpoint
_BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt")  # suffixes
_READ_BESIDE_WEIGHTS = re.compile(r".*(token|vocab|merges|template).*|.*\.(model|jinja)")
_TRAINING = re.compile(r"training_args|optimizer|scheduler|rng_state|scaler")  # files of a trainer
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "source.spm"),
)
# Options of `cached_file` for a file that a model need not have.
OPTIONAL: dict[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}
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


@contextmanager
def as_input_error(problem: str) -> Iterator[None]:
    """Raise an `InputError` of one line, which begins with `problem`, instead of any error in the block."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # transformers raises errors of any type for files that it cannot read
        reason = brief(str(error), 300)  # its first line may name only a field, not the fault
        raise InputError(f"{problem} ({type(error).__name__}: {reason})") from error


def read_config(pretrained: str, revision: str | None = None) -> Any:
    """Read the configuration of a folder, hub model or embedded model without running code of the model."""
    embedded.check_name(pretrained)
    with as_input_error(f"cannot read the model {pretrained}"), modeling_pruned.without_warnings_of_layers():
        config = AutoConfig.from_pretrained(embedded.resolve(pretrained), revision=revision, trust_remote_code=False)
        quantised = getattr(config, "quantization_config", None)
        if quantised and not AutoHfQuantizer.supports_quant_method(quantised):  # else loaded as if it were not
            raise InputError(f"{pretrained}: transformers does not know the quant_method {quantised['quant_method']}")
        return config


# --------------------------------------------------------------------------- classes


def has_pruned_layers(config: Any) -> bool:
    """Return whether a configuration is that of a cut checkpoint whose layers differ."""
    return isinstance(getattr(config, "pruned_modules", None), dict)


def checkpoint_class(config: Any) -> Any:
    """Return the model class of a checkpoint's weights, a `Pruned` class if its layers differ.

    `architectures` names the class. If it is missing, or names a class of the checkpoint's own code, the family's
    language model is returned; loading refuses the weights of another class.
    """
    stock = architecture_class(config) or next(iter(_language_classes(config)), None)
    return pruned_class(stock) if has_pruned_layers(config) else stock


def architecture_class(config: Any) -> Any:
    """Return the model class that `architectures` names; None if missing, unknown, or of another configuration."""
    names = getattr(config, "architectures", None) or [""]
    stock = getattr(transformers, str(names[0]).removeprefix(PREFIX), None)
    if not isinstance(stock, type) or not issubclass(stock, PreTrainedModel):
        return None
    return stock if _takes_config(stock, config) or stock in _language_classes(config) else None


def _takes_config(model_class: Any, config: Any) -> bool:
    return model_class.config_class is None or isinstance(config, model_class.config_class)


def _language_classes(config: Any) -> list[Any]:
    return [kind for name in _LANGUAGE_AUTO_CLASSES if (kind := auto_model_class(name, config))]


def auto_model_class(name: str, config: Any) -> Any:
    """Return the class that transformers' auto class `name` builds for a configuration, or None."""
    model_class = getattr(transformers, name)._model_mapping.get(type(config), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class


def task_classes(model_class: type, config: Any) -> list[str]:
    """Return the names of transformers' auto classes of a task (`AutoModelFor…`) that build a model class."""
    names = [name for name in modeling_auto.__all__ if name.startswith("AutoModelFor")]
    return [name for name in names if auto_model_class(name, config) is model_class]


@cache
def pruned_class(stock: type) -> Any:
    return type(f"{PREFIX}{stock.__name__}", (modeling_pruned.Pruned, stock), {"__module__": __name__})


def stock_class(model: Any) -> type:
    classes = type(model).__mro__
    return next((kind for kind in classes if kind.__module__.startswith("transformers.")), classes[0])


# --------------------------------------------------------------------------- weights


def load_pretrained(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model in evaluation mode: any transformers model, or a cut one whose layers differ.

    Args:
        folder: a folder, or a name that transformers or `lmeval-prune models` knows.
        options: options of transformers' `from_pretrained`; without `dtype`, weights keep their own type.
    """
    config = read_config(str(folder))
    model_class = checkpoint_class(config)
    if not _takes_config(model_class, config):  # else transformers would read it as that of the class
        options = {"config": config, **options}
    with as_input_error(f"the model {folder} cannot be loaded"):
        return load_weights(model_class, embedded.resolve(str(folder)), **{"dtype": "auto", **options})


def load_weights(model_class: Any, pretrained: Any, *inputs: Any, **options: Any) -> Any:
    """Load a model in evaluation mode; refuse weights of another class and weights that are not finite.

    transformers initialises missing tensors at random and drops tensors that the class does not have. Dropped tensors
    are refused if the checkpoint's model computes something else with them, else they are logged. `model_class` may be
    an auto class; the other arguments are those of its `from_pretrained`.
    """
    model, report = model_class.from_pretrained(pretrained, *inputs, **options, output_loading_info=True)
    dropped = sorted(key for key in report["unexpected_keys"] if not _UNUSED_TENSORS.search(key))
    for keys, fault in ((report["missing_keys"], "lack"), (_needed(model, dropped), "have additional")):
        if keys:
            fault = f"they {fault} {first_few(sorted(keys), most=3)}; name their class in config.json's `architectures`"
            raise InputError(f"the weights of {pretrained} do not fit {type(model).__name__}: {fault}")
    if tensor := nonfinite_tensor(model):
        raise InputError(f"the weights of {pretrained} are broken: {tensor} has NaN or infinite values")
    if dropped:
        _logger.warning("%s leaves out weights of %s: %s", type(model).__name__, pretrained, first_few(dropped, most=3))
    return model.eval()


@contextmanager
def with_padded_rows(adapter: str, **options: Any) -> Iterator[None]:
    """Let lm-eval's `hf` load an adapter on all rows of the model's embeddings, also those of no token.

    It cuts the rows to the number of tokens, which is right only for an adapter that was trained on so many.
    """
    from peft.utils import load_peft_weights

    resize = PreTrainedModel.resize_token_embeddings

    def enlarge(model: Any, size: int, *inputs: Any, **settings: Any) -> Any:
        cuts = size < model.get_input_embeddings().num_embeddings
        if cuts and not any(size in weight.shape for weight in load_peft_weights(adapter, "cpu", **options).values()):
            return model.get_input_embeddings()
        return resize(model, size, *inputs, **settings)

    with replaced(PreTrainedModel, resize_token_embeddings=enlarge):
        yield


def _needed(model: Any, dropped: list[str]) -> list[str]:
    """Return the dropped tensors that the checkpoint's own model uses, so that the class computes something else.

    These are parameters that a module of the class may have (a bias), parts of its layers, additional layers, and heads
    if `architectures` does not name the class. Not needed are towers of other modalities, multi-token-prediction
    layers, and heads that the named class does not have.
    """
    modules = dict(model.named_modules())
    is_named = architecture_class(model.config) is not None
    counts = [count for name, count in model.config.to_dict().items() if _MULTI_TOKEN_PREDICTION.search(name)]
    next_token_layers = max((count for count in counts if type(count) is int), default=0)

    def split(key: str) -> tuple[str, list[str]]:
        """Split a tensor's name into the innermost module that the model has, and the remaining parts."""
        parts = key.split(".")
        depth = next(n for n in range(len(parts) - 1, -1, -1) if ".".join(parts[:n]) in modules)
        return ".".join(parts[:depth]), parts[depth:]

    def is_needed(key: str) -> bool:
        # in a model that was saved without its head, names lack the prefix of the base model
        candidates = map(split, (key, f"{model.base_model_prefix}.{key}"))
        module, (part, *rest) = min(candidates, key=lambda candidate: len(candidate[1]))
        if part.isdecimal():  # an additional layer
            layer = key.removesuffix(".".join(rest))
            tensors = (other[len(layer) :] for other in dropped if other.startswith(layer))
            own_layers = len(list(modules[module].children()))
            return not any(map(_MULTI_TOKEN_PREDICTION.match, tensors)) and int(part) >= own_layers + next_token_layers
        if (not rest and part in modules[module]._parameters) or re.search(r"\.\d+(\.|$)", module):
            return True
        is_tower = any(re.match(rf"{re.escape(part)}\..*\.\d+\.", other) for other in dropped)
        return not (is_named or module or is_tower)

    return [key for key in dropped if is_needed(key)]


# --------------------------------------------------------------------------- without weights


def skeleton(config: Any, auto_class: Any = None, trust_remote_code: bool = False) -> Any:
    """Build the model of a configuration on the meta device, by default with its `checkpoint_class`."""
    config = copy.deepcopy(config)
    model_class = checkpoint_class(config) if auto_class is None or has_pruned_layers(config) else None
    with torch.device("meta"), as_input_error("no model can be built from config.json"):
        if model_class:
            model: Any = model_class._from_config(config)
        else:
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    model.config._name_or_path = getattr(config, "_name_or_path", "")
    return model


def language_skeleton(config: Any, trust_remote_code: bool = False) -> Any:
    """Build the language model that lm-eval loads on the meta device; raise `InputError` if there is none."""
    is_seq2seq = auto_model_class("AutoModelForSeq2SeqLM", config)
    model = skeleton(config, AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM, trust_remote_code)
    check_language_model(config, model)
    return model


def check_language_model(config: Any, language_model: Any) -> None:
    """Refuse a classifier, or a model without a head, which lm-eval would load as a language model.

    `language_model` is the skeleton of the model that lm-eval would load. A model without a head is accepted if the
    language model's head is tied, because the checkpoint then has all parameters.
    """
    named = architecture_class(config)
    if named is None:  # the weights are checked when they are loaded
        return
    try:
        model = language_model if isinstance(language_model, named) else skeleton(config)
    except InputError:  # cannot be built without weights
        return

    def parameters(model: Any) -> set[str]:
        return {name.removeprefix(f"{model.base_model_prefix}.") for name, _ in model.named_parameters()}

    has_no_head = model.get_output_embeddings() is None
    if has_no_head and (model is language_model or parameters(model) != parameters(language_model)):
        name = getattr(config, "_name_or_path", "") or "this"
        raise InputError(f"{name} is a {type(model).__name__}, no language model, and lm-eval supports no others")


def skeleton_of(pretrained: str, revision: str | None = None) -> Any:
    return skeleton(read_config(pretrained, revision))


def with_weights(model: Any, pretrained: str, revision: str | None = None) -> Any:
    """Load the model of `skeleton_of` with its weights in their own dtype; raise `InputError` if that fails."""
    with as_input_error(f"the weights of {pretrained} cannot be loaded"):
        return load_weights(type(model), embedded.resolve(pretrained), revision=revision, dtype="auto")


def is_quantised(model: Any) -> bool:
    return bool(getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None))


def check_unquantised(model: Any, pretrained: str) -> None:
    if is_quantised(model):
        raise InputError(f"{pretrained} is quantised, and cannot be cut or rewritten; give its dequantised weights")


def tokenizer_of(pretrained: str, revision: str | None, add_bos_token: bool | None = None) -> Any:
    """Load a model's tokenizer; return None if it has no tokenizer files (transformers would invent a tokenizer)."""
    source = embedded.resolve(pretrained)
    if not any(cached_file(source, name, revision=revision, **OPTIONAL) for name in TOKENIZER_FILES):
        return None
    settings = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    with as_input_error(f"the tokenizer of {pretrained} cannot be read; repair its files, or remove them"):
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False, **settings)


# --------------------------------------------------------------------------- identity


def weight_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files in a folder that hold weights or code of the checkpoint, sorted by name."""
    return [folder / name for name in sorted(names) if _WEIGHTS.fullmatch(name) and not _TRAINING.match(name)]


def checkpoint_identity(
    pretrained: str, revision: str | None = None, subfolder: str = "", gguf_file: str | None = None
) -> str:
    """Return a digest of a checkpoint's weights, independent of its name; for a hub model, of name and commit."""
    embedded.check_name(pretrained)
    folder = Path(embedded.resolve(pretrained)).expanduser()
    if folder.is_dir():
        folder = folder / subfolder
        names = [gguf_file] if gguf_file else [path.name for path in folder.iterdir()] if folder.is_dir() else []
        files = [path for path in weight_files(folder, names) if path.is_file()]
        if not files:  # all such folders would have one identity
            raise InputError(f"pretrained={pretrained}: the folder holds no weights")
        return digest([content_digest(path) for path in files])
    config = cached_file(pretrained, gguf_file or "config.json", revision=revision, subfolder=subfolder)
    commit: Any = extract_commit_hash(config, None)
    variant = [name for name in (subfolder, gguf_file) if name]  # a commit may hold several models
    return digest([pretrained, commit or content_digest(str(config)), *variant])


def configuration_files(pretrained: str, subfolder: str = "") -> list[Path]:
    """Return the files beside a checkpoint's weights; none of a hub model, which a commit identifies."""
    folder = Path(embedded.resolve(pretrained)).expanduser() / subfolder
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in files if file.suffix in _BESIDE_WEIGHTS]


def configuration_digests(pretrained: str) -> dict[str, str]:
    """Return digests of configuration (without path and version), tokenizer and chat template, by file."""
    digests = {}
    for file in configuration_files(pretrained):
        if file.name in ("config.json", "generation_config.json"):
            ignored = ("_name_or_path", "transformers_version")
            digests[file.name] = digest({name: value for name, value in read_json(file).items() if name not in ignored})
        elif _READ_BESIDE_WEIGHTS.fullmatch(file.name):
            digests[file.name] = content_digest(file)
    return digests


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

    `add_files` writes further files, such as the plan and the card, into the unfinished folder; the digests of all are
    added to the manifest. `parent` is the model that was cut, whose companions are copied, and which must not be
    overwritten.
    """
    with new_folder(folder, lambda path: check_folder(path, parent, keeps_trained=False)) as unfinished:
        _write_model(unfinished, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        _copy_companions(embedded.resolve(parent) if parent else "", unfinished, revision)
        if add_files is not None:
            add_files(unfinished)
        files = {path: content_digest(unfinished / path) for path in sorted(_files(unfinished))}
        write_artefact(unfinished / MANIFEST, SCHEMA, VERSION, {**manifest, "files": files})


def check_folder(folder: str | os.PathLike[str], parent: str, keeps_trained: bool = True) -> None:
    """Refuse the parent, and all but an unchanged checkpoint; with `keeps_trained`, also one that was trained."""
    folder = Path(folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if parent and Path(parent).is_dir() and folder.samefile(parent):
        raise InputError(f"{folder} is the model that is cut, which would be lost; name another folder")
    manifest = read_manifest(folder) or {"files": {}}
    if keeps_trained and is_trained(manifest):
        raise InputError(f"{folder} holds a trained checkpoint, which would be lost; name another folder")
    digests = {name: content_digest(folder / name) for name in manifest["files"] if (folder / name).is_file()}
    known = {name for name, digest in digests.items() if digest == manifest["files"][name]}
    if foreign := sorted(set(_files(folder)) - known):
        found = first_few(foreign, most=3)
        raise InputError(f"{folder} holds files of others, or that have changed ({found}); name another folder")


def _copy_companions(source: str, folder: Path, revision: str | None) -> None:
    """Copy those files of a model that are not in the folder yet, if it was loaded from a folder or the Hub."""
    is_stored = bool(source) and Path(source).is_dir()
    if source and not is_stored:
        with suppress(HFValidationError):  # no name on the Hub
            is_stored = isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str)

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
    return read_artefact(path, SCHEMA, VERSION)[0] if path.is_file() else None


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
    """Return the label before a cut of each layer after it."""
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

    def first_name(name: str, labels: Mapping[str, str]) -> str:
        label, _, kind = name.rpartition(".")
        layer = label.replace("cross.", "decoder.")  # cross-attention is in a layer of the decoder
        first = labels.get(layer, layer)
        return f"{first if layer == label else first.replace('decoder.', 'cross.')}.{kind}"

    labels = [first_labels(stages[:number]) for number in range(len(stages))]
    return [[first_name(x, own) for x in stage["removed_blocks"]] for stage, own in zip(stages, labels, strict=True)]


def removal_summary(manifest: dict[str, Any]) -> str:
    """Return one line about what was removed from a cut checkpoint."""
    columns = checkpoint_columns(manifest)
    counts = ", ".join(f"{count} {name}" for name, count in columns["removed"].items())
    blocks = compact_names(name for names in removed_blocks(manifest["stages"]) for name in names)  # L5-7+L9.attention
    about = f"; blocks: {blocks}" if blocks else ""
    stages = columns["stages"]
    return f"{counts} removed from {columns['parent']['name']} in {stages} stage{'s' * (stages > 1)}{about}"
