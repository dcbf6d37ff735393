"""Reading of JSON artefacts, JSON Lines, parquet tables and safetensors, with the types of their fields checked."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from lmeval_prune.errors import InputError, check_exists, first_few, first_line

_MAX_JSON_BYTES = 2**28
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
    if not isinstance(content, dict) or content.get("schema") not in schemas:
        name = content.get("schema") if isinstance(content, dict) else type(content).__name__
        hint = "; install the package of that class" if isinstance(name, str) and ":" in name else ""
        raise InputError(f"{path} is not a {' or '.join(schemas)} artefact (its schema is {str(name)[:80]!r}){hint}")
    if (number := content.get("schema_version")) != version:
        raise InputError(f"{path} has schema version {str(number)[:40]}, not {version}; make it again")
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
    try:
        return [path.read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 ({first_line(error)}); convert it, e.g. iconv -f latin1 -t utf-8"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


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
        if first["type"] == "missing" and len(first["loc"]) == 1 and value:
            raise InputError(f"{path} lacks the field {field!a}; it has {first_few(map(str, value))}") from None
        raise InputError(f"{path} is damaged or of another kind ({name}: {first['msg'].splitlines()[0]})") from None
    return value


@functools.cache
def _validator(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _read_bytes(path: Path) -> bytes:
    check_exists(path, file=True)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if data.startswith((b"\x80", b"PK")):
        raise InputError(
            f"{path} is a pickle or torch file, which can run code when it is loaded, and was not read; "
            f"artefacts are JSON (write one with `lmeval-prune mask` or HeadMask.save)"
        )
    if len(data) > _MAX_JSON_BYTES:
        raise InputError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB and is not an artefact of lmeval-prune")
    return data


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


def read_table(path: PathLike, remedy: str, columns: list[str] | None = None, schema: Any = None) -> Any:
    """Read and validate a parquet file as an Arrow table, cast to a `schema`; `InputError` if it is damaged."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, columns=None if schema else columns)
        table.validate(full=True)  # finds texts that are not UTF-8, too
        if schema is None:
            return table
        columns = columns or schema.names
        return table.select(columns).cast(pa.schema([schema.field(name) for name in columns]))
    except FileNotFoundError:
        raise
    except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); {remedy}") from None


def check_finite(tensors: Mapping[str, Any], name: object, remedy: str = "make it again") -> None:
    """Raise an `InputError` that names `name` and `remedy` if a tensor has NaN or infinite values."""
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{name} has NaN or infinite values in {key}; {remedy}")
