"""Calibration text is read as lm-eval reads a prompt: special tokens, chat templates, and what of the model is run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_prune import InputError, map_model
from lmeval_prune.planning.own_answers import OwnText
from lmeval_prune.pruners import attention_statistics, calibration
from lmeval_prune.pruners.base import PRUNERS, Scores, make_pruner
from lmeval_prune.pruners.calibration import encode, read_calibration
from lmeval_prune.pruners.options import TextOptions
from lmeval_prune.pruners.parts import HEADS, KINDS, parts_of
from tests.test_pruners import text_of
from tests.tiny_models import tiny

PARAGRAPHS = [f"Ann has {n} apples and buys {n + 1} more. Now she has {2 * n + 1}." for n in range(60)]
AROUND = {"bos": "<s> $A", "encoder": "<s> $A </s>", "two": "<s> </s> $A", "none": "$A"}


def tokenizer_with(tiny_folder: Path, around: str) -> Any:
    """Return a byte-level tokenizer that adds special tokens to a text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=ids)
    return tokenizer


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("\n\n".join(PARAGRAPHS))
    return str(tmp_path / "text.txt")


def windows_of(tokenizer: Any, text: str | None, task: str | None = None, **settings: Any) -> list[list[int]]:
    actual = read_calibration(tokenizer, TextOptions(text=text, task=task, **{"windows": 8, "tokens": 40, **settings}))
    return [row for batch in actual.batches for row in batch.ids.tolist()]


def stream_of(tokenizer: Any, windows: list[list[int]], before: int, after: int) -> str:
    return str(tokenizer.decode([token for row in windows for token in row[before : len(row) - after]]))


@pytest.mark.parametrize(("around", "before", "after"), [("bos", [1], []), ("encoder", [1], [2]), ("two", [1, 2], [])])
def test_each_window_has_the_special_tokens_of_a_prompt(
    tiny_folder: Path, text: str, around: str, before: list[int], after: list[int]
) -> None:
    """Between the special tokens, the text continues from window to window."""
    tokenizer = tokenizer_with(tiny_folder, AROUND[around])
    windows = windows_of(tokenizer, text)
    assert [len(row) for row in windows] == [40] * 8
    assert all(row[: len(before)] == before and row[40 - len(after) :] == after for row in windows)
    plain = stream_of(tokenizer, windows_of(AutoTokenizer.from_pretrained(tiny_folder), text), 0, 0)
    assert plain.startswith(stream_of(tokenizer, windows, len(before), len(after)))


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("around", AROUND)
def test_a_window_begins_as_lm_eval_reads_its_text(
    tiny_folder: Path, tmp_path: Path, around: str, add_bos_token: bool | None
) -> None:
    """The text is one paragraph, and its first window begins like lm-eval's prompt."""
    (tmp_path / "text.txt").write_text(" ".join(PARAGRAPHS))
    tokenizer = tokenizer_with(tiny_folder, AROUND[around])
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, add_bos_token=add_bos_token)
    for prompt in (" ".join(PARAGRAPHS), f"<s>{PARAGRAPHS[0]}"):
        assert encode(tokenizer, prompt, add_bos_token) == lm.tok_encode(prompt)
    ends = 1 if around == "encoder" and add_bos_token is not False else 0
    first = windows_of(tokenizer, str(tmp_path / "text.txt"), add_bos_token=add_bos_token)[0]
    assert first[: 40 - ends] == lm.tok_encode(f"{' '.join(PARAGRAPHS)}\n\n")[: 40 - ends]


def test_without_special_tokens_windows_are_the_text_itself(tiny_folder: Path, text: str) -> None:
    options = TextOptions(text=text, windows=8, tokens=40)
    actual = read_calibration(AutoTokenizer.from_pretrained(tiny_folder), options).record()
    assert actual["sha256"] == "86b6f6fd7c5ea7b6" and actual["tokens"] == 320
    assert actual["special_tokens"] == {"before": [], "after": []} and actual["apply_chat_template"] is False


def test_each_line_of_a_jsonl_file_is_a_text(tiny_folder: Path, text: str, tmp_path: Path) -> None:
    """A text without words is left out."""
    rows = [{"text": paragraph, "source": "book"} for paragraph in PARAGRAPHS] + [{"text": " "}, {"text": None}]
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert windows_of(tokenizer, str(lines)) == windows_of(tokenizer, text)


def task_of(folder: Path, **splits: str) -> str:
    """Return the path to the YAML of an lm-eval task with a training split; its data has the splits train and held."""
    rows = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}."} for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    splits = splits or {"training_split": "train", "test_split": "held"}
    declared = "".join(f"{name}: {split}\n" for name, split in splits.items())
    path = folder / "sums.yaml"
    path.write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs:\n  cache_dir: {folder}\n"
        f"  data_files: {{train: {folder}/rows.jsonl, held: {folder}/rows.jsonl}}\n"
        f"{declared}output_type: generate_until\n"
        'doc_to_text: "Asked: {{question}}"\ndoc_to_target: "{{answer}}"\n'
    )
    return str(path)


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return task_of(tmp_path)


TURN = "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEMPLATES = (
    "{% for m in messages %}",
    "{{ bos_token }}{% for m in messages %}",
    "{% for m in messages %}{{ bos_token }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("around", ["bos", "none"])
def test_problems_are_turns_of_a_conversation(tiny_folder: Path, sums: str, around: str, template: str) -> None:
    """As the template and lm-eval have them: a window from their middle begins with what the tokenizer itself adds.

    The token that a template begins with may be a turn's, as in SmolLM2: in the middle of a turn there is none.
    """
    tokenizer = tokenizer_with(tiny_folder, AROUND[around])
    tokenizer.chat_template = template + TURN
    windows = windows_of(tokenizer, None, sums, apply_chat_template=True, tokens=150)
    begins = [1] if "bos" in template or around == "bos" else []
    lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(tiny_folder), tokenizer=tokenizer)
    shown = tokenizer.decode(windows[0][len(begins) :])
    number = shown.split()[4]
    turns = [("user", f"Asked: What is {number} + {number}?"), ("assistant", f"It is {2 * int(number)}.")]
    rendered = lm.apply_chat_template([{"role": a, "content": b} for a, b in turns], add_generation_prompt=False)
    expected = lm.tok_encode(rendered)
    assert windows[0][: len(expected)] == expected and windows[0][: len(begins)] == begins
    added = [1] if around == "bos" else []
    assert all(row[: len(added)] == added and row[1] != 1 for row in windows)
    assert added or not re.search(r"<s>(?!user: |assistant: )", stream_of(tokenizer, windows, 0, 0))
    options = TextOptions(task=sums, windows=8, tokens=150)
    about = read_calibration(tokenizer, replace(options, apply_chat_template=True)).record()
    assert about["apply_chat_template"] is True
    assert about["special_tokens"] == {"before": ["<s>"] * len(added), "after": []}
    assert about["sha256"] != read_calibration(tokenizer, options).record()["sha256"]


@pytest.mark.parametrize(
    ("splits", "warns"),
    [
        ({"training_split": "train", "test_split": "held"}, False),
        ({"training_split": "train", "test_split": "train"}, True),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_text_of_the_split_that_its_task_scores_is_warned_of(
    tiny_folder: Path,
    tmp_path: Path,
    splits: dict[str, str],
    warns: bool,
    own: bool,
    split_warnings: Callable[[], list[str]],
) -> None:
    """Whatever the split is called; in one line, with the split and what to do."""
    path = task_of(tmp_path, **splits)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    if own:
        options = TextOptions(calibrate_on="own", task=path, windows=2, max_gen_toks=4)
        OwnText(tiny("llama"), tokenizer, options, tmp_path / "store", None)
    else:
        windows_of(tokenizer, None, path)
    lines = split_warnings()
    assert len(lines) == warns


@pytest.mark.parametrize("family", ["bart", "t5", "mt5", "mbart"])
def test_a_decoder_begins_as_lm_eval_has_it(family: str) -> None:
    """lm-eval passes labels to an encoder-decoder, and the model shifts them."""
    model: Any = tiny(family)
    text, recorded = text_of(), list[torch.Tensor]()
    embedding = model.get_decoder().get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
    list(text.run(model))
    requested, recorded[:] = list(recorded), []
    with torch.no_grad():
        for ids, real, _ in text.batches:
            model(input_ids=ids, attention_mask=real, labels=ids)
    assert len(requested) == len(recorded) and all(torch.equal(x, y) for x, y in zip(requested, recorded, strict=True))
    assert family == "mbart" or all((value[:, 0] == 0).all() for value in recorded[1::2])


# --------------------------------------------------------------------------- what of the model is run


class Called(Exception):
    """The output head ran."""


def refuse(*_: Any) -> None:
    raise Called


BY_LOSS = ("llm_pruner", "gisp")
READING = [
    name
    for name in PRUNERS
    if name not in BY_LOSS and (pruner := make_pruner(name, {})).reads_text and HEADS in pruner.kinds
]


@pytest.mark.parametrize("name", READING)
@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon", "bloom", "bart", "t5"])
def test_calibration_does_not_run_the_output_head(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No score needs its logits; the scores are bit-identical with and without it."""
    model_map, text, pruner = map_model(tiny(family)), text_of(), make_pruner(name, {})
    parts = parts_of(model_map, [kind for kind in KINDS if kind in pruner.kinds])
    try:
        pruner.check(model_map, [HEADS])
    except InputError:
        pytest.skip(f"{name} is not for {family}")

    def flat(scores: Scores) -> list[torch.Tensor]:
        return [*scores.values.values(), *(scores.means or {}).values()]

    handle = model_map.model.get_output_embeddings().register_forward_pre_hook(refuse)
    actual = flat(pruner.scores(model_map, text, parts, {}))
    with pytest.raises(Called), torch.no_grad():
        model_map.model(**next(text.inputs(model_map.model))[1])
    handle.remove()
    for module in (calibration, attention_statistics):
        monkeypatch.setattr(module, "stop_forward_at", lambda *_, **__: nullcontext())
    whole = flat(pruner.scores(model_map, text, parts, {}))
    assert len(actual) == len(whole) > 0 and all(torch.equal(x, y) for x, y in zip(actual, whole, strict=True))


def test_calibration_does_not_run_the_output_head_of_a_wrapped_model() -> None:
    peft = pytest.importorskip("peft")
    for family in ("llama", "falcon"):
        targets = ["o_proj"] if family == "llama" else ["dense"]
        model = peft.get_peft_model(tiny(family), peft.LoraConfig(target_modules=targets))
        model.get_output_embeddings().register_forward_pre_hook(refuse)
        model_map = map_model(model)
        assert make_pruner("norm_entropy", {}).scores(model_map, text_of(), parts_of(model_map), {}).values
