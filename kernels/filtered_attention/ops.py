"""Attention of tokens that do not skip, over keys and values of tokens that were stored."""

from __future__ import annotations

import torch

from lmeval_prune.errors import InputError
from lmeval_prune.kernels.dispatch import device_of, takes_kernel, too_wide, unlike
from lmeval_prune.kernels.filtered_attention import naive


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    skipped: torch.Tensor,
    scaling: float,
    window: int | None = None,
    places: torch.Tensor | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    check: bool = True,
) -> torch.Tensor:
    """Attention of one token a row: it sees all that is stored of its row, itself last.

    Args:
        query: (rows, heads, width).
        keys, values: (rows, key-value heads, capacity, width), no gaps; what lies behind a row's length is not read.
        lengths: (rows,), how many are stored.
        skipped: (rows,), true where the token is not to attend; nothing of such a row is read.
        scaling: of the scores.
        window: a token sees so many tokens of the text, itself included; None for all.
        places: of stored tokens in the text, (rows, capacity), rising; needed with a window.
        softcap: scores are bent to stay below it.
        splits: of each row's keys among programs, a power of two; None for as many as fill the device.
        check: whether lengths are checked, for which the device is waited for.

    Returns:
        (rows, heads, width of values); zero where a row is skipped or has nothing stored.

    Raises:
        InputError: shapes or lengths do not fit.
    """
    _check_shapes(query, keys, values, window, places)
    if check:
        _check_range("lengths", lengths, 0, keys.shape[2], f"the store has room for {keys.shape[2]} tokens a row")
    if not query.numel() or not keys.shape[2]:
        return query.new_zeros(*query.shape[:2], values.shape[-1])
    if not takes_kernel(
        "filtered decode", query, unlike(query, keys, values), too_wide(query.shape[-1], values.shape[-1])
    ):
        return naive.decode(query, keys, values, lengths, skipped, scaling, window, places, softcap)
    from lmeval_prune.kernels.filtered_attention import triton

    with device_of(query):
        return triton.decode(query, keys, values, lengths, skipped, scaling, window, places, softcap, splits)


def prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    ends: torch.Tensor,
    scaling: float,
    window: int | None = None,
    places: torch.Tensor | None = None,
    softcap: float | None = None,
    check: bool = True,
) -> torch.Tensor:
    """Attention of some tokens of each row; what the others would cost is not spent.

    Args:
        query: (rows, heads, tokens, width), of all tokens; only chosen ones are read.
        keys, values, scaling, window, places, softcap: as in `decode`.
        chosen: which tokens attend, (rows, room), rising; of each row the first `counts`.
        counts: (rows,).
        ends: of each chosen token, how many stored ones it sees, itself last, (rows, room).
        check: whether chosen, counts and ends are checked, for which the device is waited for.

    Returns:
        (rows, tokens, heads, width of values); zero for tokens that are not chosen.

    Raises:
        InputError: shapes, tokens or ends do not fit.
    """
    _check_shapes(query, keys, values, window, places)
    room, capacity = chosen.shape[1], keys.shape[2]
    if check:
        _check_range("counts", counts, 0, room, f"there is room for {room} chosen tokens a row")
        asks = torch.arange(room, device=counts.device) < counts[:, None]
        _check_range("chosen", chosen[asks], 0, query.shape[2] - 1, f"a row has {query.shape[2]} tokens")
        _check_range("ends", ends[asks], 0, capacity, f"the store has room for {capacity} tokens a row")
    if not query.numel() or not room or not capacity:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])
    if not takes_kernel(
        "filtered prefill", query, unlike(query, keys, values), too_wide(query.shape[-1], values.shape[-1])
    ):
        return naive.prefill(query, keys, values, chosen, counts, ends, scaling, window, places, softcap)
    from lmeval_prune.kernels.filtered_attention import triton

    with device_of(query):
        return triton.prefill(query, keys, values, chosen, counts, ends, scaling, window, places, softcap)


def _check_shapes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, places: torch.Tensor | None
) -> None:
    if keys.shape[:3] != values.shape[:3] or len(keys) != len(query) or query.shape[1] % max(1, keys.shape[1]):
        shapes = ", ".join(str(tuple(one.shape)) for one in (query, keys, values))
        raise InputError(f"queries, keys and values of shapes {shapes} do not fit; give as many rows and whole groups")
    if window is not None and places is None:
        raise InputError(f"window={window} needs the places of the stored tokens in the text")


def _check_range(name: str, numbers: torch.Tensor, low: int, high: int, why: str) -> None:
    if numbers.numel():
        least, most = (int(one) for one in numbers.aminmax())
        if least < low or most > high:
            wrong = least if least < low else most
            raise InputError(f"{name} holds {wrong}, which is not from {low} to {high}: {why}")
