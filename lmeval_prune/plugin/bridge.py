"""Register this package with lm-eval 0.4.13, which reads no entry points; imported by a `.pth` file.

A finder in `sys.meta_path` waits until the modules of `_HOOKS` are executed, calls
`lmeval_prune.plugin.registration`, and removes itself. Every Python process of the environment runs this file at its
start, so it must stay small and import nothing before lm-eval is imported.

`LMEVAL_PRUNE_NO_BRIDGE=1` switches it off; `lmeval-prune run` works without it.
"""

import os
import sys

_HOOKS = {
    "lm_eval.models": "register_models",
    "lm_eval.api.task": "register_scorers",
    "lm_eval.tasks.manager": "register_tasks",
}


class _Finder:
    """Wraps the loader of each module in `_HOOKS` once; finds no modules itself."""

    def __init__(self) -> None:
        self.waiting = dict(_HOOKS)
        self.busy = False

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self.waiting or self.busy:
            return None
        from importlib.util import find_spec

        self.busy = True  # find_spec calls this method again
        try:
            spec = find_spec(name)
        finally:
            self.busy = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            self.done(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def done(self, name: str) -> None:
        """Call the hook of a module that was executed; a failure is a warning."""
        hook = self.waiting.pop(name, None)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        if hook is None:
            return
        try:
            from lmeval_prune.plugin import registration

            getattr(registration, hook)()
        except Exception as error:
            import warnings

            warnings.warn(f"lmeval-prune could not register itself with lm-eval: {error}", stacklevel=2)


_NAMES = [(type(finder).__module__, type(finder).__name__) for finder in sys.meta_path]
if not os.environ.get("LMEVAL_PRUNE_NO_BRIDGE") and (__name__, "_Finder") not in _NAMES:
    sys.meta_path.insert(0, _Finder())
