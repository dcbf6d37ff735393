"""Time llama.cpp's answers of a model and of a smaller one, in turn.

    make .venv-llamacpp/.installed
    python benchmarks/cut_serving.py [--pretrained smollm2-135m] [--smaller FOLDER]

Both are exported as GGUF files in float32, and each is served by a server of its own, which idles while the other
answers. A time is written only after transformers has read the servers' greedy answers: no logit may exceed that of the
server's token by more than a near-tie. How fast a model is does not depend on its weights: without `--smaller`, layers
of the model are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from _engines import Server
from _record import environment, median_and_range, seconds_in_turn, write
from transformers import AutoTokenizer

from lmeval_prune import load_pretrained
from lmeval_prune.checkpoints import embedded
from lmeval_prune.decoding.request import end_tokens
from lmeval_prune.export.commands import model as export_model
from lmeval_prune.profiling.costs import parameters

LAYERS = "+".join(f"L{layer}" for layer in range(10, 19))  # are left out without `--smaller`
NEAR_TIE = 1e-3  # of two logits
TEXT = "Tom has {} red apples and buys {} green ones. How many apples does he have now? "


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", default="smollm2-135m")
    parser.add_argument("--smaller", help="a cut checkpoint; default: --pretrained without nine of its layers")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="numbers of requests at a time")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--llamacpp", type=Path, default=Path(".venv-llamacpp/bin/llama-server"))
    parser.add_argument("--work", type=Path, default=Path("out/cut_serving"))
    parser.add_argument("--name", default="cut_serving", help="of the results file")
    options = parser.parse_args()
    if not options.llamacpp.exists():
        parser.error(f"there is no {options.llamacpp}; `make .venv-llamacpp/.installed` makes it")
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    machine = environment()
    checkpoints = {"dense": options.pretrained, "smaller": options.smaller or str(options.work / "smaller")}
    if not options.smaller:
        with redirect_stdout(StringIO()):
            export_model(options.pretrained, checkpoints["smaller"], blocks=LAYERS)
    tokenizer = AutoTokenizer.from_pretrained(embedded.resolve(options.pretrained))
    prompts = [_prompt(tokenizer, number, options.prompt) for number in range(max(options.batches))]
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(name, folder, options)) for name, folder in checkpoints.items()}
        checks = {
            name: _check(load_pretrained(checkpoints[name], dtype=torch.float32), server, prompts[:8], options.new)
            for name, server in servers.items()
        }
        rates = {}
        for batch in options.batches:
            kinds = {
                name: lambda server=servers[name], batch=batch: _seconds(server, prompts[:batch], options.new)
                for name in ("smaller", "dense")
            }
            turns = seconds_in_turn(kinds, options.rounds)
            rates[str(batch)] = {
                "tokens_per_second": {
                    name: statistics.median(batch * options.new / seconds[name] for seconds in turns["seconds"])
                    for name in checkpoints
                },
                "gain": median_and_range([ratio - 1 for ratio in turns["ratios"]]),
                "seconds": turns["seconds"],
            }
            print(batch, rates[str(batch)]["tokens_per_second"], rates[str(batch)]["gain"], flush=True)
    work = {name: getattr(options, name) for name in ("prompt", "new", "rounds")}
    machine["versions"]["xllamacpp"] = _version(options.llamacpp)
    write(options.name, {"environment": machine, "work": work, "models": checks, "batches": rates})


def _version(llamacpp: Path) -> str:
    """Return the version of xllamacpp in the environment of its server."""
    program = "from importlib.metadata import version; print(version('xllamacpp'))"
    done = subprocess.run([llamacpp.with_name("python"), "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _prompt(tokenizer: Any, number: int, length: int) -> list[int]:
    """Return the token ids of a prompt of `length` tokens, another one for each number."""
    text = "".join(TEXT.format(2 + number, 3 + repetition) for repetition in range(1 + length // 8))
    return list(tokenizer(text).input_ids[:length])


def _server(name: str, checkpoint: str, options: argparse.Namespace) -> Server:
    """Export a checkpoint, and return a server of it that is not started."""
    file = (options.work / f"{name}.gguf").resolve()
    with redirect_stdout(StringIO()):
        export_model(checkpoint, str(file), format="gguf", dtype="float32")
    at_once = max(options.batches)
    line = f"llama-server -m {file} --parallel {at_once} --ctx-size {at_once * (options.prompt + options.new + 32)}"
    log = options.work / f"{name}.log"
    return Server(line, options.llamacpp.resolve().parent, log, options.threads)


def _answer(server: Server, prompt: Sequence[int], new: int) -> list[int]:
    """Return the token ids of a greedy answer of `new` tokens."""
    settings = {"n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
    content = json.dumps({"prompt": list(prompt), **settings}).encode()
    request = urllib.request.Request(f"{server.url}/completion", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        tokens = list(json.load(reply)["tokens"])
    assert len(tokens) == new, "an answer ended earlier"
    return tokens


def _answers(server: Server, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Return the answers to prompts that are sent at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: _answer(server, prompt, new), prompts))


def _seconds(server: Server, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Return the seconds that a server takes to answer."""
    begin = time.perf_counter()
    _answers(server, prompts, new)
    return time.perf_counter() - begin


def _check(model: Any, server: Server, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """Check by transformers that answers are greedy, up to near-ties; return what was checked."""
    forbidden = list(end_tokens(model.generation_config))
    gaps = list[torch.Tensor]()
    for prompt, answer in zip(prompts, _answers(server, prompts, new), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logits[:, forbidden] = -torch.inf
        tokens = torch.tensor(answer)[:, None]
        gaps.append(logits.amax(-1) - logits.gather(1, tokens)[:, 0])
    largest = float(torch.cat(gaps).max())  # NaN if any is
    assert largest < NEAR_TIE, f"a token of the server is {largest:.4f} below the largest logit"
    count = len(prompts) * new
    return {"parameters": list(parameters(model)), "greedy_tokens_checked": count, "largest_gap": largest}


if __name__ == "__main__":
    main()
