"""Many differently pruned variants of a question, decoded together."""

from lmeval_prune.decoding.engine import Engine
from lmeval_prune.decoding.requests import Request, Settings
from lmeval_prune.decoding.stops import Stops

__all__ = ["Engine", "Request", "Settings", "Stops"]
