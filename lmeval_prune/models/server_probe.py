"""Check at the start of a run that each server serves the model and its variants.

A server that is set up wrongly answers without an error: an adapter that matches no module leaves the model unpruned, a
request without an adapter may be computed with another request's adapter, and so on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.dispatch import Dispatcher, Job, Server, ServersFailedError, list_models
from lmeval_prune.models.http_client import (
    Cause,
    Connection,
    RetryableError,
    log_probability,
    parse,
    parse_json,
    send,
    whole_number,
)
from lmeval_prune.models.server_kinds import DENSE, ServedVariant, ServerKind

logger = logging.getLogger(__name__)
PROBE_TEXT = (
    "A baker sells 12 rolls at 30 cents each and 5 loaves at 2.50 each. First she adds up what the rolls bring in, "
    "then the loaves, and writes both numbers into her green book. Why does she need the sum?"
)
PROMPT_LENGTH = 64  # tokens of the text in a request
GENERATED_LENGTH = 12  # tokens to generate, if the server does not score prompts
BATCH_ADAPTERS = 32  # adapters in one batch
MIN_DISTANCE = 1e-5  # smaller distances of signatures are rounding
Signature = list[tuple[str, float]]  # tokens and their log-probabilities


def connect(kind: ServerKind, urls: Sequence[str], connection: Connection) -> list[Server]:
    """Return the reachable servers with their listings; refuse a server of another kind."""
    servers: list[Server] = []
    unreachable: list[InputError] = []
    for url in urls:
        try:
            servers.append(Server(url, connection.run(partial(list_models, url=url, kind=kind))))
        except RetryableError as error:
            if error.cause is not Cause.SERVER:  # there is a server, and it answers as no server of this kind does
                raise InputError(str(error)) from None
            unreachable.append(InputError(str(error)))
    if not servers:
        raise unreachable[0]
    for failure in unreachable:
        logger.warning("%s; continuing with the other servers", failure)
    return servers


def model_name(kind: ServerKind, servers: Sequence[Server], name: str | None) -> str:
    """Return the name of the unpruned model on all servers; default: the only model that they list."""
    for server in servers:
        models = server.listing.models
        if name is None:
            if len(models) != 1:
                raise InputError(f"{server.url} has {len(models)} models ({first_few(models)}); name one with model=")
            (name,) = models
        elif name not in models and kind.adapter_list is None:
            raise InputError(
                f"{server.url} serves {first_few(models, 'no model')}, not {name}; another base model? Name it with "
                f"model=, or start the server with --served-model-name {name}"
            )
        for adapter, parent in server.listing.parents.items():
            if parent != name and parent in models:
                raise InputError(f"{server.url}: adapter {adapter} belongs to {parent}, not to {name}")
    assert name is not None
    return name


def server_tokens(connection: Connection, kind: ServerKind, url: str, model: str, text: str) -> list[int] | None:
    """Tokenize a text on a server, without special tokens; return None if the server has no such endpoint."""

    def token_ids(body: Any) -> list[int]:
        return [whole_number(token["id"] if isinstance(token, dict) else token) for token in body["tokens"]]

    payload = kind.tokenize_payload(model, text)
    try:
        response = connection.run(partial(send, method="POST", url=f"{url}/tokenize", content=payload))
        tokens: list[int] | None = parse(token_ids, parse_json(response.body)) if response.status == 200 else None
    except RetryableError:
        return None
    return tokens


class Probe:
    """Checks each server of a dispatcher by a few requests."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Any) -> None:
        self.dispatcher, self.tokenizer = dispatcher, tokenizer
        self.tokens: list[int] = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))

    def run(self, variants: Sequence[ServedVariant]) -> None:
        """Refuse a server that does not serve these variants; remove servers that fail from the dispatcher."""
        pruned = [variant for variant in dict.fromkeys(variants) if variant != DENSE]
        working: list[Server] = []
        for server in self.dispatcher.servers:
            try:
                self._check(server, pruned)
                working.append(server)
            except ServersFailedError as error:
                if not working and server is self.dispatcher.servers[-1]:
                    raise
                logger.warning("%s; continuing without this server", error)
        self.dispatcher.servers = working

    def _check(self, server: Server, pruned: Sequence[ServedVariant]) -> None:
        self._check_tokenizer(server)
        unpruned = self._signatures(server, [DENSE] * 4, 1)
        noise = max(MIN_DISTANCE, 1.5 * max(distance(*pair) for pair in combinations(unpruned, 2)))
        alone = {DENSE: unpruned[0], **dict(zip(pruned, self._signatures(server, pruned, 1), strict=True))}
        for (other, other_signature), (variant, signature) in combinations(alone.items(), 2):
            if distance(signature, other_signature) <= noise:
                raise InputError(
                    f"{server.url} answers under {variant} as under {other}: two names of one adapter, or an adapter "
                    f"that matches no module (vLLM: --lora-target-modules o_proj)? Start it by the command that "
                    f"`lmeval-prune export adapter` prints"
                )
        self._check_batch(server, alone)

    def _check_tokenizer(self, server: Server) -> None:
        dispatcher, count = self.dispatcher, len(self.tokens)
        tokens = server_tokens(dispatcher.connection, dispatcher.kind, server.url, dispatcher.model, PROBE_TEXT)
        if tokens is None:
            logger.info("%s cannot tokenize texts; its tokenizer is not compared", server.url)
        elif tokens != self.tokens:
            raise InputError(
                f"{server.url} splits a text into {len(tokens)} tokens, this tokenizer into {count}"
                f"{' different ones' if count == len(tokens) else ''}: another base model? Give tokenizer= of the "
                f"served model"
            )

    def _check_batch(self, server: Server, alone: dict[ServedVariant, Signature]) -> None:
        """Check that variants do not mix in a batch.

        Batching changes rounding. So an answer belongs to another variant only if it is nearer to that variant by more
        than half the distance of the two variants, and if this distance exceeds the rounding.
        """
        pruned = [variant for variant in alone if variant != DENSE][:BATCH_ADAPTERS]
        if not pruned:
            return
        batch = [variant for each in pruned for variant in (each, DENSE)]
        answers = list(zip(batch, self._signatures(server, batch, len(batch)), strict=True))
        unpruned = [signature for variant, signature in answers if variant == DENSE]
        rounding = min((distance(*pair) ** 2 for pair in combinations(unpruned, 2)), default=0.0)
        for variant, signature in answers:
            distances = {each: distance(signature, alone[each]) for each in (DENSE, *pruned)}
            other = min(distances, key=distances.__getitem__)
            separation = distance(alone[other], alone[variant]) ** 2
            if distances[variant] ** 2 - distances[other] ** 2 <= separation / 2 or separation <= 4 * rounding:
                continue
            requests = "the unpruned model's requests" if variant == DENSE else f"requests under {variant}"
            raise InputError(
                f"{server.url} answers {requests} under {other} when both are in one batch (as vLLM on a CPU without a "
                f"spare slot): start it with --max-loras set to the number of adapters plus one, or leave out dense"
            )

    def _signatures(self, server: Server, variants: Sequence[ServedVariant], num_concurrent: int) -> list[Signature]:
        """Request the log-probabilities of the probe text under each variant."""
        kind = self.dispatcher.kind
        length = {"max_tokens": 1, "echo": True} if kind.scores_prompts else {"max_tokens": GENERATED_LENGTH}
        payload = {"prompt": self.tokens[:PROMPT_LENGTH], "temperature": 0, **kind.logprob_settings, **length}
        jobs = [
            Job("/v1/completions", lambda: payload, variant, self._parse_signature, "a probe", index)
            for index, variant in enumerate(variants)
        ]
        return self.dispatcher.restricted_to(server, num_concurrent).run(jobs)

    def _parse_signature(self, body: dict[str, Any]) -> Signature:
        logprobs = body["choices"][0]["logprobs"]
        if "content" in logprobs:  # the form of chats, which llama.cpp uses for completions, too
            pairs = [(str(token["token"]), token["logprob"]) for token in logprobs["content"]]
        else:
            pairs = list(zip(map(str, logprobs["tokens"]), logprobs["token_logprobs"], strict=True))
        if self.dispatcher.kind.scores_prompts:
            pairs = pairs[1:-1]  # the first token has no log-probability, the last is generated
        if not pairs:
            raise RetryableError("it gives no log-probabilities")
        return [(token, log_probability(value)) for token, value in pairs]


def distance(first: Signature, second: Signature) -> float:
    """Return the root mean square difference of log-probabilities, up to the first different token, which counts 1."""
    squares = []
    for (token, value), (other_token, other_value) in zip(first, second, strict=False):
        squares.append(1.0 if token != other_token else (value - other_value) ** 2)
        if token != other_token:
            break
    return math.sqrt(sum(squares) / len(squares))
