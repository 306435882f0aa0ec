"""Accuracy of the methods beside their base methods, a random backbone and raw pixels.

    python benchmarks/accuracy.py methods digits --out runs/accuracy
    python benchmarks/accuracy.py methods cifar10_cpu --budget max_epochs=10 --out runs/accuracy
    python benchmarks/accuracy.py methods digits --rows pcl pcl-weight-0 --out runs/accuracy
    python benchmarks/accuracy.py distillation digits --out runs/accuracy

The rows stand in ``configs/solo_ext/benchmark``. Every run of a data set has the same epochs, batch
size and backbone, but for teachers, which have their own; a student sees one view of an image where
the self-supervised methods see two. A row that is already in OUT is not measured again, a run that
was stopped goes on. The probes hold all features and logits in memory. kNN: k = 20, temperature
0.07; linear: penalty chosen on held-out training images; few: linear on 10 labels per class, mean
of 5 draws. PCL and what it is compared with, NMI: k-means (cold, best of 5 starts) on the momentum
embeddings of the training images against their labels, at every granularity.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import yaml
from scipy.stats import t as student_t
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor, nn

from solo_ext import host
from solo_ext.clustering import multi_granularity_kmeans
from solo_ext.config.compose import compose
from solo_ext.data.loaders import fixed_loader
from solo_ext.evaluation.features import extract_features
from solo_ext.evaluation.linear import few_label_probe, linear_probe
from solo_ext.host.backbones import build_backbone
from solo_ext.modules.knn import knn_accuracy
from solo_ext.paths import config_root
from solo_ext.pretrained.runs import load_pretrained
from solo_ext.training.prepare import Prepared, prepare
from solo_ext.training.pretrain import pretrain
from solo_ext.training.records import environment
from solo_ext.training.run_dir import write_text

BASELINES = ("random-backbone", "raw-pixels")
TEACHER_SEED = 0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRIDS = config_root() / "solo_ext" / "benchmark"


class Row(NamedTuple):
    """What a row of the table trains.

    Attributes:
        config: name within the data set's folder.
        changes: of its settings.
        bases: rows that it is compared with, seed by seed.
    """

    config: str
    changes: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()


class Grid(NamedTuple):
    """What is compared.

    Attributes:
        rows: by name.
        default: the rows that are measured if none are named.
        teacher: the row whose run is the teacher of all others, if any.
    """

    rows: dict[str, Row]
    default: tuple[str, ...]
    teacher: str | None = None


def read_grid(name: str, config: str | None, teacher: str | None) -> Grid:
    """Reads a grid.

    Args:
        name: of a file of ``configs/solo_ext/benchmark``.
        config: in place of that of every row, unless null.
        teacher: config of the teacher, unless the grid has one of its own.
    """
    given = yaml.safe_load((GRIDS / f"{name}.yaml").read_text())
    rows = {
        n: Row(config or r["config"], tuple(r.get("changes", ())), tuple(r.get("bases", ())))
        for n, r in given["rows"].items()
    }
    if teacher is not None:
        rows["teacher"] = Row(teacher)
    named = "teacher" if teacher is not None else given.get("teacher")
    return Grid(rows, tuple(given["default"]), named)


class RawPixels(nn.Module):
    """The image itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def features_of(run: Prepared, network: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train features and targets, test features and targets."""
    assert run.val is not None
    train, train_targets = extract_features(
        network, fixed_loader(run.given, run.train), device=DEVICE
    )
    test, test_targets = extract_features(network, fixed_loader(run.given, run.val), device=DEVICE)
    return train, train_targets, test, test_targets


def nmi_of(embeddings: Tensor, targets: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """NMI with the labels at every granularity."""
    unit = F.normalize(embeddings, dim=1)
    found = multi_granularity_kmeans(unit, list(sizes), restarts=5, backend="torch")
    pairs = zip(sizes, found, strict=True)
    return {
        f"nmi_{k}": float(normalized_mutual_info_score(targets.numpy(), c.assignments.numpy()))
        for k, c in pairs
    }


def measure(
    run: Prepared, network: nn.Module, embedder: nn.Module | None = None, sizes: Sequence[int] = ()
) -> dict[str, float]:
    """Every number of a row."""
    features = train, train_targets, test, test_targets = features_of(run, network)
    scores = knn_accuracy(test, test_targets, train, train_targets, ks=(20,), temperatures=(0.07,))
    mean, _, _ = few_label_probe(*features, per_class=10, draws=5)
    found = {
        "knn": scores[20, 0.07][1],
        "linear": linear_probe(*features).accuracy,
        "few": mean,
    }
    if embedder is None:
        return found
    embedded, _ = extract_features(embedder, fixed_loader(run.given, run.train), device=DEVICE)
    return found | nmi_of(embedded, train_targets, sizes)


def taught(config: dict[str, Any], teacher: Path | None) -> dict[str, Any]:
    """The config with the grid's own teacher, where it has one."""
    section = config["method_kwargs"].get("teacher")
    if section is not None and teacher is not None:
        section["path"] = str(teacher)
    return config


def measured(
    name: str, grid: Grid, args: argparse.Namespace, seed: int, folder: Path
) -> dict[str, Any]:
    """Trains where there is something to train, then measures."""
    row = grid.rows.get(name, Row("simclr"))
    changes = [f"seed={seed}", *row.changes, *args.budget]
    teacher = None if grid.teacher is None else folder / f"run-{grid.teacher}-{TEACHER_SEED}"
    run = prepare(taught(compose(f"{args.dataset}/{row.config}", changes), teacher))
    pl.seed_everything(seed, verbose=False)
    seconds = None
    if name == "raw-pixels":
        scores = measure(run, RawPixels())
    elif name == "random-backbone":
        section = run.given["backbone"]
        made = build_backbone(
            host.load().backbones,
            section["name"],
            section["kwargs"],
            method="simclr",
            dataset=run.given["data"]["dataset"],
        )
        scores = measure(run, made[0])
    else:
        result = pretrain(run, run_dir=folder / f"run-{name}-{seed}")
        assert result.checkpoint is not None
        clustered: tuple[Any, ...] = ()
        if row.config == "pcl":
            method: Any = run.method(run.cfg)
            method.load_state_dict(torch.load(result.checkpoint, weights_only=True)["state_dict"])
            momentum = nn.Sequential(method.momentum_backbone, method.momentum_projector)
            clustered = (momentum, run.given["method_kwargs"]["num_prototypes"])
        scores = measure(run, load_pretrained(result.checkpoint).backbone, *clustered)
        seconds = result.seconds
    budget = {"epochs": run.given["max_epochs"], "images": len(run.train)}
    trained = {"config": row.config, "changes": list(row.changes)}
    return {"row": name, "seed": seed, **trained, "seconds": seconds, **budget, "scores": scores}


def interval(values: list[float]) -> str:
    """Mean and half-width of the 95 % interval of the mean over seeds (Student's t)."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    half = student_t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def in_percent(scores: dict[str, float]) -> dict[str, float]:
    """NMI times 100, beside accuracies."""
    return {k: 100 * v if k.startswith("nmi") else v for k, v in scores.items()}


def report(records: list[dict[str, Any]], grid: Grid) -> str:
    """A table of means, and of differences to the base methods paired by seed."""
    names = list(dict.fromkeys(r["row"] for r in records))
    by = {(r["row"], r["seed"]): in_percent(r["scores"]) for r in records}
    keys = list(dict.fromkeys(key for scores in by.values() for key in scores))
    lines = [f"| | seeds | {' | '.join(keys)} |", "|---" * (len(keys) + 2) + "|"]

    def line(label: str, held: list[dict[str, float]]) -> str:
        cells = [interval([s[k] for s in held]) if k in held[0] else "" for k in keys]
        return f"| {label} | {len(held)} | {' | '.join(cells)} |"

    for name in sorted(names, key=[*grid.rows, *BASELINES].index):
        lines.append(line(name, [scores for (n, _), scores in by.items() if n == name]))
    for name, row in grid.rows.items():
        for base in row.bases:
            pairs = [(by[n, s], by[base, s]) for n, s in by if n == name and (base, s) in by]
            if pairs:
                differences = [
                    {k: a[k] - b[k] for k in keys if k in a and k in b} for a, b in pairs
                ]
                lines.append(line(f"{name} minus {base}", differences))
    return "\n".join(lines)


def main() -> None:
    """Measures what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    grids = sorted(file.stem for file in GRIDS.glob("*.yaml"))
    parser.add_argument("grid", choices=grids)
    parser.add_argument("dataset", help="folder of configs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", nargs="+", help="of the grid, or of the baselines")
    parser.add_argument("--config", help="in place of that of every row")
    parser.add_argument("--teacher", help="config of a teacher to train first")
    parser.add_argument("--budget", nargs="*", default=[], metavar="KEY=VALUE", help="of all rows")
    args = parser.parse_args()
    grid = read_grid(args.grid, args.config, args.teacher)
    rows = args.rows or grid.default
    for name in rows:
        if name not in (*grid.rows, *BASELINES):
            parser.error(f"no row {name!r} in {args.grid}: {', '.join((*grid.rows, *BASELINES))}")
    # What the rows' own settings do not say.
    named = [x.replace("/", "-") for x in (args.config, args.teacher and f"of-{args.teacher}") if x]
    folder = args.out / "-".join([args.dataset, *named, *args.budget])
    folder.mkdir(parents=True, exist_ok=True)
    places = [(name, seed) for seed in args.seeds for name in rows if name != grid.teacher]
    if grid.teacher is not None:
        places.insert(0, (grid.teacher, TEACHER_SEED))
    for name, seed in places:
        file = folder / f"{name}-{seed}.json"
        if file.is_file():
            held = json.loads(file.read_text())
            row = grid.rows.get(name)
            # Older records name neither.
            if row and held.get("changes", list(row.changes)) != list(row.changes):
                parser.error(f"{file} is of other settings; name another --out")
        else:
            done = measured(name, grid, args, seed, folder)
            write_text(file, json.dumps(done, indent=1))
    write_text(folder / "environment.json", json.dumps(environment(host.load().info), indent=1))
    found = [json.loads(f.read_text()) for f in sorted(folder.glob("*-[0-9]*.json"))]
    print(report([r for r in found if r["row"] in (*grid.rows, *BASELINES)], grid))


if __name__ == "__main__":
    main()
