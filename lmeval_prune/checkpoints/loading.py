"""Load models: the class of a checkpoint's weights, the model with weights or without, its tokenizer, its identity."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from lmeval_prune.architectures import nonfinite_tensor
from lmeval_prune.artefacts import content_digest, digest, read_json
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
    embedded.check_name(pretrained, {"revision": revision})
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


def language_auto_class(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if auto_model_class("AutoModelForSeq2SeqLM", config) else AutoModelForCausalLM


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
            raise InputError(
                f"the weights of {pretrained} do not fit {type(model).__name__}: they {fault} "
                f"{first_few(sorted(keys), most=3)}; name their class in `architectures` of config.json, or fetch the "
                f"model again"
            )
    if tensor := nonfinite_tensor(model):
        raise InputError(
            f"the weights of {pretrained} are broken: {tensor} has NaN or infinite values; fetch them again"
        )
    if dropped:
        _logger.warning("%s leaves out weights of %s: %s", type(model).__name__, pretrained, first_few(dropped, most=3))
    return model.eval()


@dataclass(frozen=True)
class CheckedLoader:
    """Model class or auto class whose `from_pretrained` calls `load_weights`."""

    model_class: Any

    def from_pretrained(self, *inputs: Any, **options: Any) -> Any:
        return load_weights(self.model_class, *inputs, **options)


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
    model = skeleton(config, language_auto_class(config), trust_remote_code)
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
        raise InputError(
            f"{getattr(config, '_name_or_path', '') or 'this'} is a {type(model).__name__}, no language model, and "
            f"lm-eval supports no others; name a language model"
        )


def skeleton_of(pretrained: str, revision: str | None = None) -> Any:
    return skeleton(read_config(pretrained, revision))


def with_weights(model: Any, pretrained: str, revision: str | None = None) -> Any:
    """Load the model of `skeleton_of` with its weights in their own dtype; raise `InputError` if that fails."""
    with as_input_error(f"the weights of {pretrained} cannot be loaded"):
        return load_weights(type(model), embedded.resolve(pretrained), revision=revision, dtype="auto")


def is_quantised(model: Any) -> bool:
    return bool(getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None))


def check_unquantised(model: Any, pretrained: str) -> None:
    """Raise `InputError` for a quantised model, which may have no weights yet."""
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
    """Return a digest of a checkpoint's weights, independent of the folder's name; for a hub model, of name and commit.

    Arguments as for transformers; `pretrained` may be an embedded model.
    """
    embedded.check_name(pretrained, {"gguf_file": gguf_file, "subfolder": subfolder, "revision": revision})
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
    """Return the files beside a checkpoint's weights, sorted by name; none of a hub model, which a commit identifies.

    Besides configuration, tokenizer and chat template there can be files that no model reads.
    """
    folder = Path(embedded.resolve(pretrained)).expanduser() / subfolder
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in files if file.suffix in _BESIDE_WEIGHTS]


def configuration_digests(pretrained: str) -> dict[str, str]:
    """Return digests of a checkpoint's configuration, tokenizer and chat template, by the names of their files.

    Of a configuration's, path and version do not count, which change when a model is written again.
    """
    digests = {}
    for file in configuration_files(pretrained):
        if file.name in ("config.json", "generation_config.json"):
            ignored = ("_name_or_path", "transformers_version")
            digests[file.name] = digest({name: value for name, value in read_json(file).items() if name not in ignored})
        elif _READ_BESIDE_WEIGHTS.fullmatch(file.name):
            digests[file.name] = content_digest(file)
    return digests
