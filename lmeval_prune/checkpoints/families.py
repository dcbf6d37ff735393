"""List the causal model families of the installed transformers: known, recognised by their layers, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmeval_prune.architectures import FAMILIES, recognise, text_config
from lmeval_prune.errors import InputError, first_line

# settings that default configurations lack, and checkpoints have
_SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2) * 4},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "nemotron": {"num_key_value_heads": 8},
}


class SurveyedFamily(NamedTuple):
    """A causal model family of transformers, and whether its heads can be pruned."""

    name: str
    status: str  # "known" (in the table), "recognised" (by its layers) or "refused"
    detail: str  # what is known of its heads, or why it is refused


def causal_families() -> list[str]:
    """Return the names of the families that transformers' `AutoModelForCausalLM` loads."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def survey(names: list[str]) -> Iterator[SurveyedFamily]:
    """Yield whether each family is known, recognised or refused, by a model of its default configuration."""
    for name in names:
        if name in FAMILIES:
            yield SurveyedFamily(name, "known", "")
            continue
        try:
            yield _surveyed(name)
        except InputError as error:
            yield SurveyedFamily(name, "refused", str(error))
        except Exception as error:  # configurations and classes raise errors of any type
            reason = f"its default configuration builds no model ({_why_unbuilt(name) or first_line(error)})"
            yield SurveyedFamily(name, "refused", reason)


def default_model(name: str) -> Any:
    """Build the model of a family's default configuration on the meta device."""
    config = AutoConfig.for_model(name, **_SETTINGS.get(name, {}))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _why_unbuilt(name: str) -> str:
    """Return which part of its configuration a family's causal model is built from; empty if it is all of it."""
    model_class: Any = getattr(transformers, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]), None)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or config_class is CONFIG_MAPPING[name]:
        return ""
    return f"transformers' {model_class.__name__} is built from a part of it, a {config_class.__name__}"


def _surveyed(name: str) -> SurveyedFamily:
    model = default_model(name)
    text = text_config(model).model_type
    if text in FAMILIES:
        return SurveyedFamily(name, "known", f"its language model is a {text}")
    return SurveyedFamily(name, "recognised", recognise(model).summary())
