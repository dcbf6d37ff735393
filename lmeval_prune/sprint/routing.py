"""Choose the head to prune for each try of a question (each of its `repeats`), for `pruned-hf` with `router=`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from lmeval_prune.architectures import Head, ModelMap
from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError, brief
from lmeval_prune.interventions.table import check_weights
from lmeval_prune.models.arguments import Arguments
from lmeval_prune.models.head_router import DENSE, POLICIES, HeadRouter, attempt_order
from lmeval_prune.sprint.outcomes import OutcomeStore, question_field
from lmeval_prune.sprint.router import Policy, Router, best, oracle, random_order, random_top

logger = logging.getLogger(__name__)


class Routing(HeadRouter):
    """Applies the policy of the model arguments to requests: try i of a question prunes the i-th head of its order."""

    def __init__(self, arguments: Arguments) -> None:
        self.allow_other_model = bool(arguments.allow_other_model)
        self.source = str(arguments.router)
        self._random_pool, self._seed = arguments.router_pool, arguments.router_seed
        self.orders: dict[str, list[str]] = {}  # by question
        self.policy: Policy | Router
        self._about: dict[str, Any] = {"policy": self.source, "seed": self._seed}  # for the results file
        self.model: dict[str, Any] = {}  # identity of the model that the router or the outcomes were made for
        self._training_questions: frozenset[str] = frozenset()  # digests of the questions that the policy was made from
        self._repeated: set[str] = set()  # those of them that this run has answered
        tasks: dict[str, Any] = {}  # settings of the tasks of the outcomes
        if arguments.router_pool and self.source != "random":
            raise InputError(f"router_pool is for router=random; router={self.source} has another pool")
        if self.source not in POLICIES:
            router = Router.load(self.source)
            self.model, tasks = router.about.get("model", {}), router.about.get("tasks", {})
            self._about = {"policy": "router", "router_sha256": router.sha256, "encoder": router.encoder}
            self.policy, self._training_questions = router, frozenset(router.about.get("seen", ()))
        elif not arguments.router_pool:  # else `fit_to` makes the policy, because the pool depends on the model's heads
            if not arguments.router_store:
                raise InputError(f"router={self.source} needs router_store=FOLDER, an outcome store")
            outcomes = OutcomeStore(arguments.router_store).read()
            self.model, tasks = outcomes.model, outcomes.tasks
            if self.source == "random":
                self.policy = random_order(outcomes.pool, self._seed)
            elif self.source == "random_top":
                self.policy = random_top(outcomes, arguments.router_size, self._seed)
            else:
                self.policy = best(outcomes) if self.source == "best" else oracle(outcomes)
            if self.source == "oracle":
                self._about["outcomes"] = digest(np.nan_to_num(outcomes.z, nan=-1).tolist())  # tells runs apart
            if self.source not in ("random", "oracle"):  # `random` reads no outcomes; nobody takes the oracle for one
                self._training_questions = frozenset(map(digest, outcomes.texts))
                for warning in outcomes.warnings:
                    logger.warning("%s: %s", arguments.router_store, warning)
        self.question_field = arguments.question_field or question_field(tasks) or "question"

    def fit_to(self, model_map: ModelMap, weights: str | None, interventions: list[Any]) -> None:
        """Check that the router or its outcomes were made for this model; make the policy of a `router_pool`."""
        if self.model and not self.allow_other_model:
            subject = f"router={self.source} was made for"
            fix = "fit one for this model, or give allow_other_model=true if it fits"
            name = str(self.model.get("name", ""))
            fingerprints = [self.model.get("weights"), *self.model.get("rounded", [])] if weights else []
            check_weights(list(filter(None, fingerprints)), name, "", model_map, subject, fix)  # "": any revision
            expected = self.model.get("interventions", [])
            if expected != interventions:
                raise InputError(
                    f"{subject} {name or 'a model'} under {brief(str(expected), 80)}, not "
                    f"{brief(str(interventions), 80)}; {fix}"
                )
        if self._random_pool:
            names = self._random_pool.split("+")
            heads = Head.parse([name for name in names if name != DENSE], model_map) if {*names} != {DENSE} else ()
            pool = attempt_order([*map(str, heads), *([DENSE] if DENSE in names else [])])
            self.policy = random_order(pool, self._seed)

    @property
    def pool(self) -> Sequence[str]:
        return self.policy.pool

    def prepare(self, requests: Sequence[Any], lm: Any) -> None:
        for request in requests:
            if request.repeats > len(self.pool):
                raise InputError(
                    f"task {request.task_name} has {request.repeats} attempts, but the router's pool has only "
                    f"{len(self.pool)}; use a larger pool, or a task with fewer attempts (docs/tasks.md, pass@k)"
                )
        questions = [q for q in dict.fromkeys(map(self._question, requests)) if q not in self.orders]
        if self._training_questions:
            parts = lm.gather_from_ranks([digest(question) for question in questions])
            answered = {name for part in parts for name in part}
            repeated = answered & self._training_questions - self._repeated
            self._repeated |= repeated
            if repeated and lm.rank == 0:
                logger.warning(
                    "router=%s was made from the outcomes of %d of the %d questions: this is no test of it",
                    *(self.source, len(repeated), len(answered)),
                )
        if questions:
            self.orders |= zip(questions, self.policy.order(questions), strict=True)

    def order(self, request: Any) -> Sequence[str]:
        return self.orders[self._question(request)]

    def _question(self, request: Any) -> str:
        return str(request.doc[self.question_field])

    @property
    def info(self) -> dict[str, Any]:
        """Return the description of the policy for the results file."""
        info = {"source": self.source, "pool": list(self.pool), **self._about, "question_field": self.question_field}
        if self.source == "oracle":
            info["note"] = "not a method: it uses the outcomes of the questions that it answers"
        return info | ({"training_questions": len(self._repeated)} if self._repeated else {})
