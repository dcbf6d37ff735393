"""Send requests to a server that may fail.

A request that fails is sent again, after a pause that doubles, up to `max_retries` times. After a failure, nothing is
sent until the server lists the model that it had at the start; it may have been started again with another one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import ClientSession
from tqdm import tqdm

from lmeval_prune.errors import InputError
from lmeval_prune.models.http_client import (
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
OnResult = Callable[[int, Any], None]  # called with the index of a request and its result


@dataclass
class Job:
    """A request to the server."""

    path: str  # of the API, e.g. `/v1/completions`
    payload: Callable[[], dict[str, Any]]  # builds the request body, without the fields that name the variant
    variant: ServedVariant
    parse: Callable[[dict[str, Any]], Any]  # extracts the result from the response body
    name: str  # for messages
    index: int  # position of its result


@dataclass
class Dispatcher:
    """A server, and the limits for requests to it."""

    kind: ServerKind
    model: str  # name of the unpruned model on the server
    url: str
    listing: Listing
    connection: Connection
    num_concurrent: int = 64  # requests at a time
    max_retries: int = 8  # of a request, and of a listing
    first_wait: ClassVar[float] = 0.5  # seconds after the first failure

    def run(
        self,
        jobs: Sequence[Job],
        on_result: OnResult = lambda index, result: None,
        show_progress: bool = False,
    ) -> list[Any]:
        """Send jobs in their order and return the results by `Job.index`.

        `on_result` is called with index and result as soon as an answer arrives. An `InputError` for requests that
        failed for good is raised after all other answers have been reported, one for a failed server at once.
        """
        if not jobs:
            return []
        description = f"requests to {self.url}"
        with tqdm(total=len(jobs), desc=description, disable=not show_progress, smoothing=0.05) as progress:
            run = _Run(self, jobs, on_result, progress)
            asyncio.run(run.run())
        return [run.results[index] for index in sorted(run.results)]

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after a number of failures in a row: doubling, with jitter."""
        return float(min(MAX_WAIT, self.first_wait * 2 ** (failures - 1)) * random.uniform(0.75, 1.25))


class _Run:
    """One run of a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, jobs: Sequence[Job], on_result: OnResult, progress: Any) -> None:
        self.dispatcher, self.on_result, self.progress = dispatcher, on_result, progress
        self.count, self.waiting = len(jobs), list(reversed(jobs))
        self.results: dict[int, Any] = {}
        self.failed: list[tuple[Job, str]] = []  # with the reason
        self.is_suspect = False  # the server has failed since it listed its model
        self.recovering = asyncio.Lock()

    async def run(self) -> None:
        """Finish all jobs; raise the first error that ends the run."""
        async with self.dispatcher.connection.session() as self.client:
            workers = min(self.dispatcher.num_concurrent, self.count)
            tasks = [asyncio.create_task(self._work()) for _ in range(workers)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed:
            job, reason = self.failed[0]
            others = "; all others were answered" if self.results else ""
            raise InputError(
                f"{len(self.failed)} of {self.count} requests failed, the first is {job.name} under {job.variant}: "
                f"{self.dispatcher.url}: {reason}{others}"
            )

    async def _work(self) -> None:
        while self.waiting:
            job = self.waiting.pop()
            try:
                result = await self._answer(job)
            except RejectedError as error:
                self.failed.append((job, str(error)))
            else:
                self.results[job.index] = result
                self.on_result(job.index, result)
            self.progress.update()

    async def _answer(self, job: Job) -> Any:
        """Send a job until it is answered; raise `RejectedError` if it fails for good."""
        answered, attempts, failures = len(self.results), 0, 0
        while True:
            await self._recover()
            try:
                return await self._request(job)
            except RetryableError as failure:
                logger.info("%s: %s", self.dispatcher.url, failure)
                self.is_suspect = True
                attempts += 1
                failures += not failure.is_servers
                if failures > self.dispatcher.max_retries:
                    if self.waiting and len(self.results) == answered:
                        raise self._failed(failure) from None
                    raise RejectedError(f"{failure} (after {attempts} tries)") from None
                await asyncio.sleep(max(self.dispatcher.pause(attempts), min(failure.retry_after or 0.0, MAX_WAIT)))

    async def _recover(self) -> None:
        """Wait until the server lists its model again, if it has failed; one worker asks, and the others wait."""
        async with self.recovering:
            failures = 0
            while self.is_suspect:
                try:
                    self.is_suspect = False
                    listing = await list_models(self.client, self.dispatcher.url, self.dispatcher.kind)
                    self._check_model(listing)
                    self.dispatcher.listing = listing  # ids of adapters may have changed
                except RetryableError as failure:
                    self.is_suspect = True
                    failures += 1
                    if failures > self.dispatcher.max_retries:
                        raise self._failed(failure) from None
                    await asyncio.sleep(self.dispatcher.pause(failures))

    async def _request(self, job: Job) -> Any:
        dispatcher = self.dispatcher
        kind, listing, url = dispatcher.kind, dispatcher.listing, dispatcher.url
        variant_fields = kind.variant_fields(dispatcher.model, job.variant, listing)
        response = await send(self.client, "POST", f"{url}{job.path}", {**job.payload(), **variant_fields})
        _check_status(url, job, response)
        body = parse_json(response.body)
        model = variant_fields["model"]
        if kind.echoes_model and (answered := parse(lambda body: str(body.get("model")), body)) != model:
            raise RetryableError(f"it answered as {answered[:100]!r}, not {model!r}")
        result = parse(job.parse, body)
        if kind.adapter_list:  # answers do not name their adapters: check that the adapter ids are still the same
            current = await list_models(self.client, url, kind)
            self._check_model(current)
            if current.adapter_ids != listing.adapter_ids:
                raise RetryableError("it was restarted with its adapters in another order", is_servers=True)
        return result

    def _check_model(self, listing: Listing) -> None:
        """Check that the server lists the model that it had at the start."""
        model, before = (listed.model(self.dispatcher.model) for listed in (listing, self.dispatcher.listing))
        if model.identity != before.identity:
            raise RetryableError(f"it serves another model now ({model.root})", is_servers=True)

    def _failed(self, failure: RetryableError) -> InputError:
        return InputError(
            f"the server has failed ({self.dispatcher.url}: {failure}); {len(self.results)} of {self.count} requests "
            f"were answered: start it and run the same command again; with responses=FOLDER it resumes"
        )


async def list_models(client: ClientSession, url: str, kind: ServerKind) -> Listing:
    """Request a server's models and adapters; raise `RetryableError` if it does not list them as its kind does."""
    bodies: list[Any] = []
    for path in filter(None, ("/v1/models", kind.adapter_list)):
        response = await send(client, "GET", f"{url}{path}")
        if response.status != 200:
            raise RetryableError(
                f"{path} lists no models ({response.description}); give another server=", is_servers=True
            )
        bodies.append(parse_json(response.body))
    listing: Listing = parse(lambda pair: kind.parse_listing(*pair), [*bodies, None][:2])
    if listing.software in KINDS and listing.software != kind.name:
        raise InputError(f"{url} is not a server of `server={kind.name}`: give server={listing.software}")
    return listing


def _check_status(url: str, job: Job, response: Response) -> None:
    status = response.status
    if status in (408, 429) or status >= 500:
        raise RetryableError(response.description, retry_after=response.retry_after)
    if status in (401, 403, 404):
        raise InputError(f"{url} refuses {job.path} under {job.variant}: {response.description}")
    if status != 200:
        raise RejectedError(response.description)
