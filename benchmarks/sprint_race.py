"""The race: the policy that training chose against sampling, on all of ASDiv-A, by the plan that is committed before.

    python benchmarks/sprint_race.py [--stages finetune,plans,sweep,orders,sampled,choose,ceiling,test,report]
        [--folds 0,1] [--device cuda] [--work out/sprint_race] [--threads 2]
    python benchmarks/sprint_race.py --limit 12 --work out/sprint_race_rehearsal       a rehearsal
    python benchmarks/sprint_race.py --estimate [--rates FILE]                         what the race will cost

The settings are those of docs/results/sprint_race/plan.md. Each stage prints what it will cost, from a few measured
answers; a stage that was done is not done again, and one that was killed goes on. `choose` writes choices.json beside
the plan; commit both, then `test` runs. A rehearsal takes a dozen questions and a short fine-tune, and its `test` asks
questions that the model was fine-tuned on, so it answers no test question. It measures the rates of `--estimate`.

`sprint_race_stages.py` has the stages, `sprint_race_claims.py` what may be claimed, `sprint_race_costs.py` the costs,
`sprint_race_report.py` the report.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from _record import RESULTS, environment
from sprint_race_costs import estimate
from sprint_race_folders import STAGES, LineParser
from sprint_race_plan import RacePlan
from sprint_race_stages import Race

from lmeval_prune import preflight
from lmeval_prune.artefacts import read_json, write_text
from lmeval_prune.errors import InputError
from lmeval_prune.reporting.quiet import silence_libraries

OUTPUT = RESULTS.parent.parent / "docs/results/sprint_race"


def rehearsal(plan: RacePlan, questions: int) -> RacePlan:
    """The same race with routers that fit a few questions, and fewer samples beside which the pool is judged."""
    few = {"validation": 0.0}
    routers = {
        "contrastive": {"p": [4], "lambda": [0.0], "epochs": 20, **few},
        "knn": {"k": 3, "weighting": "uniform", "prior": 1.0, **few},
        "sequential": {"factors": 1, "rank": 0, "l2": 0.1, **few},
    }
    return replace(plan, parts=min(3, questions), routers=routers, ceiling_questions=min(4, questions))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = LineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--folds", default="")
    parser.add_argument("--plan", default=str(OUTPUT / "plan.md"))
    parser.add_argument("--work", default="")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="questions of a rehearsal")
    parser.add_argument("--estimate", action="store_true", help="print what the race will cost, and stop")
    parser.add_argument("--rates", default=str(OUTPUT / "rates.json"), help="rates of a rehearsal, for --estimate")
    options = parser.parse_args()
    options.stages = [name for name in options.stages.split(",") if name]
    if unknown := [name for name in options.stages if name not in STAGES]:
        raise InputError(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    if options.limit is not None and options.limit < 3:
        raise InputError("--limit must be at least 3 questions")
    preflight.check({"device": options.device})
    return options


def main() -> None:
    from lmeval_prune.plugin import registration

    try:
        options = parse()
        torch.set_num_threads(options.threads)
        registration.register()
        silence_libraries()
        work = Path(options.work or ("out/sprint_race_rehearsal" if options.limit else "out/sprint_race"))
        plan = RacePlan.read(options.plan)
        try:
            folds = sorted({int(word) for word in options.folds.split(",") if word}) or list(range(len(plan.folds)))
        except ValueError:
            raise InputError(f"--folds={options.folds} must be whole numbers separated by commas, e.g. 0,1") from None
        if bad := [k for k in folds if k not in range(len(plan.folds))]:
            raise InputError(f"--folds: there is no fold {bad[0]}; the plan has {len(plan.folds)}, from 0")
        full_race = Race(plan, Path(options.plan), work, options.device)
        full_race.check_folds()
        if options.estimate:
            print(
                json.dumps(estimate(plan, read_json(options.rates), full_race.counts(range(len(plan.folds)))), indent=1)
            )
            return
        race = full_race
        if options.limit:
            settings = rehearsal(plan, options.limit)
            race = Race(settings, Path(options.plan), work, options.device, options.limit, probe=0)
        race.run(options.stages, folds)
        if options.limit and "report" in options.stages:
            write_text(work / "rates.json", json.dumps({**race.rates, "environment": environment()}, indent=1) + "\n")
    except InputError as error:
        raise SystemExit(f"sprint_race: {error}") from None


if __name__ == "__main__":
    main()
