"""The host model against its formulas, written out one candidate at a time; batches, files, masks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmeval_prune import InputError, map_model
from lmeval_prune.athena.batches import EncodedProblem, collate
from lmeval_prune.athena.checkpoint import read, write
from lmeval_prune.athena.model import Athena
from lmeval_prune.athena.problems import Problem
from lmeval_prune.athena.solving import Solution, answers, solve
from lmeval_prune.athena.thoughts import Expansion
from lmeval_prune.athena.training import task_loss
from tests.athena_hosts import encoder_folder, examples, grounded, host

CLOSE = {"rtol": 0, "atol": 1e-9}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_folder(tmp_path_factory.mktemp("encoders") / "tiny-bert")


@pytest.fixture(scope="module")
def model(encoder: Path) -> Athena:
    return host(encoder, constants=("1", "157/50"), steps=5, max_kept=14)


# ---------------------------------------------------------------- the formulas, one vector at a time


class Literal:
    """Reference model: loops over heads and keys, with the weights by name."""

    def __init__(self, model: Athena) -> None:
        self.model, self.w = model, model.state_dict()
        self.heads = model.settings.heads

    def linear(self, name: str, x: Tensor) -> Tensor:
        return torch.stack([row @ x for row in self.w[f"{name}.weight"]]) + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean()
        scaled = centred / torch.sqrt((centred**2).mean() + 1e-5)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def gelu(self, x: Tensor) -> Tensor:
        return torch.tensor([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], dtype=x.dtype)

    def ffn(self, name: str, x: Tensor) -> Tensor:
        return x + self.linear(f"{name}.down", self.gelu(self.linear(f"{name}.up", self.norm(f"{name}.norm", x))))

    def attention(self, name: str, query: Tensor, keys: list[Tensor]) -> Tensor:
        """Outputs of the heads side by side, before the output projection."""
        q = self.linear(f"{name}.query", query)
        ks, vs = ([self.linear(f"{name}.{part}", x) for x in keys] for part in ("key", "value"))
        size, parts = len(q) // self.heads, []
        for head in range(self.heads):
            own = slice(head * size, (head + 1) * size)
            scores = [float(q[own] @ k[own]) / math.sqrt(size) for k in ks]
            highest = max(scores)
            weights = [math.exp(score - highest) for score in scores]
            parts.append(sum(w / sum(weights) * v[own] for w, v in zip(weights, vs, strict=True)))
        return torch.cat(parts)

    def merge(self, operator: str, first: Tensor, second: Tensor) -> Tensor:
        name = f"merges.{operator}"
        pair = [self.norm(f"{name}.norm", x) for x in (first, second)]
        seen = sum(self.attention(f"{name}.attention", x, pair) for x in pair)
        return self.ffn(f"{name}.feed_forward", first + second + self.linear(f"{name}.attention.output", seen))

    def judge(self, name: str, thought: Tensor, references: list[Tensor]) -> tuple[Tensor, float]:
        x = self.ffn(f"{name}.before", thought)
        keys = [self.norm(f"{name}.reference_norm", reference) for reference in references]
        seen = self.attention(f"{name}.attention", self.norm(f"{name}.norm", x), keys)
        x = self.ffn(f"{name}.after", x + self.linear(f"{name}.attention.output", seen))
        return x, float(self.linear(f"{name}.score", x)[0])

    def think(self, operator: str, first: Tensor, second: Tensor) -> Tensor:
        if operator in ("num", "con"):
            return first
        return (
            self.merge(operator, first, second)
            if operator in ("add", "mul")
            else self.ffn(f"transforms.{operator}", first)
        )

    def begin(self, problem: EncodedProblem) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return leaves, premises and the goal."""
        with torch.no_grad():
            hidden = self.model.encoder(torch.tensor([problem.ids])).last_hidden_state[0]
        leaves = [hidden[position] for _, position in problem.numbers]
        for vector in self.w["constants.vectors"]:
            up = self.linear("constants.up", self.norm("constants.norm", vector))
            leaves.append(self.linear("constants.down", self.gelu(up)))
        return leaves, [hidden[0]], hidden[problem.goal]

    def solve(self, problem: EncodedProblem) -> Solution:
        settings = self.model.settings
        sources, premises, goal = self.begin(problem)
        expansion, kept, verdicts = Expansion(problem.leaves(settings.constants)), list[Tensor](), list[float]()
        while not expansion.ended and expansion.depth < settings.steps and len(kept) < settings.max_kept:
            candidates, judged = expansion.candidates(), []
            for candidate in candidates:
                source = kept if expansion.depth else sources
                thought = self.think(candidate.operator, source[candidate.first], source[candidate.second])
                judged.append((thought, *self.judge("reason", thought, premises)))
            chosen = [i for i, (_, _, logit) in enumerate(judged) if 1 / (1 + math.exp(-logit)) >= settings.accept]
            if not chosen and expansion.depth == 0:
                chosen = list(range(len(judged)))
            chosen = sorted(sorted(chosen, key=lambda i: -judged[i][2])[: settings.max_kept - len(kept)])
            expansion.keep(candidates[i] for i in chosen)
            for i in chosen:
                kept.append(judged[i][0])
                premises.append(judged[i][1])
                verdicts.append(self.judge("answer", judged[i][0], [goal])[1])
            if max(1 / (1 + math.exp(-logit)) for logit in verdicts) >= settings.conclude:
                break
        best = max(range(len(kept)), key=lambda i: verdicts[i])
        return Solution(expansion.kept[best], verdicts[best], tuple(expansion.kept))

    def forced(self, example) -> tuple[list[float], list[float]]:
        """Compute logits of teacher forcing: of all candidates, and of all kept thoughts."""
        sources, premises, goal = self.begin(example.problem)
        kept, reasons = list[Tensor](), list[float]()
        for depth, (candidates, labels) in enumerate(example.steps):
            judgements = []
            for candidate in candidates:
                source = kept if depth else sources
                thought = self.think(candidate.operator, source[candidate.first], source[candidate.second])
                judgements.append((thought, *self.judge("reason", thought, premises)))
            reasons += [logit for _, _, logit in judgements]
            for (thought, context, _), label in zip(judgements, labels, strict=True):
                if label:
                    kept.append(thought)
                    premises.append(context)
        return reasons, [self.judge("answer", thought, [goal])[1] for thought in kept]


def collated(model: Athena, some: list) -> dict:
    return collate(some, len(model.settings.constants), model.tokenizer.pad_token_id)


def encoded(model: Athena) -> list[EncodedProblem]:
    return [EncodedProblem.of(item.problem, model.tokenizer, model.settings.max_length) for item in grounded()]


def test_teacher_forcing_follows_the_formulas(model: Athena) -> None:
    literal = Literal(model)
    for example in examples(model)[3:6]:
        inputs = collated(model, [example])
        with torch.no_grad():
            actual = model(**inputs)
        reasons, verdicts = literal.forced(example)
        torch.testing.assert_close(actual.reason, torch.tensor(reasons, dtype=torch.double), **CLOSE)
        torch.testing.assert_close(actual.answer, torch.tensor(verdicts, dtype=torch.double), **CLOSE)
        labels = [label for step in example.steps for label in step.labels]
        kept = [c.thought for step in example.steps for c, label in zip(*step, strict=True) if label]
        root = [thought == kept[example.root] for thought in kept]
        assert inputs["labels"].tolist() == [int(x) for x in (*labels, *root)]
        assert sum(root) == 1


def test_batched_examples_equal_single_examples(model: Athena) -> None:
    together = examples(model)
    inputs = collated(model, together)
    with torch.no_grad():
        actual = model(**inputs)
    split = len(actual.reason)
    assert len(inputs["labels"]) == split + len(actual.answer)
    for number, example in enumerate(together):
        with torch.no_grad():
            alone = model(**(single := collated(model, [example])))
        candidates = torch.cat([step["problem"] for step in inputs["steps"]]) == number
        kept = actual.kept_problem == number
        torch.testing.assert_close(actual.reason[candidates], alone.reason, **CLOSE)
        torch.testing.assert_close(actual.answer[kept], alone.answer, **CLOSE)
        labels = inputs["labels"]
        assert torch.equal(torch.cat([labels[:split][candidates], labels[split:][kept]]), single["labels"])


def test_the_loss_is_the_mean_of_all_judgements_and_accumulates(model: Athena) -> None:
    inputs = collated(model, examples(model))
    logits = torch.cat([(out := model(**inputs)).reason, out.answer]).tolist()
    terms = [
        -math.log(1 / (1 + math.exp(-x if y else x))) for x, y in zip(logits, inputs["labels"].tolist(), strict=True)
    ]
    loss = task_loss(out, inputs["labels"])
    assert loss.item() == pytest.approx(sum(terms) / len(terms), abs=1e-12)
    whole = torch.autograd.grad(loss, model.reason.score.weight)[0]
    parts, total = torch.zeros_like(whole), len(terms)
    for some in (examples(model)[:2], examples(model)[2:]):
        single = collated(model, some)
        parts += torch.autograd.grad(task_loss(model(**single), single["labels"], total), model.reason.score.weight)[0]
    torch.testing.assert_close(parts, whole, **CLOSE)


def test_gradients_reach_all_weights_except_attention_to_a_single_key(model: Athena) -> None:
    inputs = collated(model, examples(model))
    model.zero_grad()
    task_loss(model(**inputs), inputs["labels"]).backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-12}
    model.zero_grad()
    single_key = ("answer.norm", "answer.attention.query", "answer.attention.key")
    shifts = tuple(name for name in still if name.endswith("key.bias"))  # add the same to every score
    assert {name for name in still if not name.startswith((*single_key, *shifts, "encoder.pooler"))} == set()
    assert {name for name in still if name.startswith(single_key)} >= {f"{name}.weight" for name in single_key}


def test_solving_follows_the_formulas_alone_and_in_a_batch(model: Athena) -> None:
    literal, problems = Literal(model), encoded(model)
    together = solve(model, problems)
    assert len({solution.kept for solution in together}) > 3
    for number, problem in enumerate(problems):
        (alone,) = solve(model, [problem])
        assert (alone.thought, alone.kept) == (together[number].thought, together[number].kept)
        assert alone.logit == pytest.approx(together[number].logit, abs=1e-9)
        if number in (0, 4):
            expected = literal.solve(problem)
            assert (expected.thought, expected.kept) == (alone.thought, alone.kept)
            assert expected.logit == pytest.approx(alone.logit, abs=1e-9)


def test_number_of_thoughts_and_steps_is_limited(encoder: Path) -> None:
    model = host(encoder, steps=4, max_kept=5, accept=1e-40, conclude=1 - 1e-15)
    result = solve(model, encoded(model))
    assert {len(solution.kept) for solution in result} == {5}
    short = host(encoder, steps=1, conclude=1 - 1e-15)
    assert all(thought[0] == "num" for solution in solve(short, encoded(short)) for thought in solution.kept)


def test_problems_without_numbers_and_truncated_problems(encoder: Path) -> None:
    model = host(encoder, steps=3)
    long = Problem.of("3 " + "apples and pears, " * 20 + "4 plums and 5 figs?")
    problem = EncodedProblem.of(long, model.tokenizer, model.settings.max_length)
    assert len(problem.ids) == model.settings.max_length
    assert [number for number, _ in problem.numbers] == [1, 2]  # the beginning was cut off
    texts = answers(model, [Problem.of("How many?"), long, grounded()[0].problem], batch=2)
    assert texts[0] == ""
    assert texts[1] and "3" not in texts[1].replace(" ", "")
    assert texts[2] == answers(model, [grounded()[0].problem])[0]


def test_the_goal_is_the_last_token_of_the_text(model: Athena) -> None:
    problem = encoded(model)[0]
    assert model.tokenizer.convert_ids_to_tokens(problem.ids)[problem.goal] == "?"
    ends = EncodedProblem.of(Problem.of("What is twice 8"), model.tokenizer, 128)
    assert ends.goal == ends.numbers[-1][1]


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_saved_model_round_trip(tmp_path: Path, family: str) -> None:
    model = host(encoder_folder(tmp_path / "encoder", family), constants=("1",), steps=3)
    model.about = {"trained_on": ["x"]}
    write(model, tmp_path / "host")
    write(model, tmp_path / "host")  # takes the place of the first
    again = read(tmp_path / "host")
    assert (again.settings, again.about) == (model.settings, model.about)
    inputs = collated(model, examples(model))
    with torch.no_grad():
        before, after = model(**inputs), again(**inputs)
    assert torch.equal(before.reason, after.reason)
    assert torch.equal(before.answer, after.answer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder", "host"]
    assert map_model(again.encoder).weights == map_model(model.encoder).weights
    (tmp_path / "host" / "head.safetensors").write_bytes(b"cut off")
    with pytest.raises(InputError):
        read(tmp_path / "host")
    with pytest.raises(InputError):
        read(tmp_path)
