"""Recover a student by LoRA: train low-rank updates of its projections by peft, then add them to the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lmeval_prune.architectures import ModelMap
from lmeval_prune.errors import InputError, did_you_mean, first_line

# Arguments of peft's LoraConfig that can be added to the weights of any cut model.
ARGUMENTS = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "exclude_modules"),
    *("rank_pattern", "alpha_pattern"),
)


def check_lora(arguments: Mapping[str, Any], model_map: ModelMap) -> None:
    """Raise an `InputError` if arguments of LoRA are unknown or do not suit a model, which may have no weights."""
    for name in arguments:
        if name not in ARGUMENTS:
            raise InputError(
                f"lora: {name} cannot be used here{did_you_mean(name, ARGUMENTS)}; use {', '.join(ARGUMENTS)}"
            )
    config = lora_config(arguments, model_map)
    targets = config.target_modules
    modules = [name for name, _ in model_map.model.named_modules()]
    for target in targets if isinstance(targets, set) else ():
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            raise InputError(
                f"lora: this {model_map.model_type} model has no module {target}"
                f"{did_you_mean(target, {name.rpartition('.')[2] for name in modules})}; name others in target_modules"
            )
    from peft.tuners.tuners_utils import check_target_module_exists

    for names in tied_modules(model_map.model):
        if targeted := [name for name in names if check_target_module_exists(config, name)]:
            others = " and ".join(name for name in names if name != targeted[0])
            raise InputError(
                f"lora: {targeted[0]} has the same weights as {others}, to which its update would be added, too; "
                f"leave it out of target_modules"
            )


def tied_modules(model: nn.Module) -> list[list[str]]:
    """Return the names of modules that share a parameter, such as the input embeddings and the output projection."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return [names for names in owners.values() if len(names) > 1]


def lora_config(arguments: Mapping[str, Any], model_map: ModelMap) -> Any:
    """Return peft's configuration: all projections of the layers, unless `target_modules` names others."""
    from peft import LoraConfig

    projections = projections_of(model_map)
    transposed = any(isinstance(module, Conv1D) for module in projections.values())
    defaults = {"r": LoraConfig.r, "target_modules": list(projections), "fan_in_fan_out": transposed}
    merged = {**defaults, **arguments}
    try:
        config = LoraConfig(**{"lora_alpha": 2 * merged["r"], **merged})
        if not isinstance(config.r, int) or config.r < 1:
            raise ValueError(f"r={config.r} must be a whole number, at least 1")
    except (TypeError, ValueError) as error:
        raise InputError(f"lora: peft refuses {dict(arguments)} ({first_line(error)})") from error
    return config


def recorded_lora(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as a result records them: with `lora_alpha` where earlier versions took another default."""
    if not arguments or {"r", "lora_alpha"} & arguments.keys():
        return dict(arguments)
    from peft import LoraConfig

    return {"lora_alpha": 2 * LoraConfig.r, **arguments}


def projections_of(model_map: ModelMap) -> dict[str, nn.Module]:
    """Return the linear projections in the attention and feed-forward blocks, by name."""
    return {
        ".".join(filter(None, [block.name, name])): module
        for block in (*model_map.attention, *model_map.feed_forward)
        for name, module in block.module.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def add_lora(arguments: Mapping[str, Any], model_map: ModelMap, seed: int) -> Any:
    """Freeze a model and add LoRA updates, drawn by the seed, to it; return peft's tuner, which `merge` takes."""
    from peft import LoraModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LoraModel(model_map.model, lora_config(arguments, model_map), "default")


def merge(tuner: Any) -> None:
    """Add the updates to the weights of the model, which becomes a plain transformers model again."""
    model = tuner.merge_and_unload(progressbar=False)
    vars(model).pop("peft_config", None)  # some versions of peft leave it
