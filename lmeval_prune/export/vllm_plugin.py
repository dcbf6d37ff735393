"""Lets vLLM load checkpoints whose layers differ without remote code. vLLM finds it by its entry point and calls it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

STOCK = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Make our classes known to transformers in this process: by name, and for configurations that ask for them.

    vLLM's Transformers backend looks for a class by the name in the configuration, then builds the model by
    `AutoModel.from_config`. Stock configurations are built as before. Without vLLM, nothing happens.
    """
    if find_spec("vllm") is None:
        return
    import transformers

    from lmeval_prune.checkpoints.loading import has_pruned_layers, pruned_base_class, pruned_class

    stock_from_config = transformers.AutoModel.from_config
    if getattr(stock_from_config, "_lmeval_prune", False):
        return
    known = {name: getattr(transformers, name) for name in STOCK if hasattr(transformers, name)}
    for name, stock in known.items():  # the module may be made anew while it imports the first of them
        setattr(sys.modules["transformers"], f"Pruned{name}", pruned_class(stock))

    def from_config(config: Any, **options: Any) -> Any:
        if not has_pruned_layers(config):
            return stock_from_config(config, **options)
        options.pop("trust_remote_code", None)
        return pruned_base_class(config)._from_config(config, **options)

    from_config._lmeval_prune = True  # type: ignore[attr-defined]
    transformers.AutoModel.from_config = staticmethod(from_config)  # type: ignore[method-assign]
