"""lm-eval's own cache (`--use_cache`), with answers of different and differently pruned models kept apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.identity import code_versions


def keep_apart(database: Any, lm: Any) -> None:
    """Give each combination of model, settings and what is applied when it is asked a table of its own.

    lm-eval keys its cache by prompt and generation settings only.

    Args:
        database: the cache, sqlitedict's `SqliteDict`; its class is replaced by one that names its table anew.
        lm: the `PrunedHFLM`.
    """
    if not hasattr(database, "tablename") or not hasattr(database, "conn"):
        raise InputError(
            "this lm-eval's --use_cache would mix answers of differently pruned models; "
            "use --model_args responses=FOLDER instead"
        )
    model = ref(lm)
    digests: dict[str, str] = {}
    tables: set[str] = set()

    def tablename(self: Any) -> str:
        lm: Any = model()
        applied = digest(lm.answering.interventions())
        if applied not in digests:
            digests[applied] = digest([lm.identity, applied, code_versions()])
        table = f"lmeval_prune_{digests[applied]}"
        if table not in tables:
            self.conn.execute(f'CREATE TABLE IF NOT EXISTS "{table}" (key TEXT PRIMARY KEY, value BLOB)')
            self.conn.commit()
            tables.add(table)
        return table

    database.__class__ = type("Tables", (type(database),), {"tablename": property(tablename)})
    _ = database.tablename  # refuses now what cannot be told apart


def refuse_collapsed(requests: Iterable[Any]) -> None:
    """Refuse requests whose repeats the cache would answer alike."""
    for request in requests:
        settings = request.args[1]
        if generation.is_sampling(settings) and settings.get("do_sample") is None:
            raise InputError(
                f"task {request.task_name} samples (temperature {settings['temperature']}) without do_sample: true, "
                f"so --use_cache would give every repeat the same answer on the next run; add do_sample=true to "
                f"--gen_kwargs, or use --model_args responses=FOLDER"
            )
