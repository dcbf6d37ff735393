"""Registers our model classes and task folder with lm-eval, and SPRINT's routing with our model classes.

It knows every room by name and imports none. Safe to call any number of times.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

MODELS = {
    "pruned-hf": "lmeval_prune.models.pruned_hf:PrunedHFLM",
    "pruned-server": "lmeval_prune.models.pruned_server:PrunedServerLM",
    "pruned-server-chat": "lmeval_prune.models.pruned_server:PrunedServerChatLM",
    "athena": "lmeval_prune.models.athena:AthenaLM",
}

ROUTING = "lmeval_prune.sprint.routing:Routing"


def task_folder() -> Path:
    """Folder of our task YAMLs, in the repository or in the installed package."""
    from lmeval_prune import tasks

    return Path(tasks.__path__[0]).resolve()


def register_models() -> None:
    """Add `MODELS` to lm-eval's registry, lazily; names already there (read from entry points) stay."""
    from lm_eval.api.registry import model_registry

    from lmeval_prune.models import registered, routers

    routers.register(ROUTING)
    registered.register(f"{__name__}:{register.__name__}")
    for name, target in MODELS.items():
        if name not in model_registry:
            model_registry.register(name, target=target)


def register_tasks() -> None:
    """Make every `TaskManager` that includes lm-eval's own tasks include ours, before the user's paths."""
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
        *args: Any,
        **kwargs: Any,
    ) -> None:
        paths = (
            []
            if include_path is None
            else list(include_path)
            if isinstance(include_path, list | tuple)
            else [include_path]
        )
        ours = str(task_folder())
        if include_defaults and ours not in map(str, paths):
            paths = [ours, *paths]
        init(self, verbosity, paths or None, include_defaults, *args, **kwargs)

    with_our_tasks._lmeval_prune = True  # type: ignore[attr-defined]
    TaskManager.__init__ = with_our_tasks


def register() -> None:
    """Register everything now: for `lmeval-prune run` and for programs that run without the bridge."""
    import lm_eval.models
    import lm_eval.tasks.manager  # noqa: F401

    register_models()
    register_tasks()
