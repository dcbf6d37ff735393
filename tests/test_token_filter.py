"""Token Filtering against its literal reference: decisions, attention, cache, and what a user meets."""

from __future__ import annotations

import copy
import json
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache

from lmeval_prune import InputError, Plan, map_model
from lmeval_prune.checkpoints import embedded
from lmeval_prune.interventions import interventions_on
from lmeval_prune.interventions.attention_call import intercept_attention
from lmeval_prune.interventions.token_filter import FilteredCacheLayer, TokenFilter
from lmeval_prune.kernels import token_filter as ops
from lmeval_prune.kernels.token_filter_memory import COUNT, SIMILARITIES, SKIPPED, THRESHOLD, Memory, Rule
from lmeval_prune.models.pruned_hf import PrunedHFLM
from lmeval_prune.surgery.cut import cut
from lmeval_prune.tasks import data
from tests import literal_filter as literal
from tests.tiny_models import output, tiny, tokens

QUICK = {"focus": "uniform", "warmup": 3, "step_size": 0.05}
OPTIONS = [
    {"ratio": 0.3},
    {"ratio": 0.6, "similarity": "key"},
    {"ratio": 0.3, "similarity": "value"},
    {"ratio": 0.4, "similarity": "random", "seed": 1},
    {"ratio": 0.3, "fusion": "as_printed"},
    {"ratio": 0.3, "smoothing": 0.5},
    {"ratio": 0.3, "warmup": 1},
    {"ratio": 0.5, "keep_skipped_kv": True},
    {"ratio": 0.4, "focus": "tail"},
    {"ratio": 0.4, "focus": "head"},
    {"ratio": 0.5, "focus": "tail"},  # everything in the last layer
]
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "phi3",
    "gpt2",
    "deepseek_v3",
    "gpt_neox",
    "opt",
)


def quick_filter(**options: Any) -> TokenFilter:
    return TokenFilter(**{**QUICK, **options})


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    folder = embedded.resolve("smollm2-135m")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


# --------------------------------------------------------------------------- decisions


CASES = (
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 40), st.floats(0, 1), st.sampled_from(SIMILARITIES),
    st.sampled_from(["inverse_variance", "as_printed"]), st.floats(0, 0.99), st.integers(1, 12), st.floats(1e-4, 1), st.integers(0, 10**6),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.tuples(*CASES))
def test_decisions_are_the_references(case: tuple[Any, ...]) -> None:
    """Of two rows, one padded on the left; states, anchors and decisions, over two calls."""
    heads, width, length, share, similarity, fusion, smoothing, warmup, step, seed = case
    rng = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(2, heads, length, width, generator=rng, dtype=torch.float64) + 0.7 for _ in range(2))
    rule = Rule(share, similarity, fusion, step, smoothing, warmup)
    padding = length // 3
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :padding] = False
    memory, cut = Memory.fresh(2, key, value), length // 2
    parts = [
        ops.decide(key[:, :, span], value[:, :, span], valid[:, span], memory, rule)
        for span in (slice(0, cut), slice(cut, length))
    ]
    actual = torch.cat(parts, dim=1)
    for row, start in ((0, 0), (1, padding)):
        state = literal.State()
        expected = [literal.decide(key[row, :, t], value[row, :, t], state, rule) for t in range(start, length)]
        assert actual[row, start:].tolist() == expected and not actual[row, :start].any()
        assert float(memory.states[row, THRESHOLD]) == pytest.approx(state.threshold, abs=1e-9)
        assert memory.states[row, [COUNT, SKIPPED]].tolist() == [state.count, state.skipped]
        if state.anchor_key is not None and similarity != "random":  # which needs no anchors
            torch.testing.assert_close(memory.anchor_key[row], state.anchor_key, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------- attention


def reference(model: Any, token_filter: TokenFilter, stack: ExitStack, prompt: int = 0) -> None:
    """Apply the literal filter to whole texts without a cache, row by row, token by token.

    With `phase="decode"`, the first `prompt` tokens are the prompt.
    """
    model_map = map_model(model)
    labels = {layer.label for layer in token_filter.layers(model_map)}
    names = ("similarity", "fusion", "step_size", "smoothing", "warmup", "phase", "seed")
    shared = Rule(token_filter.share(model_map), **{name: getattr(token_filter, name) for name in names})

    def handle(call: Any, attend: Any) -> Any:
        if call.layer.label not in labels:
            return attend(call)
        rows, rule = [], replace(shared, layer=call.layer.index)
        for query, key, value in zip(call.query, call.key, call.value, strict=True):
            state = literal.State()
            skipped = [
                literal.decide(key[:, t], value[:, t], state, rule, in_prompt=rule.phase == "decode" and t < prompt)
                for t in range(key.shape[1])
            ]
            window = call.options.get("sliding_window")
            rows.append(
                literal.attention(
                    query, key, value, skipped, call.options["scaling"], window, token_filter.keep_skipped_kv
                )
            )
        return torch.stack(rows), None

    intercept_attention(model_map, handle, stack)


WINDOWS = [(family, {"sliding_window": 5}) for family in ("mistral", "gemma3_text", "phi3")]


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        *(("llama", {}, options) for options in OPTIONS),
        *((*case, {"ratio": 0.4, "keep_skipped_kv": keep}) for case in [*WINDOWS, ("qwen3", {})] for keep in (0, 1)),
    ],
    ids=str,
)
def test_a_filtered_model_is_the_references(family: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    model, inputs, token_filter = tiny(family, **changes), tokens(rows=2, length=24), quick_filter(**options)
    with ExitStack() as stack:
        reference(model, token_filter, stack)
        expected = output(model, inputs)
    with token_filter.applied_to(model):
        torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=1e-9)
    assert (expected - output(model, inputs)).abs().max() > 1e-3


@pytest.mark.parametrize("chunks", [[9], [4, 5]], ids=str)
@pytest.mark.parametrize("similarity", ["kv", "random"])
def test_with_phase_decode_the_prompt_is_kept_and_its_similarities_set_the_threshold(
    similarity: str, chunks: list[int]
) -> None:
    model, inputs = tiny("llama"), tokens(rows=2, length=24)
    token_filter = quick_filter(ratio=0.4, similarity=similarity, phase="decode")
    with ExitStack() as stack:
        reference(model, token_filter, stack, prompt=9)
        expected = output(model, inputs)
    cache, parts = DynamicCache(config=model.config), []
    with token_filter.applied_to(model), torch.no_grad():
        for part in inputs.split([*chunks, *[1] * 15], dim=1):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        counts = token_filter.counts
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(expected[:, :9], output(model, inputs)[:, :9], rtol=0, atol=1e-9)
    assert all(0 < count["skipped"] < count["tokens"] == 30 for count in counts.values())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks_and_single_tokens_give_what_the_whole_text_gives(options: dict[str, Any], implementation: str) -> None:
    model, inputs = tiny("llama"), tokens(rows=2, length=20)
    model.set_attn_implementation(implementation)
    sizes, rng = [], random.Random(str(options))
    while sum(sizes) < 20:
        sizes.append(min(rng.randint(1, 6), 20 - sum(sizes)))
    with quick_filter(**options).applied_to(model), torch.no_grad():
        whole = output(model, inputs)
        for chunks in (sizes, [1] * 20):
            cache, parts = DynamicCache(config=model.config), []
            for part in inputs.split(chunks, dim=1):
                parts.append(model(part, past_key_values=cache, use_cache=True).logits)
            exact = 1e-9 if implementation == "sdpa" else 1e-5  # eager attention has a softmax in float32
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=exact)
            assert cache.get_seq_length() == 20


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_decode_as_alone(family: str) -> None:
    """Three texts of different lengths in one batch: prompts at once, then token by token."""
    model, token_filter = tiny(family), quick_filter(ratio=0.4)
    texts = [tokens(1, length, seed=length)[0] for length in (16, 11, 14)]
    prompt = 10

    def run(rows: list[torch.Tensor]) -> torch.Tensor:
        longest = max(len(row) for row in rows)
        batch, mask = (
            torch.zeros(len(rows), longest, dtype=torch.long),
            torch.zeros(len(rows), longest, dtype=torch.long),
        )
        for i, row in enumerate(rows):
            batch[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
        places = (mask.cumsum(1) - 1).clamp(min=0)
        cache, logits = DynamicCache(config=model.config), []
        for span in [slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, longest))]:
            out = model(
                batch[:, span],
                attention_mask=mask[:, : span.stop],
                position_ids=places[:, span],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    with token_filter.applied_to(model), torch.no_grad():
        together = run(texts)
        for i, text in enumerate(texts):
            torch.testing.assert_close(together[i, -len(text) :], output(model, text[None])[0], rtol=0, atol=1e-9)


def test_ratio_0_is_dense_to_the_bit() -> None:
    model, inputs = tiny("llama"), tokens()
    dense = output(model, inputs)
    with TokenFilter(0.0).applied_to(model):
        assert torch.equal(output(model, inputs), dense)


def test_a_skipped_token_gets_no_bias_either() -> None:
    """GPT-2's output projection has one; a token that skips in a layer keeps its residual."""
    model, inputs = tiny("gpt2"), tokens(rows=1, length=12)
    seen: list[torch.Tensor] = []
    with TokenFilter(0.5, warmup=1, step_size=1).applied_to(model) as model_map:  # share 1: all but the first
        model_map.attention[-1].module.register_forward_hook(lambda *args: seen.append(args[-1][0]))
        output(model, inputs)
    assert seen[0][0, 0].abs().max() > 0 and not seen[0][0, 1:].any()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kinds", [("bias",), ("weight",), ("weight", "bias")])
def test_a_plan_under_a_filter_is_its_cut_checkpoint_under_it(kinds: tuple[str, ...], first: bool) -> None:
    """No hook on the output projection adds a bias to a skipped token, whichever is applied first."""
    inputs, generator = tokens(rows=2, length=60), torch.Generator().manual_seed(3)
    drawn = {"weight": (32, 32), "bias": (32,)}
    tensors = {f"L1.o_proj.{kind}": torch.randn(drawn[kind], generator=generator).double() for kind in kinds}
    plan, model = Plan("L0H1+L1H2", compensation=tensors), tiny("llama", attention_bias=True)
    with quick_filter(ratio=0.3).applied_to(small := cut(model, plan).model):
        expected = output(small, inputs)
    both = [plan, quick_filter(ratio=0.3)]
    with ExitStack() as stack:
        for intervention in both if first else both[::-1]:
            stack.enter_context(intervention.applied_to(model))
        torch.testing.assert_close(output(model, inputs), expected, rtol=0, atol=1e-9)


# --------------------------------------------------------------------------- cache


def test_the_cache_holds_what_was_not_skipped() -> None:
    model, inputs = tiny("llama"), tokens(rows=2, length=40)
    cache = DynamicCache(config=model.config)
    with quick_filter(ratio=0.5).applied_to(model), torch.no_grad():
        for part in inputs.split([20] + [1] * 20, dim=1):
            model(part, past_key_values=cache, use_cache=True)
        (live,) = interventions_on(model)
    for layer, counts in zip(cache.layers, live.counts.values(), strict=True):
        assert isinstance(layer, FilteredCacheLayer) and layer.get_seq_length() == 40
        assert int(layer.lengths.sum()) == counts["tokens"] - counts["skipped"] < 60
        assert layer.keys.shape[2] < 64


def test_a_copied_cache_goes_on() -> None:
    model, inputs = tiny("llama"), tokens(rows=1, length=16)
    with quick_filter(ratio=0.4).applied_to(model), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(inputs[:, :10], past_key_values=cache, use_cache=True)
        other = copy.deepcopy(cache)
        results = [model(inputs[:, 10:], past_key_values=source, use_cache=True).logits for source in (cache, other)]
    assert torch.equal(*results)


def test_an_exception_in_a_pass_leaves_nothing_behind() -> None:
    model, inputs = tiny("llama"), tokens(rows=1, length=12)
    cache = DynamicCache(config=model.config)

    def fail(*_: Any) -> None:
        raise RuntimeError("inside")

    with torch.no_grad():
        with pytest.raises(RuntimeError, match="inside"), quick_filter(ratio=0.4).applied_to(model):
            model(inputs, past_key_values=cache, use_cache=True)
            model.model.layers[1].self_attn.v_proj.register_forward_hook(fail)
            model(inputs, past_key_values=cache, use_cache=True)
        model.model.layers[1].self_attn.v_proj._forward_hooks.clear()
        with pytest.raises(InputError):
            model(inputs, past_key_values=cache, use_cache=True)


def test_packed_texts_are_refused() -> None:
    model, inputs = tiny("llama"), tokens(rows=1, length=12)
    places = torch.tensor([[*range(7), *range(5)]])
    with quick_filter(ratio=0.4).applied_to(model), pytest.raises(InputError):
        model(inputs, position_ids=places, use_cache=False)


@pytest.mark.parametrize("length", [5, 12])  # within the window, and beyond it
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_windows_that_only_masks_know_are_refused_where_they_end(length: int, implementation: str) -> None:
    model = tiny(
        "qwen2_moe", implementation, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2
    )
    inputs, settings = tokens(rows=1, length=length), {"do_sample": False, "eos_token_id": None}
    with quick_filter(ratio=0.4).applied_to(model):
        if length < 8:
            generated = [
                model.generate(inputs, max_new_tokens=3, use_cache=cache, **settings) for cache in (True, False)
            ]
            assert torch.equal(*generated)
        with pytest.raises(InputError):
            model.generate(inputs, max_new_tokens=6, **settings)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float64).min, -torch.inf])
def test_masks_that_add_to_scores_are_refused(hidden: float) -> None:
    model, inputs = tiny("llama", "eager"), tokens(rows=1, length=6)
    mask = torch.full((6, 6), hidden, dtype=torch.float64).triu(1)
    with quick_filter(ratio=0.4).applied_to(model):
        output(model, inputs, attention_mask=mask[None, None], use_cache=False)
        mask[3, 1] = -0.5
        with pytest.raises(InputError):
            output(model, inputs, attention_mask=mask[None, None], use_cache=False)


def test_beams_are_those_without_a_cache() -> None:
    model, inputs = tiny("llama"), tokens(rows=2, length=8)
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with quick_filter(ratio=0.4).applied_to(model):
        generated = [model.generate(inputs, use_cache=cache, **settings) for cache in (True, False)]
    assert torch.equal(*generated)
    assert not torch.equal(generated[0], model.generate(inputs, **settings))


def test_caches_of_others_are_refused() -> None:
    model, inputs = tiny("llama"), tokens()
    token_filter = quick_filter(ratio=0.4)
    full, filtered = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(inputs, past_key_values=full, use_cache=True)
        with token_filter.applied_to(model):
            with pytest.raises(InputError):
                model(inputs, past_key_values=full, use_cache=True)
            with pytest.raises(InputError, match="DynamicCache"):
                model(inputs, past_key_values=StaticCache(config=model.config, max_cache_len=32), use_cache=True)
            model(inputs, past_key_values=filtered, use_cache=True)
        with pytest.raises(InputError):
            model(inputs, past_key_values=filtered, use_cache=True)
        with quick_filter(ratio=0.2).applied_to(model):
            with pytest.raises(InputError):
                model(inputs, past_key_values=filtered, use_cache=True)
            with pytest.raises(InputError), quick_filter(ratio=0.2).applied_to(model):  # two filters
                pass


# --------------------------------------------------------------------------- threshold


def test_one_threshold_for_a_run_goes_on_from_text_to_text() -> None:
    model, inputs = tiny("llama"), tokens(rows=1, length=30)
    with quick_filter(ratio=0.4, state="run").applied_to(model):
        first, second = output(model, inputs), output(model, inputs)
    with quick_filter(ratio=0.4).applied_to(model):
        alone = output(model, inputs)
        assert torch.equal(output(model, inputs), alone)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-12)
    assert (second - first).abs().max() > 1e-3  # no warm-up, another threshold


# --------------------------------------------------------------------------- users


def test_answers_that_depend_on_their_order_are_not_stored(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        PrunedHFLM(str(tiny_folder), token_filter={"ratio": 0.2, "state": "run"}, responses=str(tmp_path / "r"))


def test_the_report_counts_what_was_skipped(tiny_folder: Path) -> None:
    model = tiny("llama")
    model_map, inputs = map_model(model), tokens(rows=2, length=50)
    token_filter = TokenFilter(0.3, tail=0.5, warmup=4, step_size=0.05)
    before = token_filter.report(model_map)["token_filter_skipped"]
    assert before["realised"] is None and before["target"] == 0.3 and before["target_by_layer"] == 0.6
    with token_filter.applied_to(model):
        output(model, inputs)
        (live,) = interventions_on(model)
        report = json.loads(json.dumps(live.report(model_map)))["token_filter_skipped"]
    assert set(report["realised_by_layer"]) == {"L1"} and report["tokens"] == 100
    assert report["realised"] == pytest.approx(report["realised_by_layer"]["L1"] / 2)
    assert 0.1 < report["realised"] < 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"ratio": 0.2}, {"ratio": 0.2, "focus": "uniform"}, {"ratio": 0.4, "similarity": "key"}], ids=str
)
def test_the_target_is_reached_on_real_text(options: dict[str, Any], smollm2: Any, shared_data: Path) -> None:
    """Within a point over 2,000 tokens, with the defaults."""
    model, tokenizer = smollm2
    rows = data.load("gsm8k", "test", shared_data).to_list()[:30]
    ids = tokenizer("\n\n".join(row["question"] + row["answer"] for row in rows), return_tensors="pt")["input_ids"][
        :, :2000
    ]
    assert ids.shape[1] == 2000
    with TokenFilter(**options).applied_to(model) as model_map, torch.no_grad():
        model.model(ids, use_cache=False)
        report = interventions_on(model)[0].report(model_map)["token_filter_skipped"]
    assert report["tokens"] == 2000 and report["realised"] == pytest.approx(report["target"], abs=0.01)
