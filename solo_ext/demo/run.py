"""The main job on real images in minutes: pretrain, evaluate, compare, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from solo_ext import host
from solo_ext.config.compose import compose
from solo_ext.data.datasets import class_names
from solo_ext.data.loaders import fixed_loader
from solo_ext.demo.report import Curve, FeatureMap, Report, Row, write_report
from solo_ext.evaluation.features import extract_features
from solo_ext.evaluation.linear import few_label_probe, linear_probe
from solo_ext.evaluation.protocols import Features
from solo_ext.host.backbones import build_backbone
from solo_ext.methods import METHODS
from solo_ext.modules.knn import knn_accuracy
from solo_ext.pretrained.runs import load_pretrained
from solo_ext.training.prepare import Prepared, prepare
from solo_ext.training.pretrain import PretrainResult, pretrain
from solo_ext.training.records import environment, read_metrics
from solo_ext.training.run_dir import METRICS

COMPARED = ("debiased", "simclr", "mocov2plus")
EPOCHS = 30
PER_CLASS, DRAWS, K, TEMPERATURE = 10, 5, 20, 0.07


class Measured(NamedTuple):
    """A row of the table and the features behind it."""

    row: Row
    features: Features


def run_demo(out: Path, *, epochs: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Pretrains three methods on scikit-learn's digits under one budget and compares them.

    A run that an earlier call finished, or left unfinished, in ``out`` is used or continued.

    Args:
        out: folder of the runs and ``report.html``.
        epochs: of each method; :data:`EPOCHS` by default.
        quiet: prints nothing on standard output.

    Returns:
        A record of everything that the report shows.

    Raises:
        UserError: solo-learn is missing, or ``out`` holds runs of another budget.
    """
    begin = time.monotonic()
    budget = epochs or EPOCHS
    configs = {m: compose(f"digits/{m}", [f"max_epochs={budget}"]) for m in COMPARED}
    prepared = {m: prepare(config) for m, config in configs.items()}
    measured: list[Measured] = []
    curves: list[Curve] = []
    with _progress() as bar:
        for name, run in prepared.items():
            with _task(bar, f"pretrain {name}", budget) as step:
                result = pretrain(
                    run,
                    run_dir=out / "runs" / name,
                    callbacks=[_Epochs(step)],
                    show_progress=False,
                )
            measured.append(_measure_run(name, run, result))
            curves.append(_curve(name, result.run_dir))
        first = prepared[COMPARED[0]]
        measured.append(_measure_backbone("random backbone", first, _random_backbone(first)))
        measured.append(_measure_backbone("raw pixels", first, _Pixels()))
    seconds = time.monotonic() - begin
    report = _report(first, measured, curves, budget, seconds)
    page = write_report(report, out / "report.html")
    if not quiet:
        _print(measured, page, seconds)
    return {
        "report": str(page),
        "seconds": round(seconds, 1),
        "epochs": budget,
        "rows": [dataclasses.asdict(m.row) for m in measured],
        "environment": environment(host.load().info),
    }


class _Pixels(nn.Module):
    """The image itself; digits are grey, one channel says it all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0].flatten(1)


class _Epochs(Callback):
    """Moves the bar, also past epochs that an earlier call has trained."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self.step = step

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step(trainer.current_epoch + 1)


def _measure_run(name: str, run: Prepared, result: PretrainResult) -> Measured:
    assert result.checkpoint is not None
    backbone = load_pretrained(result.checkpoint).backbone
    features = _features(run, backbone)
    kind = "plugin" if name in METHODS else "host"
    return Measured(_row(name, kind, features, result.seconds, result.images_per_second), features)


def _measure_backbone(label: str, run: Prepared, backbone: nn.Module) -> Measured:
    features = _features(run, backbone)
    return Measured(_row(label, "baseline", features, None, None), features)


def _features(run: Prepared, backbone: nn.Module) -> Features:
    assert run.val is not None
    parts: list[Any] = []
    for images in (run.train, run.val):
        parts += extract_features(backbone, fixed_loader(run.given, images))
    return Features(*parts)


def _row(
    label: str, kind: str, features: Features, seconds: float | None, rate: float | None
) -> Row:
    train, train_targets = features.train, features.train_targets
    test, test_targets = features.test, features.test_targets
    everything = train, train_targets, test, test_targets
    mean, deviation, _ = few_label_probe(*everything, per_class=PER_CLASS, draws=DRAWS)
    knn = knn_accuracy(
        test, test_targets, train, train_targets, ks=(K,), temperatures=(TEMPERATURE,)
    )
    return Row(
        label=label,
        kind=kind,
        knn=knn[K, TEMPERATURE][1],
        few_label_mean=mean,
        few_label_std=deviation,
        linear=linear_probe(*everything).accuracy,
        seconds=seconds,
        images_per_second=rate,
    )


def _random_backbone(run: Prepared) -> nn.Module:
    pl.seed_everything(run.given["seed"], verbose=False)
    backbone, _ = build_backbone(
        host.load().backbones,
        run.given["backbone"]["name"],
        run.given["backbone"]["kwargs"],
        method=run.given["method"],
        dataset=run.given["data"]["dataset"],
    )
    return backbone


def _curve(name: str, run_dir: Path) -> Curve:
    epochs, losses = [], []
    for record in read_metrics(run_dir / METRICS):
        for key, value in record.items():
            named = key.startswith("train_") and key.endswith("loss_epoch")
            if named and key != "train_class_loss_epoch" and value is not None:
                epochs.append(record["epoch"] + 1)
                losses.append(value)
    return Curve(name, epochs, losses)


def _map(measured: Measured, names: list[str]) -> FeatureMap:
    from sklearn.manifold import TSNE

    features = torch.nn.functional.normalize(measured.features.test, dim=1).numpy()
    points = TSNE(n_components=2, init="pca", random_state=0).fit_transform(features)
    return FeatureMap(measured.row.label, points, measured.features.test_targets.numpy(), names)


def _report(
    run: Prepared, measured: list[Measured], curves: list[Curve], epochs: int, seconds: float
) -> Report:
    names = class_names(run.train)
    assert run.val is not None
    found = environment(host.load().info)
    host_name = f"{found['host']['generation']} ({found['host']['fingerprint']})"
    given = run.given
    kwargs = ", ".join(f"{k} {v}" for k, v in given["backbone"]["kwargs"].items())
    by_label = {m.row.label: m for m in measured}
    pixels, random_row = by_label["raw pixels"].row, by_label["random backbone"].row
    return Report(
        title="solo_ext demo: self-supervised pretraining on handwritten digits",
        rows=[m.row for m in measured],
        curves=curves,
        maps=[_map(by_label[name], names) for name in (COMPARED[0], "random backbone")],
        environment={
            "solo_ext": found["solo_ext"],
            "solo-learn": host_name,
            "Python": found["python"],
            "torch": str(found["packages"]["torch"]),
            "lightning": str(found["packages"]["lightning"]),
            "timm": str(found["packages"]["timm"]),
            "processor": f"{found['processor']}, {found['cores']} cores",
            "GPU": ", ".join(found["gpus"]) or "none",
            "platform": found["platform"],
            "whole demo": f"{seconds:.0f} s",
        },
        config={
            "data": f"scikit-learn's digits, {len(run.train)} training and {len(run.val)} "
            f"test images of 32 x 32 pixels",
            "backbone": f"{given['backbone']['name']} ({kwargs})",
            "budget": f"{epochs} epochs of batch {given['optimizer']['batch_size']} each, one "
            f"seed ({given['seed']})",
        },
        notes=[
            f"10 labels per class: linear probe on {DRAWS} class-balanced draws, the same for "
            "every row; mean and standard deviation over the draws, not over training seeds.",
            f"kNN: cosine, k = {K}, temperature {TEMPERATURE}, all training labels. On digits raw "
            f"pixels reach {pixels.knn:.1f} there, so it says little; few labels say more.",
            f"A random backbone of the same shape reaches {random_row.few_label_mean:.1f} with "
            "10 labels per class: the difference to it is what pretraining learned.",
            "One seed and minutes of training show that everything works; they rank no methods.",
        ],
    )


def _print(measured: list[Measured], page: Path, seconds: float) -> None:
    table = Table(title="digits, accuracy in percent", title_justify="left")
    for title in ("", "", "10 labels/class", "linear", f"kNN k={K}", "seconds"):
        table.add_column(title, justify="left" if not title else "right")
    for row in sorted((m.row for m in measured), key=lambda r: -r.few_label_mean):
        table.add_row(
            row.label,
            row.kind,
            f"{row.few_label_mean:.1f} ± {row.few_label_std:.1f}",
            f"{row.linear:.1f}",
            f"{row.knn:.1f}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"{seconds:.0f} s in all; report: {page}", highlight=False, soft_wrap=True)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def _task(bar: Progress, label: str, total: int) -> Iterator[Callable[[int], None]]:
    task: TaskID = bar.add_task(label, total=total)
    yield lambda done: bar.update(task, completed=done)
    bar.update(task, completed=total)
