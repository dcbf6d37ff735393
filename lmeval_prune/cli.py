"""The `lmeval-prune` command."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune import __version__
from lmeval_prune.commands import add_to
from lmeval_prune.errors import InputError, first_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake prints one line and returns 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return run(arguments[1:])
        options = _parser().parse_args(arguments)
        return int(options.function(options))
    except BrokenPipeError:  # `lmeval-prune … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (InputError, OSError) as error:
        print(f"lmeval-prune: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmeval-prune", description="Prune attention heads and measure with lm-eval.")
    parser.add_argument("--version", action="version", version=f"lmeval-prune {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    commands.add_parser("run", help="lm-eval's own command line, with us registered (needs no bridge)")

    demo_ = commands.add_parser("demo", help="dense against pruned on the embedded model, offline")
    demo_.add_argument("--heads", default="L5H3+L15H0", help="heads of the pruned run (default %(default)s)")
    demo_.add_argument(
        "--limit", type=_positive, default=50, help="GSM8K problems, where they are at hand (default %(default)s)"
    )
    demo_.add_argument("--output", default="out/demo", help="folder for the results files (default %(default)s)")
    demo_.set_defaults(function=lambda options: demo(options.heads, options.limit, options.output))

    models = commands.add_parser("models", help="embedded models: name, package, where it is")
    models.add_argument("name", nargs="?", help="print the folder of this one only, making it if need be")
    models.set_defaults(function=lambda options: list_models(options.name))

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

    add_to(commands)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def run(arguments: Sequence[str]) -> int:
    """lm-eval's command line in this process, after registering ourselves."""
    from lmeval_prune import plugin

    plugin.register()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0


def demo(heads: str, limit: int, output: str) -> int:
    """Dense (`hf`) against pruned: `prune_tiny`, and GSM8K where `LMEVAL_PRUNE_DATA` holds it; offline."""
    from lmeval_prune.models import embedded

    model = embedded.resolve("smollm2-135m")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    tasks = [["prune_tiny"]]
    folder = environment.get("LMEVAL_PRUNE_DATA")
    if folder and (Path(folder) / "gsm8k_test.jsonl").is_file():
        tasks.append(["prune_gsm8k", "--limit", str(limit), "--gen_kwargs", "max_gen_toks=256"])
    else:
        print("LMEVAL_PRUNE_DATA names no folder with gsm8k_test.jsonl: prune_tiny only")
    runs = [("hf", f"pretrained={model}"), ("pruned-hf", f"pretrained=smollm2-135m,heads={heads}")]
    for task in tasks:
        for name, arguments in runs:
            command = ["lm_eval", "--model", name, "--model_args", arguments, "--tasks", *task]
            command += ["--apply_chat_template", "--batch_size", "16", "--output_path", output]
            print("\n$ " + " ".join(command), flush=True)
            status = subprocess.run([sys.executable, "-m", *command], env=environment, check=False).returncode
            if status:
                return status
    return 0


def list_models(name: str | None = None) -> int:
    """Print the embedded models and the folders that they were converted to, now or before; or one's folder alone."""
    from lmeval_prune.models import embedded

    if name is not None:
        if name not in embedded.MODELS:
            raise InputError(f"no embedded model {name}; there are {', '.join(embedded.MODELS)}")
        print(embedded.resolve(name))
        return 0
    for name, model in embedded.MODELS.items():
        try:
            where = embedded.resolve(name)
        except InputError as error:
            where = str(error)
        print(f"{name}\n  {model.description}\n  pruned-hf: pretrained={name}; other models of lm-eval: {where}")
    return 0


def _skeleton(pretrained: str, revision: str | None) -> Any:
    """The model without weights: enough to read its heads."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from lmeval_prune.models import embedded

    try:
        config = AutoConfig.from_pretrained(embedded.resolve(pretrained), revision=revision)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the model {pretrained}: {first_line(error)}") from error
    kinds = (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModel)
    kind = next((k for k in kinds if type(config) in k._model_mapping), None)
    if kind is None:
        raise InputError(f"{pretrained} is a {config.model_type} model, which transformers cannot build")
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
