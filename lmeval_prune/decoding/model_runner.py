"""A stock model that runs packed batches of differently pruned sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap, input_device
from lmeval_prune.architectures.precision import fast_products, refuse_nan
from lmeval_prune.attributes import replaced
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.layer_skip import LayerSkip
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.applied import preserve_state
from lmeval_prune.interventions.attention_call import Packed, UnsupportedAttention, replace_attention
from lmeval_prune.interventions.head_mask import HeadMask, RowMasks

PASS, GPU_PASS = 2048, 8192  # `ModelRunner.largest_pass`: it bounds how long new prompts delay running rows
_LOCKED: WeakSet[nn.Module] = WeakSet()  # attention modules of models in use


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence."""

    slot: int  # in the cache
    cached: int  # number of tokens that the slot holds already
    mask: int  # number of the sequence's mask
    tokens: Sequence[int]  # at least one
    skip: int = 0  # number of first tokens without logits
    keep: frozenset[int] = frozenset()  # layers whose inputs are returned, see `PartialPass`


class ModelRunner:
    """A model with the cache's attention, skippable layers and a mask for each row; see `ModelRunner.attached`."""

    def __init__(
        self, model_map: ModelMap, cache: KVCache, skip: LayerSkip, rows: RowMasks, masks: Sequence[HeadMask | None]
    ) -> None:
        self._model_map = model_map
        self._model: Any = model_map.model
        self._skip = skip
        self._masking: Callable[..., AbstractContextManager[None]] = nullcontext
        if any(masks):
            self._masking = partial(rows.using, rows.table(masks))
        self.device = input_device(self._model)
        self.layers = len(model_map.attention)
        self.cache = cache
        self.layer_tokens = self.head_tokens = 0  # tokens × layers, and tokens with logits, so far

    @classmethod
    @contextmanager
    def attached(cls, model_map: ModelMap, cache: KVCache, masks: Sequence[HeadMask | None]) -> Iterator[ModelRunner]:
        """Change a model inside the block; refuse unsuitable layers or masks. `Chunk.mask` refers to `masks`."""
        skip, rows = LayerSkip(model_map), RowMasks()
        with lock_model(model_map), ExitStack() as stack:
            replace_attention(model_map, cache, stack)
            # also without masks: under an intervention no compiled code runs, which would keep these changes
            stack.enter_context(rows.applied_to(model_map.model, model_map))
            stack.enter_context(skip.installed())
            yield cls(model_map, cache, skip, rows, masks)

    def forward(
        self, batch: Sequence[Chunk], start: int = 0, hidden: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
        """Run new tokens and store their keys and values.

        Args:
            batch: chunks in the order of their slots.
            start: the first layer to run.
            hidden: input of layer `start`, (all tokens, width), if `start` > 0.

        Returns:
            Logits, (tokens without skipped ones, vocabulary), and for each chunk the inputs of its `keep` layers,
            (tokens, width).
        """
        tokens = [token for chunk in batch for token in chunk.tokens]
        masks = [chunk.mask for chunk in batch for _ in chunk.tokens]
        starts = list(accumulate((len(chunk.tokens) for chunk in batch), initial=0))
        with_logits = [
            token
            for chunk, (first, end) in zip(batch, pairwise(starts), strict=True)
            for token in range(first + chunk.skip, end)
        ]
        columns = zip(*((chunk.slot, chunk.cached, len(chunk.tokens)) for chunk in batch), strict=True)
        keep = frozenset[int]().union(*(chunk.keep for chunk in batch))
        hidden = None if hidden is None else hidden.unsqueeze(0)
        packing = self.cache.packing(Packed(*columns), self.device)
        with self._skip.running(start, hidden, keep) as current, packing as layout:
            logits = self._logits(tokens, masks, layout.positions, with_logits)
        self.layer_tokens += len(tokens) * (self.layers - start)
        self.head_tokens += len(with_logits)
        layer_inputs = [  # copies: a view would keep the whole batch in memory
            {layer: current.layer_inputs[layer][0, slice(*ends)].clone() for layer in chunk.keep}
            for chunk, ends in zip(batch, pairwise(starts), strict=True)
        ]
        return logits, layer_inputs

    def head(self, hidden: torch.Tensor, mask: int) -> torch.Tensor:
        """Return the logits of outputs of the last layer, (tokens, vocabulary); `hidden` is (tokens, width)."""
        count = len(hidden)
        self.head_tokens += count
        with self._skip.running(self.layers, hidden.unsqueeze(0)):
            positions = torch.zeros(count, dtype=torch.long, device=self.device)
            logits = self._logits([0] * count, [mask] * count, positions, range(count))
        refuse_nan(logits[:, 0])
        return logits

    @property
    def largest_pass(self) -> int:
        """Largest number of tokens in a pass, unless a single prompt is longer."""
        return GPU_PASS if self.device.type == "cuda" else PASS

    @contextmanager
    def storing_in(self, cache: KVCache) -> Iterator[None]:
        """Store keys and values in another cache inside the block."""
        with replaced(self, cache=cache), ExitStack() as stack:
            replace_attention(self._model_map, cache, stack)
            yield

    def forward_alone(self, tokens: Sequence[int], mask: int) -> torch.Tensor:
        """Return the logits after `tokens`, (vocabulary,), computed in a batch of one with a cache of its own."""
        with self.storing_in(KVCache(1, len(tokens))), preserve_state(self._model):
            return self.forward([Chunk(0, 0, mask, tokens, len(tokens) - 1)])[0][0]

    def _logits(
        self, tokens: Sequence[int], masks: Sequence[int], positions: torch.Tensor, with_logits: Sequence[int]
    ) -> torch.Tensor:
        to_keep: slice | torch.Tensor = slice(None)
        if len(with_logits) < len(tokens):
            to_keep = torch.tensor(with_logits, dtype=torch.long, device=self.device)
        with self._masking(torch.tensor([masks])), fast_products(len(tokens)):
            out = self._model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=to_keep,
            )
        if len(out.logits[0]) != len(with_logits):
            raise UnsupportedAttention("logits_to_keep")
        logits: torch.Tensor = out.logits[0]
        return logits


@contextmanager
def lock_model(model_map: ModelMap) -> Iterator[None]:
    """Refuse other runs on the model inside the block."""
    refuse_locked(model_map.model)
    modules = [layer.module for layer in model_map.attention]
    _LOCKED.update(modules)
    try:
        yield
    finally:
        _LOCKED.difference_update(modules)


def refuse_locked(model: nn.Module) -> None:
    """Refuse a model that another run uses."""
    if any(module in _LOCKED for module in model.modules()):
        raise InputError("the engine is decoding on this model already; finish or close that run first")
