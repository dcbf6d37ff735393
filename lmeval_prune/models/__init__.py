"""lm-eval's model classes of this package, and functions that higher layers register for them as `MODULE:NAME`.

router     called with `Arguments`, returns the `HeadRouter` for their `router=`
process    registers this package with lm-eval in another process of a run
"""

from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import InputError

TARGETS: dict[str, str] = {}


def load_registered(name: str) -> Any:
    if name not in TARGETS:
        raise InputError(
            f"{name}= needs lmeval-prune to be registered with lm-eval: unset LMEVAL_PRUNE_NO_BRIDGE, or use "
            "`lmeval-prune run` (in a program: `register()` of the plugin)"
        )
    return resolve_name(TARGETS[name])
