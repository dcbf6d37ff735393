"""The `lmeval-prune` command."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lmeval_prune import __version__
from lmeval_prune.errors import InputError
from lmeval_prune.sprint.commands import add_to


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
    from lmeval_prune.plugin import registration

    registration.register()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return 0


def demo(heads: str, limit: int, output: str) -> int:
    """Dense (`hf`) against pruned: `prune_tiny`, and GSM8K where `LMEVAL_PRUNE_DATA` holds it; offline."""
    from lmeval_prune.checkpoints import embedded

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
    from lmeval_prune.checkpoints import embedded

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


def write_mask(options: argparse.Namespace) -> int:
    """Write a mask artefact for a model, after checking it without weights."""
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints import embedded
    from lmeval_prune.checkpoints.skeleton import skeleton_of
    from lmeval_prune.interventions import HeadMask

    mask = HeadMask(options.heads, allow_empty_layer=options.allow_empty_layer)
    bare = skeleton_of(options.pretrained, options.revision)
    heads = mask.heads_of(map_model(bare))
    check_writable(options.output)
    model = type(bare).from_pretrained(embedded.resolve(options.pretrained), revision=options.revision, dtype="auto")
    model_map = map_model(model)
    mask.save(options.output, model_map)
    print(f"{options.output}: {len(heads)} of {model_map.total_heads} heads of {model_map.name}")
    return 0


def list_heads(pretrained: str, revision: str | None) -> int:
    """Print a line a layer."""
    from lmeval_prune.architectures import map_model
    from lmeval_prune.checkpoints.skeleton import skeleton_of

    model_map = map_model(skeleton_of(pretrained, revision))
    channels = model_map.channels()
    for layer in model_map.attention:
        sizes = f"{layer.heads} heads, {layer.kv_heads} key-value heads, head_dim {layer.head_dim}"
        if layer.label in channels:
            sizes += f", {channels[layer.label]} channels"
        print(f"{layer.label:>12}  {sizes}  {layer.name}")
    found = f"{model_map.total_heads} heads in {len(model_map.attention)} attention layers"
    print(f"{found} of {model_map.name} ({model_map.model_type})")
    return 0
