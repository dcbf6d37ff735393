"""Probe Pruning: heads and channels of each layer are chosen anew for every request, by a small probe of its own text.

Of a layer's input, the tokens with the largest norms are taken as a probe; what they alone would give the output and
down projections, squared, scores the columns: f_tj, with weights ‖(Σ_t f_tj · W_ij²)_{i, j∈head}‖. The lowest heads and
channels are left out for the whole text. Nothing is saved here: it shows what quality such a choice has.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap
from lmeval_prune.architectures.blocks import is_transposed
from lmeval_prune.architectures.model_map import layers_with_attention
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.attention_call import (
    Attend,
    Attended,
    AttentionCall,
    check_attention_calls,
    put_in_front,
)
from lmeval_prune.interventions.base import Intervention, change_input, interventions_on
from lmeval_prune.interventions.filtered_attention import valid_tokens
from lmeval_prune.interventions.head_mask import HeadMask, dropped_columns
from lmeval_prune.interventions.plan import Plan, plan_of

logger = logging.getLogger(__name__)
STATES = ("request", "run")
FEW = 10  # positions: of probes as small, the first token is always one
_CHOSEN = "_lmeval_prune_probe"  # what a cache remembers of what was chosen when it was begun


@dataclass(frozen=True)
class ProbePruning(Intervention):
    """Leaves out heads and channels that a probe of the text says little about.

    A choice looks at the whole text that is there when a cache begins, or without a cache at the whole text of a pass:
    it is not causal. While a text is generated, what was chosen at its prompt stays.

    Attributes:
        ratio: share of the heads and of the channels of the layers in play that is left out. What rounding down leaves
            in a layer goes to the next one, and one stays in each. Those that a mask or a plan takes away, or whose
            weights are zero, are not counted.
        positions: share of a text's tokens that are probed.
        samples: of `state=run`, share of a batch's texts that are probed.
        state: `request`: each text by itself; `run`: a batch as a whole, and what earlier batches read at the same
            places counts, too, so that answers depend on batch size and order.
        smoothing: of `state=run`, how much of what was read before stays.
        skip_first: so many first layers are left whole.
        seen: of an applied one, how many batches of how many texts it has chosen for.
        left_out: of an applied one, how many heads and channels it has left out, and of how many in the whole model.
        chooser: of an applied one, what chooses.

    Raises:
        InputError: a value is none of these, or out of its range.
    """

    ratio: float
    positions: float = 0.5
    samples: float = 0.05
    state: str = "request"
    smoothing: float = 0.99
    skip_first: int = 3
    seen: Counter[int] = field(default_factory=Counter, init=False, compare=False, repr=False)
    left_out: Counter[str] = field(default_factory=Counter, init=False, compare=False, repr=False)
    chooser: Chooser | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state not in STATES:
            raise InputError(f"probe_pruning.state={self.state} is unknown; use {', '.join(STATES)}")
        if not 0 <= self.ratio < 1:
            raise InputError(f"probe_pruning.ratio={self.ratio} must be at least 0 and below 1")
        for name in ("positions", "samples"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"probe_pruning.{name}={getattr(self, name)} must be above 0 and at most 1")
        if not 0 <= self.smoothing < 1:
            raise InputError(f"probe_pruning.smoothing={self.smoothing} must be at least 0 and below 1")
        if self.skip_first < 0:
            raise InputError(f"probe_pruning.skip_first={self.skip_first} must be at least 0")
        object.__setattr__(self, "tokenwise", self.ratio == 0)

    @property
    def needs_order(self) -> bool:
        """Whether answers depend on those before them."""
        return self.state == "run" and self.ratio > 0

    def resolve(self, model_map: ModelMap) -> Self:
        """Refuse models whose attention is not causal or cannot be handled; see the base class."""
        parts = (part for layer in model_map.attention for part in layer.module.modules())
        if model_map.stacks != ("",) or not all(getattr(part, "is_causal", True) for part in parts):
            raise InputError(f"probe_pruning is for causal models; {model_map.model_type} is none")
        check_attention_calls(model_map)
        if self.skip_first >= len(model_map.attention):
            raise InputError(
                f"probe_pruning.skip_first={self.skip_first} leaves all {len(model_map.attention)} layers whole; give "
                f"less"
            )
        self._check_ratio(model_map)
        return replace(self)  # with counts of its own

    def _check_ratio(self, model_map: ModelMap) -> None:
        """Refuse a share that leaves out nothing, or more than there is beside one of each layer."""
        layers = model_map.attention[self.skip_first :]
        labels = {layer.label for layer in layers}
        channels = [block.channels for block in model_map.feed_forward if block.label in labels]
        for kind, sizes in (("heads", [layer.heads for layer in layers]), ("channels", channels)):
            number = sum(sizes)
            wanted, most = _whole(self.ratio * number), number - len(sizes)
            share = f"probe_pruning.ratio={self.ratio} of the {number} {kind} of {len(sizes)} layers"
            if sizes and self.ratio and not wanted:
                raise InputError(f"{share} leaves out none; give {math.ceil(1e4 / number) / 1e4} or more")
            if wanted > most:
                raise InputError(f"{share} would empty a layer; give at most {math.floor(1e4 * most / number) / 1e4}")

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Choose at each layer that is in play; see the base class."""
        if self.ratio == 0:
            return
        if self.needs_order:
            logger.warning(
                "probe_pruning.state=run: answers depend on the batch size and on the order in which they are asked for"
            )
        chooser = Chooser(self, model_map, self.seen, self.left_out)
        chooser.attach(stack)
        object.__setattr__(self, "chooser", chooser)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What runs inside the block is not counted, and is no history; see the base class."""
        history = copy.deepcopy(self.chooser.history) if self.chooser else {}
        seen, left_out = Counter(self.seen), Counter(self.left_out)
        try:
            yield
        finally:
            self.seen.clear()
            self.seen.update(seen)
            self.left_out.clear()
            self.left_out.update(left_out)
            if self.chooser:
                self.chooser.history = history

    def joined(self, other: Intervention) -> None:
        """Refuse a second one, and what remembers tokens, since a probe's would be among them; see the base class."""
        if isinstance(other, ProbePruning):
            raise InputError("probe_pruning cannot be applied twice at once; give one")
        if other.by_sequence and not other.tokenwise and self.ratio:
            raise InputError("probe_pruning runs attention twice, which token_filter would count; give one of them")

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Its fields, for batches of how many texts it has chosen, and what share went; not of stored answers."""
        found = super().report(model_map)
        found["probe_pruning_batches"] = {str(rows): count for rows, count in sorted(self.seen.items())}
        found["probe_pruning_left_out"] = {
            kind: self.left_out[kind] / self.left_out[f"all {kind}"] if self.left_out[kind] else 0.0
            for kind in ("heads", "channels")
        }
        found["probe_pruning_depends_on"] = (
            "batch size and order" if self.needs_order else "the text alone, but for rounding that turns a choice"
        )
        return found


class Chooser:
    """Chooses heads and channels, and leaves them out.

    Args:
        rule: the intervention's fields.
        model_map: of the model.
        seen: batches by how many texts they have; written.
        left_out: heads and channels that were left out; written.

    Attributes:
        history: by projection, what earlier batches read, squared, (places, columns); NaN where nothing was. A place
            counts a text's own tokens, not the padding before them.
    """

    def __init__(self, rule: ProbePruning, model_map: ModelMap, seen: Counter[int], left_out: Counter[str]) -> None:
        self.rule, self.model_map, self.seen, self.left_out = rule, model_map, seen, left_out
        self.history: dict[str, Tensor] = {}
        self.layers = model_map.attention[rule.skip_first :]
        blocks = {block.label: block for block in model_map.feed_forward}
        self.blocks = [blocks[layer.label] for layer in self.layers if layer.label in blocks]
        self.residual: dict[str, Tensor] = {}  # of layers that run: what goes by
        self.caches: dict[str, dict[str, Tensor] | None] = {}  # what was chosen for the cache that a layer was given
        self.real: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}  # by projection, Σ_i W_ij⁴ of each column
        self.counts: dict[str, int] = {}  # by projection, how many heads or channels go

    def attach(self, stack: ExitStack) -> None:
        """Watch and change the layers in play until `stack` closes."""
        put_in_front(self.model_map, self.attend, stack)
        modules = layers_with_attention(self.model_map)[self.rule.skip_first :]
        for layer, module in zip(self.layers, modules, strict=True):
            for hooked in (
                module.register_forward_pre_hook(partial(self._begin, layer), with_kwargs=True),
                layer.module.register_forward_pre_hook(partial(self._watch, layer), with_kwargs=True),
                layer.module.register_forward_hook(partial(self._add, layer)),
                module.register_forward_hook(partial(self._end, layer)),
            ):
                stack.callback(hooked.remove)
        for block in self.blocks:
            change_input(block.down, partial(self._left_of, block), stack)

    # ------------------------------------------------------------------ what goes by

    def _begin(self, layer: AttentionLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.residual[layer.label] = (args[0] if args else kwargs["hidden_states"]).detach()

    def _watch(self, layer: AttentionLayer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache: Any = next((one for one in (*args, *kwargs.values()) if isinstance(one, Cache)), None)
        if cache is None:
            self.caches[layer.label] = None
            return
        chosen = vars(cache).setdefault(_CHOSEN, {})
        if not cache.get_seq_length(layer.index):  # it begins
            for part in ("o_proj", "down"):
                chosen.pop(f"{layer.label}.{part}", None)
        elif f"{layer.label}.o_proj" not in chosen:
            raise InputError("probe pruning cannot go on with a cache that was filled without it; begin a new one")
        self.caches[layer.label] = chosen

    def _add(self, layer: AttentionLayer, _: nn.Module, __: Any, output: Any) -> None:
        given = output[0] if isinstance(output, tuple) else output
        self.residual[layer.label] = self.residual[layer.label] + given.detach()

    def _end(self, layer: AttentionLayer, *_: Any) -> None:
        for kept in (self.residual, self.caches, self.real):
            kept.pop(layer.label, None)

    # ------------------------------------------------------------------ choosing

    def attend(self, call: AttentionCall, attend: Attend) -> Attended:
        """The attention without the heads that are left out."""
        label = call.layer.label
        if label not in self.residual:  # not in play
            return attend(call)
        name = _name(call.layer)
        drop = self._known(label, name)
        out, weights = attend(call)
        if drop is None:
            real = self.real[label] = valid_tokens(call)
            if call.layer is self.layers[0]:
                self.seen[len(real)] += 1
                self.left_out["all heads"] += len(real) * self.model_map.total_heads
                self.left_out["all channels"] += len(real) * sum(self.model_map.channels().values())
                self._count()

            def probe(rows: Tensor, places: Tensor) -> Tensor:
                mask, every = call.mask, rows[:, None]
                if mask is not None:
                    mask = mask.expand(len(real), -1, -1, -1)[every[..., None], :, places[..., None], places[:, None]]
                    mask = mask.permute(0, 3, 1, 2)
                cut = {
                    part: getattr(call, part)[every, :, places].transpose(1, 2) for part in ("query", "key", "value")
                }
                return attend(replace(call, **cut, mask=mask))[0].flatten(2)

            drop = self._choose(call.layer, probe, out.flatten(2), real)
            self._keep(label, name, drop)
        heads = drop[:, :: call.layer.head_dim][:, None, :, None]  # a head's columns go together
        return out.masked_fill(heads, 0), weights

    def _left_of(self, block: FeedForward, x: Tensor) -> Tensor:
        """What the down projection reads without the channels that are left out."""
        name = _name(block)
        drop = self._known(block.label, name)
        if drop is None:
            real = self.real[block.label]
            whole = x.detach().reshape(*real.shape, -1)
            drop = self._choose(block, lambda rows, places: whole[rows[:, None], places], whole, real)
            self._keep(block.label, name, drop)
        return x.reshape(len(drop), -1, x.shape[-1]).masked_fill(drop[:, None], 0).reshape(x.shape)

    def _known(self, label: str, name: str) -> Tensor | None:
        return (self.caches.get(label) or {}).get(name)

    def _keep(self, label: str, name: str, drop: Tensor) -> None:
        chosen = self.caches.get(label)
        if chosen is not None:
            chosen[name] = drop

    def _choose(self, block: AttentionLayer | FeedForward, probe: Any, whole: Tensor, real: Tensor) -> Tensor:
        """Which columns each text leaves out, (texts, columns).

        Args:
            block: whose columns.
            probe: what these texts give at these places (texts, places), if there were no others: (texts, places,
                columns).
            whole: what all give, (texts, tokens, columns).
            real: which tokens are no padding.
        """
        residual, name = self.residual[block.label], _name(block)
        tie = torch.finfo(residual.dtype).eps ** 0.75  # well above what batches of other shapes change
        norms = residual.reshape(*real.shape, -1).double().norm(dim=-1).masked_fill(~real, 0)
        if self.rule.state == "request":
            found = []
            for row in range(len(real)):
                first = int(real[row].int().argmax())
                places = first + self._positions(norms[row, first:], int(real[row].sum()), tie)
                squares = probe(torch.tensor([row], device=places.device), places[None])[0].detach().double().square()
                found.append(self._lowest(block, squares.sum(0), 1, tie))
            return torch.stack(found)
        order = real.int().argsort(dim=1, descending=True, stable=True)  # each text's own tokens, then its padding
        real, norms = real.gather(1, order), norms.gather(1, order)
        whole = whole.gather(1, order[..., None].expand(whole.shape))
        places = self._positions(norms.norm(dim=0), int(real.any(0).sum()), tie)
        rows = extreme(norms[:, places].norm(dim=1), math.ceil(self.rule.samples * len(real)), True, tie)
        probed = probe(rows, order[rows][:, places]).detach().double()
        is_real = real[rows][:, places]
        counts = is_real.sum(0).clamp(min=1)[:, None]
        squares = torch.where(is_real[..., None], probed, 0.0).square().sum(0) / counts
        before = self._before(name, real.shape[1], whole.shape[-1], squares)
        known = before[places]
        fused = torch.where(known.isnan(), squares, _fused(squares, known))
        drop = self._lowest(block, fused.sum(0), len(real), tie)
        self._remember(name, before, whole, real, drop)
        return drop.expand(len(real), -1)

    def _positions(self, norms: Tensor, count: int, tie: float) -> Tensor:
        """The places of the largest of `count` tokens, in order; the first token is among a few."""
        number = min(max(math.ceil(self.rule.positions * count), 2), max(count, 1))
        places = extreme(norms, number, True, tie)
        if number <= FEW:
            places[0] = 0
        return places

    def _lowest(self, block: AttentionLayer | FeedForward, scores: Tensor, texts: int, tie: float) -> Tensor:
        """True where a column goes.

        Args:
            block: whose columns.
            scores: Σ_t f_tj of each column.
            texts: how many leave them out.
            tie: see `extreme`.
        """
        kind, width = ("heads", block.head_dim) if isinstance(block, AttentionLayer) else ("channels", 1)
        fourth, count = self.weights[_name(block)], self.counts[_name(block)]
        units = (scores.square() * fourth).cpu().unflatten(0, (-1, width)).sum(1)
        there = _there(block, fourth)
        self.left_out[kind] += count * texts
        drop = torch.zeros(len(units), dtype=torch.bool)
        drop[there[extreme(units[there], count, False, tie)]] = True
        return drop.repeat_interleave(width).to(scores.device)

    def _count(self) -> None:
        """Settle how many heads and channels each layer in play leaves out."""
        for blocks in (self.layers, self.blocks):
            self.weights |= {_name(block): self._fourth(block) for block in blocks}
            sizes = [len(_there(block, self.weights[_name(block)])) for block in blocks]
            self.counts |= zip(map(_name, blocks), shares(sizes, self.rule.ratio), strict=True)

    def _fourth(self, block: AttentionLayer | FeedForward) -> Tensor:
        """Σ_i W_ij⁴ of each column; zero where a mask or a plan takes it away."""
        module: Any = block.o_proj if isinstance(block, AttentionLayer) else block.down
        weight = module.weight.detach()
        weight = weight.T if is_transposed(module) else weight
        applied = interventions_on(self.model_map.attention[0].module)
        plans = [
            plan_of(one) if isinstance(one, HeadMask) else one for one in applied if isinstance(one, HeadMask | Plan)
        ]
        for plan in plans:
            weight = plan.compensation.get(f"{_name(block)}.weight", weight).to(weight.device)
        found = weight.double().pow(4).sum(0)
        for plan in plans:
            if isinstance(block, AttentionLayer):
                gone = [(x, n) for x, n in plan.heads_by_layer(self.model_map) if x.label == block.label]
                drops = [dropped_columns(layer, numbers) for layer, numbers in gone]
            else:
                lost = [n for x, n in plan.channels_by_layer(self.model_map) if x.label == block.label]
                drops = [dropped_columns(block, numbers) for numbers in lost]
            for drop in drops:
                found = found.masked_fill(drop.to(found.device), 0)
        return found

    # ------------------------------------------------------------------ history

    def _before(self, name: str, tokens: int, columns: int, like: Tensor) -> Tensor:
        """What is known of as many places."""
        known = self.history.get(name)
        if known is None:
            known = like.new_full((0, columns), torch.nan)
        if len(known) < tokens:
            known = torch.cat([known, known.new_full((tokens - len(known), columns), torch.nan)])
        return known

    def _remember(self, name: str, before: Tensor, whole: Tensor, real: Tensor, drop: Tensor) -> None:
        """Take in what a batch has read, of the columns that it keeps."""
        counts = real.sum(0)
        squares = (
            torch.where(real[..., None], whole.detach().double(), 0.0).square().sum(0) / counts.clamp(min=1)[:, None]
        )
        old, stay = before[: len(squares)], self.rule.smoothing
        new = torch.where(old.isnan(), squares, stay * old + (1 - stay) * squares)
        taken = (counts > 0)[:, None] & ~drop
        self.history[name] = torch.cat([torch.where(taken, new, old), before[len(squares) :]])


def shares(sizes: Sequence[int], ratio: float) -> list[int]:
    """How many of each layer's units go: a share of all. One stays in each layer.

    What rounding leaves goes to the next layer, and what the last layers cannot give is taken from those before.
    """
    counts = [0] * len(sizes)
    for place, size in enumerate(sizes):
        counts[place] = max(0, min(_whole(ratio * sum(sizes[: place + 1])) - sum(counts), size - 1))
    for place in reversed(range(len(sizes))):
        counts[place] += max(0, min(_whole(ratio * sum(sizes)) - sum(counts), sizes[place] - 1 - counts[place]))
    return counts


def extreme(values: Tensor, count: int, largest: bool, tie: float) -> Tensor:
    """The places of the largest or smallest values, in order.

    Args:
        values: at least 0, (n,).
        count: how many.
        largest: or the smallest.
        tie: values that differ from the last that is taken by no more than this share of it are equal, and the first
            of them are taken: rounding, and with it the shape of a batch, does not decide among equal ones.
    """
    if not count:
        return torch.zeros(0, dtype=torch.long, device=values.device)
    last = values.topk(count, largest=largest).values[-1]
    ahead = values - last if largest else last - values
    sure, equal = ahead > tie * last, ahead.abs() <= tie * last
    return (sure | (equal & (equal.cumsum(0) <= count - sure.sum()))).nonzero()[:, 0]


def _whole(share: float) -> int:
    return math.floor(share + 1e-9)


def _name(block: AttentionLayer | FeedForward) -> str:
    """Name of the projection that reads a block's heads or channels."""
    return f"{block.label}.{'o_proj' if isinstance(block, AttentionLayer) else 'down'}"


def _there(block: AttentionLayer | FeedForward, fourth: Tensor) -> Tensor:
    """Numbers of the heads or channels that have weights: a cut checkpoint's fillers have none."""
    width = block.head_dim if isinstance(block, AttentionLayer) else 1
    return fourth.cpu().unflatten(0, (-1, width)).sum(1).nonzero().flatten()


def _fused(probed: Tensor, known: Tensor) -> Tensor:
    """Each weighted by itself."""
    total = probed + known
    return torch.where(total > 0, (probed.square() + known.square()) / total, 0.0)
