"""Compile loops by numba, and keep the compiled code in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import config

from lmeval_prune.artefacts import cache_folder
from lmeval_prune.attributes import replaced


def njit(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function by numba; `NUMBA_CACHE_DIR` names another folder for its code.

    Numba's own place is beside the source. There it outlives an uninstall of the package, and Python then imports the
    folder that is left instead of an editable install. `options` are those of `numba.njit`, without `cache`.
    """

    def compiled(function: Any) -> Any:
        settings: Any = config
        with replaced(settings, CACHE_DIR=settings.CACHE_DIR or str(cache_folder() / "numba")):
            try:
                return numba.njit(cache=True, **options)(function)
            except RuntimeError:  # no folder can be written: each run compiles anew, for some seconds
                return numba.njit(**options)(function)

    return compiled
