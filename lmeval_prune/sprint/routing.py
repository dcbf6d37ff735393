"""Which head each try of a question is answered with, for `pruned-hf` (`router=`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_prune.architectures import Head, ModelMap, head_names
from lmeval_prune.errors import InputError
from lmeval_prune.interventions.base import check_weights
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.tries import DENSE, POLICIES, Tries
from lmeval_prune.sprint.outcomes import OutcomeStore, pool_order, question_field
from lmeval_prune.sprint.policies import Best, Nearest, Oracle, Policy, Random, RandomTop
from lmeval_prune.sprint.router import Router


class Routing(Tries):
    """Orders a pool of heads for each question; the i-th try of a question takes the i-th.

    Args:
        arguments: the router, and what it needs.

    Raises:
        InputError: something is missing, or does not belong together.
    """

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.any_model, self.source = bool(arguments.allow_other_model), str(arguments.router)
        self.orders: dict[str, list[str]] = {}
        self.model: dict[str, Any] = {}
        self._random: tuple[str, int] | None = None
        self.policy, made_with = self._policy(arguments)
        self.question_field = arguments.question_field or made_with or "question"

    def _policy(self, arguments: Arguments) -> tuple[Policy | None, str | None]:
        """The policy, and the field that its questions came from."""
        router, store, pool = self.source, arguments.router_store, arguments.router_pool
        seed, size = arguments.router_seed, arguments.router_size
        if router not in POLICIES:
            if not Path(router).is_dir():
                raise InputError(f"router={router} is not a folder; name a fitted router or {', '.join(POLICIES)}")
            if store or pool:
                raise InputError("a fitted router has its own pool; leave out router_store and router_pool")
            found = Router.load(router)
            self.model = found.about.get("model", {})
            return Nearest(found), question_field(found.about.get("tasks", {}))
        if pool and router != "random":
            raise InputError(f"router_pool is for router=random; router={router} takes its pool from router_store")
        if pool:
            self._random = (pool, seed)
            head_names([part for part in pool.split("+") if part != DENSE] or ["L0H0"])  # refuses nonsense now
            return None, None  # until the model's heads are known
        if not store:
            extra = ", or router_pool=HEADS" if router == "random" else ""
            raise InputError(f"router={router} needs router_store=FOLDER, an outcome store{extra}")
        outcomes = OutcomeStore(store).read()
        self.model = outcomes.model
        made: dict[str, Any] = {
            "random": lambda: Random(outcomes.pool, seed),
            "random_top": lambda: RandomTop.of(outcomes, min(size, len(outcomes.pool)), seed),
            "best": lambda: Best.of(outcomes),
            "oracle": lambda: Oracle(outcomes),
        }
        return made[router](), outcomes.question_field

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Check that this is the model that the router or the outcomes are of; see the base class."""
        if self.model and not self.any_model:
            made = f"router={self.source} was made for"
            fix = "fit one for this model, or give allow_other_model=true if it fits"
            name = str(self.model.get("name", ""))
            known = [self.model.get("weights", ""), *self.model.get("rounded", [])] if weights else []
            check_weights(list(filter(None, known)), name, "", model_map, made, fix)
            before = self.model.get("interventions", [])
            if before != interventions:
                raise InputError(
                    f"{made} {name or 'a model'} under {_named(before)}, not {_named(interventions)}; {fix}"
                )
        if self._random:
            text, seed = self._random
            parts = text.split("+")
            heads = Head.parse([part for part in parts if part != DENSE], model_map)
            self.policy = Random(pool_order([*map(str, heads), *([DENSE] if DENSE in parts else [])]), seed)
        super().fit_to(model_map, weights, interventions)

    @property
    def pool(self) -> Sequence[str]:
        """The policy's."""
        assert self.policy is not None
        return self.policy.pool

    def prepare(self, requests: Sequence[Any]) -> None:
        """Order the pool for the questions of these requests.

        Raises:
            InputError: a task has no such field, or more tries than the pool has heads.
        """
        assert self.policy is not None
        questions: dict[str, None] = {}
        for request in requests:
            questions[self._question(request)] = None
            if request.repeats > len(self.pool):
                raise InputError(
                    f"task {request.task_name} has {request.repeats} tries, and the pool of router={self.source} "
                    f"only {len(self.pool)} heads; take a larger pool, or a task of fewer tries, which is a file of "
                    f"three lines (docs/tasks.md, pass@k)"
                )
        new = [question for question in questions if question not in self.orders]
        if new:
            self.orders |= dict(zip(new, self.policy.order(new), strict=True))

    def order(self, request: Any) -> Sequence[str]:
        """That of the request's question."""
        return self.orders[self._question(request)]

    def _question(self, request: Any) -> str:
        document = request.doc or {}
        if self.question_field not in document:
            raise InputError(
                f"task {request.task_name} has no field {self.question_field!r} with the question for the router; "
                f"its documents have {', '.join(document)}: name one with question_field="
            )
        return str(document[self.question_field])

    @property
    def info(self) -> dict[str, Any]:
        """For the results file."""
        assert self.policy is not None
        note = {"note": self.policy.note} if self.policy.note else {}
        made = {**self.policy.identity, "question_field": self.question_field}
        return {"source": self.source, "decoding": "greedy", "pool": list(self.pool), **made, **note}


def _named(interventions: list[Any]) -> str:
    """Identities of interventions, and of the layers that they name, in words."""
    words = []
    for one in interventions:
        if isinstance(one, dict):
            fields = ", ".join(f"{name}={value}" for name, value in one.items() if name not in ("method", "version"))
            words.append(f"{one.get('method')} ({fields[:60]})")
        else:
            words.append(f"layers {one[:8]}")
    return " and ".join(words) or "no other pruning"
