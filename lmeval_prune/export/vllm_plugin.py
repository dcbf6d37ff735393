"""vLLM plugin that loads checkpoints with layers of different shapes without remote code."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

STOCK = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def register() -> None:
    """Register the pruned classes with transformers in this process, by name and in `AutoModel.from_config`.

    vLLM calls this entry point. Its Transformers backend looks up the class by the name in the configuration, then
    calls `AutoModel.from_config`. Stock configurations are not affected. Without vLLM, this does nothing.
    """
    if find_spec("vllm") is None:
        return
    import transformers

    from lmeval_prune.checkpoints.loading import auto_model_class, has_pruned_layers, pruned_class

    stock_from_config = transformers.AutoModel.from_config
    if getattr(stock_from_config, "_lmeval_prune", False):
        return
    classes = {name: getattr(transformers, name) for name in STOCK if hasattr(transformers, name)}
    for name, stock in classes.items():  # importing them can replace the lazy module in `sys.modules`
        setattr(sys.modules["transformers"], f"Pruned{name}", pruned_class(stock))

    def from_config(config: Any, **options: Any) -> Any:
        if not has_pruned_layers(config):
            return stock_from_config(config, **options)
        options.pop("trust_remote_code", None)
        return pruned_class(auto_model_class("AutoModel", config))._from_config(config, **options)

    from_config._lmeval_prune = True  # type: ignore[attr-defined]
    transformers.AutoModel.from_config = staticmethod(from_config)  # type: ignore[method-assign]
