"""The matrix's rows: a method each. `tests/test_methods.py` puts every row through everything that a method must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lmeval_prune import HeadMask, RowMasks
from tests.adapters import adapter


@contextmanager
def _same_mask_in_every_row(model: nn.Module) -> Iterator[None]:
    rows = RowMasks()

    @torch.compiler.disable  # a method that changes `forward` itself
    def masked(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with rows.using([None, HeadMask("L0H1+L1H2-3")], [1] * len(tokens)):
            return forward(tokens, *args, **kwargs)

    with rows.applied_to(model), pytest.MonkeyPatch.context() as patch:
        forward = model.forward
        patch.setattr(model, "forward", masked)
        yield


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        name: its name in the table of methods, or of the class, if it is none of model_args.
        value: what a user gives for it, `name=value`; None if it is none of model_args. It changes the last of two layers.
        others: values that must give other answers, or at least other identities.
        same: values that mean the same.
        wrong: (value, message) that do not fit the tiny Llama of 2 layers × 4 heads; refused before weights are loaded.
        apply: applies it to a model in Python; default what `value` says.
        families: on which it is tried.
        causal: a token's output depends on no later one, so that prefill is decoding.
    """

    name: str
    value: Any = None
    others: tuple[Any, ...] = ()
    same: tuple[Any, ...] = ()
    wrong: tuple[tuple[Any, str], ...] = ()
    apply: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    families: tuple[str, ...] = ("llama", "qwen3", "gemma3_text", "gpt2", "phi3")
    causal: bool = True

    def __str__(self) -> str:
        return self.name


ROWS = [
    Row(
        "heads",
        "L0H1+L1H2-3",
        others=("L0H1", "L0H1+L1H2", {"heads": "L1H2-3"}),
        same=("L1H3+L1H2+L0H1", ["L0H1", "L1H2-3"], [[0, 1], [1, 2], [1, 3]], {"heads": "L0H1+L1H2-3"}),
        wrong=(("L9H0", "no attention in layer 9"), ("L0H*", "allow_empty_layer"), ({"head": "L0H1"}, "no setting")),
    ),
    Row(
        "token_filter",
        {"ratio": 0.4, "focus": "uniform", "warmup": 3, "step_size": 0.05},
        others=({"ratio": 0.5, "warmup": 3}, {"ratio": 0.4, "focus": "uniform", "warmup": 3, "keep_skipped_kv": True}),
        same=({"ratio": "0.4", "focus": "uniform", "warmup": 3, "step_size": 0.05, "tail": 0.5, "similarity": "kv"},),
        wrong=(
            (0.6, "give ratio up to 0.5, or a larger tail"),
            (1.5, "at least 0 and at most 1"),
            ({"ratio": 0.2, "tail": 2}, "at most 1"),
            ({"ratio": 0.2, "similarity": "cosine"}, "must be kv, key, value or random"),
            ({"ratio": 0.2, "rate": 1}, "no setting"),
            ({"tail": 0.5}, "ratio"),
        ),
    ),
    Row(
        "probe_pruning",
        {"ratio": 0.3, "skip_first": 0},
        others=({"ratio": 0.6, "skip_first": 0}, {"ratio": 0.3, "skip_first": 0, "positions": 0.2}),
        same=({"ratio": "0.3", "skip_first": 0, "positions": 0.5},),
        wrong=(
            (0.3, "skips all 2 layers"),
            (1.5, "at least 0 and below 1"),
            ({"ratio": 0.1, "skip_first": 0}, "of the 8 heads of 2 layers leaves out none; give 0.125 or more"),
            ({"ratio": 0.9, "skip_first": 0}, "would empty a layer; give at most 0.75"),
            ({"ratio": 0.3, "positions": 0}, "above 0 and at most 1"),
            ({"ratio": 0.3, "rate": 1}, "no setting"),
        ),
        causal=False,
    ),
    Row(
        "plan",
        {"heads": "L0H1+L1H2-3", "channels": {"L0": "0,5-9", "L1": [3]}},
        others=(
            "L0H1",
            {"heads": "L0H1+L1H2-3"},
            {"heads": "L0H1+L1H2-3", "channels": {"L0": "0,5-9"}},
            {"heads": "L0H1+L1H2-3", "channels": {"L0": "0,5-9", "L1": [3]}, "blocks": "L1.attention"},
        ),
        same=({"heads": ["L1H2-3", [0, 1]], "channels": {"L1": "3", "L0": [9, 8, 7, 6, 5, 0]}, "tensors": ""},),
        wrong=(
            ("L9H0", "no attention in layer 9"),
            ("L0H*", "allow_empty_layer"),
            ({"channels": {"L0": "48"}}, "it has 48, 0 to 47"),
            ({"channels": {"L7": "1"}}, "no dense feed-forward block"),
            ({"channels": {"L0": "0-47"}}, "all 48 channels of layer L0"),
            ({"channels": {"L0": "5-3"}}, "cannot be read"),
            ({"blocks": "L7"}, "the layers are 0 to 1"),
            ({"blocks": "L0.mlp"}, "cannot be read"),
            ({"head": "L0H1"}, "no setting"),
            ("nowhere/plan.json", "no such file"),
        ),
    ),
    Row(
        "lora",
        adapter(),
        others=(adapter("other", seed=1), adapter("louder", lora_alpha=12), adapter("rslora", use_rslora=True)),
        same=(adapter("again", base_model_name_or_path="elsewhere"), {"adapter": adapter()}),
        wrong=(
            ("nowhere", "no such file: nowhere"),
            (
                adapter("larger", layers=3),
                "the model has no projection",
            ),
            (adapter("dora", use_dora=True), "has use_dora, which is not supported"),
            (adapter("prompt", peft_type="PROMPT_TUNING"), "is an adapter of type PROMPT_TUNING"),
            ({"adapter": adapter(), "sha256": "0"}, "has changed since"),
            ({"adapter": adapter(), "rank": 1}, "no setting"),
        ),
        families=("llama",),
    ),
    Row("RowMasks", apply=_same_mask_in_every_row),
]
