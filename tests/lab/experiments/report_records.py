"""Records and settings of small benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from solo_ext.core.files import append_lines
from solo_ext.lab.experiments.records import RECORDS, SETTINGS, Record
from solo_ext.lab.experiments.results import Results
from solo_ext.lab.experiments.settings import BenchmarkSettings

ENVIRONMENT: dict[str, Any] = {
    "solo_ext": "0.1.0",
    "host": {"generation": "1.0.2", "version": "1.0.2", "fingerprint": "fcd22b007728"},
    "python": "3.11.7",
    "packages": {"torch": "2.15.0", "timm": None},
    "platform": "Linux",
    "processor": "a processor",
    "cores": 2,
    "torch_threads": 1,
    "cuda": None,
    "gpus": [],
}
SEEDS = (1, 2, 3)


def settings(**given: Any) -> BenchmarkSettings:
    """Two data sets' worth of nothing special: rows a (ours), b (the host's), pixels."""
    base: dict[str, Any] = {
        "title": "A benchmark",
        "datasets": {"digits": []},
        "seeds": list(SEEDS),
        "rows": {
            "a": {"config": "debiased", "bases": ["b"]},
            "b": {"config": "simclr"},
            "pixels": {"baseline": "raw-pixels"},
        },
        "headline": ["knn", "linear"],
    }
    return BenchmarkSettings.model_validate(base | given)


def record(row: str, seed: int, knn: float = 50.0, **given: Any) -> Record:
    """A run; ``linear`` is ten above ``knn`` unless scores are given."""
    dataset, budget = given.get("dataset", "digits"), given.get("budget", "default")
    trained = row != "pixels"
    made: dict[str, Any] = {
        "key": f"{dataset}-{budget}-{row}-{seed}",
        "dataset": dataset,
        "budget": budget,
        "row": row,
        "kind": {"a": "plugin", "pixels": "baseline"}.get(row, "host"),
        "seed": seed,
        "config": {"seed": seed, "max_epochs": 4, "backbone": {"name": "resnet18"}},
        "evaluation": {"knn": None, "linear": {"holdout": 0.2}},
        "threads": 1,
        "code": {"version": "0.1.0", "commit": "abcdef0123456789", "changed": False},
        "environment": ENVIRONMENT,
        "epochs": 4 if trained else 0,
        "images": 1400,
        "seconds": 60.0 + seed if trained else None,
        "images_per_second": 1000.0 if trained else None,
        "memory": {"resident": 2**30, "cuda": None} if trained else None,
        "scores": {"knn": knn, "linear": knn + 10},
        "curves": {
            "epochs": [0, 2, 4],
            "seconds": [0.0, 30.0, 60.0],
            "scores": {"knn": [30.0, 40.0, knn], "linear": [35.0, 45.0, knn + 10]},
        }
        if trained
        else None,
        "finished": f"2026-03-0{1 + seed % 9}T10:00:00+00:00",
    }
    return cast("Record", made | given)


def rows_of(scores: Mapping[str, Sequence[float]], **given: Any) -> list[Record]:
    """Records of seeds 1, 2, ... by the kNN of each row."""
    return [
        record(row, seed, knn, **given)
        for row, values in scores.items()
        for seed, knn in enumerate(values, 1)
    ]


def results(scores: Mapping[str, Sequence[float]], **given: Any) -> Results:
    """Of records in memory, and hypotheses that were noted before."""
    made = settings(**given)
    return Results(made, rows_of(scores), noted(made))


def noted(made: BenchmarkSettings) -> dict[str, str]:
    """Every hypothesis before its runs."""
    return dict.fromkeys(made.hypotheses, "2026-03-01T00:00:00+00:00")


def write_folder(folder: Path, made: BenchmarkSettings, records: Sequence[Record]) -> Path:
    """As ``solo-ext benchmark run`` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(
        yaml.safe_dump(json.loads(made.model_dump_json()), sort_keys=False)
    )
    (folder / RECORDS).unlink(missing_ok=True)
    append_lines(folder / RECORDS, records)
    return folder
