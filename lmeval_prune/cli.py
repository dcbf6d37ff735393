"""The `lmeval-prune` command.

A command is a function: its parameters are its options (see `config.py`), its return value is the exit status. The
commands of a package are in its `commands.py`, which imports nothing heavy before a command runs. A new command is a
line in `COMMANDS`: its name of one or two words, and its function. A function with `*words` gets the unparsed words.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from io import TextIOWrapper
from pkgutil import resolve_name

from lmeval_prune import __version__
from lmeval_prune.artefacts import output_lock
from lmeval_prune.config import INCLUDE_PATH, declared, read_options, summary
from lmeval_prune.errors import InputError, did_you_mean, disk_error, first_line
from lmeval_prune.tasks.loading import including

COMMANDS = {
    "run": "lmeval_prune.commands:run",
    "demo": "lmeval_prune.demo.commands:demo",
    "models": "lmeval_prune.commands:models",
    "heads": "lmeval_prune.commands:heads",
    "mask": "lmeval_prune.commands:mask",
    "importance": "lmeval_prune.planning.commands:importance",
    "prune": "lmeval_prune.planning.commands:prune",
    "cut": "lmeval_prune.planning.commands:cut_model",
    "export adapter": "lmeval_prune.export.commands:adapter",
    "export model": "lmeval_prune.export.commands:model",
    "profile": "lmeval_prune.commands:profile",
    "distance": "lmeval_prune.comparison.commands:distance",
    "sweep": "lmeval_prune.sprint.commands:sweep",
    "fit": "lmeval_prune.sprint.commands:fit",
    "questions": "lmeval_prune.sprint.commands:questions",
    "report sprint": "lmeval_prune.sprint.commands:report",
    "compare": "lmeval_prune.comparison.commands:compare",
    "grid run": "lmeval_prune.grid.commands:run",
    "grid compare": "lmeval_prune.grid.commands:compare",
    "athena train": "lmeval_prune.athena.commands:train",
    "distill": "lmeval_prune.distillation.commands:distill",
}

# Options that name an output, which the command locks; the commands of SHARED take their own locks.
OUTPUTS = ("output", "cut", "lm_eval")
SHARED = ("sweep", "distill", "grid run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; an error prints one line and returns 1, a user's mistake 2. `--debug` shows tracebacks."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug, words = "--debug" in words, [word for word in words if word != "--debug"]
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: of what an ASCII terminal lacks nothing is lost
    try:
        if words[:1] == ["--version"]:
            print(f"lmeval-prune {__version__}")
            return 0
        asks_help = [word in ("-h", "--help") for word in words[:2]]
        if not words or asks_help[:1] == [True] or (asks_help == [False, True] and words[0] not in COMMANDS):
            print(overview())
            return 0
        return _run(_command(words), words)
    except BrokenPipeError:  # `lmeval-prune … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        mistake = error if isinstance(error, InputError) else disk_error(error, "a file")
        line = str(mistake).partition("\n")[0] if mistake else f"{first_line(error)} (--debug shows where)"
        print(f"lmeval-prune: error: {line}", file=sys.stderr)
        return 2 if mistake else 1


def _run(name: str, words: Sequence[str]) -> int:
    """Read and check the options of a command, lock its outputs, and call it."""
    function, command_words = resolve_name(COMMANDS[name]), words[len(name.split()) :]
    takes_words, takes_tasks = bool(inspect.getfullargspec(function).varargs), declared(function).takes_tasks
    options = {} if takes_words else read_options(name, function, command_words, COMMANDS)
    outputs = () if name in SHARED else (options.get(option) for option in OUTPUTS)
    try:
        if takes_words or takes_tasks:  # lm-eval needs this package's models and tasks, even without the bridge
            from lmeval_prune.plugin import registration

            registration.register()
        with ExitStack() as stack:
            stack.enter_context(including(options.get(INCLUDE_PATH)))
            for path in dict.fromkeys(map(str, filter(None, outputs))):
                stack.enter_context(output_lock(path))
            arguments = {option: value for option, value in options.items() if option != INCLUDE_PATH}
            return int(function(*(command_words if takes_words else ()), **arguments))
    except KeyboardInterrupt:
        if not declared(function).resumes:
            raise
        print(f"interrupted; run the same command again to resume {options['output']}")
        return 130


def overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{summary(resolve_name(target)).rstrip('.')}" for name, target in COMMANDS.items()]
    return "\n".join(["usage: lmeval-prune COMMAND [options]; COMMAND --help shows its options", "", *lines])


def _command(words: Sequence[str]) -> str:
    """Return the command at the beginning of a command line."""
    for name in COMMANDS:
        if name.split() == list(words[: len(name.split())]):
            return name
    candidates = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if candidates:
        raise InputError(f"name a command: {', '.join(candidates)}")
    raise InputError(
        f"there is no command {words[0]!r}{did_you_mean(words[0], COMMANDS)} (`lmeval-prune --help` lists them)"
    )
