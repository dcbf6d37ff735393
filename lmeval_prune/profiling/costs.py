"""What a model costs by count: parameters, and the arithmetic of a forward pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lmeval_prune.architectures import ModelMap, map_model
from lmeval_prune.architectures.blocks import in_features, is_transposed, out_features
from lmeval_prune.interventions.attention_call import eager_attention


@dataclass(frozen=True)
class Costs:
    """Counts of one model.

    Attributes:
        parameters: all, each once.
        without_embeddings: those of no embedding (an output head that is tied to one counts as it).
        flops: multiplications and additions of a forward pass over `tokens` tokens, logits included; None: unknown.
        tokens: in one text.
    """

    parameters: int
    without_embeddings: int
    flops: int | None
    tokens: int


def costs(model: Any, tokens: int = 128) -> Costs:
    """Count parameters, and the arithmetic by closed formulas."""
    return Costs(*parameters(model), formula_flops(map_model(model), tokens), tokens)


def cost_columns(model: Any) -> dict[str, int | None]:
    """What a results file says of a model's costs."""
    found = costs(model)
    return {
        "parameters": found.parameters,
        "parameters_without_embeddings": found.without_embeddings,
        "flops_per_prompt": found.flops,
        "tokens_of_that_prompt": found.tokens,
    }


def parameters(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those of no embedding."""
    embedded = {id(x) for module in model.modules() if isinstance(module, nn.Embedding) for x in module.parameters()}
    own = list(model.parameters())
    return sum(x.numel() for x in own), sum(x.numel() for x in own if id(x) not in embedded)


def formula_flops(model_map: ModelMap, tokens: int) -> int | None:
    """By closed formulas: two for each weight and token, and for each head and pair of tokens its two products.

    Both stacks of an encoder-decoder read as many tokens. Of experts as many count as a token is given to, and the
    routers.

    Returns:
        None of experts whose weights do not stand in one tensor, or of which it is not known how many a token is given
        to.
    """
    total = 0
    chosen = getattr(model_map.model.config, "num_experts_per_tok", None)
    for name, module in model_map.model.named_modules():
        if isinstance(module, nn.Linear) or is_transposed(module):
            read = 1 if ".pooler." in f".{name}" else tokens  # which reads one token of a text
            total += 2 * read * in_features(module) * out_features(module)
            if re.search(r"\bexperts\.\d", name):
                return None
            continue
        for part, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3:
                if not chosen:
                    return None
                total += 2 * tokens * chosen * weight[0].numel()
            elif weight.dim() == 2 and part == "weight" and not isinstance(module, nn.Embedding):  # a router
                total += 2 * tokens * weight.numel()
    for layer in model_map.attention:
        total += 2 * tokens * tokens * layer.heads * (layer.query_dim + layer.head_dim)
    return total


def counted_flops(model: Any, tokens: int) -> int:
    """By torch's counter, from one forward pass over as many tokens."""
    device = next(model.parameters()).device
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    with eager_attention(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)  # eager: the counter does not know every fused attention
    return int(counter.get_total_flops())
