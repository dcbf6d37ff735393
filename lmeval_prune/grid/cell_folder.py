"""Write what is measured of a cell: its folder, which lm-eval's own writer fills, and its distances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from lm_eval.loggers import EvaluationTracker
from pyarrow import parquet

from lmeval_prune.artefacts import digest, file_name, new_folder, read_json, write_artefact, write_table
from lmeval_prune.distance.summary import COLUMNS
from lmeval_prune.grid.cells import Cell
from lmeval_prune.grid.folder import CELL, VERSION, GridFolder
from lmeval_prune.models.head_router import POLICIES


class _Writer(EvaluationTracker):
    """lm-eval's writer, whose files have the cell's key in place of the date: the same names in every run."""

    key = ""

    @property
    def date_id(self) -> str:
        """Return the key."""
        return self.key

    @date_id.setter
    def date_id(self, _: str) -> None: ...


def write_cell(folder: GridFolder, cell: Cell, lm: Any, results: dict[str, Any], ran: dict[str, Any]) -> None:
    """Write the folder of a cell.

    Args:
        folder: the grid's folder.
        cell: the cell.
        lm: the model that answered.
        results: lm-eval's results and samples; lm-eval's writer changes them.
        ran: how the evaluation ran.
    """
    model_args, evaluation = cell.model_args(folder.prepared), cell.evaluation
    results["config"] |= {"model": cell.model, "model_args": model_args, "batch_size": cell.batch_size}
    samples = results.pop("samples")
    template = evaluation["apply_chat_template"]
    with new_folder(folder.place("evaluate", cell.key)) as target:
        writer = _Writer(output_path=str(target / "results.json"))
        writer.key = file_name(cell.key)
        writer.general_config_tracker.log_experiment_args(
            model_source=cell.model,
            model_args=model_args,
            system_instruction=evaluation["system_instruction"],
            chat_template=lm.chat_template(template) if template else None,
            fewshot_as_multiturn=evaluation["fewshot_as_multiturn"],
        )
        writer.save_results_aggregated(results=results, samples=samples)
        for task, rows in samples.items():
            writer.save_results_samples(task_name=file_name(task), samples=rows)
        content = cell.entry(model_args) | {
            "selected_questions": sorted(selected_questions(cell.variant.model_args)),
            "seed": cell.variant.seed,
            **{name: getattr(cell, name) for name in ("evaluation", "metadata", "identity", "answers")},
            **{name: getattr(cell, name) for name in ("batch_size", "device", "engine")},
            "ran": ran,
        }
        write_artefact(target / "cell.json", CELL, VERSION, content)
        # lm-eval only logs an error of its writer, and leaves what it has written
        lines = {f"samples_{file_name(task)}_{writer.key}.jsonl": len(rows) for task, rows in samples.items()}
        whole = [sum(1 for _ in (target / name).open("rb")) == count for name, count in lines.items()]
        if not all(whole) or not (target / f"results_{writer.key}.json").read_bytes().endswith(b"}"):
            raise RuntimeError("lm-eval could not write the results or the samples")


def selected_questions(model_args: dict[str, Any]) -> set[str]:
    """Return digests of the questions by which a variant was selected: those of its router and of its outcome store."""
    questions: set[str] = set()
    for name in ("router", "router_store"):
        if isinstance(value := model_args.get(name), str) and value not in POLICIES:
            folder = Path(value).expanduser()
            if (table := folder / "questions.parquet").is_file():
                texts = parquet.read_table(table, columns=["question"])["question"].to_pylist()
                questions |= {digest(text) for text in texts}
            elif (router := folder / "router.json").is_file():
                questions |= set(read_json(router).get("seen", ()))
    return questions


def write_distances(folder: GridFolder, key: str, texts: pd.DataFrame) -> None:
    """Write the distances of a cell's variant by text, see `Distances.frame`; those of tokens as lists of float32."""
    table = pa.Table.from_pandas(texts, preserve_index=False)
    for name in COLUMNS:
        position = table.schema.get_field_index(name)
        table = table.set_column(position, name, table[name].cast(pa.list_(pa.float32())))
    write_table(folder.place("distance", key), table)
