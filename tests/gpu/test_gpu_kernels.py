"""The attention kernel compiled on a GPU, in each configuration. Skipped without a CUDA device.

tests/test_kernels.py runs there, too, with the kernels compiled; here are the shapes of models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason='kernels need triton (pip install -e ".[kernels]")')

from lmeval_prune.kernels import decode_attention_triton as attention
from tests import literal_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS, CAPACITY = 33, 600
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the relative RMS error
SHAPES = {"smollm2": (9, 3, 64), "llama": (32, 8, 128), "one head": (4, 4, 80), "gemma": (8, 1, 256)}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def arguments(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    heads, kv_heads, width = shape
    generator = torch.Generator(device="cuda").manual_seed(heads)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    return {
        "query": normal(1, heads, ROWS, width)[0].transpose(0, 1),  # as in a model: not contiguous
        "keys": normal(ROWS, kv_heads, CAPACITY, width),
        "values": normal(ROWS, kv_heads, CAPACITY, width),
        "lengths": torch.randint(0, CAPACITY, (ROWS,), generator=generator, device="cuda", dtype=torch.int32),
        "scaling": width**-0.5,
    }


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 2.0, "splits": 4}, {"splits": 1}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_steps_attention_is_the_literal_one(shape: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    step = arguments(SHAPES[shape], dtype)
    limits = {name: value for name, value in options.items() if name != "splits"}
    expected, _ = literal_decode.decode(**step, **limits)
    assert relative_error(attention.decode(**step, **options), expected) < TOLERANCES[dtype]


def test_every_configuration_gives_the_same() -> None:
    step = arguments(SHAPES["smollm2"], torch.float32)
    expected, _ = literal_decode.decode(**step)
    for config in (*attention.DOT_CONFIGS, *attention.SUM_CONFIGS):
        assert relative_error(attention.decode(**step, config=config), expected) < 1e-5, config
