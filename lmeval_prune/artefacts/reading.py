"""Reading of JSON artefacts, JSON Lines, parquet tables and safetensors, with the types of their fields checked."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.errors import InputError, check_exists, first_line

NONFINITE_REMEDY = "numbers are outside the range of the model's type: give its weights in float32 or bfloat16"
TABLES = (".json", ".csv", ".tsv")  # endings of files whose texts are not told apart from the rest
PathLike = str | os.PathLike[str]


class _Document(TypedDict):
    """Field of a document that is read as its text."""

    text: str | None


def read_artefact(
    path: PathLike, schema: str | tuple[str, ...], version: int, fields: Any = dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Read a JSON artefact.

    Args:
        path: the file.
        schema: the accepted schema or schemas.
        version: its schema version.
        fields: type of the content; see `validate_json`.

    Returns:
        The content, and the SHA-256 of the file.
    """
    path = Path(path)
    data = _read_bytes(path)
    content = parse_json(data, path)
    schemas = (schema,) if isinstance(schema, str) else schema
    found = (content.get("schema"), content.get("schema_version")) if isinstance(content, dict) else ("none", None)
    if found[0] not in schemas or found[1] != version:
        kind = f"{str(found[0])[:80]!r} of version {str(found[1])[:40]}"
        raise InputError(f"{path} is not a {' or '.join(schemas)} artefact of version {version} (it is {kind})")
    return validate_json(content, fields, path), hashlib.sha256(data).hexdigest()


def read_json(path: PathLike, fields: Any = dict[str, Any]) -> Any:
    """Read a JSON file and check the type of its value; see `validate_json`."""
    return validate_json(parse_json(_read_bytes(Path(path)), path), fields, path)


def read_lines(path: PathLike, fields: Any = dict[str, Any]) -> list[Any]:
    """Read a JSON Lines file and check the type of each value; see `validate_json`."""
    check_exists(path, file=True)
    names = ((f"line {number} of {path}", line) for number, line in numbered_lines(path))
    return [validate_json(parse_json(line, name), fields, name) for name, line in names]


def read_texts(path: PathLike) -> list[str]:
    """Read the texts of a file: the field `text` of each line of a .jsonl file, else the whole file."""
    path = Path(path)
    if path.suffix == ".jsonl":
        return [row["text"] or "" for row in read_lines(path, _Document)]
    check_exists(path, file=True)
    if path.suffix in TABLES:
        raise InputError(f"{path} is no text; name a text file, or .jsonl with a field `text` in each line")
    return [path.read_text(encoding="utf-8")]


def numbered_lines(path: PathLike) -> list[tuple[int, bytes]]:
    """Read the lines of a text file that are not blank, with their numbers from 1."""
    return [(n, line) for n, line in enumerate(Path(path).read_bytes().split(b"\n"), 1) if line.strip()]


def parse_json(data: bytes | str, path: object) -> Any:
    """Parse a JSON text; the `InputError` for invalid JSON names `path`.

    Numbers with thousands of digits and very deep nesting are refused.
    """
    import pydantic_core

    try:
        return pydantic_core.from_json(data)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None


def validate_json(value: Any, kind: Any, path: object) -> Any:
    """Check a JSON value against a type, e.g. `list[str]` or a `TypedDict`, and return the value.

    The `InputError` for another type names `path` and the field.
    """
    from pydantic import ValidationError

    try:
        _validator(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part)[:40] for part in first["loc"])
        name = f"field {field!a}" if field else "content"
        raise InputError(f"{path} is damaged or of another kind ({name}: {first['msg'].splitlines()[0]})") from None
    return value


@functools.cache
def _validator(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _read_bytes(path: Path) -> bytes:
    check_exists(path, file=True)
    return path.read_bytes()


def read_tensors(path: PathLike, sha256: str | None = None) -> dict[str, Any]:
    """Read tensors from a safetensors file.

    Args:
        path: the file.
        sha256: hash of the file in the artefact beside it; None: not checked.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = Path(path).read_bytes()
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise InputError(f"{path} does not belong to the artefact beside it (another SHA-256); make both again")
        tensors = load(data)
    except (OSError, SafetensorError, RuntimeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); it belongs to the artefact beside it") from None
    check_finite(tensors, path)
    return tensors


def read_table(path: PathLike, schema: Any = None, remedy: str = "the store is damaged") -> Any:
    """Read and validate a parquet file as an Arrow table; `InputError` if it is damaged.

    A `schema` selects and casts columns; a missing file is then an empty table.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
        table.validate(full=True)  # finds texts that are not UTF-8, too
        return table if schema is None else table.select(schema.names).cast(schema)
    except FileNotFoundError:
        if schema is None:
            raise
        return schema.empty_table()
    except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None


def check_finite(tensors: Mapping[str, Any], name: object, remedy: str = "make it again") -> None:
    """Raise an `InputError` that names `name` and `remedy` if a tensor has NaN or infinite values."""
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} has NaN or infinite values in {key}; {remedy}")
