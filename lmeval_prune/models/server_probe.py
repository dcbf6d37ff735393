"""Check at the start of a run that the server serves the model and its variants.

A misconfigured server answers without an error. For example, an adapter that matches no module leaves the model
unpruned, or two names mean one adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from lmeval_prune.errors import InputError, first_few
from lmeval_prune.models.dispatch import Dispatcher, Job
from lmeval_prune.models.http_client import RetryableError, log_probability, parse, parse_json, send
from lmeval_prune.models.server_kinds import UNPRUNED, Listing, ServedVariant, ServerKind
from lmeval_prune.models.server_record import ServerRecord, Signature, distance

PROBE_TEXT = (
    "A baker sells 12 rolls at 30 cents each and 5 loaves at 2.50 each. First she adds up what the rolls bring in, "
    "then the loaves, and writes both numbers into her green book. Why does she need the sum?"
)
PROMPT_LENGTH = 64  # tokens of the text in a request
GENERATED_LENGTH = 12  # tokens to generate, if the server does not score prompts
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
    return name


class Probe:
    """Check the server of a dispatcher with a few requests."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Any, record: ServerRecord) -> None:
        self.dispatcher, self.tokenizer, self.record = dispatcher, tokenizer, record
        self.tokens: list[int] = list(tokenizer.encode(PROBE_TEXT, add_special_tokens=False))

    def run(self, variants: Sequence[ServedVariant]) -> None:
        """Refuse a server with another tokenizer or other weights, or under which two variants answer alike."""
        url = self.dispatcher.url
        self._check_tokenizer()
        pruned = [variant for variant in dict.fromkeys(variants) if variant != UNPRUNED]
        unpruned = self._signatures([UNPRUNED] * 4)  # repeated to measure the server's noise
        self.record.check(url, unpruned[0])
        noise = max(MIN_DISTANCE, 1.5 * max(distance(*pair, 1) for pair in combinations(unpruned, 2)))
        signatures = {UNPRUNED: unpruned[0], **dict(zip(pruned, self._signatures(pruned), strict=True))}
        for (other, other_signature), (variant, signature) in combinations(signatures.items(), 2):
            if distance(signature, other_signature, 1) <= noise:
                raise InputError(
                    f"{url} gives the same answers under {variant} as under {other}: both names mean one "
                    f"adapter, or an adapter matches no module (vLLM: --lora-target-modules o_proj); start it with the "
                    f"command that `lmeval-prune export adapter` prints"
                )
        self.record.save()

    def _check_tokenizer(self) -> None:
        """Refuse a server whose tokenizer splits the probe text differently; one that cannot tokenize is not asked."""
        kind, url = self.dispatcher.kind, self.dispatcher.url
        payload = kind.tokenize_payload(self.dispatcher.model, PROBE_TEXT)
        try:
            response = self.dispatcher.connection.run(
                partial(send, method="POST", url=f"{url}/tokenize", content=payload)
            )
            answered = parse(lambda body: list(body["tokens"]), parse_json(response.body))
        except RetryableError:
            return
        tokens = [token["id"] if isinstance(token, dict) else token for token in answered]
        if response.status == 200 and tokens != self.tokens:
            raise InputError(f"{url} has another tokenizer than this run; set tokenizer= to that of the served model")

    def _signatures(self, variants: Sequence[ServedVariant]) -> list[Signature]:
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
        return replace(self.dispatcher, num_concurrent=1).run(jobs)

    def _parse_signature(self, body: dict[str, Any]) -> Signature:
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
