"""`lmeval-prune demo`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

MODEL = "smollm2-135m"
NEXT_STEPS = """Next, with a model of your own:
  lmeval-prune distance {model} --heads L5H3 --task prune_gsm8k --limit 8 --apply_chat_template
  lm_eval --model pruned-hf --model_args pretrained={model},heads=L5H3+L15H0 --tasks gsm8k
  lmeval-prune importance --pretrained {model} --task prune_gsm8k --output out/scores.json"""


def demo(pretrained: str = MODEL, output: str = "out/demo") -> int:
    """Show what pruning heads does to a model, how fast variants are decoded, and what a cut saves.

    Measures the distance from the dense model and the accuracy on packaged problems, with the least important and with
    random heads pruned; decodes eight prompts under nine masks together and one mask at a time; and cuts a quarter of
    the parameters of heads and channels for good. Writes `page.html`, `demo.json` and the cut model.

    Args:
        pretrained: a causal language model, as for lm_eval
        output: folder of the page, the figures and the cut model
    """
    from lmeval_prune.artefacts import check_writable

    folder = Path(output)
    page = folder / "page.html"
    check_writable(page)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # set before torch starts: idle OpenMP threads sleep soon
    from rich.console import Console

    screen, errors = Console(file=sys.stdout), Console(file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with _messages_to(folder / "demo.log"):
        from lmeval_prune.demo.figures import tables
        from lmeval_prune.demo.page import write_page
        from lmeval_prune.demo.run import run

        results = run(pretrained, folder, errors)
        write_page(results, page)
    for table in tables(results):
        screen.print(table)
    screen.print(f"The curves, the map of heads and the answers: {page}", highlight=False)
    print(NEXT_STEPS.format(model=pretrained))
    return 0


@contextmanager
def _messages_to(path: Path) -> Iterator[None]:
    """Write to a file what libraries print, log and warn about inside the block."""
    with path.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        handler, root = logging.StreamHandler(file), logging.getLogger()
        others = root.handlers[:]
        root.handlers[:] = [handler]
        try:
            with warnings.catch_warnings():
                yield
        finally:
            root.handlers[:] = others
