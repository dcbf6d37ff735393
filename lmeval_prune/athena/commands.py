"""`lmeval-prune athena train`."""

from __future__ import annotations

import logging
from typing import Any

from lmeval_prune.athena.options import TrainOptions


def train(**options: Any) -> int:
    """Train ATHENA, a host model that answers word problems by expressions."""
    wanted = TrainOptions(**options)
    from lmeval_prune.athena import training

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        model = training.train(wanted)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on beside {wanted.output}")
        return 130
    rows = [row for row in model.about["log"] if training.ACCURACY in row]
    if rows:
        best = model.about["best_epoch"]
        row = next(row for row in rows if round(row["epoch"]) == best)
        print(f"validation: {row[training.ACCURACY]:.1%} of {model.about['problems']['validation']} (epoch {best})")
    task, split = f"prune_{wanted.data}_equation", wanted.test
    print(
        f"{wanted.output}: test it with\n  lm_eval --model athena --model_args pretrained={wanted.output} "
        f'--tasks {task} --metadata \'{{"data_split": "{split}"}}\''
    )
    return 0
