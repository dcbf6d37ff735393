"""Sends requests to servers, as many at once as they are to have, until each has its answer; servers may fail.

Work lies in one queue, so that a faster server does more of it. A request that fails goes back into the queue. A server
that fails gets no new requests for a while that doubles each time, then one, and all again once it answers; one that
comes back works on, if it still serves the same. A variant under which servers fail while they answer under others is
given up. Only when every server has failed too often in a row does it end, and what has been answered has been
reported.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from tqdm import tqdm

from lmeval_prune.errors import InputError
from lmeval_prune.models.http_client import Failure, Rejection, Response, read, read_json, send, session
from lmeval_prune.models.served import Listing, Served, ServerKind

logger = logging.getLogger(__name__)
FATAL = {401: "it wants another key (OPENAI_API_KEY)", 403: "it does not allow this", 404: ""}
LONGEST_WAIT = 60.0
SAID_FROM = 5.0  # shorter waits are not mentioned


class Gone(InputError):  # noqa: N818
    """No server answers any more."""


@dataclass
class Job:
    """One request.

    Attributes:
        path: of the API.
        payload: makes it when it is sent, without what names the variant.
        variant: under which it is answered.
        read: takes what is wanted out of the server's answer; raises `Failure` if it is not there, `Rejection` if it
            would not be there the next time.
        name: of the request, for messages.
        made: the response, of what was read.
    """

    path: str
    payload: Callable[[], dict[str, Any]]
    variant: Served
    read: Callable[[dict[str, Any]], Any]
    name: str = ""
    failures: int = 0
    tag: Any = None
    made: Callable[[Any], Any] = field(default=lambda found: found)


@dataclass
class Server:
    """One server.

    Attributes:
        url: its address.
        listing: what it says that it has.
        failures: how often it failed since it last answered.
        why: the last failure.
        closed_until: when it may be asked again (`time.monotonic`).
        episode: changes with each failure that counts; failures of requests that were sent before count no more.
        tried: while it is failing, whether a request is on its way that tries it.
        strikes: how many of the failures count against it; that it is busy does not, for as long as a request may take.
        since: when it began to fail.
        blamed: variants under which it could not answer since it last answered.
    """

    url: str
    listing: Listing = field(default_factory=Listing)
    failures: int = 0
    why: str = ""
    closed_until: float = 0.0
    episode: int = 0
    tried: bool = False
    strikes: int = 0
    since: float = 0.0
    blamed: set[Served] = field(default_factory=set)

    def answers(self) -> None:
        """Note that it is well."""
        self.failures, self.strikes, self.closed_until = 0, 0, 0.0
        self.blamed.clear()


class Dispatcher:
    """Asks servers.

    Args:
        kind: of server.
        model: the unpruned model's name there.
        servers: see `Server`.
        headers: of each request.
        concurrent: requests that a server has at once.
        retries: so many failures in a row, of a request or a server, are borne.
        timeout: seconds for a request.
        verify: as aiohttp's `ssl`.
    """

    first_wait = 0.5  # seconds, after a first failure

    def __init__(
        self,
        kind: ServerKind,
        model: str,
        servers: Sequence[Server],
        headers: dict[str, str],
        concurrent: int = 64,
        retries: int = 8,
        timeout: float = 600.0,
        verify: Any = True,
    ) -> None:
        self.kind, self.model, self.servers, self.headers = kind, model, list(servers), headers
        self.concurrent, self.retries, self.timeout, self.verify = concurrent, retries, timeout, verify

    def only(self, server: Server, concurrent: int | None = None) -> Dispatcher:
        """One that asks this server."""
        made = copy(self)
        made.servers, made.concurrent = [server], concurrent or self.concurrent
        return made

    def run(self, jobs: Sequence[Job], done: Callable[[Job, Any], None], show: bool = False) -> None:
        """Have all jobs answered.

        Args:
            jobs: in the order in which they are sent.
            done: called with each job and its response, once, as soon as it is there.
            show: whether progress is shown.

        Raises:
            InputError: no server answers any more, or some requests are not answered whatever is done; everything else
                has been reported to `done` then.
        """
        if jobs:
            many = f"{len(self.servers)} servers" if len(self.servers) > 1 else self.servers[0].url
            with tqdm(total=len(jobs), desc=f"Asking {many}", disable=not show, smoothing=0.05) as bar:
                asyncio.run(_Run(self, jobs, done, bar).whole())

    def all(self, jobs: Sequence[Job]) -> list[Any]:
        """Responses of jobs, in their order; see `run`."""
        found: dict[int, Any] = {}
        self.run(jobs, lambda job, response: found.update({id(job): response}))
        return [found[id(job)] for job in jobs]


class _Run:
    """One run of a dispatcher."""

    def __init__(self, of: Dispatcher, jobs: Sequence[Job], done: Callable[[Job, Any], None], bar: Any) -> None:
        self.of, self.jobs, self.done, self.bar = of, jobs, done, bar
        self.left = len(jobs)
        self.lost: list[tuple[Job, str]] = []
        self.answered: set[Served] = set()
        self.given_up: dict[Served, str] = {}

    async def whole(self) -> None:
        self.queue: asyncio.Queue[Job] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for job in self.jobs:
            self.queue.put_nowait(job)
        for server in self.of.servers:
            server.answers()
            server.tried = False
        count = min(self.of.concurrent, len(self.jobs))
        async with session(self.of.headers, self.of.verify, self.of.timeout) as self.session:
            workers = [asyncio.create_task(self._work(each)) for each in self.of.servers for _ in range(count)]
            try:
                await self.ended
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        if self.lost:
            job, why = self.lost[0]
            rest = "; the others have been answered" if len(self.lost) < len(self.jobs) else ""
            raise InputError(
                f"{len(self.lost)} of {len(self.jobs)} requests are not answered, the first is {job.name or 'one'} "
                f"under {job.variant}: {why}{rest}"
            )

    async def _work(self, server: Server) -> None:
        try:
            while True:
                await self._opened(server)
                job = await self.queue.get()
                if job.variant in self.given_up:
                    self._lose(job, self.given_up[job.variant])
                    continue
                if server.failures and (server.tried or server.closed_until > time.monotonic()):
                    self.queue.put_nowait(job)  # it failed while this waited
                    continue
                await self._do(server, self._unblamed(server, job))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # of `done`, or a mistake of ours
            self._end(error)

    async def _opened(self, server: Server) -> None:
        """Wait until the server may be asked."""
        while server.failures and (server.tried or (rest := server.closed_until - time.monotonic()) > 0):
            await asyncio.sleep(0.05 if server.tried else min(rest, 0.5))

    def _unblamed(self, server: Server, job: Job) -> Job:
        """This job, or one under whose variant the server has not failed; the others go to the end of the queue."""
        for _ in range(self.queue.qsize()):
            if job.variant not in server.blamed:
                break
            self.queue.put_nowait(job)
            job = self.queue.get_nowait()
        return job

    async def _do(self, server: Server, job: Job) -> None:
        episode, trial = server.episode, bool(server.failures)
        server.tried = server.tried or trial
        try:
            if trial:
                await self._look_again(server)
            response = await self._ask(server, job)
        except Rejection as error:
            server.answers()
            self._lose(job, f"{server.url}: {error}")
        except Failure as error:
            logger.info("%s: %s", server.url, error)
            job.failures += not error.innocent
            if job.failures > self.of.retries:
                self._lose(job, f"{error} ({server.url}, after {job.failures} tries)")
            else:
                pause = 0.0 if error.innocent else self._pause(job.failures)
                asyncio.get_running_loop().call_later(pause, self.queue.put_nowait, job)
            if server.episode == episode:
                self._failed(server, error, job.variant)
        else:
            server.answers()
            self.answered.add(job.variant)
            self.done(job, response)
            self._count()
        finally:
            if trial:
                server.tried = False

    def _failed(self, server: Server, error: Failure, variant: Served) -> None:
        """A server failed; without any left, all ends."""
        now = time.monotonic()
        server.since = server.since if server.failures else now
        server.episode += 1
        server.failures += 1
        server.strikes += not (error.busy and now - server.since < self.of.timeout)
        server.why = str(error)
        if error.refused:
            server.blamed.add(variant)
        pause = max(self._pause(server.failures), min(error.wait or 0.0, LONGEST_WAIT))
        server.closed_until = now + pause
        if any(one.strikes <= self.of.retries for one in self.of.servers):
            self._say_wait(server, error, min(one.closed_until for one in self.of.servers) - now)
            return
        if error.refused and server.blamed and self.answered and not self.answered & server.blamed:
            self.given_up |= dict.fromkeys(server.blamed, f"{error} ({server.url}, as do all under this one)")
            for one in self.of.servers:
                one.answers()  # under others
            return
        reasons = "; ".join(f"{one.url}: {one.why}" for one in self.of.servers)
        answered = len(self.jobs) - self.left - len(self.lost)
        self._end(
            Gone(
                f"no server answers any more ({reasons}); {answered} of {len(self.jobs)} requests have been "
                f"answered: start it again; with responses=FOLDER the same command goes on"
            )
        )

    def _say_wait(self, server: Server, error: Failure, wait: float) -> None:
        """A line if no server can be asked for a while: for how long, and how many failures more are borne."""
        if wait > SAID_FROM:
            left = self.of.retries + 1 - min(one.strikes for one in self.of.servers)
            line = "%s: %s; no server answers: waiting %.0f seconds, giving up after %d more failures"
            logger.warning(line, server.url, error, wait, left)

    def _pause(self, failures: int) -> float:
        return float(min(LONGEST_WAIT, self.of.first_wait * 2 ** (failures - 1)) * random.uniform(0.75, 1.25))

    def _lose(self, job: Job, why: str) -> None:
        self.lost.append((job, why))
        self._count()

    def _count(self) -> None:
        self.left -= 1
        self.bar.update()
        if not self.left and not self.ended.done():
            self.ended.set_result(None)

    def _end(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _look_again(self, server: Server) -> None:
        """Whether a server that failed serves what it did; adapters may have other numbers.

        Raises:
            Failure: it is not there, or serves another model.
        """
        known, now = server.listing, await self._listing(server)
        if now.roots != known.roots:
            raise Failure(f"it serves another model now ({', '.join(map(str, now.roots.values()))})", innocent=True)
        server.listing = now

    async def _listing(self, server: Server) -> Listing:
        kind, found = self.of.kind, []
        for path in ("/v1/models", *([kind.lists] if kind.lists else [])):
            response = await send(self.session, "GET", f"{server.url}{path}")
            if response.status != 200:
                raise Failure(f"status {response.status} of {path}, {_said(response)}", innocent=True)
            found.append(read_json(response.body))
        return read(lambda pair: kind.listing(*pair), [*found, None][:2])

    async def _ask(self, server: Server, job: Job) -> Any:
        """A job's response.

        Raises:
            Failure: it may come the next time.
            Rejection: it will not come.
            InputError: no request like this one will be answered.
        """
        kind, listing = self.of.kind, server.listing
        named = kind.fields(self.of.model, job.variant, listing)
        response = await send(self.session, "POST", f"{server.url}{job.path}", {**job.payload(), **named})
        status = response.status
        if status in (408, 429) or status >= 500:
            busy = status == 429
            wait = _seconds(response.retry_after)
            raise Failure(f"status {status}, {_said(response)}", wait, busy, busy, refused=status == 500)
        if status in FATAL:
            hint = FATAL[status] or (
                f"it has no adapter {job.variant}, or no {job.path}; `lmeval-prune export adapter` writes adapters and "
                f"says how the server is started with them"
            )
            raise InputError(f"{server.url} answers {status}: {hint} ({_said(response)})")
        if status != 200:
            raise Rejection(f"it answers {status}: {_said(response)}")
        body = read_json(response.body)
        if kind.echoes and (model := read(lambda found: str(found.get("model")), body)) != named["model"]:
            raise Failure(f"it answered under {model[:100]!r}, not {named['model']!r}")
        found = read(job.read, body)
        if kind.lists:  # an answer does not name its adapters: were the numbers still those when it was made?
            now = await self._listing(server)
            if now.numbers != listing.numbers:
                server.listing = now
                raise Failure("it was started again with its adapters in another order", innocent=True)
        return job.made(found)


def _seconds(header: str | None) -> float | None:
    """What `Retry-After` says, a number of seconds or a date."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _said(response: Response) -> str:
    """The message in an error's body."""
    text = response.body.decode(errors="replace")
    with suppress(Failure):
        body = read_json(response.body)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") or error.get("detail") or text if isinstance(error, dict) else str(error)
    return " ".join(str(text).split())[:200] or "without a word"
