"""Asks servers, before anything else, whether they serve what they will be asked for.

A server that is set up wrongly answers all the same: an adapter that fits no module of the model leaves it unpruned, a
request without an adapter may be answered under the last one's, another model has answers, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.dispatch import Dispatcher, Gone, Job, Server, list_models
from lmeval_prune.models.http_client import Connection, Failure, log_probability, read, read_json, send, whole_number
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
Signature = list[tuple[str, float]]  # tokens and their log-probabilities


def reach(kind: ServerKind, urls: Sequence[str], connection: Connection) -> list[Server]:
    """Return the servers that answer, with their models; `InputError` if none answers, or one is of another kind."""
    servers: list[Server] = []
    missing: list[InputError] = []
    for url in urls:
        try:
            servers.append(Server(url, connection.run(partial(list_models, url=url, kind=kind))))
        except Failure as error:
            if not error.innocent:  # it answers, and not as such a server does
                raise InputError(str(error)) from None
            missing.append(InputError(str(error)))
    if not servers:
        raise missing[0]
    for refusal in missing:
        logger.warning("%s: the others do the work", refusal)
    return servers


def model_name(kind: ServerKind, servers: Sequence[Server], name: str | None) -> str:
    """Return the unpruned model's name, the user's or the only one; `InputError` if it is not one on all servers."""
    for server in servers:
        models = server.listing.models
        if name is None:
            if len(models) != 1:
                raise InputError(f"{server.url} has {len(models)} models ({first_few(models)}); name one with model=")
            (name,) = models
        elif name not in models and kind.lists is None:
            raise InputError(
                f"{server.url} serves {first_few(models, 'no model')}, not {name}; another base model? Name it with "
                f"model=, or start the server with --served-model-name {name}"
            )
        for adapter, parent in server.listing.parents.items():
            if parent != name and parent in models:
                raise InputError(f"{server.url}: adapter {adapter} belongs to {parent}, not to {name}")
    assert name is not None
    return name


def tokens_of(connection: Connection, kind: ServerKind, url: str, model: str, text: str) -> list[int] | None:
    """Return a text's tokens, without special ones, as the server makes them; None if it does not tell."""

    def numbers(body: Any) -> list[int]:
        return [whole_number(token["id"] if isinstance(token, dict) else token) for token in body["tokens"]]

    try:
        response = connection.run(
            partial(send, method="POST", url=f"{url}/tokenize", content=kind.tokenize(model, text))
        )
        tokens: list[int] | None = read(numbers, read_json(response.body)) if response.status == 200 else None
    except Failure:
        return None
    return tokens


class Probe:
    """Questions to each server of a dispatcher, and checks of their answers."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Any) -> None:
        self.dispatcher, self.tokenizer = dispatcher, tokenizer
        self.tokens: list[int] = list(tokenizer.encode(TEXT, add_special_tokens=False))

    def run(self, variants: Sequence[Served]) -> None:
        """Refuse a server that does not serve the model and these variants; leave out those that end meanwhile."""
        pruned = [variant for variant in dict.fromkeys(variants) if variant != DENSE]
        left: list[Server] = []
        for server in self.dispatcher.servers:
            try:
                self._check(server, pruned)
                left.append(server)
            except Gone as error:
                if not left and server is self.dispatcher.servers[-1]:
                    raise
                logger.warning("%s; it is left out", error)
        self.dispatcher.servers = left

    def _check(self, server: Server, pruned: Sequence[Served]) -> None:
        self._check_tokenizer(server)
        unpruned = self._signatures(server, [DENSE] * 4, 1)
        noise = max(SAME, 1.5 * max(distance(*pair) for pair in combinations(unpruned, 2)))
        alone = dict(zip(pruned, self._signatures(server, pruned, 1), strict=True))
        for variant, signature in alone.items():
            if distance(signature, unpruned[0]) <= noise:
                raise InputError(
                    f"{server.url} answers under {variant} as the unpruned model does: the adapter matches none of "
                    f"the modules that it adapts (vLLM: --lora-target-modules o_proj), or it is not applied"
                )
        for (variant, signature), (other, same) in combinations(alone.items(), 2):
            if distance(signature, same) <= noise:
                raise InputError(
                    f"{server.url} answers under {variant} as under {other}: two names of one adapter? Start it with "
                    f"the folders that `lmeval-prune export adapter` wrote"
                )
        self._check_batch(server, {DENSE: unpruned[0], **alone})

    def _check_tokenizer(self, server: Server) -> None:
        dispatcher, count = self.dispatcher, len(self.tokens)
        tokens = tokens_of(dispatcher.connection, dispatcher.kind, server.url, dispatcher.model, TEXT)
        if tokens is None:
            logger.info("%s does not say how it makes tokens; not compared", server.url)
        elif tokens != self.tokens:
            raise InputError(
                f"{server.url} makes {len(tokens)} tokens of a text of which this tokenizer makes {count}"
                f"{', other ones' if count == len(tokens) else ''}: another base model? Give tokenizer= of the model "
                f"that is served"
            )

    def _check_batch(self, server: Server, alone: dict[Served, Signature]) -> None:
        """Check that each variant stays itself in a batch with others.

        Answers are rounded otherwise in a batch: only one that is nearer to another variant by more than half of what
        separates the two is that other's, and only if this is more than the rounding.
        """
        pruned = [variant for variant in alone if variant != DENSE][:TOGETHER]
        if not pruned:
            return
        mixed = [variant for each in pruned for variant in (each, DENSE)]
        answers = list(zip(mixed, self._signatures(server, mixed, len(mixed)), strict=True))
        unpruned = [signature for variant, signature in answers if variant == DENSE]
        rounding = min((distance(*pair) ** 2 for pair in combinations(unpruned, 2)), default=0.0)
        for variant, signature in answers:
            nearness = {each: distance(signature, alone[each]) for each in (DENSE, *pruned)}
            other = min(nearness, key=nearness.__getitem__)
            apart = distance(alone[other], alone[variant]) ** 2
            if nearness[variant] ** 2 - nearness[other] ** 2 <= apart / 2 or apart <= 4 * rounding:
                continue
            requests = "the unpruned model's requests" if variant == DENSE else f"requests under {variant}"
            raise InputError(
                f"{server.url} answers {requests} under {other} when both are in one batch (vLLM on CPU does so "
                f"without a spare slot): start it with a --max-loras one above the number of adapters, or leave dense "
                f"out"
            )

    def _signatures(self, server: Server, variants: Sequence[Served], concurrent: int) -> list[Signature]:
        """Ask a server for its answers under variants."""
        kind = self.dispatcher.kind
        length = {"max_tokens": 1, "echo": True} if kind.scores else {"max_tokens": GENERATED}
        payload = {"prompt": self.tokens[:LENGTH], "temperature": 0, **kind.telling, **length}
        name = "a question to try it"
        jobs = [Job("/v1/completions", lambda: payload, variant, self._signature, name) for variant in variants]
        return list(self.dispatcher.only(server, concurrent).all(jobs))

    def _signature(self, body: dict[str, Any]) -> Signature:
        logprobs = body["choices"][0]["logprobs"]
        if "content" in logprobs:  # as in chats
            pairs = [(str(token["token"]), token["logprob"]) for token in logprobs["content"]]
        else:
            pairs = list(zip(map(str, logprobs["tokens"]), logprobs["token_logprobs"], strict=True))
        if self.dispatcher.kind.scores:
            pairs = pairs[1:-1]  # the first has none, the last is generated
        if not pairs:
            raise Failure("it gives no log-probabilities")
        return [(token, log_probability(value)) for token, value in pairs]


def distance(first: Signature, second: Signature) -> float:
    """Return the root mean square of the differences of log-probabilities.

    It ends with the first token that differs, which counts 1.
    """
    squares = []
    for (token, value), (other, other_value) in zip(first, second, strict=False):
        squares.append(1.0 if token != other else (value - other_value) ** 2)
        if token != other:
            break
    return math.sqrt(sum(squares) / len(squares))
