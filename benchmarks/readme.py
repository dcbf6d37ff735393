"""Write the figures of README's table that `make results` measures, from their results files.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from typing import Any

from _record import RESULTS

README = RESULTS.parent.parent / "README.md"
# The result of each row, by the beginning of its first cell.
ROWS = {
    "`pruned-hf` without pruning": "**identical to the bit**, {overhead:.3f} × its time "
    "([pruned-hf](docs/pruned-hf.md#measured))",
    "10, 20, 30% of": "of {dense} points FLAP loses **{lost[flap 0.1]}** at 10% (95% {interval}), "
    "SlimGPT **{lost[slimgpt 0.2]}** at 20%, {lost[slimgpt 0.3]} at 30%; three of thirty layers lose "
    "{lost[layers by block_kl, 0.1]}, random choices of 10% {chance[0]:.0f} to {chance[2]:.0f} "
    "([leaderboard](docs/results/leaderboard.md))",
    "Token Filtering": "the fine-tuned model above loses {lost[token filter 0.2]} of {dense} points, "
    "{lost[random tokens 0.2, draw 0]} if tokens skip by chance; perplexity of GSM8K's solutions {filter[dense]} → "
    "{filter[filter, all]}, random heads that save as much arithmetic {filter[random heads]} "
    "([measured](docs/methods.md#measured))",
    "decoding engine": "a sweep {sweep} × as fast as `hf`, after 8 few-shot examples {few} ×, a router's attempts "
    "{router} ×, log-likelihoods {choice} × ([measured](docs/decoding.md#measured))",
}


def figures() -> dict[str, Any]:
    overhead, board, quality, engine = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("unpruned_overhead", "leaderboard", "filter_quality", "engine")
    )
    rows = {row["variant"]: row for row in board["rows"]}
    lost = {name: row["difference"].split()[0].lstrip("−") for name, row in rows.items() if "difference" in row}
    perplexity: dict[str, list[float]] = {}
    for name, row in quality["results"].items():
        kind, _, ratio = name.partition(", draw")[0].rpartition(", ")
        if ratio in ("dense", "20%"):
            perplexity.setdefault(kind or "dense", []).append(row["perplexity"]["GSM8K"])
    ranges = {part: sorted(run["ratio"] for run in runs) for part, runs in engine.items() if isinstance(runs, list)}
    speeds = {part: f"{values[0]:.1f} to {values[-1]:.1f}" for part, values in ranges.items()}
    return {
        "overhead": overhead["results"]["pruned-hf"]["generate_until"]["ratio_to_hf"],
        "dense": rows["dense"]["ASDiv-A"],
        "lost": lost,
        "interval": rows["flap 0.1"]["difference"].partition("(")[2].rstrip(")").replace("…", "to"),
        "chance": sorted(float(value) for name, value in lost.items() if name.startswith("random 0.1")),
        "filter": {kind: " to ".join(f"{x:.1f}" for x in sorted({min(v), max(v)})) for kind, v in perplexity.items()},
        "sweep": speeds["sweep"],
        "router": speeds["router"],
        "few": speeds["fewshot-4"],
        "choice": f"{speeds['choice_0_shots']} ×, after 5 examples {speeds['choice_5_shots']}",
    }


def main() -> None:
    lines, known = README.read_text().splitlines(), figures()
    for begin, result in ROWS.items():
        (number,) = (i for i, line in enumerate(lines) if line.startswith(f"| {begin}"))
        lines[number] = f"{lines[number].rpartition(' | ')[0]} | {result.format(**known)} |"
    README.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
