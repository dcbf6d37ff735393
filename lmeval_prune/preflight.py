"""Checks of a command's options that need no torch and no model, so that a slip is refused at once.

What only the model can tell is left to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmeval_prune import tasks
from lmeval_prune.architectures.heads import Head, head_names
from lmeval_prune.architectures.table import FAMILIES
from lmeval_prune.checkpoints import embedded
from lmeval_prune.errors import InputError, nearest
from lmeval_prune.pruners.table import check_pruner
from lmeval_prune.settings import device_named

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def check(options: Mapping[str, Any]) -> None:
    """Refuse names of pruners, models, heads and devices that are nobody's.

    Args:
        options: of a command, by their names.

    Raises:
        InputError: one is.
    """
    for name in ("method", "ffn_method"):
        if options.get(name) is not None:
            check_pruner(options[name])
    model = {**(options.get("model_args") or {}), **options}
    names = [model.get("pretrained"), model.get("teacher"), *(options.get("names") or ())]
    for name in filter(None, names):
        embedded.check_name(str(name), model if name == model.get("pretrained") else {})
    for heads in _all(options, "heads", "each"):
        plain = not any("." in name for name in head_names(heads))  # without a stack
        if plain and model.get("pretrained") and (known := outline(str(model["pretrained"]), model)):
            Head.parse(heads, known)
    for name in _all(options, "task", "tasks"):
        check_task(name)
    for path in _all(options, "plan", "scores", "mask", "grid", "folder"):
        if not Path(path).exists():
            raise InputError(f"no such file: {path}")
    if options.get("device") is not None:
        device_named(options["device"])


def check_task(name: str) -> None:
    """Refuse a name that begins as those of our tasks do, and is none; others are left to lm-eval.

    Raises:
        InputError: naming the task that was probably meant.
    """
    if not name.startswith("prune_") or Path(name).is_file():
        return
    texts = (path.read_text(encoding="utf-8") for path in Path(tasks.__path__[0]).rglob("*.yaml"))
    names = {found[1] for text in texts if (found := re.search(r"^(?:task|group): (prune_\w+)", text, re.MULTILINE))}
    if name not in names:
        raise InputError(f"there is no task {name}{nearest(name, names)}; `lm_eval ls tasks` lists them")


def outline(name: str, options: Mapping[str, Any] = embedded.NO_OPTIONS) -> Any:
    """Return the layers and heads that a configuration names, as a `ModelMap` has them; None if it is not plain.

    A layer may still be without attention, and have fewer heads.
    """
    try:
        path = _config_file(name, options)
        config = json.loads(path.read_bytes()) if path else None
    except (OSError, ValueError, RecursionError):
        return None  # whoever loads it says why
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        return None
    if config.get("is_encoder_decoder") or "text_config" in config or "pruned_modules" in config:
        return None
    layers, heads = (next((config[one] for one in names if one in config), None) for names in (LAYERS, HEADS))
    if type(layers) is not int or type(heads) is not int or layers < 1:
        return None
    attention = [SimpleNamespace(stack="", index=index, heads=heads) for index in range(layers)]
    return SimpleNamespace(stacks=("",), attention=attention, by_key={("", index): None for index in range(layers)})


def _all(options: Mapping[str, Any], *names: str) -> Iterator[str]:
    """Values of options, of which some may be given several times."""
    for value in map(options.get, names):
        yield from [value] if isinstance(value, str) else value or ()


def _config_file(name: str, options: Mapping[str, Any]) -> Path | None:
    """The configuration of a model, where it is on this machine."""
    if Path(name).is_dir():
        return Path(name) / "config.json"
    if name in embedded.MODELS:
        return next(embedded.cache_folder().glob(f"models/*/{name}/config.json"), None)
    return embedded.cached_file(name, options)
