"""Find out what is known of the model that another one derives from: its name on the Hub and its license."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import yaml
from huggingface_hub import hf_hub_download, metadata_load, try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id
from typing_extensions import TypedDict

from lmeval_prune.architectures.identity import model_name
from lmeval_prune.checkpoints import embedded
from lmeval_prune.reporting.documents import escape_markdown, inline_code

_logger = logging.getLogger(__name__)
HUB = "https://huggingface.co"
CARD = "README.md"
_LICENSE = ("license", "license_name", "license_link")


class OriginRecord(TypedDict, total=False):
    """What an artefact stores of an `Origin`: the fields that are known, without the short name."""

    hub_id: str
    ancestors: list[str]
    license: dict[str, str]
    language: Any
    conversion: str


@dataclass(frozen=True)
class Origin:
    """A model that another one derives from.

    Attributes:
        name: its short name.
        hub_id: its name on the Hub; empty if it is not known there.
        ancestors: names on the Hub of what a model without `hub_id` itself derives from, by its own card.
        license: the fields of its card's front matter that begin with `license`; empty if they are not known.
        language: languages, as in the front matter.
        conversion: how its weights came here, if not from `hub_id` directly.
    """

    name: str
    hub_id: str = ""
    ancestors: tuple[str, ...] = ()
    license: Mapping[str, str] = field(default_factory=dict)
    language: Any = None
    conversion: str = ""

    def __post_init__(self) -> None:
        """Leave out what is no name on the Hub and no address of a license; a record may be a stranger's."""
        object.__setattr__(self, "hub_id", _hub_id(self.hub_id))
        object.__setattr__(self, "ancestors", tuple(name for name in self.ancestors if _hub_id(name)))
        link = _license_link(self.license.get("license_link", ""), self.hub_id)
        entries = {**self.license, "license_link": link}
        object.__setattr__(self, "license", {key: value for key, value in entries.items() if value})

    @classmethod
    def of(cls, pretrained: str, revision: str | None = None) -> Origin:
        """Describe a model by its folder, its name on the Hub or its embedded name; nothing is invented.

        The Hub is asked for the card of a model only if the card is not in the cache, and may be out of reach.
        """
        if not pretrained:  # a model that was never saved
            return cls("")
        if name := embedded.name_of(pretrained):
            model = embedded.MODELS[name]
            named = {"license": model.license} if model.license else {}
            return cls(name, model.origin, (), named, None, model.conversion)
        folder = Path(pretrained).expanduser()
        if folder.is_dir():
            hub_id, fields = _id_in_cache(folder), fields_of(folder / CARD)
            fields = {**_license_in_config(folder), **fields}
        else:
            hub_id, fields = _hub_id(pretrained), fields_of(_card_on_hub(pretrained, revision))
        ancestors = [] if hub_id else _texts(fields.get("base_model"))
        license_fields = {key: str(fields[key]) for key in _LICENSE if isinstance(fields.get(key), str)}
        return cls(
            model_name(pretrained),
            hub_id,
            tuple(ancestors),
            license_fields,
            fields.get("language") if _texts(fields.get("language")) else None,
        )

    @classmethod
    def recorded(cls, name: str, record: OriginRecord) -> Origin:
        """Return the origin of a model of this short name from its record."""
        entries: dict[str, Any] = {key: value for key, value in record.items() if key in OriginRecord.__annotations__}
        return cls(name, **{**entries, "ancestors": tuple(entries.get("ancestors", ()))})

    @property
    def record(self) -> OriginRecord:
        """What an artefact stores; no path of this machine."""
        entries = {key: getattr(self, key) for key in OriginRecord.__annotations__ if getattr(self, key)}
        return cast("OriginRecord", json.loads(json.dumps(entries)))

    @property
    def base_model(self) -> str | list[str] | None:
        """Value of `base_model` in the front matter; None if no name on the Hub is known."""
        names = [self.hub_id] if self.hub_id else list(self.ancestors)
        return names[0] if len(names) == 1 else names or None

    @property
    def text(self) -> str:
        """Name the model in Markdown, with links."""
        if self.hub_id:
            return f"{_link(self.hub_id)}{f', from {escape_markdown(self.conversion)}' if self.conversion else ''}"
        name = escape_markdown(self.name) or "a model without a name"
        if self.ancestors:
            return f"{name}, a local model that derives from {' and '.join(map(_link, self.ancestors))}"
        return f"{name}, a model whose name on the Hub is not known here"

    @property
    def license_text(self) -> str:
        """Say in Markdown which license the model has, and where that is from."""
        name = self.license.get("license_name") or self.license.get("license")
        local = f"the local model {inline_code(self.name)}" if self.name else "the original model"
        model = _link(self.hub_id) if self.hub_id else local
        if not name:
            return (
                f"No license is named, because that of {model} is not known here. Find it and name it in the front "
                f"matter before you share these files."
            )
        link = self.license.get("license_link")
        shown = f"[{escape_markdown(name)}]({link})" if link else inline_code(name)
        return f"{shown}, the license of {model}."


def _link(hub_id: str) -> str:
    return f"[{escape_markdown(hub_id)}]({HUB}/{hub_id})"


def _license_link(link: str, hub_id: str) -> str:
    """Return the address of a license, also of a file of the model on the Hub; empty for anything else."""
    if re.match("https?://", link):
        return quote(link, safe=":/?#@!$&*+,;=%~", errors="replace")
    is_file = link and hub_id and not re.match(r"[\w+.-]+:", link)
    return f"{HUB}/{hub_id}/blob/main/{quote(link.removeprefix('./'), errors='replace')}" if is_file else ""


def _hub_id(name: str) -> str:
    """Return a name if it can be one on the Hub, else an empty text."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return ""
    return name


def _id_in_cache(folder: Path) -> str:
    """Return the model's name if the folder is its snapshot in the Hub's cache."""
    match = re.search(r"(?:^|[/\\])models--(.+?)[/\\]snapshots[/\\][^/\\]+$", str(folder.absolute()))
    return _hub_id(match[1].replace("--", "/")) if match else ""


def _card_on_hub(name: str, revision: str | None) -> Path | None:
    """Return the card of a model on the Hub, or None."""
    with suppress(Exception):  # no access, no network, no card: error types differ between versions of the client
        cached = try_to_load_from_cache(name, CARD, revision=revision)
        return Path(cached if isinstance(cached, str) else hf_hub_download(name, CARD, revision=revision))
    return None


def fields_of(path: Path | None) -> dict[str, Any]:
    """Return the front matter of a card; empty if there is none, or it cannot be read."""
    if path is None or not path.is_file():
        return {}
    try:
        return dict(metadata_load(path) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        _logger.warning("the front matter of %s cannot be read (%s); the card says nothing from it", path, error)
        return {}


def _license_in_config(folder: Path) -> dict[str, Any]:
    """Return the license that a model's configuration names."""
    with suppress(OSError, ValueError, AttributeError):
        if isinstance(name := json.loads((folder / "config.json").read_text("utf-8")).get("license"), str):
            return {"license": name}
    return {}


def _texts(value: Any) -> list[str]:
    """Return a text, or a list of texts, as a list; empty for anything else."""
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(text, str) and text for text in values) else []
