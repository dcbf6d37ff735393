"""Asks a server over HTTP: its answer is bounded in time and size, and what is read out of it is checked.

Nothing else talks to servers, so that no server can hold a run for ever, fill its memory or end it in a traceback.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import aiohttp

from lmeval_prune.errors import InputError, first_line

MOST_BYTES = 32 * 2**20  # of an answer: twice the log-probabilities of a prompt of 128,000 tokens
T = TypeVar("T")
ROUNDING = 0.01  # by which a log-probability may be above 0


@dataclass(eq=False)
class Failure(Exception):  # noqa: N818 - it may pass
    """A request that failed in a way that may pass."""

    message: str  # what happened
    wait: float | None = None  # seconds that the server asks for
    innocent: bool = False  # nothing can have been wrong with the request: the server was not reached, or is busy
    busy: bool = False  # the server is well, and has too much to do
    refused: bool = False  # the server is there, and could not answer this request

    def __str__(self) -> str:
        return self.message


class Rejection(Exception):  # noqa: N818 - nothing is wrong here
    """A refusal of a request, which the server would not answer the next time, or not with anything of use."""


class Response(NamedTuple):
    """The whole answer of a server; `retry_after` is the header of this name."""

    status: int
    body: bytes
    retry_after: str | None


@dataclass(frozen=True)
class Connection:
    """Headers and limits by which servers are reached."""

    headers: dict[str, str]  # of each request
    verify: Any = True  # as aiohttp's `ssl`
    timeout: float = 600.0  # seconds for a request and its whole answer

    def session(self) -> aiohttp.ClientSession:
        """Return a session of requests."""
        limits = aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(30.0, self.timeout))
        connector = aiohttp.TCPConnector(limit=0, ssl=self.verify)
        return aiohttp.ClientSession(connector=connector, timeout=limits, headers=self.headers)

    def run(self, call: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
        """Return the result of a few requests, each within a minute at most."""

        async def run() -> T:
            async with replace(self, timeout=min(self.timeout, 60.0)).session() as client:
                return await call(client)

        return asyncio.run(run())


async def send(client: aiohttp.ClientSession, method: str, url: str, content: Any = None) -> Response:
    """Send a request and return its whole answer, within the session's time and `MOST_BYTES`.

    Raises:
        Failure: there is none.
    """
    body = bytearray()
    try:
        async with client.request(method, url, json=content) as answer:
            async for part in answer.content.iter_chunked(2**16):
                body += part
                if len(body) > MOST_BYTES:
                    answer.close()
                    raise Failure(f"its answer is larger than {MOST_BYTES >> 20} MiB")
            return Response(answer.status, bytes(body), answer.headers.get("Retry-After"))
    except TimeoutError:
        raise Failure(f"no answer within {client.timeout.total:g} seconds") from None
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        reason = "the connection is refused" if refused else f"not reached ({first_line(error.os_error)})"
        raise Failure(reason, innocent=True) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Failure(f"the connection broke ({first_line(error)})") from None


def read(reader: Callable[[Any], Any], value: Any) -> Any:
    """Read a server's answer, which may be anything; `Failure` if it cannot be read."""
    try:
        return reader(value)
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Failure(f"its answer cannot be read ({first_line(error)})") from None


def read_json(body: bytes) -> Any:
    """Return the value of an answer in JSON; `Failure` if it is none."""
    return read(json.loads, body)


def whole_number(value: Any, least: int = 0) -> int:
    """Return a whole number of an answer; `ValueError` if it is none, or less than the least."""
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is not a whole number from {least}")
    return value


def log_probability(value: Any) -> float:
    """Return a log-probability of an answer; `Rejection` if it is none."""
    if type(value) not in (int, float) or not -sys.float_info.max <= value <= ROUNDING:
        text = repr(value) if isinstance(value, float | str | None) else f"of type {type(value).__name__}"
        raise Rejection(
            f"a log-probability is {text[:40]}, not a number up to 0; does the model overflow in its type (dtype)?"
        )
    return float(value)
