"""Answers requests of lm-eval's by servers, or from the store."""

from __future__ import annotations

from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from lmeval_prune.export.manifest import adapter_name
from lmeval_prune.interventions import Intervention, combined
from lmeval_prune.models.answer_store import PendingRequests
from lmeval_prune.models.answering import Answering
from lmeval_prune.models.head_router import DENSE as UNPRUNED
from lmeval_prune.models.identity import code_versions
from lmeval_prune.models.served import DENSE, Served
from lmeval_prune.models.server_jobs import NoText, Text, seed_of


class ServedAnswering(Answering):
    """Answers requests from the store, or by asking servers."""

    def _applied(self) -> tuple[Intervention, ...]:
        applied: tuple[Intervention, ...] = self.lm.arguments.interventions
        return applied

    @property
    def versions(self) -> dict[str, Any]:
        """Return the versions that answers depend on; a server computes without our transformers."""
        return code_versions("lm_eval")

    def _sampling_key(self, request: Any, repeat: int) -> list[Any]:
        return [seed_of(self.lm.seed, repeat)]

    def _key_parts(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        parts, head = super()._key_parts(kind, request, repeat)
        adapters = self.lm.hashes(self.variant(head))
        return {**parts, "cut": self.lm.jobs.cut(kind, request), "adapters": adapters}, head

    def variant(self, head: str = UNPRUNED) -> Served:
        """Return what serves a try's head, together with what is always pruned."""
        mask = self.router.masks[head] if self.router and head != UNPRUNED else None
        interventions: Any = combined([*self._applied(), *([mask] if mask else [])])
        heads = [str(head) for each in interventions for head in each.heads_of(self.lm.model_map)]
        return Served(adapter_name(heads), tuple(heads)) if heads else DENSE

    def variants(self) -> list[Served]:
        """Return all that may be asked for."""
        return list(dict.fromkeys(map(self.variant, self.router.pool if self.router else (UNPRUNED,))))

    @property
    def _group_size(self) -> int:
        return 1

    def _run(self, missing: PendingRequests, disable_tqdm: bool) -> list[Any]:
        def keep(index: int, text: Text) -> None:
            if isinstance(text, NoText) and self.store:
                self.store.responses[missing.keys[index]] = text  # for this run
            else:
                missing.add(missing.keys[index], text, **(text.ending._asdict() if text.ending else {}))

        if missing.kind == "generate_until":
            return list(self.lm.jobs.generate(missing.requests, missing.repeats, keep, not disable_tqdm))
        with self._hooked(missing):
            if missing.kind == "loglikelihood":
                return list(LocalCompletionsAPI.loglikelihood(self.lm, missing.requests, disable_tqdm=disable_tqdm))
            return list(self.lm.jobs.score_whole(missing.requests, not disable_tqdm))
