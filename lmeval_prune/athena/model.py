"""The ATHENA model: a head part that composes thoughts step by step, over an encoder that reads the problem.

`h` is the encoder's width and `f` the width of its feed-forward blocks. All blocks of the head part are pre-norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers.modeling_outputs import ModelOutput

from lmeval_prune.athena.thoughts import LEAVES, MERGES, OPERATORS, TRANSFORMS
from lmeval_prune.config import Count, Settings, ShareBelowOne

Probability = Annotated[float, Interval(gt=0, lt=1)]  # its logit is finite


@dataclass(frozen=True)
class AthenaSettings(Settings):
    """Sizes and limits of an ATHENA, stored in `athena.json`."""

    width: Count  # h
    channels: Count  # f
    heads: Count  # attention heads in the head part
    constants: tuple[str, ...] = ()  # available constants, e.g. "1", "157/50"
    steps: Count = 5  # largest number of steps
    max_length: Count = 512  # largest number of tokens in a text
    dropout: ShareBelowOne = 0.2  # of the head part, in training
    max_kept: Count = 60  # largest number of kept thoughts per problem
    accept: Probability = 0.5  # smallest probability of a kept candidate
    conclude: Probability = 0.95  # probability of an answer that ends the search


@dataclass
class AthenaOutput(ModelOutput):
    """Logits of teacher forcing."""

    reason: Tensor | None = None  # logits of all candidates, by step
    answer: Tensor | None = None  # logits of all kept thoughts
    kept_problem: Tensor | None = None  # problem index of each kept thought
    attentions: tuple[Tensor, ...] | None = None  # the encoder's attention maps, if requested


class FeedForward(nn.Module):
    """Pre-norm feed-forward block: x + W₂ gelu(W₁ norm(x))."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, settings.channels)
        self.down = nn.Linear(settings.channels, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x, shape (n, h)."""
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Multi-head attention without norm and residual."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.heads = settings.heads
        self.query, self.key, self.value, self.output = (nn.Linear(settings.width, settings.width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the concatenated head outputs before the output projection, shape (…, n, h).

        Queries have the shape (…, n, h), keys (…, m, h), and the attention mask `allowed` (n, m).
        """
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for project, x in ((self.query, queries), (self.key, keys), (self.value, keys))
        )
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(-3, -2).flatten(-2)


class Merge(nn.Module):
    """Symmetric merge of two thoughts: they attend to each other, and the two results are added."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.dropout = nn.Dropout(settings.dropout)
        self.feed_forward = FeedForward(settings)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Merge pairs of thoughts, shapes (n, h)."""
        pair = self.norm(torch.stack([first, second], dim=-2))
        views = self.attention(pair, pair).sum(dim=-2)
        return self.feed_forward(first + second + self.dropout(self.attention.output(views)))


class Constants(nn.Module):
    """Learned embeddings of the constants."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(len(settings.constants), settings.width))
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, settings.channels)
        self.down = nn.Linear(settings.channels, settings.width)

    def forward(self) -> Tensor:
        """Return the embeddings, shape (constants, h)."""
        embedded: Tensor = self.down(gelu(self.up(self.norm(self.vectors))))
        return embedded


class Judge(nn.Module):
    """Binary classifier of thoughts, which attend to references."""

    def __init__(self, settings: AthenaSettings) -> None:
        super().__init__()
        self.before, self.after = FeedForward(settings), FeedForward(settings)
        self.norm, self.reference_norm = nn.LayerNorm(settings.width), nn.LayerNorm(settings.width)
        self.attention = Attention(settings)
        self.dropout = nn.Dropout(settings.dropout)
        self.score = nn.Linear(settings.width, 1)

    def forward(self, thoughts: Tensor, references: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Return contexts (n, h) and logits (n,) of thoughts (n, h) that attend to references (m, h)."""
        x = self.before(thoughts)
        views = self.attention(self.norm(x), self.reference_norm(references), allowed)
        x = self.after(x + self.dropout(self.attention.output(views)))
        return x, self.score(x)[:, 0]


@dataclass
class Thinking:
    """State of a batch of problems between steps; `*_problem` are problem indices, shape (n,)."""

    leaves: Tensor  # embeddings of numbers and constants, problem by problem, shape (n, h)
    kept: Tensor  # embeddings of the kept thoughts, shape (n, h)
    kept_problem: Tensor
    premises: Tensor  # references of `reason`: the texts, then the contexts of kept thoughts, shape (n, h)
    premise_problem: Tensor
    goals: Tensor  # references of `answer`, shape (problems, h)


class Athena(nn.Module):
    """ATHENA: a head part over a stock transformers encoder."""

    accepts_loss_kwargs = True  # transformers' Trainer counts the labels of an accumulated batch

    def __init__(self, settings: AthenaSettings, encoder: Any, tokenizer: Any) -> None:
        super().__init__()
        self.settings, self.tokenizer = settings, tokenizer
        self.about: dict[str, Any] = {}  # training options, losses and questions, stored in `athena.json`
        self.encoder = encoder
        self.transforms = nn.ModuleDict({name: FeedForward(settings) for name in TRANSFORMS})
        self.merges = nn.ModuleDict({name: Merge(settings) for name in MERGES})
        self.reason, self.answer = Judge(settings), Judge(settings)
        self.constants = Constants(settings) if settings.constants else None

    @property
    def device(self) -> torch.device:
        return self.reason.score.weight.device

    def read(self, inputs: Mapping[str, Tensor], **settings: Any) -> tuple[Thinking, Any]:
        """Encode the texts of `text_inputs`; return the state before the first step, and the encoder's output."""
        encoded = self.encoder(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings)
        hidden = encoded.last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        leaves = hidden[inputs["number_rows"], inputs["number_columns"]]
        if self.constants is not None:
            leaves = torch.cat([leaves, self.constants()])
        leaves = leaves[inputs["leaf_order"]]
        return Thinking(leaves, leaves[:0], rows[:0], hidden[:, 0], rows, hidden[rows, inputs["goals"]]), encoded

    def think(self, state: Thinking, step: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings (n, h), contexts (n, h) and logits of `reason` (n,) of a `join_step`'s candidates."""
        parts = []
        pairs = zip(OPERATORS, step["first"].split(step["sizes"]), step["second"].split(step["sizes"]), strict=True)
        for operator, first, second in pairs:
            if not len(first):
                continue
            if operator in LEAVES:
                parts.append(state.leaves[first])
            elif operator in TRANSFORMS:
                parts.append(self.transforms[operator](state.kept[first]))
            else:
                parts.append(self.merges[operator](state.kept[first], state.kept[second]))
        thoughts = torch.cat(parts)
        allowed = step["problem"][:, None] == state.premise_problem
        return thoughts, *self.reason(thoughts, state.premises, allowed)

    def keep(self, state: Thinking, thoughts: Tensor, contexts: Tensor, problem: Tensor) -> Thinking:
        """Return the state with more kept thoughts."""
        return replace(
            state,
            kept=torch.cat([state.kept, thoughts]),
            kept_problem=torch.cat([state.kept_problem, problem]),
            premises=torch.cat([state.premises, contexts]),
            premise_problem=torch.cat([state.premise_problem, problem]),
        )

    def conclude(self, state: Thinking, thoughts: Tensor, problem: Tensor) -> Tensor:
        """Return logits of `answer`, shape (n,): whether a thought answers its problem."""
        allowed = problem[:, None] == torch.arange(len(state.goals), device=problem.device)
        return self.answer(thoughts, state.goals, allowed)[1]

    def forward(
        self, steps: list[dict[str, Any]], labels: Tensor | None = None, output_attentions: bool = False, **inputs: Any
    ) -> AthenaOutput:
        """Return logits of teacher forcing, which keeps the candidates of the gold equation, of `collate`'s inputs."""
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
            kept_problem=state.kept_problem,
            attentions=encoded.attentions if output_attentions else None,
        )
