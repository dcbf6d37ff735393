"""The reasons for which the decoding engine does not run a model, each a sentence with the model as its subject."""

from __future__ import annotations

REASONS = {
    "bias": "the model's attention adds a bias to its scores, which the engine does not compute",
    "devices": "the model's layers are on several devices",
    "error": "the engine does not know how to run the model; its check ended with {error}",
    "filtered": "a method filters tokens of the texts, and log-likelihoods need all of them",
    "head_mask": "the model's attention multiplies its heads by a mask, which the engine does not compute",
    "interface": "the model's attention does not use transformers' attention interface",
    "layers": "the model has layers of type {types}, which the engine does not run",
    "logits": "the model's logits would differ by {difference:.2g}",
    "logits_to_keep": "the model computes the logits of all tokens, it does not know logits_to_keep",
    "mask": "the model passes dropout, a padded batch or a mask of its own to its attention",
    "modules": "the model's attention is computed by modules that are not in the map of its heads",
    "not_declared": "the method {method} declares neither tokenwise nor by_sequence",
    "order": "under the method {method} the model's answers depend on earlier answers",
    "pass": "the model calls its attention outside of the engine's passes",
    "prefix": "a method skips tokens of the model's prompts after a common prefix",
    "rope": "the model scales the positions of a batch by its longest row (rope type {rope_type})",
    "sinks": "the model's attention has sinks, which the engine does not compute",
    "state": "a method keeps a state of each text, and texts that share tokens are computed together",
    "window": "the model has layers with a sliding window whose size it does not pass to its attention",
}


class UnsupportedAttention(Exception):  # noqa: N818 - a reason to fall back, not a failure
    """A model, or a method on it, needs a feature that the engine lacks.

    Args:
        reason: key of `REASONS`.
        values: of the reason's fields.
    """

    def __init__(self, reason: str, **values: object) -> None:
        super().__init__(REASONS[reason].format(**values))
