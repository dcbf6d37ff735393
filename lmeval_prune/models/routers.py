"""The model_args of a router, and who makes of them what decides the heads of a question's tries.

Routers are made above this room; whoever makes them registers here, by name, so that nothing of it is imported before
a router is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from lmeval_prune.models.tries import Tries

POLICIES = ("random", "random_top", "best", "oracle")  # a `router` that is no folder


@dataclass(frozen=True)
class RouterOptions:
    """Which head each try of a question is answered with.

    Attributes:
        router: folder of a fitted router, or `random`, `random_top`, `best`, `oracle`; or a `Tries`.
        router_store: outcome store: of training questions for `random_top` and `best` (and the pool of `random`), of
            the questions that are asked for `oracle`.
        router_pool: heads for `random` (as for `heads=`), `dense` among them if wanted.
        router_seed: of the random ones.
        router_size: of `random_top`'s shortlist.
        question_field: field of a task's documents that holds the question; default the one that the router or the
            store was made with.
    """

    router: Any
    router_store: str | None = None
    router_pool: str | None = None
    router_seed: int = 0
    router_size: int = 16
    question_field: str | None = None

    def tries(self, any_model: bool) -> Tries:
        """What they ask for.

        Args:
            any_model: a router of another model is accepted, if it fits.

        Raises:
            InputError: something is missing, or does not belong together.
        """
        from lmeval_prune.models.tries import Tries

        if isinstance(self.router, Tries):
            return self.router
        if not _MAKER:
            raise InputError(
                "router= needs lmeval-prune to be registered with lm-eval: unset LMEVAL_PRUNE_NO_BRIDGE, or use "
                "`lmeval-prune run` (in a program: `register()` of the plugin)"
            )
        made: Tries = resolve_name(_MAKER[-1])(self, any_model)
        return made


_MAKER: list[str] = []


def register(target: str) -> None:
    """Let `MODULE:NAME`, called with `RouterOptions` and whether any model will do, make all `Tries`."""
    _MAKER[:] = [target]
