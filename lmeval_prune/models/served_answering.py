"""How requests of lm-eval's are answered by servers, or from the store."""

from __future__ import annotations

from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from lmeval_prune.artefacts import digest
from lmeval_prune.export.manifest import adapter_name
from lmeval_prune.interventions import Intervention, combined
from lmeval_prune.models.answer_store import Missing, Recorder, answer, occurrences
from lmeval_prune.models.answering import Answering
from lmeval_prune.models.identity import code_versions
from lmeval_prune.models.lengths import Ending
from lmeval_prune.models.served import DENSE, Served
from lmeval_prune.models.tries import DENSE as UNPRUNED


class Text(str):
    """A text that a server gives.

    Attributes:
        ending: how it ended, where the server says.
    """

    ending: Ending | None = None


class NoText(Text):
    """Stands for a text that a server does not give."""


def seed_of(seed: int, repeat: int) -> int:
    """The seed of a drawn try; of neighbouring seeds of runs, no two tries share one."""
    return int(digest([seed, repeat]), 16) & 0x7FFFFFFF


class ServedAnswering(Answering):
    """Answers requests from the store, or by asking servers."""

    def _applied(self) -> tuple[Intervention, ...]:
        applied: tuple[Intervention, ...] = self.lm.arguments.interventions
        return applied

    @property
    def versions(self) -> dict[str, Any]:
        """As the base class; a server computes without our transformers."""
        return code_versions("lm_eval")

    def _drawn(self, request: Any, repeat: int) -> list[Any]:
        return [seed_of(self.lm.seed, repeat)]

    def _depends_on(self, kind: str, request: Any, repeat: int) -> tuple[dict[str, Any], str]:
        depends, head = super()._depends_on(kind, request, repeat)
        return {**depends, "cut": self.lm.cut(kind, request), "adapters": self.lm.hashes(self.variant(head))}, head

    def variant(self, head: str = UNPRUNED) -> Served:
        """As what a try's head is served, together with what is always pruned."""
        mask = self.tries.masks[head] if self.tries and head != UNPRUNED else None
        everything: Any = combined([*self._applied(), *([mask] if mask else [])])
        heads = [str(each) for one in everything for each in one.heads_of(self.lm.model_map)]
        return Served(adapter_name(heads), tuple(heads)) if heads else DENSE

    def variants(self) -> list[Served]:
        """All that may be asked for."""
        return list(dict.fromkeys(map(self.variant, self.tries.pool if self.tries else (UNPRUNED,))))

    def _answer(
        self, kind: str, requests: list[Any], disable_tqdm: bool
    ) -> tuple[list[Any], list[str], list[Ending | None]]:
        if self.store is None:

            def pass_on(place: int, response: Any) -> None:
                self.lm.cache_hook.add_partial(kind, requests[place].args, response)

            if kind != "generate_until":
                return self._scores(kind, requests, disable_tqdm), [], []
            texts = self.lm.generated(requests, occurrences(requests), pass_on, not disable_tqdm)
            return texts, [], [text.ending for text in texts]

        store = self.store

        def run(missing: Missing) -> list[Any]:
            def keep(place: int, response: Any) -> None:
                if isinstance(response, NoText):
                    store.known[missing.keys[place]] = response  # for this run
                else:
                    ending = response.ending if isinstance(response, Text) else None
                    missing.record(missing.keys[place], response, **(ending._asdict() if ending else {}))

            if kind == "generate_until":
                return list(self.lm.generated(missing.requests, missing.repeats, keep, not disable_tqdm))
            hook = self.lm.cache_hook
            self.lm.cache_hook = Recorder(hook, missing.answered)
            try:
                return self._scores(kind, missing.requests, disable_tqdm)
            finally:
                self.lm.cache_hook = hook

        responses, keys = answer(store, requests, kind, lambda *pair: self._depends_on(kind, *pair), run)
        return responses, keys, [store.endings.get(key) for key in keys]

    def _scores(self, kind: str, requests: list[Any], disable_tqdm: bool) -> list[Any]:
        if kind == "loglikelihood":
            return list(LocalCompletionsAPI.loglikelihood(self.lm, requests, disable_tqdm=disable_tqdm))
        return list(self.lm.scored_whole(requests, disable_tqdm))
