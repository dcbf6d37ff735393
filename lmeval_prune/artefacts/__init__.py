"""Read and write artefacts: atomic writes, locks, typed fields, no pickle.

A file or folder is written in a temporary folder `.lmeval-prune-…` beside its path, and renamed when it is complete.
The temporary folder's name identifies the writing process. The first write of a process in a folder removes the
leftovers of killed processes: temporary folders of ended processes, and locks without a holder.
"""

from lmeval_prune.artefacts.digests import content_digest, digest, files_digest, without_addresses
from lmeval_prune.artefacts.locks import (
    TEMPORARY_PREFIX,
    cache_folder,
    create_folder,
    file_lock,
    file_name,
    lock_path,
    output_lock,
)
from lmeval_prune.artefacts.reading import (
    NONFINITE_REMEDY,
    TABLES,
    check_finite,
    numbered_lines,
    parse_json,
    read_artefact,
    read_json,
    read_lines,
    read_table,
    read_tensors,
    read_texts,
    validate_json,
)
from lmeval_prune.artefacts.work import Work, check_same
from lmeval_prune.artefacts.writing import (
    CREATED_BY,
    ENVELOPE,
    check_writable,
    final_path,
    new_file,
    new_folder,
    open_append,
    without_nan,
    write_artefact,
    write_bytes,
    write_table,
    write_text,
)

__all__ = [
    "CREATED_BY", "ENVELOPE", "NONFINITE_REMEDY", "TABLES", "TEMPORARY_PREFIX", "Work", "cache_folder", "check_finite",
    "check_same",
    "check_writable", "content_digest", "create_folder", "digest", "file_lock", "file_name", "files_digest",
    "final_path", "lock_path", "new_file", "new_folder", "numbered_lines", "open_append", "output_lock",
    "parse_json", "read_artefact", "read_json", "read_lines", "read_table", "read_tensors", "read_texts",
    "validate_json", "without_addresses", "without_nan", "write_artefact", "write_bytes", "write_table",
    "write_text",
]  # fmt: skip
