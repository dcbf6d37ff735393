"""Compile loops by numba, and keep the compiled code in the user's cache.

Numba's own place is beside the source. There it outlives an uninstall of the package, and Python then imports the
folder that is left instead of an editable install.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import config

from lmeval_prune.artefacts import cache_folder


def njit(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function by numba; `NUMBA_CACHE_DIR` names another folder for its code.

    Args:
        options: those of `numba.njit`, without `cache`.
    """

    def compiled(function: Any) -> Any:
        settings: Any = config
        before = settings.CACHE_DIR
        settings.CACHE_DIR = before or str(cache_folder() / "numba")
        try:
            return numba.njit(cache=True, **options)(function)
        finally:
            settings.CACHE_DIR = before

    return compiled
