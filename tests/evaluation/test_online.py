"""Evaluation while training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from solo_ext.config.schema import OnlineProtocol
from solo_ext.errors import ConfigError
from solo_ext.evaluation.evaluate import evaluate
from solo_ext.evaluation.protocols import headline
from solo_ext.training.prepare import prepare
from solo_ext.training.pretrain import pretrain
from solo_ext.training.records import read_metrics

MakeConfig = Callable[..., dict[str, Any]]


def test_online_equals_offline_and_leaves_training_alone(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """Same numbers as `eval` on the checkpoint; the weights are those of a run without it."""
    online = {"every_n_epochs": 2, "protocols": ["knn", "linear"]}
    config = make_config("debiased", data={"val_path": str(images)}, max_epochs=3)
    plain = pretrain(prepare(config), run_dir=tmp_path / "plain", show_progress=False)
    watched = pretrain(
        prepare({**config, "online_eval": online}),
        run_dir=tmp_path / "watched",
        show_progress=False,
    )
    records = read_metrics(watched.run_dir / "metrics.jsonl")
    seen = {r["epochs_done"]: r for r in records if "online_knn_acc1" in r}
    assert sorted(seen) == [0, 2, 3]
    for protocol in ("knn", "linear"):
        record = evaluate(watched.run_dir, protocol)
        assert seen[3][f"online_{protocol}_acc1"] == pytest.approx(
            headline(protocol, record["results"])["acc1"]
        )
    assert plain.checkpoint is not None
    assert watched.checkpoint is not None
    a, b = (
        torch.load(c, weights_only=True)["state_dict"]
        for c in (plain.checkpoint, watched.checkpoint)
    )
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_every_protocol_on_features_runs_while_training(
    make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    names = list(get_args(OnlineProtocol))
    config = make_config(
        "simclr",
        data={"val_path": str(images)},
        online_eval={"every_n_epochs": 1, "protocols": names},
    )
    run = pretrain(prepare(config), run_dir=tmp_path / "run", show_progress=False)
    logged = {k for r in read_metrics(run.run_dir / "metrics.jsonl") for k in r}
    for name in names:
        assert any(k.startswith(f"online_{name}_") for k in logged), name
    assert {"online_lowshot_acc1_5_per_class", "online_clustering_nmi"} <= logged
    assert not (run.run_dir / "features").exists()


def test_needs_labelled_validation_images(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("debiased", online_eval={"every_n_epochs": 1})
    with pytest.raises(ConfigError, match=r"online_eval.*data\.val_path"):
        pretrain(prepare(config), run_dir=tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()
