"""lm-eval's own cache (`--use_cache`) with separate tables for different models and interventions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from lmeval_prune.artefacts import digest
from lmeval_prune.errors import InputError
from lmeval_prune.models import generation
from lmeval_prune.models.identity import code_versions


def separate_tables(database: Any, lm: Any) -> None:
    """Use a separate table of the cache for each model, its settings and its current interventions.

    lm-eval keys its cache by prompt and generation settings only. `database` is sqlitedict's `SqliteDict`; its class is
    replaced by a subclass.
    """
    if not hasattr(database, "tablename") or not hasattr(database, "conn"):
        raise InputError(
            "this lm-eval's --use_cache would mix answers of differently pruned models; "
            "use --model_args responses=FOLDER instead"
        )
    model = ref(lm)
    digests: dict[tuple[str, str | None], str] = {}  # by interventions and weights
    tables: set[str] = set()

    def tablename(self: Any) -> str:
        lm: Any = model()
        interventions = digest(lm.answering.interventions())
        state = interventions, lm.weights
        if state not in digests:
            digests[state] = digest([lm.identity, interventions, code_versions()])
        table = f"lmeval_prune_{digests[state]}"
        if table not in tables:
            self.conn.execute(f'CREATE TABLE IF NOT EXISTS "{table}" (key TEXT PRIMARY KEY, value BLOB)')
            self.conn.commit()
            tables.add(table)
        return table

    database.__class__ = type("Tables", (type(database),), {"tablename": property(tablename)})
    _ = database.tablename  # raises now if the model has no identity


def refuse_identical_repeats(requests: Iterable[Any]) -> None:
    """Refuse sampled requests for whose repeats the cache would return the same answer."""
    for request in requests:
        settings = request.args[1]
        if generation.is_sampling(settings) and settings.get("do_sample") is None:
            raise InputError(
                f"task {request.task_name} samples (temperature {settings['temperature']}) without do_sample: true, "
                f"so --use_cache would give every repeat the same answer on the next run; add do_sample=true to "
                f"--gen_kwargs, or use --model_args responses=FOLDER"
            )
