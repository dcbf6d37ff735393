"""Race pruned variants against sampling on a model of your own: one command, from a sweep to the report.

    python configs/sprint/race.py --quick                                           the embedded model, minutes
    python configs/sprint/race.py --model Qwen/Qwen2.5-Math-1.5B-Instruct --estimate     what it will cost, and stop
    python configs/sprint/race.py --model Qwen/Qwen2.5-Math-1.5B-Instruct
    python configs/sprint/race.py --model Qwen/Qwen3-1.7B --task prune_gsm8k --max_gen_toks 1024
    python configs/sprint/race.py --model meta-llama/Llama-3.2-3B-Instruct --server http://localhost:8000 \
        --adapters out/adapters                                                     answers by vLLM; pruned heads only

Training questions choose a policy (an order of variants, and how tries are made of it) and a temperature of sampling;
test questions compare both. Each sweep prints what it will cost, from the time of a few answers. Everything is kept
under --work: what was killed goes on, what is done is not done again. The report is that of benchmarks/sprint_race.py,
but it is not pre-registered. Run it from a clone of the repository.

A choice carries over only from questions that the model was not trained on: Qwen2.5-Math was probably trained on MATH's
training split, so choose on one half of a test split and test on the other, or take another task. Models that think at
length (Qwen3) need a larger --max_gen_toks: the report says how many answers were cut off. In half precision a killed
run may decide near-ties otherwise than an uninterrupted one; give --dtype float32 where that matters.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import sprint_race_choice as race  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from sprint_race_costs import duration  # noqa: E402
from sprint_race_folders import STAGES, LineParser  # noqa: E402
from sprint_race_plan import RacePlan  # noqa: E402
from sprint_race_stages import Race  # noqa: E402

from lmeval_prune import preflight  # noqa: E402
from lmeval_prune.artefacts import write_text  # noqa: E402
from lmeval_prune.errors import InputError, check_exists  # noqa: E402
from lmeval_prune.reporting.quiet import silence_libraries  # noqa: E402
from lmeval_prune.sprint.options import SweepOptions  # noqa: E402
from lmeval_prune.sprint.report import check_disjoint  # noqa: E402
from lmeval_prune.tasks import data  # noqa: E402
from lmeval_prune.tasks.loading import load_task, task_manager  # noqa: E402

PLAN = RacePlan(
    pretrained="", finetune={}, task="", folds=({"test": "", "choosing": ""},), max_gen_toks=2048,
    layers=(5, 10, 15, 20, 25), random_sets=("4x8", "16x8"), variants={}, plans={},
    temperatures=(0.3, 0.6, 0.9, 1.2), draws=16, test_samples=16, ceiling_samples=64, ceiling_questions=100,
    orders=("best", "cover", "router:contrastive", "router:knn", "router:logistic", "router:sequential"),
    routers={"contrastive": {"p": [16, 32], "lambda": [0, 0.001]}},
    mixes=("next", "dense|next", "next@sampling", "dense|next@sampling", "dense|next+dense@T"),
    sampling=("dense@T", "dense|dense@T"),
)  # fmt: skip
QUICK: dict[str, Any] = {
    "max_gen_toks": 4, "chat": False, "layers": (10,), "random_sets": ("4x4", "16x4"), "temperatures": (0.4, 0.8),
    "draws": 8, "test_samples": 8, "ceiling_samples": 24, "ceiling_questions": 24, "n": 4, "most": 8, "parts": 3,
    "orders": ("best", "cover", "router:contrastive", "router:knn", "router:sequential"),
    "mixes": ("next", "dense|next", "dense|next@0.4", "dense|next+dense@T"),
    "routers": {"contrastive": {"p": [8], "lambda": [0], "epochs": 100}, "sequential": {"factors": 1, "rank": [0, 2]}},
}  # fmt: skip
INFORMATIVE = 30  # choosing questions that some variants solve and others do not: fewer fit no router


@dataclass
class ModelRace(Race):
    """A race on one training and one test split, of a model as it is.

    Attributes:
        train, test: splits of the task.
        numbers: numbers of questions of `train` and `test`.
        dtype: of the model.
        server, adapters: URL of servers, and the folder of the adapters that they have.
        fewest: the fewest informative questions to which routers are fitted.
    """

    plan: RacePlan  # of `Race`, named here for type checkers, which do not read benchmarks
    train: str = "train"
    test: str = "test"
    numbers: tuple[int, int] = (500, 500)
    dtype: str = "bfloat16"
    server: str | None = None
    adapters: str | None = None
    fewest: int = INFORMATIVE

    @property
    def note(self) -> str:
        """What the report says of its claim."""
        return "Not pre-registered: training chose before the test, but no plan was committed."

    @property
    def settings(self) -> dict[str, Any]:
        """What answers and choices depend on, as JSON."""
        own = ("train", "test", "numbers", "dtype", "server", "adapters", "fewest")
        return super().settings | dict(json.loads(json.dumps({name: getattr(self, name) for name in own})))

    def splits(self, number: int) -> tuple[str, str, list[str]]:
        """Test split, choosing split, and none of a fine-tune."""
        return self.test, self.train, []

    def model_args(self, number: int) -> dict[str, Any]:
        """Arguments of the model."""
        if self.server:
            return {"pretrained": self.plan.pretrained, "adapters": self.adapters}
        arguments = {"pretrained": self.plan.pretrained, "dtype": self.dtype, "device": self.device}
        # in half precision most tokens count as near-ties, each of which would be decided in a pass of its own
        return arguments if self.dtype == "float32" else {**arguments, "deterministic": False}

    def texts(self, number: int, part: str) -> list[str]:
        """As many questions of a split as `numbers` says, drawn by the seed; test questions without twins."""
        return [text for text in self.drawn(part) if part != "test" or text not in self.twins]

    def drawn(self, part: str) -> list[str]:
        """As many questions of a split as `numbers` says, drawn by the seed."""
        arguments = load_task(task_manager(), self.plan.task).get_config("dataset_kwargs") or {}
        if not (name := arguments.get("prune_data")):
            raise InputError(f"--task={self.plan.task} is no task of this package; name one, e.g. prune_gsm8k")
        texts = list(dict.fromkeys(data.load(name, self.test if part == "test" else self.train)["question"]))
        return random.Random(self.plan.seed).sample(texts, min(self.numbers[part == "test"], len(texts)))

    @cached_property
    def twins(self) -> dict[str, str]:
        """Test questions that are left out, each with its twin; `InputError` if the splits overlap."""
        train, test = self.drawn("train"), self.drawn("test")
        check_disjoint(test, train)
        texts, groups = [*train, *test], [0] * len(train) + [1] * len(test)
        pairs = race.near_duplicates(texts, groups, self.plan.twins)
        return {texts[i]: texts[j] for i, j in pairs.items() if groups[i]}

    def options(self, number: int, part: str, attempts: Mapping[str, Any]) -> SweepOptions:
        """Options of a sweep; answers of servers have no log-probabilities here."""
        options = super().options(number, part, attempts)
        return replace(options, server=self.server, likelihood=False) if self.server else options

    def run_in_lm_eval(self, number: int) -> None:
        """Evaluate the chosen policy by lm-eval, too, unless servers answer."""
        if not self.server:
            super().run_in_lm_eval(number)

    def run(self, stages: Sequence[str] = STAGES, folds: Sequence[int] = (0,)) -> None:
        """Run all stages, and keep the settings beside the report."""
        self.keep_settings()
        if self.twins:
            print(f"{len(self.twins)} test questions are left out as twins of others", flush=True)
        settings = yaml.safe_dump(json.loads(json.dumps(asdict(self.plan))), sort_keys=False, width=110)
        write_text(self.report_folder / "plan.md", f"# Settings of the race\n\n```yaml\n{settings}```\n")
        super().run([name for name in stages if name != "finetune"], folds)


def print_estimate(model_race: ModelRace) -> None:
    """Answer one choosing question, and print the cost of the sweeps at its rate."""
    model_race.keep_settings()
    print(f"choosing: {model_race.sweep_cost(0, 'train', model_race.pool_tries(0))}")
    rate, plan = model_race.rates["train"]["0"], model_race.plan
    per_answer = rate["seconds"] / max(rate["answers"], 1)
    sampled = sum("next@" in mix for mix in plan.mixes) * len(plan.orders) * plan.n * model_race.numbers[0]
    print(f"samples under variants: at most {sampled} answers, about {duration(sampled * per_answer)}")
    columns = 1 + plan.test_samples + plan.most + 2 * plan.n
    answers = model_race.numbers[1] * columns + plan.ceiling_questions * (plan.ceiling_samples - plan.draws)
    print(f"test: at most {answers} answers, about {duration(answers * per_answer)}")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = LineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of the model")
    parser.add_argument(
        "--task", help="prune_math500 by default: a greedy task of this package that has a _pass16 task"
    )
    parser.add_argument("--train", default="train", help="split whose questions choose")
    parser.add_argument("--test", default="test", help="split whose questions are tested")
    parser.add_argument("--questions", help="numbers of training and test questions, 500,500 by default")
    parser.add_argument("--max_gen_toks", type=int, help=f"limit of new tokens, {PLAN.max_gen_toks} by default")
    parser.add_argument("--layers", help="layers whose heads are pruned one by one, 5,10,15,20,25 by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--server", help="URL of vLLM with the adapters of `lmeval-prune export adapter`")
    parser.add_argument("--adapters", help="their folder")
    parser.add_argument("--work", help="folder of stores, router and report")
    parser.add_argument("--estimate", action="store_true", help="print what the race will cost, and stop")
    parser.add_argument("--quick", action="store_true", help="the embedded model on packaged sentences to complete")
    options = parser.parse_args(words)
    if not options.model and not options.quick:
        parser.error("give --model NAME, or --quick for the embedded model")
    usual: dict[str, Any] = {"task": "prune_math500", "questions": "500,500", "layers": "5,10,15,20,25"}
    usual |= {"max_gen_toks": PLAN.max_gen_toks}
    if options.quick and (given := [name for name in usual if getattr(options, name) is not None]):
        parser.error(f"--quick has its own {given[0]}; leave out --{given[0]}, or --quick")
    vars(options).update({name: value for name, value in usual.items() if getattr(options, name) is None})
    if bool(options.server) != bool(options.adapters):
        parser.error("--server and --adapters belong together")
    return options


def check(options: argparse.Namespace) -> None:
    """Refuse a model, a task, a device or adapters that do not exist, before anything is read or made."""
    try:
        preflight.check({"pretrained": options.model, "task": options.task, "device": options.device})
    except InputError as error:
        raise InputError(str(error).replace("pretrained=", "--model=").replace("device=", "--device=")) from None
    if options.adapters:
        check_exists(options.adapters)


def make_race(options: argparse.Namespace) -> ModelRace:
    """Make the race of a command line; `InputError` if a value is wrong."""
    plan = replace(PLAN, pretrained=options.model or "smollm2-135m", task=options.task)
    settings: dict[str, Any] = {"train": options.train, "test": options.test, "dtype": options.dtype}
    try:
        counts = tuple(int(word) for word in options.questions.split(","))
        layers = tuple(int(word) for word in options.layers.split(",") if word)
    except ValueError:
        raise InputError("--questions and --layers are whole numbers separated by commas") from None
    if len(counts) != 2 or min(counts) < plan.parts:
        raise InputError(f"--questions={options.questions} must be two numbers, each at least {plan.parts}")
    plan = replace(plan, max_gen_toks=options.max_gen_toks, layers=layers)
    if options.quick:
        plan, counts = replace(plan, **QUICK, task="prune_tiny_endings"), (80, 60)
        settings |= {"dtype": "float32", "fewest": 20, "probe": 0}
    elif options.server:  # servers have an adapter for each pruned head alone
        plan = replace(plan, random_sets=())
    if options.estimate:
        settings |= {"probe": 1}  # a question under the whole pool: what a sweep does, but little of it
    name = Path(plan.pretrained).name.lower()
    work = Path(options.work or f"out/sprint_race_{name}{'_quick' if options.quick else ''}")
    settings |= {"server": options.server, "adapters": options.adapters, "numbers": counts}
    return ModelRace(plan, work / "report" / "plan.md", work, options.device, **settings)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    from lmeval_prune.plugin import registration

    try:
        options = parse(words)
        check(options)
        registration.register()
        silence_libraries()
        model_race = make_race(options)
        if options.estimate:
            print_estimate(model_race)
        else:
            model_race.run()
    except InputError as error:
        raise SystemExit(f"race: {error}") from None


if __name__ == "__main__":
    main()
