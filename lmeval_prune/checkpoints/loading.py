"""Load models: choose the class that the checkpoint's weights belong to, and check that they do."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoHfQuantizer

from lmeval_prune.architectures import nonfinite_tensor
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
    """Return the auto class with which lm-eval loads a language model."""
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
    """Return the `Pruned` variant of a transformers class."""
    return type(f"{PREFIX}{stock.__name__}", (modeling_pruned.Pruned, stock), {"__module__": __name__})


def stock_class(model: Any) -> type:
    """Return the transformers class of a model, also of a `Pruned` one."""
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
        """Load a model; see `load_weights`."""
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
