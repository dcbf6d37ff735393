"""Attributes that are set for a while."""

from __future__ import annotations

import torch

from lmeval_prune.attributes import replaced


class Owner(torch.nn.Module):
    shared = "class"

    def __init__(self) -> None:
        super().__init__()
        self.own, self.part = "own", torch.nn.Linear(1, 1)
        self._hidden = "hidden"

    @property
    def hidden(self) -> str:
        return self._hidden

    @hidden.setter
    def hidden(self, value: str) -> None:
        self._hidden = value


def test_nothing_stays_on_the_object() -> None:
    owner = Owner()
    before, part = dict(vars(owner)), owner.part
    with replaced(owner, shared="a", own="b", hidden="c", part=torch.nn.Identity()):
        assert (owner.shared, owner.own, owner.hidden, type(owner.part)) == ("a", "b", "c", torch.nn.Identity)
    assert vars(owner) == before and owner.part is part
