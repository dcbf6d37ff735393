"""The dispatcher in simulated time: no order of failures, answers and cancellations loses a request or hangs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from lmeval_prune import InputError
from lmeval_prune.models import dispatch
from lmeval_prune.models.dispatch import Dispatcher, Job, Server
from lmeval_prune.models.http_client import Cause, Connection, RejectedError, RetryableError
from lmeval_prune.models.server_kinds import KINDS, UNPRUNED, Listing, ServedVariant

BROKEN = ServedVariant("L9H9", ("L9H9",))
CAUSES = list(Cause)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop that skips all waiting, and refuses to wait for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None) -> Any:
            assert timeout is not None, "the run hangs: no task can continue"
            self.now += timeout
            return select(0)

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


class Simulation:
    """Servers that fail at random, in whole seconds so that many events coincide; checks the dispatcher's promises."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = Random(seed)
        self.faults = self.random.choice([0.0, 0.2, 0.5, 0.9])  # share of requests and listings
        self.fatal = self.random.choice([0.0, 0.0, 0.05])
        self.rejected = self.random.choice([0.0, 0.1])
        self.causes = self.random.choice([CAUSES, CAUSES, [Cause.BUSY], [Cause.INTERNAL_ERROR]])
        self.loop = SimulatedLoop()
        self.reported: Counter[int] = Counter()
        self.recovering: dict[str, Any] = {}
        self.broken: set[ServedVariant] = set()
        self.starts: list[tuple[float, int]] = []  # seconds and indices of requests
        self.script: list[tuple[float, Exception | None]] = []  # seconds and errors of the first requests
        send, recover, give_up = dispatch._Run._send, dispatch._Run._recover, dispatch._Run._give_up

        async def checked_send(run: Any, server: Server, job: Job) -> Any:
            trial = self.recovering.get(server.url) is asyncio.current_task()
            assert server.available.is_set() or trial, "only the trial request is sent to a server that failed"
            failure = await send(run, server, job)
            assert server.available.is_set() == (failure is None), "any answer makes a server available, a failure not"
            return failure

        async def checked_recover(run: Any, server: Server, failure: RetryableError) -> None:
            assert server.url not in self.recovering, "two workers recover a server"
            self.recovering[server.url] = asyncio.current_task()
            await recover(run, server, failure)
            del self.recovering[server.url]

        def checked_give_up(run: Any, server: Server, failure: RetryableError) -> None:
            limit = run.dispatcher.max_retries
            assert not any(
                candidate.available.is_set() or candidate.consecutive_failures <= limit for candidate in run.servers
            )
            give_up(run, server, failure)

        monkeypatch.setattr(dispatch._Run, "_give_up", checked_give_up)
        monkeypatch.setattr(dispatch._Run, "_send", checked_send)
        monkeypatch.setattr(dispatch._Run, "_recover", checked_recover)
        monkeypatch.setattr(dispatch._Run, "_request", self.request)
        monkeypatch.setattr(dispatch, "list_models", self.list_models)
        monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=self.loop.time))
        monkeypatch.setattr(Dispatcher, "pause", lambda self, failures: float(min(failures, 4)))

    async def request(self, server: Server, job: Job) -> int:
        self.starts.append((self.loop.time(), job.index))
        if self.script:
            seconds, error = self.script.pop(0)
            await asyncio.sleep(seconds)
            if error:
                raise error
            return job.index
        await asyncio.sleep(self.random.randrange(4))
        if self.random.random() < self.fatal:
            raise InputError("status 401")
        if job.variant in self.broken:
            raise RetryableError("broken", Cause.INTERNAL_ERROR)
        if self.random.random() < self.faults:
            raise RetryableError("fault", self.random.choice(self.causes), self.random.choice([None, 2.0]))
        if self.random.random() < self.rejected:
            raise RejectedError("status 400")
        return job.index

    async def list_models(self, *_: Any, **__: Any) -> Listing:
        await asyncio.sleep(0 if self.script else self.random.randrange(2))
        if self.random.random() < self.faults:
            raise RetryableError("fault", Cause.SERVER)
        return Listing()

    def report(self, index: int, result: int) -> None:
        assert index == result
        self.reported[index] += 1

    def run(
        self, jobs: list[Job], servers: int, num_concurrent: int, max_retries: int, cancel: int | None = None
    ) -> Any:
        """Run jobs; return the run and its error."""
        endpoints = [Server(f"http://server{number}") for number in range(servers)]
        dispatcher = Dispatcher(KINDS["vllm"], "tiny", endpoints, Connection({}), num_concurrent, max_retries)
        with self.closing():
            run = dispatch._Run(dispatcher, jobs, self.report, SimpleNamespace(update=lambda: None))
            task = self.loop.create_task(run.run())
            if cancel is not None:
                self.loop.call_later(cancel, task.cancel)
            try:
                self.loop.run_until_complete(task)
            except (InputError, asyncio.CancelledError) as error:
                return run, error
            finally:
                assert not asyncio.all_tasks(self.loop)
            return run, None

    @contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.loop.close()


def jobs_of(count: int, *variants: ServedVariant) -> list[Job]:
    return [Job("/", dict, variants[i % len(variants)], int, f"request {i}", i) for i in range(count)]


def test_requests_finish_in_any_order_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered, rejected or failed once; a run ends, without a task left, also by an error or by Ctrl-C."""
    endings: Counter[str] = Counter()
    for seed in range(500):
        with monkeypatch.context() as patches:
            simulation, random = Simulation(seed, patches), Random(-seed)
            jobs = jobs_of(random.randrange(1, 20), UNPRUNED, ServedVariant("L0H1", ("L0H1",)))
            limits = random.choice([1, 2, 5, 64]), random.choice([1, 3, 1000])
            cancel = random.choice([None, None, random.randrange(12)])
            run, error = simulation.run(jobs, random.randrange(1, 4), *limits, cancel)
        endings[type(error).__name__] += 1
        failed = [job.index for job, _ in run.failed_jobs]
        assert set(simulation.reported.values()) <= {1} and not set(failed) & set(simulation.reported)
        assert len(failed) == len(set(failed)) and run.results == {index: index for index in simulation.reported}
        finished = len(failed) + len(simulation.reported) == len(jobs)
        if error is None:
            assert len(run.results) == len(jobs)
        elif "requests failed" in str(error):
            assert failed and finished
        else:
            assert not finished or isinstance(error, asyncio.CancelledError), error
    assert endings.keys() == {"NoneType", "InputError", "ServersFailedError", "CancelledError"}


@pytest.fixture
def reliable(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    simulation = Simulation(0, monkeypatch)
    simulation.faults = simulation.fatal = simulation.rejected = 0.0
    return simulation


def busy(retry_after: float) -> RetryableError:
    return RetryableError("status 429", Cause.BUSY, retry_after)


def test_a_server_that_answers_and_fails_at_once_is_recovered(reliable: Simulation) -> None:
    """The worker that waits for the server notices the new failure, and its pauses start again at the shortest."""
    fault = RetryableError("fault")
    reliable.script = [(0, fault), (0.5, None), (0.5, fault), (0, None), (0, None)]
    _, error = reliable.run(jobs_of(3, UNPRUNED), 1, 3, 20)
    assert error is None and reliable.starts == [(0, 0), (0, 1), (0, 2), (1.5, 0), (1.5, 2)]


def test_the_last_request_of_a_failing_server_is_named(reliable: Simulation) -> None:
    """It has failed as often as its server, and says more."""
    reliable.broken = {UNPRUNED}
    _, error = reliable.run(jobs_of(1, UNPRUNED), 1, 1, 2)
    assert str(error).startswith("1 of 1 requests failed, the first is request 0 under dense: broken")


def test_retry_after_is_a_lower_bound_of_a_pause(reliable: Simulation) -> None:
    reliable.script = [(0, busy(7.0)), (0, busy(3600.0)), (0, busy(0.0)), (0, None)]
    _, error = reliable.run(jobs_of(1, UNPRUNED), 1, 1, 1)
    assert error is None and [start for start, _ in reliable.starts] == [0, 7, 7 + dispatch.MAX_WAIT, 70]


def test_a_server_is_busy_for_the_timeout_and_then_fails(reliable: Simulation) -> None:
    reliable.script = [(0, busy(60.0)) for _ in range(20)]
    run, error = reliable.run(jobs_of(1, UNPRUNED), 1, 1, 3)
    assert str(error).startswith("all servers have failed (http://server0: status 429); 0 of 1")
    assert [start for start, _ in reliable.starts] == list(range(0, 600 + 4 * 60, 60)) and not run.failed_jobs


@pytest.mark.parametrize("servers", [1, 2])
def test_a_variant_that_all_servers_fail_is_given_up(reliable: Simulation, servers: int) -> None:
    """It is not tried as often as each of its 20 requests may fail."""
    reliable.broken = {BROKEN}
    run, error = reliable.run(jobs_of(40, UNPRUNED, BROKEN), servers, 1, 3)
    assert str(error).startswith("20 of 40 requests failed, the first is ") and "under L9H9: broken" in str(error)
    assert "as all servers do for this variant" in run.failed_jobs[-1][1] and run.given_up_variants.keys() == {BROKEN}
    assert set(reliable.reported) == set(range(0, 40, 2))
    assert sum(index % 2 for _, index in reliable.starts) < 20 * 4 / 2
