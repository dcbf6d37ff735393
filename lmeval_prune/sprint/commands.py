"""`lmeval-prune sweep`, `fit` and `report sprint`: options from a recipe (`--config`) and the command line."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
from pathlib import Path
from typing import Any

from lmeval_prune.errors import InputError


def add_to(commands: Any) -> None:
    """Declare the commands to an argparse parser's subcommands."""
    sweep = _command(commands, "sweep", "outcomes of a task's questions under every head of some layers", run_sweep)
    _add(sweep, "model_args", "as for lm_eval --model pruned-hf, e.g. pretrained=smollm2-135m,dtype=float32")
    _add(sweep, "tasks", "generative tasks, separated by commas")
    _add(sweep, "output", "folder of the outcome store; an interrupted run goes on there, a store is extended")
    _add(sweep, "split", "split of the data, e.g. train (default: the one that the task asks)")
    _add(sweep, "layers", "layers whose heads are pruned, one at a time (default 5,10,15,20,25)")
    _add(sweep, "heads", "instead of layers: heads, e.g. L5H0-3+L10H2")
    _add(sweep, "limit", "so many questions, drawn by the seed", int)
    _add(sweep, "seed", "of that draw (default 0)", int)
    _add(sweep, "metric", "METRIC or METRIC,FILTER that decides an outcome (default exact_match)")
    _add(sweep, "question_field", "field of a document with the question (default: the task's metadata, else question)")
    _add(sweep, "num_fewshot", "as for lm_eval", int)
    _add(sweep, "gen_kwargs", "as for lm_eval, e.g. max_gen_toks=256")
    _add(sweep, "system_instruction", "as for lm_eval")
    _add(sweep, "metadata", "as for lm_eval, e.g. data_dir=FOLDER")
    _flag(sweep, "apply_chat_template", "as for lm_eval")

    fit = _command(commands, "fit", "fit a router to outcomes", run_fit)
    _add(fit, "outcomes", "folder of the training questions' outcome store")
    _add(fit, "output", "folder for the router")
    _add(fit, "encoder", "sentence-transformers model: name or folder (default all-minilm-l6-v2, of the extra demo)")
    _add(fit, "p", "length of the embeddings; of several the best on validation (default 32)")
    _add(fit, "lambda", "weight of diversity; of several the best on validation (default 0,0.0001,0.001)")
    _add(fit, "diversity", "ball (default), sphere, or unbounded as printed in the paper")
    _add(fit, "radius", "of the ball or sphere (default 1)", float)
    _add(fit, "holdout", "share of questions kept out, for report to test on (default 0)", float)
    _add(fit, "validation", "share of questions kept for stopping and choosing (default 0.2)", float)
    _add(fit, "epochs", "at most (default 200)", int)
    _add(fit, "patience", "epochs without a better validation loss (default 20)", int)
    _add(fit, "batch", "questions a step (default 64)", int)
    _add(fit, "learning_rate", "of AdamW (default 0.003)", float)
    _add(fit, "decay", "weight decay of θ (default 0.01)", float)
    _add(fit, "seed", "of the split, the start and the order (default 0)", int)
    _flag(fit, "without_dense", "the unpruned model is no candidate")

    questions = _command(commands, "questions", "the questions of a store, for lm_eval --samples", run_questions)
    _add(questions, "outcomes", "folder of the outcome store")
    _add(questions, "task", "name of the task that is to be asked, e.g. prune_asdiv_a_pass8")
    _add(questions, "router", "folder of a fitted router: only questions that it was not fitted on")

    report = _command(commands, "report", "tables and figures", run_report)
    report.add_argument("kind", choices=["sprint"], help="of which method")
    _add(
        report,
        "test",
        "outcome store of the questions that are asked; of a store that the router was fitted on, the part held out",
    )
    _add(report, "train", "another outcome store, of the training questions, for the baselines that need one")
    _add(report, "router", "folder of a fitted router")
    report.add_argument(
        "--samples", action="append", default=argparse.SUPPRESS, metavar="NAME=FILE",
        help="samples file of a pass@N task (lm_eval --log_samples), e.g. of sampling; may be given several times",
    )  # fmt: skip
    _add(report, "output", "folder for the report")
    _add(report, "n", "tries (default 8)", int)
    _add(report, "by", "attribute of questions to group by, e.g. subject")
    _add(report, "shortlist", "size of the random baseline's shortlist (default 16)", int)
    _add(report, "seed", "of bootstrap and tests (default 0)", int)


def run_sweep(given: dict[str, Any]) -> int:
    """`lmeval-prune sweep`."""
    from lmeval_prune.plugin import registration

    _need(given, "sweep", "model_args", "tasks", "output")
    if "layers" in given and "heads" in given:
        raise InputError("give layers or heads, not both")
    registration.register()
    from lmeval_prune.sprint.sweep import Sweep

    for name in ("model_args", "gen_kwargs", "metadata"):
        if name in given:
            given[name] = _pairs(name, given[name])
    given["tasks"] = tuple(_list(given["tasks"]))
    if "layers" in given:
        given["layers"] = tuple(_numbers("layers", given["layers"], int))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lmeval_prune").setLevel(logging.INFO)
    try:
        outcomes = Sweep(**given).run()
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on in {given['output']}")
        return 130
    if outcomes is not None:
        accuracy = outcomes.accuracy()
        order = sorted(range(len(outcomes.pool)), key=lambda i: -accuracy[i])
        shown = ", ".join(f"{outcomes.pool[i]} {accuracy[i]:.3f}" for i in order[:5])
        dense = f"dense {accuracy[0]:.3f}; " if outcomes.pool[0] == "dense" else ""
        print(f"{given['output']}: {len(outcomes.questions)} questions, pool of {len(outcomes.pool)}")
        print(f"accuracy: {dense}highest {shown}")
    return 0


def run_fit(given: dict[str, Any]) -> int:
    """`lmeval-prune fit`."""
    from lmeval_prune.checkpoints.embedded import ENCODER
    from lmeval_prune.sprint.outcomes import OutcomeStore
    from lmeval_prune.sprint.router import FitOptions, fit

    _need(given, "fit", "outcomes", "output")
    source, target = given.pop("outcomes"), given.pop("output")
    if Path(target).is_file():
        raise InputError(f"{target} is a file; name a folder for the router")
    encoder = given.pop("encoder", ENCODER)
    for name, field, kind in (("p", "sizes", int), ("lambda", "weights", float)):
        if name in given:
            given[field] = tuple(_numbers(name, given.pop(name), kind))
    dense = not given.pop("without_dense", False)
    options = FitOptions(**given, dense=dense)
    router = fit(OutcomeStore(source).read(), encoder, options)
    router.save(target)
    about = router.about
    print(f"{target}: router over {len(router.pool)} heads, p = {about['p']}, λ = {about['lambda']}")
    print(
        f"{about['questions']} questions: {about['questions_no_head_solves']} solved by no head (left out), "
        f"{about['questions_all_heads_solve']} by all; {about['validation_questions']} for validation"
    )
    useful = about["questions"] - about["questions_no_head_solves"] - about["questions_all_heads_solve"]
    if useful < 30:
        print(f"only {useful} questions tell heads apart: expect nothing of this router; sweep more questions")
    if about["held_out"]:
        print(f"{about['held_out']} questions held out, for `lmeval-prune report sprint --test {source}`")
    if about["validation_pass"]:
        print("validation: " + ", ".join(f"{k} {v:.3f}" for k, v in about["validation_pass"].items()))
    return 0


def run_questions(given: dict[str, Any]) -> int:
    """`lmeval-prune questions`."""
    from lmeval_prune.sprint.outcomes import OutcomeStore
    from lmeval_prune.sprint.router import Router, text_key

    _need(given, "questions", "outcomes", "task")
    outcomes = OutcomeStore(given["outcomes"]).read()
    seen = set(Router.load(given["router"]).about.get("seen", [])) if "router" in given else set()
    rows = [row for row in outcomes.questions if text_key(row["question"]) not in seen]
    places = {(row["task"], row["split"]) for row in rows}
    if len(places) != 1:
        found = ", ".join(" ".join(place) for place in sorted(places)) or "none"
        raise InputError(f"the questions must be of one task and split; these are of: {found}")
    print(json.dumps({given["task"]: [row["doc_id"] for row in rows]}))
    return 0


def run_report(given: dict[str, Any]) -> int:
    """`lmeval-prune report sprint`."""
    from lmeval_prune.sprint.report import SprintReport

    given.pop("kind")
    _need(given, "report", "test", "output")
    pairs = []
    samples = given.pop("samples", [])
    if isinstance(samples, dict):  # in a recipe
        samples = [f"{name}={path}" for name, path in samples.items()]
    for text in [samples] if isinstance(samples, str) else samples:
        name, equals, path = str(text).partition("=")
        if not equals:
            raise InputError(f"samples must be NAME=FILE, not {text!r}")
        pairs.append((name, path))
    print(SprintReport(**given, samples=pairs).write())
    return 0


# --------------------------------------------------------------------------- options


def _command(commands: Any, name: str, about: str, function: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument(
        "--config", default=None, help=f"YAML recipe; its section `{name}` gives options of this command"
    )
    parser.set_defaults(function=lambda options: function(_merged(name, parser, options)))
    return parser


def _add(parser: argparse.ArgumentParser, name: str, about: str, kind: Any = str) -> None:
    names = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    parser.add_argument(*names, dest=name, type=kind, default=argparse.SUPPRESS, help=about)


def _flag(parser: argparse.ArgumentParser, name: str, about: str) -> None:
    names = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    parser.add_argument(*names, dest=name, action="store_true", default=argparse.SUPPRESS, help=about)


def _merged(command: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe's options, and over them the command line's.

    Raises:
        InputError: the recipe cannot be read, or has an option that the command does not know.
    """
    given = {name: value for name, value in vars(options).items() if name not in ("config", "function")}
    if options.config is None:
        return given
    import yaml

    path = Path(options.config)
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(recipe, dict) or not isinstance(recipe.get(command, {}), dict):
        raise InputError(f"{path} must have sections, one of them `{command}:` with options")
    known = {action.dest: action for action in parser._actions}
    found = {}
    for name, value in recipe.get(command, {}).items():
        if name not in known or name in ("help", "config"):
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"{path}: {command} has no option {name!r}{hint}")
        kind = known[name].type
        try:
            found[name] = kind(value) if kind in (int, float) else value
        except (TypeError, ValueError):
            raise InputError(f"{path}: {name} must be a number, not {value!r}") from None
    if "layers" in given:
        found.pop("heads", None)
    if "heads" in given:
        found.pop("layers", None)
    return {**found, **given}


def _need(given: dict[str, Any], command: str, *names: str) -> None:
    missing = [name for name in names if not given.get(name)]
    if missing:
        raise InputError(f"{command} needs {', '.join('--' + name for name in missing)} (or a --config that has them)")


def _list(value: Any) -> list[str]:
    return (
        [str(v) for v in value] if isinstance(value, list) else [v.strip() for v in str(value).split(",") if v.strip()]
    )


def _numbers(name: str, value: Any, kind: type) -> list[Any]:
    try:
        return [kind(text) for text in _list(value)]
    except ValueError:
        raise InputError(f"{name} must be numbers separated by commas, not {value!r}") from None


def _pairs(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    from lm_eval.utils import simple_parse_args_string

    try:
        return dict(simple_parse_args_string(str(value)))
    except (ValueError, IndexError):
        raise InputError(f"{name} must be NAME=VALUE pairs separated by commas, not {value!r}") from None
