"""lm-eval's requests on the decoding engine, with the meaning and the tokens of lm-eval's `hf`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from lmeval_prune.artefacts import digest
from lmeval_prune.attributes import replaced
from lmeval_prune.config import Count, Divisor, NonNegative, parse_value
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.models.answer_store import Ending

logger = logging.getLogger(__name__)
Done = Callable[[int, str, list[int], Ending], None]  # request's index, text, tokens, ending
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's names
_SAMPLING = frozenset(
    ["do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"]
)


def is_sampling(settings: dict[str, Any]) -> bool:
    """Return whether lm-eval's generation settings sample tokens: without do_sample, if they have a temperature."""
    do_sample = settings.get("do_sample")
    return float(settings.get("temperature") or 0) > 0 if do_sample is None else bool(do_sample)


def check_settings(settings: dict[str, Any]) -> None:
    """Raise an `InputError` for malformed settings, and for sampling without a temperature (`hf` takes it as 0)."""
    temperature = parse_value("temperature", settings.get("temperature"), NonNegative | None)
    if (do_sample := settings.get("do_sample")) not in (None, True, False):  # `hf` samples by the text 'false'
        raise InputError(f"do_sample={do_sample!r} must be true or false")
    for name in LIMITS:
        parse_value(name, settings.get(name), Count | None)
    if do_sample and not temperature:
        raise InputError("do_sample=true needs a temperature above 0", remedy="give both, e.g. temperature=0.7")
    if is_sampling(settings):
        parse_value("temperature", settings["temperature"], Divisor)


def without_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _SAMPLING} | {"do_sample": False}


def answer_limit(settings: dict[str, Any], default: int = 256) -> int:
    """Return how many tokens an answer has at most by lm-eval's generation settings; `default` is the model's limit."""
    return int(normalize_gen_kwargs(settings, default)["max_gen_toks"])


def sampling_key(seed: int, request: Any, repeat: int) -> list[Any]:
    """Return what determines the random numbers of a sampled answer: seed, document and number of the attempt."""
    return [seed, request.task_name, request.doc_id, request.idx, repeat]


def generate_until(
    lm: HFLM,
    engine: Engine,
    requests: Sequence[Any],
    repeats: Sequence[int],
    done: Done,
    seed: int,
    masks: Sequence[HeadMask | None] | None = None,
    is_greedy: bool = False,
) -> list[str]:
    """Generate the texts that `hf` would generate for each request alone; call `done` for each finished request.

    The random numbers of a request depend on `seed`, its task, document and repeat. `masks` are heads to prune for each
    request; `is_greedy` overrides the requests' sampling settings.
    """
    prepared: dict[str, tuple[SamplingParams, list[str]]] = {}
    prompts: list[Request] = []
    for index, request in enumerate(requests):
        _, settings = request.args
        if is_greedy:
            settings = without_sampling(settings)
        key = repr(settings)
        if key not in prepared:
            prepared[key] = engine_settings(lm, settings)
        params, _ = prepared[key]
        ids = prompt_tokens(lm, request, params.max_new_tokens)
        draw = 0
        if params.do_sample:
            draw = int(digest(sampling_key(seed, request, repeats[index])), 16) & (1 << 63) - 1
        prompts.append(Request(ids, masks[index] if masks else None, params, draw, (index, key)))
    texts = [""] * len(requests)
    with closing(engine.decode(prompts)) as answers:  # frees the model if `done` fails
        for answered, generated in answers:
            index, key = answered.tag
            params, until = prepared[key]
            think_end, tokens = lm.think_end_token, generated
            if isinstance(think_end, int) and think_end in tokens:
                tokens = tokens[len(tokens) - tokens[::-1].index(think_end) :]
            text = lm.tok_decode(tokens)
            text = text.lstrip() if isinstance(think_end, int) else text
            end_text = think_end if isinstance(think_end, str) else None
            texts[index] = postprocess_generated_text(text, until, end_text)
            done(index, texts[index], generated, Ending(len(generated), not engine.stopping.stopped(generated, params)))
    return texts


def prompt_room(lm: Any, max_new_tokens: int) -> int:
    """Return how many tokens a prompt can have; `InputError` if none."""
    room = lm.max_length - max_new_tokens
    if room <= 0:
        raise InputError(f"max_gen_toks={max_new_tokens} leaves no room for a prompt in max_length={lm.max_length}")
    return room


def prompt_tokens(lm: HFLM, request: Any, max_new_tokens: int) -> tuple[int, ...]:
    """Return the token ids of a request's prompt, cut from the left where `hf` cuts it."""
    room = prompt_room(lm, max_new_tokens)
    if not request.args[0]:
        raise InputError(f"task {request.task_name}, document {request.doc_id}: the prompt is empty")
    ids, mask = lm.tok_batch_encode([request.args[0]], left_truncate_len=room, truncation=lm.truncation)
    return tuple(ids[0][mask[0].bool()].tolist())


def engine_settings(lm: HFLM, settings: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
    """Return the engine's settings (lm-eval's override the model's generation config) and the stop strings."""
    check_settings(settings)
    options: dict[str, Any] = dict(normalize_gen_kwargs(settings, lm.max_gen_toks))
    end = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    until = handle_stop_sequences(options.pop("until", None), eos=end)
    length = options.pop("max_gen_toks")
    if "max_length" in options:
        raise InputError("engine=batched does not take max_length as a generation setting", remedy="use max_gen_toks")
    if options.get("temperature") == 0.0:
        options.pop("temperature")
        options["do_sample"] = False
    config = copy.deepcopy(lm.model.generation_config)
    if unknown := config.update(**options):
        raise InputError(f"generation settings that engine=batched does not know: {', '.join(sorted(unknown))}")
    params = SamplingParams.from_generation_config(config, stop=tuple(filter(None, until)), max_new_tokens=length)
    return params, until


def token_windows(
    lm: HFLM, kind: str, requests: Sequence[Any], disable_tqdm: bool
) -> dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the contexts and continuations that `hf` would run for each request, by the request's id."""
    windows: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    collected: list[Any] = []
    cut = 0
    unique = {id(request): request for request in requests}

    def collect(requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:  # in place of running them
        collected.extend(requests)
        return [(0.0, False)] * len(requests)

    alone = {"_world_size": 1, "cache_hook": SimpleNamespace(add_partial=lambda *_: None)}  # no rank waits
    with replaced(lm, batch_size_per_gpu=1 << 30, _loglikelihood_tokens=collect, **alone):
        for key, request in tqdm(unique.items(), "Tokenizing inputs", disable=disable_tqdm or lm.rank > 0):
            getattr(HFLM, kind)(lm, [request], disable_tqdm=True)
            windows[key] = []
            for _, context, continuation in collected:
                if not context or not 0 < len(continuation) <= lm.max_length:  # spaces at a context's end are counted
                    raise InputError(  # to the continuation
                        f"task {request.task_name}, document {request.doc_id}: the context has {len(context)} tokens, "
                        f"the continuation {len(continuation)}; both need some, and the latter at most {lm.max_length}"
                    )
                room = lm.max_length + 1 - len(continuation)  # the last token is not run
                cut += len(context) > room
                windows[key].append((tuple(context[-room:]), tuple(continuation)))
            collected.clear()
    if cut:
        logger.warning("%d texts are longer than max_length=%d and are cut from the left", cut, lm.max_length)
    return windows
