"""Render jinja2 templates; names and texts of users are escaped, so that they never act as markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

_MARKDOWN = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)")


def printable(text: Any) -> str:
    """Return a text for a terminal or a figure, with spaces for line breaks and control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def escape_markdown(text: Any) -> Markup:
    """Escape a text for Markdown with embedded HTML, in one line; `Markup` is returned unchanged."""
    if isinstance(text, Markup):
        return text
    escaped = printable(text).replace("&", "&amp;").replace(">", "&gt;").replace("~", "&#126;")
    escaped = re.sub(r"<(?!\d)", "&lt;", escaped)  # no tag begins with a digit
    return Markup(_MARKDOWN.sub(r"\\\g<0>", escaped))


def render(template: Path, **values: Any) -> str:
    """Render a template, `*.md.jinja` or `*.html.jinja`; all values except `Markup` are escaped."""
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=escape if ".html" in template.suffixes else escape_markdown,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
