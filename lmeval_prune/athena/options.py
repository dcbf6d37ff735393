"""Options of `athena train`. Imports nothing slow, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from lmeval_prune.checkpoints.embedded import ENCODER
from lmeval_prune.config import Count, LearningRate, Natural, Seed, Settings, ShareBelowOne


@dataclass(frozen=True)
class TrainOptions(Settings):
    """Options of ATHENA's training.

    Attributes:
        output: folder of the model; the same command resumes an interrupted training
        data: data set with equations: asdiv_a or math23k
        test: test split; its questions are excluded from training
        train: splits to train on (default: the other folds)
        validation: share of the training problems that chooses the best epoch; 0: the last epoch
        limit: number of training problems, drawn by the seed (default: all)
        encoder: model of the BERT family: hub name, folder, or embedded model
        epochs: largest number of epochs
        patience: epochs without a better validation accuracy before training stops; 0: no early stopping
        batch: problems per step
        encoder_rate: learning rate of the encoder
        head_rate: learning rate of all other weights
        dropout: dropout of all modules except the encoder
        max_kept: largest number of kept thoughts per problem
        seed: seed of weights, order, dropout and validation split
        data_dir: folder with the data file (default LMEVAL_PRUNE_DATA, else the public source)
    """

    output: str
    data: str = "asdiv_a"
    test: str = "fold0"
    train: tuple[str, ...] = ()
    validation: ShareBelowOne = 0.1
    limit: Annotated[int, Ge(2)] | None = None
    encoder: str = ENCODER
    epochs: Count = 12
    patience: Natural = 0
    batch: Count = 8
    encoder_rate: LearningRate = 1e-4
    head_rate: LearningRate = 3e-4
    dropout: ShareBelowOne = 0.2
    max_kept: Count = 60
    seed: Seed = 0
    data_dir: str | None = None
