"""Run the setting of a paper: `python configs/reproduce/run.py flap`, for the names of the YAML files beside this one.

The paper's model, texts and tasks come from the Hub; a GPU is needed. With `--trial` the same commands run on the
embedded model and packaged texts, in minutes on a CPU (`dpkd`: with ASDiv in LMEVAL_PRUNE_DATA): this shows
that they run, and says nothing of the paper. Files are written to `out/reproduce`.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from datasets import load_dataset
from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
TEXTS = {  # file: data set, configuration, rows
    "wikitext2.jsonl": ("Salesforce/wikitext", "wikitext-2-raw-v1", None),
    "c4.jsonl": ("allenai/c4", "en", 10_000),
    "bookcorpus.jsonl": ("rojagtap/bookcorpus", None, 20_000),
}
SWEEP = "--model_args pretrained=smollm2-135m --tasks prune_tiny_endings --layers 5 --limit 40"
SWEEP += " --gen_kwargs max_gen_toks=4 --apply_chat_template false"
STEPS = {  # commands of the papers that are not a grid, and what a trial adds to them
    "sprint": [
        ("sweep", SWEEP),
        ("sweep --split test --limit 500 --output sprint/test", SWEEP),
        ("fit", "--p 4 --lambda 0.001"),
        ("report sprint", "--n 4 --by task"),
    ],
    "dpkd": [
        ("athena train", "--encoder all-minilm-l6-v2 --epochs 1 --limit 40"),
        ("distill", "--epochs 1 --limit 40"),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(path.stem for path in HERE.glob("*.yaml")))
    parser.add_argument("--trial", action="store_true", help="the embedded model and packaged texts")
    options = parser.parse_args()
    folder = Path("out/reproduce/trial" if options.trial else "out/reproduce")
    folder.mkdir(parents=True, exist_ok=True)
    if options.name not in STEPS:
        return grid(options.name, folder, options.trial)
    for command, small in STEPS[options.name]:
        recipe = ["--config", str(HERE / f"{options.name}.yaml")]
        run(folder, *command.split(), *recipe, *(small.split() if options.trial else []))


def grid(name: str, folder: Path, trial: bool) -> None:
    settings = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    pretrained = settings["model"]["pretrained"]
    if trial:
        settings |= {"model": {"pretrained": "smollm2-135m"}, "tasks": ["prune_tiny_cloze"], "limit": 20}
    for variant in settings["variants"].values():
        if pruning := variant.get("prepare", {}).get("prune"):
            text = folder / pruning["text"]
            if trial:
                del pruning["text"]
                pruning |= {"task": "prune_tiny_cloze", "windows": 8, "tokens": 64}
            elif not text.exists():
                dataset, configuration, rows = TEXTS[text.name]
                texts = load_dataset(dataset, configuration, split="train", streaming=True)
                lines = (json.dumps({"text": row["text"]}) for row in texts if row["text"].strip())
                text.write_text("\n".join(itertools.islice(lines, rows)), encoding="utf-8")
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    run(folder, "grid", "run", f"{name}.yaml", "--output", name)
    run(folder, "grid", "compare", name)
    if not trial:
        print_token_perplexities(folder / name, AutoTokenizer.from_pretrained(pretrained))


def run(folder: Path, *words: str) -> None:
    print("lmeval-prune", *words, flush=True)
    subprocess.run([sys.executable, "-m", "lmeval_prune", *words], cwd=folder, check=True)


def print_token_perplexities(folder: Path, tokenizer: Any) -> None:
    """Papers give perplexity by token, lm-eval by word."""
    for cell in sorted(folder.glob("cells/*/cell.json")):
        for path in cell.parent.glob("samples_*wikitext*.jsonl"):
            samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            tokens = sum(len(tokenizer(sample["target"], add_special_tokens=False)["input_ids"]) for sample in samples)
            loss = -sum(sample["word_perplexity"][0] for sample in samples)
            print(f"{json.loads(cell.read_text())['variant']}: perplexity {math.exp(loss / tokens):.2f} by token")


if __name__ == "__main__":
    main()
