"""Loads models: the class that a checkpoint's weights are of, decided once, and weights that are that class's."""

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

from lmeval_prune.architectures import nonfinite_tensor
from lmeval_prune.checkpoints import embedded, modeling_pruned
from lmeval_prune.errors import InputError, first_few

_logger = logging.getLogger(__name__)
PREFIX = "Pruned"  # of the names of classes whose layers differ
_LANGUAGE_KINDS = ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
# inside layers, of no use to the class: buffers of older transformers, which are computed now, and scales of caches
_UNUSED = re.compile(
    r"rotary_emb\.|inv_freq$|position_ids$|(attn|attention)\.(bias|masked_bias)$"
    r"|\.(q|k|v|kv|prob|output)_(scale|zero_point)$"
)
# of layers that predict further tokens, which follow those of the model
_NEXT_TOKENS = re.compile(r"nextn|mtp|(eh_proj|enorm|hnorm|shared_head)\.")


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


# --------------------------------------------------------------------------- classes


def has_own_layers(config: Any) -> bool:
    """Return whether it is the configuration of a checkpoint whose layers differ."""
    return isinstance(getattr(config, "pruned_modules", None), dict)


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
    stock = stock or next((kind for name in _LANGUAGE_KINDS if (kind := class_of_kind(name, config))), None)
    if stock is None:
        raise InputError(f"it is a {config.model_type} model, which transformers cannot build")
    return stock


def named_class(config: Any) -> Any:
    """Return the class of transformers' that `architectures` names; None if there is none for such a model.

    Raises:
        InputError: what it names is no model class.
    """
    names = getattr(config, "architectures", None) or [""]
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str) or (has_own_layers(config) and not name.startswith(PREFIX)):
        raise InputError(_wrong_name(config))
    kind = getattr(transformers, name.removeprefix(PREFIX) if has_own_layers(config) else name, None)
    if kind is None:
        return None
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
        raise InputError(_wrong_name(config))
    return kind if kind.config_class is None or isinstance(config, kind.config_class) else None


def _wrong_name(config: Any) -> str:
    return (
        f"config.json names {config.architectures!r} in `architectures`, which is no class of transformers' for "
        f"{config.model_type} models; name the class of the weights there, or fetch or cut the model again"
    )


def language_kind(config: Any) -> Any:
    """Return the auto class by which lm-eval loads a language model."""
    is_seq2seq = class_of_kind("AutoModelForSeq2SeqLM", config)
    return AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM


def class_of_kind(name: str, config: Any) -> Any:
    """Return the class that one of transformers' auto classes builds for a configuration; None if it builds none."""
    kind = getattr(transformers, name)._model_mapping.get(type(config), None)
    return kind[0] if isinstance(kind, tuple) else kind


@cache
def pruned_class(stock: type) -> Any:
    """Return `Pruned` of a stock class."""
    return type(f"{PREFIX}{stock.__name__}", (modeling_pruned.Pruned, stock), {"__module__": __name__})


def pruned_base_class(config: Any) -> Any:
    """Return `Pruned` of the stock model without its head, for a checkpoint whose layers differ."""
    return pruned_class(class_of_kind("AutoModel", config))


def stock_class(model: Any) -> type:
    """Return the class of transformers' own that a model is, or is a `Pruned` of, whoever loaded it."""
    kinds = type(model).__mro__
    return next((kind for kind in kinds if kind.__module__.startswith("transformers.")), kinds[0])


# --------------------------------------------------------------------------- weights


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


def load_weights(kind: Any, pretrained: Any, *inputs: Any, **options: Any) -> Any:
    """Load a model, in evaluation mode, and refuse weights that are another class's or no finite numbers.

    transformers draws at random what a file lacks, and leaves out what the class lacks. What is left out is refused
    where the model would compute something else without it, and logged where it would not.

    Args:
        kind: the class, or an auto class.
        pretrained, inputs, options: of its `from_pretrained`.

    Raises:
        InputError: naming tensors.
    """
    model, report = kind.from_pretrained(pretrained, *inputs, **options, output_loading_info=True)
    left_out = sorted(key for key in report["unexpected_keys"] if not _UNUSED.search(key))
    for keys, fault in ((report["missing_keys"], "lack"), (_needed(model, left_out), "have what it has not:")):
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


def broken_weights(pretrained: Any, tensor: str) -> str:
    """Return the message that refuses a model one of whose tensors has values that are no finite numbers."""
    return f"the weights of {pretrained} are broken: {tensor} has NaN or infinite values; fetch the model again"


@dataclass(frozen=True)
class Checked:
    """A model class, or an auto class, that loads by `load_weights`."""

    kind: Any

    def from_pretrained(self, *inputs: Any, **options: Any) -> Any:
        """Load a model; see `load_weights`."""
        return load_weights(self.kind, *inputs, **options)


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
            predicts = any(_NEXT_TOKENS.match(other[len(layer) :]) for other in left_out if other.startswith(layer))
            return not predicts and int(part) >= len(list(modules[module].children())) + next_tokens
        if (not rest and part in modules[module]._parameters) or re.search(r"\.\d+(\.|$)", module):
            return True
        has_layers = any(re.match(rf"{re.escape(part)}\..*\.\d+\.", other) for other in left_out)
        return not (named or module or has_layers)

    return [key for key in left_out if is_needed(key)]
