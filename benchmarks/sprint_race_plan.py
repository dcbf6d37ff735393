"""Pre-registration of a race: a plan that is committed before any test question is answered, and stays as it is.

The plan is a Markdown page with one block of YAML, the settings that the race really uses, so text and run cannot
differ. What training chose is a second file, which is committed with it before the test run.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from annotated_types import MinLen

from lmeval_prune.artefacts import CREATED_BY
from lmeval_prune.errors import InputError, check_exists, first_line
from lmeval_prune.settings import Count, Positive, Seed, Settings, Share

NS = (1, 2, 4, 8, 16)  # numbers of tries that are compared
_BLOCK = re.compile(r"^```yaml\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class RacePlan(Settings):
    """The settings of a race.

    Attributes:
        pretrained: the model before its fine-tune.
        finetune: options of `lmeval-prune distill` for the fine-tune.
        task: the task.
        folds: splits of each model, as for `tasks.data.load`: `test`, `choosing` and, if it is fine-tuned, `finetune`.
            Questions of both `test` and `choosing` are divided by the seed.
        max_gen_toks: limit of new tokens.
        layers, random_sets, variants, plans: the pool: heads of layers one by one, random sets (`4x10`), variants by
            label, and plans by label with the options of `lmeval-prune prune`.
        temperatures: of sampling; training chooses one.
        draws: samples at each temperature on choosing questions.
        test_samples: samples at the chosen temperature on test questions.
        ceiling_samples, ceiling_questions: samples at the chosen temperature on so many choosing questions of each
            fold, beside which the pool is judged.
        orders: orders of variants that training chooses among: `best`, `cover`, `router:METHOD`.
        routers: by METHOD, options of `lmeval-prune fit`.
        mixes: that training chooses among; `@T` stands for each temperature, `@sampling` for that of the chosen rival.
        sampling: mixes of the unpruned model alone that training chooses among, as the rival.
        n: number of tries of the primary comparison, one of `NS`.
        margin: largest difference of pass@n that counts as none.
        most: largest number of tries that is reported.
        parts: of the cross fitting.
        twins: share of common word sequences at which two questions count as the same.
        chat: whether prompts are in the chat template.
        seed: of the cross fitting and of the tests.
    """

    pretrained: str
    finetune: dict[str, Any]
    task: str
    folds: Annotated[tuple[dict[str, str], ...], MinLen(1)]
    max_gen_toks: Count
    layers: tuple[int, ...]
    random_sets: tuple[str, ...]
    variants: dict[str, Any]
    plans: dict[str, Any]
    temperatures: Annotated[tuple[Positive, ...], MinLen(1)]
    draws: Count
    test_samples: Count
    ceiling_samples: Count
    ceiling_questions: Count
    orders: Annotated[tuple[str, ...], MinLen(1)]
    routers: dict[str, Any]
    mixes: Annotated[tuple[str, ...], MinLen(1)]
    sampling: Annotated[tuple[str, ...], MinLen(1)]
    n: Count = 8
    margin: Share = 0.02
    most: Count = 16
    parts: Count = 5
    twins: Share = 0.8
    chat: bool = True
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for number, fold in enumerate(self.folds):
            if {"test", "choosing"} != fold.keys() - {"finetune"}:
                raise InputError(
                    f"folds: number {number} names {', '.join(fold)}; a fold names the splits test and choosing, and "
                    f"finetune if its model is fine-tuned"
                )
        if self.n not in NS:
            raise InputError(f"n={self.n} must be one of {', '.join(map(str, NS))}, at which votes are counted")
        if self.parts < 2:
            raise InputError("parts must be at least 2: each is ordered by a fit on the others")
        if self.n > min(self.most, self.draws) or self.most > self.test_samples or self.draws > self.ceiling_samples:
            raise InputError(
                "n must be at most draws and most, most at most test_samples, and draws at most ceiling_samples; "
                "change one of them"
            )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read the settings in a plan.

        Raises:
            InputError: the file has no single block of YAML, or a setting is missing, unknown or wrong.
        """
        check_exists(path, file=True)
        blocks = [match["text"] for match in _BLOCK.finditer(Path(path).read_text(encoding="utf-8"))]
        if len(blocks) != 1:
            raise InputError(f"{path} has {len(blocks)} blocks that begin with ```yaml; a plan has one, its settings")
        try:
            values = yaml.safe_load(blocks[0])
        except yaml.YAMLError as error:
            raise InputError(f"{path}: its settings are not YAML ({first_line(error)})") from None
        if not isinstance(values, dict):
            raise InputError(f"{path}: its settings are not a mapping; write NAME: VALUE lines")
        return cls.from_dict(values, f"the plan {path}")


@dataclass(frozen=True)
class Registration:
    """Files as they were committed before the test run.

    Attributes:
        commit: the last commit that changed one of them.
        date: when it was committed, in ISO format.
        files: SHA-256 of each by its path in the repository.
    """

    commit: str
    date: str
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: Sequence[str | Path]) -> Self:
        """Register committed files.

        Raises:
            InputError: a file is missing, not in a git repository, not committed, or changed since.
        """
        for path in paths:
            check_exists(path, file=True)
        root = Path(_git(Path(paths[0]).resolve().parent, "rev-parse", "--show-toplevel"))
        names = [Path(path).resolve().relative_to(root).as_posix() for path in paths]
        for name in names:
            if not _git(root, "ls-files", "--", name) or not _git(root, "rev-list", "-1", "--all", "--", name):
                raise InputError(f"{name} is not committed; commit it before the test run")
            if _git(root, "status", "--porcelain", "--", name):
                raise InputError(f"{name} has changed since its commit; commit it before the test run")
        commit, _, date = _git(root, "log", "-1", "--format=%H %cI", "--", *names).partition(" ")
        return cls(commit, date, {name: _sha256((root / name).read_bytes()) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"commit": self.commit, "date": self.date, "files": self.files, "created_by": CREATED_BY}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read the fields."""
        return cls(str(content["commit"]), str(content["date"]), dict(content["files"]))

    def difference(self, folder: str | Path) -> str:
        """Return why a race of these files is not pre-registered; empty if it is.

        Args:
            folder: a folder of the repository.
        """
        try:
            root = Path(_git(Path(folder).resolve(), "rev-parse", "--show-toplevel"))
            for name, sha256 in self.files.items():
                if _sha256(_git_bytes(root, "show", f"{self.commit}:{name}")) != sha256:
                    return f"{name} in commit {self.commit[:12]} is not the file that the test run read"
                if not (root / name).is_file() or _sha256((root / name).read_bytes()) != sha256:
                    return f"{name} differs from that of commit {self.commit[:12]}"
        except InputError as error:
            return f"commit {self.commit[:12]} cannot be read ({error})"
        return ""


def code_state(folder: str | Path, paths: Sequence[str]) -> dict[str, Any]:
    """Return the commit of a repository's files, and which of some paths have uncommitted changes.

    Args:
        folder: a folder of the repository; outside of one, the commit is None.
        paths: pathspecs from the root of the repository.
    """
    try:
        root = Path(_git(Path(folder).resolve(), "rev-parse", "--show-toplevel"))
        lines = _git(root, "status", "--porcelain", "--", *paths).splitlines()
        return {"commit": _git(root, "rev-parse", "HEAD"), "changed": [line.split()[-1] for line in lines]}
    except InputError:
        return {"commit": None, "changed": []}


def _git(folder: Path, *arguments: str) -> str:
    return _git_bytes(folder, *arguments).decode("utf-8", "replace").strip()


def _git_bytes(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True)
    except OSError as error:
        raise InputError(f"git cannot be run in {folder} ({first_line(error)}); a registration needs it") from None
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        raise InputError(f"git {arguments[0]} failed in {folder}: {message}")
    return done.stdout


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
