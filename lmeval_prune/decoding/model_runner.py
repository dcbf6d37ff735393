"""A stock model made to run packed batches of differently pruned sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.in_use import in_use
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.layer_skip import LayerSkip
from lmeval_prune.interventions.attention_call import Packed, UnsupportedAttention, replace_attention
from lmeval_prune.interventions.base import uncounted
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.row_masks import RowMasks


@dataclass(frozen=True)
class Chunk:
    """New tokens of one slot.

    Attributes:
        slot: where the sequence's keys and values are.
        stored: tokens that the slot holds already.
        mask: number of the sequence's mask.
        tokens: token ids, at least one.
        skip: so many of the tokens, from the first on, need no logits.
        keep: layers whose input is wanted (the number of layers: the last one's output).
    """

    slot: int
    stored: int
    mask: int
    tokens: Sequence[int]
    skip: int = 0
    keep: frozenset[int] = frozenset()


class ModelRunner:
    """A model with our attention, skippable layers and row masks in it; made by `ModelRunner.on`.

    Attributes:
        cache: the stored keys and values.
        layer_tokens: tokens × layers run so far.
        head_tokens: tokens whose logits were computed.
    """

    def __init__(
        self, model_map: ModelMap, cache: KVCache, skip: LayerSkip, rows: RowMasks, masks: Sequence[HeadMask | None]
    ) -> None:
        self._model_map = model_map
        self._model: Any = model_map.model
        self._skip, self._rows = skip, rows
        self._table = rows.table(masks)
        self._device = next(self._model.parameters()).device
        self.layers = len(model_map.attention)
        self.cache = cache
        self.layer_tokens = self.head_tokens = 0

    @classmethod
    @contextmanager
    def on(cls, model_map: ModelMap, cache: KVCache, masks: Sequence[HeadMask | None]) -> Iterator[ModelRunner]:
        """Put all that into a model; take it out at the end.

        Args:
            model_map: of the model.
            cache: for keys and values.
            masks: of the sequences, which name them by their places.

        Raises:
            InputError: the model's layers do not stand in one list, a mask does not fit, or another run has the model.
        """
        skip, rows = LayerSkip(model_map), RowMasks()
        with in_use(model_map), ExitStack() as stack:
            replace_attention(model_map, cache, stack)
            stack.enter_context(rows.applied_to(model_map.model, model_map))
            stack.enter_context(skip.installed())
            yield cls(model_map, cache, skip, rows, masks)

    def forward(
        self, batch: Sequence[Chunk], start: int = 0, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
        """Run new tokens and store their keys and values.

        Args:
            batch: in the order of the slots.
            start: the first layer to run.
            hidden: what enters it, (all tokens, width); needed if `start` > 0.

        Returns:
            Logits, (tokens but the skipped ones, vocabulary), and of each chunk what entered the layers that it
            wants kept, (tokens, width).
        """
        flat: list[int] = []
        masks: list[int] = []
        wanted: list[int] = []
        for chunk in batch:
            count = len(chunk.tokens)
            wanted += range(len(flat) + chunk.skip, len(flat) + count)
            flat += chunk.tokens
            masks += [chunk.mask] * count
        columns = zip(*((chunk.slot, chunk.stored, len(chunk.tokens)) for chunk in batch), strict=True)
        keep = frozenset[int]().union(*(chunk.keep for chunk in batch))
        hidden = None if hidden is None else hidden.unsqueeze(0)
        packing = self.cache.packing(Packed(*columns), self._device)
        with self._skip.running(start, hidden, keep) as current, packing as layout:
            logits = self._logits(flat, masks, layout.positions, wanted)
        self.layer_tokens += len(flat) * (self.layers - start)
        self.head_tokens += len(wanted)
        kept = []
        at = 0
        for chunk in batch:
            # copies: a view would hold on to the whole batch
            kept.append({layer: current.kept[layer][0, at : at + len(chunk.tokens)].clone() for layer in chunk.keep})
            at += len(chunk.tokens)
        return logits, kept

    def alone(self, tokens: Sequence[int], mask: int) -> torch.Tensor:
        """Logits after `tokens`, run by themselves in a slot of their own: nothing else counts. (vocabulary,)."""
        length = len(tokens)
        cache, packed = KVCache(1, length), Packed((0,), (0,), (length,))
        with ExitStack() as stack:
            replace_attention(self._model_map, cache, stack)
            stack.enter_context(uncounted(self._model))
            stack.enter_context(self._skip.running())
            layout = stack.enter_context(cache.packing(packed, self._device))
            return self._logits(list(tokens), [mask] * length, layout.positions, [length - 1])[0]

    def _logits(
        self, tokens: Sequence[int], masks: Sequence[int], positions: torch.Tensor, wanted: Sequence[int]
    ) -> torch.Tensor:
        everything = len(wanted) == len(tokens)
        with self._rows.using(self._table, torch.tensor([masks])):
            out = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=slice(None) if everything else torch.tensor(wanted, device=self._device),
            )
        if len(out.logits[0]) != len(wanted):
            raise UnsupportedAttention("it does not know logits_to_keep")
        logits: torch.Tensor = out.logits[0]
        return logits
