"""The `lmeval-prune` command.

A command is a function: its parameters are its options (see `options.py`), what it returns is the exit status. A room
has its commands in its `commands.py`, which imports nothing heavy before a command runs. A new one is a line in
`COMMANDS`: its name, of one word or two, and where its function is. A function of `*words` gets the command line as it
stands.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pkgutil import resolve_name

from lmeval_prune import __version__, preflight
from lmeval_prune.artefacts import output_lock
from lmeval_prune.errors import InputError, did_you_mean, disk_error
from lmeval_prune.options import read_options, summary

COMMANDS = {
    "run": "lmeval_prune.commands:run",
    "demo": "lmeval_prune.demo:demo",
    "models": "lmeval_prune.commands:models",
    "heads": "lmeval_prune.commands:heads",
    "mask": "lmeval_prune.commands:mask",
    "filter-map": "lmeval_prune.commands:filter_map",
    "importance": "lmeval_prune.surgery.commands:importance",
    "prune": "lmeval_prune.surgery.commands:prune",
    "cut": "lmeval_prune.surgery.commands:execute",
    "export adapter": "lmeval_prune.export.commands:adapter",
    "export model": "lmeval_prune.export.commands:model",
    "profile": "lmeval_prune.profiling.commands:profile",
    "sweep": "lmeval_prune.sprint.commands:sweep",
    "fit": "lmeval_prune.sprint.commands:fit",
    "questions": "lmeval_prune.sprint.commands:questions",
    "report sprint": "lmeval_prune.sprint.commands:report",
    "grid run": "lmeval_prune.grid.commands:run",
    "grid compare": "lmeval_prune.grid.commands:compare",
    "athena train": "lmeval_prune.athena.commands:train",
    "distill": "lmeval_prune.distillation.commands:distill",
}

# Options that name a command's output, which one process locks; the commands of SHARED have locks of their own.
OUTPUTS = ("output", "cut", "lm_eval")
SHARED = ("sweep", "distill", "grid run")

# Commands that run lm-eval: it gets our models and tasks registered, with the bridge or without.
WITH_LM_EVAL = ("run", "sweep", "grid run", "importance", "prune", "distill")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake prints one line and returns 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["--version"]:
            print(f"lmeval-prune {__version__}")
            return 0
        asks_help = [word in ("-h", "--help") for word in words[:2]]
        if asks_help[:1] == [True] or (asks_help == [False, True] and words[0] not in COMMANDS):
            print(overview())
            return 0
        return _run(_command(words), words)
    except BrokenPipeError:  # `lmeval-prune … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (InputError, OSError) as error:
        message = str(disk_error(error, "a file") or error)
        print(f"lmeval-prune: error: {message.partition(chr(10))[0]}", file=sys.stderr)
        return 2


def _run(name: str, words: Sequence[str]) -> int:
    """Read and check a command's options, lock its output, and call it."""
    function, rest = resolve_name(COMMANDS[name]), words[len(name.split()) :]
    takes_words = bool(inspect.getfullargspec(function).varargs)
    options = {} if takes_words else read_options(name, function, rest, COMMANDS)
    preflight.check(options)
    if name in WITH_LM_EVAL:
        from lmeval_prune.plugin import registration

        registration.register()
    with ExitStack() as stack:
        outputs = (options.get(option) for option in OUTPUTS if name not in SHARED)
        for path in dict.fromkeys(map(str, filter(None, outputs))):
            stack.enter_context(output_lock(path))
        return int(function(*(rest if takes_words else ()), **options))


def overview() -> str:
    """List all commands with their summaries."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{summary(resolve_name(target)).rstrip('.')}" for name, target in COMMANDS.items()]
    return "\n".join(["usage: lmeval-prune COMMAND [options]; COMMAND --help shows its options", "", *lines])


def _command(words: Sequence[str]) -> str:
    """Return the name of the command that a command line begins with."""
    names = [name for name in COMMANDS if name.split() == list(words[: len(name.split())])]
    if names:
        return names[0]
    kinds = [name for name in COMMANDS if words and name.startswith(f"{words[0]} ")]
    if kinds or not words:
        raise InputError(f"name a command: {', '.join(kinds or COMMANDS)}")
    raise InputError(
        f"there is no command {words[0]!r}{did_you_mean(words[0], COMMANDS)} (`lmeval-prune --help` lists them)"
    )
