"""Answer extraction and comparison, used by tasks, sweeps and reports alike."""

from lmeval_prune.scoring.extract import Extraction, extract
from lmeval_prune.scoring.numbers import numbers_equal, readings

__all__ = ["Extraction", "extract", "numbers_equal", "readings"]
