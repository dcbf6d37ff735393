"""What can be set of training. Imports nothing heavy, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass

from lmeval_prune.checkpoints.embedded import ENCODER
from lmeval_prune.errors import InputError


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, and on what.

    Attributes:
        output: folder of the model; an interrupted training goes on beside it
        data: data set with equations: asdiv_a or math23k
        test: split that is kept for the test; nothing of it is looked at
        train: splits to train on (default: the other folds)
        validation: share of the training problems that chooses the best epoch; 0 takes the last one
        limit: so many training problems, drawn by the seed
        encoder: of the BERT family: hub name, folder, or embedded model
        epochs: at most so many passes over the training problems
        patience: stop after so many epochs without a better validation accuracy; 0 never
        batch: problems a step
        accumulate: steps that make one update
        encoder_rate: learning rate of the encoder
        head_rate: learning rate of all else
        decay: weight decay
        warmup: share of the updates in which the rates rise
        clip: largest norm of a gradient
        dropout: of all but the encoder
        max_kept: thoughts of a problem at most
        seed: of weights, order, dropout and validation split
        data_dir: folder with the data file (default LMEVAL_PRUNE_DATA, else the public source)
    """

    output: str
    data: str = "asdiv_a"
    test: str = "fold0"
    train: tuple[str, ...] = ()
    validation: float = 0.1
    limit: int | None = None
    encoder: str = ENCODER
    epochs: int = 12
    patience: int = 0
    batch: int = 8
    accumulate: int = 1
    encoder_rate: float = 1e-4
    head_rate: float = 3e-4
    decay: float = 0.01
    warmup: float = 0.06
    clip: float = 5.0
    dropout: float = 0.2
    max_kept: int = 60
    seed: int = 0
    data_dir: str | None = None

    def __post_init__(self) -> None:
        wrong = {
            "validation must be at least 0 and below 1": not 0 <= self.validation < 1,
            "dropout must be at least 0 and below 1": not 0 <= self.dropout < 1,
            "warmup must be at least 0 and below 1": not 0 <= self.warmup < 1,
            "epochs, batch, accumulate and max_kept must be at least 1": min(
                self.epochs, self.batch, self.accumulate, self.max_kept
            )
            < 1,
            "seed must be at least 0 and below 2³¹": not 0 <= self.seed < 2**31,
            "limit must be at least 2": self.limit is not None and self.limit < 2,
            "the learning rates and clip must be above 0": min(self.encoder_rate, self.head_rate, self.clip) <= 0,
            "decay and patience must not be negative": min(self.decay, self.patience) < 0,
            "patience needs a validation split; give validation": bool(self.patience) and self.validation == 0,
            f"the training split {self.test} is the test split; leave it out of train": self.test in self.train,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise InputError(message)
