"""Sends requests to servers, as many at once as they are to have, until each has its answer; servers may fail.

Work lies in one queue, so that a faster server does more of it. A request that fails goes back into the queue. A server
that fails gets no new requests until it has answered one that tries it, after pauses that double; one that was started
again works on, if it still serves the same. A variant under which servers fail while they answer under others is given
up. The run ends only when every server has failed too often in a row, and what has been answered has been reported.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from aiohttp import ClientSession
from tqdm import tqdm

from lmeval_prune.errors import InputError
from lmeval_prune.models.http_client import Connection, Failure, Rejection, Response, read, read_json, send
from lmeval_prune.models.served import Listing, Served, ServerKind

logger = logging.getLogger(__name__)
FATAL = {
    401: "it wants another key (OPENAI_API_KEY)",
    403: "it does not allow this",
    404: "it has no adapter {variant}, or no {path}; `lmeval-prune export adapter` writes adapters and says how the "
    "server is started with them",
}
LONGEST_WAIT = 60.0
SAID_FROM = 5.0  # shorter waits are not mentioned


class Gone(InputError):  # noqa: N818
    """No server answers any more."""


@dataclass
class Job:
    """A request."""

    path: str  # of the API
    payload: Callable[[], dict[str, Any]]  # makes it when it is sent, without what names the variant
    variant: Served  # under which it is answered
    # takes the response out of an answer; `Failure` if it is not there, `Rejection` if it would not be the next time
    read: Callable[[dict[str, Any]], Any]
    name: str = ""  # of the request, for messages
    failures: int = 0  # how often it was not answered
    index: int = 0  # of the request, for the caller


@dataclass
class Server:
    """A server."""

    url: str  # its address
    listing: Listing = field(default_factory=Listing)  # what it says that it has
    strikes: int = 0  # failures in a row that count against it; to be busy does not, for as long as a request may take
    reason: str = ""  # the last failure
    blamed: set[Served] = field(default_factory=set)  # variants under which it could not answer since it last answered
    closed: asyncio.Event | None = None  # while it gets no new requests, the event that ends this

    def answers(self) -> None:
        """Note that it is well: all may ask it."""
        self.strikes = 0
        self.blamed.clear()
        if self.closed:
            self.closed.set()
            self.closed = None


@dataclass
class Dispatcher:
    """Asks servers."""

    kind: ServerKind  # of server
    model: str  # the unpruned model's name there
    servers: list[Server]  # see `Server`
    connection: Connection  # how they are reached
    concurrent: int = 64  # requests that a server has at once
    retries: int = 8  # so many failures in a row, of a request or a server, are borne
    first_wait: ClassVar[float] = 0.5  # seconds, after a first failure

    def only(self, server: Server, concurrent: int) -> Dispatcher:
        """Return a dispatcher that asks this server, so many requests at once."""
        return replace(self, servers=[server], concurrent=concurrent)

    def run(self, jobs: Sequence[Job], done: Callable[[Job, Any], None], show: bool = False) -> None:
        """Have all jobs answered, in their order; `done` is called once with each and its response, as it comes.

        Raises:
            InputError: no server answers any more, or some requests are not answered whatever is done; everything else
                has been reported to `done` then.
        """
        if jobs:
            many = f"{len(self.servers)} servers" if len(self.servers) > 1 else self.servers[0].url
            with tqdm(total=len(jobs), desc=f"Asking {many}", disable=not show, smoothing=0.05) as bar:
                asyncio.run(_Run(self, jobs, done, bar).all())

    def all(self, jobs: Sequence[Job]) -> list[Any]:
        """Return the responses of jobs, in their order; see `run`."""
        responses: dict[int, Any] = {}
        self.run(jobs, lambda job, response: responses.update({id(job): response}))
        return [responses[id(job)] for job in jobs]

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row."""
        return float(min(LONGEST_WAIT, self.first_wait * 2 ** (failures - 1)) * random.uniform(0.75, 1.25))


class _Run:
    """A run of a dispatcher: workers for each server take jobs from one queue."""

    def __init__(self, dispatcher: Dispatcher, jobs: Sequence[Job], done: Callable[[Job, Any], None], bar: Any) -> None:
        self.dispatcher, self.jobs, self.done, self.bar = dispatcher, jobs, done, bar
        self.servers, self.retries = dispatcher.servers, dispatcher.retries
        self.left = len(jobs)
        self.lost: list[tuple[Job, str]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.answered: set[Served] = set()
        self.given_up: dict[Served, str] = {}

    async def all(self) -> None:
        self.queue: asyncio.Queue[Job] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for job in self.jobs:
            self.queue.put_nowait(job)
        for server in self.servers:
            server.closed = None
            server.answers()
        count = min(self.dispatcher.concurrent, len(self.jobs))
        async with self.dispatcher.connection.session() as self.session:
            for server in self.servers:
                for _ in range(count):
                    self._start(self._work(server))
            try:
                await self.ended
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.lost:
            job, reason = self.lost[0]
            rest = "; the others have been answered" if len(self.lost) < len(self.jobs) else ""
            raise InputError(
                f"{len(self.lost)} of {len(self.jobs)} requests are not answered, the first is {job.name or 'one'} "
                f"under {job.variant}: {reason}{rest}"
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, whose exception ends the run."""

        def check(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) and not self.ended.done():
                self.ended.set_exception(error)

        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(check)

    async def _work(self, server: Server) -> None:
        while True:
            while server.closed:
                await server.closed.wait()
            job = await self._next()
            if server.closed:
                self.queue.put_nowait(job)  # it failed while this waited
                continue
            with suppress(Failure):
                await self._ask(server, job)

    async def _next(self) -> Job:
        """Take a job whose variant has not been given up from the queue."""
        while (job := await self.queue.get()).variant in self.given_up:
            self._lose(job, self.given_up[job.variant])
        return job

    async def _ask(self, server: Server, job: Job) -> None:
        """Ask a server, and report its answer."""
        try:
            response = await self._response(server, job)
        except Rejection as error:
            server.answers()
            self._lose(job, f"{server.url}: {error}")
        except Failure as error:
            logger.info("%s: %s", server.url, error)
            job.failures += not error.innocent
            if job.failures > self.retries:
                self._lose(job, f"{error} ({server.url}, after {job.failures} tries)")
            else:
                pause = 0.0 if error.innocent else self.dispatcher.pause(job.failures)
                asyncio.get_running_loop().call_later(pause, self.queue.put_nowait, job)
            if error.refused:
                server.blamed.add(job.variant)
            if not server.closed:
                server.closed = asyncio.Event()
                self._start(self._recover(server, server.closed, error))
            raise
        else:
            server.answers()
            self.answered.add(job.variant)
            self.done(job, response)
            self._count()

    # ------------------------------------------------------------------ servers that fail

    async def _recover(self, server: Server, closed: asyncio.Event, error: Failure) -> None:
        """Wait for a server that failed: after each pause, look what it serves, and try it with one request."""
        begin, failures = time.monotonic(), 0
        while not closed.is_set():
            failures += 1
            server.strikes += not (error.busy and time.monotonic() - begin < self.dispatcher.connection.timeout)
            server.reason = str(error)
            if all(each.strikes > self.retries for each in self.servers):
                self._give_up(server, error)
                return
            pause = max(self.dispatcher.pause(failures), min(error.wait or 0.0, LONGEST_WAIT))
            if pause > SAID_FROM and all(each.closed for each in self.servers):
                borne = self.retries + 1 - min(each.strikes for each in self.servers)
                line = "%s: %s; no server answers: waiting %.0f seconds, giving up after %d more failures"
                logger.warning(line, server.url, error, pause, borne)
            with suppress(TimeoutError):
                await asyncio.wait_for(closed.wait(), pause)
                return
            try:
                await self._look_again(server)
                await self._ask(server, await self._unblamed(server))
            except Failure as failure:
                error = failure

    async def _unblamed(self, server: Server) -> Job:
        """Take a job under whose variant the server has not failed, if there is one; others go to the queue's end."""
        job = await self._next()
        for _ in range(self.queue.qsize()):
            if job.variant not in server.blamed:
                break
            self.queue.put_nowait(job)
            job = await self._next()
        return job

    def _give_up(self, server: Server, error: Failure) -> None:
        """Give up the variants under which alone servers fail; if it is not only them, the run."""
        if error.refused and server.blamed and self.answered and not self.answered & server.blamed:
            reason = f"{error} ({server.url}, as do all under this one)"
            self.given_up |= dict.fromkeys(server.blamed, reason)
            for each in self.servers:
                each.answers()  # under others
            return
        reasons = "; ".join(f"{each.url}: {each.reason}" for each in self.servers)
        answered = len(self.jobs) - self.left - len(self.lost)
        raise Gone(
            f"no server answers any more ({reasons}); {answered} of {len(self.jobs)} requests have been answered: "
            f"start it again; with responses=FOLDER the same command goes on"
        )

    async def _look_again(self, server: Server) -> None:
        """Check that a server that failed serves what it did; adapters may have other numbers."""
        listing = await list_models(self.session, server.url, self.dispatcher.kind)
        if listing.roots != server.listing.roots:
            models = ", ".join(map(str, listing.roots.values()))
            raise Failure(f"it serves another model now ({models})", innocent=True)
        server.listing = listing

    # ------------------------------------------------------------------ requests

    async def _response(self, server: Server, job: Job) -> Any:
        """Return a job's response."""
        kind, listing = self.dispatcher.kind, server.listing
        variant = kind.fields(self.dispatcher.model, job.variant, listing)
        response = await send(self.session, "POST", f"{server.url}{job.path}", {**job.payload(), **variant})
        _check_status(server, job, response)
        body = read_json(response.body)
        if kind.echoes and (name := read(lambda body: str(body.get("model")), body)) != variant["model"]:
            raise Failure(f"it answered under {name[:100]!r}, not {variant['model']!r}")
        result = read(job.read, body)
        if kind.lists:  # an answer does not name its adapters: were the numbers still those when it was computed?
            now = await list_models(self.session, server.url, kind)
            if now.numbers != listing.numbers:
                server.listing = now
                raise Failure("it was started again with its adapters in another order", innocent=True)
        return result

    # ------------------------------------------------------------------ the end

    def _lose(self, job: Job, reason: str) -> None:
        self.lost.append((job, reason))
        self._count()

    def _count(self) -> None:
        self.left -= 1
        self.bar.update()
        if not self.left and not self.ended.done():
            self.ended.set_result(None)


async def list_models(client: ClientSession, url: str, kind: ServerKind) -> Listing:
    """Return what a server says that it has; `Failure` if it is not there, or not the server that it should be."""
    bodies, hint = [], "is it the server that `server=` says?"
    for address in (f"{url}/v1/models", *([f"{url}{kind.lists}"] if kind.lists else [])):
        try:
            response = await send(client, "GET", address)
        except Failure as error:
            if error.innocent:
                message = f"no server answers at {address} ({error}); start it, or give another base_url"
            else:
                message = f"{address} gives no whole answer ({error}); {hint}"
            raise Failure(message, innocent=error.innocent) from None
        if response.status != 200:
            key = response.status in (401, 403)
            remedy = "give its key in OPENAI_API_KEY" if key else f"{hint} ({_message(response)})"
            raise Failure(f"{address} answers {response.status}; {remedy}", innocent=True)
        try:
            bodies.append(read_json(response.body))
        except Failure as error:
            raise Failure(f"{address} does not answer with JSON, or {error}; {hint}") from None
    try:
        return read(lambda pair: kind.listing(*pair), [*bodies, None][:2])
    except Failure:
        raise Failure(f"{url} does not list its models as a server of `server={kind.name}` does") from None


def _check_status(server: Server, job: Job, response: Response) -> None:
    status, message = response.status, _message(response)
    if status in (408, 429) or status >= 500:
        busy = status == 429
        wait = _seconds(response.retry_after)
        raise Failure(f"status {status}, {message}", wait, busy, busy, refused=status == 500)
    if status in FATAL:
        hint = FATAL[status].format(variant=job.variant, path=job.path)
        raise InputError(f"{server.url} answers {status}: {hint} ({message})")
    if status != 200:
        raise Rejection(f"it answers {status}: {message}")


def _seconds(header: str | None) -> float | None:
    """Read `Retry-After`, a number of seconds or a date."""
    if not header:
        return None
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    return None


def _message(response: Response) -> str:
    """Return the message in an error's body."""
    text = response.body.decode(errors="replace")
    with suppress(Failure):
        body = read_json(response.body)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") or error.get("detail") or text if isinstance(error, dict) else str(error)
    return " ".join(str(text).split())[:200] or "without a word"
