"""Compares mathematical answers in a process that can be killed: one JSON line in, one out.

Started by `lmeval_prune.scoring.mathematics` as `python -m lmeval_prune.scoring._worker`.
"""

from __future__ import annotations

import json
import logging
import sys

MEMORY = 4 * 2**30  # bytes of address space; a LaTeX bomb ends in MemoryError, not in a dead machine


def main() -> None:
    """Answer lines until standard input ends."""
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
        try:
            # no timeouts inside: the parent keeps the time, and kills
            parsed = [parse(f"${text}$", configuration, parsing_timeout=None) for text in (gold, answer)]
            equal = bool(parsed[0] and parsed[1] and verify(parsed[0], parsed[1], timeout_seconds=None))
        except Exception:
            equal = False
        print(json.dumps(equal), file=out, flush=True)


if __name__ == "__main__":
    main()
