"""Answer extraction and comparison, used by tasks, sweeps and reports alike."""

from lmeval_prune.scoring.expressions import complexity, evaluate, has_operator, is_division, reduced_fraction
from lmeval_prune.scoring.formulas import FormulaReader
from lmeval_prune.scoring.prose import numbers_equal, readings
from lmeval_prune.scoring.readers import ExpressionReader, MathematicsReader, NumberReader
from lmeval_prune.scoring.statements import MARKED, Extraction, Reader, extract
from lmeval_prune.scoring.text import TextReader

__all__ = [
    "MARKED", "ExpressionReader", "Extraction", "FormulaReader", "MathematicsReader", "NumberReader", "Reader",
    "TextReader", "complexity", "evaluate", "extract", "has_operator", "is_division", "numbers_equal", "readings",
    "reduced_fraction",
]  # fmt: skip
