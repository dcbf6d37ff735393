"""Sends requests to servers, as many at once as they are to have, until each has its answer; servers may fail.

Work lies in one queue, so that a faster server does more of it. A request that fails goes back into the queue. A server
that fails gets no new requests for a while that doubles each time, then one, and all again once it answers; one that
comes back works on. Only when every server has failed too often in a row does it end, and what has been answered has
been reported.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from tqdm import tqdm

from lmeval_prune.errors import InputError, first_line
from lmeval_prune.models.served import Listing, Served, ServerKind

logger = logging.getLogger(__name__)
FATAL = {401: "it wants another key (OPENAI_API_KEY)", 403: "it does not allow this", 404: ""}
LONGEST_WAIT = 60.0


class Failure(Exception):  # noqa: N818 - it may pass
    """A request failed in a way that may pass.

    Args:
        message: what happened.
        wait: seconds that the server asks for.
        innocent: nothing can have been wrong with the request: the server was not reached, or is busy.
    """

    def __init__(self, message: str, wait: float | None = None, innocent: bool = False) -> None:
        super().__init__(message)
        self.wait, self.innocent = wait, innocent


class Rejection(Exception):  # noqa: N818 - nothing is wrong here
    """The server will not answer this request."""


@dataclass
class Job:
    """One request.

    Attributes:
        path: of the API.
        payload: without what names the variant.
        variant: under which it is answered.
        read: makes the response of the server's answer; raises `Failure` if it is none.
        name: of the request, for messages.
    """

    path: str
    payload: dict[str, Any]
    variant: Served
    read: Callable[[dict[str, Any]], Any]
    name: str = ""
    failures: int = 0
    tag: Any = None


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
    """

    url: str
    listing: Listing = field(default_factory=Listing)
    failures: int = 0
    why: str = ""
    closed_until: float = 0.0
    episode: int = 0
    tried: bool = False


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
        return self._with([server], concurrent or self.concurrent)

    def _with(self, servers: list[Server], concurrent: int) -> Dispatcher:
        given = (self.kind, self.model, servers, self.headers, concurrent, self.retries, self.timeout, self.verify)
        made = Dispatcher(*given)
        made.first_wait = self.first_wait
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

    async def whole(self) -> None:
        self.queue: asyncio.Queue[Job] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for job in self.jobs:
            self.queue.put_nowait(job)
        for server in self.of.servers:
            server.failures, server.closed_until, server.tried = 0, 0.0, False
        count = min(self.of.concurrent, len(self.jobs))
        limits = aiohttp.ClientTimeout(total=self.of.timeout, sock_connect=min(30.0, self.of.timeout))
        connector = aiohttp.TCPConnector(limit=0, ssl=self.of.verify)
        async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=self.of.headers) as self.session:
            workers = [asyncio.create_task(self._work(each)) for each in self.of.servers for _ in range(count)]
            try:
                await self.ended
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        if self.lost:
            job, why = self.lost[0]
            raise InputError(
                f"{len(self.lost)} of {len(self.jobs)} requests are not answered, the first {job.name or 'one'} under "
                f"{job.variant}: {why}; the others have been answered"
            )

    async def _work(self, server: Server) -> None:
        try:
            while True:
                await self._opened(server)
                job = await self.queue.get()
                if server.failures and (server.tried or server.closed_until > time.monotonic()):
                    self.queue.put_nowait(job)  # it failed while this waited
                    continue
                await self._do(server, job)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # of `done`, or a mistake of ours
            self._end(error)

    async def _opened(self, server: Server) -> None:
        """Wait until the server may be asked."""
        while server.failures and (server.tried or (rest := server.closed_until - time.monotonic()) > 0):
            await asyncio.sleep(0.05 if server.tried else min(rest, 0.5))

    async def _do(self, server: Server, job: Job) -> None:
        episode, trial = server.episode, bool(server.failures)
        server.tried = server.tried or trial
        try:
            response = await self._ask(server, job)
        except Rejection as error:
            server.failures, server.closed_until = 0, 0.0  # it answers
            self._lose(job, str(error))
        except Failure as error:
            logger.info("%s: %s", server.url, error)
            job.failures += not error.innocent
            if job.failures > self.of.retries:
                self._lose(job, f"{error} ({server.url}, after {job.failures} tries)")
            else:
                pause = 0.0 if error.innocent else self._pause(job.failures)
                asyncio.get_running_loop().call_later(pause, self.queue.put_nowait, job)
            if server.episode == episode:
                self._failed(server, error)
        else:
            server.failures, server.closed_until = 0, 0.0
            self.done(job, response)
            self._count()
        finally:
            if trial:
                server.tried = False

    def _failed(self, server: Server, error: Failure) -> None:
        """A server failed; without any left, all ends."""
        server.episode += 1
        server.failures += 1
        server.why = str(error)
        pause = self._pause(server.failures) if error.wait is None else error.wait
        server.closed_until = time.monotonic() + pause
        if all(one.failures > self.of.retries for one in self.of.servers):
            reasons = "; ".join(f"{one.url}: {one.why}" for one in self.of.servers)
            answered = len(self.jobs) - self.left - len(self.lost)
            self._end(
                InputError(
                    f"no server answers any more ({reasons}); {answered} of {len(self.jobs)} requests have been "
                    f"answered: start it again; with responses=FOLDER the same command goes on"
                )
            )

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

    async def _ask(self, server: Server, job: Job) -> Any:
        """A job's response.

        Raises:
            Failure: it may come the next time.
            Rejection: it will not come.
            InputError: no request like this one will be answered.
        """
        kind, named = self.of.kind, self.of.kind.fields(self.of.model, job.variant, server.listing)
        try:
            async with self.session.post(f"{server.url}{job.path}", json={**job.payload, **named}) as answer:
                status, text = answer.status, await answer.text()
        except TimeoutError:
            raise Failure(f"no answer within {self.of.timeout:g} seconds") from None
        except aiohttp.ClientConnectorError as error:
            raise Failure(f"not reached ({first_line(error.os_error)})", innocent=True) from None
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise Failure(f"the connection broke ({first_line(error)})") from None
        if status in (408, 429) or status >= 500:
            wait = _seconds(answer.headers.get("Retry-After"))
            raise Failure(f"status {status}, {_said(text)}", wait, innocent=status == 429)
        if status in FATAL:
            hint = FATAL[status] or f"it has no adapter {job.variant}, or no {job.path}"
            raise InputError(f"{server.url} answers {status}: {hint} ({_said(text)})")
        if status != 200:
            raise Rejection(f"{server.url} answers {status}: {_said(text)}")
        try:
            body = json.loads(text)
            if kind.echoes and body.get("model") != named["model"]:
                raise Failure(f"it answered under {body.get('model')!r}, not {named['model']!r}")
            return job.read(body)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise Failure(f"its answer cannot be read ({first_line(error)})") from None


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
    except ValueError:
        return None


def _said(text: str) -> str:
    """The message in an error's body."""
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") or error.get("detail") or text if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    return " ".join(str(text).split())[:200] or "without a word"
