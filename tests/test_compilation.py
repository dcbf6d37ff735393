"""Where numba keeps the code that it compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest

from lmeval_prune.kernels import decode_attention as decode
from lmeval_prune.kernels import token_filter_compiled as filtering
from lmeval_prune.kernels.compilation import njit


def double(x: Any) -> Any:
    return 2 * x


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the source would outlive the package: Python imports the folder that an uninstall leaves."""
    before = numba.config.CACHE_DIR
    monkeypatch.setenv("LMEVAL_PRUNE_CACHE", str(tmp_path / "cache"))
    function = njit()(double)
    assert function(21) == 42 and before == numba.config.CACHE_DIR
    assert [path.suffix for path in sorted((tmp_path / "cache/numba").rglob("*.nb*"))] == [".nbc", ".nbi"]


def test_all_loops_of_the_kernels_are_kept_there() -> None:
    for module in (decode, filtering):
        folder = Path(module.__file__ or "").resolve().parent
        functions = [value for value in vars(module).values() if hasattr(value, "py_func")]
        assert functions
        for function in functions:
            path = Path(function._cache.cache_path).resolve()
            assert not path.is_relative_to(folder) and path.parent.name == "numba"
