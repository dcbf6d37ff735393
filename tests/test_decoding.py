"""The decoding engine against transformers' `generate`, one request at a time with its mask hooked."""

import itertools
import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import BY_GENERATE, CAUSAL, VOCABULARY, Letters, quick, tiny
from torch import nn
from transformers import EpsilonLogitsWarper, EtaLogitsWarper, GenerationConfig, MinPLogitsWarper, TypicalLogitsWarper
from transformers.generation.logits_process import TopHLogitsWarper

from lmeval_prune import InputError
from lmeval_prune.architectures import map_model
from lmeval_prune.decoding import Engine, Request, SamplingParams, Schedule, Stopping
from lmeval_prune.decoding.kv_cache import KVCache
from lmeval_prune.decoding.sampling import Sampler, cumulative_distribution, draw, near_tied_argmax
from lmeval_prune.decoding.scheduler import Scheduler
from lmeval_prune.interventions import HeadMask
from lmeval_prune.interventions.token_filter import TokenFilter

MODELS: dict[Any, nn.Module] = {}
SAMPLER = Sampler(tiny("llama"), Stopping())


def model_of(family: str, layers: int = 4, **changes: Any) -> nn.Module:
    key = (family, layers, str(changes))
    if key not in MODELS:
        name = {"n_embd": "n_layer", "d_model": "n_layers"}.get(next(iter(CAUSAL[family])), "num_hidden_layers")
        deeper = {} if family in {"gpt_neo", "bloom"} else {name: layers}
        MODELS[key] = tiny(family, **{**deeper, **changes})
        MODELS[key].generation_config.pad_token_id = 0
    return MODELS[key]


def alone(model: nn.Module, request: Request) -> list[int]:
    """Decode the reference: plain `generate`, this request only."""
    ids = torch.tensor([request.prompt])
    params = request.params
    arguments: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens, "do_sample": False, "repetition_penalty": params.repetition_penalty,
    }  # fmt: skip
    if params.eos is not None:
        arguments["eos_token_id"] = list(params.eos) or None
    with request.mask.applied_to(model) if request.mask else nullcontext():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **arguments)
    answer = out[0, ids.shape[1] :].tolist()
    for end in range(1, len(answer) + 1):
        if any(stop in Letters().decode(answer[:end]) for stop in request.params.stop):
            return answer[:end]
    return answer


def some_requests(
    model: nn.Module, seed: int, prompts: int = 4, per_prompt: int = 6, longest: int = 14
) -> list[Request]:
    rng = random.Random(seed)
    layers = list(map_model(model).attention)
    requests = []
    for _ in range(prompts):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, longest)))
        for _ in range(rng.randint(1, per_prompt)):
            heads = [
                f"L{layer.index}H{rng.randrange(layer.heads)}"
                for layer in rng.choices(layers, k=rng.choice([0, 1, 1, 2]))
            ]
            stop = rng.choice([(), ("A",), ("BC", "Z")])
            requests.append(
                Request(
                    prompt,
                    HeadMask("+".join(heads)) if heads else None,
                    SamplingParams(
                        rng.choice([1, 2, 7, 30]), (2,), stop, repetition_penalty=rng.choice([1.0, 1.0, 1.3])
                    ),
                    tag=len(requests),
                )
            )
    rng.shuffle(requests)
    return requests


def answers(engine: Engine, requests: list[Request]) -> dict[Any, list[int]]:
    results = list(engine.decode(requests))
    assert sorted(request.tag for request, _ in results) == sorted(request.tag for request in requests)
    return {request.tag: answer for request, answer in results}


def check(engine: Engine, requests: list[Request], model: nn.Module) -> dict[Any, list[int]]:
    """See that each answer is that of the request alone, and return them."""
    results = answers(engine, requests)
    for request in requests:
        assert results[request.tag] == alone(model, request), request
    return results


# those with experts or layers of several kinds, and those that the engine does not run
MORE = ("gpt2", "gemma3_text", "cohere2", "mixtral", "gptj", "codegen", *BY_GENERATE)


@pytest.mark.parametrize("family", quick(sorted(CAUSAL), *MORE))
def test_every_family_gives_what_generate_gives(family: str) -> None:
    """Those that the engine does not run fall back; the answers are `generate`'s all the same."""
    model = model_of(family)
    engine = Engine(model, Letters(), max_rows=5)
    assert (engine.unsupported is not None) == (family in BY_GENERATE), engine.unsupported
    requests = some_requests(model, seed=1)
    check(engine, requests, model)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
        ("olmo3", {"sliding_window": 6}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 5}),
        ("gemma3_text", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
        ("cohere2", {"sliding_window": 5}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
def test_sliding_windows(family: str, changes: dict[str, Any]) -> None:
    """Answers longer than the window, so that it hides keys."""
    model = model_of(family, **changes)
    engine = Engine(model, Letters(), max_rows=5)
    assert engine.unsupported is None
    requests = some_requests(model, seed=2, longest=20)
    check(engine, requests, model)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3", "gemma2", "mistral", "gpt_neox", "gpt2"]),
    seed=st.integers(0, 10**6),
    block=st.sampled_from([1, 2, 3, 16, None]),
    top=st.fixed_dictionaries({"max_rows": st.integers(1, 9), "deterministic": st.booleans()}),
    share=st.booleans(),
)
def test_any_options_and_order_give_what_generate_gives(
    family: str, seed: int, block: int, top: dict[str, Any], share: bool
) -> None:
    model = model_of(family)
    requests = some_requests(model, seed, prompts=3, per_prompt=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmeval_prune.decoding.engine.BLOCK", block)
        check(Engine(model, Letters(), schedule=Schedule(share), **top), requests, model)


def test_a_compiled_model_runs_eagerly() -> None:
    """Code that is compiled while the cache and skippable layers are in the model would keep them."""
    model, passes = tiny("llama"), list[Any]()
    requests = [Request((5, 6, 7 + n), None, SamplingParams(6, ()), tag=n) for n in range(3)]
    expected = answers(Engine(model), requests)
    model.compile(backend=lambda graph, _: (passes.append(graph), graph)[1])
    engine = Engine(model)
    assert engine.unsupported is None and len(passes) == 1  # the check's pass of the model as it is
    assert answers(engine, requests) == expected and len(passes) == 1


def test_layers_below_the_first_pruned_one_do_not_run_for_followers() -> None:
    model = model_of("llama", layers=4)
    prompt = tuple(range(5, 15))
    params = SamplingParams(1)
    run = [0] * 4
    hooks = [
        layer.register_forward_hook(lambda *_, i=i: run.__setitem__(i, run[i] + 1))
        for i, layer in enumerate(model.model.layers)
    ]
    engine = Engine(model)
    assert engine.unsupported is None
    run[:] = [0] * 4
    requests = [Request(prompt, HeadMask(f"L{layer}H0"), params) for layer in (1, 3)] + [Request(prompt, None, params)]
    list(engine.decode(requests))
    for hook in hooks:
        hook.remove()
    assert run == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        # its window is in the mask alone; wider than what a short check could see
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 14, "max_window_layers": 1},
            "a sliding window whose size it does not pass",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "scales the positions of a batch by its longest row",
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [4.0] * 4,
                },
            },
            "scales the positions of a batch by its longest row",
        ),
    ],
)
def test_what_a_short_check_cannot_see_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    model = model_of(family, **changes)
    engine = Engine(model, Letters())
    assert reason in str(engine.unsupported)
    check(engine, some_requests(model, seed=5, longest=20), model)


def test_two_runs_on_two_models_do_not_meet_and_on_one_model_are_refused() -> None:
    model, other = model_of("llama"), model_of("llama", vocab_size=60)
    requests = some_requests(model, seed=6)
    reference = answers(Engine(model, Letters()), requests)
    small = [Request(tuple(t % 57 + 3 for t in r.prompt), r.mask, r.params, tag=r.tag) for r in requests]
    expected = answers(Engine(other, Letters()), small)
    first, second = Engine(model, Letters(), max_rows=3).decode(requests), Engine(other, Letters()).decode(small)
    mixed: list[dict[Any, list[int]]] = [{}, {}]
    for pair in itertools.zip_longest(first, second):
        for result, answered in zip(mixed, pair, strict=True):
            if answered:
                result[answered[0].tag] = answered[1]
    assert mixed == [reference, expected]
    engine, again = Engine(model, Letters(), max_rows=2), Engine(model, Letters())
    run = engine.decode(requests)
    next(run)
    with pytest.raises(InputError, match="decoding on this model already"):
        next(again.decode(requests))
    run.close()
    assert answers(again, requests) == reference


def test_end_tokens_are_the_models_own_unless_settings_name_some() -> None:
    model = model_of("llama")
    prompt = (5, 6, 7)
    free = alone(model, Request(prompt, params=SamplingParams(12, eos=())))
    model.generation_config.eos_token_id = [free[4], 2]
    try:
        for params, expected in (
            (SamplingParams(12), free[: free.index(free[4]) + 1]),
            (SamplingParams(12, eos=()), free),
        ):
            request = Request(prompt, params=params, tag=0)
            assert answers(Engine(model), [request])[0] == expected
            assert len(expected) == 12 or alone(model, request) == expected
    finally:
        model.generation_config.eos_token_id = None


# --------------------------------------------------------------------------- bounds


def watch(monkeypatch: pytest.MonkeyPatch, method: str, after: Any) -> None:
    """Call `after(run)` after each call of a method of `Scheduler`."""
    inner = getattr(Scheduler, method)

    def watched(self: Scheduler, *args: Any) -> Any:
        result = inner(self, *args)
        after(self)
        return result

    monkeypatch.setattr(Scheduler, method, watched)


FILTERED = TokenFilter(0.4, focus="uniform", warmup=3)


@pytest.mark.parametrize(
    ("kib", "filtered"),
    [
        (130, None),
        (300, FILTERED),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1000, None), (130, FILTERED))),
    ],
    ids=lambda value: "filtered" if isinstance(value, TokenFilter) else str(value),
)
def test_what_is_stored_and_kept_stays_within_memory(
    kib: int, filtered: TokenFilter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer has its own followers: the most that can be kept. One token in three is decided alone."""
    model = model_of("llama", layers=6)
    layers = list(map_model(model).attention)
    masks = [HeadMask(f"L{layer.index}H0") for layer in layers]
    requests = [
        Request((5, 6, 7, token), mask, SamplingParams(16, eos=()), tag=(token, str(mask)))
        for token in range(3, 9)
        for mask in [None, *masks]
    ]
    held: list[int] = []
    caches: list[KVCache] = []  # the run's, and the one in which the last near-tie was decided

    def stored(cache: KVCache) -> list[torch.Tensor]:
        states: list[Any] = [state for states in cache.states.values() for state in states.values()]
        tensors = [
            tensor
            for by_layer in (cache.keys, cache.values, cache.positions, cache.lengths)
            for tensor in by_layer.values()
        ]
        return [*tensors, *(tensor for state in states for tensor in state.tensors)]

    def created(self: KVCache, *args: Any) -> None:
        inner(self, *args)
        caches[1:] = [self]

    inner = KVCache.__init__

    def measure(run: Scheduler) -> None:
        caches[:1] = [run.runner.cache]
        tensors = [tensor for cache in caches for tensor in stored(cache)]
        for question in {id(q): q for q in (*run.ready, *(row.group for row in run.active))}.values():
            for layer_cache in question.leader_cache:
                tensors += [
                    layer_cache.keys,
                    layer_cache.values,
                    *([] if layer_cache.positions is None else [layer_cache.positions]),
                ]
                tensors += [tensor for state in layer_cache.states.values() for tensor in state.tensors]
            tensors += [*question.layer_inputs.values()]
        held.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    for method in ("_step", "_start", "_remove_ended"):
        watch(monkeypatch, method, measure)
    monkeypatch.setattr("lmeval_prune.decoding.scheduler.near_tied_argmax", lambda logits: logits.argmax(-1) % 3 == 0)
    with filtered.applied_to(model) if filtered else nullcontext():
        engine = Engine(model, memory=kib * 1024, deterministic=True)
        assert engine.unsupported is None
        caches.clear()
        monkeypatch.setattr(KVCache, "__init__", created)
        answers(engine, requests)
    print(f"{max(held)} of {kib * 1024} bytes")
    assert kib * 256 < max(held) <= kib * 1024


def test_models_wrapped_by_peft() -> None:
    import peft

    model = tiny("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.eval()
    requests = some_requests(model, seed=7, prompts=2)
    engine = Engine(wrapped, Letters())
    assert engine.unsupported is None
    check(engine, requests, wrapped)


def test_the_fallback_takes_nothing_from_the_models_own_generation_config() -> None:
    model = tiny("bloom")
    requests = [
        Request((5, 6, 7), None, SamplingParams(6), tag=0),
        Request((5, 9), HeadMask("L0H1"), SamplingParams(6), tag=1),
    ]
    expected = answers(Engine(model), requests)
    model.generation_config.suppress_tokens = sorted({token for answer in expected.values() for token in answer})
    assert answers(Engine(model), requests) == expected
    assert model.generation_config.suppress_tokens


def test_the_model_is_as_before_when_the_caller_stops_early_or_a_run_fails() -> None:
    model = model_of("qwen2")
    layers, attention = list(model.model.layers), model.config._attn_implementation
    requests = some_requests(model, seed=4)
    ids = torch.tensor([requests[0].prompt])
    before = model(ids).logits
    run = Engine(model, Letters()).decode(requests)
    next(run)
    assert list(model.model.layers) != layers
    run.close()
    with pytest.raises(AttributeError):  # no tokenizer
        list(Engine(model).decode([Request((5, 6), None, SamplingParams(9, stop=("x",)))]))
    assert list(model.model.layers) == layers and model.config._attn_implementation == attention
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(ids).logits, before)


# --------------------------------------------------------------------------- sampling


def test_a_draw_depends_on_the_seed_alone_not_on_neighbours() -> None:
    model = model_of("llama")
    sampled = SamplingParams(20, (2,), do_sample=True, temperature=0.8, top_k=20, top_p=0.95)
    requests = [
        Request((5, 6, 7), HeadMask("L1H1") if seed % 2 else None, sampled, seed, tag=seed) for seed in range(8)
    ]
    first = answers(Engine(model, max_rows=3), requests)
    again = answers(Engine(model, max_rows=8, schedule=Schedule(share=False)), list(reversed(requests)))
    assert first == again and len(set(map(tuple, first.values()))) > 4


def test_draws_have_the_distribution_that_generate_would_draw_from() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])
    setting = SamplingParams(10, do_sample=True, temperature=0.7, top_k=4, top_p=0.95)
    counts = torch.zeros(5)
    for seed in range(4000):
        counts[SAMPLER.choose(logits, Request((1,), None, setting, seed), [])] += 1
    kept = torch.where(torch.arange(5) < 3, logits / 0.7, -torch.inf)  # top_p drops the fourth
    expected = kept.softmax(0)
    assert float((logits[:4] / 0.7).softmax(0)[:3].sum()) > 0.95 > float((logits[:4] / 0.7).softmax(0)[:2].sum())
    assert torch.allclose(counts / 4000, expected, atol=0.03) and counts[3:].sum() == 0


OTHERS: list[dict[str, Any]] = [
    {"suppress_tokens": [5, 9, 11]},
    {"begin_suppress_tokens": list(range(30, 60))},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], [12, 13]]},
    {"min_new_tokens": 9},
    {"min_length": 12},
    {"sequence_bias": [[[20], 4.0], [[21], -4.0]]},
    {"exponential_decay_length_penalty": [3, 1.5]},
    {"forced_eos_token_id": 2},
    {"encoder_repetition_penalty": 1.7},
    {"encoder_no_repeat_ngram_size": 1},
    {"renormalize_logits": True, "repetition_penalty": 1.4},
    {"remove_invalid_values": True},
]


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        *(pytest.param("llama", setting, id=f"llama-{next(iter(setting))}") for setting in OTHERS),
        *(
            pytest.param("bloom", setting, id=f"bloom-{next(iter(setting))}", marks=pytest.mark.long if i % 4 else ())
            for i, setting in enumerate(OTHERS)
        ),
    ],
)
def test_what_changes_logits_is_done_as_generate_does_it(family: str, setting: dict[str, Any]) -> None:
    """By the engine and by its fallback, for prompts of several lengths at once."""
    model = model_of(family)
    config = GenerationConfig(eos_token_id=2, do_sample=False, max_new_tokens=14, **setting)
    params = SamplingParams.from_generation_config(config)
    requests = [
        Request(tuple(range(5, 5 + length)), mask, params, tag=(length, str(mask)))
        for length, mask in ((1, None), (4, HeadMask("L1H1")), (6, None), (6, HeadMask("L1H1")))
    ]
    expected = {}
    for request in requests:
        ids = torch.tensor([request.prompt])
        with request.mask.applied_to(model) if request.mask else nullcontext():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, generation_config=config)
        expected[request.tag] = out[0, ids.shape[1] :].tolist()
    for deterministic in (False, True):
        assert answers(Engine(model, deterministic=deterministic), requests) == expected


@pytest.mark.parametrize(
    ("setting", "warper"),
    [
        ({"typical_p": 0.6}, TypicalLogitsWarper(0.6)),
        ({"epsilon_cutoff": 0.1}, EpsilonLogitsWarper(0.1)),
        ({"eta_cutoff": 0.3}, EtaLogitsWarper(0.3)),
        ({"top_h": 0.5}, TopHLogitsWarper(0.5)),
        ({"min_p": 0.3}, MinPLogitsWarper(0.3)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_draws_cut_is_that_of_generate(setting: dict[str, float], warper: Any) -> None:
    logits = torch.tensor([2.0, 1.7, 0.9, 0.5, -0.5, -1.0])
    params = SamplingParams.from_generation_config(GenerationConfig(do_sample=True, top_k=0, **setting))
    kept = set(warper(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].isfinite().nonzero().flatten().tolist())
    drawn = {SAMPLER.choose(logits, Request((1,), None, params, seed), []) for seed in range(1000)}
    assert drawn == kept and 0 < len(kept) < 6


def test_a_stop_text_is_found_however_the_answer_spells_it() -> None:
    """The stop text alone is two tokens, in the answer four; the text is looked for in as many as lm-eval looks."""

    class Pairs:
        def encode(self, text: str, add_special_tokens: bool = False) -> list[str]:
            return [text[i : i + 2] for i in range(0, len(text), 2)]

        def decode(self, tokens: list[str]) -> str:
            return "".join(tokens)

    stopping, params = Stopping(Pairs()), SamplingParams(100, (), ("BCDE",))
    answer = ["x", "B", "C", "D"]
    assert not stopping.ended(answer, params)  # type: ignore[arg-type]
    assert stopping.ended([*answer, "E"], params)  # type: ignore[arg-type]
    assert not stopping.ended([*answer, "E", "y", "z"][2:], params)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- parts


def test_deterministic_answers_do_not_depend_on_neighbours() -> None:
    """Logits in bfloat16 that differ a little with the shape of the pass: without it, some answers do."""
    model = tiny("llama", dtype=torch.bfloat16, num_hidden_layers=4)
    model.lm_head.register_forward_hook(
        lambda _, args, out: out * (1 + torch.arange(VOCABULARY).mul(args[0].shape[1]).sin() / 100).to(out.dtype)
    )
    requests = [Request(r.prompt, r.mask, SamplingParams(30), tag=r.tag) for r in some_requests(model, 0, longest=20)]

    def differing(deterministic: bool) -> int:
        engine = Engine(model, deterministic=deterministic)
        together = answers(engine, requests)
        return sum(answers(engine, [request])[request.tag] != together[request.tag] for request in requests)

    assert differing(True) == 0 < differing(False)


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("draws", [100, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("setting", SAMPLED, ids=str)
def test_near_ties_of_draws_are_all_found(setting: dict[str, Any], draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits moved by less than they are trusted: where another token is drawn, the draw was a near-tie.

    Half of the random numbers are close to a step of the distribution, and half of the cuts close to a token.
    """
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    history = [3, 4, 5, 6, 7, 8]
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def scores_of(logits: torch.Tensor, **changes: Any) -> torch.Tensor:
        request = Request((3, 4), params=SamplingParams(do_sample=True, **{**setting, **changes}))
        past = torch.tensor([history]).expand(len(logits), -1)
        return SAMPLER._processors(request, logits.device)(past, logits.clone())

    counts = [0, 0, 0]
    for number in range(draws):
        logits, changes = 3 * torch.randn(50, generator=generator), dict[str, Any]()
        ranked = scores_of(logits[None], **plain)[0].double().sort(descending=True)
        if number % 2:
            close = rng.uniform(-3e-3, 3e-3)
            if "top_p" in setting:
                kept = ranked.values[: setting.get("top_k", 50)].softmax(-1).cumsum(-1)
                changes["top_p"] = min(float(kept[rng.randrange(1, 6)]) + close / 10, 0.999)
            elif "min_p" in setting:
                changes["min_p"] = math.exp(float(ranked.values[rng.randrange(1, 6)] - ranked.values[0]) - abs(close))
            elif "top_k" in setting:
                inside, outside = ranked.indices[setting["top_k"] - 1], ranked.indices[setting["top_k"]]
                logits[outside] = logits[inside] - abs(close) if inside not in history else logits[outside]
        uniform = rng.random()
        if number % 4 < 2:
            steps = cumulative_distribution(scores_of(logits[None], **changes)[0])
            uniform = min(max(float(steps[rng.randrange(50)]) + rng.uniform(-1e-3, 1e-3), 0.0), 0.9999)
        monkeypatch.setattr("lmeval_prune.decoding.sampling.uniform", lambda *_, u=uniform: u)
        request = Request((3, 4), params=SamplingParams(do_sample=True, **{**setting, **changes}))
        near = SAMPLER.near_tie(logits, request, history[2:])
        drawn = SAMPLER.choose(logits, request, history[2:])
        # the worst that such errors can do: tokens up to a place, or up to a rank, against all others
        places, ranks = torch.arange(50), logits.argsort(descending=True).argsort()
        splits = [places < drawn, places <= drawn, *(ranks < rank for rank in range(1, 15))]
        errors = 1e-3 * (torch.stack(splits).float() - 0.5)
        moved = scores_of(logits + torch.cat([errors, -errors]), **changes)
        others = draw(cumulative_distribution(moved), torch.full((len(moved), 1), uniform, dtype=torch.float64))
        changed = bool((others != drawn).any())
        assert near or not changed, (number, changes, uniform)
        counts = [a + b for a, b in zip(counts, (near, changed, not near), strict=True)]
    assert min(counts) > 0.05 * draws, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 100.0])
def test_near_ties_of_all_lines_are_those_of_each(dtype: torch.dtype, scale: float) -> None:
    """For greedy answers they are found in one pass over the batch, by the same bound."""
    logits = (scale * torch.randn(200, 30, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[0] = logits[0].sort().values[torch.arange(30).clamp(max=28)]  # two equal ones
    expected = []
    for line in logits:
        best, second = line.float().topk(2).values.tolist()
        expected.append(best - second < max(1e-3, 32 * torch.finfo(dtype).eps * abs(best)))
    assert (
        near_tied_argmax(logits).tolist() == expected == [SAMPLER.near_tie(line, Request((1,)), []) for line in logits]
    )
    assert expected[0] and not all(expected)


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        ([Request((1,) * 128)], {}),
        ([Request((1,), HeadMask("L9H0"))], {}),
        ([Request((1,))], {"memory": 10}),
    ],
)
def test_requests_without_an_answer_are_refused(requests: list[Request], options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        list(Engine(model_of("llama"), Letters(), **options).decode(requests))


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError):
        SamplingParams(stop=("",))


def test_what_a_mask_allows_counts_for_it_alone_whatever_the_order() -> None:
    engine, masks = Engine(tiny("llama")), [HeadMask("L0H*", allow_empty_layer=True), HeadMask("L0H*")]
    for pair in (masks, masks[::-1]):
        with pytest.raises(InputError, match="allow_empty_layer=true"):
            list(engine.decode([Request((5, 6), mask, SamplingParams(3, ())) for mask in pair]))
    assert len(list(engine.decode([Request((5, 6), masks[0], SamplingParams(3, ()))]))) == 1


def test_the_context_ends_an_answer() -> None:
    model = model_of("llama")
    request = Request(tuple([5, 6] * 60), None, SamplingParams(50))
    ((_, answer),) = Engine(model).decode([request])
    assert len(answer) == 8 and answer == alone(model, Request(request.prompt, None, SamplingParams(8)))
