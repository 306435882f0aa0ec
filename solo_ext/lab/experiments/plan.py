"""Plans the runs of a benchmark."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solo_ext import host
from solo_ext.config.check import check_run
from solo_ext.config.compose import compose
from solo_ext.config.schema import Images
from solo_ext.core.errors import ConfigError, suggest_name
from solo_ext.data.images import Split, images_fingerprint, open_images
from solo_ext.lab.evaluation.evaluate import PROTOCOLS
from solo_ext.lab.experiments.records import Kind, Record
from solo_ext.lab.experiments.settings import BenchmarkSettings, Row, Stage
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.run_dir import extensions
from solo_ext.losses import LOSSES
from solo_ext.memory.teacher import TeacherKwargs
from solo_ext.methods.registry import METHODS
from solo_ext.pretrained.recognise import recognise_source
from solo_ext.pretrained.teachers import load_teacher
from solo_ext.pretrained.weights import weights_digest


@dataclass(frozen=True)
class PlannedRun:
    """One cell of the grid; key, kind and evaluation are as in its record.

    Attributes:
        config: composed, not yet checked; ``teacher.path`` is set when the run is started.
        baseline: name of a baseline that is evaluated instead of training.
        threads: CPU threads.
        teacher: name of the run directory of its teacher, or ``None``.
        minutes: that it takes by the settings, or ``None``.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> run = make_plan(read_benchmark("demo", ["seeds=[1]"]), ["simclr"])[0]
    >>> run.dataset, run.row, run.seed, run.folder.startswith("digits-default-simclr-1-")
    ('digits', 'simclr', 1, True)
    """

    key: str
    dataset: str
    budget: str
    row: str
    kind: Kind
    seed: int
    config: dict[str, Any]
    baseline: str | None
    evaluation: dict[str, Any]
    threads: int
    teacher: str | None
    minutes: float | None

    @property
    def folder(self) -> str:
        """Name of its run directory."""
        return "-".join((self.dataset, self.budget, self.row, str(self.seed), self.key))


def make_plan(
    settings: BenchmarkSettings,
    rows: Sequence[str] | None = None,
    devices: int = 1,
    nodes: int = 1,
    stages: Sequence[str] | None = None,
    records: Sequence[Record] = (),
) -> list[PlannedRun]:
    """Plans the runs stage by stage; in each the teacher first if it has a student.

    The ``devices`` on each of the ``nodes`` of a run share its batch.

    Args:
        settings: the benchmark.
        rows: only these; null: all.
        devices: of a run, on each of its nodes.
        nodes: of a run.
        stages: only these; null: all.
        records: those that are known, which say which rows a stage with ``near`` has.

    Raises:
        ConfigError: an unknown row or stage, two equal rows, or an invalid config.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> plan = make_plan(read_benchmark("demo", ["seeds=[1]"]))
    >>> [(run.row, run.seed) for run in plan]
    [('teacher', 0), ('simclr', 1), ('seed', 1)]
    """
    settings.check_rows("--rows", rows or [])
    for name in stages or ():
        if name not in settings.stages:
            remedy = suggest_name(name, settings.stages) if settings.stages else "leave it out"
            raise ConfigError("--stages", name, "no such stage", remedy)
    every = [settings.stages[name] for name in stages] if stages else settings.every_stage()
    found: dict[str, PlannedRun] = {}
    for stage in every:
        for dataset in settings.datasets:
            shares, names = (devices, nodes), stage.rows
            if stage.near is not None:
                names = _near(settings, dataset, stage, records, shares)
            names = [name for name in names if rows is None or name in rows]
            for run in _stage(settings, dataset, stage, names, shares):
                other = found.setdefault(run.key, run)
                if other.folder != run.folder:
                    words = "row", "budget", "dataset"
                    key = next(k for k in words if vars(other)[k] != vars(run)[k])
                    same = [vars(other)[key], vars(run)[key]]
                    remedy = "leave one of them out, or change it"
                    raise ConfigError(f"{key}s", same, "are the same run", remedy)
    return list(found.values())


def _near(
    settings: BenchmarkSettings,
    dataset: str,
    stage: Stage,
    records: Sequence[Record],
    shares: tuple[int, int],
) -> list[str]:
    """The rows of a stage that lie near the first of their bases, and these bases."""
    assert settings.headline is not None
    pairs = {name: base for name in stage.rows for base in settings.rows[name].bases[:1]}
    first = stage.model_copy(update={"seeds": settings.seeds[:1]})
    runs = _stage(settings, dataset, first, [*{*pairs, *pairs.values()}], shares)
    # By their keys: a row may have had another name or other settings.
    by_key = {record["key"]: record["scores"].get(settings.headline[0]) for record in records}
    scores = {run.row: by_key.get(run.key) for run in runs}
    kept: set[str] = set()
    for name, base in pairs.items():
        own, other = scores.get(name), scores.get(base)
        if own is not None and other is not None and abs(own - other) <= (stage.near or 0):
            kept |= {name, base}
    return [name for name in settings.rows if name in kept]


def _stage(
    settings: BenchmarkSettings,
    dataset: str,
    stage: Stage,
    names: Sequence[str],
    shares: tuple[int, int],
) -> list[PlannedRun]:
    """The runs of a stage: the teacher if a student is among them, then seed by seed."""
    teacher = None
    if settings.teacher is not None and any(settings.rows[n].baseline is None for n in names):
        of = stage.teacher_budget or stage.budget
        known = [s for s in settings.every_stage() if s.budget == of]
        minutes = known[0].minutes if known else None
        taught = stage.model_copy(update={"budget": of, "minutes": minutes})
        (teacher,) = _runs(settings, dataset, taught, settings.teacher, shares, None)
    runs: list[PlannedRun] = []
    for name in names:
        if name != settings.teacher:
            runs += _runs(settings, dataset, stage, name, shares, teacher)
    # Seed by seed, so that what is finished early can be compared.
    runs.sort(key=lambda run: stage.seeds.index(run.seed))
    if teacher and (settings.teacher in names or any(run.teacher for run in runs)):
        return [teacher, *runs]
    return runs


def _runs(
    settings: BenchmarkSettings,
    dataset: str,
    stage: Stage,
    name: str,
    shares: tuple[int, int],
    teacher: PlannedRun | None,
) -> list[PlannedRun]:
    """Plans the runs of a row, one for each seed."""
    row = settings.rows[name]
    config = composed(settings, dataset, stage.budget, row)
    run = check_run(config)
    if shares != (1, 1):
        _share_batch(config, *shares)
    kind: Kind = "plugin"
    if row.baseline is not None:
        kind = "baseline"
    elif name == settings.teacher:
        kind = "teacher"
    elif config["method"] in BUILTIN_KWARGS:
        kind = "host"
    section = (config.get("method_kwargs") or {}).get("teacher")
    if section is None or _names_its_teacher(row, section):
        teacher = None
    if row.baseline is None and not run.checkpoint.enabled:
        problem = "a benchmark evaluates the last checkpoint"
        raise ConfigError("checkpoint.enabled", False, problem, "leave it out")
    data = run.data
    labels = any(PROTOCOLS[protocol].needs_labels for protocol in settings.evaluation)
    if labels and (data.no_labels or (data.val_path is None and data.holdout is None)):
        key, value = ("no_labels", True) if data.no_labels else ("val_path", None)
        problem = "a benchmark evaluates on labelled images"
        remedy = "give class folders, or data.holdout, or an evaluation without labels"
        raise ConfigError(f"data.{key}", value, problem, remedy)
    if run.backbone.weights is not None:
        recognise_source(run.backbone.weights, "backbone.weights")
    checked = copy.deepcopy(config)
    if teacher is not None:
        # The teacher has not been trained yet: any path that exists will do.
        checked["method_kwargs"]["teacher"]["path"] = os.sep
    prepare(checked)
    taught_by = teacher.key if teacher else None
    if teacher is None and section is not None and section.get("path") is not None:
        taught_by = _teacher_digest(json.dumps(section))
    images = _images(run.data.model_dump_json())
    runs = []
    for seed in settings.seeds_of(name, stage):
        given = copy.deepcopy(config) | {"seed": seed}
        runs.append(
            PlannedRun(
                key=_key(given, images, row, settings, taught_by),
                dataset=dataset,
                budget=stage.budget,
                row=name,
                kind=kind,
                seed=seed,
                config=given,
                baseline=row.baseline,
                evaluation=settings.evaluation,
                threads=settings.threads,
                teacher=teacher.folder if teacher else None,
                minutes=stage.minutes,
            )
        )
    return runs


def _names_its_teacher(row: Row, section: Mapping[str, Any]) -> bool:
    """Whether a row has a teacher of its own, and not the benchmark's."""
    own = "method_kwargs.teacher=", "method_kwargs.teacher.path="
    return section.get("layout", "run") != "run" or any(
        change.lstrip("+").startswith(own) for change in row.changes
    )


@functools.cache
def _teacher_digest(section: str) -> str:
    return load_teacher(TeacherKwargs(**json.loads(section))).digest


def composed(settings: BenchmarkSettings, dataset: str, budget: str, row: Row) -> dict[str, Any]:
    """The config of a row, not yet checked.

    >>> from solo_ext.lab.experiments.settings import read_benchmark
    >>> composed(read_benchmark("demo"), "digits", "default", Row(config="pcl"))["method"]
    'pcl'
    """
    # A baseline takes images and backbone from the first row that trains, other than the teacher.
    others = (r.config for n, r in settings.rows.items() if r.config and n != settings.teacher)
    config = row.config or next(others, None)
    if config is None:
        raise ConfigError("rows", list(settings.rows), "no row trains", "give one a config")
    own = [] if row.config is None else row.changes
    folder = None if settings.config_path is None else Path(settings.config_path)
    of_all = [*settings.datasets[dataset], *settings.budgets[budget]]
    return compose(f"{dataset}/{config}", [*own, *of_all], folder)


def _share_batch(config: dict[str, Any], devices: int, nodes: int) -> None:
    """Divides the batch among devices; the total, and so the learning rate, stays the same."""
    batch = config["optimizer"]["batch_size"]
    if batch % (devices * nodes):
        option = "--devices" if nodes == 1 else "--devices * --nodes"
        problem = f"the batch of {batch} cannot be shared out evenly"
        raise ConfigError(option, devices * nodes, problem, "take a number that divides it")
    config["devices"] = str(devices)
    if nodes > 1:
        config["num_nodes"] = nodes
    config["optimizer"] = {**config["optimizer"], "batch_size": batch // (devices * nodes)}


def _key(
    config: Mapping[str, Any],
    images: list[str | None],
    row: Row,
    settings: BenchmarkSettings,
    teacher: str | None,
) -> str:
    """Digest of a run; it depends on its images and teacher, but not on paths or the run's name."""
    relevant = copy.deepcopy(dict(config))
    for name in ("name", "checkpoint", "loggers", "wandb", "auto_resume", "hydra"):
        relevant.pop(name, None)
    for name in ("train_path", "val_path", "num_workers"):
        relevant["data"].pop(name, None)
    if teacher is not None:
        relevant["method_kwargs"]["teacher"]["path"] = teacher
    word = relevant["backbone"].pop("weights", None)
    if word is not None:
        relevant["backbone"]["weights"] = weights_digest(word) or word
    content = {
        "config": relevant,
        "images": images,
        "baseline": row.baseline,
        "evaluation": settings.evaluation,
        "threads": settings.threads,
        "host": host.load().info.fingerprint,
    }
    if code := _code_of_others(config):
        content["code"] = code
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _code_of_others(config: Mapping[str, Any]) -> dict[str, str]:
    """Versions and digests of other packages that define the method or the loss of a config."""
    loss = (config.get("method_kwargs") or {}).get("loss") or ""
    entries = METHODS.get(config["method"]), LOSSES.get(loss)
    found = extensions()
    return {e.origin: found[e.origin] for e in entries if e is not None and e.origin in found}


@functools.cache
def _images(data: str) -> list[str | None]:
    """Digests that identify the training and validation images of a section ``data``."""
    section = Images.model_validate_json(data)
    without = section.val_path is None and section.holdout is None
    splits: list[Split] = ["train"] if without else ["train", "val"]
    return [images_fingerprint(open_images(section, s), by_name=True) for s in splits]
