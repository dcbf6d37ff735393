"""The decoding engine: many prompts under many head masks in one batch."""

from lmeval_prune.decoding.engine import Engine
from lmeval_prune.decoding.likelihood import Likelihood, LikelihoodRequest
from lmeval_prune.decoding.request import Request, SamplingParams, Stopping
from lmeval_prune.decoding.scheduler import Schedule

__all__ = ["Engine", "Likelihood", "LikelihoodRequest", "Request", "SamplingParams", "Schedule", "Stopping"]
