"""Card of an ATHENA."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from lmeval_prune.cards.card import LIBRARY, Card, code, command_section, quoted, table
from lmeval_prune.cards.checkpoint import INHERITED, Training
from lmeval_prune.cards.origin import Origin
from lmeval_prune.training.curves import ACCURACY


def athena_card(
    name: str, about: Mapping[str, Any], removed: Mapping[str, str] | None = None, training: Training | None = None
) -> Card:
    """Return the card of an ATHENA: a solver of word problems over an encoder.

    Args:
        name: of its folder.
        about: details of its training, as in `athena.json`.
        removed: section about what was removed from the encoder, if it was pruned.
        training: what is said of a distillation.
    """
    options = about.get("options", {})
    encoder, data = str(options.get("encoder", "")), options.get("data", "")
    trained = training or Training({"Training": _training(about)}, False)
    solver = (
        f"from lmeval_prune.athena.checkpoint import read\n\n"
        f"model = read({quoted(name)})  # this folder\n"
        f"print(sum(x.numel() for x in model.parameters()))"
    )
    command = f"lm_eval --model athena --model_args pretrained={shlex.quote(name)} --tasks prune_{data}_equation"
    is_pruned = ", whose encoder was pruned and distilled" if removed else ""
    return Card(
        name,
        Origin.of(encoder),
        "finetune",
        LIBRARY,
        ["athena", "math-word-problems", *(["pruned"] if removed else []), *trained.tags],
        f"An ATHENA{is_pruned}: it solves word problems of arithmetic by building expressions from their numbers. Its "
        f"encoder began as {Origin.of(encoder).text}.",
        {
            **(removed or {}),
            "How it was made": command_section(),
            "How to load it": f"{code('python', solver)}\n\nEvaluate it:\n\n{code('bash', command)}",
            **trained.sections,
            "Limits": f"It solves problems of the kind it was trained on, and nothing else. {INHERITED}",
        },
    )


def _training(about: Mapping[str, Any]) -> str:
    """Return what is known of the training without pruning: problems, options and the best validation."""
    options, problems = about.get("options", {}), about.get("problems", {})
    shown = ("data", "test", "epochs", "batch", "encoder_rate", "head_rate", "seed")
    rows = [{"option": key, "value": options[key]} for key in shown if key in options]
    values = [row[ACCURACY] for row in about.get("log", ()) if ACCURACY in row]
    best = f" Best accuracy on the validation problems: {max(values):.3f}; on no benchmark." if values else ""
    count = f"{problems.get('train', 'Some')} training problems, {problems.get('validation', 0)} for validation.{best}"
    return f"{count}\n\n{table(rows, 'option')}" if rows else count
