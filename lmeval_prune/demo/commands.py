"""`lmeval-prune demo`."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

MODEL = "smollm2-135m"
YOURS = "YOUR_MODEL"


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
    from lmeval_prune.checkpoints import embedded

    folder = Path(output)
    page = folder / "page.html"
    check_writable(page)
    if pretrained in embedded.MODELS or Path(pretrained).is_dir():  # nothing is to be downloaded
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # set before torch starts: idle OpenMP threads sleep soon
    folder.mkdir(parents=True, exist_ok=True)
    errors = sys.stderr
    print(f"Prunes heads of {pretrained} and cuts a smaller model out: some minutes on two cores", file=errors)
    with _messages_to(folder / "demo.log"):
        from lmeval_prune.demo.figures import summary
        from lmeval_prune.demo.page import write_page
        from lmeval_prune.demo.run import ranked_name, run

        results = run(pretrained, folder, errors)
        write_page(results, page)
    print(f"{summary(results)}\n\nThe curves, the map of heads and the answers: {page}")
    print(next_steps(pretrained, results["masks"][ranked_name(results["shares"][0])][:2]))
    return 0


def next_steps(pretrained: str, heads: Sequence[str]) -> str:
    """Return commands that go on with the model and heads of it, and commands for a model of one's own."""
    model, names = shlex.quote(pretrained), "+".join(heads)
    text = "--task prune_tiny_cloze --windows 9 --tokens 64"
    arguments = shlex.quote(f"pretrained={pretrained},heads={names}")
    return f"""Next, with the same model; data sets are not needed:
  lmeval-prune distance {model} --heads {names} --task prune_tiny_choice
  lm_eval --model pruned-hf --model_args {arguments} --tasks prune_tiny_cloze
  lmeval-prune prune --pretrained {model} --method flap --ratio 0.2 {text} --output out/fifth.json --cut out/fifth
With one of your own, a folder or a name on the Hub in place of {YOURS}:
  lmeval-prune heads --pretrained {YOURS}
  lmeval-prune demo --pretrained {YOURS} --output out/yours"""


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
