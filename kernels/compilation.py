"""Compile loops by numba, and keep the compiled code in the user's cache.

Numba's own place is beside the source. There it outlives an uninstall of the package, and Python then imports the
folder that is left instead of an editable install.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba
from numba.core import config

from lmeval_prune.artefacts import cache_folder

logger = logging.getLogger(__name__)


def njit(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function by numba; `NUMBA_CACHE_DIR` names another folder for its code.

    If the folder cannot be written, the code is not kept: numba would use its own place instead.

    Args:
        options: those of `numba.njit`, without `cache`.
    """

    def compiled(function: Any) -> Any:
        settings: Any = config
        before = settings.CACHE_DIR
        settings.CACHE_DIR = before or str(cache_folder() / "numba")
        try:
            variable = "NUMBA_CACHE_DIR" if before else "LMEVAL_PRUNE_CACHE"
            return numba.njit(cache=_is_writable(Path(settings.CACHE_DIR), variable), **options)(function)
        finally:
            settings.CACHE_DIR = before

    return compiled


@cache
def _is_writable(folder: Path, variable: str) -> bool:
    """Return whether files can be created in a folder; if not, warn once, and name the variable that sets it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return True
    except OSError as error:
        logger.warning(
            "each run compiles its loops anew, for some seconds: %s cannot be written (%s); set %s",
            folder,
            error.strerror,
            variable,
        )
        return False
