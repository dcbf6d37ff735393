"""Fill in jinja2 templates; names and texts of users are shown as they are and never read as markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

_MARKDOWN = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)")


def one_line(text: Any) -> str:
    """Return a text for a terminal or a picture, with blanks for line breaks and control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text))


def plain(text: Any) -> Markup:
    """Escape a text for Markdown and the HTML within it, in one line; `Markup` stays."""
    if isinstance(text, Markup):
        return text
    escaped = one_line(text).replace("&", "&amp;").replace(">", "&gt;").replace("~", "&#126;")
    escaped = re.sub(r"<(?!\d)", "&lt;", escaped)  # before a digit it begins no tag
    return Markup(_MARKDOWN.sub(r"\\\g<0>", escaped))


def render(template: Path, **values: Any) -> str:
    """Fill in a template, `*.md.jinja` or `*.html.jinja`; all values but `Markup` are escaped.

    Raises:
        UndefinedError: a name of the template has no value.
    """
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=escape if ".html" in template.suffixes else plain,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
