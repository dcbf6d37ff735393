"""Models that the engine cannot run: the check that finds them, and their answers by transformers' `generate`.

The check compares logits with the model's own on every code path of the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from lmeval_prune.architectures import FAMILIES, ModelMap, input_device, position_limit
from lmeval_prune.architectures.precision import exact_products
from lmeval_prune.attributes import replaced
from lmeval_prune.decoding.groups import SharedPrefix
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.likelihood import LikelihoodRequest, LikelihoodRun
from lmeval_prune.decoding.memory import available_memory
from lmeval_prune.decoding.model_runner import Chunk, ModelRunner, Statistics, lock_model, refuse_locked
from lmeval_prune.decoding.request import Request, SamplingParams, Stopping
from lmeval_prune.decoding.sampling import RefuseNaN
from lmeval_prune.errors import first_line
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.attention_call import UnsupportedAttention
from lmeval_prune.interventions.head_mask import RowMasks

logger = logging.getLogger(__name__)
NO_INTERFACE = "the model's attention does not use transformers' attention interface"
HALF = (torch.float16, torch.bfloat16)
MAX_CHECKED_WINDOW = 1024  # largest sliding window that the check of a family without tests goes beyond


def why_failing(differences: Callable[[ModelMap], tuple[list[float], float]], model_map: ModelMap) -> str | None:
    """Return why the engine does not compute what a model with its interventions does; None if it does.

    In half precision roundings alone may move logits too far, so a model that fails is checked again with its weights
    widened to float32, which is exact, if they fit into memory.

    Args:
        differences: `decoding_differences` or `likelihood_differences`, the largest difference of logits on each code
            path, and the largest logit.
        model_map: the model.
    """
    model = model_map.model
    refuse_locked(model)
    narrow = {parameter: parameter.data for parameter in model.parameters() if parameter.dtype in HALF}

    def difference() -> str | None:
        found, largest = differences(model_map)
        tolerance = 0.05 if next(model.parameters()).element_size() < 4 else 1e-3
        is_equal = all(value <= tolerance * largest for value in found)  # false for NaN, too
        return None if is_equal else f"the model's logits would differ by {max(found):.2g}"

    try:
        with exact_products():
            reason = difference()
            is_half = next(model.parameters()).element_size() < 4
            size = 4 * sum(map(torch.Tensor.numel, narrow))
            if reason is None or not is_half or size > available_memory(input_device(model)):
                return reason
            logger.info("checking the engine again in float32: roundings alone may move logits in half precision")
            try:
                for parameter, data in narrow.items():
                    parameter.data = data.float()
                return difference() and reason
            except Exception:  # also too little memory for the check
                return reason
            finally:
                for parameter, data in narrow.items():
                    parameter.data = data
    except torch.OutOfMemoryError:
        raise
    except UnsupportedAttention as error:
        return str(error)
    except Exception as error:  # any error of a model that works otherwise
        return f"the engine does not know how to run the model; its check ended with {first_line(error)}"


def is_tested(model_map: ModelMap) -> bool:
    """Return whether a model is of a family for which tests compare the engine with `generate`."""
    is_stock = type(model_map.model).__module__.split(".")[0] in ("transformers", "lmeval_prune")
    return is_stock and model_map.model_type in FAMILIES


def sliding_window(model_map: ModelMap) -> int:
    config: Any = model_map.model.config
    return int(getattr(config.get_text_config(), "sliding_window", None) or 0)


def decoding_differences(model_map: ModelMap) -> tuple[list[float], float]:
    """Compare the passes of decoding: prompts, several and single tokens, from a later layer up, after a prefix."""
    logger.info(
        "checking that the engine gives the model's logits; the first time on a machine this compiles its attention, "
        "up to half a minute"
    )
    model: Any = model_map.model
    _refuse_what_logits_hide(model)
    length = 12
    if not is_tested(model_map):  # more tokens than its window, if that is small
        window = sliding_window(model_map)
        length = max(64, window + 8) if window <= MAX_CHECKED_WINDOW else 64
        length = min(length, position_limit(model) or length)
    tokens = _tokens(model, length)
    middle, end = len(model_map.attention) // 2, length - 4
    differences = []
    with _fixed_decisions(model):
        expected = _logits(model, tokens)
        cache = KVCache(2, length)
        with ExitStack() as stack:
            runner = ModelRunner(model_map, cache, [None], Statistics(), stack)

            def run(start: int, stop: int, skip: int = 0, prefix: int = 0, *args: Any, keep: Any = frozenset()) -> Any:
                """Run a span of tokens in two slots, whose first `prefix` tokens are a prefix."""
                batch = [Chunk(slot, start - prefix, 0, tokens[start:stop], skip, keep) for slot in (0, 1)]
                logits, layer_inputs = runner.forward(batch, *args)
                found = logits.unflatten(0, (2, -1)).float() - expected[start + skip : stop]
                differences.append(float(found.abs().max()))
                return layer_inputs

            # a token filter skips one token of the first pass, and the only token of the third
            try:
                layer_inputs = run(0, end, keep=frozenset({middle}))
            except Exception as error:
                is_clear = isinstance(error, UnsupportedAttention | torch.OutOfMemoryError)
                if is_clear or cache.keys or getattr(model, "_supports_attention_backend", True):
                    raise
                raise UnsupportedAttention(NO_INTERFACE) from error
            if not cache.keys:
                raise UnsupportedAttention(NO_INTERFACE)
            for span in ((end, end + 2, 1), (end + 2, end + 3), (end + 3, length)):
                run(*span)
            run(0, end, 5, 0, middle, torch.cat([inputs[middle] for inputs in layer_inputs]))
            if all(intervention.tokenwise for intervention in interventions_on(model)):
                shared = SharedPrefix(tuple(tokens[:4]), {0: runner.layers}, unanswered=1, is_copied=False)
                cache.prefixes[:] = [shared.for_mask(0, runner)] * 2
                run(4, end, prefix=4)
                run(end, end + 1, prefix=4)
    return differences, float(expected.abs().max())


def likelihood_differences(model_map: ModelMap) -> tuple[list[float], float]:
    """Compare log-probabilities in several passes over a tree of texts."""
    model: Any = model_map.model
    texts = [_tokens(model, 12), [*_tokens(model, 5), 3, 1, 2]]
    requests = [LikelihoodRequest(tuple(text[:1]), tuple(text[1:]), tag=number) for number, text in enumerate(texts)]
    differences = []
    with _fixed_decisions(model):
        logits = [_logits(model, text) for text in texts]
        for request, result in LikelihoodRun(model_map, requests, 1, Statistics(), most_tokens=4).results():
            expected = logits[request.tag][:-1].log_softmax(-1).cpu()
            chosen = expected.gather(1, torch.tensor(request.continuation)[:, None])[:, 0]
            differences.append(float((result.logprobs.float() - chosen).abs().max()))
    return differences, max(float(each.abs().max()) for each in logits)


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


def _refuse_what_logits_hide(model: Any) -> None:
    """Refuse methods and configurations whose effect a comparison of short texts cannot show."""
    for intervention in interventions_on(model):
        method = type(intervention).__name__
        if intervention.needs_order:
            raise UnsupportedAttention(f"under the method {method} the model's answers depend on earlier answers")
        if not (intervention.tokenwise or intervention.by_sequence):
            raise UnsupportedAttention(f"the method {method} declares neither tokenwise nor by_sequence")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedAttention("the model's layers are on several devices")
    config = model.config.get_text_config()
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        types = ", ".join(sorted(others))
        raise UnsupportedAttention(f"the model has layers of type {types}, which the engine does not run")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            raise UnsupportedAttention(
                f"the model scales the positions of a batch by its longest row (rope type {kind})"
            )


class Ended(StoppingCriteria):
    """Ends rows by `Stopping`; `generate` keeps an ended row ended."""

    def __init__(self, stopping: Stopping, prompt: int, params: SamplingParams) -> None:
        self.stopping, self.prompt, self.params = stopping, prompt, params

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        answers = input_ids[:, self.prompt :].tolist()
        return torch.tensor([self.stopping.ended(answer, self.params) for answer in answers], device=input_ids.device)


def generate(
    model_map: ModelMap, requests: Sequence[Request], stopping: Stopping, context: int, rows: int
) -> Generator[tuple[Request, list[int]]]:
    """Decode by `generate`, each row with its mask: greedy requests in batches, sampled ones alone, with their seeds.

    The prompts of a batch have equal parameters and lengths: padding changes the answers of some families (bloom, mpt).
    They also have the same mask if a method on the model is not `tokenwise`: it may depend on which heads are pruned,
    as Probe Pruning does, so the mask is an intervention beside it.

    Args:
        model_map: the model.
        requests: in any order.
        stopping: when answers end.
        context: largest number of tokens of prompt and answer.
        rows: batch size.
    """
    model: Any = model_map.model
    masks, device = RowMasks(), input_device(model)
    is_tokenwise = all(intervention.tokenwise for intervention in interventions_on(model))
    batches: dict[Any, list[Request]] = {}
    for number, request in enumerate(requests):
        own_batch = number if request.params.do_sample else -1
        common_mask = None if is_tokenwise else request.mask
        batches.setdefault((request.params, len(request.prompt), own_batch, common_mask), []).append(request)
    plain = replaced(model, generation_config=GenerationConfig())  # not with settings of the model's own
    with lock_model(model_map), masks.applied_to(model, model_map), plain:
        for (params, width, _, common_mask), group in batches.items():
            ends = stopping.ends(params)
            arguments = {**params.generation_settings(), "eos_token_id": list(ends) or None}
            arguments["max_new_tokens"] = min(params.max_new_tokens, context - width)
            for begin in range(0, len(group), rows):
                batch = group[begin : begin + rows]
                ids = torch.tensor([request.prompt for request in batch], device=device)
                own = masks.using([request.mask for request in batch])
                masked = common_mask.applied_to(model, model_map) if common_mask else own
                seeded = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
                with torch.inference_mode(), masked, seeded:
                    torch.manual_seed(batch[0].seed)
                    out = model.generate(
                        input_ids=ids,
                        attention_mask=torch.ones_like(ids),
                        pad_token_id=ends[0] if ends else 0,
                        stopping_criteria=StoppingCriteriaList([Ended(stopping, width, params)]),
                        logits_processor=LogitsProcessorList([RefuseNaN()]),
                        **arguments,
                    )
                for request, answer in zip(batch, out[:, width:].tolist(), strict=True):
                    lengths = range(1, len(answer) + 1)
                    end = next((n for n in lengths if stopping.ended(answer[:n], params)), len(answer))
                    yield request, answer[:end]
