"""Checks of a command's options that need neither torch nor a model, so that mistakes are reported at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmeval_prune import tasks
from lmeval_prune.architectures.heads import Head, head_names
from lmeval_prune.architectures.table import FAMILIES
from lmeval_prune.artefacts import cache_folder
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import check_exists, unknown_task_error
from lmeval_prune.options import INCLUDE_PATH
from lmeval_prune.pruners.table import PRUNERS
from lmeval_prune.settings import resolve_device

# names of the numbers of layers and heads in config.json
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def check(options: Mapping[str, Any]) -> None:
    """Refuse pruners, models, heads, tasks, files and devices in a command's options that do not exist."""
    for name in _values(options, "method", "ffn_method"):
        PRUNERS.check(name)
    model = {**(options.get("model_args") or {}), **options}
    pretrained = model.get("pretrained")
    if pretrained:
        embedded.check_name(str(pretrained), model)
    for name in options.get("names") or ():
        embedded.check_name(str(name))
    if model.get("teacher", "previous") not in ("previous", "first"):
        embedded.check_name(str(model["teacher"]), option="teacher")
    for heads in _values(options, "heads", "each"):
        if heads.endswith(".json"):
            check_exists(heads)
            continue
        names_a_stack = any("." in name for name in head_names(heads))  # of an encoder-decoder: `decoder.L5H3`
        if pretrained and not names_a_stack and (layers := outline(str(pretrained), model)):
            Head.parse(heads, layers)
    for name in _values(options, "task", "tasks") if not options.get(INCLUDE_PATH) else ():
        check_task(name)
    for path in _values(options, "plan", "scores", "mask", "grid", "folder"):
        check_exists(path)
    if options.get("device") is not None:
        resolve_device(options["device"])


def check_task(name: str) -> None:
    """Refuse an unknown task whose name begins with `prune_`; lm-eval checks other names."""
    if not name.startswith("prune_") or Path(name).is_file():
        return
    texts = (path.read_text(encoding="utf-8") for path in Path(tasks.__path__[0]).rglob("*.yaml"))
    matches = (re.search(r"^(?:task|group): (prune_\w+)", text, re.MULTILINE) for text in texts)
    names = {match[1] for match in matches if match}
    if name not in names:
        raise unknown_task_error([name], names)


def outline(name: str, options: Mapping[str, Any] = embedded.NO_OPTIONS) -> Any:
    """Return the layers and heads in a model's config.json, with the attributes of `ModelMap` that `Head.parse` reads.

    Returns None if the configuration is missing, or may not describe the layers. Even with a result, single layers of
    the loaded model can have fewer heads or no attention.
    """
    try:
        path = _config_file(name, options)
        config = json.loads(path.read_bytes()) if path else None
    except (OSError, ValueError, RecursionError):
        return None  # loading the model will report it
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        return None
    if config.get("is_encoder_decoder") or "text_config" in config or "pruned_modules" in config:
        return None
    layers, heads = _first_value(config, LAYER_FIELDS), _first_value(config, HEAD_FIELDS)
    if type(layers) is not int or type(heads) is not int or layers < 1:
        return None
    attention = [SimpleNamespace(stack="", index=index, heads=heads) for index in range(layers)]
    return SimpleNamespace(stacks=("",), attention=attention, by_key={("", index): None for index in range(layers)})


def _first_value(config: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the value of the first name that a configuration has."""
    return next((config[name] for name in names if name in config), None)


def _values(options: Mapping[str, Any], *names: str) -> Iterator[str]:
    """Yield all values of the named options; an option is missing, a text, or a list of texts."""
    for value in map(options.get, names):
        yield from [value] if isinstance(value, str) else (value or ())


def _config_file(name: str, options: Mapping[str, Any]) -> Path | None:
    """Return the path of a model's configuration file if it is on this machine."""
    if Path(name).is_dir():
        return Path(name) / "config.json"
    if name in embedded.MODELS:
        return next(cache_folder().glob(f"models/*/{name}/config.json"), None)
    return embedded.cached_file(name, options)
