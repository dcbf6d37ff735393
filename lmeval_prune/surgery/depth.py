"""Find out, by a short forward pass, how a model computes without some of its blocks, and which modules can then go.

The pass runs under the plan, so that removed blocks add nothing to the residual stream. Modules of a removed block, and
norms that then have no effect, are replaced by `Absent` modules that return what these returned: zeros or an input. A
layer that returns its input can go as a whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lmeval_prune.architectures import ModelMap, cache_argument, input_device
from lmeval_prune.architectures.blocks import AttentionLayer, FeedForward, Sublayer, find_in, is_absent
from lmeval_prune.architectures.precision import exact_products
from lmeval_prune.errors import first_line

Outputs = list[Any]  # arguments of `Absent`: sources of outputs, and whether they are a tuple
TOKENS = 6  # of the pass
_COMPUTES, _PASSES, _IS_ZERO = "computes", "passes", "zero"  # what a module of a removed block does


@dataclass(frozen=True)
class Depth:
    """Modules that a cut model lacks.

    Attributes:
        absent: arguments of `Absent` by module name.
        layers: the same of layers that return their input, by name.
        removed: names of the removed blocks, as in a plan.
        outputs: the model's under the plan, (1, tokens, …): of one pass, and of two with a cache if it decodes; empty
            if no block is removed.
    """

    absent: Mapping[str, Outputs] = field(default_factory=dict)
    layers: Mapping[str, Outputs] = field(default_factory=dict)
    removed: Sequence[str] = ()
    outputs: Sequence[Tensor] = ()


def depth_of(model_map: ModelMap, plan: Any, removed: Sequence[Sublayer]) -> Depth:
    """Run a model under a plan and return the modules that it does not need.

    Args:
        model_map: map of a model with weights.
        plan: applied to the model during the pass.
        removed: the blocks that the plan removes, or empties.
    """
    names = {module: name for name, module in model_map.model.named_modules()}
    earlier = {
        name: [[None if source is None else list(source) for source in module.outputs], module.is_tuple]
        for module, name in names.items()
        if is_absent(module)
    }
    if not removed:
        return Depth(earlier)
    affected = list(dict.fromkeys(sublayer.layer for sublayer in removed))
    staying = [sublayer for sublayer in model_map.sublayers if sublayer not in removed]
    norms = [module for layer in affected for module in _norms(model_map.model.get_submodule(layer), staying)]
    parts = {module: role for sublayer in removed for module, role in _modules_of(sublayer)}
    traced = [*parts, *norms, *(model_map.model.get_submodule(layer) for layer in affected)]
    calls, logits, dead = _trace(model_map, plan, traced, norms)
    layers, absent = {}, dict(earlier)
    for layer in affected:
        call = calls[model_map.model.get_submodule(layer)]
        if not any(sublayer.layer == layer for sublayer in staying) and call.returns_input and call.outputs:
            layers[layer] = call.outputs
    for module, role in (parts | dict.fromkeys(dead, _PASSES)).items():
        call, name = calls[module], names[module]
        outputs = call.outputs if role == _COMPUTES else call.first_argument(is_zero=role == _IS_ZERO)
        absent[name] = outputs or []
    absent = {name: arguments for name, arguments in absent.items() if not is_inside(name, [*layers, *absent])}
    with torch.no_grad(), exact_products(), plan.applied_to(model_map.model, model_map):
        decoded = _decoded(model_map.model)  # of some state spaces, not what one pass computes
    return Depth(absent, layers, [*map(str, removed)], [logits, *decoded])


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a module or tensor is in one of these modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def _modules_of(sublayer: Sublayer) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules of a removed block, and what takes their place.

    Either what the module returns without the output projection, or its input, or zeros of that shape.
    """
    block = sublayer.block
    if isinstance(block, AttentionLayer):
        match = find_in(block.module, block.family.query)
        path = match[0].rpartition(".")[0] if match else ""
        core = block.module.get_submodule(path)
        is_inside = any(module is sublayer.output for module in core.modules())
        yield core, _COMPUTES if is_inside else _PASSES
        if not is_inside:
            yield sublayer.output, _IS_ZERO
    elif isinstance(block, FeedForward) and block.name == sublayer.layer:  # the projections are the layer's own
        yield from ((module, _PASSES) for module in dict.fromkeys(block.parts.values()))
        yield block.down, _IS_ZERO
    else:
        yield sublayer.module, _COMPUTES


def _norms(layer: nn.Module, staying: Sequence[Sublayer]) -> list[nn.Module]:
    """Return modules of a layer with vectors as parameters, outside of the blocks that stay."""
    inside = {part for sublayer in staying if sublayer.module is not layer for part in sublayer.module.modules()}
    modules = [module for module in layer.modules() if module not in inside and not any(module.children())]
    return [module for module in modules if {parameter.dim() for parameter in module.parameters()} == {1}]


_Arguments = Sequence[tuple[str, int, Any]]  # name, position and value of each argument


@dataclass(frozen=True)
class _Call:
    """What a module returned in the pass; computed at once, because models change tensors in place."""

    outputs: Outputs | None  # arguments of an `Absent` that returns the same; None if there is none
    returns_input: bool  # the first output is one of the arguments, unchanged
    first: tuple[str, int]  # name and position of the first argument
    count: int  # number of outputs
    is_tuple: bool

    @classmethod
    def of(cls, arguments: _Arguments, output: Any) -> _Call:
        """Compare the outputs with the arguments."""
        is_tuple = isinstance(output, tuple)
        first, *others = output if is_tuple else (output,)
        argument = _source(arguments, first)
        source = argument or _zeros_like(arguments, first)
        outputs = [[source, *(_source(arguments, other, is_same=True) for other in others)], is_tuple]
        return cls(outputs if source else None, argument is not None, arguments[0][:2], 1 + len(others), is_tuple)

    def first_argument(self, is_zero: bool) -> Outputs:
        """Return the arguments of an `Absent` that returns its first argument, or zeros like it."""
        return [[[*self.first, is_zero], *[None] * (self.count - 1)], self.is_tuple]


def _source(arguments: _Arguments, value: Any, is_same: bool = False) -> list[Any] | None:
    for name, position, argument in arguments:
        if not isinstance(argument, Tensor) or not isinstance(value, Tensor):
            continue
        if argument is value or (not is_same and argument.shape == value.shape and torch.equal(argument, value)):
            return [name, position, False]
    return None


def _zeros_like(arguments: _Arguments, value: Tensor) -> list[Any] | None:
    """Return the first argument that has the shape of a value of zeros."""
    for name, position, argument in () if value.any() else arguments:
        if isinstance(argument, Tensor) and (argument.shape, argument.dtype) == (value.shape, value.dtype):
            return [name, position, True]
    return None


def _trace(
    model_map: ModelMap, plan: Any, modules: Sequence[nn.Module], norms: Sequence[nn.Module]
) -> tuple[dict[nn.Module, _Call], Tensor, list[nn.Module]]:
    """Run the model; return the calls of modules, the output, and the norms without an effect on it."""
    calls: dict[nn.Module, _Call] = {}

    def record(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        parameters = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        arguments = [(name, n, value) for n, (name, value) in enumerate(zip(parameters, inputs, strict=False))]
        positions = {name: position for position, name in enumerate(parameters)}
        arguments += [(name, positions.get(name, len(parameters)), value) for name, value in named.items()]
        calls[module] = _Call.of(arguments, output)

    weights = {parameter: parameter.requires_grad for norm in norms for parameter in norm.parameters()}
    with ExitStack() as stack, torch.enable_grad(), exact_products():
        stack.enter_context(plan.applied_to(model_map.model, model_map))
        for module in dict.fromkeys(modules):
            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        for parameter, before in weights.items():
            stack.callback(parameter.requires_grad_, before)
            parameter.requires_grad_(True)
        logits = run(model_map.model)
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if weights and logits.requires_grad:
            factors = torch.linspace(0.5, 1.5, logits.numel(), dtype=logits.dtype, device=logits.device)
            target = (logits * factors.view_as(logits)).sum()
            gradients = torch.autograd.grad(target, list(weights), allow_unused=True)
    effects = {
        weight: gradient is not None and bool(gradient.any())
        for weight, gradient in zip(weights, gradients, strict=True)
    }
    called = [norm for norm in norms if norm in calls]
    dead = [norm for norm in called if not any(effects[parameter] for parameter in norm.parameters())]
    return calls, logits.detach(), dead


def _ids(model: Any) -> Tensor:
    device, size = input_device(model), model.config.get_text_config().vocab_size
    return torch.tensor([[7 * n % size for n in range(3, 3 + TOKENS)]], device=device)


def run(model: Any) -> Tensor:
    """Return the output of a model for a few tokens: logits, or hidden states of a model without a head."""
    ids = _ids(model)
    inputs = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.flip(1)
    output: Tensor = model(**inputs, use_cache=False)[0]
    return output


def why_different(model: Any, depth: Depth) -> str:
    """Return how a cut model differs from the plan; empty if it does not, or if no block is removed."""
    if not depth.outputs:
        return ""
    logits = depth.outputs[0]
    tolerance = (0.05 if logits.dtype.itemsize < 4 else 1e-3) * float(logits.abs().max())
    try:
        with torch.no_grad(), exact_products():
            outputs = [run(model), *_decoded(model)]
    except Exception as error:  # model classes raise errors of any type
        return f"does not run ({first_line(error)})"
    differences = [(output - expected).abs().max() for output, expected in zip(outputs, depth.outputs, strict=True)]
    difference = float(torch.stack(differences).max())  # NaN if one is
    return "" if difference <= tolerance else f"computes something else than the plan (difference {difference:.2g})"


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
