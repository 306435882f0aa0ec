"""lightly-train's distillation beside ours: same teacher, student, images, epochs and protocols.

    uv run --with "lightly-train[timm]" python results/distillation_imagenette/peer.py RUNS

RUNS holds the run directories of ``solo-ext benchmark run distillation_imagenette``. Teacher,
images, epochs, batch and crop size are those of these runs; everything else is lightly-train's
default. The record goes to ``peer.jsonl`` beside this file. lightly-train (AGPL-3.0) is no
dependency.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from solo_ext.core.files import append_lines
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.experiments.settings import short_name
from solo_ext.lab.training.run_dir import environment
from solo_ext.pretrained.runs import Pretrained, load_pretrained

RECORD = Path(__file__).with_name("peer.jsonl")
PROTOCOL_SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "knn": {"k": [20], "temperature": [0.07]},
}
"""As in the benchmark's ``evaluation``."""


def distil(teacher: Pretrained, student: Pretrained, epochs: int, folder: Path) -> Path:
    """Trains by lightly-train, and returns the file with the weights of the student."""
    import lightly_train  # type: ignore[import-not-found,unused-ignore]

    weights = folder / "teacher.pt"
    torch.save(teacher.backbone.state_dict(), weights)
    cfg = student.cfg
    (crop,) = {entry.crop_size for entry in cfg.augmentations}
    run = folder / "run"
    lightly_train.pretrain(
        out=run,
        data=str(cfg.data.train_path),
        model=student.cfg.backbone.name,
        model_args=timm_arguments(student),
        method="distillation",
        method_args={
            "teacher": teacher.cfg.backbone.name,
            "teacher_args": timm_arguments(teacher),
            "teacher_weights": str(weights),
        },
        epochs=epochs,
        batch_size=cfg.optimizer.batch_size,
        num_workers=0,
        accelerator="cpu",
        precision="bf16-mixed",
        transform_args={"image_size": (crop, crop)},
    )
    return run / "exported_models" / "exported_last.pt"


def timm_arguments(run: Pretrained) -> dict[str, Any]:
    """Arguments of ``timm.create_model`` for the backbone of a run."""
    given = {k: v for k, v in run.cfg.backbone.kwargs.items() if k != "small_stem"}
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return {**plain, "num_classes": 0}


def measured(weights: Path, student: Pretrained, out: Path) -> dict[str, float]:
    """Scores of the distilled network by the protocols of the benchmark."""
    data, (entry, *_) = student.cfg.data, student.cfg.augmentations
    shared = {
        "data": {"train_path": str(data.train_path), "val_path": str(data.val_path)},
        "crop_size": entry.crop_size,
        "num_workers": 0,
        "pretrained": False,
        "model_kwargs": {**student.cfg.backbone.kwargs, "checkpoint_path": str(weights)},
        "out": str(out),
    }
    scores = {}
    for name, own in PROTOCOL_SETTINGS.items():
        rows = evaluate(student.cfg.backbone.name, name, {**own, **shared})["results"]
        for key, value in PROTOCOLS[name].headline(rows).items():
            scores[short_name(f"{name}_{key}")] = value
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="folder with the benchmark's run directories")
    parser.add_argument("--work", type=Path, default=Path("peer"), help="folder of the training")
    parser.add_argument("--epochs", type=int, help="other than the student's own")
    args = parser.parse_args()
    # As every run of the benchmark.
    torch.set_num_threads(1)
    (teacher,), (student,) = (list(args.runs.glob(f"*-{row}-*")) for row in ("teacher", "seed"))
    of_teacher, of_student = load_pretrained(teacher), load_pretrained(student)
    args.work.mkdir(parents=True, exist_ok=True)
    epochs = args.epochs or of_student.epoch
    assert epochs, "the student's checkpoint does not say its epochs"
    begin = time.monotonic()
    weights = distil(of_teacher, of_student, epochs, args.work)
    seconds = time.monotonic() - begin
    record = {
        "row": "lightly-train",
        "version": version("lightly-train"),
        "epochs": epochs,
        "seconds": round(seconds, 1),
        "scores": measured(weights, of_student, args.work),
        "teacher": of_teacher.digest,
        "environment": environment(),
    }
    append_lines(RECORD, [record])
    print(record["scores"], f"{seconds:.0f} s")


if __name__ == "__main__":
    main()
