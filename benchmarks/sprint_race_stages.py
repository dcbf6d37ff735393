"""The stages of `sprint_race.py`: each is run once, can be killed and goes on.

finetune   the model of a fold, on folds that neither choose nor are tested
plans      its plans
sweep      the choosing questions under the whole pool, greedily, and samples of the unpruned model
orders     every order of the plan for each choosing question, fitted without it
sampled    the samples under variants that some candidate tries
choose     policy and rival of each fold: choices.json
ceiling    more samples of some choosing questions, beside which the pool is judged
test       the test questions: only the tries of the chosen policy and of its rivals, and samples
report     from the stores alone
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import sprint_race_choice as race
import sprint_race_claims as claims
from _record import environment, timed
from lmeval_prune.sprint.mixes import Mix
from sprint_race_costs import duration, noted, seconds_a_question, stored, training_steps
from sprint_race_folders import DATA, Folders

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints.embedded import ENCODER
from lmeval_prune.errors import InputError
from lmeval_prune.models.attempts import DENSE, Attempt
from lmeval_prune.preflight import outline
from lmeval_prune.sprint import policies
from lmeval_prune.sprint.options import FitOptions, SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.policies import Policy
from lmeval_prune.tasks import data

CONTRASTIVE = "contrastive"  # SPRINT's own router
Attempts = dict[str, list[str]]  # at each question, by its text; an empty list: the whole pool


class Race(Folders):
    """The stages of a race."""

    def run(self, stages: Sequence[str], folds: Sequence[int]) -> None:
        """Run stages."""
        self.keep_settings()
        of_folds = {
            "finetune": self._finetune_stage,
            "plans": lambda number: self.stage(f"plans {number}", partial(self.plans, number)),
            "sweep": partial(self._sweep_stage, "sweep", "train", self.pool_tries),
            "orders": lambda number: self.stage(f"orders {number}", partial(self.order, number)),
            "sampled": partial(self._sweep_stage, "sampled", "sampled", self.candidates_tries),
        }
        for number in folds:
            for name in (name for name in of_folds if name in stages):
                of_folds[name](number)
        if "choose" in stages:
            self.stage("choose", partial(self.choose, folds), folds=folds)
        for number in folds if "ceiling" in stages else ():
            self._sweep_stage("ceiling", "ceiling", self.ceiling_tries, number)
        if "test" in stages:
            claims.register(self)
            for number in folds:
                claims.verify(self, number)
                self._sweep_stage("test", "test", self.test_tries, number)
                self.stage(f"lm-eval {number}", partial(self.run_in_lm_eval, number))
        if "report" in stages:
            from sprint_race_report import write_race_report

            claims.check_complete(self)
            for number in folds:
                claims.verify(self, number)
            self.note_code("report")
            write_race_report(self, folds)

    def _finetune_stage(self, number: int) -> None:
        self.stage(f"finetune {number}", partial(self.finetune, number), partial(self.finetune_cost, number))

    def _sweep_stage(self, name: str, part: str, tries: Callable[[int], Attempts], number: int) -> None:
        attempts = cache(partial(tries, number))  # not made if the stage is done
        run, cost = (lambda: self.sweep(number, part, attempts())), (lambda: self.sweep_cost(number, part, attempts()))
        self.stage(f"{name} {number}", run, cost)

    # ------------------------------------------------------------------ fine-tune and plans

    def finetune(self, number: int) -> None:
        """Fine-tune the model of a fold."""
        from lmeval_prune.distillation.options import DistillOptions
        from lmeval_prune.distillation.recursion import distill

        test, choosing, tuned = self.splits(number)
        settings = {**self.plan.finetune, "pretrained": self.plan.pretrained, "task": self.plan.task}
        settings |= {"train": tuple(tuned), "output": str(self.fold(number) / "model"), "chat": self.plan.chat}
        settings |= {"test": choosing, "limit": 48, "epochs": 2} if self.limit else {"test": test}
        log = distill(DistillOptions(**settings))["stages"][-1]["log"]
        first = next((entry for entry in log if "seconds" in entry), None)
        if first:
            self.note_down("rates", ["finetune"], {"seconds": first["seconds"], "steps": first["step"]})

    def finetune_cost(self, number: int) -> str:
        """Count the steps; their time is that of a rehearsal's."""
        count = 48 if self.limit else sum(len(data.load(DATA, split)) for split in self.splits(number)[2])
        options = {**self.plan.finetune, **({"epochs": 2} if self.limit else {})}
        steps, rate = training_steps(count, options), self.rates.get("finetune")
        estimate = f", about {duration(steps * rate['seconds'] / rate['steps'])}" if rate else ""
        return f"{options['epochs']} epochs, {steps} steps{estimate}"

    def plans(self, number: int) -> None:
        """Write the plans of a fold's model."""
        from lmeval_prune.cli import main as command

        for label, options in self.plan.plans.items():
            words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            output = self.plan_path(number, label)
            if not output.exists() and command(
                ["prune", "--pretrained", self.model_args(number)["pretrained"], *words, "--output", str(output)]
            ):
                raise InputError(f"the plan {label} of fold {number} was not made; see above")

    def plan_path(self, number: int, label: str) -> Path:
        """File of a plan."""
        return self.fold(number) / "plans" / f"{label.replace(' ', '_').replace('%', '')}.json"

    # ------------------------------------------------------------------ sweeps

    def options(self, number: int, part: str, attempts: Mapping[str, Any]) -> SweepOptions:
        """Options of a sweep of some tries."""
        test, choosing, _ = self.splits(number)
        plans = {label: {"plan": str(self.plan_path(number, label))} for label in self.plan.plans}
        draws = [f"{DENSE}@{t:g}#0-{self.plan.draws - 1}" for t in self.plan.temperatures]
        return SweepOptions(
            self.model_args(number),
            (self.plan.task,),
            str(self.store(number, part)),
            split=test if part == "test" else choosing,
            layers=self.plan.layers,
            random_sets=self.plan.random_sets,
            random_seed=self.plan.seed,
            variants={**self.plan.variants, **plans},
            sampled=tuple(draws) if part == "train" else (),
            attempts=dict(attempts),
            likelihood=part == "test",
            gen_kwargs={"max_gen_toks": self.plan.max_gen_toks},
            apply_chat_template=self.plan.chat,
        )

    def pool_tries(self, number: int) -> Attempts:
        """The whole pool at each choosing question."""
        return {text: [] for text in self.texts(number, "train")}

    def sweep(self, number: int, part: str, attempts: Attempts) -> None:
        """Sweep a fold, and note the cost."""
        from lmeval_prune.sprint.sweep import Sweep

        options = self.options(number, part, attempts)
        before = stored(Path(options.output))
        entry = noted(self.rates.get(part, {}).get(str(number)), before, before, 0.0, len(attempts))
        if before == entry["start"]:
            self.note_down("rates", [part, str(number)], entry)  # a killed run's answers count from here
        _, seconds = timed(lambda: Sweep(options).run())
        after = stored(Path(options.output))
        if after > before:
            self.note_down("rates", [part, str(number)], noted(entry, before, after, seconds, len(attempts)))

    def pool_size(self, number: int) -> int | None:
        """Number of answers of the whole pool and all samples to a question; None if the model's heads are unknown."""
        layers, plan = outline(str(self.model_args(number)["pretrained"])), self.plan
        if not layers:
            return None
        sets = sum(int(random_set.partition("x")[2]) for random_set in plan.random_sets)
        heads = len(plan.layers) * layers.attention[0].heads
        return 1 + heads + sets + len(plan.variants) + len(plan.plans) + plan.draws * len(plan.temperatures)

    def sweep_cost(self, number: int, part: str, attempts: Attempts) -> str:
        """Time the answers to a few questions, which the sweep then has, and multiply by the number of questions."""
        if probe := dict(list(attempts.items())[: self.probe]):
            tries = f"{sum(map(len, probe.values()))} tries"
            if [] in probe.values():
                size = self.pool_size(number)
                tries = "the whole pool and all samples" + (f", {len(probe) * size} answers" if size else "")
            first = "first question is" if len(probe) == 1 else f"first {len(probe)} questions are"
            limit = f"up to {self.plan.max_gen_toks} tokens each"
            print(f"the {first} answered by {tries}, {limit}, and timed", flush=True)
            self.sweep(number, part, probe)
        entry = self.rates.get(part, {}).get(str(number))
        if not entry or not entry["answers"]:
            return f"{len(attempts)} questions"
        total_time = duration(len(attempts) * seconds_a_question(entry))
        count, took = entry["answers"], entry["seconds"]
        return (
            f"{len(attempts)} questions, about {total_time} at the first ones' rate ({count} answers took {took:.0f} s)"
        )

    # ------------------------------------------------------------------ orders and choices

    def training(self, number: int) -> Outcomes:
        """Outcomes of a fold's choosing questions, without the samples of `ceiling`."""
        outcomes = OutcomeStore(self.store(number, "train")).read()
        return outcomes.columns([name for name in outcomes.pool if Attempt.named(name).draw < self.plan.draws])

    def orders(self, number: int) -> tuple[str, ...]:
        """The plan's orders; in a race that makes no claim without routers, if few questions distinguish variants."""
        if not self.note or self.informative(self.training(number)) >= self.fewest:
            return self.plan.orders
        return tuple(order for order in self.plan.orders if not order.startswith(race.ROUTER))

    @property
    def fewest(self) -> int:
        """The fewest informative questions of which some are left whichever part is held out."""
        return math.ceil((self.limit or 0) / self.plan.parts) + 1

    def informative(self, outcomes: Outcomes) -> int:
        """Number of questions that some variants solve and others do not."""
        solved = outcomes.greedy().z == 1
        return int((solved.any(1) & ~solved.all(1)).sum())

    def candidates(self, number: int) -> list[race.Candidate]:
        """All candidates."""
        plan, training = self.plan, self.training(number)
        rival = race.choose_rival(race.rivals(plan.sampling, plan.temperatures), training, plan.n)
        return race.candidates(self.orders(number), plan.mixes, plan.temperatures, race.temperature_of(rival))

    def fit(self, method: str, training: Outcomes, folder: Path | None = None) -> Policy:
        """Fit a router, or load it from a folder."""
        from lmeval_prune.sprint.fit import fit
        from lmeval_prune.sprint.router import Router

        if folder and (folder / "router.json").is_file():
            return policies.nearest(Router.load(folder))
        method = CONTRASTIVE if method == race.PUBLISHED else method
        names, values = {"p": "sizes", "lambda": "weights"}, dict(self.plan.routers.get(method, {}))
        values = {names.get(name, name): tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        special = {name: value for name, value in values.items() if name not in FitOptions.setting_names()}
        general = {name: value for name, value in values.items() if name not in special}
        router = fit(training, ENCODER, FitOptions(router=method, options=special, **general))
        if folder:
            router.save(folder)
            router = Router.load(folder)
        return policies.nearest(router)

    def policy(self, number: int, order: str) -> Policy:
        """The policy of an order, fitted on all choosing questions of a fold."""
        folder = self.fold(number) / "routers"
        return race.make_policy(
            order, self.training(number), lambda method, training: self.fit(method, training, folder / method)
        )

    def order(self, number: int) -> None:
        """Order the pool for each choosing question by policies that were fitted without it."""
        self.require(f"orders {number}", f"sweep {number}")
        training, plan = self.training(number), self.plan
        if (orders := self.orders(number)) != plan.orders:
            print(f"fold {number}: too few questions distinguish variants, so no router is fitted", flush=True)
        names = race.cross_fitted_orders(orders, training.greedy(), plan.parts, plan.seed, self.fit)
        pool = training.greedy().pool
        column = {name: j for j, name in enumerate(pool)}
        columns = {name: [[column[variant] for variant in row] for row in rows] for name, rows in names.items()}
        content = {
            "pool": pool,
            "questions": training.texts,
            "outcomes": claims.outcomes_digest(training.greedy()),
            "orders": columns,
        }
        write_text(self.fold(number) / "orders.json", json.dumps(content) + "\n")

    def written_orders(self, number: int) -> race.Orders:
        """What `order` wrote."""
        path = self.fold(number) / "orders.json"
        if not path.exists():
            raise InputError(f"{path} does not exist; run the stage orders first")
        content, training = read_json(path), self.training(number)
        if content["outcomes"] != claims.outcomes_digest(training.greedy()) or set(content["orders"]) != set(
            self.orders(number)
        ):
            marker = self.marker(f"orders {number}")
            raise InputError(f"{path} is of other outcomes or orders than now; remove {marker}, and order again")
        pool = content["pool"]
        return {name: [[pool[j] for j in row] for row in rows] for name, rows in content["orders"].items()}

    def candidates_tries(self, number: int) -> Attempts:
        """The tries of all candidates at the choosing questions."""
        orders, candidates = self.written_orders(number), self.candidates(number)
        rows = race.attempts_of([(orders[candidate.order], candidate.mix, self.plan.n) for candidate in candidates])
        return dict(zip(self.training(number).texts, rows, strict=True))

    def choose(self, folds: Sequence[int]) -> None:
        """Choose policy and rival of each fold, and write them with digests and the smallest difference."""
        plan, choices, differences = self.plan, [], []
        committed = {} if self.note else {"plan": claims.plan_identity(self)}
        sampling = race.rivals(plan.sampling, plan.temperatures)
        for number in folds:
            orders, training = self.written_orders(number), self.training(number)
            self.require("choose", f"sampled {number}")
            choice = race.choose(self.candidates(number), orders, sampling, training, plan.n)
            shutil.rmtree(self.fold(number) / "routers", ignore_errors=True)  # fitted anew, from these outcomes
            digests = claims.fingerprints(self, number, choice.candidate.order)
            chance = race.random_passes(training, plan.n)  # a pool in random order, beside the orders
            choices.append({"fold": number, **choice.to_json(), "random order": chance, "digests": digests})
            differences.append(choice.differences)
            print(f"fold {number}: {choice.candidate}; sampling by {choice.rival}", flush=True)
        tested = sum(len(self.texts(number, "test")) for number in folds)
        summary = race.summarise(choices, differences, tested)
        write_text(
            self.choices_file, json.dumps({**committed, **summary, "environment": environment()}, indent=1) + "\n"
        )
        print(
            f"{self.choices_file}: {tested} test questions show a difference of {summary['smallest_difference']:.3f} "
            f"with power {race.POWER:g}; on training questions, where both were chosen, it is "
            f"{summary['training_difference']:+.3f}."
            + ("" if self.note else f" Commit it and {self.plan_file.name} before the test run.")
        )

    def choice(self, number: int) -> dict[str, Any]:
        """What training chose for a fold."""
        if not self.choices_file.exists():
            raise InputError(f"{self.choices_file} does not exist; run the stage choose for all folds")
        choices = [choice for choice in read_json(self.choices_file)["folds"] if choice["fold"] == number]
        if not choices:
            raise InputError(f"{self.choices_file} has no fold {number}; run the stage choose for all folds")
        return dict(choices[0])

    def ceiling_tries(self, number: int) -> Attempts:
        """Samples of some choosing questions, drawn by the seed, at the chosen temperature."""
        texts, temperature = self.texts(number, "train"), float(self.choice(number)["temperature"])
        drawn = random.Random(self.plan.seed).sample(texts, min(self.plan.ceiling_questions, len(texts)))
        draws = race.sampling_mix(temperature).attempts([DENSE], self.plan.ceiling_samples)
        return {text: list(map(str, draws)) for text in drawn}

    # ------------------------------------------------------------------ test

    def rivals(self, number: int) -> dict[str, tuple[str, Mix]]:
        """Other policies of the test by name, whose first n tries are made: order and mix."""
        named = {"cover, dense first": ("cover", Mix.parse("dense|next"))}
        has_routers = any(order.startswith(race.ROUTER) for order in self.orders(number))
        published = race.published_pool(self.training(number))
        if has_routers and (not self.note or self.informative(published) >= self.fewest):
            named = {"SPRINT as published": (race.PUBLISHED, Mix()), **named}
        return named

    def test_tries(self, number: int) -> Attempts:
        """The tries of the chosen policy and its rivals at the test questions, and samples of the unpruned model."""
        plan, choice, texts = self.plan, self.choice(number), self.texts(number, "test")
        tried = [(choice["order"], Mix.parse(choice["mix"]), plan.most)]
        tried += [(order, mix, plan.n) for order, mix in self.rivals(number).values()]
        unpruned = [[DENSE] for _ in texts]
        pairs = [(unpruned, Mix(), 1), (unpruned, race.sampling_mix(float(choice["temperature"])), plan.test_samples)]
        pairs += [(self.policy(number, order).order(texts), mix, n) for order, mix, n in tried]
        return dict(zip(texts, race.attempts_of(pairs), strict=True))

    def run_in_lm_eval(self, number: int) -> None:
        """Evaluate the chosen policy by lm-eval, from the answers of the sweep, and keep the samples file."""
        from lm_eval import simple_evaluate

        choice, folder = self.choice(number), self.fold(number)
        order = choice["order"]
        arguments = {**self.model_args(number), "responses": str(folder / "test"), "router_mix": choice["mix"]}
        if order.startswith(race.ROUTER):
            arguments["router"] = str(folder / "routers" / order.removeprefix(race.ROUTER))
        else:
            arguments |= {"router": order, "router_store": str(folder / "train")}
        before, task = stored(folder / "test"), f"{self.plan.task}_pass{self.plan.most}"
        doc_ids = [row["doc_id"] for row in OutcomeStore(folder / "test").read().questions]
        results = simple_evaluate(
            "pruned-hf", arguments, tasks=[task], samples={task: doc_ids},
            metadata={"data_split": self.splits(number)[0]},
            gen_kwargs={"max_gen_toks": self.plan.max_gen_toks}, apply_chat_template=self.plan.chat, log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
        lines = []
        for item in results["samples"][task]:
            item["arguments"] = {"gen_args_0": {"arg_0": item["arguments"][0][0], "arg_1": item["arguments"][0][1]}}
            lines.append(json.dumps(item, default=str) + "\n")
        write_text(folder / "samples.jsonl", "".join(lines))
        new = stored(folder / "test") - before
        if new:
            raise InputError(f"the routed run of fold {number} gave {new} answers that the sweep had not; see {folder}")
