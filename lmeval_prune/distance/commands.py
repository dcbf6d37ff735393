"""`lmeval-prune distance`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmeval_prune.config import command
from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.errors import InputError, check_exists


@command("pretrained", "MODEL", takes_tasks=True)
def distance(
    pretrained: str,
    output: str = "out/distance.json",
    heads: Sequence[str] = (),
    mask: Sequence[str] = (),
    checkpoint: Sequence[str] = (),
    **options: Any,
) -> int:
    """Measure how far variants are from a dense model: KL divergence, top token, greedy answers.

    Args:
        pretrained: the dense model, as for lm_eval; `--pretrained` may be left out
        output: JSON file; the table is written beside it (.md)
        heads: a variant without these heads, e.g. L5H3+L15H0, or a mask or plan of heads (FILE.json); can be repeated
        mask: a variant under the artefact in this file, e.g. a plan; can be repeated
        checkpoint: a variant that is another checkpoint with the same tokenizer; can be repeated
    """
    settings = DistanceOptions(**options)
    if not (heads or mask or checkpoint):
        raise InputError("name what is compared with the model: --heads, --mask or --checkpoint")
    if settings.text:
        check_exists(settings.text, file=True)
    files = (Path(value).stem if value.endswith(".json") else value for value in (*heads, *mask))
    names = [*files, *map(str, checkpoint)]
    if repeated := [name for name in names if ["dense", *names].count(name) > 1]:
        raise InputError(f"two variants are called {repeated[0]!r}; name each once, files by different names")
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.distance.texts import check_models, load, read_windows, record_requests
    from lmeval_prune.distance.variants import measure, write
    from lmeval_prune.models.arguments import Arguments
    from lmeval_prune.tasks.loading import task_manager

    check_writable(output)
    arguments = [*({"heads": value} for value in heads), *({"mask": path} for path in mask)]
    pairs = zip(names, arguments, strict=False)  # the names of checkpoints come last
    variants = {name: Arguments.of(model_args).interventions for name, model_args in pairs}
    check_models(pretrained, settings, [one for several in variants.values() for one in several], checkpoint)
    lm, others = load(pretrained, settings), {name: partial(load, name, settings) for name in checkpoint}
    texts = read_windows(lm, settings) if settings.text else ()
    requests = {}
    if settings.task:
        requests = record_requests(
            lm,
            tasks=[settings.task],
            task_manager=task_manager(settings.metadata),
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            gen_kwargs=settings.gen_kwargs or None,
            apply_chat_template=settings.apply_chat_template,
            fewshot_as_multiturn=settings.apply_chat_template,  # the default of lm-eval's command
            system_instruction=settings.system_instruction,
        )
    print(write(output, pretrained, settings, measure(lm, requests, variants, others, texts)))
    return 0
