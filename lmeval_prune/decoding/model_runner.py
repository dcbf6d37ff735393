"""A stock model that runs packed batches of differently pruned sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from lmeval_prune.architectures import ModelMap
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.layer_skip import LayerSkip
from lmeval_prune.decoding.model_lock import locked
from lmeval_prune.interventions.attention_call import Packed, UnsupportedAttention, replace_attention
from lmeval_prune.interventions.base import preserve_state
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.interventions.row_masks import RowMasks


@dataclass(frozen=True)
class Chunk:
    """New tokens of one slot.

    Attributes:
        slot: of the sequence's keys and values.
        stored: number of tokens that the slot holds already.
        mask: number of the sequence's mask.
        tokens: token ids, at least one.
        skip: number of first tokens that need no logits.
        keep: layers whose input is kept (the number of layers: the last one's output).
    """

    slot: int
    stored: int
    mask: int
    tokens: Sequence[int]
    skip: int = 0
    keep: frozenset[int] = frozenset()


class ModelRunner:
    """A model with the cache's attention, skippable layers and, where anything is pruned, row masks in it.

    Made by `ModelRunner.on`.

    Attributes:
        cache: the stored keys and values.
        layer_tokens: tokens × layers run so far.
        head_tokens: tokens whose logits were computed.
    """

    def __init__(
        self, model_map: ModelMap, cache: KVCache, skip: LayerSkip, masking: Callable[..., AbstractContextManager[None]]
    ) -> None:
        self._model_map = model_map
        self._model: Any = model_map.model
        self._skip, self._masking = skip, masking
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
            masks: of the sequences, which name them by their numbers.

        Raises:
            InputError: the model's layers do not stand in one list, a mask does not fit, or another run has the model.
        """
        skip, rows = LayerSkip(model_map), RowMasks()
        with locked(model_map), ExitStack() as stack:
            replace_attention(model_map, cache, stack)
            # without masks, too: under an intervention nothing runs compiled, which would keep what is put in here
            stack.enter_context(rows.applied_to(model_map.model, model_map))
            masking: Callable[..., AbstractContextManager[None]] = nullcontext
            if any(masks):
                masking = partial(rows.using, rows.table(masks))
            stack.enter_context(skip.installed())
            yield cls(model_map, cache, skip, masking)

    def forward(
        self, batch: Sequence[Chunk], start: int = 0, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
        """Run new tokens and store their keys and values.

        Args:
            batch: in the order of the slots.
            start: the first layer to run.
            hidden: its input, (all tokens, width); needed if `start` > 0.

        Returns:
            Logits, (tokens but the skipped ones, vocabulary), and for each chunk the inputs of the layers that it
            keeps, (tokens, width).
        """
        tokens = [token for chunk in batch for token in chunk.tokens]
        masks = [chunk.mask for chunk in batch for _ in chunk.tokens]
        starts = list(accumulate((len(chunk.tokens) for chunk in batch), initial=0))
        with_logits = [
            token
            for chunk, (first, end) in zip(batch, pairwise(starts), strict=True)
            for token in range(first + chunk.skip, end)
        ]
        columns = zip(*((chunk.slot, chunk.stored, len(chunk.tokens)) for chunk in batch), strict=True)
        keep = frozenset[int]().union(*(chunk.keep for chunk in batch))
        hidden = None if hidden is None else hidden.unsqueeze(0)
        packing = self.cache.packing(Packed(*columns), self._device)
        with self._skip.running(start, hidden, keep) as current, packing as layout:
            logits = self._logits(tokens, masks, layout.positions, with_logits)
        self.layer_tokens += len(tokens) * (self.layers - start)
        self.head_tokens += len(with_logits)
        kept = [  # copies: a view would hold on to the whole batch
            {layer: current.kept[layer][0, slice(*ends)].clone() for layer in chunk.keep}
            for chunk, ends in zip(batch, pairwise(starts), strict=True)
        ]
        return logits, kept

    def alone(self, tokens: Sequence[int], mask: int) -> torch.Tensor:
        """Return the logits after `tokens`, (vocabulary,), run by themselves in a slot of their own."""
        length = len(tokens)
        cache, packed = KVCache(1, length), Packed((0,), (0,), (length,))
        with ExitStack() as stack:
            replace_attention(self._model_map, cache, stack)
            stack.enter_context(preserve_state(self._model))
            stack.enter_context(self._skip.running())
            layout = stack.enter_context(cache.packing(packed, self._device))
            return self._logits(list(tokens), [mask] * length, layout.positions, [length - 1])[0]

    def _logits(
        self, tokens: Sequence[int], masks: Sequence[int], positions: torch.Tensor, with_logits: Sequence[int]
    ) -> torch.Tensor:
        to_keep = slice(None) if len(with_logits) == len(tokens) else torch.tensor(with_logits, device=self._device)
        with self._masking(torch.tensor([masks])):
            out = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=to_keep,
            )
        if len(out.logits[0]) != len(with_logits):
            raise UnsupportedAttention("it does not know logits_to_keep")
        logits: torch.Tensor = out.logits[0]
        return logits
