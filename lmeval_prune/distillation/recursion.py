"""Recursive distillation (Algorithm 2): prune the least important parts and train the student, stage by stage.

The unpruned model teaches the first stage; each student teaches the next one. Folders of stages are written atomically,
so an interrupted distillation resumes with the first incomplete stage.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from lmeval_prune.architectures import loadable_fingerprints, map_model, weights_fingerprint
from lmeval_prune.artefacts import ENVELOPE, Work, content_digest, output_lock, write_artefact
from lmeval_prune.athena.checkpoint import SETTINGS
from lmeval_prune.checkpoints import embedded
from lmeval_prune.checkpoints.pruned import read_manifest, removed_blocks
from lmeval_prune.comparison.distance import Summary, summarize_texts
from lmeval_prune.comparison.tokens import logits_of, other_distances
from lmeval_prune.distillation.features import LayerMap
from lmeval_prune.distillation.host import NOTE, SCHEMA, VERSION, Host, TrainingExamples, read_note
from lmeval_prune.distillation.lessons import read_lessons
from lmeval_prune.distillation.options import DistillOptions
from lmeval_prune.distillation.stages import check_pruning, cut_stage, foreign_methods
from lmeval_prune.distillation.teachers import compared_layers, teacher_of
from lmeval_prune.distillation.trainer import DistillTrainer, check_arguments
from lmeval_prune.errors import InputError
from lmeval_prune.reporting.plot_style import COLOURS
from lmeval_prune.training.curves import draw
from lmeval_prune.training.resuming import check_contents, check_resumable, check_settings, result_settings

TITLE = "Recursive distillation, stage by stage"
LINES = {
    "loss": ("all (λ₁·distillation + λ₂·task)", COLOURS[7], "-"),
    "response": ("response", COLOURS[0], "-"),
    "feature": ("feature", COLOURS[2], "-"),
    "task": ("task", COLOURS[1], "-"),
    "eval_loss": ("all, validation", COLOURS[6], "--"),
}
LONGEST_WAIT = timedelta(days=7)  # of processes for each other
_ENVELOPE = (*ENVELOPE, "files")  # fields that each written artefact gets again


def distill(options: DistillOptions, host: Host | None = None) -> dict[str, Any]:
    """Prune and distil a model and write it; resume an interrupted distillation.

    Stages are in `OUTPUT.distilling` until the output is complete. A complete output stays as it is. `InputError` if an
    option is invalid (before any weights are read, if possible), or `output` is of other options or data.
    """
    this_process()  # before transformers makes the group of processes, with a shorter wait
    target, host = Path(options.output), host or make_host(options)
    options = host.options
    settings = result_settings(options)
    for name, folder in (("pretrained", options.pretrained), ("teacher", options.other_teacher)):
        if folder:
            settings |= {name: host.identity(folder), f"{name}_files": host.configuration(folder)}
    settings |= foreign_methods(options)
    if options.prompts:
        settings |= {"prompts": "", "prompts_file": content_digest(options.prompts)}
    work = target.with_name(f"{target.name}.distilling")
    if (target / NOTE).is_file():
        stored = read_note(target)["options"]
        check_settings(settings, stored, target)
        check_contents(host.contents(), stored, target)
    else:
        if target.exists() and (target.is_file() or any(target.iterdir())):
            raise InputError(f"{target} exists and is not a distilled model; name another output")
        check_resumable(work, settings)
        check(host)
        with ExitStack() as stack:
            if this_process().is_main_process:
                stack.enter_context(output_lock(target))
            _run_stages(host, settings, target, work)
    if this_process().is_main_process:
        shutil.rmtree(work, ignore_errors=True)
    return read_note(target)


def this_process() -> Any:
    """Return accelerate's state of this process, for synchronisation.

    The first call sets how long processes wait for each other: one of them scores heads or asks the teacher alone,
    often for longer than the half hour after which PyTorch would give up.
    """
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)


def make_host(options: DistillOptions) -> Host:
    """Make the host for the model; `InputError` if the options do not suit it."""
    folder = Path(options.pretrained)
    if (folder / SETTINGS).is_file():
        from lmeval_prune.distillation.athena_host import AthenaHost

        return AthenaHost(options)
    embedded.check_name(options.pretrained)
    from lmeval_prune.distillation.language_host import LanguageHost

    return LanguageHost(options)


def check(host: Host) -> None:
    """Check options, model and teacher without reading weights; `InputError` if they do not fit."""
    options = host.options
    skeleton = host.skeleton(options.pretrained)
    model_map = map_model(skeleton)
    host.check_layers()
    check_pruning(options, model_map)
    check_arguments(options)
    if options.other_teacher:
        host.check_teacher(options.other_teacher)
    host.check()


def _run_stages(host: Host, settings: dict[str, Any], target: Path, work: Path) -> None:
    """Run the incomplete stages in order."""
    options = host.options
    settings = {**settings, **{name: content() for name, content in host.contents().items()}}
    progress = Work(work, settings)
    examples = host.examples()
    if not examples.validation and options.best_by == "loss":  # an ATHENA's is that of its own training
        raise InputError("best_by needs a validation split, and the model was trained without one; give validation")
    this_process().wait_for_everyone()
    if this_process().is_main_process:
        progress.begin()
        print(f"texts: {_counts(examples.note)}", flush=True)
    if options.asks_teacher and (options.epochs or not examples.questions):  # scores read answers to prompts alone
        examples = _taught(host, examples, work)
    note = {"model": options.pretrained, "options": settings, "material": examples.note, "stages": []}
    parent = options.pretrained
    for number in range(1, options.stages + 1):
        folder = target if number == options.stages else work / f"stage{number}"
        if not (folder / NOTE).is_file():
            Stage(host, examples, number, parent, note, work, folder).run()
        parent, note = str(folder), read_note(folder)


def _taught(host: Host, examples: TrainingExamples, work: Path) -> TrainingExamples:
    """Return the examples with answers of the teacher, which one process asks once."""
    process = this_process()
    if process.is_main_process and read_lessons(work) is None:
        print("asking the teacher", flush=True)
        host.ask_teacher(examples, work, process.device)
    process.wait_for_everyone()
    examples = host.taught(examples, work)
    if process.is_main_process:
        print(f"teacher: {_counts(examples.note['lessons'])}", flush=True)
    return examples


def _counts(note: Mapping[str, Any]) -> str:
    """Return the whole numbers of a note as text: `train 7, prompts (empty 1)`."""
    parts = [f"{name} {value}" for name, value in note.items() if isinstance(value, int)]
    parts += [f"{name} ({text})" for name, part in note.items() if isinstance(part, dict) and (text := _counts(part))]
    return ", ".join(parts)


@dataclass
class Stage:
    """A stage of a distillation."""

    host: Host
    examples: TrainingExamples
    number: int  # from 1
    parent: str  # folder or name of the model to prune, which is also the teacher
    note: dict[str, Any]  # fields of `distillation.json` after the previous stage
    work: Path  # folder of incomplete files
    folder: Path  # folder of the result
    process: Any = field(default_factory=this_process)

    def run(self) -> None:
        """Cut, train and write; an interrupted stage resumes from the cut model or its last checkpoint."""
        options = self.host.options
        smaller, checkpoints = (self.work / f"stage{self.number}.{name}" for name in ("cut", "training"))
        if self.process.is_main_process and not smaller.is_dir():
            print(f"stage {self.number} of {options.stages}: scoring and cutting", flush=True)
            model: Any = self.host.read(self.parent).to(self.process.device)
            finished = self.work / f"stage{self.number}.scoring"
            result = cut_stage(self.host, model, self.number, self.examples, finished)
            self.host.write(self.host.with_backbone(model, result.model.cpu()), result.manifest, smaller)
            shutil.rmtree(finished, ignore_errors=True)
            del model, result
        self.process.wait_for_everyone()
        manifest = read_manifest(self.host.backbone_folder(smaller)) or {}
        student: Any = self.host.read(str(smaller))
        training: dict[str, Any] = {"best_epoch": 0, "log": []}
        if options.epochs:
            training = self._train(student, manifest["stages"], checkpoints)
        self.process.wait_for_everyone()
        if self.process.is_main_process:
            distance = self._distance(student.eval())
            self._write(student.cpu(), manifest, training | ({"distance": distance} if distance else {}))
            shutil.rmtree(smaller, ignore_errors=True)
            shutil.rmtree(checkpoints, ignore_errors=True)
        self.process.wait_for_everyone()

    def _train(self, student: Any, stages: list[dict[str, Any]], checkpoints: Path) -> dict[str, Any]:
        """Train the student; return the best epoch and the log."""
        host = self.host
        teacher = host.read(teacher_of(host, self.parent)) if host.options.uses_teacher else None
        layers = compared_layers(host, self.number, stages)
        return DistillTrainer(host, student, teacher, layers, self.examples, checkpoints, self.number).run()

    def _distance(self, student: Any) -> Summary:
        """Summarise the distance of the student's answers from the unpruned model's; empty without texts to compare."""
        texts = self.host.compared_texts(self.examples)
        if not texts:
            return {}
        dense: Any = self.host.read(self.host.options.pretrained)
        device = self.process.device
        return summarize_texts(other_distances(logits_of(dense.to(device)), logits_of(student.to(device)), texts))

    def _write(self, student: Any, manifest: dict[str, Any], training: dict[str, Any]) -> None:
        """Write the trained model with `distillation.json`; after the last stage also loss curves and card."""
        head_share, channel_share = self.host.options.removal().shares(self.number)
        unpruned = LayerMap.of(manifest["stages"][-self.number :])
        stage = {
            "stage": self.number,
            "ratio": head_share,
            "ffn_ratio": channel_share,
            "removed": manifest["stages"][-1]["removed"],
            # labels, head numbers and names of blocks of the unpruned model
            "heads": {unpruned.layers[label]: heads for label, heads in unpruned.heads.items()},
            "removed_blocks": removed_blocks(manifest["stages"][-self.number :])[-1],
            "parameters": sum(parameter.numel() for parameter in student.parameters()),
            **training,
        }
        note = {**_content(self.note), "stages": [*self.note["stages"], stage]}
        backbone = self.host.backbone(student)
        manifest = {
            **_content(manifest),
            "weights": loadable_fingerprints(backbone, weights_fingerprint(backbone)),
            **{name: self.examples.note[name] for name in ("trained_on", "validated_on")},
        }

        def add_files(folder: Path) -> None:
            write_artefact(folder / NOTE, SCHEMA, VERSION, note)
            if self.number == self.host.options.stages:
                if self.host.options.epochs:
                    draw(note["stages"], LINES, TITLE, folder / "distillation")
                self.host.write_card(student, manifest, note, folder)

        self.host.write(student, manifest, self.folder, add_files)


def _content(artefact: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an artefact without its envelope."""
    return {name: value for name, value in artefact.items() if name not in _ENVELOPE}
