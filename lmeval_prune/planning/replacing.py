"""Refuse to replace plans, scores and checkpoints that `prune` and `importance` made with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmeval_prune.artefacts import content_digest, read_artefact
from lmeval_prune.checkpoints.identity import checkpoint_identity, configuration_digests
from lmeval_prune.checkpoints.pruned import is_trained, read_manifest
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import SCHEMA_VERSION
from lmeval_prune.interventions.plan import Plan, PlanContents
from lmeval_prune.pruners.base import Pruner
from lmeval_prune.pruners.options import PruneSettings, TextOptions
from lmeval_prune.training.resuming import check_same_settings, result_settings

RECORD = "command"  # the settings, in the provenance of a plan


def command_settings(
    options: PruneSettings, pretrained: str, revision: str | None, pruners: tuple[Pruner, Pruner], scores: str | None
) -> dict[str, Any]:
    """Return what a plan of `prune` depends on, as JSON; of the model and other files, digests of their contents.

    `pruners` are those of heads and of channels, `scores` a file of stored scores.
    """
    files = {"text": options.text, "scores": scores}
    return {
        **_model_settings(pretrained, revision),
        "method": pruners[0].identity,
        "ffn_method": pruners[1].identity,
        **result_settings(options),
        **{name: content_digest(path) if path else None for name, path in files.items()},
    }


def scoring_settings(
    options: TextOptions, pretrained: str, revision: str | None, pruner: Pruner, channels: bool
) -> dict[str, Any]:
    """Return what the scores of `importance` depend on, as JSON; of the model and the text, digests."""
    return {
        **_model_settings(pretrained, revision),
        "method": pruner.identity,
        "scores": "heads and channels" if channels else "heads",
        **result_settings(options),
        "text": content_digest(options.text) if options.text else None,
    }


def _model_settings(pretrained: str, revision: str | None) -> dict[str, Any]:
    return {
        "pretrained": checkpoint_identity(pretrained, revision),
        "pretrained_files": configuration_digests(pretrained),
    }


def check_replaceable(output: str, command: str, settings: Mapping[str, Any], cut: str | None = None) -> None:
    """Raise `InputError` if a plan, scores or a checkpoint stand at a path that a command did not make so."""
    made: dict[str, Mapping[str, Any]] = {}
    if Path(output).exists():
        try:
            made[output] = read_artefact(output, Plan.schema(), SCHEMA_VERSION, PlanContents)[0].get("made", {})
        except InputError:  # no plan
            made[output] = {}
    if cut and (manifest := read_manifest(cut)):
        made[cut] = {} if is_trained(manifest) else manifest["stages"][-1]["plan"].get("made", {})
    for path, provenance in made.items():
        maker = "prune" if "removes" in provenance else "importance" if "method" in provenance else None
        if maker != command or RECORD not in provenance:
            raise InputError(
                f"{path} was not made by `{command}`, and would be lost; name another output, or delete it"
            )
        check_same_settings(settings, provenance[RECORD], Path(path))
