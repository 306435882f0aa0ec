"""Evaluation while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solo_ext.core.files import read_jsonl
from solo_ext.lab.evaluation.context import open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.models import EvalRun
from tests.conftest import MakeConfig
from tests.lab.training.same_run import same_weights, train


def test_online_equals_offline(make_config: MakeConfig, images: Path, tmp_path: Path) -> None:
    """The numbers of `eval` on the checkpoint, before training, every n epochs, after the last."""
    online = {"every_n_epochs": 2, "protocols": ["knn", "linear"]}
    data = {"val_path": str(images)}
    config = make_config("debiased", data=data, max_epochs=3, online_eval=online)
    run = train(config, tmp_path / "run").run_dir
    records = read_jsonl(run / "metrics.jsonl")
    seen = {r["epochs_done"]: r for r in records if "online_knn_acc1" in r}
    assert sorted(seen) == [0, 2, 3]
    for protocol in ("knn", "linear"):
        found = PROTOCOLS[protocol].headline(evaluate(run, protocol)["results"])
        assert seen[3][f"online_{protocol}_acc1"] == pytest.approx(found["acc1"])


def quick(images: Path) -> dict[str, Any]:
    """Settings with which protocols take seconds, or which they cannot do without."""
    paths = {"train_path": str(images), "val_path": str(images)}
    return {
        "linear_augmented": {"epochs": 1, "lr": [0.1], "batch_size": 16},
        "finetune": {"epochs": 1, "batch_size": 16},
        "map": {"methods": ["pca"]},
        "neighbors": {"queries": 3, "k": 2},
        "transfer": {"datasets": {"same": paths}, "protocols": ["knn"]},
    }


@pytest.mark.slow
def test_every_protocol_runs_while_training_and_leaves_it_alone(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    names = list(PROTOCOLS)
    # PCL has clusters, from the first E-step on.
    config = make_config("pcl", data={"val_path": str(images)})
    online = {"every_n_epochs": 1, "protocols": names, "settings": quick(images)}
    plain = train(config, tmp_path / "plain").run_dir
    run = train({**config, "online_eval": online}, tmp_path / "run").run_dir
    records = read_jsonl(run / "metrics.jsonl")
    logged = {k: v for r in records if r.get("epochs_done") == 1 for k, v in r.items()}
    for name in names:
        assert any(k.startswith(f"online_{name}_") for k in logged), name
    assert {"online_lowshot_acc1_5_per_class", "online_clustering_nmi"} <= set(logged)
    assert not list(run.rglob("features"))
    assert {p.suffix for p in (run / "online" / "epoch-1").iterdir()} == {".png"}
    for name in ("finetune", "neighbors"):
        offline = evaluate(run, name, quick(images)[name])["results"]
        for key, value in PROTOCOLS[name].headline(offline).items():
            assert logged[f"online_{name}_{key}"] == pytest.approx(value)
    assert same_weights(plain, run)


def test_measured_in_single_precision(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """Weights that train in bfloat16 are measured as `eval` measures their checkpoint."""
    kept = {"finetune": quick(images)["finetune"]}
    online = {"every_n_epochs": 1, "protocols": ["knn", "finetune"], "settings": kept}
    data = {"val_path": str(images)}
    given = {"online_eval": online, "precision": "bf16-true"}
    crops = [{"crop_size": 32, "num_crops": 2}]
    config = make_config("simclr", data=data, augmentations=crops, **given)
    run = train(config, tmp_path / "run").run_dir
    logged = {k: v for r in read_jsonl(run / "metrics.jsonl") for k, v in r.items()}
    found = PROTOCOLS["knn"].headline(evaluate(run, "knn")["results"])
    assert logged["online_knn_acc1"] == pytest.approx(found["acc1"])
    assert "online_finetune_acc1" in logged


@pytest.mark.parametrize("end", [{"max_steps": 4}, {"max_time": "00:00:00:01"}])
def test_measured_after_the_last_step(
    end: dict[str, Any], make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    online = {"every_n_epochs": 10_000, "protocols": ["knn"]}
    data = {"val_path": str(images)}
    config = make_config("simclr", data=data, online_eval=online, max_epochs=9999, **end)
    train(config, tmp_path / "run")
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    first, last = (r["epochs_done"] for r in records if "online_knn_acc1" in r)
    epochs = {r["epoch"] for r in records if "epoch" in r}
    assert (first, last) == (0, max(epochs) + 1)


def test_one_process_trains_a_backbone_of_synchronised_batch_norm(run: Path) -> None:
    """Of several processes the first evaluates alone, and would wait for the others' statistics."""
    context = open_context(str(run), EvalRun())
    plain = context.backbone()
    backbone = context.model.backbone
    context.model.__dict__["backbone"] = nn.SyncBatchNorm.convert_sync_batchnorm(backbone)
    own = context.backbone()
    assert any(isinstance(m, nn.SyncBatchNorm) for m in context.model.backbone.modules())
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in own.modules())
    x = torch.randn(4, 3, 16, 16)
    assert torch.equal(own.train()(x), plain.train()(x))
