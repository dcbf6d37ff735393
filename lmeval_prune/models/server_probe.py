"""Check at the start of a run that the server serves the model and its variants.

A misconfigured server answers without an error. For example, an adapter that matches no module leaves the model
unpruned, or a request without an adapter is computed with the adapter of another request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.dispatch import Dispatcher, Job
from lmeval_prune.models.http_client import (
    Connection,
    RetryableError,
    log_probability,
    parse,
    parse_json,
    send,
    whole_number,
)
from lmeval_prune.models.server_kinds import UNPRUNED, Listing, ServedVariant, ServerKind
from lmeval_prune.models.server_record import ServerRecord, Signature, distance

logger = logging.getLogger(__name__)
PROBE_TEXT = (
    "A baker sells 12 rolls at 30 cents each and 5 loaves at 2.50 each. First she adds up what the rolls bring in, "
    "then the loaves, and writes both numbers into her green book. Why does she need the sum?"
)
PROMPT_LENGTH = 64  # tokens of the text in a request
GENERATED_LENGTH = 12  # tokens to generate, if the server does not score prompts
BATCH_ADAPTERS = 32  # adapters in one batch
MIN_DISTANCE = 1e-5  # smaller distances of signatures are rounding


def model_name(url: str, listing: Listing, kind: ServerKind, name: str | None) -> str:
    """Return the unpruned model's name on a server; without `name`, the only model that it lists."""
    models = listing.models
    if name is None:
        if len(models) != 1:
            raise InputError(f"{url} has {len(models)} models ({first_few(models)}); name one with model=")
        (name,) = models
    elif name not in models:
        raise InputError(
            f"{url} serves {first_few(models, 'no model')}, not {name}; give the served model's name with model=, or "
            f"start the server with {kind.name_option} {name}"
        )
    for adapter, parent in listing.parents.items():
        if parent != name and parent in models:
            raise InputError(f"{url}: adapter {adapter} belongs to {parent}, not to {name}")
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
    """Check the server of a dispatcher with a few requests."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Any, record: ServerRecord) -> None:
        self.dispatcher, self.tokenizer, self.record = dispatcher, tokenizer, record
        self.tokens: list[int] = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))

    def run(self, variants: Sequence[ServedVariant]) -> None:
        """Refuse a server that does not serve these variants."""
        self._check([variant for variant in dict.fromkeys(variants) if variant != UNPRUNED])
        self.record.save()

    def _check(self, pruned: Sequence[ServedVariant]) -> None:
        """Check the tokenizer, that all variants give different signatures, and that batches do not mix them."""
        url = self.dispatcher.url
        self._check_tokenizer()
        unpruned = self._signatures([UNPRUNED] * 4, 1)  # repeated to measure the server's noise
        self.record.check(url, unpruned[0])
        noise = max(MIN_DISTANCE, 1.5 * max(distance(*pair, 1) for pair in combinations(unpruned, 2)))
        signatures = {UNPRUNED: unpruned[0], **dict(zip(pruned, self._signatures(pruned, 1), strict=True))}
        for (other, other_signature), (variant, signature) in combinations(signatures.items(), 2):
            if distance(signature, other_signature, 1) <= noise:
                raise InputError(
                    f"{url} gives the same answers under {variant} as under {other}: both names mean one "
                    f"adapter, or an adapter matches no module (vLLM: --lora-target-modules o_proj); start it with the "
                    f"command that `lmeval-prune export adapter` prints"
                )
        self._check_batch(signatures)

    def _check_tokenizer(self) -> None:
        """Refuse a server whose tokenizer splits the probe text differently."""
        dispatcher, count = self.dispatcher, len(self.tokens)
        tokens = server_tokens(dispatcher.connection, dispatcher.kind, dispatcher.url, dispatcher.model, PROBE_TEXT)
        if tokens is None:
            logger.info("%s cannot tokenize texts; its tokenizer is not compared", dispatcher.url)
        elif tokens != self.tokens:
            raise InputError(
                f"{dispatcher.url} splits a text into {len(tokens)} tokens, the tokenizer of this run into {count}"
                f"{' different ones' if count == len(tokens) else ''}; set tokenizer= to that of the served model"
            )

    def _check_batch(self, expected: dict[ServedVariant, Signature]) -> None:
        """Check that a batch does not mix variants: each answer is nearest to its own variant's `expected` signature.

        Batches round differently, so two conditions must hold before an answer is taken for another variant's. Its
        squared distance from that variant is smaller by more than half the squared distance of the two variants, and
        the variants differ by clearly more than the rounding.
        """
        pruned = [variant for variant in expected if variant != UNPRUNED][:BATCH_ADAPTERS]
        if not pruned:
            return
        batch = [variant for pruned_variant in pruned for variant in (pruned_variant, UNPRUNED)]
        answers = list(zip(batch, self._signatures(batch, len(batch)), strict=True))
        unpruned = [signature for variant, signature in answers if variant == UNPRUNED]
        # the smallest difference: some of the unpruned answers may be wrong
        rounding = min((distance(*pair, 1) ** 2 for pair in combinations(unpruned, 2)), default=0.0)
        for variant, signature in answers:
            distances = {name: distance(signature, expected[name], 1) ** 2 for name in (UNPRUNED, *pruned)}
            other = min(distances, key=distances.__getitem__)
            separation = distance(expected[other], expected[variant], 1) ** 2
            is_nearer = distances[variant] - distances[other] > separation / 2
            if not is_nearer or separation <= 4 * rounding:
                continue
            requests = "the unpruned model's requests" if variant == UNPRUNED else f"requests under {variant}"
            raise InputError(
                f"{self.dispatcher.url} answers {requests} under {other} when both are in one batch (vLLM on a CPU "
                f"does this without a spare adapter slot); start it with --max-loras set to the number of adapters "
                f"plus one, or evaluate the unpruned model in a separate run"
            )

    def _signatures(self, variants: Sequence[ServedVariant], num_concurrent: int) -> list[Signature]:
        """Request the log-probabilities of the probe text under each variant."""
        kind = self.dispatcher.kind
        scored = {"max_tokens": 1, "echo": True} if kind.scores_prompts else {"max_tokens": GENERATED_LENGTH}
        settings = {
            **kind.sampling_fields({"temperature": 0}, False, len(self.tokens)),
            **kind.logprob_settings,
            **scored,
        }
        payload = {"prompt": self.tokens[:PROMPT_LENGTH], **settings}
        jobs = [
            Job("/v1/completions", lambda: payload, variant, self._parse_signature, "a probe", index)
            for index, variant in enumerate(variants)
        ]
        return replace(self.dispatcher, num_concurrent=num_concurrent).run(jobs)

    def _parse_signature(self, body: dict[str, Any]) -> Signature:
        """Read the signature from a server's response."""
        logprobs = body["choices"][0]["logprobs"]
        if "content" in logprobs:  # the format of chat completions, which llama.cpp also uses for completions
            pairs = [(str(token["token"]), token["logprob"]) for token in logprobs["content"]]
        else:
            pairs = list(zip(map(str, logprobs["tokens"]), logprobs["token_logprobs"], strict=True))
        if self.dispatcher.kind.scores_prompts:
            pairs = pairs[1:-1]  # the first token has no log-probability, the last is generated
        if not pairs:
            raise RetryableError("the response has no log-probabilities")
        return [(token, log_probability(value)) for token, value in pairs]
