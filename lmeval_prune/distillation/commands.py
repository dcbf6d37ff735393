"""`lmeval-prune distill`."""

from __future__ import annotations

import logging
import shlex
from typing import Any

from lmeval_prune.config import command
from lmeval_prune.distillation.options import DistillOptions


@command(resumes=True, takes_tasks=True)
def distill(**options: Any) -> int:
    """Prune and distil a model stage by stage; the model before each stage is its teacher."""
    settings = DistillOptions(**options)
    from lmeval_prune.architectures.names import compact_names
    from lmeval_prune.comparison.distance import cells
    from lmeval_prune.distillation import recursion
    from lmeval_prune.reporting.quiet import silence_libraries
    from lmeval_prune.tasks.loading import included_folder

    logging.getLogger("transformers").setLevel(logging.ERROR)
    silence_libraries()
    note = recursion.distill(settings)
    if not recursion.this_process().is_main_process:
        return 0
    for stage in note["stages"]:
        counts = ((stage["removed"].get(name, 0), name) for name in ("heads", "channels", "blocks"))
        summary = ", ".join(f"{count} {name}" for count, name in counts if count) or "nothing"
        summary += f" ({compact_names(names)})" if (names := stage["removed_blocks"]) else ""
        left = f"{stage['parameters'] / 1e6:.2f} million parameters are left"
        print(f"stage {stage['stage']}: {summary} removed; {left}")
        if distance := stage.get("distance"):
            kld, same = (cells(distance)[name] for name in ("mean KLD", "same top p (%)"))
            size = f"{distance['tokens']} tokens of {distance['documents']} texts"
            print(f"  from {settings.pretrained}: mean KLD {kld}, same top p {same}%, on {size}")
    splits = note["material"]["splits"]
    if "data" in splits:
        task, model = f"prune_{splits['data']}_equation", "athena"
    else:
        task, model = splits["task"] or "TASK", "pruned-hf"
    folder = f" --include_path {shlex.quote(path)}" if (path := included_folder()) else ""
    metadata = f' --metadata \'{{"data_split": "{splits["test"]}"}}\'' if splits["test"] else ""
    chat = " --apply_chat_template" if settings.chat else ""
    print(
        f"{settings.output}: test it with\n  lm_eval --model {model} --model_args pretrained={settings.output} "
        f"--tasks {task}{folder}{metadata}{chat}"
    )
    return 0
