"""ATHENA: an encoder that reads a problem, and modules that think of it step by step.

`h` is the encoder's width, `f` that of its feed-forward blocks. Every block of the head part is normed first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers.modeling_outputs import ModelOutput

from lmeval_prune.athena.thoughts import LEAVES, MERGES, OPERATORS, TRANSFORMS


@dataclass(frozen=True)
class AthenaSettings:
    """What an ATHENA is, beside its weights.

    Attributes:
        width, channels, heads: of the head part: h, f and the number of heads of its attentions.
        constants: that it can think of, as exact numbers, e.g. `"1"`, `"157/50"`.
        steps: so many steps at most.
        max_length: tokens of a text.
        dropout: of the head part, in training.
        max_kept: thoughts of a problem at most.
        accept, conclude: probability from which a candidate is kept, and from which an answer ends the search.
    """

    width: int
    channels: int
    heads: int
    constants: tuple[str, ...] = ()
    steps: int = 5
    max_length: int = 512
    dropout: float = 0.2
    max_kept: int = 60
    accept: float = 0.5
    conclude: float = 0.95


@dataclass
class AthenaOutput(ModelOutput):
    """Logits of teacher forcing.

    Attributes:
        reason: of all candidates, by step.
        answer: of all kept thoughts.
        candidate_problem, kept_problem: whose they are.
        attentions: the encoder's attention maps, if they were asked for.
    """

    reason: Tensor | None = None
    answer: Tensor | None = None
    candidate_problem: Tensor | None = None
    kept_problem: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None


class FeedForward(nn.Module):
    """x + W₂ gelu(W₁ norm(x))."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, settings.channels)
        self.down = nn.Linear(settings.channels, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, h)."""
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Projections of an attention of several heads, without norm and residual."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.query, self.key, self.value, self.output = (nn.Linear(settings.width, settings.width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Concatenated outputs of the heads before the output projection, shape (…, n, h).

        Args:
            queries: shape (…, n, h).
            keys: shape (…, m, h).
            allowed: which key each query sees, shape (n, m); all by default.
        """
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for project, x in ((self.query, queries), (self.key, keys), (self.value, keys))
        )
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(-3, -2).flatten(-2)


class Merge(nn.Module):
    """A thought of two thoughts, whichever comes first: the two look at each other, and their views are added."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.dropout = nn.Dropout(settings.dropout)
        self.feed_forward = FeedForward(settings)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Shapes (n, h)."""
        pair = self.norm(torch.stack([one, other], dim=-2))
        seen = self.attention(pair, pair).sum(dim=-2)
        return self.feed_forward(one + other + self.dropout(self.attention.output(seen)))


class Constants(nn.Module):
    """Learned embeddings of the constants."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(len(settings.constants), settings.width))
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, settings.channels)
        self.down = nn.Linear(settings.channels, settings.width)

    def forward(self) -> Tensor:
        """Shape (constants, h)."""
        embedded: Tensor = self.down(gelu(self.up(self.norm(self.vectors))))
        return embedded


class Judge(nn.Module):
    """How good a thought is in the light of references."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.before, self.after = FeedForward(settings), FeedForward(settings)
        self.norm, self.reference_norm = nn.LayerNorm(settings.width), nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.dropout = nn.Dropout(settings.dropout)
        self.score = nn.Linear(settings.width, 1)

    def forward(self, thoughts: Tensor, references: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Contexts (n, h) and logits (n,) of thoughts (n, h).

        Args:
            thoughts: of several problems.
            references: of several problems, shape (m, h).
            allowed: which are of one problem, shape (n, m).
        """
        x = self.before(thoughts)
        seen = self.attention(self.norm(x), self.reference_norm(references), allowed)
        x = self.after(x + self.dropout(self.attention.output(seen)))
        return x, self.score(x)[:, 0]


@dataclass
class State:
    """How far the thinking is, of several problems.

    Attributes:
        leaves: embeddings of numbers and constants, problem by problem.
        kept, kept_problem: embeddings of the kept thoughts, and whose they are.
        premises, premise_problem: what `reason` looks at: the texts, then the contexts of kept thoughts.
        goals: what `answer` looks at, one a problem.
    """

    leaves: Tensor
    kept: Tensor
    kept_problem: Tensor
    premises: Tensor
    premise_problem: Tensor
    goals: Tensor


class Athena(nn.Module):
    """The host model.

    Args:
        settings: of the head part.
        encoder: a stock transformers encoder.
        tokenizer: the encoder's.

    Attributes:
        about: what it was trained on and how.
    """

    accepts_loss_kwargs = True  # transformers' Trainer counts the labels of an accumulated batch

    def __init__(self, settings: AthenaSettings, encoder: Any, tokenizer: Any) -> None:
        super().__init__()
        self.settings, self.tokenizer = settings, tokenizer
        self.about: dict[str, Any] = {}
        self.encoder = encoder
        self.transforms = nn.ModuleDict({name: FeedForward(settings) for name in TRANSFORMS})
        self.merges = nn.ModuleDict({name: Merge(settings) for name in MERGES})
        self.reason, self.answer = Judge(settings), Judge(settings)
        self.constants = Constants(settings) if settings.constants else None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.reason.score.weight.device

    def read(self, inputs: Mapping[str, Tensor], **settings: Any) -> tuple[State, Any]:
        """Read texts, as `texts` of `batches.py` gives them.

        Args:
            inputs: see there.
            settings: of the encoder's call.

        Returns:
            The state at the beginning, and the encoder's own output.
        """
        found = self.encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings)
        hidden = found.last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        leaves = hidden[inputs["number_rows"], inputs["number_columns"]]
        if self.constants is not None:
            leaves = torch.cat([leaves, self.constants()])
        leaves = leaves[inputs["leaf_order"]]
        return State(leaves, leaves[:0], rows[:0], hidden[:, 0], rows, hidden[rows, inputs["goals"]]), found

    def think(self, state: State, step: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Think of a step's candidates, as `Joined` gives them.

        Returns:
            Thoughts and their contexts, shape (n, h), and logits of `reason`, shape (n,).
        """
        found = []
        pairs = zip(OPERATORS, step["first"].split(step["sizes"]), step["second"].split(step["sizes"]), strict=True)
        for operator, first, second in pairs:
            if not len(first):
                continue
            if operator in LEAVES:
                found.append(state.leaves[first])
            elif operator in TRANSFORMS:
                found.append(self.transforms[operator](state.kept[first]))
            else:
                found.append(self.merges[operator](state.kept[first], state.kept[second]))
        thoughts = torch.cat(found)
        allowed = step["problem"][:, None] == state.premise_problem
        return thoughts, *self.reason(thoughts, state.premises, allowed)

    def keep(self, state: State, thoughts: Tensor, contexts: Tensor, problem: Tensor) -> State:
        """The state after these thoughts were kept."""
        return replace(
            state,
            kept=torch.cat([state.kept, thoughts]),
            kept_problem=torch.cat([state.kept_problem, problem]),
            premises=torch.cat([state.premises, contexts]),
            premise_problem=torch.cat([state.premise_problem, problem]),
        )

    def conclude(self, state: State, thoughts: Tensor, problem: Tensor) -> Tensor:
        """Logits of `answer`, shape (n,): whether a thought is what is asked for."""
        allowed = problem[:, None] == torch.arange(len(state.goals), device=problem.device)
        return self.answer(thoughts, state.goals, allowed)[1]

    def forward(
        self, steps: list[dict[str, Any]], labels: Tensor | None = None, output_attentions: bool = False, **inputs: Any
    ) -> AthenaOutput:
        """Logits of teacher forcing: what leads to the equation is kept.

        Args:
            steps: as `Collator` makes them.
            labels: not used here; see `AthenaTrainer.compute_loss`.
            output_attentions: give the encoder's attention maps, too (they need its eager attention).
            inputs: see `read`.
        """
        state, encoded = self.read(inputs, **({"output_attentions": True} if output_attentions else {}))
        logits = []
        for step in steps:
            thoughts, contexts, reason = self.think(state, step)
            kept, problem = step["kept"], step["problem"]
            state = self.keep(state, thoughts[kept], contexts[kept], problem[kept])
            logits.append(reason)
        return AthenaOutput(
            reason=torch.cat(logits),
            answer=self.conclude(state, state.kept, state.kept_problem),
            candidate_problem=torch.cat([step["problem"] for step in steps]),
            kept_problem=state.kept_problem,
            attentions=encoded.attentions if output_attentions else None,
        )
