"""Send requests to a server that may fail.

A request that fails is sent again, after a pause that doubles, up to `max_retries` times, if the server still lists the
model that it had at the start; it may have been started again with another one.
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
    max_retries: int = 8  # of a request
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
            return asyncio.run(self._run(jobs, on_result, progress))

    async def _run(self, jobs: Sequence[Job], on_result: OnResult, progress: Any) -> list[Any]:
        results: dict[int, Any] = {}
        failed: list[tuple[Job, str]] = []  # with the reason
        waiting = iter(jobs)

        async def work(client: ClientSession) -> None:
            for job in waiting:
                answered = len(results)
                try:
                    results[job.index] = await self._answer(client, job)
                    on_result(job.index, results[job.index])
                except RejectedError as error:
                    failed.append((job, str(error)))
                except RetryableError as error:
                    if error.is_servers or (len(results) == answered and len(results) + len(failed) + 1 < len(jobs)):
                        raise InputError(
                            f"the server has failed ({self.url}: {error}); {len(results)} of {len(jobs)} requests were "
                            f"answered: start it and run the same command again; with responses=FOLDER it resumes"
                        ) from None
                    failed.append((job, str(error)))
                progress.update()

        async with self.connection.session() as client:
            tasks = [asyncio.create_task(work(client)) for _ in range(min(self.num_concurrent, len(jobs)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            job, reason = failed[0]
            raise InputError(
                f"{len(failed)} of {len(jobs)} requests failed, the first is {job.name} under {job.variant}: "
                f"{self.url}: {reason}; {len(results)} were answered"
            )
        return [results[index] for index in sorted(results)]

    async def _answer(self, client: ClientSession, job: Job) -> Any:
        """Send a job until it is answered; after a failure, ask first whether the server has its model still."""
        failures = 0
        while True:
            try:
                if failures:
                    self.listing = await self._list(client)  # ids of adapters may have changed
                return await self._request(client, job)
            except RetryableError as failure:
                logger.info("%s: %s", self.url, failure)
                failures += 1
                if failures > self.max_retries:
                    raise
                pause = self.first_wait * 2 ** (failures - 1) * random.uniform(0.75, 1.25)
                await asyncio.sleep(min(MAX_WAIT, max(pause, failure.retry_after or 0.0)))

    async def _list(self, client: ClientSession) -> Listing:
        """Return what the server lists now; raise `RetryableError` if its model is not that of the start."""
        listing = await list_models(client, self.url, self.kind)
        model, before = (listed.model(self.model) for listed in (listing, self.listing))
        if model.identity != before.identity:
            raise RetryableError(f"it serves another model now ({model.root})", is_servers=True)
        return listing

    async def _request(self, client: ClientSession, job: Job) -> Any:
        kind, listing, url = self.kind, self.listing, self.url
        variant_fields = kind.variant_fields(self.model, job.variant, listing)
        response = await send(client, "POST", f"{url}{job.path}", {**job.payload(), **variant_fields})
        status = response.status
        if status in (408, 429) or status >= 500:
            raise RetryableError(response.description, retry_after=response.retry_after)
        if status in (401, 403, 404):
            raise InputError(f"{url} refuses {job.path} under {job.variant}: {response.description}")
        if status != 200:
            raise RejectedError(response.description)
        body = parse_json(response.body)
        model = variant_fields["model"]
        if kind.echoes_model and (answered := parse(lambda body: str(body.get("model")), body)) != model:
            raise RetryableError(f"it answered as {answered[:100]!r}, not {model!r}")
        result = parse(job.parse, body)
        # answers of llama.cpp do not name their adapters: the adapter ids must still be the same
        if kind.adapter_list and (await self._list(client)).adapter_ids != listing.adapter_ids:
            raise RetryableError("it was restarted with its adapters in another order", is_servers=True)
        return result


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
