"""Register the package's models, scorers and tasks with lm-eval, and SPRINT's router with the models.

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
    "resumable": "lmeval_prune.models.resumable:ResumableLM",
}

FILTERS = {"prune_answer": "lmeval_prune.tasks.scorers:AnswerFilter"}
METRICS = {
    "prune_equal": "lmeval_prune.tasks.scorers:equal",
    "prune_pass": "lmeval_prune.tasks.scorers:pass_at_ks",
    "prune_maj": "lmeval_prune.tasks.scorers:majority_at_n",
}
AGGREGATIONS = {f"prune_pass_at_{k}": f"lmeval_prune.tasks.scorers:pass_at_{k}" for k in (1, 2, 4, 8, 16, 32, 64)}

ROUTING = "lmeval_prune.sprint.routing:Routing"


def register_models() -> None:
    """Add `MODELS` to lm-eval's registry; names that lm-eval read from entry points stay."""
    from lm_eval.api.registry import model_registry

    from lmeval_prune.models import TARGETS

    TARGETS.update(router=ROUTING, process=f"{__name__}:{register.__name__}")
    _register(model_registry, MODELS)


def register_scorers() -> None:
    """Add `FILTERS`, `METRICS` and `AGGREGATIONS` to lm-eval's registries, after lm-eval's own."""
    from lm_eval.api import registry

    _register(registry.filter_registry, FILTERS)
    _register(registry.aggregation_registry, AGGREGATIONS)
    _register(registry.metric_registry, METRICS)
    _register(registry.metric_agg_registry, dict.fromkeys(METRICS, "lm_eval.api.metrics:mean"))
    _register(registry.higher_is_better_registry, dict.fromkeys(METRICS, True))


def _register(registry: Any, targets: dict[str, Any]) -> None:
    for name, target in targets.items():
        if name not in registry:
            registry.register(name, target=target)


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
    """Register everything now, for `lmeval-prune run` and for programs without the bridge."""
    import lm_eval.models
    import lm_eval.tasks.manager  # noqa: F401

    register_models()
    register_scorers()
    register_tasks()
