"""Mathematical equivalence by math-verify, in worker processes that can be killed.

SymPy can hang or eat memory on what a model writes. Each comparison has a time limit; a worker that passes
it, or dies, is replaced, and the item counts as wrong and is reported as `timeout` or `crash`.

The pool is pebble's, its processes are loky's: multiprocessing's `spawn` and `forkserver` first run the user's
main script again in every worker, and what is forked inherits the locks of a program with threads.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import math
import os
import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from lmeval_prune.errors import InputError

if TYPE_CHECKING:
    from pebble import ProcessPool

Verdict = Literal["equal", "different", "timeout", "crash"]
START_SECONDS = 120.0
STARTS = 2  # how often a pool that answers nothing is started
MAX_WORKERS = 8  # of the shared pool; each is a Python process with SymPy
_FORMULA = re.compile(r"(?:\\[^$()\[\]]|[^\\$])+")  # what stands in one pair of dollar signs, whole
MEMORY = 4 * 2**30  # bytes of address space; a LaTeX bomb ends in MemoryError, not in a dead machine


class Verifier:
    """A pool of worker processes, started by the first comparison; each comparison has a limit of `seconds`."""

    def __init__(self, workers: int = 2, seconds: float = 5.0) -> None:
        require_math_verify()
        self.workers = workers
        self.seconds = seconds
        self._pool: ProcessPool | None = None

    def verify_many(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Compare (gold, answer) pairs of LaTeX without dollar signs on all workers; verdicts are in their order."""
        verdicts = self._verify_many(pairs)
        crashed = [i for i, verdict in enumerate(verdicts) if verdict == "crash"]
        if crashed:  # the worker may have been killed for another's sake
            for i, verdict in zip(crashed, self._verify_many([pairs[i] for i in crashed]), strict=True):
                verdicts[i] = verdict
        return verdicts

    def _verify_many(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        failures = 0
        while len(verdicts) < len(pairs):
            try:
                for verdict in self._ask(pairs[len(verdicts) :]):
                    verdicts.append(verdict)
                    failures = 0
            except BaseException as error:  # a broken pool raises many kinds; what it has not answered is asked again
                self.close()
                failures += 1
                if failures == STARTS or not isinstance(error, Exception):  # an interrupt
                    raise
        return verdicts

    def _ask(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Verdict]:
        """Yield verdicts, until the pool breaks."""
        from loky.backend.context import LokyContext
        from pebble import ProcessExpired, ProcessPool

        if self._pool is None:
            self._pool = ProcessPool(self.workers, initializer=begin, context=LokyContext())
        seconds = self.seconds
        for future in [self._pool.schedule(_equal, (*pair, seconds), timeout=seconds) for pair in pairs]:
            verdict: Verdict
            try:
                verdict = "equal" if future.result(START_SECONDS + seconds) else "different"
            except ProcessExpired:
                verdict = "crash"
            except TimeoutError:
                if not future.done():
                    raise RuntimeError("they do not answer") from None
                verdict = "timeout"
            yield verdict

    def close(self) -> None:
        """End the processes; another comparison starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def begin() -> None:
    """Make this process a worker: quiet, of limited size, and ended by SIGTERM at once, in the middle of a sum too."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    import math_verify  # noqa: F401  # seconds, which no comparison should be charged

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _equal(gold: str, answer: str, seconds: float) -> bool:
    """Compare, in a worker. Should the parent be killed, which keeps the time, SIGALRM ends the worker later."""
    from math_verify import LatexExtractionConfig, parse, verify

    alarm = getattr(signal, "alarm", lambda seconds: None)  # not on Windows
    alarm(1 + math.ceil(2 * seconds))
    configuration = [LatexExtractionConfig()]  # without its plain-text fallback, which reads a part as the whole
    try:
        # no timeouts inside, which would use the same alarm
        # of a whole formula the first match is all of it; others would be parts of it
        if not (_FORMULA.fullmatch(gold) and _FORMULA.fullmatch(answer)):
            return False
        settings = {"parsing_timeout": None, "extraction_mode": "first_match"}
        parsed = [parse(f"${text}$", configuration, **settings) for text in (gold, answer)]
        if not all(parsed):
            return False
        (first, *_), (second, *_) = parsed
        same_bound = _has_infinity(first) == _has_infinity(second)
        return same_bound and (bool(verify(*parsed, timeout_seconds=None)) or _same_value(first, second))
    except BaseException:  # whatever a text provokes
        return False
    finally:
        alarm(0)


def _has_infinity(expression: object) -> bool:
    """Return whether an expression has infinity in it: math-verify takes 1/\\infty for 0."""
    import sympy

    return isinstance(expression, sympy.Expr) and bool(expression.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan))


def _same_value(gold: Any, answer: Any) -> bool:
    """Return whether two expressions have one value to 20 digits, with i the imaginary unit and positive numbers for names."""
    import sympy

    are_expressions = isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)
    if not are_expressions or gold.has(sympy.Abs) != answer.has(sympy.Abs):
        return False
    constants = {"i": sympy.I, "e": sympy.E, "pi": sympy.pi}
    names = [sorted({str(symbol) for symbol in side.free_symbols} - constants.keys()) for side in (gold, answer)]
    if names[0] != names[1]:
        return False
    for shift in (sympy.Rational(13, 7), sympy.Rational(5, 11)):
        values = {name: shift + sympy.Rational(i, 3) for i, name in enumerate(names[0])} | constants
        sides = [side.subs({s: values[str(s)] for s in side.free_symbols}).evalf(30) for side in (gold, answer)]
        if not all(side.is_number and side.is_finite for side in sides):
            return False
        if abs(sides[0] - sides[1]) > 1e-20 * max(1, abs(sides[1])):
            return False
    return True


def require_math_verify() -> None:
    """Refuse to go on without math-verify and what its processes need."""
    if not all(map(importlib.util.find_spec, ("math_verify", "pebble", "loky"))):
        raise InputError(
            'MATH answers are compared by math-verify, which is not installed: pip install ".[math]" in a clone'
        )


@lru_cache(maxsize=1)
def shared() -> Verifier:
    """Return the pool that tasks use, a worker for each CPU up to `MAX_WORKERS`; it ends with the program."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    verifier = Verifier(min(cpus, MAX_WORKERS))
    atexit.register(verifier.close)
    return verifier
