"""`lmeval-prune athena train`."""

from __future__ import annotations

import logging
from typing import Any

from lmeval_prune.athena.options import TrainOptions
from lmeval_prune.config import command


@command(resumes=True)
def train(**options: Any) -> int:
    """Train ATHENA, a model that answers word problems with expressions."""
    settings = TrainOptions(**options)
    from lmeval_prune.athena import training
    from lmeval_prune.training.trainer import ACCURACY

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = training.train(settings)
    rows = [row for row in model.about["log"] if ACCURACY in row]
    if rows:
        best = model.about["best_epoch"]
        row = next(row for row in rows if round(row["epoch"]) == best)
        print(f"validation: {row[ACCURACY]:.1%} of {model.about['problems']['validation']} (epoch {best})")
    print(
        f"{settings.output}: test it with\n  lm_eval --model athena --model_args pretrained={settings.output} "
        f'--tasks prune_{settings.data}_equation --metadata \'{{"data_split": "{settings.test}"}}\''
    )
    return 0
