"""math-verify's workers: they hang, die and do not start; whatever the program that starts them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lmeval_prune.scoring.verifier import Verifier, shared

HANGING = ("x+1", "(x+1)^{100000000}+1000000000!")


def workers() -> list[psutil.Process]:
    """Return those of this process that live."""
    processes = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if "pebble_pool_worker" in child.cmdline():
                processes.append(child)
    return processes


def wait_for_a_comparison(processes: list[psutil.Process]) -> None:
    """Wait until one of these, which were idle, is in the middle of a long comparison, however slow the machine is."""
    before = {process: sum(process.cpu_times()[:2]) for process in processes}
    while not any(sum(process.cpu_times()[:2]) > used + 0.2 for process, used in before.items()):
        time.sleep(0.02)


def waits(thread: int) -> bool:
    frame, functions = sys._current_frames().get(thread), []
    while frame:
        functions.append(frame.f_code)
        frame = frame.f_back
    return threading.Condition.wait.__code__ in functions


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    """Do something in the middle of the comparison that this thread, the main one, is about to ask the worker for."""
    main, idle = threading.main_thread().ident, workers()

    def act() -> None:
        wait_for_a_comparison(idle)
        while not waits(main):
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def verify(verifier: Verifier, *pair: str) -> str:
    return verifier.verify_many([pair])[0]


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    """Start one worker, which alone is a child of this process."""
    shared().close()
    instance = Verifier(workers=1, seconds=20.0)
    yield instance
    instance.close()
    assert workers() == []


def test_a_hanging_comparison_is_stopped_and_the_pool_goes_on(verifier: Verifier) -> None:
    assert verify(verifier, "x^2-1", "(x-1)(x+1)") == "equal"
    (before,) = workers()
    verifier.seconds = 3.0  # enough for the one that ends, on a machine that is busy
    assert verifier.verify_many([HANGING, ("2x", "x+x")]) == ["timeout", "equal"]
    verifier.seconds = 20.0
    assert verify(verifier, "2x", "x+y") == "different" and not before.is_running()


def test_a_part_of_what_is_no_whole_formula_is_not_compared(verifier: Verifier) -> None:
    half = r"\frac{1}{2}"
    parts = [half + "x\\", f"y${half}", f"y$ ${half}", f"y\\${half}", f"y\\[{half}\\]"]
    verdicts = verifier.verify_many([(half, answer) for answer in (*parts, r"\frac{2}{4}")])
    assert dict(zip(parts, verdicts, strict=False)) == dict.fromkeys(parts, "different") and verdicts[-1] == "equal"


def test_a_worker_that_dies_is_replaced(verifier: Verifier) -> None:
    """In the middle of a comparison, which is then asked again; and while it waits."""
    assert verify(verifier, "2x", "x+x") == "equal"
    verifier.seconds = 3.0
    (worker,) = workers()
    killer = meanwhile(worker.kill)
    assert verifier.verify_many([HANGING, ("2x", "x+x")]) == ["timeout", "equal"]
    killer.join()
    verifier.seconds = 20.0
    assert verify(verifier, "3x", "2x+x") == "equal"
    workers()[0].kill()
    assert verify(verifier, "2x", "x+x") == "equal"


def test_what_dies_twice_is_a_crash(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[tuple[str, str]]] = []

    def answers(_: Verifier, pairs: list[tuple[str, str]]) -> list[str]:
        calls.append(list(pairs))
        return ["crash" if gold == "bomb" or len(calls) == 1 else "equal" for gold, _ in pairs]

    monkeypatch.setattr(Verifier, "_verify_many", answers)
    assert verifier.verify_many([("bomb", "x"), ("2x", "x+x")]) == ["crash", "equal"]
    assert calls == [[("bomb", "x"), ("2x", "x+x")]] * 2


def test_an_interrupted_comparison_does_not_shift_the_verdicts(verifier: Verifier) -> None:
    pairs = [(f"x+{i}", f"{i}+x" if i % 3 else f"{i + 1}+x") for i in range(30)]
    assert verifier.verify_many(pairs) == ["equal" if i % 3 else "different" for i in range(30)]  # in their order
    main = threading.main_thread().ident
    with pytest.raises(KeyboardInterrupt):
        meanwhile(lambda: signal.pthread_kill(main, signal.SIGINT))
        verifier.verify_many([HANGING, *[("x+1", "1+x")] * 2000])
    assert workers() == []
    assert verify(verifier, "x", "y") == "different"


# --------------------------------------------------------------------------- the programs that start them

PROGRAM = """
print("begin", flush=True)
import psutil
from lmeval_prune.scoring.verifier import Verifier, shared
verifier = {verifier}
print(*verifier.verify_many([("2x", "x+x"), ("x", "y")] * 10), flush=True)
print(*[child.pid for child in psutil.Process().children()], flush=True)
{then}
"""


def left(pids: str) -> list[psutil.Process]:
    """Return those of some processes that do not end."""
    processes = [psutil.Process(pid) for pid in map(int, pids.split()) if psutil.pid_exists(pid)]
    return psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.parametrize("way", ["script", "module", pytest.param("command", marks=pytest.mark.long), "stdin"])
def test_a_program_without_a_guard_runs_once_and_leaves_nothing(way: str, tmp_path: Path) -> None:
    """What it does at its top level is not done again in the workers."""
    text = PROGRAM.format(verifier="shared()", then="")
    (tmp_path / "program.py").write_text(text)
    arguments = {"script": ["program.py"], "module": ["-m", "program"], "command": ["-c", text], "stdin": []}[way]
    done = subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    begin, verdicts, pids = done.stdout.splitlines()
    assert (begin, verdicts, done.stderr, done.returncode) == ("begin", " ".join(["equal different"] * 10), "", 0)
    assert len(pids.split()) >= 2 and left(pids) == []


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT]
)
def test_a_program_that_is_killed_leaves_nothing(number: int, tmp_path: Path) -> None:
    """One worker waits; the other's comparison would go on for ever."""
    (tmp_path / "program.py").write_text(
        PROGRAM.format(verifier="Verifier(2, seconds=4.0)", then=f"verifier.verify_many([{HANGING}])")
    )
    program = subprocess.Popen(
        [sys.executable, "program.py"], stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    _, _, pids = (program.stdout.readline() for _ in range(3))
    wait_for_a_comparison([psutil.Process(pid) for pid in map(int, pids.split())])
    if number == signal.SIGINT:
        os.killpg(program.pid, number)  # as the terminal does
    else:
        program.send_signal(number)
    assert program.wait(timeout=60) == -number
    assert len(pids.split()) >= 4 and left(pids) == []
