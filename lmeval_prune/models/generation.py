"""lm-eval's generation requests on our decoding engine, with lm-eval's own meaning of every setting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lmeval_prune.artefacts import digest
from lmeval_prune.decoding import Engine, Request, SamplingParams
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.head_mask import HeadMask
from lmeval_prune.models.lengths import Ending

Done = Callable[[int, str, list[int], Ending], None]
_SAMPLING = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
)


def is_sampling(settings: dict[str, Any]) -> bool:
    """Return whether lm-eval's generation settings draw tokens."""
    return bool(settings.get("do_sample")) or float(settings.get("temperature") or 0) > 0


def without_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's generation settings without those that sample."""
    return {name: value for name, value in settings.items() if name not in _SAMPLING} | {"do_sample": False}


def sampling_key(seed: int, request: Any, repeat: int) -> list[Any]:
    """Return what a drawn answer depends on beside the settings: the seed, the document and the number of the try."""
    return [seed, request.task_name, request.doc_id, request.idx, repeat]


def generate_until(
    lm: HFLM,
    engine: Engine,
    requests: Sequence[Any],
    repeats: Sequence[int],
    done: Done,
    seed: int,
    masks: Sequence[HeadMask | None] | None = None,
    greedy: bool = False,
) -> list[str]:
    """Generate texts, as `hf` would for each request alone.

    Args:
        lm: the lm-eval model whose tokenizer, limits and cache hook count.
        engine: decodes on `lm.model`.
        requests: lm-eval instances with arguments (context, generation settings).
        repeats: of each request, how many for the same document came before it.
        done: called with a request's index, its text, its tokens and its ending, as soon as they are there.
        seed: of sampling; each request draws by it and by its task, document and repeat.
        masks: heads to prune for each request; default none.
        greedy: take the most probable token always, whatever the requests say about sampling.

    Raises:
        InputError: a generation setting is one that the engine does not know.
    """
    prepared: dict[str, tuple[SamplingParams, list[str]]] = {}
    prompts = []
    for index, request in enumerate(requests):
        context, settings = request.args
        if greedy:
            settings = without_sampling(settings)
        key = digest(settings)
        if key not in prepared:
            prepared[key] = _settings(lm, settings)
        params, _ = prepared[key]
        room = lm.max_length - params.max_new_tokens
        if room <= 0:
            raise InputError(
                f"max_gen_toks={params.max_new_tokens} leaves no room for a prompt in max_length={lm.max_length}"
            )
        if not context:
            raise InputError(f"task {request.task_name}, document {request.doc_id}: the prompt is empty")
        ids, mask = lm.tok_batch_encode([context], left_truncate_len=room, truncation=lm.truncation)
        draw = digest(sampling_key(seed, request, repeats[index]))
        prompts.append(
            Request(
                tuple(ids[0][mask[0].bool()].tolist()),
                masks[index] if masks else None,
                params,
                int(draw, 16) & (1 << 63) - 1,
                (index, key),
            )
        )
    texts = [""] * len(requests)
    for request, tokens in engine.decode(prompts):
        index, key = request.tag
        params, until = prepared[key]
        texts[index] = _text(lm, tokens, until)
        done(index, texts[index], tokens, Ending(len(tokens), not engine.stopping.stopped(tokens, params)))
    return texts


def _settings(lm: HFLM, settings: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
    """Return the engine's settings (lm-eval's over the model's generation config, as in `generate`) and stop texts."""
    options: dict[str, Any] = dict(normalize_gen_kwargs(settings, lm.max_gen_toks))
    end = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    until = handle_stop_sequences(options.pop("until", None), eos=end)
    length = options.pop("max_gen_toks")
    if "max_length" in options:
        raise InputError("engine=batched does not take max_length as a generation setting; use max_gen_toks")
    if options.get("temperature") == 0.0:
        if options.get("do_sample"):
            raise InputError("do_sample=true needs a temperature above 0")
        options.pop("temperature")
        options["do_sample"] = False
    config = copy.deepcopy(lm.model.generation_config)
    unknown = config.update(**options)
    if unknown:
        raise InputError(f"generation settings that engine=batched does not know: {', '.join(sorted(unknown))}")
    return SamplingParams.of_generation_config(config, stop=tuple(until), max_new_tokens=length), until


def _text(lm: HFLM, tokens: list[int], until: list[str]) -> str:
    think_end = lm.think_end_token
    if isinstance(think_end, int) and think_end in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(think_end) :]
    text = lm.tok_decode(tokens)
    if isinstance(think_end, int):
        text = text.lstrip()
    return postprocess_generated_text(text, until, think_end if isinstance(think_end, str) else None)
