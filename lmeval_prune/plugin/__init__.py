"""Registration with lm-eval. Imports nothing, because `bridge` runs at every interpreter start."""
