"""Where numba keeps the code that it compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import pytest

from lmeval_prune.kernels.compilation import njit
from lmeval_prune.kernels.decode_attention import compiled as decode
from lmeval_prune.kernels.token_filter import compiled as filtering


def double(x: Any) -> Any:
    return 2 * x


def test_compiled_code_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the source would outlive the package: Python imports the folder that an uninstall leaves."""
    before = numba.config.CACHE_DIR
    monkeypatch.setenv("LMEVAL_PRUNE_CACHE", str(tmp_path / "cache"))
    function = njit()(double)
    assert function(21) == 42 and before == numba.config.CACHE_DIR
    assert [path.suffix for path in sorted((tmp_path / "cache/numba").rglob("*.nb*"))] == [".nbc", ".nbi"]


def test_code_that_cannot_be_kept_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not beside the source, and with one line for all functions."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMEVAL_PRUNE_CACHE", str(tmp_path / "file"))
    functions = [njit()(double) for _ in range(2)]
    assert [function(21) for function in functions] == [42, 42]
    assert all(function._cache.cache_path is None for function in functions)
    (message,) = caplog.messages
    assert str(tmp_path / "file") in message and "set LMEVAL_PRUNE_CACHE" in message
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file/own"))  # by NUMBA_CACHE_DIR, which counts first
    assert njit()(double)(21) == 42 and "set NUMBA_CACHE_DIR" in caplog.messages[1]


def test_all_loops_of_the_kernels_are_kept_there() -> None:
    for module in (decode, filtering):
        folder = Path(module.__file__ or "").resolve().parent
        functions = [value for value in vars(module).values() if hasattr(value, "py_func")]
        assert functions
        for function in functions:
            path = Path(function._cache.cache_path).resolve()
            assert not path.is_relative_to(folder) and path.parent.name == "numba"
