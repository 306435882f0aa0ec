"""What a stopped training leaves behind, and accuracies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext.lab.evaluation.context import open_context
from solo_ext.lab.evaluation.finetune import Finetune
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.supervised import EvalCheckpoint, accuracies


def made(images: Path, out: Path, *, crop: int = 8, **settings: Any) -> EvalCheckpoint:
    shared = EvalRun.model_validate(
        {
            "data": {"train_path": str(images), "val_path": str(images)},
            "crop_size": crop,
            "out": str(out),
            "device": "cpu",
        }
    )
    return EvalCheckpoint(open_context("pixels", shared), Finetune(**settings))


def test_is_found_by_the_same_call_alone(images: Path, tmp_path: Path) -> None:
    first = made(images, tmp_path)
    assert first.load() is None
    first.save({"epochs": 3, "x": torch.ones(2)})
    again = made(images, tmp_path).load()
    assert again is not None
    assert again["epochs"] == 3
    assert made(images, tmp_path, seed=1).load() is None
    assert made(images, tmp_path, crop=16).load() is None
    assert made(images, tmp_path, save=True).load() is not None
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_of_a_corrected_protocol_starts_anew(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(images, tmp_path).save({"epochs": 3})
    monkeypatch.setattr(Finetune, "version", Finetune.version + 1)
    assert made(images, tmp_path).load() is None


@pytest.mark.fault
def test_damaged_file_counts_for_nothing(images: Path, tmp_path: Path) -> None:
    own = made(images, tmp_path)
    own.save({"epochs": 1})
    own.file.write_bytes(own.file.read_bytes()[:40])
    assert own.load() is None


def test_accuracies_by_hand() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]])
    assert accuracies(logits, torch.tensor([0, 5, 1])) == pytest.approx(
        {"acc1": 100 / 3, "acc5": 200 / 3}
    )
    # Without a label a row does not count; one that is no number is an error.
    logits = torch.tensor([[1.0, 0], [1, 0], [float("nan")] * 2])
    assert accuracies(logits, torch.tensor([0, -1, 0])) == {"acc1": 50.0, "acc5": 50.0}
