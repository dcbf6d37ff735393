"""Names of functions that rooms above this one register as `MODULE:NAME`: nothing is imported before it is used.

router     called with `Arguments`, returns the `HeadRouter` of their `router=`
process    registers us with lm-eval; another process of a run calls it, too
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import InputError

TARGETS: dict[str, str] = {}


def registered(name: str) -> Any:
    """Import what is registered under a name; `InputError` if nothing is."""
    if name not in TARGETS:
        raise InputError(
            f"{name}= needs lmeval-prune to be registered with lm-eval: unset LMEVAL_PRUNE_NO_BRIDGE, or use "
            "`lmeval-prune run` (in a program: `register()` of the plugin)"
        )
    return resolve_name(TARGETS[name])
