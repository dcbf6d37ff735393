"""Asks servers, before anything else, whether they serve what they will be asked for.

A server that is set up wrongly answers all the same: an adapter that fits no module of the model leaves it unpruned, a
request without an adapter may be answered under the last one's, another model has answers, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.dispatch import Dispatcher, Gone, Job, Server
from lmeval_prune.models.http_client import (
    Failure,
    Response,
    log_probability,
    read,
    read_json,
    send,
    session,
    whole_number,
)
from lmeval_prune.models.served import DENSE, Served, ServerKind

logger = logging.getLogger(__name__)
TEXT = (
    "A baker sells 12 rolls at 30 cents each and 5 loaves at 2.50 each. First she adds up what the rolls bring in, "
    "then the loaves, and writes both numbers into her green book. Why does she need the sum?"
)
LENGTH = 64  # tokens of it
GENERATED = 12  # tokens, where a server does not score the prompt
TOGETHER = 32  # adapters that are asked for at once
SAME = 1e-5  # difference of log-probabilities below which two answers are one
_THIS = "is it the server that `server=` says?"
Signature = list[tuple[str, float]]  # tokens and their log-probabilities


class Connection:
    """Questions that are asked one by one, before there is any work.

    Args:
        headers: of each request.
        verify: as aiohttp's `ssl`.
        timeout: seconds for a request and its answer.
    """

    def __init__(self, headers: dict[str, str], verify: Any, timeout: float) -> None:
        self.headers, self.verify, self.timeout = headers, verify, min(timeout, 60.0)

    def get(self, url: str) -> Any:
        """What is at an address, as JSON.

        Raises:
            InputError: nothing is, or it cannot be read.
        """
        try:
            answer = self._ask("GET", url)
        except Failure as error:
            if not error.innocent:
                raise InputError(f"{url} gives no whole answer ({error}); {_THIS}") from None
            raise InputError(f"no server answers at {url} ({error}); start it, or give another base_url") from None
        if answer.status in (401, 403):
            raise InputError(f"{url} answers {answer.status}: give its key in OPENAI_API_KEY")
        if answer.status != 200:
            raise InputError(f"{url} answers {answer.status}; {_THIS}")
        try:
            return read_json(answer.body)
        except Failure as error:
            raise InputError(f"{url} does not answer with JSON, or {error}; {_THIS}") from None

    def tokens(self, kind: ServerKind, url: str, model: str, text: str) -> list[int] | None:
        """A text's tokens, without special ones, as the server makes them; None if it does not tell."""

        def numbers(body: Any) -> list[int]:
            return [whole_number(one["id"] if isinstance(one, dict) else one) for one in body["tokens"]]

        try:
            answer = self._ask("POST", f"{url}/tokenize", kind.tokenize(model, text))
            found: list[int] | None = read(numbers, read_json(answer.body)) if answer.status == 200 else None
        except Failure:
            return None
        return found

    def _ask(self, method: str, url: str, content: Any = None) -> Response:
        async def ask() -> Response:
            async with session(self.headers, self.verify, self.timeout) as client:
                return await send(client, method, url, content)

        return asyncio.run(ask())


def reach(kind: ServerKind, urls: Sequence[str], connection: Connection) -> list[Server]:
    """The servers that are there, with what they have.

    Raises:
        InputError: none is, or one is not what it should be.
    """
    found: list[Server] = []
    missing: list[InputError] = []
    for url in urls:
        try:
            models = connection.get(f"{url}/v1/models")
        except InputError as error:
            missing.append(error)
            continue
        adapters = connection.get(f"{url}{kind.lists}") if kind.lists else None
        try:
            found.append(Server(url, read(lambda pair: kind.listing(*pair), (models, adapters))))
        except Failure:
            raise InputError(f"{url} does not list its models as a server of `server={kind.name}` does") from None
    if not found:
        raise missing[0]
    for one in missing:
        logger.warning("%s: the others do the work", one)
    return found


def model_name(kind: ServerKind, servers: Sequence[Server], wanted: str | None) -> str:
    """The unpruned model's name, which must be one on all servers.

    Args:
        kind: of the servers.
        servers: see `reach`.
        wanted: by the user, if he says so.

    Raises:
        InputError: a server has another one, or several.
    """
    for server in servers:
        has = server.listing.models
        if wanted is None:
            if len(has) != 1:
                raise InputError(f"{server.url} has {len(has)} models ({first_few(has)}); name one with model=")
            (wanted,) = has
        elif wanted not in has and kind.lists is None:
            raise InputError(
                f"{server.url} serves {first_few(has, 'no model')}, not {wanted}; another base model? Name it with "
                f"model=, or start the server with --served-model-name {wanted}"
            )
        for name, parent in server.listing.parents.items():
            if parent != wanted and parent in has:
                raise InputError(f"{server.url}: adapter {name} belongs to {parent}, not to {wanted}")
    assert wanted is not None
    return wanted


class Probe:
    """What is asked of each server.

    Args:
        dispatcher: asks all of them.
        tokenizer: the model's.
        connection: for what is no completion.
    """

    def __init__(self, dispatcher: Dispatcher, tokenizer: Any, connection: Connection) -> None:
        self.dispatcher, self.tokenizer, self.connection = dispatcher, tokenizer, connection
        self.prompt: list[int] = list(tokenizer.encode(TEXT, add_special_tokens=False))[:LENGTH]

    def run(self, variants: Sequence[Served]) -> None:
        """Ask every server about the model and these variants.

        Raises:
            InputError: a server does not serve what it should.
        """
        pruned = [one for one in dict.fromkeys(variants) if one != DENSE]
        left: list[Server] = []
        for server in self.dispatcher.servers:
            try:
                self._one(server, pruned)
                left.append(server)
            except Gone as error:
                if len(self.dispatcher.servers) == 1:
                    raise
                logger.warning("%s; it is left out", error)
                gone = error
        if not left:
            raise gone
        self.dispatcher.servers = left

    def _one(self, server: Server, pruned: Sequence[Served]) -> None:
        self._tokenizer(server)
        again = self._asked(server, [DENSE] * 4, 1)
        noise = max(SAME, 1.5 * max(distance(one, other) for one, other in combinations(again, 2)))
        alone = dict(zip(pruned, self._asked(server, pruned, 1), strict=True))
        for variant, found in alone.items():
            if distance(found, again[0]) <= noise:
                raise InputError(
                    f"{server.url} answers under {variant} as the unpruned model does: the adapter matches none of "
                    f"the modules that it adapts (vLLM: --lora-target-modules o_proj), or it is not applied"
                )
        for variant, other in _alike(alone, noise):
            raise InputError(
                f"{server.url} answers under {variant} as under {other}: two names of one adapter? Start it with the "
                f"folders that `lmeval-prune export adapter` wrote"
            )
        self._together(server, {DENSE: again[0], **alone})

    def _tokenizer(self, server: Server) -> None:
        theirs = self.connection.tokens(self.dispatcher.kind, server.url, self.dispatcher.model, TEXT)
        ours = list(self.tokenizer.encode(TEXT, add_special_tokens=False))
        if theirs is None:
            logger.info("%s does not say how it makes tokens; not compared", server.url)
        elif theirs != ours:
            raise InputError(
                f"{server.url} makes {len(theirs)} tokens of a text of which this tokenizer makes {len(ours)}"
                f"{', other ones' if len(ours) == len(theirs) else ''}: another base model? Give tokenizer= of the "
                f"model that is served"
            )

    def _together(self, server: Server, alone: dict[Served, Signature]) -> None:
        """Whether each variant stays itself in a batch with others.

        Answers are rounded otherwise in a batch: only one that is nearer to another variant by more than half of what
        separates the two is that other's, and only if this is more than the rounding.
        """
        some = [one for one in alone if one != DENSE][:TOGETHER]
        if not some:
            return
        mixed = [each for variant in some for each in (variant, DENSE)]
        answers = list(zip(mixed, self._asked(server, mixed, len(mixed)), strict=True))
        same = [found for variant, found in answers if variant == DENSE]
        rounding = min((distance(*pair) ** 2 for pair in combinations(same, 2)), default=0.0)
        for variant, found in answers:
            other = min((DENSE, *some), key=lambda one: distance(found, alone[one]))
            apart = distance(alone[other], alone[variant]) ** 2
            if distance(found, alone[variant]) ** 2 - distance(found, alone[other]) ** 2 <= apart / 2:
                continue
            if apart <= 4 * rounding:
                continue  # the two cannot be told apart here
            what = "the unpruned model's requests" if variant == DENSE else f"requests under {variant}"
            raise InputError(
                f"{server.url} answers {what} under {other} when both are in one batch (vLLM on CPU does so without a "
                f"spare slot): start it with a --max-loras one above the number of adapters, or leave dense out"
            )

    def _asked(self, server: Server, variants: Sequence[Served], concurrent: int) -> list[Signature]:
        """Signatures of one server's answers under each variant."""
        settings: dict[str, Any] = {"prompt": self.prompt, "temperature": 0, **self.dispatcher.kind.telling}
        if self.dispatcher.kind.scores:
            settings |= {"max_tokens": 1, "echo": True}
        else:
            settings |= {"max_tokens": GENERATED}
        jobs = [
            Job("/v1/completions", lambda: settings, one, self._signature, "a question to try it") for one in variants
        ]
        return list(self.dispatcher.only(server, concurrent).all(jobs))

    def _signature(self, body: dict[str, Any]) -> Signature:
        given = body["choices"][0]["logprobs"]
        if "content" in given:  # as in chats
            pairs = [(str(one["token"]), one["logprob"]) for one in given["content"]]
        else:
            pairs = list(zip(map(str, given["tokens"]), given["token_logprobs"], strict=True))
        if self.dispatcher.kind.scores:
            pairs = pairs[1:-1]  # the first has none, the last is generated
        found = [(token, log_probability(value)) for token, value in pairs]
        if not found:
            raise Failure("it gives no log-probabilities")
        return found


def _alike(found: dict[Served, Signature], noise: float) -> Iterator[tuple[Served, Served]]:
    """Pairs of variants that answer alike; their means are alike, too."""
    means = sorted(
        ((sum(value for _, value in one) / len(one), each) for each, one in found.items()), key=itemgetter(0)
    )
    for place, (mean, variant) in enumerate(means):
        for other_mean, other in means[place + 1 :]:
            if other_mean - mean > noise:
                break
            if distance(found[variant], found[other]) <= noise:
                yield variant, other


def distance(one: Signature, other: Signature) -> float:
    """Root mean square of the differences of log-probabilities, up to the first token that differs, which counts 1."""
    squares = []
    for (token, value), (its, theirs) in zip(one, other, strict=False):
        if token != its:
            squares.append(1.0)
            break
        squares.append((value - theirs) ** 2)
    return math.sqrt(sum(squares) / len(squares))
