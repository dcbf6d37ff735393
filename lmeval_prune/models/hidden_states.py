"""The model's own embedding of a prompt: its last hidden state, after the last layer and its norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from lmeval_prune.artefacts import NONFINITE_REMEDY, check_finite
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import preserve_state
from lmeval_prune.models.generation import engine_settings, prompt_tokens, without_sampling

LAST_HIDDEN_STATE = "last_hidden_state"  # in place of an encoder's name


def check_hidden_states(lm: Any) -> None:
    """Raise `InputError` if a model does not give hidden states of prompts."""
    model = getattr(lm, "model", None)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"servers give no hidden states: use pruned-hf, or fit the router without {LAST_HIDDEN_STATE}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{LAST_HIDDEN_STATE} needs a model without an encoder; fit the router with a sentence encoder"
        )


def last_hidden_states(lm: Any, requests: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the hidden state of the last token of each request's prompt, float32, shape (width,), on the CPU.

    Each prompt is computed alone, so that rounding, which may decide a ranking, does not depend on other prompts. The
    model's interventions apply, a router's do not. Prompts are cut as for generation.
    """
    check_hidden_states(lm)
    lengths: dict[str, int] = {}
    mixed = getattr(lm, "mixed_precision_dtype", None)
    for request in tqdm(requests, "hidden states", disable=not requests or bool(lm.rank)):
        settings = without_sampling(request.args[1])
        if (key := repr(settings)) not in lengths:
            lengths[key] = engine_settings(lm, settings)[0].max_new_tokens
        ids = torch.tensor([prompt_tokens(lm, request, lengths[key])], device=lm.device)
        with torch.no_grad(), preserve_state(lm.model), torch.autocast(lm.device.type, mixed, enabled=bool(mixed)):
            state = lm.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1].float().cpu()
        check_finite({LAST_HIDDEN_STATE: state}, "the model", NONFINITE_REMEDY)
        yield state
