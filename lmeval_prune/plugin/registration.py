"""Register the package's models and tasks with lm-eval, and SPRINT's router with the models.

Modules are registered by name and imported on first use. Registration can be repeated.
"""

from __future__ import annotations

import functools
from typing import Any

MODELS = {
    "pruned-hf": "lmeval_prune.models.pruned_hf:PrunedHFLM",
    "pruned-server": "lmeval_prune.models.pruned_server:PrunedServerLM",
    "pruned-server-chat": "lmeval_prune.models.pruned_server:PrunedServerChatLM",
    "athena": "lmeval_prune.models.athena:AthenaLM",
}

ROUTING = "lmeval_prune.sprint.routing:Routing"


def register_models() -> None:
    """Add `MODELS` to lm-eval's registry; names that lm-eval read from entry points stay."""
    from lm_eval.api.registry import model_registry

    from lmeval_prune.models.registered import TARGETS

    TARGETS.update(router=ROUTING, process=f"{__name__}:{register.__name__}")
    for name, target in MODELS.items():
        if name not in model_registry:
            model_registry.register(name, target=target)


def register_tasks() -> None:
    """Add the package's tasks to every `TaskManager` with lm-eval's tasks; lm-eval's index is then read on demand."""
    from lm_eval.tasks.manager import TaskManager

    if hasattr(TaskManager.__init__, "_lmeval_prune"):
        return
    init = TaskManager.__init__

    @functools.wraps(init)
    def with_our_tasks(
        self: Any,
        verbosity: str | None = None,
        include_path: Any = None,
        include_defaults: bool = True,
        metadata: Any = None,
    ) -> None:
        from lmeval_prune.tasks.manager import LazyTaskManager, with_our_folder

        if include_defaults and type(self) is TaskManager:
            self.__class__ = LazyTaskManager
            self.__init__(verbosity, include_path, metadata)
        else:
            paths = with_our_folder(include_path) if include_defaults else include_path
            init(self, verbosity, paths, include_defaults, metadata)

    with_our_tasks._lmeval_prune = True  # type: ignore[attr-defined]
    TaskManager.__init__ = with_our_tasks


def register() -> None:
    """Register models and tasks now, for `lmeval-prune run` and for programs without the bridge."""
    import lm_eval.models
    import lm_eval.tasks.manager  # noqa: F401

    register_models()
    register_tasks()
