"""`lmeval-prune distance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.distance.options import DistanceOptions
from lmeval_prune.errors import InputError, check_exists
from lmeval_prune.options import first_argument


@first_argument("pretrained")
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
    names = [*map(_name, heads), *map(_name, mask), *map(str, checkpoint)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two variants are called {repeated[0]!r}; name each once, files by different names")
    from lmeval_prune.artefacts import check_writable
    from lmeval_prune.distance.report import write
    from lmeval_prune.distance.texts import DistanceLM, check_models, texts_of
    from lmeval_prune.distance.variants import measure
    from lmeval_prune.models.arguments import Arguments

    check_writable(output)
    values = [*(("heads", each) for each in heads), *(("mask", each) for each in mask)]
    variants = {}
    for name, (argument, value) in zip(names, values, strict=False):
        (variants[name],) = Arguments.of({argument: value}).interventions
    check_models(pretrained, settings, list(variants.values()), checkpoint)
    lm = DistanceLM(pretrained, settings)
    distances = measure(lm, settings, variants, checkpoint, texts_of(lm, settings))
    print(write(output, pretrained, settings, distances))
    return 0


def _name(value: str) -> str:
    """Return the name of a variant: the stem of a file, or the heads."""
    return Path(value).stem if value.endswith(".json") else value
