"""Take a model's cache of keys and values from its outputs, whatever the release of transformers calls it."""

from __future__ import annotations

from typing import Any


def cache_argument(outputs: Any) -> dict[str, Any]:
    """Return the cache in the outputs of a model as the keyword argument that the model's next pass takes.

    Its name is `cache`, and in older releases of transformers and own code on the Hub `past_key_values`.

    Args:
        outputs: a `ModelOutput` of a pass with `use_cache=True`.
    """
    name = "cache" if "cache" in outputs else "past_key_values"
    return {name: outputs[name]}
