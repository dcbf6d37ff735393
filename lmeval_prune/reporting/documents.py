"""Texts from jinja2 templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined


def render(template: Path, **values: Any) -> str:
    """Fill in a template; a name that it lacks is an error."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
