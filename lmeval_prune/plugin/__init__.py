"""Registration with lm-eval. Imports nothing, because `bridge` runs at each start of Python."""
