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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Interval
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
    intercept_attention,
)
from lmeval_prune.interventions.base import Intervention, change_input, interventions_on
from lmeval_prune.interventions.filtered_attention import valid_tokens
from lmeval_prune.interventions.head_mask import dropped_columns
from lmeval_prune.interventions.plan import Plan
from lmeval_prune.settings import Natural, ShareBelowOne

logger = logging.getLogger(__name__)
SMALL_PROBE = 10  # tokens: a probe as small holds the first token
_CACHE_KEY = "_lmeval_prune_probe"  # attribute of a cache: what was chosen when it began, by projection

ProbeShare = Annotated[float, Interval(gt=0, le=1)]
Probe = Callable[[Tensor, Tensor], Tensor]  # texts (n,) and their positions (n, k) -> what they give, (n, k, columns)


@dataclass(frozen=True)
class ProbePruning(Intervention):
    """Leaves out heads and channels that a probe of the text says little about.

    A choice looks at the whole text that is there when a cache begins, or without a cache at the whole text of a pass:
    it is not causal. While a text is generated, the choice at its prompt stays.

    Attributes:
        ratio: share of the heads and of the channels of the layers in play that is left out. What rounding down leaves
            in a layer goes to the next one, and one stays in each. Those that a mask or a plan takes away, or whose
            weights are zero, are not counted.
        positions: share of a text's tokens that are probed.
        samples: of `state=run`, share of a batch's texts that are probed.
        state: `request`: each text by itself; `run`: a batch as a whole, and what earlier batches read at the same
            positions counts, too, so that answers depend on batch size and order.
        smoothing: of `state=run`, how much of what was read before stays.
        skip_first: so many first layers are left whole.
        chooser: of an applied one, what chooses, with counts of what it has chosen.

    Raises:
        InputError: a value is none of these, or out of its range.
    """

    ratio: ShareBelowOne
    positions: ProbeShare = 0.5
    samples: ProbeShare = 0.05
    state: Literal["request", "run"] = "request"
    smoothing: ShareBelowOne = 0.99
    skip_first: Natural = 3
    chooser: Chooser | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "tokenwise", self.ratio == 0)

    @property
    def needs_order(self) -> bool:
        """Return whether answers depend on earlier answers."""
        return self.state == "run" and self.ratio > 0

    def resolve(self, model_map: ModelMap) -> Self:
        """Refuse models whose attention is not causal or cannot be handled; see the base class."""
        if not model_map.is_causal:
            raise InputError(f"probe_pruning is for causal models; {model_map.model_type} is none")
        check_attention_calls(model_map)
        if self.skip_first >= len(model_map.attention):
            raise InputError(
                f"probe_pruning.skip_first={self.skip_first} leaves all {len(model_map.attention)} layers whole; give "
                f"less"
            )
        attention, feed_forward = self.layers_in_play(model_map)
        self._check_ratio("heads", [layer.heads for layer in attention])
        self._check_ratio("channels", [block.channels for block in feed_forward])
        return replace(self)  # with a chooser of its own

    def layers_in_play(self, model_map: ModelMap) -> tuple[list[AttentionLayer], list[FeedForward]]:
        """Return the attention layers and feed-forward blocks that lose heads and channels."""
        layers = list(model_map.attention[self.skip_first :])
        labels = {layer.label for layer in layers}
        return layers, [block for block in model_map.feed_forward if block.label in labels]

    def _check_ratio(self, kind: str, sizes: list[int]) -> None:
        """Refuse a share that leaves out nothing, or more than there is beside one of each layer."""
        number = sum(sizes)
        count, most = _whole(self.ratio * number), number - len(sizes)
        share = f"probe_pruning.ratio={self.ratio} of the {number} {kind} of {len(sizes)} layers"
        if sizes and self.ratio and not count:
            raise InputError(f"{share} leaves out none; give {math.ceil(1e4 / number) / 1e4} or more")
        if count > most:
            raise InputError(f"{share} would empty a layer; give at most {math.floor(1e4 * most / number) / 1e4}")

    def attach(self, model_map: ModelMap, stack: ExitStack) -> None:
        """Choose at each layer that is in play; see the base class."""
        if self.ratio == 0:
            return
        if self.needs_order:
            logger.warning(
                "probe_pruning.state=run: answers depend on the batch size and on the order in which they are asked for"
            )
        chooser = Chooser(self, model_map)
        chooser.attach(stack)
        object.__setattr__(self, "chooser", chooser)

    @contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Leave passes inside the block out of counts and history; see the base class."""
        chooser = self.chooser
        before = chooser and copy.deepcopy((chooser.history, chooser.batches, chooser.left_out))
        try:
            yield
        finally:
            if chooser and before:
                chooser.history, chooser.batches, chooser.left_out = before

    def merged_with(self, other: Intervention) -> None:
        """Refuse a second one, and what remembers tokens, since a probe's would be among them; see the base class."""
        if isinstance(other, ProbePruning):
            raise InputError("probe_pruning cannot be applied twice at once; give one")
        if other.by_sequence and not other.tokenwise and self.ratio:
            raise InputError("probe_pruning runs attention twice, which token_filter would count; give one of them")

    def report(self, model_map: ModelMap) -> dict[str, Any]:
        """Return its fields, the batches by their texts, and what share went; not of stored answers."""
        report = super().report(model_map)
        batches, left_out = (self.chooser.batches, self.chooser.left_out) if self.chooser else ({}, Counter())
        report["probe_pruning_batches"] = {str(texts): count for texts, count in sorted(batches.items())}
        report["probe_pruning_left_out"] = {
            kind: left_out[kind] / left_out[f"all {kind}"] if left_out[kind] else 0.0 for kind in ("heads", "channels")
        }
        report["probe_pruning_depends_on"] = (
            "batch size and order" if self.needs_order else "the text alone, but for rounding that turns a choice"
        )
        return report


@dataclass(frozen=True)
class Projection:
    """A projection some of whose inputs are left out: an output projection by heads, a down projection by channels.

    Attributes:
        block: whose projection it is.
        weights: Σ_i W_ij⁴ of each column; zero where a mask or a plan takes it away.
    """

    block: AttentionLayer | FeedForward
    weights: Tensor

    @property
    def kind(self) -> str:
        """`heads` or `channels`."""
        return "heads" if isinstance(self.block, AttentionLayer) else "channels"

    @property
    def width(self) -> int:
        """Columns of a head or channel."""
        return self.block.head_dim if isinstance(self.block, AttentionLayer) else 1

    @cached_property
    def units(self) -> Tensor:
        """Numbers of the heads or channels that have weights: a cut checkpoint's fillers have none."""
        return self.weights.cpu().unflatten(0, (-1, self.width)).sum(1).nonzero().flatten()

    def lowest(self, scores: Tensor, count: int, tie: float) -> Tensor:
        """Return which columns go, (columns,).

        Args:
            scores: Σ_t f_tj of each column.
            count: how many heads or channels.
            tie: see `extreme`.
        """
        norms = (scores.square() * self.weights).cpu().unflatten(0, (-1, self.width)).sum(1)
        drop = torch.zeros(len(norms), dtype=torch.bool)
        drop[self.units[extreme(norms[self.units], count, False, tie)]] = True
        return drop.repeat_interleave(self.width).to(scores.device)


@dataclass
class _LayerPass:
    """A layer that runs.

    Attributes:
        residual: its input, and after attention that plus attention's output.
        choices: columns that go, (texts, columns), by projection: those of the layer's cache, or of this pass alone.
        real: which tokens are no padding, (texts, tokens).
    """

    residual: Tensor
    choices: dict[str, Tensor]
    real: Tensor | None = None


class Chooser:
    """Chooses heads and channels, and leaves them out.

    Args:
        rule: the intervention's fields.
        model_map: of the model.

    Attributes:
        history: by projection, what earlier batches read, squared, (positions, columns); NaN where nothing was. A
            position counts a text's own tokens, not the padding before them.
        batches: how many batches of how many texts it has chosen for.
        left_out: how many heads and channels it has left out, and of how many in the whole model.
    """

    def __init__(self, rule: ProbePruning, model_map: ModelMap) -> None:
        self.rule, self.model_map = rule, model_map
        self.history: dict[str, Tensor] = {}
        self.batches: Counter[int] = Counter()
        self.left_out: Counter[str] = Counter()
        self._layers, self._blocks = rule.layers_in_play(model_map)
        self._passes: dict[str, _LayerPass] = {}  # of layers that run
        self._projections: dict[str, tuple[Projection, int]] = {}  # and how many heads or channels go

    def attach(self, stack: ExitStack) -> None:
        """Watch and change the layers in play until `stack` closes."""
        intercept_attention(self.model_map, self._attend, stack)
        modules = layers_with_attention(self.model_map)[self.rule.skip_first :]
        for layer, module in zip(self._layers, modules, strict=True):
            for handle in (
                module.register_forward_pre_hook(partial(self._begin, layer), with_kwargs=True),
                layer.module.register_forward_hook(partial(self._add, layer)),
                module.register_forward_hook(partial(self._end, layer)),
            ):
                stack.callback(handle.remove)
        for block in self._blocks:
            change_input(block.down, partial(self._without_channels, block), stack)

    # ------------------------------------------------------------------ hooks

    def _begin(self, layer: AttentionLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        residual = (args[0] if args else kwargs["hidden_states"]).detach()
        cache: Any = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        choices = {} if cache is None else vars(cache).setdefault(_CACHE_KEY, {}).setdefault(layer.label, {})
        if cache is not None and cache.get_seq_length(layer.index):
            if not choices:
                raise InputError("probe pruning cannot go on with a cache that was filled without it; begin a new one")
        else:
            choices.clear()
        self._passes[layer.label] = _LayerPass(residual, choices)

    def _add(self, layer: AttentionLayer, _: nn.Module, __: Any, output: Any) -> None:
        attended = output[0] if isinstance(output, tuple) else output
        self._passes[layer.label].residual = self._passes[layer.label].residual + attended.detach()

    def _end(self, layer: AttentionLayer, *_: Any) -> None:
        del self._passes[layer.label]

    def _attend(self, call: AttentionCall, attend: Attend) -> Attended:
        """Compute attention without the heads that are left out."""
        layer = self._passes.get(call.layer.label)
        if layer is None:  # not in play
            return attend(call)
        out, weights = attend(call)
        if "o_proj" not in layer.choices:
            layer.real = valid_tokens(call)
            if call.layer is self._layers[0]:
                self._begin_batch(len(layer.real))
            layer.choices["o_proj"] = self._choose("o_proj", call.layer, _probe_of(call, attend), out.flatten(2))
        heads = layer.choices["o_proj"][:, :: call.layer.head_dim][:, None, :, None]  # a head's columns go together
        return out.masked_fill(heads, 0), weights

    def _without_channels(self, block: FeedForward, x: Tensor) -> Tensor:
        """Return what the down projection reads without the channels that are left out."""
        layer = self._passes[block.label]
        if "down" not in layer.choices:
            assert layer.real is not None
            whole = x.detach().reshape(*layer.real.shape, -1)
            layer.choices["down"] = self._choose(
                "down", block, lambda texts, positions: whole[texts[:, None], positions], whole
            )
        drop = layer.choices["down"]
        return x.reshape(len(drop), -1, x.shape[-1]).masked_fill(drop[:, None], 0).reshape(x.shape)

    # ------------------------------------------------------------------ choosing

    def _begin_batch(self, texts: int) -> None:
        """Count a batch, and settle how many heads and channels each layer in play leaves out."""
        self.batches[texts] += 1
        self.left_out["all heads"] += texts * self.model_map.total_heads
        self.left_out["all channels"] += texts * sum(self.model_map.channels().values())
        applied = interventions_on(self.model_map.attention[0].module)
        plans = [plan for each in applied if isinstance(plan := each.converted(Plan), Plan)]
        for part, blocks in (("o_proj", self._layers), ("down", self._blocks)):
            projections = [Projection(block, self._weights(part, block, plans)) for block in blocks]
            counts = shares([len(projection.units) for projection in projections], self.rule.ratio)
            for projection, count in zip(projections, counts, strict=True):
                self._projections[f"{projection.block.label}.{part}"] = projection, count

    def _weights(self, part: str, block: AttentionLayer | FeedForward, plans: Sequence[Plan]) -> Tensor:
        module: Any = getattr(block, part)
        weight = module.weight.detach().T if is_transposed(module) else module.weight.detach()
        for plan in plans:
            weight = plan.compensation.get(f"{block.label}.{part}.weight", weight).to(weight.device)
        weights = weight.double().pow(4).sum(0)
        for plan in plans:
            for cut, numbers in (
                *plan.heads_by_layer(self.model_map),
                *plan.channels_by_layer(self.model_map),
            ):
                if cut is block:
                    weights = weights.masked_fill(dropped_columns(block, numbers).to(weights.device), 0)
        return weights

    def _choose(self, part: str, block: AttentionLayer | FeedForward, probe: Probe, whole: Tensor) -> Tensor:
        """Return which columns each text leaves out, (texts, columns).

        Args:
            part, block: whose columns.
            probe: what some texts give at some positions, if there were no others.
            whole: what all give, (texts, tokens, columns).
        """
        layer, name = self._passes[block.label], f"{block.label}.{part}"
        assert layer.real is not None
        projection, count = self._projections[name]
        self.left_out[projection.kind] += count * len(layer.real)
        tie = torch.finfo(layer.residual.dtype).eps ** 0.75  # well above what batches of other shapes change
        norms = layer.residual.reshape(*layer.real.shape, -1).double().norm(dim=-1).masked_fill(~layer.real, 0)
        if self.rule.state == "run":
            scores, remember = self._scores_of_batch(name, probe, whole, layer.real, norms, tie)
            drop = projection.lowest(scores, count, tie)
            remember(drop)
            return drop.expand(len(layer.real), -1)
        drops = []
        for text, real in enumerate(layer.real):
            first = int(real.int().argmax())
            positions = first + self._positions(norms[text, first:], int(real.sum()), tie)
            probed = probe(torch.tensor([text], device=positions.device), positions[None])[0]
            drops.append(projection.lowest(probed.detach().double().square().sum(0), count, tie))
        return torch.stack(drops)

    def _scores_of_batch(
        self, name: str, probe: Probe, whole: Tensor, real: Tensor, norms: Tensor, tie: float
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return scores of columns for a batch as a whole, and what takes it into the history, given what goes."""
        order = real.int().argsort(dim=1, descending=True, stable=True)  # each text's own tokens, then its padding
        real, norms = real.gather(1, order), norms.gather(1, order)
        whole = whole.gather(1, order[..., None].expand(whole.shape))
        positions = self._positions(norms.norm(dim=0), int(real.any(0).sum()), tie)
        texts = extreme(norms[:, positions].norm(dim=1), math.ceil(self.rule.samples * len(real)), True, tie)
        probed = _mean_squares(probe(texts, order[texts][:, positions]), real[texts][:, positions])
        known = self.history.get(name, probed.new_full((0, whole.shape[-1]), torch.nan))
        missing = known.new_full((max(0, real.shape[1] - len(known)), whole.shape[-1]), torch.nan)
        known = torch.cat([known, missing])
        # each weighted by itself: (p² + h²) / (p + h)
        both = probed + known[positions]
        fused = torch.where(both > 0, (probed.square() + known[positions].square()) / both, 0.0)
        scores = torch.where(known[positions].isnan(), probed, fused).sum(0)

        def remember(drop: Tensor) -> None:
            squares, stay = _mean_squares(whole, real), self.rule.smoothing
            old = known[: len(squares)]
            new = torch.where(old.isnan(), squares, stay * old + (1 - stay) * squares)
            read = real.any(0)[:, None] & ~drop
            self.history[name] = torch.cat([torch.where(read, new, old), known[len(squares) :]])

        return scores, remember

    def _positions(self, norms: Tensor, count: int, tie: float) -> Tensor:
        """Return the positions of the largest of `count` tokens, in order; the first token is among a few."""
        number = min(max(math.ceil(self.rule.positions * count), 2), max(count, 1))
        positions = extreme(norms, number, True, tie)
        if number <= SMALL_PROBE:
            positions[0] = 0
        return positions


def _probe_of(call: AttentionCall, attend: Attend) -> Probe:
    """Return the attention of some tokens of some texts alone."""

    def probe(texts: Tensor, positions: Tensor) -> Tensor:
        rows, mask = texts[:, None], call.mask
        if mask is not None:
            mask = mask.expand(len(call.query), -1, -1, -1)
            mask = mask[rows[..., None], :, positions[..., None], positions[:, None]].permute(0, 3, 1, 2)
        parts = {name: getattr(call, name)[rows, :, positions].transpose(1, 2) for name in ("query", "key", "value")}
        return attend(replace(call, **parts, mask=mask))[0].flatten(2)

    return probe


def _mean_squares(x: Tensor, real: Tensor) -> Tensor:
    """Return the mean square of each column over the texts that have a token there.

    Args:
        x: (texts, positions, columns).
        real: (texts, positions).
    """
    squares = torch.where(real[..., None], x.detach().double(), 0.0).square().sum(0)
    return squares / real.sum(0).clamp(min=1)[:, None]


def shares(sizes: Sequence[int], ratio: float) -> list[int]:
    """Return how many of each layer's units go: a share of all. One stays in each layer.

    What rounding leaves goes to the next layer, and what the last layers cannot give is taken from those before.
    """
    counts = [0] * len(sizes)
    for layer, size in enumerate(sizes):
        counts[layer] = max(0, min(_whole(ratio * sum(sizes[: layer + 1])) - sum(counts), size - 1))
    for layer in reversed(range(len(sizes))):
        counts[layer] += max(0, min(_whole(ratio * sum(sizes)) - sum(counts), sizes[layer] - 1 - counts[layer]))
    return counts


def extreme(values: Tensor, count: int, largest: bool, tie: float) -> Tensor:
    """Return the positions of the largest or smallest values, in order.

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
