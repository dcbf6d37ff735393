"""Count parameters and FLOPs of a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lmeval_prune.architectures import ModelMap, input_device, map_model
from lmeval_prune.architectures.blocks import in_features, is_transposed, out_features

PROMPT_TOKENS = 128  # of the prompt whose FLOPs are written to results files


def cost_columns(model: Any) -> dict[str, int | None]:
    """Return the parameters and FLOPs of a model for a results file."""
    total, without_embeddings = parameters(model)
    return {
        "parameters": total,
        "parameters_without_embeddings": without_embeddings,
        "flops_per_prompt": formula_flops(map_model(model), PROMPT_TOKENS),
        "tokens_of_that_prompt": PROMPT_TOKENS,
    }


def parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, with and without embeddings (a tied output head counts as an embedding)."""
    embedded = {id(x) for module in model.modules() if isinstance(module, nn.Embedding) for x in module.parameters()}
    tensors = list(model.parameters())
    return sum(x.numel() for x in tensors), sum(x.numel() for x in tensors if id(x) not in embedded)


def formula_flops(model_map: ModelMap, tokens: int) -> int | None:
    """Compute the FLOPs (multiplications and additions) of a forward pass from the weight shapes, including the logits.

    A linear layer takes 2 · tokens · weights, attention 2 · tokens² · heads · (key width + value width). In an
    encoder-decoder model, encoder and decoder read `tokens` tokens each. In a mixture of experts, only the experts
    that a token is routed to are counted.

    Returns:
        None if the experts' weights are not one tensor, the number of experts per token is unknown, or there are layers
        of linear attention or state spaces.
    """
    config = model_map.model.config
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        return None
    experts = getattr(config, "num_experts_per_tok", None)
    total = 0
    for name, module in model_map.model.named_modules():
        if isinstance(module, nn.Linear) or is_transposed(module):
            if re.search(r"\bexperts\.\d", name):  # separate modules: the number of routed experts is unknown
                return None
            tokens_read = 1 if ".pooler." in f".{name}" else tokens  # a pooler reads only the first token
            total += 2 * tokens_read * in_features(module) * out_features(module)
            continue
        for part, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3:  # all experts
                if not experts:
                    return None
                total += 2 * tokens * experts * weight[0].numel()
            elif weight.dim() == 2 and part == "weight" and not isinstance(module, nn.Embedding):  # an expert router
                total += 2 * tokens * weight.numel()
    for layer in model_map.attention:
        total += 2 * tokens * tokens * layer.heads * (layer.key_dim + layer.head_dim)
    return total


def counted_flops(model: Any, tokens: int) -> int:
    inputs = random_inputs(model, 1, tokens)
    return flops_of(lambda: model(**inputs))


def flops_of(run: Callable[[], Any]) -> int:
    """Return the FLOPs of a function call as torch counts them, including token pairs that a causal mask hides."""
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_FLASH_ON_CPU) as counter:
        run()
    return int(counter.get_total_flops())


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[-2] * (width + value[-1]))


# torch's counter lacks this operation
_FLASH_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def random_inputs(model: Any, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return random prompts for a model: always the same for a vocabulary size; also for the decoder if separate."""
    ids = torch.randint(3, model.config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids.to(input_device(model))}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return inputs
