"""Compute what stays in a cut model: heads, channels and blocks, and their rows and columns in the projections.

Which modules can go with a block is found out by a short forward pass under the plan, in which removed blocks add
nothing to the residual stream. Modules of a removed block, and norms that then have no effect, are replaced by `Absent`
modules that return what these returned: zeros or an input. A layer that returns its input can go as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import AttentionLayer, FeedForward, ModelMap, cache_argument, input_device
from lmeval_prune.architectures.blocks import ATTENTION, Sublayer, columns_of, find_in, in_features, is_absent
from lmeval_prune.architectures.precision import exact_products
from lmeval_prune.errors import InputError, first_line
from lmeval_prune.interventions.plan import Plan, find_projection

Outputs = list[Any]  # arguments of `Absent`: sources of outputs, and whether they are a tuple
TOKENS = 6  # of the pass


@dataclass(frozen=True)
class KeptHeads:
    """Heads of one layer that stay, by their original numbers; every key-value head keeps the same number of them."""

    layer: AttentionLayer  # the original layer
    heads: tuple[int, ...]  # query heads, grouped by key-value head
    kv_heads: tuple[int, ...]
    fillers: tuple[int, ...]  # pruned heads that stay with zero weights, so that groups are equal or shapes stay

    @classmethod
    def of(cls, layer: AttentionLayer, pruned: Collection[int], keep_shapes: bool = False) -> KeptHeads:
        """Remove query heads: drop empty groups, and give the others as many heads as the largest has, with fillers."""
        if keep_shapes:
            return cls(layer, (*range(layer.heads),), (*range(layer.kv_heads),), (*sorted(pruned),))
        size = layer.group_size
        groups = {g: range(g * size, (g + 1) * size) for g in range(layer.kv_heads)}
        remaining = {g: [head for head in heads if head not in pruned] for g, heads in groups.items()}
        remaining = {g: heads for g, heads in remaining.items() if heads} or {0: []}  # an empty layer: one filler
        largest = max(1, *map(len, remaining.values()))
        fillers: list[int] = []
        for g, heads in remaining.items():
            fillers += [head for head in groups[g] if head not in heads][: largest - len(heads)]
        staying = sorted([*fillers, *(head for heads in remaining.values() for head in heads)])
        return cls(layer, tuple(staying), tuple(remaining), tuple(fillers))

    @property
    def unchanged(self) -> bool:
        return len(self.heads) == self.layer.heads


@dataclass(frozen=True)
class Kept:
    """Heads, channels and blocks of a model that stay, and the modules that go."""

    model_map: ModelMap  # the original model
    heads: Sequence[KeptHeads]  # of each attention block that stays
    channels: dict[str, list[int]]  # of each dense feed-forward block that stays, by layer label
    zeroed: dict[str, set[int]]  # pruned channels that stay with zero weights
    zeroed_outputs: Sequence[nn.Module]  # output projections whose weights become zero
    removed: Sequence[str]  # names of the removed blocks, as in a plan
    absent: Mapping[str, Outputs]  # arguments of `Absent` by module name
    layers: Mapping[str, Outputs]  # the same of layers that return their input, by name
    # The model's outputs under the plan, (1, tokens, …): of one pass, and of two with a cache if it decodes. Empty if
    # no block is removed.
    outputs: Sequence[Tensor]

    @classmethod
    def of(cls, model_map: ModelMap, plan: Plan, keep_shapes: bool = False) -> Kept:
        """Remove what a plan removes, and blocks that lose all and have no bias; with `keep_shapes`, zero weights."""
        by_block = (*plan.heads_by_layer(model_map), *plan.channels_by_layer(model_map))
        pruned: dict[Any, set[int]] = {block: set(numbers) for block, numbers in by_block}
        biased = {find_projection(name, model_map) for name in plan.compensation if name.endswith(".bias")}
        removed, zeroed_outputs = list(plan.sublayers(model_map)), list[nn.Module]()
        if keep_shapes:
            if whole := [str(sublayer) for sublayer in removed if sublayer.block is None]:
                raise InputError(f"{whole[0]} has experts, whose weights cannot be zeroed; cut it out instead")
            removed, zeroed_outputs = [], [sublayer.output for sublayer in removed]
        emptied: list[Sublayer] = []  # blocks that add nothing, because their output projection has no bias
        for sublayer in () if keep_shapes else model_map.sublayers:
            block, output = sublayer.block, sublayer.output
            is_empty = block and len(columns_of(block, pruned.get(block, ()))) == in_features(output)
            if is_empty and getattr(output, "bias", None) is None and output not in biased:
                emptied.append(sublayer)
        gone_or_empty = [*removed, *emptied]
        for sublayer in emptied:  # a stack keeps its last attention block, with a head without an effect
            alike = [x for x in model_map.sublayers if (x.stack, x.kind) == (sublayer.stack, sublayer.kind)]
            if sublayer.kind != ATTENTION or any(other not in gone_or_empty for other in alike):
                removed.append(sublayer)
        gone = {sublayer.output for sublayer in removed}
        left = [layer for layer in model_map.attention if layer.o_proj not in gone]
        heads = [KeptHeads.of(layer, pruned.get(layer, ()), keep_shapes) for layer in left]
        channels, zeroed = dict[str, list[int]](), dict[str, set[int]]()
        for dense in (block for block in model_map.feed_forward if block.down not in gone):
            lost = pruned.get(dense, set())
            staying = [channel for channel in range(dense.channels) if keep_shapes or channel not in lost] or [0]
            channels[dense.label], zeroed[dense.label] = staying, lost & {*staying}
        traced, names = _trace(model_map, plan, removed), [*map(str, removed)]
        return cls(model_map, heads, channels, zeroed, zeroed_outputs, names, *traced)

    def layers_differ(self) -> bool:
        """Return whether layers keep different numbers of heads, or in one stack different channels, or lack blocks."""
        blocks = [block for block in self.model_map.feed_forward if block.label in self.channels]
        widths = {(block.stack, len(self.channels[block.label])) for block in blocks}
        counts = {(len(layer.heads), len(layer.kv_heads)) for layer in self.heads}
        return bool(self.absent) or len(counts) > 1 or len(widths) > len({block.stack for block in blocks})

    def why_different(self, model: Any) -> str:
        """Return how a cut model computes something else than the plan; empty if not, or if no block is removed."""
        if not self.outputs:
            return ""
        logits = self.outputs[0]
        tolerance = (0.05 if logits.dtype.itemsize < 4 else 1e-3) * float(logits.abs().max())
        try:
            with torch.no_grad(), exact_products():
                outputs = [_run(model), *_decoded(model)]
        except Exception as error:  # model classes raise errors of any type
            return f"does not run ({first_line(error)})"
        differences = [(output - expected).abs().max() for output, expected in zip(outputs, self.outputs, strict=True)]
        difference = float(torch.stack(differences).max())  # NaN if one is
        return "" if difference <= tolerance else f"computes something else than the plan (difference {difference:.2g})"


def is_inside(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


# --------------------------------------------------------------------------- modules that go with a block


def _trace(
    model_map: ModelMap, plan: Plan, removed: Sequence[Sublayer]
) -> tuple[Mapping[str, Outputs], Mapping[str, Outputs], Sequence[Tensor]]:
    """Run a model under a plan; return `absent`, `layers` and `outputs` of its `Kept` without the removed blocks."""
    model = model_map.model
    absent = {name: [x.outputs, x.is_tuple] for name, x in model.named_modules() if is_absent(x)}  # cut out earlier
    if not removed:
        return absent, {}, ()
    layers = {name: model.get_submodule(name) for name in dict.fromkeys(sublayer.layer for sublayer in removed)}
    staying = [sublayer for sublayer in model_map.sublayers if sublayer not in removed]
    roles = {module: role for sublayer in removed for module, role in _modules_of(sublayer)}
    norms = [module for layer in layers.values() for module in _norms(layer, staying)]
    # Arguments of `Absent` modules that return what a module returned (`computes`, None if that is neither an argument
    # nor zeros like one), its first argument, or zeros; computed at once, because models change tensors in place.
    calls: dict[nn.Module, dict[str, Outputs | None]] = {}
    pass_on: set[nn.Module] = set()  # the first output is one of the arguments, unchanged

    def record(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        parameters = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        arguments = [(name, n, value) for n, (name, value) in enumerate(zip(parameters, inputs, strict=False))]
        positions = {name: position for position, name in enumerate(parameters)}
        arguments += [(name, positions.get(name, len(parameters)), value) for name, value in named.items()]
        tensors = [argument for argument in arguments if isinstance(argument[2], Tensor)]

        def source(value: Any, is_same: bool = True) -> list[Any] | None:
            for name, position, argument in tensors if isinstance(value, Tensor) else ():
                has_shape = not is_same and argument.shape == value.shape
                if argument is value or (has_shape and torch.equal(argument, value)):
                    return [name, position, False]
            return None

        is_tuple = isinstance(output, tuple)
        first, *others = output if is_tuple else (output,)
        computed = argument = source(first, is_same=False)
        if argument is None and not first.any():
            alike = [x for x in tensors if (x[2].shape, x[2].dtype) == (first.shape, first.dtype)]
            computed = [*alike[0][:2], True] if alike else None
        rest = [None] * len(others)
        passes, zeros = ([[[*arguments[0][:2], is_zero], *rest], is_tuple] for is_zero in (False, True))
        computes = [[computed, *map(source, others)], is_tuple] if computed else None
        calls[module] = {"computes": computes, "passes": passes, "zeros": zeros}
        (pass_on.discard if argument is None else pass_on.add)(module)

    weights = {parameter: parameter.requires_grad for norm in norms for parameter in norm.parameters()}
    with ExitStack() as stack, torch.enable_grad(), exact_products():
        stack.enter_context(plan.applied_to(model, model_map))
        for module in dict.fromkeys([*roles, *norms, *layers.values()]):
            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        for parameter, before in weights.items():
            stack.callback(parameter.requires_grad_, before)
            parameter.requires_grad_(True)
        logits = _run(model)
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if weights and logits.requires_grad:
            factors = torch.linspace(0.5, 1.5, logits.numel(), dtype=logits.dtype, device=logits.device)
            target = (logits * factors.view_as(logits)).sum()
            gradients = torch.autograd.grad(target, list(weights), allow_unused=True)
    pairs = zip(weights, gradients, strict=True)
    effective = {weight for weight, gradient in pairs if gradient is not None and gradient.any()}
    dead = [norm for norm in norms if norm in calls and effective.isdisjoint(norm.parameters())]
    gone: dict[str, Outputs] = {}
    for name, module in layers.items():
        is_left = any(sublayer.layer == name for sublayer in staying)
        if not is_left and module in pass_on and (computes := calls[module]["computes"]):
            gone[name] = computes
    names = {module: name for name, module in model.named_modules()}
    absent |= {names[x]: calls[x][role] or [] for x, role in (roles | dict.fromkeys(dead, "passes")).items()}
    absent = {name: arguments for name, arguments in absent.items() if not is_inside(name, [*gone, *absent])}
    with torch.no_grad(), exact_products(), plan.applied_to(model, model_map):
        decoded = _decoded(model)  # of some state spaces, not what one pass computes
    return absent, gone, [logits.detach(), *decoded]


def _modules_of(sublayer: Sublayer) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of a removed block, and what takes their place: `computes`, `passes` or `zeros`."""
    block = sublayer.block
    if isinstance(block, AttentionLayer):
        match = find_in(block.module, block.family.query)
        core = block.module.get_submodule(match[0].rpartition(".")[0] if match else "")
        has_output = any(module is sublayer.output for module in core.modules())
        yield core, "computes" if has_output else "passes"
        if not has_output:
            yield sublayer.output, "zeros"
    elif isinstance(block, FeedForward) and block.name == sublayer.layer:  # the projections are the layer's own
        yield from ((module, "passes") for module in dict.fromkeys(block.parts.values()))
        yield block.down, "zeros"
    else:
        yield sublayer.module, "computes"


def _norms(layer: nn.Module, staying: Sequence[Sublayer]) -> list[nn.Module]:
    """Return modules of a layer with vectors as parameters, outside of the blocks that stay."""
    inside = {part for sublayer in staying if sublayer.module is not layer for part in sublayer.module.modules()}
    modules = [module for module in layer.modules() if module not in inside and not any(module.children())]
    return [module for module in modules if {parameter.dim() for parameter in module.parameters()} == {1}]


def _ids(model: Any) -> Tensor:
    device, size = input_device(model), model.config.get_text_config().vocab_size
    return torch.tensor([[7 * n % size for n in range(3, 3 + TOKENS)]], device=device)


def _run(model: Any) -> Tensor:
    """Return the output of a model for a few tokens: logits, or hidden states of a model without a head."""
    ids = _ids(model)
    inputs = {"decoder_input_ids": ids.flip(1)} if getattr(model.config, "is_encoder_decoder", False) else {}
    output: Tensor = model(input_ids=ids, **inputs, use_cache=False)[0]
    return output


def _decoded(model: Any) -> list[Tensor]:
    """Return the output of two passes with a cache between them; nothing of models that do not decode."""
    if not getattr(model, "can_generate", bool)():
        return []
    ids = _ids(model)
    if getattr(model.config, "is_encoder_decoder", False):  # the cache may not fit the number of layers
        model.generate(ids, max_new_tokens=2, do_sample=False)
        return []
    first = model(ids[:, :-2], use_cache=True)
    second = model(ids[:, -2:], use_cache=True, **cache_argument(first))
    return [torch.cat([first.logits, second.logits], 1)]
