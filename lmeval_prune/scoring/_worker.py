"""Compares mathematical answers in a process that can be killed: one JSON line in, one out.

Started by `lmeval_prune.scoring.mathematics` as `python -m lmeval_prune.scoring._worker SECONDS`. The parent
keeps the time and kills; should the parent itself be killed, an alarm ends a comparison that would go on for
ever (Linux's parent-death signal would not do: it is sent when the *thread* that started us ends).
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys

MEMORY = 4 * 2**30  # bytes of address space; a LaTeX bomb ends in MemoryError, not in a dead machine


def main() -> None:
    """Answer lines until standard input ends; SIGALRM ends us after twice the parent's limit on one line."""
    limit = 1 + math.ceil(2 * float(sys.argv[1]))
    alarm = getattr(signal, "alarm", lambda seconds: None)  # not on Windows
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    configuration = [LatexExtractionConfig(), ExprExtractionConfig()]
    out, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        alarm(limit)
        try:
            # no timeouts inside: the parent keeps the time, and kills
            parsed = [parse(f"${text}$", configuration, parsing_timeout=None) for text in (gold, answer)]
            equal = bool(parsed[0] and parsed[1] and verify(parsed[0], parsed[1], timeout_seconds=None))
        except Exception:
            equal = False
        alarm(0)
        print(json.dumps(equal), file=out, flush=True)


if __name__ == "__main__":
    main()
