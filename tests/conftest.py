"""Tests run on one thread, offline, and keep everything they write in temporary folders."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRITON_INTERPRET"] = "1"
os.environ.pop("LMEVAL_PRUNE_DATA", None)

import pytest
import torch

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real problems beside the checkout; CI always has them."""
    if not SHARED.is_dir():
        pytest.skip(f"no data folder at {SHARED}")
    return SHARED
