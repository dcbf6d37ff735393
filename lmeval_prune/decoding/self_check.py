"""The check whether the engine can run a model: it compares logits with the model's own on every code path."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lmeval_prune.architectures import FAMILIES, ModelMap, input_device, position_limit
from lmeval_prune.architectures.precision import exact_products
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.likelihood import LikelihoodRequest, LikelihoodRun
from lmeval_prune.decoding.memory import available_memory
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner, refuse_locked
from lmeval_prune.decoding.prefixes import SharedPrefix
from lmeval_prune.errors import first_line
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.attention_call import REASONS, UnsupportedAttention

logger = logging.getLogger(__name__)
HALF = (torch.float16, torch.bfloat16)
MAX_CHECKED_WINDOW = 1024  # largest sliding window that the check of a family without tests goes beyond


class LogitsDiffer(UnsupportedAttention):
    """The engine's logits are not the model's own."""


def why_unsupported(model_map: ModelMap) -> str | None:
    """Return why a model with its interventions falls back to `generate`; None if the engine runs it."""
    logger.info(
        "checking that the engine gives the model's logits; the first time on a machine this compiles its attention, "
        "up to half a minute"
    )
    return _failure(_check, model_map)


def why_unscored(model_map: ModelMap) -> str | None:
    """Return why log-probabilities of texts that share tokens would be wrong; None if they are right."""
    return _failure(_check_likelihoods, model_map)


def _failure(check: Callable[[ModelMap], None], model_map: ModelMap) -> str | None:
    refuse_locked(model_map.model)
    try:
        with exact_products():
            try:
                check(model_map)
            except LogitsDiffer as difference:
                if not _is_half(model_map.model):
                    raise
                _check_in_float32(check, model_map, difference)
    except torch.OutOfMemoryError:
        raise
    except UnsupportedAttention as error:
        return str(error)
    except Exception as error:  # any error of a model that works otherwise
        return REASONS["error"].format(error=first_line(error))
    return None


def _check_in_float32(check: Callable[[ModelMap], None], model_map: ModelMap, difference: LogitsDiffer) -> None:
    """Check a model again with float32 weights; raise `difference` if these differ, too, or need too much memory."""
    model = model_map.model
    size = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.dtype in HALF)
    if size > available_memory(input_device(model)):  # on a CPU, the system would end the process
        logger.info("the engine is not checked again in float32: the weights would take %.1f GB more", size / 1e9)
        raise difference
    logger.info("checking the engine again in float32: in half precision roundings alone may move the logits as much")
    try:
        with _float32_weights(model):
            check(model_map)
    except Exception as error:  # also too little memory for the checks
        raise difference from error


def is_tested(model_map: ModelMap) -> bool:
    """Return whether a model is of a family for which tests compare the engine with `generate`."""
    is_stock = type(model_map.model).__module__.split(".")[0] in ("transformers", "lmeval_prune")
    return is_stock and model_map.model_type in FAMILIES


def sliding_window(model_map: ModelMap) -> int:
    """Return the size of the sliding window in a model's configuration; 0 if it has none."""
    config: Any = model_map.model.config
    return int(getattr(config.get_text_config(), "sliding_window", None) or 0)


def _check_length(model_map: ModelMap) -> int:
    """Return the number of tokens that are compared: of a family without tests, more than its window if it is small."""
    if is_tested(model_map):
        return 12
    window = sliding_window(model_map)
    length = max(64, window + 8) if window <= MAX_CHECKED_WINDOW else 64
    return min(length, position_limit(model_map.model) or length)


def _check(model_map: ModelMap) -> None:
    """Refuse a model with other logits, or with features that the comparison cannot detect."""
    model: Any = model_map.model
    _check_interventions(model)
    _check_config(model)
    n = _check_length(model_map)
    tokens = _tokens(model, n)
    (layer,) = middle = frozenset({len(model_map.attention) // 2})
    with _fixed_decisions(model):
        expected = _logits(model, tokens)
        cache = KVCache(2, n)
        with ModelRunner.attached(model_map, cache, [None]) as runner:
            run = partial(_run_span, runner, tokens, expected)
            # a token filter skips one token of the first pass, and the only token of the third
            try:
                difference, layer_inputs = run(0, n - 4, keep=middle)
            except (UnsupportedAttention, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if cache.keys or getattr(model, "_supports_attention_backend", True):
                    raise
                raise UnsupportedAttention("interface") from error
            if not cache.keys:
                raise UnsupportedAttention("interface")
            differences = [difference, *(run(*span)[0] for span in ((n - 4, n - 2, 1), (n - 2, n - 1), (n - 1, n)))]
            hidden = torch.cat([inputs[layer] for inputs in layer_inputs])
            differences.append(run(0, n - 4, 5, first_layer=layer, hidden=hidden)[0])
            if all(intervention.tokenwise for intervention in interventions_on(model)):
                prefix = SharedPrefix(tuple(tokens[:4]), {0: runner.layers}, unanswered=1, is_copied=False)
                cache.prefixes[:] = [prefix.for_mask(0, runner)] * 2
                differences += [run(*span, prefix=4)[0] for span in ((4, n - 4), (n - 4, n - 3))]
    _compare(model, differences, [expected])


@contextmanager
def _fixed_decisions(model: nn.Module) -> Iterator[None]:
    """Fix the decisions of all interventions on a model, and record no gradients, inside the block."""
    with torch.inference_mode(), ExitStack() as stack:
        for intervention in interventions_on(model):
            stack.enter_context(intervention.fixed_decisions())
        yield


def _tokens(model: Any, count: int) -> list[int]:
    return [7 * i % model.config.get_text_config().vocab_size for i in range(count)]


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens], device=input_device(model))
    logits: torch.Tensor = model(ids, use_cache=False).logits[0]
    return logits.float()


def _run_span(
    runner: ModelRunner,
    tokens: list[int],
    expected: torch.Tensor,
    start: int,
    stop: int,
    skip: int = 0,
    prefix: int = 0,
    first_layer: int = 0,
    hidden: torch.Tensor | None = None,
    keep: frozenset[int] = frozenset(),
) -> tuple[float, list[dict[int, torch.Tensor]]]:
    """Run a span of tokens in two slots; return the largest difference of logits, and the inputs of `keep` layers.

    The slots' first `prefix` tokens are a prefix; arguments are those of `Chunk` and `ModelRunner.forward`.
    """
    batch = [Chunk(slot, start - prefix, 0, tokens[start:stop], skip, keep) for slot in (0, 1)]
    logits, layer_inputs = runner.forward(batch, first_layer, hidden)
    return float((logits.unflatten(0, (2, -1)).float() - expected[start + skip : stop]).abs().max()), layer_inputs


def _compare(model: Any, differences: list[float], expected: list[torch.Tensor]) -> None:
    """Refuse differences of logits above a share of the largest expected logit."""
    tolerance = 0.05 if _is_half(model) else 1e-3
    largest = max(float(logits.abs().max()) for logits in expected)
    if not all(value <= tolerance * largest for value in differences):  # false for NaN, too
        raise LogitsDiffer("logits", difference=max(differences))


def _is_half(model: Any) -> bool:
    return bool(next(model.parameters()).element_size() < 4)


@contextmanager
def _float32_weights(model: nn.Module) -> Iterator[None]:
    """Widen weights in half precision to float32, which is exact, and give them back; `yield` runs in between."""
    narrow = {parameter: parameter.data for parameter in model.parameters() if parameter.dtype in HALF}
    try:
        for parameter, data in narrow.items():
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in narrow.items():
            parameter.data = data


def _check_likelihoods(model_map: ModelMap) -> None:
    """Refuse a model with other log-probabilities in several passes over a tree of texts."""
    model: Any = model_map.model
    texts = [_tokens(model, 12), [*_tokens(model, 5), 3, 1, 2]]
    requests = [LikelihoodRequest(tuple(text[:1]), tuple(text[1:]), tag=number) for number, text in enumerate(texts)]
    with _fixed_decisions(model):
        logits = [_logits(model, text) for text in texts]
        differences = []
        for request, result in LikelihoodRun(model_map, requests, memory=1, most_tokens=4).results():
            expected = logits[request.tag][:-1].log_softmax(-1).cpu()
            chosen = expected.gather(1, torch.tensor(request.continuation)[:, None])[:, 0]
            differences.append(float((result.logprobs.float() - chosen).abs().max()))
    _compare(model, differences, logits)


def _check_interventions(model: Any) -> None:
    for intervention in interventions_on(model):
        if intervention.needs_order:
            raise UnsupportedAttention("order", method=type(intervention).__name__)
        if not (intervention.tokenwise or intervention.by_sequence):
            raise UnsupportedAttention("not_declared", method=type(intervention).__name__)


def _check_config(model: Any) -> None:
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedAttention("devices")
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise UnsupportedAttention("layers", types=", ".join(sorted(others)))
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):  # scales the positions of every row by the longest row
            raise UnsupportedAttention("rope", rope_type=rope["rope_type"])
