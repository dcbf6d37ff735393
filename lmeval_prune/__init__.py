"""Prune, route and measure attention heads of Hugging Face models inside lm-evaluation-harness.

Names are imported on first use, because `lmeval_prune.plugin.bridge` is imported at each start of Python.
"""

__version__ = "1.0.0.dev0"

_LAZY = {
    "HeadMask": "lmeval_prune.interventions.head_mask",
    "RowMasks": "lmeval_prune.interventions.head_mask",
    "Plan": "lmeval_prune.interventions.plan",
    "cut": "lmeval_prune.surgery.cut",
    "load_pretrained": "lmeval_prune.checkpoints.loading",
    "TokenFilter": "lmeval_prune.interventions.token_filter",
    "Intervention": "lmeval_prune.interventions.base",
    "Head": "lmeval_prune.architectures.names",
    "map_model": "lmeval_prune.architectures",
    "InputError": "lmeval_prune.errors",
}

__all__ = [
    "Head", "HeadMask", "InputError", "Intervention", "Plan", "RowMasks", "TokenFilter", "__version__", "cut",
    "load_pretrained", "map_model",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
