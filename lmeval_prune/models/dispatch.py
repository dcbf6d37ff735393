"""Distribute requests over servers that may fail.

All requests wait in one queue, so a faster server does more of the work. A request that fails goes back into the queue
after a pause that doubles. A server is in one of three states:

    available   it takes requests from the queue
    retrying    it has failed. After each pause, which doubles, it must list the same models as before and answer one
                trial request; any answer makes it available again
    failed      as retrying, after more than `max_retries` failures in a row

When all servers are failed, the variants that only ever failed are given up; if there are none, the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from aiohttp import ClientSession
from tqdm import tqdm

from lmeval_prune.errors import InputError
from lmeval_prune.models.http_client import (
    Cause,
    Connection,
    RejectedError,
    Response,
    RetryableError,
    parse,
    parse_json,
    send,
)
from lmeval_prune.models.server_kinds import KINDS, Listing, ServedVariant, ServerKind

logger = logging.getLogger(__name__)
MAX_WAIT = 60.0  # seconds
MIN_LOGGED_WAIT = 5.0  # seconds


class ServersFailedError(InputError):
    """All servers have failed more often in a row than `max_retries`."""


@dataclass
class Job:
    """A request to any of the servers."""

    path: str  # of the API, e.g. `/v1/completions`
    payload: Callable[[], dict[str, Any]]  # builds the request body, without the fields that name the variant
    variant: ServedVariant
    parse: Callable[[dict[str, Any]], Any]  # extracts the result from the response body
    name: str  # for messages
    index: int  # position of its result
    failures: int = 0


@dataclass
class Server:
    """A server and its state during a run."""

    url: str
    listing: Listing = field(default_factory=Listing)
    consecutive_failures: int = 0
    last_failure: str = ""
    failed_variants: set[ServedVariant] = field(default_factory=set)  # answered with status 500 since the last answer
    available: asyncio.Event = field(default_factory=asyncio.Event)
    recovering: bool = False  # a worker runs `_Run._recover`

    def reset(self) -> None:
        """Prepare for a run in a new event loop."""
        self.available, self.recovering = asyncio.Event(), False
        self.set_available()

    def set_available(self) -> None:
        """Let all workers send requests to the server."""
        self.consecutive_failures = 0
        self.failed_variants.clear()
        self.available.set()


@dataclass
class Dispatcher:
    """Servers, and the limits for requests to them."""

    kind: ServerKind
    model: str  # name of the unpruned model on the servers
    servers: list[Server]
    connection: Connection
    num_concurrent: int = 64  # requests per server at a time
    max_retries: int = 8  # of a request, and of a server in a row
    first_wait: ClassVar[float] = 0.5  # seconds after the first failure

    def restricted_to(self, server: Server, num_concurrent: int) -> Dispatcher:
        """Return a dispatcher for one of the servers, with another number of concurrent requests."""
        return replace(self, servers=[server], num_concurrent=num_concurrent)

    def run(
        self,
        jobs: Sequence[Job],
        on_result: Callable[[int, Any], None] = lambda index, result: None,
        show_progress: bool = False,
    ) -> list[Any]:
        """Send jobs in their order and return the results by `Job.index`.

        `on_result` is called with index and result as soon as an answer arrives. An `InputError` for requests that
        failed for good, or for failed servers, is raised after all other answers have been reported.
        """
        if not jobs:
            return []
        where = f"{len(self.servers)} servers" if len(self.servers) > 1 else self.servers[0].url
        with tqdm(total=len(jobs), desc=f"requests to {where}", disable=not show_progress, smoothing=0.05) as progress:
            run = _Run(self, jobs, on_result, progress)
            asyncio.run(run.run())
        return [run.results[index] for index in sorted(run.results)]

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row: doubling, with jitter."""
        return float(min(MAX_WAIT, self.first_wait * 2 ** (failures - 1)) * random.uniform(0.75, 1.25))


class _Run:
    """One run of a dispatcher: the workers of each server take jobs from a shared queue."""

    def __init__(
        self, dispatcher: Dispatcher, jobs: Sequence[Job], on_result: Callable[[int, Any], None], progress: Any
    ) -> None:
        self.dispatcher, self.jobs, self.on_result, self.progress = dispatcher, jobs, on_result, progress
        self.servers = dispatcher.servers
        self.queue: asyncio.Queue[Job] = asyncio.Queue()
        for job in jobs:
            self.queue.put_nowait(job)
        for server in self.servers:
            server.reset()
        self.finished = asyncio.Event()
        self.results: dict[int, Any] = {}
        self.failed_jobs: list[tuple[Job, str]] = []  # with the reason
        self.answered_variants: set[ServedVariant] = set()
        self.given_up_variants: dict[ServedVariant, str] = {}
        self.was_busy = False

    async def run(self) -> None:
        """Finish all jobs; raise the first error that ends the run, unless all jobs have finished meanwhile."""
        count = min(self.dispatcher.num_concurrent, len(self.jobs))
        async with self.dispatcher.connection.session() as self.session:
            workers = [self._work(server) for server in self.servers for _ in range(count)]
            tasks = [asyncio.create_task(coroutine) for coroutine in (self.finished.wait(), *workers)]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if not self.finished.is_set():
            for task in done:
                task.result()  # raises the error of a worker
        if self.failed_jobs:
            job, reason = self.failed_jobs[0]
            others = "; all others were answered" if len(self.failed_jobs) < len(self.jobs) else ""
            raise InputError(
                f"{len(self.failed_jobs)} of {len(self.jobs)} requests failed, the first is {job.name} under "
                f"{job.variant}: {reason}{others}"
            )

    async def _work(self, server: Server) -> None:
        """Send jobs to a server; after a failure, one of its workers recovers it and the others wait."""
        while True:
            await server.available.wait()
            job = await self._next_job()
            if not server.available.is_set():  # the server failed while this worker waited for the job
                self.queue.put_nowait(job)
                continue
            failure = await self._send(server, job)
            if failure and not server.recovering:
                server.recovering = True
                await self._recover(server, failure)
                server.recovering = False

    async def _next_job(self) -> Job:
        """Take a job from the queue; jobs of variants that were given up fail."""
        while (job := await self.queue.get()).variant in self.given_up_variants:
            self._fail(job, self.given_up_variants[job.variant])
        return job

    async def _send(self, server: Server, job: Job) -> RetryableError | None:
        """Send a job and report its result, or put it back into the queue and return the failure."""
        try:
            result = await self._request(server, job)
        except RejectedError as error:
            server.set_available()
            self._fail(job, f"{server.url}: {error}")
        except RetryableError as failure:
            is_first = failure.cause is Cause.BUSY and not self.was_busy
            self.was_busy |= is_first
            logger.log(logging.WARNING if is_first else logging.INFO, "%s: %s", server.url, failure)
            self._retry(server, job, failure)
            if failure.cause is Cause.INTERNAL_ERROR:
                server.failed_variants.add(job.variant)
            server.available.clear()
            return failure
        else:
            server.set_available()
            self.answered_variants.add(job.variant)
            self.results[job.index] = result
            self.on_result(job.index, result)
            self._update_progress()
        return None

    async def _request(self, server: Server, job: Job) -> Any:
        kind, listing = self.dispatcher.kind, server.listing
        with _naming(server.url):
            variant_fields = kind.variant_fields(self.dispatcher.model, job.variant, listing)
        response = await send(self.session, "POST", f"{server.url}{job.path}", {**job.payload(), **variant_fields})
        _check_status(server, job, response)
        body = parse_json(response.body)
        model = variant_fields["model"]
        if kind.echoes_model and (answered := parse(lambda body: str(body.get("model")), body)) != model:
            raise RetryableError(f"it answered as {answered[:100]!r}, not {model!r}")
        result = parse(job.parse, body)
        if kind.adapter_list:  # answers do not name their adapters: check that the adapter ids are still the same
            current = await list_models(self.session, server.url, kind)
            self._check_model(server, current)
            if current.adapter_ids != listing.adapter_ids:
                server.listing = current
                raise RetryableError("it was restarted with its adapters in another order", Cause.SERVER)
        return result

    def _retry(self, server: Server, job: Job, failure: RetryableError) -> None:
        """Put a job back into the queue, after a pause if the job may be to blame; fail it after too many retries."""
        pause = 0.0
        if failure.cause not in (Cause.SERVER, Cause.BUSY):
            job.failures += 1
            pause = self.dispatcher.pause(job.failures)
        if job.failures > self.dispatcher.max_retries:
            self._fail(job, f"{failure} ({server.url}, after {job.failures} tries)")
        else:
            asyncio.get_running_loop().call_later(pause, self.queue.put_nowait, job)

    def _fail(self, job: Job, reason: str) -> None:
        self.failed_jobs.append((job, reason))
        self._update_progress()

    def _update_progress(self) -> None:
        self.progress.update()
        if len(self.results) + len(self.failed_jobs) == len(self.jobs):
            self.finished.set()

    # ------------------------------------------------------------------ servers that fail

    async def _recover(self, server: Server, failure: RetryableError) -> None:
        """Wait for a server until it is available: after each pause, check its models and send it one trial request."""
        start, attempts = time.monotonic(), 0
        while not server.available.is_set():
            attempts += 1
            is_busy = failure.cause is Cause.BUSY and time.monotonic() - start < self.dispatcher.connection.timeout
            server.consecutive_failures += not is_busy
            server.last_failure = str(failure)
            if all(peer.consecutive_failures > self.dispatcher.max_retries for peer in self.servers):
                self._give_up(server, failure)
                return
            pause = max(self.dispatcher.pause(attempts), min(failure.retry_after or 0.0, MAX_WAIT))
            self._log_wait(server, pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):  # `wait_for` can swallow the cancellation at the end of a run
                    await server.available.wait()
                start, attempts = time.monotonic(), 0  # an earlier request was answered; the next may have failed
                continue
            try:
                await self._check_listing(server)
            except RetryableError as error:
                failure = error
                continue
            failure = await self._send(server, await self._trial_job(server)) or failure

    def _log_wait(self, server: Server, pause: float) -> None:
        """Log a long pause if no server is available."""
        if pause > MIN_LOGGED_WAIT and not any(peer.available.is_set() for peer in self.servers):
            left = self.dispatcher.max_retries + 1 - min(peer.consecutive_failures for peer in self.servers)
            line = "%s: %s; no server is available: waiting %.0f seconds, giving up after %d more failures"
            logger.warning(line, server.url, server.last_failure, pause, left)

    async def _check_listing(self, server: Server) -> None:
        """Check that a server still serves the same models; ids of adapters may have changed."""
        listing = await list_models(self.session, server.url, self.dispatcher.kind)
        self._check_model(server, listing)
        server.listing = listing

    def _check_model(self, server: Server, listing: Listing) -> None:
        """Check that a server lists the model that it had at the start."""
        model = listing.model(self.dispatcher.model)
        if model.identity != server.listing.model(self.dispatcher.model).identity:
            raise RetryableError(f"it serves another model now ({model.root})", Cause.SERVER)

    async def _trial_job(self, server: Server) -> Job:
        """Take the next job whose variant has not failed on the server; if there is none, any job."""
        job = await self._next_job()
        for _ in range(self.queue.qsize()):
            if job.variant not in server.failed_variants:
                break
            self.queue.put_nowait(job)
            job = await self._next_job()
        return job

    def _give_up(self, server: Server, failure: RetryableError) -> None:
        """Give up the variants that no server has answered, if only they fail; otherwise end the run."""
        failed, answered = server.failed_variants, self.answered_variants
        if failure.cause is Cause.INTERNAL_ERROR and failed and answered and failed.isdisjoint(answered):
            reason = f"{failure} ({server.url}, as all servers do for this variant)"
            self.given_up_variants |= dict.fromkeys(failed, reason)
            for peer in self.servers:
                peer.set_available()  # for the other variants
            return
        reasons = "; ".join(f"{peer.url}: {peer.last_failure}" for peer in self.servers)
        raise ServersFailedError(
            f"all servers have failed ({reasons}); {len(self.results)} of {len(self.jobs)} requests were answered: "
            f"start a server and run the same command again; with responses=FOLDER it resumes"
        )


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Name a server in the errors about what it has: it may be one of several."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{url}: {error}") from None


async def list_models(client: ClientSession, url: str, kind: ServerKind) -> Listing:
    """Request a server's models and adapters; raise `RetryableError` if it does not list them as its kind does."""
    bodies: list[Any] = []
    for path in filter(None, ("/v1/models", kind.adapter_list)):
        try:
            response = await send(client, "GET", f"{url}{path}")
            if response.status != 200:
                raise RetryableError(response.description, Cause.SERVER)
            bodies.append(parse_json(response.body))
        except RetryableError as error:
            message = f"{url}{path} lists no models ({error}); start the server, or give another base_url or server="
            raise RetryableError(message, error.cause) from None
    try:
        with _naming(url):
            listing: Listing = parse(lambda pair: kind.parse_listing(*pair), [*bodies, None][:2])
    except RetryableError:
        raise RetryableError(f"{url} does not list its models as a server of `server={kind.name}` does") from None
    if listing.software in KINDS and listing.software != kind.name:
        raise InputError(f"{url} is not a server of `server={kind.name}`: give server={listing.software}")
    return listing


def _check_status(server: Server, job: Job, response: Response) -> None:
    status = response.status
    if response.is_out_of_context:
        raise RetryableError(response.description, Cause.BUSY)
    if status in (408, 429) or status >= 500:
        cause = {429: Cause.BUSY, 500: Cause.INTERNAL_ERROR}.get(status, Cause.UNKNOWN)
        raise RetryableError(response.description, cause, response.retry_after)
    if status in (401, 403):
        raise InputError(f"{server.url}: {response.description}")
    if status == 404:
        raise InputError(
            f"{server.url} has no adapter {job.variant}, or no {job.path} ({response.description}); "
            f"`lmeval-prune export adapter` writes adapters and prints how to start the server with them"
        )
    if status != 200:
        raise RejectedError(response.description)
