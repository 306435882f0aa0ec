"""Evaluation while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from solo_ext.config.schema import OnlineProtocol
from solo_ext.core.errors import ConfigError
from solo_ext.core.files import read_jsonl
from solo_ext.lab.evaluation.context import open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.conftest import MakeConfig


def test_online_equals_offline(make_config: MakeConfig, images: Path, tmp_path: Path) -> None:
    """The numbers of `eval` on the checkpoint, before training, every n epochs, after the last."""
    online = {"every_n_epochs": 2, "protocols": ["knn", "linear"]}
    data = {"val_path": str(images)}
    config = make_config("debiased", data=data, max_epochs=3, online_eval=online)
    run = pretrain(prepare(config), run_dir=tmp_path / "run", show_progress=False).run_dir
    seen = {
        r["epochs_done"]: r for r in read_jsonl(run / "metrics.jsonl") if "online_knn_acc1" in r
    }
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


def test_every_protocol_runs_while_training_and_leaves_it_alone(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    names = list(get_args(OnlineProtocol))
    config = make_config("simclr", data={"val_path": str(images)})
    online = {"every_n_epochs": 1, "protocols": names, "settings": quick(images)}
    plain = pretrain(prepare(config), run_dir=tmp_path / "plain", show_progress=False)
    run = pretrain(
        prepare({**config, "online_eval": online}), run_dir=tmp_path / "run", show_progress=False
    )
    records = read_jsonl(run.run_dir / "metrics.jsonl")
    logged = {k: v for r in records if r.get("epochs_done") == 1 for k, v in r.items()}
    for name in names:
        assert any(k.startswith(f"online_{name}_") for k in logged), name
    assert {"online_lowshot_acc1_5_per_class", "online_clustering_nmi"} <= set(logged)
    assert not list(run.run_dir.rglob("features"))
    written = {p.suffix for p in (run.run_dir / "online" / "epoch-1").iterdir()}
    assert written == {".png"}
    for name in ("finetune", "neighbors"):
        offline = PROTOCOLS[name].headline(
            evaluate(run.run_dir, name, quick(images)[name])["results"]
        )
        for key, value in offline.items():
            assert logged[f"online_{name}_{key}"] == pytest.approx(value)
    assert plain.checkpoint is not None
    assert run.checkpoint is not None
    a, b = (
        torch.load(c, weights_only=True)["state_dict"] for c in (plain.checkpoint, run.checkpoint)
    )
    assert all(torch.equal(a[k], b[k]) for k in a)


SKIP = {"unreadable": "skip"}


@pytest.mark.parametrize(
    ("online", "data", "says"),
    [
        ({"settings": {"knn": {"kk": [1]}}}, {}, "online_eval.settings.knn.kk"),
        ({"settings": {"linear": {}}}, {}, "online_eval.settings.linear={}: not among the proto"),
        ({"protocols": ["transfer"]}, {}, "online_eval.settings.transfer.datasets"),
        ({"protocols": ["knn", "neighbors"]}, SKIP, "'skip': Nearest neighbours needs every image"),
        ({}, {"val_path": None}, "online_eval"),
    ],
)
def test_mistakes_are_found_before_training(
    make_config: MakeConfig,
    images: Path,
    tmp_path: Path,
    online: dict[str, Any],
    data: dict[str, Any],
    says: str,
) -> None:
    given = {"every_n_epochs": 1, **online}
    config = make_config("simclr", data={"val_path": str(images), **data}, online_eval=given)
    with pytest.raises(ConfigError) as caught:
        pretrain(prepare(config), run_dir=tmp_path / "run", show_progress=False)
    assert says in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("end", [{"max_steps": 4}, {"max_time": "00:00:00:01"}])
def test_measured_after_the_last_step(
    end: dict[str, Any], make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    online = {"every_n_epochs": 10_000, "protocols": ["knn"]}
    data = {"val_path": str(images)}
    config = make_config("simclr", data=data, online_eval=online, max_epochs=9999, **end)
    result = pretrain(prepare(config), run_dir=tmp_path / "run", show_progress=False)
    records = read_jsonl(result.run_dir / "metrics.jsonl")
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
