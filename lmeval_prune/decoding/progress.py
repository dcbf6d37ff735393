"""A progress bar in tokens, whose estimate follows how long answers turn out to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from lmeval_prune.decoding.request import Request


class Progress:
    """Progress bar over the tokens that are expected.

    Each answer that is not complete is expected to be as long as the complete ones are on average; before there is any,
    as long as it may be. Counted in answers, an estimate would be far too long: the first answer to a prompt takes as
    long as all of its tokens, and those that follow it take over most of them.

    Args:
        requests: whose answers are decoded.
        show: whether the bar is shown.
    """

    def __init__(self, requests: Sequence[Request], show: bool) -> None:
        self.requests = len(requests)
        self.most = sum(request.params.max_new_tokens for request in requests) / max(len(requests), 1)
        self.ended = self.tokens = self.active = 0
        self.bar: Any = tqdm(total=round(self.most * self.requests), unit="token", desc="decoding", disable=not show)

    @property
    def expected(self) -> float:
        """Expected tokens of an answer."""
        return self.tokens / self.ended if self.ended else self.most

    def step(self, active: int) -> None:
        """Record the tokens of incomplete answers."""
        self.active = active
        self._show()

    def end(self, length: int) -> None:
        """Record a complete answer."""
        self.ended, self.tokens = self.ended + 1, self.tokens + length
        self.active = max(self.active - length, 0)
        self._show()

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()

    def _show(self) -> None:
        if self.bar.disable:
            return
        decoded = self.tokens + self.active
        self.bar.total = round(max(self.tokens + (self.requests - self.ended) * self.expected, decoded))
        length = f"about {self.expected:.0f}" if self.ended else f"at most {self.expected:.0f}"
        self.bar.set_postfix_str(f"{self.ended} of {self.requests} answers, {length} tokens each", refresh=False)
        self.bar.update(max(decoded - self.bar.n, 0))
