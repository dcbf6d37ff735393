"""A stock model that runs packed batches of differently pruned sequences, from any layer up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn

from lmeval_prune.architectures import ModelMap, input_device
from lmeval_prune.architectures.blocks import has_absent
from lmeval_prune.architectures.precision import fast_products, refuse_nan
from lmeval_prune.attributes import replaced
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.applied import preserve_state
from lmeval_prune.interventions.attention_call import Packed, UnsupportedAttention, replace_attention
from lmeval_prune.interventions.base import interventions_on
from lmeval_prune.interventions.head_mask import HeadMask, RowMasks

PASS, GPU_PASS = 2048, 8192  # `ModelRunner.largest_pass`: it bounds how long new prompts delay running rows
_LOCKED: WeakSet[nn.Module] = WeakSet()  # attention modules of models in use


@dataclass
class PartialPass:
    """The attention layers that a forward pass runs. Number N of N layers stands for the output of the last layer."""

    count: int  # number of layers
    start: int = 0  # the first layer to run
    hidden: torch.Tensor | None = None  # input of layer `start`, (1, tokens, width), if `start` > 0
    keep: frozenset[int] = frozenset()  # layers whose inputs are kept
    layer_inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # these inputs, filled by the pass


class _SkippableLayer(nn.Module):
    """A decoder layer that runs only if the current pass includes it.

    A layer whose attention was cut out has the number of the attention layer before it.
    """

    def __init__(self, layer: nn.Module, current: PartialPass, number: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layer, self._current = layer, current
        self._number, self._is_first, self._is_last = number, is_first, is_last  # first with this number, last of all
        self._tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # `attention_type` and the like

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        number, current = self._number, self._current
        if self._is_first and number == current.start and current.hidden is not None:
            hidden_states = current.hidden
        if number >= current.start:
            if self._is_first and number in current.keep:
                current.layer_inputs[number] = hidden_states
            out = self.layer(hidden_states, *args, **kwargs)
            self._tuple = isinstance(out, tuple)
        else:
            passed = current.hidden if self._is_last and current.count == current.start else hidden_states
            out = (passed,) if self._tuple else passed
        if self._is_last and current.count in current.keep:
            current.layer_inputs[current.count] = out[0] if self._tuple else out
        return out


def make_skippable(model_map: ModelMap, current: PartialPass, stack: ExitStack) -> None:
    """Let `current` choose which decoder layers run until `stack` closes; they must be the entries of one list."""
    modules = dict(model_map.model.named_modules())
    lists, indices = set[str](), set[int]()
    for layer in model_map.attention:
        parts = layer.name.split(".")
        names = (".".join(parts[:end]) for end in range(1, len(parts)))
        name = next((name for name in names if isinstance(modules.get(name), nn.ModuleList)), "")
        if not name or parts[name.count(".") + 1] != str(layer.index):
            raise UnsupportedAttention(f"the model's {layer.name} is not in a list of decoder layers")
        lists.add(name)
        indices.add(layer.index)
    decoder = cast(nn.ModuleList, modules[min(lists)])
    gaps = [layer for index, layer in enumerate(decoder) if index not in indices]
    numbers = [getattr(layer.module, "layer_idx", number) for number, layer in enumerate(model_map.attention)]
    if len(lists) > 1 or not all(map(has_absent, gaps)) or (gaps and numbers != [*range(current.count)]):
        raise UnsupportedAttention("the model has several stacks of layers, or layers without attention among others")
    before, last = 0, -1  # attention layers so far, and the number of the layer before
    for index, module in enumerate(list(decoder)):
        before += index in indices
        number = max(0, before - 1)
        decoder[index] = _SkippableLayer(module, current, number, number > last, index == len(decoder) - 1)
        stack.callback(decoder.__setitem__, index, module)
        last = number


@dataclass
class Statistics:
    """Counters of the engine's runs."""

    answers: int = 0
    scored: int = 0  # results of `Engine.score`
    layer_tokens: int = 0  # tokens × layers
    head_tokens: int = 0  # tokens whose logits were computed


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
    """A model with the cache's attention, skippable layers and a mask for each row, until `stack` is closed.

    `Chunk.mask` refers to `masks`. Refuses unsuitable layers or masks.
    """

    def __init__(
        self,
        model_map: ModelMap,
        cache: KVCache,
        masks: Sequence[HeadMask | None],
        statistics: Statistics,
        stack: ExitStack,
    ) -> None:
        self._model_map, self._model = model_map, cast(Any, model_map.model)
        self.device, self.layers = input_device(self._model), len(model_map.attention)
        self.cache, self.statistics = cache, statistics
        self._pass, self._rows = PartialPass(self.layers), RowMasks()
        stack.enter_context(lock_model(model_map))
        replace_attention(model_map, cache, stack)
        # also without masks: under an intervention no compiled code runs, which would keep these changes
        stack.enter_context(self._rows.applied_to(self._model, model_map))
        make_skippable(model_map, self._pass, stack)
        self._masks = self._rows.table(masks)

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
        packed = Packed(*zip(*((chunk.slot, chunk.cached, len(chunk.tokens)) for chunk in batch), strict=True))
        layout, kept = self.cache.lay_out(packed, self.device), dict[int, torch.Tensor]()
        keep = frozenset[int]().union(*(chunk.keep for chunk in batch))
        hidden = None if hidden is None else hidden.unsqueeze(0)
        layers = replaced(self._pass, start=start, hidden=hidden, keep=keep, layer_inputs=kept)
        with layers, replaced(self.cache, packed=packed, layout=layout):
            logits = self._logits(tokens, masks, layout.positions, with_logits)
        self.statistics.layer_tokens += len(tokens) * (self.layers - start)
        self.statistics.head_tokens += len(with_logits)
        layer_inputs = [  # copies: a view would keep the whole batch in memory
            {layer: kept[layer][0, slice(*ends)].clone() for layer in chunk.keep}
            for chunk, ends in zip(batch, pairwise(starts), strict=True)
        ]
        return logits, layer_inputs

    def head(self, hidden: torch.Tensor, mask: int) -> torch.Tensor:
        """Return the logits of outputs of the last layer, (tokens, vocabulary); `hidden` is (tokens, width)."""
        count = len(hidden)
        self.statistics.head_tokens += count
        with replaced(self._pass, start=self.layers, hidden=hidden.unsqueeze(0)):
            positions = torch.zeros(count, dtype=torch.long, device=self.device)
            logits = self._logits([0] * count, [mask] * count, positions, range(count))
        refuse_nan(logits[:, 0])
        return logits

    @property
    def largest_pass(self) -> int:
        return GPU_PASS if self.device.type == "cuda" else PASS

    @contextmanager
    def storing_in(self, cache: KVCache) -> Iterator[None]:
        with replaced(self, cache=cache), ExitStack() as stack:
            replace_attention(self._model_map, cache, stack)
            yield

    def forward_alone(self, prompt: Sequence[int], answer: Sequence[int], mask: int) -> torch.Tensor:
        """Return the logits after an answer, (vocabulary,), computed in a batch of one with a cache of its own."""
        parts, cached = [prompt, *([token] for token in answer)], 0  # as it was decoded
        if all(intervention.tokenwise for intervention in interventions_on(self._model)):
            parts = [[*prompt, *answer]]
        with self.storing_in(KVCache(1, len(prompt) + len(answer))), preserve_state(self._model):
            for part in parts:
                logits = self.forward([Chunk(0, cached, mask, part, len(part) - 1)])[0]
                cached += len(part)
        return logits[0]

    def _logits(
        self, tokens: Sequence[int], masks: Sequence[int], positions: torch.Tensor, with_logits: Sequence[int]
    ) -> torch.Tensor:
        to_keep: slice | torch.Tensor = slice(None)
        if len(with_logits) < len(tokens):
            to_keep = torch.tensor(with_logits, dtype=torch.long, device=self.device)
        with self._rows.using(self._masks, torch.tensor([masks])), fast_products(len(tokens)):
            out = self._model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=to_keep,
            )
        if len(out.logits[0]) != len(with_logits):
            raise UnsupportedAttention("the model computes the logits of all tokens, it does not know logits_to_keep")
        logits: torch.Tensor = out.logits[0]
        return logits


@contextmanager
def lock_model(model_map: ModelMap) -> Iterator[None]:
    refuse_locked(model_map.model)
    modules = [layer.module for layer in model_map.attention]
    _LOCKED.update(modules)
    try:
        yield
    finally:
        _LOCKED.difference_update(modules)


def refuse_locked(model: nn.Module) -> None:
    if any(module in _LOCKED for module in model.modules()):
        raise InputError("the engine is decoding on this model already; finish or close that run first")
