"""How precisely PyTorch multiplies matrices: float32 products can be rounded to TF32 or bfloat16."""

from __future__ import annotations

import torch

_PRODUCTS = {"highest": torch.float32, "high": torch.float16, "medium": torch.bfloat16}  # TF32's mantissa is float16's


def product_eps(dtype: torch.dtype) -> float:
    """Return the relative rounding of matrix products of a type, e.g. 2⁻¹⁰ of float32 where PyTorch may use TF32.

    For float32 it follows `torch.set_float32_matmul_precision`; if precisions were set through `torch.backends`, which
    cannot be read in one place, it is that of bfloat16.
    """
    if dtype != torch.float32:
        return float(torch.finfo(dtype).eps)
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        return float(torch.finfo(torch.bfloat16).eps)
    return float(torch.finfo(_PRODUCTS[precision]).eps)


def has_rough_products(dtype: torch.dtype) -> bool:
    """Return whether matrix products of a type are rounded to fewer than float32's 24 bits."""
    return product_eps(dtype) > torch.finfo(torch.float32).eps
