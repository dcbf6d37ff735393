"""What must not change while the package is made smaller: `make gates` before and after each step.

    python -m tests.gates                    check: golden values, exact digests beside the base commit, kills, speed
    python -m tests.gates --parts families   only these parts
    python -m tests.gates --write            write the golden values of the base commit's code

`golden/PART.json` holds what the code computed at the commit `golden/BASE`: decisions and texts are compared for equality, figures
to 4 digits, runs of channels up to 3 (of about 270), since machines differ in the last ones. Digests of tensors (`sha`) are of one
machine: they are compared with those that the base commit's own code computes here, in a worktree, once. The same worktree is
the other side of the measured speed. Only commands and what `lmeval_prune` exports are called: the package can change below them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
BUILD = ROOT / "build" / "gates"
DATA = ROOT.parent / "shared" / "data"
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

BASE_HEADS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE_HEADS,  # grouped queries
    "gpt_bigcode": {**GPT, "multi_query": True},  # one key-value head
    "qwen3": {**BASE_HEADS, "head_dim": 16},  # norms of queries and keys
    "qwen2": BASE_HEADS,  # biases
    "mixtral": {**BASE_HEADS, "num_local_experts": 2},  # experts
    "gemma3_text": {**BASE_HEADS, "head_dim": 16, "sliding_window": 8},  # windows
    "qwen3_next": {
        **BASE_HEADS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },  # linear attention between
    "t5": {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0
    },  # an encoder
    "gpt2": GPT,  # transposed weights
    "phi3": BASE_HEADS,  # fused projections
    "deepseek_v3": {
        **BASE_HEADS, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    },  # latent attention
    "opt": {**BASE_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32},  # learned positions
}  # fmt: skip
EXPERTS = ("mixtral", "qwen3_next", "deepseek_v3")  # in float32: their grouped products have no float64
PROMPTS = ["The cat sat", "One two three", "If 3 boxes hold 12 pens, one box"]
PAIRS = [("The cat", " sat here"), ("Two and", " two are four"), ("", "Once")]
PRUNERS = {
    "norm_entropy": [], "magnitude": ["--parts", "both"], "flap": [], "slimgpt": [], "wanda_sp": [], "llm_pruner": [],
    "global_threshold": [], "confidence": [], "random": ["--options", "seed=1"], "gisp": [], "block_influence": ["--parts", "blocks"],
    "block_kl": ["--parts", "layers"],
}  # fmt: skip
EVERYWHERE = ("magnitude", "flap", "slimgpt", "norm_entropy", "block_influence")  # the others on the first family alone
SOME_HEADS = "L0H1+L1H2-3"

# --------------------------------------------------------------------------- how things are run and summarised


def command(*words: object) -> str:
    """Run a command of `lmeval-prune` in this process, and return what it printed; an error is returned by its exit status."""
    from lmeval_prune.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main([str(word) for word in words])
        except Exception as error:
            return f"status {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return out.getvalue() if status == 0 else f"status {status}: {out.getvalue().strip().splitlines()[-1]}"


def attempted(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return a result, or only the kind of the error: its words may change."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return function(*arguments, **options)
    except Exception as error:
        return f"refused: {type(error).__name__}"


def summary(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a digest of tensors, and three weighted means that a change of any number moves."""
    import torch

    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        sha.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes() if tensors[name].numel() else b"")
    numbers = torch.cat(
        [torch.zeros(1, dtype=torch.float64), *(tensors[name].double().flatten() for name in sorted(tensors))]
    )
    places = torch.arange(len(numbers), dtype=torch.float64)
    means = [float((numbers * torch.cos(places * step)).mean()) for step in (0.0, 0.1, 1.7)]
    return {"tensors": len(tensors), "numbers": len(numbers) - 1, "means": means, "sha": sha.hexdigest()[:16]}


def tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {key: value for file in files for key, value in load_file(file).items()}


def plan_of(path: Path) -> dict[str, Any]:
    """Return what a plan removes, and its tensors: scores, and what makes up for the removed."""
    plan = json.loads(path.read_text())
    tensors = tensors_of(path.with_name(plan["tensors"]["file"])) if plan.get("tensors") else {}
    return {
        **{name: plan["settings"].get(name) for name in ("heads", "channels", "blocks")},
        "tensors": summary(tensors),
    }


def answers(pretrained: Path | str, texts: bool = True, **model_args: Any) -> dict[str, Any]:
    """Return log-likelihoods and greedy texts of a model as lm-eval asks for them."""
    from lm_eval.api.instance import Instance

    from lmeval_prune.models.pruned_hf import PrunedHFLM

    lm = PrunedHFLM(str(pretrained), device="cpu", batch_size=2, **model_args)
    scored = lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, i, ("gates", i, 1)) for i, pair in enumerate(PAIRS)], disable_tqdm=True
    )
    result: dict[str, Any] = {"loglikelihood": [[value, bool(greedy)] for value, greedy in scored]}
    if texts:
        settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
        requests = [
            Instance("generate_until", {}, (text, settings), i, ("gates", i, 1)) for i, text in enumerate(PROMPTS)
        ]
        result["texts"] = lm.generate_until(requests, disable_tqdm=True)
    report = lm.get_model_info() if hasattr(lm, "get_model_info") else {}
    skipped = (report.get("pruning") or {}).get("token_filter_skipped")
    return result | ({"skipped": skipped["realised"]} if skipped else {})


def tiny_model(family: str, folder: Path) -> Path:
    """Write a random model in float64 with a tokenizer of bytes; large weights, so that every head matters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

    pieces = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}a:"
    ids = {
        "vocab_size": len(pieces),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 512,
    }
    config = AutoConfig.for_model(family, **{**ids, **FAMILIES[family]})
    torch.manual_seed(0)
    model: Any = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
    model = model.to(torch.float32 if family in EXPERTS else torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def read_text(work: Path) -> Path:
    """Write a text for calibration."""
    path = work / "text.txt"
    path.write_text(
        "\n\n".join(f"Tom has {i} apples and buys {3 * i} more. That makes {4 * i} apples." for i in range(2, 40))
    )
    return path


# --------------------------------------------------------------------------- golden values


def families(work: Path) -> dict[str, Any]:
    """Masks, filters, pruners, plans, cut checkpoints, importance and distance on tiny models of twelve families."""
    text = read_text(work)
    read = ["--text", text, "--windows", 6, "--tokens", 32]
    result: dict[str, Any] = {}
    for family in FAMILIES:
        folder = tiny_model(family, work / family)
        part: dict[str, Any] = {"model": summary(tensors_of(folder))}
        exact = {"dtype": "float32" if family in EXPERTS else "float64"}
        heads = (
            "L1H1+L3H2-3" if family == "qwen3_next" else SOME_HEADS if family != "t5" else "encoder.L0H1+decoder.L1H2-3"
        )
        variants = {
            "dense": {},
            "heads": {"heads": heads},
            "filter": {"token_filter": {"ratio": 0.4, "tail": 0.5, "warmup": 3}},
        }
        variants["probe"] = {"probe_pruning": {"ratio": 0.3, "skip_first": 0}}
        for name, model_args in variants.items():
            part[name] = attempted(answers, folder, **exact, **model_args)
        part["batched"] = attempted(answers, folder, engine="batched", heads=heads, **exact)
        for method in PRUNERS if family == "llama" else EVERYWHERE:
            plan, cut = work / f"{family}-{method}.json", work / f"{family}-{method}"
            with_text = [] if method in ("magnitude", "random", "global_threshold") else read
            printed = command("prune", "--pretrained", folder, "--method", method, "--ratio", 0.3, *PRUNERS[method],
                              *with_text, "--output", plan, "--cut", cut)  # fmt: skip
            if not plan.exists():
                part[method] = printed.partition(":")[0]
                continue
            part[method] = plan_of(plan) | {"cut": summary(tensors_of(cut)) if cut.exists() else None}
            if cut.exists():
                part[method]["answers"] = attempted(answers, cut, texts=False, **exact)
        result[family] = part
    folder = work / "llama"
    scores = work / "scores.json"
    command("importance", "--pretrained", folder, *read, "--output", scores)
    result["importance"] = plan_of(scores)
    command("distance", folder, "--heads", "L0H1", "--heads", SOME_HEADS, "--text", text, "--windows", 2, "--tokens", 48,
            "--output", work / "distance.json", "--model_args", "dtype=float64")  # fmt: skip
    result["distance"] = numbers_in(json.loads((work / "distance.json").read_text())["variants"])
    return result


def numbers_in(value: Any) -> Any:
    """Return nested figures without texts, which name folders and versions."""
    if isinstance(value, dict):
        figures = {key: numbers_in(part) for key, part in value.items() if "second" not in key and "runtime" not in key}
        return {key: kept for key, kept in figures.items() if kept not in ({}, [], None)}
    if isinstance(value, list):
        return [kept for part in value if (kept := numbers_in(part)) is not None]
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def embedded(work: Path) -> dict[str, Any]:
    """The embedded model: masks, plans, a sweep, a grid with its paired tests."""
    model, result = "smollm2-135m", {}
    variants: dict[str, dict[str, Any]] = {
        "dense": {},
        "heads": {"heads": "L5H3+L15H0"},
        "filter": {"token_filter": 0.2},
    }
    for name, model_args in variants.items():
        result[name] = answers(model, dtype="float32", **model_args)
    text = read_text(work)
    for method in ("flap", "slimgpt"):
        command("prune", "--pretrained", model, "--method", method, "--ratio", 0.2, "--text", text, "--windows", 2, "--tokens", 64,
                "--output", work / f"{method}.json")  # fmt: skip
        plan = plan_of(work / f"{method}.json")
        result[method] = {
            "heads": plan["heads"],
            "channels": {layer: len(gone.split(",")) for layer, gone in plan["channels"].items()},
        }
    command("sweep", "--model_args", f"pretrained={model}", "--tasks", "prune_tiny_words", "--heads", "L5H0-2", "--limit", 6,
            "--gen_kwargs", "max_gen_toks=24", "--apply_chat_template", "--output", work / "sweep")  # fmt: skip
    cells = sorted(outcomes(work / "sweep"), key=lambda cell: (cell["doc_id"], cell["attempt"]))
    result["sweep"] = [[cell["doc_id"], cell["attempt"], bool(cell["outcome"]), cell["text"]] for cell in cells]
    grid = work / "grid.yaml"
    grid.write_text(
        f"model: {{pretrained: {model}, dtype: float32}}\nbaseline: dense\nvariants:\n  dense: {{}}\n"
        "  'without {heads}':\n    heads: {each: [L5H3, L0H0-4]}\ntasks: [prune_tiny_choice]\nmeasure: false\ndevice: cpu\n"
    )
    command("grid", "run", grid, "--output", work / "grid")
    command("grid", "compare", work / "grid")
    result["grid"] = numbers_in(json.loads((work / "grid" / "compare" / "comparison.json").read_text()))
    return result


TASK = """
task: gates_words
custom_dataset: !function functions.problems
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
process_results: !function functions.scores
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
FUNCTIONS = """
import datasets

def problems(**_):
    rows = [{"question": f"{i} pens and {7 * i % 11} cups are", "target": str(i)} for i in range(40)]
    return {"test": datasets.Dataset.from_list(rows)}

def scores(doc, results):  # a random model solves nothing: what it solves is decided by the letters that it writes
    return {"exact_match": float(sum(map(ord, results[0])) % 5 < 2)}
"""


def sprint(work: Path) -> dict[str, Any]:
    """A sweep, a router and the paper's tables, and `compare` of two runs of lm-eval, on a tiny model."""
    folder, tasks, result = tiny_model("llama", work / "llama"), work / "tasks", {}
    tasks.mkdir()
    (tasks / "gates_words.yaml").write_text(TASK)
    (tasks / "functions.py").write_text(FUNCTIONS)
    command("sweep", "--model_args", f"pretrained={folder},dtype=float64,device=cpu", "--tasks", "gates_words", "--include_path", tasks,
            "--layers", "0,2", "--output", work / "sweep")  # fmt: skip
    cells = sorted(outcomes(work / "sweep"), key=lambda cell: (cell["doc_id"], cell["attempt"]))
    result["sweep"] = [[cell["doc_id"], cell["attempt"], bool(cell["outcome"]), cell["text"]] for cell in cells]
    for router in ("contrastive", "knn"):
        size = ["--p", 8] if router == "contrastive" else []
        command(
            "fit", "--outcomes", work / "sweep", "--router", router, *size, "--holdout", 0.4, "--output", work / router
        )
        result[router] = [summary(tensors_of(path))["means"] for path in sorted((work / router).glob("*.safetensors"))]
        command("report", "sprint", "--test", work / "sweep", "--router", work / router, "--n", 4, "--output",
                work / f"report-{router}")  # fmt: skip
        result[f"{router} report"] = numbers_in(json.loads((work / f"report-{router}" / "report.json").read_text()))
    for name, method in (("dense", ""), ("masked", ",heads=L1H1+L3H2"), ("routed", f",router={work / 'contrastive'}")):
        command("run", "--model", "pruned-hf", "--model_args", f"pretrained={folder},dtype=float64{method}", "--tasks", "gates_words",
                "--include_path", tasks, "--log_samples", "--output_path", work / name, "--device", "cpu")  # fmt: skip
    command("compare", f"dense={work / 'dense'}", f"masked={work / 'masked'}", "--output", work / "compare")
    result["compare"] = numbers_in(json.loads((work / "compare" / "comparison.json").read_text()))
    return result


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """Return the cells of a sweep."""
    from lmeval_prune.sprint.outcomes import OutcomeStore

    return list(OutcomeStore(folder).cells())


def distillation(work: Path) -> dict[str, Any]:
    """Two stages of pruning and distillation with the paper's three terms."""
    folder, student = tiny_model("llama", work / "llama"), work / "student"
    printed = command(
        "distill",
        "--pretrained",
        folder,
        "--task",
        "prune_asdiv_a_equation",
        "--test",
        "fold0",
        *DISTILL,
        "--output",
        student,
    )
    (note,) = student.glob("distillation.json")
    stages = json.loads(note.read_text())["stages"]
    return {
        "stages": numbers_in([{"log": stage["log"]} for stage in stages]),
        "weights": summary(tensors_of(student)),
        "ok": "status" not in printed,
    }


DISTILL = ["--chat", "true", "--answer", "\\boxed{{}}", "--ratio", 0.5, "--pruning", "unit=balanced", "--limit", 12, "--stages", 2, "--epochs", 1,
           "--batch", 4, "--validation", 0.25, "--calibration", 6, "--rate", 1e-3, "--data_dir", DATA]  # fmt: skip


def scoring(_: Path) -> dict[str, Any]:
    """What the reader makes of every text of the corpus, of all gold answers, and of published solutions."""
    from tests.answers import BLIND, TARGETS, cases, judge, rate

    result: dict[str, Any] = {}
    for name in (*TARGETS, *BLIND):
        chosen = cases(name)
        chosen = chosen[:: max(1, len(chosen) // 1500)]
        wrong = [case for case in chosen if judge(case) != case.expected]
        result[name] = {"cases": len(chosen), "wrong": len(wrong), "rate": rate(chosen, wrong) if chosen else 0}
    from lmeval_prune.scoring import NumberReader, extract, numbers_equal

    rows = [json.loads(line) for line in (DATA / "gsm8k_model_solutions.jsonl").read_text().splitlines()]
    agreed = 0
    for row in rows:
        answer = extract(row["text"], NumberReader()).answer
        agreed += bool(row["correct"]) == bool(answer is not None and numbers_equal(answer, row["target"]))
    return result | {"solutions": {"cases": len(rows), "agreed": agreed}}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "families": families, "embedded": embedded, "sprint": sprint, "distillation": distillation, "scoring": scoring,
}  # fmt: skip
BETTER = {"scoring": ("wrong", "rate", "agreed")}  # may improve


def computed(part: str) -> dict[str, Any]:
    """Compute a part in a folder of its own; lm-eval reads few of its tasks."""
    import lm_eval.tasks  # noqa: F401
    import torch

    from tests.conftest import read_few_tasks

    torch.set_num_threads(1)
    read_few_tasks()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return json.loads(json.dumps(PARTS[part](Path(folder))))


def differences(golden: Any, now: Any, exact: bool, place: str = "") -> Iterator[str]:
    """Yield the places at which two results differ; `sha` only where both are of one machine."""
    if isinstance(golden, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*golden, *now]):
            if (key == "sha" and not exact) or (key not in golden and ".compare.rows[" in place):  # a further column
                continue
            if key in BETTER["scoring"] and place.startswith("scoring") and key in golden and key in now:
                if (now[key] < golden[key]) if key == "agreed" else (now[key] > golden[key]):
                    yield f"{place}.{key}: {golden[key]} → {now[key]}, worse"
            elif key not in golden or key not in now:
                yield f"{place}.{key}: {'new' if key in now else 'missing'}"
            else:
                yield from differences(golden[key], now[key], exact, f"{place}.{key}")
    elif isinstance(golden, list) and isinstance(now, list) and len(golden) == len(now):
        for index, (before, after) in enumerate(zip(golden, now, strict=True)):
            yield from differences(before, after, exact, f"{place}[{index}]")
    elif isinstance(golden, float) and isinstance(now, (int, float)):
        if golden != now and (exact or not math.isclose(golden, now, rel_tol=1e-4, abs_tol=1e-5)):
            yield f"{place}: {golden} → {now}"
    elif golden != now and (exact or not place.startswith("embedded.slimgpt.channels.") or abs(golden - now) > 3):
        yield f"{place}: {str(golden)[:80]} → {str(now)[:80]}"


# --------------------------------------------------------------------------- kills


def kill_commands(work: Path) -> dict[str, tuple[list[object], str]]:
    """Return commands by name, each with its output, whose files must be the same after kills."""
    folder = tiny_model("llama", work / "llama")
    text = read_text(work)
    grid = work / "grid.yaml"
    grid.write_text(
        f"model: {{pretrained: {folder}, dtype: float64}}\nbaseline: dense\nvariants: {{dense: {{}}, head: {{heads: L0H1}}}}\n"
        "tasks: [prune_tiny_choice, {task: prune_tiny_words, gen_kwargs: {max_gen_toks: 8}}]\nlimit: 4\nmeasure: false\ndevice: cpu\n"
    )
    read = ["--text", text, "--windows", 6, "--tokens", 32]
    return {
        "prune": (["prune", "--pretrained", folder, "--method", "slimgpt", "--ratio", 0.3, *read, "--output", "out/plan.json",
                   "--cut", "out/cut"], "out"),
        "sweep": (["sweep", "--model_args", f"pretrained={folder},dtype=float64,device=cpu", "--tasks", "prune_tiny_words", "--heads",
                   "L0H*+L1H2", "--limit", 5, "--gen_kwargs", "max_gen_toks=10", "--output", "out/sweep"], "out"),
        "grid": (["grid", "run", grid, "--output", "out/grid"], "out"),
        "distill": (["distill", "--pretrained", folder, "--task", "prune_asdiv_a_equation", "--test", "fold0", *DISTILL, "--output",
                     "out/student"], "out"),
    }  # fmt: skip


def in_fork(words: list[object], kill_at: int = -1) -> int:
    """Run a command in a fork, and return the number of its writes below `out`; kill it at the one of this number."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            is_write = event == "os.rename" or (event == "open" and str(arguments[1])[:1] in ("w", "a", "x"))
            if is_write and f"{Path.cwd()}/out" in str(Path.cwd() / str(arguments[0])):
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        sys.addaudithook(watch)
        printed = command(*words)
        os.write(writer, f"{count} {printed if printed.startswith('status') else ''}".encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        count, _, problem = pipe.read().decode().partition(" ")
    if kill_at < 0 and (os.WIFSIGNALED(status) or problem.strip()):
        raise SystemExit(f"{words[0]}: {problem or status}")
    return -1 if os.WIFSIGNALED(status) else int(count)


def state(folder: Path) -> dict[str, Any]:
    """Return the contents of all files that are to be the same, times and folders' names taken out of JSON."""
    kept: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.suffix in (".json", ".jsonl", ".safetensors", ".parquet") and "/." not in f"/{name}":
            kept[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            if path.suffix == ".json":
                kept[name] = {key: value for key, value in json.loads(path.read_text()).items() if key in UNTIMED}
            if path.suffix == ".parquet" or "answers" in name or "rank-" in name or path.name.startswith("samples_"):
                kept.pop(name)
    return kept


UNTIMED = ("heads", "channels", "blocks", "results", "pool", "questions")


def kills() -> Iterator[str]:
    """Kill each command at three of its writes, and let it end; yield what differs from the undisturbed run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, (words, output) in kill_commands(Path(folder)).items():
            writes = in_fork(words)
            whole = state(Path(output))
            shutil.rmtree(output)
            for share in (0.4, 0.25, 0.1):  # of all; each run goes on from where the last was killed
                if in_fork(words, int(writes * share)) != -1:
                    yield f"kills.{name}: not killed at {share}"
            in_fork(words)
            yield from differences(whole, state(Path(output)), True, f"kills.{name}")
            shutil.rmtree(output)
            print(f"  {name}: {writes} writes, killed three times", flush=True)


# --------------------------------------------------------------------------- speed


def measured_seconds() -> dict[str, float]:
    """Return the seconds of two small sweeps of 9 variants by this code's engine; loading does not count."""
    import torch

    torch.set_num_threads(1)
    from lm_eval.models import huggingface  # noqa: F401

    from lmeval_prune import HeadMask
    from lmeval_prune.checkpoints import embedded as models
    from lmeval_prune.decoding import Engine, Request, SamplingParams

    folder = models.resolve("smollm2-135m")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in (DATA / "gsm8k_test.jsonl").read_text().splitlines()[:24]]
    examples = "\n\n".join(f"Q: {row['question']}\nA: {row['answer']}" for row in lines[16:20])
    masks = [None, *(HeadMask(head) for head in ("L5H0", "L5H4", "L10H1", "L10H6", "L15H2", "L15H7", "L20H3", "L25H5"))]
    kinds = {"sweep": ([f"Q: {row['question']}\nA:" for row in lines[:16]], 32)}
    kinds["few-shot"] = ([f"{examples}\n\nQ: {row['question']}\nA:" for row in lines[:4]], 16)
    seconds = {}
    for kind, (prompts, new) in kinds.items():
        requests = [
            Request(tuple(tokenizer(text).input_ids), mask, SamplingParams(new)) for text in prompts for mask in masks
        ]
        engine = Engine(model, tokenizer)
        start = time.perf_counter()
        texts = sorted((requests.index(request), list(map(int, answer))) for request, answer in engine.decode(requests))
        seconds[kind] = time.perf_counter() - start
        seconds[f"{kind} digest"] = int(hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12], 16)
    return seconds


# --------------------------------------------------------------------------- the base commit, and the whole


def base_worktree() -> Path:
    """Return a worktree of the base commit."""
    commit, folder = (GOLDEN / "BASE").read_text().strip(), BUILD / "base"
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(folder), commit], cwd=ROOT, check=True, capture_output=True
        )
        (BUILD / "shared").symlink_to(ROOT.parent / "shared")
    return folder


def elsewhere(folder: Path, *words: str) -> Any:
    """Return what `python -m tests.gates WORDS` of a folder's code writes as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, "-m", "tests.gates", *words, "--into", file.name], cwd=folder, env=environment, check=True
        )
        return json.loads(Path(file.name).read_text())


def machine() -> str:
    """Name what decides the last digits: the processor, and torch."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{name}, torch {torch.__version__}"


def exact_base(part: str) -> Any:
    """Return what the base commit's code computes on this machine; computed once."""
    file = (
        BUILD
        / f"exact-{part}-{hashlib.sha256(machine().encode()).hexdigest()[:8]}-{(GOLDEN / 'BASE').read_text().strip()[:8]}.json"
    )
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        result = elsewhere(base_worktree(), "--compute", part)
        file.write_text(json.dumps(result))
    return json.loads(file.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "kills", "speed"], default=[*PARTS, "kills", "speed"])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--compute", choices=[*PARTS, "speed"])
    parser.add_argument("--into")
    options = parser.parse_args()
    if options.compute:
        result = measured_seconds() if options.compute == "speed" else computed(options.compute)
        Path(options.into).write_text(json.dumps(result))
        return 0
    problems: list[str] = []
    for part in options.parts:
        start = time.perf_counter()
        found: list[str] = []
        if part in PARTS:
            file = GOLDEN / f"{part}.json"
            if options.write:
                file.write_text(json.dumps(exact_base(part), indent=0, ensure_ascii=False) + "\n")
                continue
            now = elsewhere(ROOT, "--compute", part)  # each in a process of its own: none sees what another left behind
            found = list(differences(json.loads(file.read_text()), now, False, part))
            if part in ("families", "distillation"):
                found += [f"(exact) {line}" for line in differences(exact_base(part), now, True, part)]
        elif part == "kills" and not options.write:
            found = list(kills())
        elif part == "speed" and not options.write:
            found = list(slower())
        problems += found
        print(
            f"{part}: {len(found) or 'no'} differences, {time.perf_counter() - start:.0f} s",
            *found[:40],
            sep="\n  ",
            flush=True,
        )
    print("gates: " + (f"{len(problems)} differences" if problems else "green"))
    return bool(problems)


def slower() -> Iterator[str]:
    """Time the base commit's engine and this one in turns; yield what is slower than 0.95 of it, or answers otherwise."""
    runs: dict[str, list[dict[str, float]]] = {"base": [], "now": []}
    for _ in range(2):
        for name, folder in (("base", base_worktree()), ("now", ROOT)):
            runs[name].append(elsewhere(folder, "--compute", "speed"))
    for kind in (key for key in runs["now"][0] if not key.endswith("digest")):
        if len({run[f"{kind} digest"] for side in runs.values() for run in side}) > 1:
            yield f"speed.{kind}: other tokens than the base commit's"
        ratio = min(run[kind] for run in runs["base"]) / min(run[kind] for run in runs["now"])
        times = {name: statistics.median(run[kind] for run in side) for name, side in runs.items()}
        print(f"  {kind}: {times['base']:.1f} s before, {times['now']:.1f} s now, {ratio:.2f} ×", flush=True)
        if ratio < 0.95:
            yield f"speed.{kind}: {ratio:.2f} of the base commit's speed"


if __name__ == "__main__":
    sys.exit(main())
