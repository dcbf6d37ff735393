"""Attention of a packed pass over slots of a cache, and over prefixes that several slots share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import functional

from lmeval_prune.decoding.attention_layout import Layout, Part
from lmeval_prune.interventions.attention_call import AttentionCall, UnsupportedAttention, additive_mask

_COMPILED = (torch.float32, torch.bfloat16)  # types of the compiled kernel
_UNKNOWN_OPTIONS = {"s_aux": "sinks", "position_bias": "bias", "attention_bias": "bias", "head_mask": "head_mask"}
Attention = tuple[torch.Tensor, torch.Tensor]  # attention over some keys, and the log-sum-exp of their scores


@dataclass(frozen=True)
class AttentionOptions:
    """Scaling, soft cap and window of a layer's attention."""

    scaling: float
    softcap: float | None = None
    window: int | None = None

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionOptions:
        """Read the options of a call; refuse unsupported ones."""
        options, window = call.options, call.options.get("sliding_window")
        for name, reason in _UNKNOWN_OPTIONS.items():
            if options.get(name) is not None:
                raise UnsupportedAttention(reason)
        layer_types = getattr(getattr(call.module, "config", None), "layer_types", None)
        if layer_types and layer_types[call.module.layer_idx] == "sliding_attention" and window is None:
            raise UnsupportedAttention("window")
        if options.get("dropout") or call.query.shape[0] != 1 or call.mask is not None:
            raise UnsupportedAttention("mask")
        scaling = options.get("scaling")
        return cls(call.query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("softcap"), window)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the attention of queries to keys, (…, queries, width of values)."""
        if self.softcap is None:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        return self._scores(q, k, mask).softmax(-1).to(v.dtype) @ v

    def attend_with_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> Attention:
        """Compute the attention of queries to keys, and the log-sum-exp of each query's scores.

        Args:
            q, k, v: (batch, heads, queries or keys, width).
            mask: added to the scores; broadcast to (batch, heads, queries, keys).

        Returns:
            (batch, heads, queries, width of values), and (batch, heads, queries) in float32 or float64.
        """
        if self.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return cast(Attention, attend(q, k, v, attn_mask=mask, scale=self.scaling))
        scores = self._scores(q, k, mask)
        lse = scores.logsumexp(-1)
        base = lse.clamp(min=torch.finfo(lse.dtype).min)  # scores that are all minus infinity have weights of 0
        return (scores - base[..., None]).exp().to(v.dtype) @ v, lse

    def _scores(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * self.scaling
        scores = scores.float() if scores.element_size() < 4 else scores
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores if mask is None else scores + mask


def join_attention(parts: Sequence[Attention]) -> torch.Tensor:
    """Join the attention over parts of the keys: softmax attention over all keys is their mean, weighted by exp(lse).

    Args:
        parts: attention, (…, width), and log-sum-exp, (…). Minus infinity stands for no keys.
    """
    sums = torch.stack([lse for _, lse in parts])
    weights = sums.softmax(0).masked_fill(sums == -torch.inf, 0)[..., None]
    joined = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
    return cast(torch.Tensor, joined).to(parts[0][0].dtype)


@dataclass(frozen=True)
class SlotAttention:
    """Attention of the queries of a packed pass over the keys and values in slots."""

    options: AttentionOptions
    layout: Layout
    query: torch.Tensor  # (heads, tokens, width)
    keys: torch.Tensor  # (slots, key-value heads, length, width)
    values: torch.Tensor

    def over_prefixes(self, layer: int) -> torch.Tensor:
        """Compute the attention over the slots and their prefixes: each prefix once for all of its queries."""
        options, layout, query = self.options, self.layout, self.query
        slot_attention = self.over_slots(with_lse=True)
        out, lse = torch.zeros_like(slot_attention[0]), torch.full_like(slot_attention[1], -torch.inf)
        for prefix, tokens in layout.prefix_parts(layer):
            q = query[:, tokens].reshape(1, self.keys.shape[1], -1, query.shape[-1])  # a group's heads become queries
            mask = None
            if options.window is not None:
                hidden = torch.arange(prefix.length, device=q.device) <= layout.positions[tokens, None] - options.window
                mask = additive_mask(hidden, q.dtype).repeat(q.shape[2] // len(tokens), 1)
            k, v = prefix.keys[layer][None], prefix.values[layer][None]
            attended, sums = options.attend_with_lse(q, k, v, mask)
            out[tokens] = attended.reshape(len(query), len(tokens), -1).transpose(0, 1)
            lse[tokens] = sums.reshape(len(query), len(tokens)).T
        return join_attention([slot_attention, (out, lse)])

    def over_slots(self, with_lse: bool = False) -> Attention:
        """Compute the attention over the slots.

        Returns:
            (tokens, heads, width of values), and the log-sum-exp, (tokens, heads), if requested; else no numbers.
        """
        options, layout, query = self.options, self.layout, self.query
        heads = query.shape[0]
        is_compiled = query.device.type == "cpu" and query.dtype in _COMPILED and options.softcap is None
        is_compiled &= options.window is None or layout.stored_positions is None
        if not layout.parts:
            return query.new_zeros(0, heads, self.values.shape[-1]), query.new_zeros(0, heads)
        if is_compiled and all(part.tokens == 1 for part in layout.parts):
            from lmeval_prune.kernels.decode_attention import decode  # numba takes a while to import

            arguments = query.transpose(0, 1), self.keys, self.values, layout.slots, layout.offsets + 1
            out, lse = decode(*arguments, options.scaling, options.window)
            return out.to(query.dtype), lse
        outputs = [self._over_part(part, with_lse) for part in layout.parts]
        if layout.parts[0].unrepeated is None:
            if len(outputs) == 1:
                return outputs[0]
            attended, sums = zip(*outputs, strict=True)
            return torch.cat(attended), torch.cat(sums)
        joined = [column[0].new_empty(query.shape[1], *column[0].shape[1:]) for column in zip(*outputs, strict=True)]
        for part, columns in zip(layout.parts, outputs, strict=True):
            for target, source in zip(joined, columns, strict=True):
                target[cast(torch.Tensor, part.queries)[part.unrepeated]] = source[part.unrepeated]
        return joined[0], joined[1]

    def _over_part(self, part: Part, with_lse: bool) -> Attention:
        """Compute the attention of a part, as `over_slots`."""
        query, heads, kv_heads = self.query, self.query.shape[0], self.keys.shape[1]
        group = heads // kv_heads

        def by_token(x: torch.Tensor) -> torch.Tensor:
            x = x.reshape(part.rows, heads, part.tokens, -1).transpose(1, 2)
            return x.reshape(part.rows * part.tokens, heads, -1)

        # the query heads of a group become queries of their key-value head
        q = query[:, part.queries].reshape(-1, group, part.rows, part.tokens, query.shape[-1])
        q = q.permute(2, 0, 1, 3, 4).reshape(part.rows, kv_heads, group * part.tokens, query.shape[-1])
        k, v = self.keys[part.slots, :, : part.end], self.values[part.slots, :, : part.end]
        mask = self.layout.mask(part, group, self.options.window, query.dtype)
        if with_lse:
            out, lse = self.options.attend_with_lse(q, k, v, mask)
            return by_token(out), by_token(lse).squeeze(-1)
        out = by_token(self.options.attend(q, k, v, mask))
        return out, out.new_empty(len(out), 0)
