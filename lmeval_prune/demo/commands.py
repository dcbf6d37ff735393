"""`lmeval-prune demo`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

YOURS = "YOUR_MODEL"


def demo(pretrained: str = "smollm2-135m", output: str = "out/demo") -> int:
    """Show what pruning heads does to a model, how fast variants are decoded, and what a cut saves.

    Measures the distance from the dense model and the accuracy on packaged problems, with the least important and with
    random heads pruned; decodes two prompts under ten masks together and one mask at a time; and cuts a quarter of
    the parameters of heads and channels for good. Writes `page.html`, `demo.json` and the cut model.

    Args:
        pretrained: a causal language model, as for lm_eval
        output: folder of the page, the figures and the cut model
    """
    from lmeval_prune.artefacts import check_writable

    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # set before torch starts: idle OpenMP threads sleep soon
    page = Path(output) / "page.html"
    check_writable(page)
    print(f"Prunes heads of {pretrained} and cuts a smaller model out: about a minute on two cores", file=sys.stderr)
    from lmeval_prune.demo.run import ranked_name, run, summary, write_page
    from lmeval_prune.reporting.quiet import silence_libraries

    silence_libraries()
    results = run(pretrained, page.parent)
    write_page(results, page)
    model, heads = shlex.quote(pretrained), "+".join(results["masks"][ranked_name(results["shares"][0])][:2])
    arguments = shlex.quote(f"pretrained={pretrained},heads={heads}")
    text = "--task prune_tiny_cloze --windows 9 --tokens 64"
    print(f"""{summary(results)}
The curves, the map of heads and the answers: {page}
Next, with the same model; data sets are not needed:
  lmeval-prune distance {model} --heads {heads} --task prune_tiny_choice
  lm_eval --model pruned-hf --model_args {arguments} --tasks prune_tiny_cloze
  lmeval-prune prune --pretrained {model} --method flap --ratio 0.2 {text} --output out/fifth.json --cut out/fifth
With one of your own, a folder or a name on the Hub in place of {YOURS}:
  lmeval-prune heads --pretrained {YOURS}
  lmeval-prune demo --pretrained {YOURS} --output out/yours""")
    return 0
