"""Prompts of documents as lm-eval writes them, and the training documents of a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from lmeval_prune.artefacts import digest, without_addresses
from lmeval_prune.attributes import replaced
from lmeval_prune.errors import InputError
from lmeval_prune.tasks.loading import load_task, task_manager
from lmeval_prune.tasks.splits import scored_splits, warn_of_scored_splits


def prompt_of(task: Any, document: Mapping[str, Any], tokenizer: Any = None) -> str:
    """Return lm-eval's prompt of a training document, in the chat template of a tokenizer if given.

    The document is not among its own few-shot examples, which lm-eval sees to for documents of the test alone. They
    are drawn by the document, so that it has the same prompt in every run and process.
    """
    shots, settings = task.get_config("num_fewshot") or 0, {"gen_prefix": task.doc_to_prefix(document)}
    if tokenizer is not None:

        def as_chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            turn = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **turn))

        # the default of lm-eval's command
        settings |= {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": as_chat}
    if shots:
        task.set_fewshot_seed(exemplar_seed(document))
    sampler = getattr(task, "sampler", None)
    draw = sampler and partial(_sample_others, document, sampler.sample)
    with replaced(sampler, sample=draw) if sampler else nullcontext():
        return _of_right_choice(task, document, task.fewshot_context(document, shots, **settings))


def _sample_others(document: Mapping[str, Any], draw: Any, n: int, eval_doc: Any = None, **settings: Any) -> Any:
    """Draw few-shot examples; again, without the document, if it is among them."""
    drawn = draw(n, eval_doc=eval_doc, **settings)
    copies = [exemplar for exemplar in drawn if all(document.get(key) == value for key, value in exemplar.items())]
    return draw(n, eval_doc=copies[0], **settings) if copies else drawn


def exemplar_seed(document: Mapping[str, Any]) -> int:
    return int(digest(json.dumps(document, sort_keys=True, default=lambda value: without_addresses(str(value)))), 16)


def question_of(task: Any, document: Mapping[str, Any]) -> str:
    """Return lm-eval's prompt of a document without examples and chat template, by which other runs know it."""
    return _of_right_choice(task, document, task.fewshot_context(document, 0))


def text_of(task: Any, document: Mapping[str, Any]) -> str:
    """Return the text of a document alone; where the choices are parts of the text, that with the right one."""
    text = task.doc_to_text(document)
    return str(task.doc_to_choice(document)[text] if isinstance(text, int) else text)


def target_of(task: Any, document: Mapping[str, Any]) -> str:
    """Return the target of a document, the first of several; empty for a document without one, also without a label."""
    target = task.doc_to_target(document)
    if isinstance(target, list):
        target = target[0] if target else None
    if isinstance(target, int) and task.get_config("doc_to_choice") is not None:
        target = task.doc_to_choice(document)[target] if target >= 0 else None
    return "" if target is None else str(target)


def answer_delimiter(task: Any, document: Mapping[str, Any], is_chat: bool) -> str:
    """Return what stands between a prompt and its answer: what lm-eval puts there where it scores answers.

    A generated answer has none at the begin of a turn, or after white space.
    """
    output_type, delimiter = task.get_config("output_type"), str(task.get_config("target_delimiter"))
    if output_type == "loglikelihood":
        return ""
    if output_type == "multiple_choice" and not is_chat:
        return delimiter
    prefix = task.doc_to_prefix(document)
    begins_turn = is_chat and not prefix
    return "" if begins_turn or (prefix and prefix[-1].isspace()) else delimiter


def _of_right_choice(task: Any, document: Mapping[str, Any], context: str | list[str]) -> str:
    return context if isinstance(context, str) else context[task.doc_to_text(document)]


def exemplars_of(task: Any) -> list[Any]:
    """Return the documents from which a task draws the examples of its prompts; none without examples."""
    return list(task.fewshot_docs()) if task.get_config("num_fewshot") else []


def training_documents(name: str) -> tuple[Any, list[Any]]:
    """Return a task and the documents of its training split; `InputError` if it has none.

    A warning says so if the task scores that split.
    """
    task = load_task(task_manager({"data_split": "train"}), name)
    is_packaged = "prune_data" in (task.get_config("dataset_kwargs") or {})
    if not is_packaged and not task.has_training_docs():
        raise InputError(f"task {name} has no training split; name another task, or give --text FILE")
    documents = list(task.test_docs() if is_packaged else task.training_docs())  # `data_split` has chosen the former
    split = "train" if is_packaged else task.get_config("training_split")
    remedy = "name another task, or give --text FILE"
    warn_of_scored_splits("the calibration text", name, [split], scored_splits(task), remedy)
    return task, documents
