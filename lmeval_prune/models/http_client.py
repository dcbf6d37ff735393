"""HTTP client for servers: every response is bounded in time, and every value in it is checked."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import aiohttp

from lmeval_prune.errors import InputError, brief, first_line

MAX_LOG_PROBABILITY = 0.01  # rounding can make a log-probability slightly positive
T = TypeVar("T")


@dataclass(eq=False)
class RetryableError(Exception):
    """A request that failed and may succeed when it is sent again."""

    message: str
    is_servers: bool = False  # the request is not to blame: the server is not reachable, or has been restarted
    retry_after: float | None = None  # seconds, from the header of this name

    def __str__(self) -> str:
        return self.message


class RejectedError(Exception):
    """A request that would fail again: the server rejects it, or its answer is unusable."""


class Response(NamedTuple):
    """Complete response of a server."""

    status: int
    body: bytes
    retry_after: float | None  # seconds

    @property
    def description(self) -> str:
        """Return the status and the message of an error response in one line."""
        text = self.body.decode(errors="replace")
        with suppress(RetryableError):
            body = parse_json(self.body)
            error = body.get("error", body) if isinstance(body, dict) else body
            text = error.get("message") or error.get("detail") or text if isinstance(error, dict) else str(error)
        hint = "; give the server's key in OPENAI_API_KEY" if self.status in (401, 403) else ""
        return f"status {self.status}, {brief(str(text), 200) or 'no message'}{hint}"


@dataclass(frozen=True)
class Connection:
    """Settings of connections to servers."""

    headers: dict[str, str]  # of every request
    verify: Any = True  # aiohttp's `ssl` argument
    timeout: float = 600.0  # seconds for a request and its complete response

    def session(self) -> aiohttp.ClientSession:
        """Open a session."""
        limits = aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(30.0, self.timeout))
        connector = aiohttp.TCPConnector(limit=0, ssl=self.verify)
        return aiohttp.ClientSession(connector=connector, timeout=limits, headers=self.headers)

    def run(self, call: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
        """Run a coroutine function that sends a few requests, with a timeout of at most one minute each."""

        async def run() -> T:
            async with replace(self, timeout=min(self.timeout, 60.0)).session() as client:
                return await call(client)

        return asyncio.run(run())


async def send(client: aiohttp.ClientSession, method: str, url: str, content: Any = None) -> Response:
    """Send a request and read the complete response; raise `RetryableError` if there is none within the limits."""
    try:
        async with client.request(method, url, json=content) as response:
            retry_after = response.headers.get("Retry-After", "")  # seconds, or a date
            seconds = float(retry_after) if retry_after.isdecimal() else None
            return Response(response.status, await response.read(), seconds)
    except TimeoutError:
        raise RetryableError(
            f"no response within {client.timeout.total:g} seconds (timeout= and num_concurrent= decide)"
        ) from None
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        reason = "the connection is refused" if refused else f"not reached ({first_line(error.os_error)})"
        raise RetryableError(reason, is_servers=True) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise RetryableError(f"the connection broke ({first_line(error)})") from None


def parse(parser: Callable[[Any], Any], value: Any) -> Any:
    """Apply a parser to a server's response; raise `RetryableError` if the response has another form."""
    try:
        return parser(value)
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RetryableError(f"its response cannot be parsed ({first_line(error)})") from None


def parse_json(body: bytes) -> Any:
    """Parse a response body as JSON; raise `RetryableError` if it is not JSON."""
    return parse(json.loads, body)


def log_probability(value: Any) -> float:
    """Return a value if it is a log-probability; raise `RejectedError` otherwise (NaN, infinite, null, text)."""
    if type(value) not in (int, float) or not -sys.float_info.max <= value <= MAX_LOG_PROBABILITY:
        text = repr(value) if isinstance(value, float | str | None) else f"of type {type(value).__name__}"
        raise RejectedError(
            f"a log-probability is {text[:40]}, not a number up to 0; does the model overflow in its type (dtype)?"
        )
    return float(value)
