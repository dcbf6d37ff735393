"""A progress bar in tokens; its estimate follows the lengths of complete answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from lmeval_prune.decoding.request import Request


class Progress:
    """Progress bar over the expected tokens.

    An incomplete answer is expected to have the mean length of the complete answers, or its largest length before the
    first answer. The bar counts tokens, not answers: a leader takes a step for each token, but followers copy most of
    their tokens, so an estimate by answers would be far too long.
    """

    def __init__(self, requests: Sequence[Request], show: bool) -> None:
        self.requests = len(requests)
        self.most = sum(request.params.max_new_tokens for request in requests) / max(len(requests), 1)
        self.ended = self.tokens = self.active = 0
        self.bar: Any = tqdm(total=round(self.most * self.requests), unit="token", desc="decoding", disable=not show)

    @property
    def expected(self) -> float:
        """The expected number of tokens in an answer."""
        return self.tokens / self.ended if self.ended else self.most

    def step(self, active: int) -> None:
        """Record the number of tokens in incomplete answers."""
        self.active = active
        self._show()

    def end(self, length: int) -> None:
        """Record a complete answer of `length` tokens."""
        self.ended, self.tokens = self.ended + 1, self.tokens + length
        self.active = max(self.active - length, 0)
        self._show()

    def close(self) -> None:
        """Close the bar; it stays on the screen."""
        self.bar.close()

    def _show(self) -> None:
        if self.bar.disable:
            return
        decoded = self.tokens + self.active
        self.bar.total = round(max(self.tokens + (self.requests - self.ended) * self.expected, decoded))
        length = f"about {self.expected:.0f}" if self.ended else f"at most {self.expected:.0f}"
        self.bar.set_postfix_str(f"{self.ended} of {self.requests} answers, {length} tokens each", refresh=False)
        self.bar.update(max(decoded - self.bar.n, 0))
