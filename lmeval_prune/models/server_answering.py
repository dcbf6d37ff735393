"""Answer lm-eval's requests from the answer store or by servers."""

from __future__ import annotations

from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from lmeval_prune.export.manifest import adapter_name
from lmeval_prune.interventions import Intervention, combined
from lmeval_prune.models.answer_store import PendingRequests
from lmeval_prune.models.answering import Answering
from lmeval_prune.models.attempts import DENSE
from lmeval_prune.models.identity import SERVED_ANSWERING, code_versions
from lmeval_prune.models.server_client import GeneratedText, MissingText, sampling_seed
from lmeval_prune.models.server_kinds import UNPRUNED, ServedVariant


class ServerAnswering(Answering):
    """Answers requests from the answer store, and all others by servers."""

    def _applied(self) -> tuple[Intervention, ...]:
        applied: tuple[Intervention, ...] = self.lm.arguments.interventions
        return applied

    @property
    def versions(self) -> dict[str, Any]:
        """Return the versions that answers depend on; servers do not use the transformers installed here."""
        return {**code_versions("lm_eval"), "answering": SERVED_ANSWERING}

    def _sampling_key(self, request: Any, repeat: int) -> list[Any]:
        return [sampling_seed(self.lm.seed, repeat)]

    def _key_parts(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        parts, _ = super()._key_parts(kind, request, repeat)
        variant = self.variant(self.attempt(request, repeat))
        cut, adapters = self.lm.client.truncated_length(kind, request), self.lm.adapter_hashes(variant)
        return {**parts, "cut": cut, "adapters": adapters}, str(variant)

    def variant(self, name: str = DENSE) -> ServedVariant:
        """Return the variant that prunes the heads of an attempt and of the model_args, or has a LoRA adapter."""
        for adapter in self.lm.lora:
            return ServedVariant(adapter)
        routed = self.router.masks[name] if self.router else None
        masks: Any = combined([*self._applied(), *([routed] if routed else [])])
        heads = [str(head) for mask in masks for head in mask.heads_of(self.lm.model_map)]
        return ServedVariant(adapter_name(heads), tuple(heads)) if heads else UNPRUNED

    def variants(self) -> list[ServedVariant]:
        """Return all variants that requests may need."""
        names = self.router.pool if self.router else [DENSE]
        return list(dict.fromkeys(map(self.variant, names)))

    @property
    def _group_size(self) -> int:
        return 1

    def _run(self, pending: PendingRequests, disable_tqdm: bool) -> list[Any]:
        def keep(index: int, text: GeneratedText) -> None:
            if isinstance(text, MissingText) and self.store:
                self.store.responses[pending.keys[index]] = text  # used in this run, not stored
            else:
                pending.add(pending.keys[index], text, **(text.ending._asdict() if text.ending else {}))

        if pending.kind == "generate_until":
            return list(self.lm.client.generate(pending.requests, pending.repeats, keep, not disable_tqdm))
        with self._hooked(pending):
            if pending.kind == "loglikelihood":
                return list(LocalCompletionsAPI.loglikelihood(self.lm, pending.requests, disable_tqdm=disable_tqdm))
            return self.lm.client.score_rolling(pending.requests, not disable_tqdm)
