"""How well a family of forms is read without the rules that only that family needs.

    make scoring-generality        or        python benchmarks/scoring_generality.py [--unneeded]

A rule is an entry of a word list of `lmeval_prune/scoring`, or a pattern that its modules hold compiled. Each is
switched off alone: the forms of the corpus that are then misread need it. A rule that only forms of one family need is
that family's own. With all its own rules switched off, a family is read about as one that nobody had thought of. Writes
`results/scoring_generality.json` and tables in `docs/scoring.md`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from _record import environment, timed, write, write_table
from _rules import Recorder, Rule, Scorers, entries

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.answers import Case, cases, judge, sample  # noqa: E402

PARTS = [
    "standard", "held", "taken_back", "replacing", "wrappings", "equivalents", "near_misses", "text", "equations",
    "scoring_md",
]  # fmt: skip
DOCUMENT = ROOT / "docs" / "scoring.md"


def judged(chosen: Iterable[Case]) -> list[bool]:
    """Return for each case whether it is judged as expected; what cannot be scored without a rule is not."""
    out = []
    for case in chosen:
        try:
            out.append(judge(case) == case.expected)
        except Exception:
            out.append(False)
    return out


# --------------------------------------------------------------------------- which case a rule can matter to


class Subjects:
    """All texts that patterns are asked of, in one; each belongs to cases."""

    def __init__(self, of_case: list[set[str]]) -> None:
        owners: dict[str, list[int]] = defaultdict(list)
        for number, texts in enumerate(of_case):
            for text in texts:
                owners[text].append(number)
        self.owners = list(owners.values())
        self.text = "\n".join(owners)
        self.lower = "\n".join(text.lower() if len(text.lower()) == len(text) else text for text in owners)
        self.starts = [0, *accumulate(len(text) + 1 for text in owners)]

    def cases(self, word: str, resolve: re.Pattern[str] | None) -> set[int]:
        """Return the cases in which an entry of a word list occurs."""
        case_numbers: set[int] = set()
        position = 0
        while True:
            if resolve is None:
                start = self.lower.find(word.lower(), position)
            else:
                match = resolve.search(self.text, position)
                start = match.start() if match else -1
            if start < 0:
                return case_numbers
            number = bisect_right(self.starts, start) - 1
            case_numbers.update(self.owners[number])
            position = self.starts[number + 1]
            if position >= len(self.text):
                return case_numbers


def occurrence(word: str, lists: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern of an entry with the lists that it names; nothing for a word of a script without spaces."""
    if re.fullmatch(r"[\u4e00-\u9fff]+", word):
        return None
    if re.fullmatch(r"[A-Za-z '’-]+", word):
        return re.compile(rf"(?<![A-Za-z]){word}", re.IGNORECASE)

    def listed(match: re.Match[str]) -> str:
        return f"(?:{'|'.join(text for _, text in entries(lists[match[1]]))})" if match[1] in lists else ".*"

    for _ in range(5):
        word = re.sub(r"\{\{(\w+)\}\}", listed, word)
    try:
        return re.compile(word, re.IGNORECASE | re.MULTILINE)
    except re.error:
        return re.compile("")


def candidates(scorers: Scorers, rules: dict[Rule, str], chosen: list[Case]) -> dict[Rule, list[int]]:
    """Return the cases that each rule can matter to: those in which it matches anything."""
    scorers.load()
    scorers.record()
    matched: dict[Rule, list[int]] = {rule: [] for rule in rules}
    subjects = []
    for number, case in enumerate(chosen):
        Recorder.subjects, Recorder.matched = {case.text, str(case.row)}, set()
        judged([case])
        subjects.append(Recorder.subjects)
        for rule in Recorder.matched:
            matched[rule].append(number)
    everything = Subjects(subjects)
    for rule, word in rules.items():
        if rule[0] in scorers.lists:
            matched[rule] = sorted(everything.cases(word, occurrence(word, scorers.lists[rule[0]])))
    return matched


# --------------------------------------------------------------------------- the report


def family(case: Case) -> str:
    """Return the family of a case: its class up to a colon, of all parts alike."""
    return case.category.partition(":")[0]


def needs(scorers: Scorers, rules: dict[Rule, str], chosen: list[Case], right: list[bool]) -> dict[Rule, set[str]]:
    """Return for each rule the families with a case that only without it is judged wrongly; at most two."""
    needed: dict[Rule, set[str]] = {}
    for rule, numbers in candidates(scorers, rules, chosen).items():
        needed[rule] = set()
        relevant = [number for number in numbers if right[number]]
        if not relevant:
            continue
        try:
            scorers.load([rule])
        except re.error:  # a pattern that cannot be built without it
            continue
        for number in Random(12).sample(relevant, len(relevant)):
            if judged([chosen[number]]) == [False]:
                needed[rule].add(family(chosen[number]))
                if len(needed[rule]) == 2:
                    break
    return needed


def left_out(scorers: Scorers, owned: dict[str, list[Rule]], chosen: list[Case]) -> dict[int, bool]:
    """Judge the cases of each family without the rules that it owns; of a family that owns none there is nothing."""
    out: dict[int, bool] = {}
    for name, rules in owned.items():
        numbers = [number for number, case in enumerate(chosen) if family(case) == name]
        scorers.load(rules)
        out.update(zip(numbers, judged(chosen[number] for number in numbers), strict=True))
    return out


def report(chosen: list[Case], right: list[bool], owned: dict[str, list[Rule]], out: dict[int, bool]) -> dict[str, Any]:
    """Return the shares judged wrongly with all rules and without those of their family, by part and by family."""
    after = [out.get(number, verdict) for number, verdict in enumerate(right)]
    groups: dict[str, dict[str, list[int]]] = {"parts": defaultdict(list), "families": defaultdict(list)}
    for number, case in enumerate(chosen):
        groups["parts"][case.file].append(number)
        groups["parts"]["all"].append(number)
        groups["families"][family(case)].append(number)
    summary: dict[str, Any] = {}
    for group, members in groups.items():
        summary[group] = {
            name: {
                "forms": len(numbers),
                "families": len({family(chosen[number]) for number in numbers}),
                "wrong_with_all_rules": round(1 - sum(right[number] for number in numbers) / len(numbers), 5),
                "wrong_without_own_rules": round(1 - sum(after[number] for number in numbers) / len(numbers), 5),
            }
            for name, numbers in members.items()
        }
    summary["parts"]["all"] = summary["parts"].pop("all")  # the last row
    for name, entry in summary["families"].items():
        entry["own_rules"] = len(owned.get(name, []))
    return summary


def part_table(parts: dict[str, Any]) -> str:
    lines = ["| part | forms | families | with all rules | without the family's own |", "| --- " * 5 + "|"]
    for name, entry in parts.items():
        shares = [f"{100 * entry[key]:.2f}%" for key in ("wrong_with_all_rules", "wrong_without_own_rules")]
        lines.append(f"| `{name}` | {entry['forms']} | {entry['families']} | {' | '.join(shares)} |")
    return "\n".join(lines)


def worst_table(families: dict[str, Any], count: int = 5) -> str:
    """Return a table of the families of ten forms or more that lose most."""
    large = [(name, entry) for name, entry in families.items() if entry["forms"] >= 10]
    large.sort(key=lambda item: item[1]["wrong_with_all_rules"] - item[1]["wrong_without_own_rules"])
    lines = ["| family | forms | own rules | with all rules | without its own |", "| --- " * 5 + "|"]
    for name, entry in large[:count]:
        shares = [f"{100 * entry[key]:.1f}%" for key in ("wrong_with_all_rules", "wrong_without_own_rules")]
        lines.append(f"| {name} | {entry['forms']} | {entry['own_rules']} | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unneeded", action="store_true", help="list the rules that no form needs; writes no file")
    options = parser.parse_args()
    chosen = [case for name in PARTS for case in draw_forms(name)]
    with tempfile.TemporaryDirectory() as folder:
        scorers = Scorers(Path(folder))
        scorers.load()
        right, rules = judged(chosen), scorers.rules()
        families, seconds = timed(lambda: needs(scorers, rules, chosen, right))
        owned: dict[str, list[Rule]] = defaultdict(list)
        for rule, names in families.items():
            if len(names) == 1:
                owned[next(iter(names))].append(rule)
        summary = report(chosen, right, owned, left_out(scorers, owned, chosen))
    counts = Counter(
        {0: "unneeded", 1: "needed_by_one_family"}.get(len(names), "needed_by_several") for names in families.values()
    )
    print(f"{len(rules)} rules in {seconds:.0f} s: {dict(counts)}")
    tables = {"generality": part_table(summary["parts"]), "worst": worst_table(summary["families"])}
    print("", *tables.values(), sep="\n\n")
    if options.unneeded:
        for rule, names in families.items():
            if not names:
                print(*(rule[0], rule[1]), repr(rules[rule])[:100])
        return
    write("scoring_generality", {"environment": environment(), "rules": len(rules)} | dict(counts) | summary)
    for name, text in tables.items():
        write_table(DOCUMENT, name, text)


def draw_forms(name: str) -> list[Case]:
    """Draw one case of each form of a part, always the same; but none of a class that is the number of a defect."""
    all_cases = [case for case in cases(name) if not re.fullmatch(r"D\d+", case.category)]
    return sample(all_cases, len({case.line for case in all_cases}))


if __name__ == "__main__":
    main()
