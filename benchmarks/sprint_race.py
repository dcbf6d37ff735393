"""The race: the policy that training chose against sampling, on all of ASDiv-A, by the plan that is committed before.

    python benchmarks/sprint_race.py [--stages finetune,plans,sweep,choose,test,report] [--folds 0,1,2,3,4]
        [--device cuda] [--work out/sprint_race] [--threads 2]
    python benchmarks/sprint_race.py --limit 12 --work out/sprint_race_rehearsal       a rehearsal
    python benchmarks/sprint_race.py --estimate [--rates FILE]                         what the race will cost

The settings are those of docs/results/sprint_race/plan.md. Each stage prints what it will cost, from a few measured
answers; a stage that was done is not done again, and one that was killed goes on. `choose` writes choices.json beside
the plan; commit both, then `test` runs. A rehearsal takes a dozen questions, a few variants and a short fine-tune, and
its `test` asks questions that the model was fine-tuned on, so it answers no test question.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from _record import RESULTS, environment, timed

from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.checkpoints.embedded import ENCODER
from lmeval_prune.errors import InputError
from lmeval_prune.sprint import policies, race
from lmeval_prune.sprint.mixes import Mix
from lmeval_prune.sprint.options import FitOptions, SweepOptions
from lmeval_prune.sprint.outcomes import Outcomes, OutcomeStore
from lmeval_prune.sprint.policies import Policy
from lmeval_prune.sprint.registration import RacePlan, Registration
from lmeval_prune.tasks import data

ROOT = RESULTS.parent.parent
OUTPUT = ROOT / "docs/results/sprint_race"
STAGES = ("finetune", "plans", "sweep", "choose", "test", "report")
PROBE = 2  # questions whose answers are timed before a sweep
DATA = "asdiv_a"


def rehearsal(plan: RacePlan, questions: int) -> RacePlan:
    """The same race with few variants, samples and tries."""
    router = {"p": [4], "lambda": [0.0], "validation": 0.0, "epochs": 20}
    return replace(
        plan, layers=(), random_sets=("4x4",), temperatures=plan.temperatures[1:3], draws=8, most=8, test_samples=8,
        n=4, parts=min(3, questions), routers={"contrastive": router}, orders=plan.orders[:3],
    )  # fmt: skip


@dataclass
class Race:
    """The folders, settings and stages of a race.

    Attributes:
        plan: the settings.
        work: folder of models, stores and times.
        device: cpu or cuda.
        limit: number of questions of a rehearsal; None: the race.
        seconds: of each stage; None for one that was interrupted.
    """

    plan: RacePlan
    plan_file: Path
    work: Path
    device: str
    limit: int | None = None
    seconds: dict[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        clock = self.work / "seconds.json"
        self.seconds = json.loads(clock.read_text()) if clock.exists() else {}

    @property
    def choices_file(self) -> Path:
        """The file that `choose` writes."""
        return (self.work if self.note else self.plan_file.parent) / "choices.json"

    @property
    def note(self) -> str:
        """Why the race makes no claim; empty if it may."""
        return f"A rehearsal with {self.limit} questions: its figures say nothing." if self.limit else ""

    @property
    def report_folder(self) -> Path:
        """Folder of the report."""
        return self.work / "report" if self.note else self.plan_file.parent

    def model_args(self, number: int) -> dict[str, Any]:
        """Arguments of a fold's model."""
        return {"pretrained": str(self.fold(number) / "model"), "dtype": "float32", "device": self.device}

    def questions(self, number: int, part: str) -> int:
        """Number of questions of a fold's `train` (the choosing split) or `test`."""
        test, choosing, _ = self.splits(number)
        return self.limit or len(data.load(DATA, test if part == "test" else choosing))

    def fold(self, number: int) -> Path:
        """Folder of a test fold."""
        return self.work / f"fold{number}"

    def splits(self, number: int) -> tuple[str, str, list[str]]:
        """Test split, choosing split and splits of the fine-tune. A rehearsal tests on a split of the fine-tune."""
        names = [f"fold{(number + i) % self.plan.folds}" for i in range(self.plan.folds)]
        tuned = names[2 : 2 + self.plan.finetune_folds]
        return (tuned[0] if self.limit else names[0]), names[1], tuned

    def stage(self, name: str, run: Callable[[], Any], cost: Callable[[], str] | None = None) -> None:
        """Run a stage unless it is done; print its estimated and its measured time."""
        marker = self.work / f"{name.replace(' ', '_')}.done"
        if marker.exists():
            print(f"{name}: done before", flush=True)
            return
        is_whole = name not in self.seconds
        self._note(name, None)
        if cost:
            print(f"{name}: {cost()}", flush=True)
        _, took = timed(run)
        if is_whole:
            self._note(name, round(took, 1))
        marker.touch()
        print(f"{name}: {self.seconds[name]} s", flush=True)

    def _note(self, name: str, seconds: float | None) -> None:
        self.seconds[name] = seconds
        write_text(self.work / "seconds.json", json.dumps(self.seconds, indent=1) + "\n")

    # ------------------------------------------------------------------ fine-tune and plans

    def finetune(self, number: int) -> None:
        """Fine-tune the model of a fold."""
        from lmeval_prune.distillation.options import DistillOptions
        from lmeval_prune.distillation.recursion import distill

        recipe = yaml.safe_load((ROOT / self.plan.finetune).read_text())["distill"]
        test, _, tuned = self.splits(number)
        settings = {**recipe, "pretrained": self.plan.pretrained, "task": self.plan.task, "train": tuple(tuned)}
        settings |= {"output": str(self.fold(number) / "model"), "test": None if self.limit else test}
        if self.limit:
            settings |= {"limit": 48, "epochs": 2, "test": self.splits(number)[1]}
        distill(DistillOptions(**settings))

    def finetune_cost(self, number: int) -> str:
        """Time two steps on a copy of the model, and count the steps."""
        from transformers import AutoModelForCausalLM

        from lmeval_prune.checkpoints import embedded

        recipe = yaml.safe_load((ROOT / self.plan.finetune).read_text())["distill"]
        model = AutoModelForCausalLM.from_pretrained(embedded.resolve(self.plan.pretrained)).to(self.device)
        tokens = torch.randint(0, 1000, (recipe["batch"], 110), device=self.device)  # of a problem and its answer

        def step() -> None:
            model(tokens, labels=tokens).loss.backward()
            float(sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None))

        step()
        _, seconds = timed(step)
        count = sum(len(data.load(DATA, split)) for split in self.splits(number)[2])
        steps, epochs = math.ceil(count * 0.9 / recipe["batch"]), recipe["epochs"]
        if self.limit:
            steps, epochs = math.ceil(48 * 0.9 / recipe["batch"]), 2
        whole = duration(1.2 * steps * epochs * seconds)
        return f"{epochs} epochs of {steps} steps, about {whole} ({seconds:.1f} s a step)"

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

    def options(self, number: int, part: str, sampled: Sequence[str], limit: int | None) -> SweepOptions:
        """Options of the sweep of a fold: `train` (the choosing split) or `test`."""
        test, choosing, _ = self.splits(number)
        plans = {label: {"plan": str(self.plan_path(number, label))} for label in self.plan.plans}
        return SweepOptions(
            self.model_args(number),
            (self.plan.task,),
            str(self.fold(number) / part),
            split=test if part == "test" else choosing,
            layers=self.plan.layers,
            random_sets=self.plan.random_sets,
            random_seed=self.plan.seed,
            variants={**self.plan.variants, **plans},
            sampled=tuple(sampled),
            likelihood=part == "test",
            limit=limit,
            gen_kwargs={"max_gen_toks": self.plan.max_gen_toks},
            apply_chat_template=True,
        )

    def training_samples(self) -> list[str]:
        """Samples of the choosing questions."""
        dense = [f"dense@{t:g}#0-{self.plan.draws - 1}" for t in self.plan.temperatures]
        return [*dense, *(f"each@{t:g}#0" for t in self.plan.variant_temperatures)]

    def test_samples(self, choice: dict[str, Any]) -> list[str]:
        """Samples of the test questions: those of sampling, and those of the chosen mix."""
        draws = {choice["temperature"]: self.plan.test_samples}
        mix, each = Mix.parse(choice["mix"]), set()
        for entry in (*mix.first, *mix.repeated):
            if entry.temperature and entry.what == "dense":
                draws.setdefault(entry.temperature, self.plan.most)
            elif entry.temperature:
                each.add(entry.temperature)
        dense = [f"dense@{t:g}#0-{count - 1}" for t, count in sorted(draws.items())]
        return [*dense, *(f"{kind}@{t:g}#0" for t in sorted(each) for kind in ("each", "dense"))]

    def sweep(self, number: int, part: str, sampled: Sequence[str]) -> None:
        """Sweep a fold."""
        from lmeval_prune.sprint.sweep import Sweep

        Sweep(self.options(number, part, sampled, self.questions(number, part))).run()

    def sweep_cost(self, number: int, part: str, sampled: Sequence[str]) -> str:
        """Time the answers to a few questions, which the sweep then has, and count all answers."""
        from lmeval_prune.sprint.sweep import Sweep

        options = self.options(number, part, sampled, min(PROBE, self.questions(number, part)))
        before = stored(Path(options.output))
        outcomes, seconds = timed(lambda: Sweep(options).run())
        new = stored(Path(options.output)) - before
        rates = self.work / "rates.json"
        known = json.loads(rates.read_text()) if rates.exists() else {}
        if new:
            tokens = float(outcomes.tokens.mean())
            known[part] = {"answers": new, "seconds": round(seconds, 2), "tokens_per_answer": round(tokens, 2)}
            write_text(rates, json.dumps(known, indent=1) + "\n")
        total = self.questions(number, part) * len(outcomes.pool)
        answers, spent = known[part]["answers"], known[part]["seconds"]
        left = max(total - stored(Path(options.output)), 0)
        whole = duration(left * spent / answers)
        return f"{left} of {total} answers, at most about {whole} ({answers} answers took {spent:.0f} s)"

    # ------------------------------------------------------------------ choose

    def training(self, number: int) -> Outcomes:
        """Outcomes of a fold's choosing questions."""
        return OutcomeStore(self.fold(number) / "train").read()

    def fit(self, method: str, training: Outcomes, folder: Path | None = None) -> Policy:
        """Fit a router, or load it from a folder."""
        from lmeval_prune.sprint.fit import fit
        from lmeval_prune.sprint.router import Router

        if folder and (folder / "router.json").is_file():
            return policies.nearest(Router.load(folder))
        names, values = {"p": "sizes", "lambda": "weights"}, dict(self.plan.routers.get(method, {}))
        values = {names.get(name, name): tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        own = {name: value for name, value in values.items() if name not in FitOptions.setting_names()}
        general = {name: value for name, value in values.items() if name not in own}
        router = fit(training, ENCODER, FitOptions(router=method, options=own, **general))
        if folder:
            router.save(folder)
            router = Router.load(folder)
        return policies.nearest(router)

    def policy(self, number: int, order: str) -> Policy:
        """The policy of an order, fitted on all choosing questions of a fold."""
        folder = self.fold(number) / "routers"
        fit = partial(self._fit_into, folder)
        return race.make_policy(order, self.training(number), fit)

    def _fit_into(self, folder: Path, method: str, training: Outcomes) -> Policy:
        return self.fit(method, training, folder / method)

    def choose(self, folds: Sequence[int]) -> None:
        """Choose policy and temperature of each fold, and write them with the smallest difference."""
        plan, choices, differences = self.plan, [], []
        for number in folds:
            training, orders = self.training(number), plan.orders
            if self.note and not (training.greedy().z == 1).any():
                orders = tuple(order for order in orders if not order.startswith(race.ROUTER))
                print(f"fold {number}: no variant solves anything, so no router is fitted", flush=True)
            found = race.candidates(orders, plan.mixes, plan.temperatures)
            choice = race.choose(found, plan.temperatures, training, plan.n, plan.parts, plan.seed, self.fit)
            self.policy(number, choice.candidate.order)
            choices.append({"fold": number, **choice.to_json()})
            differences.append(choice.differences)
            print(f"fold {number}: {choice.candidate}; sampling at {choice.temperature:g}", flush=True)
        tested = sum(len(kept) for kept in self.kept(folds).values())
        summary = race.summarise(choices, differences, tested)
        write_text(self.choices_file, json.dumps({**summary, "environment": environment()}, indent=1) + "\n")
        print(
            f"{self.choices_file}: {tested} test questions show a difference of {summary['smallest_difference']:.3f} "
            f"with power {race.POWER:g}; on training questions it is {summary['training_difference']:+.3f}."
            + ("" if self.note else f" Commit it and {self.plan_file.name} before the test run.")
        )

    @cached_property
    def twins(self) -> dict[str, str]:
        """Questions that are left out of the test, each with its twin."""
        rows = [row for k in range(self.plan.folds) for row in data.load(DATA, f"fold{k}")]
        texts = [row["question"] for row in rows]
        found = race.near_duplicates(texts, [row["fold"] for row in rows], self.plan.twins)
        return {texts[i]: texts[j] for i, j in found.items()}

    def kept(self, folds: Sequence[int]) -> dict[int, list[str]]:
        """The test questions of each fold, without those that are left out."""
        asked = {k: data.load(DATA, self.splits(k)[0])["question"] for k in folds}
        kept = {k: [text for text in texts if text not in self.twins] for k, texts in asked.items()}
        return {k: texts[: self.limit] if self.limit else texts for k, texts in kept.items()}

    # ------------------------------------------------------------------ test

    def register(self) -> Registration | None:
        """Register the plan and what training chose; None in a rehearsal.

        Raises:
            InputError: a file is not committed, or differs from the one of an earlier part of the test run.
        """
        if self.note:
            return None
        path, now = self.work / "registration.json", Registration.of([self.plan_file, self.choices_file])
        if path.exists():
            before = Registration.from_json(read_json(path))
            if before.files != now.files:
                raise InputError(
                    f"{path}: the test run began with the plan and choices of commit {before.commit[:12]}, and these "
                    f"differ; put them back"
                )
            return before
        write_text(path, json.dumps(now.to_json(), indent=1) + "\n")
        return now

    def choice(self, number: int) -> dict[str, Any]:
        """What training chose for a fold."""
        found = [each for each in read_json(self.choices_file)["folds"] if each["fold"] == number]
        if not found:
            raise InputError(f"{self.choices_file} has no fold {number}; run the stage choose for all folds")
        return dict(found[0])

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
        asked = [row["doc_id"] for row in OutcomeStore(folder / "test").read().questions]
        found = simple_evaluate(
            "pruned-hf", arguments, tasks=[task], samples={task: asked},
            metadata={"data_split": self.splits(number)[0]},
            gen_kwargs={"max_gen_toks": self.plan.max_gen_toks}, apply_chat_template=True, log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
        lines = []
        for item in found["samples"][task]:
            item["arguments"] = {"gen_args_0": {"arg_0": item["arguments"][0][0], "arg_1": item["arguments"][0][1]}}
            lines.append(json.dumps(item, default=str) + "\n")
        write_text(folder / "samples.jsonl", "".join(lines))
        new = stored(folder / "test") - before
        if new:
            raise InputError(f"the routed run of fold {number} gave {new} answers that the sweep had not; see {folder}")

    def run(self, stages: Sequence[str], folds: Sequence[int]) -> None:
        """Run stages."""
        for number in folds:
            if "finetune" in stages:
                model = partial(self.finetune, number)
                self.stage(f"finetune {number}", model, partial(self.finetune_cost, number))
            if "plans" in stages:
                self.stage(f"plans {number}", partial(self.plans, number))
            if "sweep" in stages:
                given = (number, "train", self.training_samples())
                self.stage(f"sweep {number}", partial(self.sweep, *given), partial(self.sweep_cost, *given))
        if "choose" in stages:
            self.stage("choose", partial(self.choose, folds))
        if "test" in stages:
            self.register()
            for number in folds:
                given = (number, "test", self.test_samples(self.choice(number)))
                self.stage(f"test {number}", partial(self.sweep, *given), partial(self.sweep_cost, *given))
                self.stage(f"lm-eval {number}", partial(self.run_in_lm_eval, number))
        if "report" in stages:
            from sprint_race_report import write_race_report

            write_race_report(self, folds)


def estimate(plan: RacePlan, rates: dict[str, Any]) -> dict[str, Any]:
    """Count the answers of a race, and multiply their tokens by measured rates.

    Args:
        plan: the settings.
        rates: `rates.json` of a rehearsal: answers, seconds and tokens per answer, by part.
    """
    from transformers import AutoConfig

    from lmeval_prune.checkpoints import embedded

    heads = AutoConfig.from_pretrained(embedded.resolve(plan.pretrained)).num_attention_heads
    sets = sum(int(text.partition("x")[2]) for text in plan.random_sets)
    variants = heads * len(plan.layers) + sets + len(plan.variants) + len(plan.plans)
    trained = 1 + variants + plan.draws * len(plan.temperatures) + variants * len(plan.variant_temperatures)
    tested = 1 + variants + plan.test_samples + plan.most + 1 + variants  # if the chosen mix samples under variants
    questions = sum(len(data.load(DATA, f"fold{k}")) for k in range(plan.folds))
    gpu = read_json(RESULTS / "sweep_speed_gpu.json")
    speed = gpu["sweep"]["engine_answer_tokens_per_second"]
    parts = {}
    for part, attempts in (("train", trained), ("test", tested)):
        answers, rate = questions * attempts, rates[part]
        tokens = answers * rate["tokens_per_answer"]
        parts[part] = {
            "answers": answers,
            "tokens": round(tokens),
            "hours_at_measured_rate": round(answers * rate["seconds"] / rate["answers"] / 3600, 1),
            "hours_at_gpu_rate": round(tokens / speed / 3600, 2),
        }
    return {"variants": variants, "questions": questions, "gpu": gpu["environment"]["device"], **parts}


def stored(folder: Path) -> int:
    """Number of generated answers in a store."""
    from lmeval_prune.models.answer_store import read_answers

    if not folder.is_dir():
        return 0
    return len({record["key"] for record in read_answers(folder) if record.get("kind") == "generate_until"})


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--folds", default="")
    parser.add_argument("--plan", default=str(OUTPUT / "plan.md"))
    parser.add_argument("--work", default="")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="questions of a rehearsal")
    parser.add_argument("--estimate", action="store_true", help="print what the race will cost, and stop")
    parser.add_argument(
        "--rates", default="out/sprint_race_rehearsal/rates.json", help="measured rates, for --estimate"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from lmeval_prune.plugin import registration

    registration.register()
    stages = [name for name in options.stages.split(",") if name]
    if unknown := [name for name in stages if name not in STAGES]:
        raise SystemExit(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    work = Path(options.work or ("out/sprint_race_rehearsal" if options.limit else "out/sprint_race"))
    try:
        plan = RacePlan.read(options.plan)
        folds = [int(word) for word in options.folds.split(",") if word] or list(range(plan.folds))
        if bad := [k for k in folds if k not in range(plan.folds)]:
            raise InputError(f"--folds: there is no fold {bad[0]}; the plan has {plan.folds}, from 0")
        if options.estimate:
            print(json.dumps(estimate(plan, read_json(options.rates)), indent=1))
            return
        plan = rehearsal(plan, options.limit) if options.limit else plan
        Race(plan, Path(options.plan), work, options.device, options.limit).run(stages, folds)
    except InputError as error:
        raise SystemExit(f"sprint_race: {error}") from None


if __name__ == "__main__":
    main()
