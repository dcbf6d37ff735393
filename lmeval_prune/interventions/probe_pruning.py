"""Probe Pruning: each layer selects the heads and channels of a request by a small probe of the request's own text.

The probe is the tokens with the largest hidden-state norms at a layer's input. Their activations f alone, at the inputs
of the output and down projections, score the columns: a head or channel weighs ‖(Σ_t f_tj · W_ij²)_{i, j∈head}‖. The
lowest heads and channels are masked for the whole text. Nothing runs faster: this measures the quality only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Self

import torch
from annotated_types import Interval
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import weight_of
from lmeval_prune.architectures.precision import FINITE_REMEDY
from lmeval_prune.attributes import replaced
from lmeval_prune.config import Natural, ShareBelowOne
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import (
    Attend,
    Attended,
    AttentionCall,
    check_attention_calls,
    intercept_attention,
    valid_tokens,
)
from lmeval_prune.interventions.base import Intervention, change_input, interventions_on
from lmeval_prune.interventions.head_mask import dropped_columns
from lmeval_prune.interventions.plan import Plan

SMALL_PROBE = 10  # a probe of at most this many tokens contains the first token
_CACHE_KEY = "_lmeval_prune_probe"  # attribute of a cache: the columns masked at its prompt, by layer and projection

ProbeShare = Annotated[float, Interval(gt=0, le=1)]
Probe = Callable[[int, Tensor], Tensor]  # row, positions (k,) -> activations (k, columns)


@dataclass(frozen=True)
class ProbePruning(Intervention):
    """Mask the heads and channels with the lowest scores in a probe of the text.

    The choice is not causal: it uses the whole text of a pass without a cache, or the whole prompt that begins a cache.
    Generated tokens keep the choice of their prompt.

    Attributes:
        ratio: share of the heads, and of the channels, of all layers after `skip_first` to mask. Rounding carries over
            to the next layer, and every layer keeps one. Heads and channels that a mask or plan removes, or with zero
            weights, do not count.
        positions: share of a text's tokens in the probe.
        skip_first: number of first layers that are never pruned.
        chooser: the hooks and counters of an applied intervention.
    """

    ratio: ShareBelowOne
    positions: ProbeShare = 0.5
    skip_first: Natural = 3
    chooser: Chooser | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tokenwise", self.ratio == 0)

    def resolve(self, model_map: ModelMap) -> Self:
        if not model_map.is_causal:
            raise InputError(f"probe_pruning is for causal models; {model_map.model_type} is none")
        check_attention_calls(model_map)
        if self.skip_first >= len(model_map.attention):
            raise InputError(
                f"probe_pruning.skip_first={self.skip_first} skips all {len(model_map.attention)} layers; give less"
            )
        attention, feed_forward = self.pruned_layers(model_map)
        units = {"heads": [layer.heads for layer in attention], "channels": [block.channels for block in feed_forward]}
        for kind, sizes in units.items():
            total, most = sum(sizes), sum(sizes) - len(sizes)
            share = f"probe_pruning.ratio={self.ratio} of the {total} {kind} of {len(sizes)} layers"
            if sizes and self.ratio and not _floor(self.ratio * total):
                raise InputError(f"{share} leaves out none; give {math.ceil(1e4 / total) / 1e4} or more")
            if _floor(self.ratio * total) > most:
                raise InputError(f"{share} would empty a layer; give at most {math.floor(1e4 * most / total) / 1e4}")
        return replace(self)  # every application has its own chooser

    def pruned_layers(self, model_map: ModelMap) -> tuple[list[AttentionLayer], list[FeedForward]]:
        layers = list(model_map.attention[self.skip_first :])
        labels = {layer.label for layer in layers}
        return layers, [block for block in model_map.feed_forward if block.label in labels]

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        if self.ratio == 0:
            return
        chooser = Chooser(self, model_map)
        chooser.attach(stack)
        object.__setattr__(self, "chooser", chooser)

    def preserve_state(self) -> AbstractContextManager[None]:
        return replaced(self.chooser, masked=Counter(self.chooser.masked)) if self.chooser else nullcontext()

    def merged_with(self, other: Intervention) -> None:
        """Refuse a second probe, and stateful handlers, which would count the probe's tokens."""
        if isinstance(other, ProbePruning):
            raise InputError("probe_pruning cannot be applied twice at once; give one")
        if other.by_sequence and not other.tokenwise and self.ratio:
            raise InputError("probe_pruning runs attention twice, which token_filter would count; give one of them")

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        masked = self.chooser.masked if self.chooser else Counter[str]()
        shares = {kind: masked[kind] / masked[f"all {kind}"] if masked[kind] else 0.0 for kind in ("heads", "channels")}
        return {**super().report(model_map), "probe_pruning_left_out": shares}


class _Target:
    """A projection whose input columns are masked: `o_proj` by heads, `down` by channels."""

    def __init__(self, block: AttentionLayer | FeedForward, plans: Sequence[Plan], model_map: ModelMap) -> None:
        if isinstance(block, AttentionLayer):
            self.kind, self.width, part, weight = "heads", block.head_dim, "o_proj", weight_of(block.o_proj)
        else:
            self.kind, self.width, part, weight = "channels", 1, "down", weight_of(block.down)
        self.name = f"{block.label}.{part}"
        self.count = 0  # heads or channels to mask
        for plan in plans:
            weight = plan.compensation.get(f"{self.name}.weight", weight).to(weight.device)
        self.weights = weight.double().pow(4).sum(0)  # Σ_i W_ij⁴, zero in columns that a mask or plan removes
        for plan in plans:
            for pruned, numbers in (*plan.heads_by_layer(model_map), *plan.channels_by_layer(model_map)):
                if pruned is block:
                    self.weights = self.weights.masked_fill(dropped_columns(block, numbers).to(weight.device), 0)
        # heads or channels with weights: zero padding in a cut checkpoint has none
        self.members = self.weights.cpu().unflatten(0, (-1, self.width)).sum(1).nonzero().flatten()

    def lowest(self, scores: Tensor, tie: float) -> Tensor:
        """Return the columns to mask, (columns,), given Σ_t f_tj of each column; see `top_positions` for `tie`."""
        norms = (scores.square() * self.weights).cpu().unflatten(0, (-1, self.width)).sum(1)
        drop = torch.zeros(len(norms), dtype=torch.bool)
        drop[self.members[top_positions(norms[self.members], self.count, False, tie)]] = True
        return drop.repeat_interleave(self.width).to(scores.device)


@dataclass
class _LayerPass:
    residual: Tensor  # its input; after attention, its input plus the attention output
    choices: dict[str, Tensor]  # masked columns by projection, (rows, columns); stored in the cache, if there is one
    real: Tensor | None = None  # false for padding, (rows, tokens)


class Chooser:
    """Hooks that choose heads and channels, and mask them."""

    def __init__(self, settings: ProbePruning, model_map: ModelMap) -> None:
        self.settings, self.model_map = settings, model_map
        self.masked: Counter[str] = Counter()  # masked heads and channels, and all (`all heads`, `all channels`)
        self._layers, self._blocks = settings.pruned_layers(model_map)
        self._passes: dict[str, _LayerPass] = {}  # by label, of layers that run
        self._targets: dict[str, _Target] = {}  # by name, `L3.o_proj`

    def attach(self, stack: ExitStack) -> None:
        intercept_attention(self.model_map, self._attend, stack)
        for layer in self._layers:
            module = self.model_map.layers[layer.label]
            for handle in (
                module.register_forward_pre_hook(partial(self._begin, layer), with_kwargs=True),
                layer.module.register_forward_hook(partial(self._add, layer)),
                module.register_forward_hook(partial(self._end, layer)),
            ):
                stack.callback(handle.remove)
        for block in self._blocks:
            change_input(block.down, partial(self._mask_channels, block), stack)

    def _begin(self, layer: AttentionLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        residual = (args[0] if args else kwargs["hidden_states"]).detach()
        cache: Any = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        choices = {} if cache is None else vars(cache).setdefault(_CACHE_KEY, {}).setdefault(layer.label, {})
        if cache is None or not cache.get_seq_length(getattr(layer.module, "layer_idx", layer.index)):
            choices.clear()
        elif not choices:
            raise InputError("probe pruning cannot go on with a cache that was filled without it; begin a new one")
        self._passes[layer.label] = _LayerPass(residual, choices)

    def _add(self, layer: AttentionLayer, _: nn.Module, __: Any, output: Any) -> None:
        attended = output[0] if isinstance(output, tuple) else output
        self._passes[layer.label].residual = self._passes[layer.label].residual + attended.detach()

    def _end(self, layer: AttentionLayer, *_: Any) -> None:
        del self._passes[layer.label]

    def _attend(self, call: AttentionCall, attend: Attend) -> Attended:
        layer = self._passes.get(call.layer.label)
        if layer is None:  # one of the first layers
            return attend(call)
        out, weights = attend(call)
        if "o_proj" not in layer.choices:
            layer.real = valid_tokens(call)
            if call.layer is self._layers[0]:
                self._begin_batch(len(layer.real))
            layer.choices["o_proj"] = self._choose(layer, f"{call.layer.label}.o_proj", _probe_of(call, attend))
        heads = layer.choices["o_proj"][:, :: call.layer.head_dim][:, None, :, None]
        return out.masked_fill(heads, 0), weights

    def _mask_channels(self, block: FeedForward, x: Tensor) -> Tensor:
        layer = self._passes[block.label]
        if "down" not in layer.choices:
            assert layer.real is not None
            activations = x.detach().reshape(*layer.real.shape, -1)
            layer.choices["down"] = self._choose(
                layer, f"{block.label}.down", lambda row, positions: activations[row, positions]
            )
        drop = layer.choices["down"]
        return x.reshape(len(drop), -1, x.shape[-1]).masked_fill(drop[:, None], 0).reshape(x.shape)

    def _begin_batch(self, texts: int) -> None:
        """Count a batch's units, and compute how many heads and channels each layer masks under the current plans."""
        self.masked["all heads"] += texts * self.model_map.total_heads
        self.masked["all channels"] += texts * sum(self.model_map.channels().values())
        applied = interventions_on(self.model_map.attention[0].module)
        plans = [plan for intervention in applied if isinstance(plan := intervention.converted(Plan), Plan)]
        for blocks in (self._layers, self._blocks):
            targets = [_Target(block, plans, self.model_map) for block in blocks]
            counts = counts_by_layer([len(target.members) for target in targets], self.settings.ratio)
            for target, count in zip(targets, counts, strict=True):
                target.count = count
                self._targets[target.name] = target

    def _choose(self, layer: _LayerPass, name: str, probe: Probe) -> Tensor:
        """Return the columns to mask in each row, (rows, columns).

        `probe` computes activations of a row at some positions, as if there were no others.
        """
        assert layer.real is not None
        target, real = self._targets[name], layer.real
        self.masked[target.kind] += target.count * len(real)
        tie = torch.finfo(layer.residual.dtype).eps ** 0.75  # well above the rounding of another batch shape
        norms = layer.residual.reshape(*real.shape, -1).double().norm(dim=-1).masked_fill(~real, 0)
        if not bool(norms.isfinite().all()):
            raise InputError(
                f"probe_pruning: the hidden states before {name} are not finite, so they choose no tokens",
                remedy=FINITE_REMEDY,
            )
        drops = []
        for row, is_real in enumerate(real):
            first, count = int(is_real.int().argmax()), int(is_real.sum())
            size = min(max(math.ceil(self.settings.positions * count), 2), max(count, 1))
            positions = top_positions(norms[row, first:], size, True, tie)
            if size <= SMALL_PROBE:
                positions[0] = 0
            probed = probe(row, first + positions).detach().double()
            drops.append(target.lowest(probed.square().sum(0), tie))
        return torch.stack(drops)


def _probe_of(call: AttentionCall, attend: Attend) -> Probe:
    """Return a function that computes the attention among some tokens of a row."""

    def probe(row: int, positions: Tensor) -> Tensor:
        mask = call.mask
        if mask is not None:
            mask = mask.expand(len(call.query), -1, -1, -1)[row, None][..., positions[:, None], positions]
        names = ("query", "key", "value")
        parts = {name: getattr(call, name)[row, None, :, positions] for name in names}
        return attend(replace(call, **parts, mask=mask))[0][0].flatten(1)

    return probe


def counts_by_layer(sizes: Sequence[int], ratio: float) -> list[int]:
    """Distribute a ratio of all units over layers of these sizes, keeping one unit in each layer.

    Rounding carries over to the next layer. Earlier layers take over the units that the last layers lack.
    """
    counts = [0] * len(sizes)
    for layer, size in enumerate(sizes):
        counts[layer] = max(0, min(_floor(ratio * sum(sizes[: layer + 1])) - sum(counts), size - 1))
    for layer in reversed(range(len(sizes))):
        counts[layer] += max(0, min(_floor(ratio * sum(sizes)) - sum(counts), sizes[layer] - 1 - counts[layer]))
    return counts


def top_positions(values: Tensor, count: int, largest: bool, tie: float) -> Tensor:
    """Return the sorted positions of the `count` largest (or smallest) of nonnegative values, (n,).

    Values within a share `tie` of the last selected value count as equal, and the first of them are selected. So
    rounding, which depends on the shape of the batch, does not decide.
    """
    if not count:
        return torch.zeros(0, dtype=torch.long, device=values.device)
    last = values.topk(count, largest=largest).values[-1]
    ahead = values - last if largest else last - values
    sure, equal = ahead > tie * last, ahead.abs() <= tie * last
    return (sure | (equal & (equal.cumsum(0) <= count - sure.sum()))).nonzero()[:, 0]


def _floor(share: float) -> int:
    return math.floor(share + 1e-9)
