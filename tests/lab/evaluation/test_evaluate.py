"""Evaluating a finished run, the protocols as tables, and the classes of two splits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from solo_ext.config import schema
from solo_ext.config.check import check_run
from solo_ext.config.schema import HuggingFace, OnlineProtocol, Streaming
from solo_ext.core.errors import ConfigError
from solo_ext.data.images import open_images
from solo_ext.data.loaders import fixed_loader
from solo_ext.data.reading import targets_of
from solo_ext.lab.evaluation.context import _ranks, evaluation_config, same_classes
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate, read_settings
from solo_ext.lab.evaluation.features import Features, Ranks, extract_features
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import WITHOUT_LABELS, FeatureProtocol, accuracies
from solo_ext.memory.knn import knn_accuracy
from solo_ext.pretrained.runs import load_pretrained
from tests.conftest import MakeConfig, made_images
from tests.lab.evaluation.conftest import refusal
from tests.lab.training.same_run import train

KNN = {"k": [1, 3], "temperature": [0.1]}


def features(run: Path) -> list[torch.Tensor]:
    """Train and validation features and targets by hand."""
    found = load_pretrained(run)
    parts: list[torch.Tensor] = []
    for split in ("train", "val"):
        images = open_images(found.cfg.data, split)  # type: ignore[arg-type]
        parts += extract_features(found.backbone, fixed_loader(found.cfg, images))
    return parts


def test_knn_is_that_of_the_features(run: Path) -> None:
    bank, bank_targets, queries, targets = features(run)
    expected = knn_accuracy(queries, targets, bank, bank_targets, ks=[1, 3], temperatures=[0.1])
    rows = evaluate(run, "knn", KNN)["results"]
    assert rows == [
        {"k": k, "temperature": t, "acc1": tops[1], "acc5": tops[5]}
        for (k, t), tops in expected.items()
    ]


def test_record(run: Path, images: Path, val: Path) -> None:
    record = evaluate(run, "knn", KNN)
    found = load_pretrained(run)
    assert json.loads(json.dumps(record)) == record
    assert record["run"] == str(run)
    assert (record["checkpoint"], record["checkpoint_sha256"]) == (
        found.checkpoint.name,
        found.digest,
    )
    assert (record["method"], record["epoch"], record["image_size"]) == ("simclr", 1, 16)
    assert record["train"] == {"path": str(images), "images": 48, "unreadable": []}
    assert record["test"] == {"path": str(val), "images": 21, "unreadable": []}
    assert record["settings"] == KNN


def test_is_repeatable_and_leaves_nothing_but_features(run: Path, tmp_path: Path) -> None:
    """Progress is that of what is not stored yet."""
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=lambda *_: ["features"]))
    names, seen = {p.name for p in copy.iterdir()}, list[tuple[str, int, int]]()
    first = evaluate(copy, "knn", {**KNN, "batch_size": 16}, lambda *step: seen.append(step))
    assert seen == [*(("train", n, 3) for n in (1, 2, 3)), *(("val", n, 2) for n in (1, 2))]
    again = evaluate(copy, "knn", KNN, lambda *step: seen.append(step))
    assert (len(seen), again["results"]) == (5, first["results"])
    other = {**KNN, "batch_size": 5, "features_dir": str(tmp_path / "other")}
    assert evaluate(copy, "knn", other)["results"] == first["results"]
    assert {p.name for p in copy.iterdir()} == names | {"features"}


def test_other_images_of_another_size(run: Path, images: Path) -> None:
    given = {**KNN, "data": {"val_path": str(images)}, "crop_size": 32}
    record = evaluate(run, "knn", given)
    assert record["results"][0]["acc1"] == 100
    assert record["test"] == {"path": str(images), "images": 48, "unreadable": []}
    assert record["image_size"] == 32


def test_other_classes_would_shift_the_labels(run: Path, tmp_path: Path) -> None:
    other = made_images(tmp_path, "02", 7, seed=2)
    line = refusal(run, "knn", {"data": {"val_path": str(other)}})
    assert line.startswith(f"data.val_path={str(other)!r}: class ")


def test_run_without_validation_images(make_config: MakeConfig, val: Path, tmp_path: Path) -> None:
    run = train(make_config("simclr"), tmp_path / "run").run_dir
    assert refusal(run, "knn", {}).startswith("data.val_path=null: no path; give the folder")
    given = {**KNN, "data": {"val_path": str(val)}}
    assert evaluate(run, "knn", given)["test"]["images"] == 21


def test_run_without_labels(
    make_config: MakeConfig, images: Path, val: Path, tmp_path: Path
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(images.rglob("*.png")):
        (flat / f"{number}.png").write_bytes(file.read_bytes())
    config = make_config("simclr", data={"train_path": str(flat), "no_labels": True})
    run = train(config, tmp_path / "run").run_dir
    line = refusal(run, "knn", {})
    assert "the run was trained without labels" in line
    assert f"needs no labels: {', '.join(WITHOUT_LABELS)}" in line
    given = {**KNN, "data": {"train_path": str(images), "val_path": str(val)}}
    assert evaluate(run, "knn", given)["train"]["images"] == 48


def test_moved_torchvision_data_stays_what_it_is(run: Path, tmp_path: Path) -> None:
    """Beside class folders of the user's own, the data set of pretraining may lie elsewhere."""
    other = tmp_path / "run"
    other.mkdir()
    for file in (*run.glob("*.ckpt"), run / "args.json"):
        (other / file.name).write_bytes(file.read_bytes())
    args = json.loads((other / "args.json").read_text())
    args["data"] |= {"dataset": "cifar10", "train_path": "/gone", "val_path": "/gone"}
    (other / "args.json").write_text(json.dumps(args))
    (tmp_path / "new" / "cifar-10-batches-py").mkdir(parents=True)
    paths = {name: str(tmp_path / "new") for name in ("train_path", "val_path")}
    assert "Dataset not found" in refusal(other, "knn", {"data": paths})
    (tmp_path / "new" / "cifar-10-batches-py").rmdir()
    assert "no class folders in it" in refusal(other, "knn", {"data": paths})


@pytest.mark.fault
def test_what_cannot_be_read_is_left_out_of_features_alone(
    run: Path, val: Path, tmp_path: Path
) -> None:
    """Protocols that train on images would take one for another."""
    broken = tmp_path / "val"
    shutil.copytree(val, broken)
    file = broken / "1" / "3.png"
    file.write_bytes(file.read_bytes()[:40])
    train = load_pretrained(run).cfg.data.train_path
    given = {"data": {"train_path": train, "val_path": str(broken), "unreadable": "skip"}}
    record = evaluate(run, "knn", {**KNN, **given})
    assert record["test"]["images"] == 20
    assert record["test"]["unreadable"] == [str(file)]
    assert record["train"]["unreadable"] == []
    assert "data.unreadable='skip': Fine-tuning" in refusal(run, "finetune", given)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        *((labels, None) for labels in ("1", "01", "2", "012", "a")),
        ("bc", "class 'a' is missing"),
        ("ad", "class 'd' is not among"),
    ],
)
def test_whole_numbers_are_their_own_and_names_are_numbered_by_their_order(
    labels: str, problem: str | None, images: Path, tmp_path: Path
) -> None:
    path, file = next(images.glob("0/*")), tmp_path / "list.txt"

    def listed(labels: str) -> Any:
        file.write_text("".join(f"{path} {label}\n" for label in labels))
        return open_images(schema.Images(dataset="custom", val_path=str(file)), "val")

    known = "012" if labels.isdigit() else "abc"
    train, val = listed(known), listed(labels)
    if problem is None:
        same_classes(train, val, "val.txt")
        assert list(targets_of(val)) == [known.index(label) for label in labels]
    else:
        with pytest.raises(ConfigError, match=problem):
            same_classes(train, val, "val.txt")


ON_FEATURES = {n: k for n, k in PROTOCOLS.items() if issubclass(k, FeatureProtocol)}
QUICK: dict[str, dict[str, Any]] = {
    "linear": {"weight_decay": [0.1]},
    "lowshot": {"shots": [2], "fractions": [0.02], "draws": 2},
    "clustering": {"seeds": 2, "restarts": 1, "iterations": 10},
}


def measured(name: str, features: Features) -> list[dict[str, Any]]:
    return ON_FEATURES[name](**QUICK.get(name, {})).measure(features)


def test_config_knows_those_that_run_while_training() -> None:
    names = [name for name in get_args(OnlineProtocol) if name in PROTOCOLS]
    assert names == list(PROTOCOLS)


def test_messages_name_those_without_labels() -> None:
    found = [name for name, kind in PROTOCOLS.items() if not kind.needs_labels]
    assert list(WITHOUT_LABELS) == found


def test_settings_are_not_named_like_shared_ones() -> None:
    for name, kind in ON_FEATURES.items():
        assert not set(kind.model_fields) & set(EvalRun.model_fields), name


@pytest.mark.parametrize("name", ON_FEATURES)
def test_rows_are_a_table_and_repeatable(name: str, digits: Features) -> None:
    """One that JSON holds; random numbers of a training are left alone."""
    before = torch.random.get_rng_state()
    rows = measured(name, digits)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(9)
    assert measured(name, digits) == rows
    assert rows
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert all(list(row) == list(rows[0]) for row in rows)
    numbers = PROTOCOLS[name].headline(rows)
    assert numbers
    assert all(np.isfinite(v) for v in numbers.values())
    assert PROTOCOLS[name].title


def test_accuracies_by_hand() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3, 4, 5]] * 3)
    assert accuracies(logits, torch.tensor([0, 5, 1])) == pytest.approx(
        {"acc1": 100 / 3, "acc5": 200 / 3}
    )
    # A class that is never guessed, and a row that is no number.
    logits = torch.tensor([[1.0, 0], [1, 0], [float("nan")] * 2, [float("inf"), 0]])
    assert accuracies(logits, torch.tensor([0, -1, 0, 0]))["acc1"] == 25


def test_how_images_are_read_does_not_change_which(make_config: MakeConfig) -> None:
    """Of the sections, keys that an evaluation leaves out are those of training."""
    streaming = {"anonymous": True, "label": "cls", "cache_dir": "/there"}
    huggingface = {"name": "plain", "train_split": "train[:10]"}
    data = {"fraction": 0.1, "streaming": streaming, "huggingface": huggingface}
    trained = check_run(make_config("simclr", data=data))

    def of(given: dict[str, Any]) -> Any:
        settings, _ = read_settings(PROTOCOLS["knn"], {"data": given})
        return evaluation_config(trained, settings).data

    found = of({"streaming": {"cache_dir": "/here"}, "huggingface": {"cache_dir": "/here"}})
    assert found.fraction == 0.1
    assert found.streaming == Streaming(**{**streaming, "cache_dir": "/here"})
    assert found.huggingface == HuggingFace(**huggingface, cache_dir="/here")
    other = of({"huggingface": {"train_split": "train"}})
    assert (other.fraction, other.huggingface.name) == (-1, "plain")
    assert other.huggingface.train_split == "train"


def test_a_home_folder_is_understood_from_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = {"train_path": "~/images/train", "val_path": "~/images/val"}
    settings = EvalRun.model_validate({"data": data, "out": "~/results"})
    assert settings.out == "/home/me/results"
    assert settings.data.train_path == "/home/me/images/train"


def test_tasks_of_srun_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script has its job's number of tasks too, and is one process."""
    monkeypatch.setenv("SLURM_NTASKS", "16")
    monkeypatch.setenv("SLURM_PROCID", "9")
    assert _ranks() == Ranks(0, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    assert _ranks() == Ranks(9, 16)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert _ranks() == Ranks(3, 4)
