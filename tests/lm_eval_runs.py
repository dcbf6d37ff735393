"""Runs of lm-eval with tiny tasks, written by lm-eval's own writer, for tests of `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TASKS = {
    "tiny_words": """
task: tiny_words
custom_dataset: !function functions.problems
output_type: generate_until
test_split: test
fewshot_split: test
doc_to_text: "{{question}} "
doc_to_target: "{{target}}"
process_results: !function functions.words
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 6, do_sample: true, temperature: 1.0}
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: start, filter: [{function: regex, regex_pattern: "(.)"}, {function: take_first}]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
  - {metric: length, aggregation: mean, higher_is_better: false}
""",
    "tiny_more": """
task: tiny_more
custom_dataset: !function functions.problems
output_type: generate_until
test_split: test
doc_to_text: "More: {{question}} "
doc_to_target: "{{target}}"
process_results: !function functions.words
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 6, do_sample: true, temperature: 1.0}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "tiny_colours": """
task: tiny_colours
custom_dataset: !function functions.problems
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["red", "blue", "green"]
doc_to_target: "{{colour}}"
metric_list:
  - {metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm}
""",
    "tiny_texts": """
task: tiny_texts
custom_dataset: !function functions.texts
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
""",
    "tiny_last": """
task: tiny_last
custom_dataset: !function functions.texts
output_type: loglikelihood
test_split: test
doc_to_text: "{{text}}"
doc_to_target: " end"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
""",
    "tiny_group": """
group: tiny_group
task: [tiny_words, tiny_more]
aggregate_metric_list: [{metric: exact_match, filter_list: [whole, none]}]
""",
}
FUNCTIONS = """
from datasets import Dataset


def problems(**_):
    rows = [{"question": f"{i} and {i * i % 7}?", "target": str(i % 5), "colour": i % 3, "level": 1 + i % 4} for i in range(40)]
    return {"test": Dataset.from_list(rows)}


def texts(**_):
    words = "the river ran over old stones while nobody looked at it for long".split()
    return {"test": Dataset.from_list([{"text": " ".join(words[j % 13] for j in range(i, 2 * i + 3))} for i in range(20)])}


def words(doc, results):
    answer = results[0]
    return {"exact_match": float(len(answer.encode()) % 2), "length": float(len(answer))}
"""


def write_tasks(folder: Path) -> Path:
    """Write the tasks as a user of lm-eval has them, for `--include_path`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.lstrip())
    (folder / "functions.py").write_text(FUNCTIONS.lstrip())
    return folder


def evaluate(
    tasks: Path, names: list[str], output: Path, pretrained: str | Path, seed: int = 1, **settings: Any
) -> dict[str, Any]:
    """Evaluate as `lm_eval --log_samples --output_path OUTPUT --seed SEED` does, and return the results."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    tracker = EvaluationTracker(output_path=str(output))
    arguments = {
        "batch_size": 16,
        "device": "cpu",
        "bootstrap_iters": 0,
        "model": "hf",
        "model_args": f"pretrained={pretrained}",
        **settings,
    }
    seeds = {"random_seed": seed, "numpy_random_seed": seed, "torch_random_seed": seed, "fewshot_random_seed": seed}
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = simple_evaluate(
        tasks=names, log_samples=True, evaluation_tracker=tracker, task_manager=manager, **seeds, **arguments
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return results
