"""``eval clusters``: a run's prototypes, and what is measured of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import adjusted_mutual_info_score
from torch import nn

from solo_ext.core.errors import UserError
from solo_ext.core.files import read_jsonl
from solo_ext.lab.evaluation import clusters as module
from solo_ext.lab.evaluation import context
from solo_ext.lab.evaluation.clusters import (
    ClusterNetwork,
    Clusters,
    load_clusters,
    simplified_silhouette,
)
from solo_ext.lab.evaluation.embed import embed
from solo_ext.lab.evaluation.evaluate import evaluate
from tests.conftest import MakeConfig
from tests.lab.training.same_run import train

PLAIN: dict[str, Any] = {"num_workers": 0, "device": "cpu", "batch_size": 8}


def test_nearest_are_those_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = F.normalize(torch.randn(50, 8), dim=1)
    tables = [torch.randn(k, 8) / 3 for k in (1, 4, 30)]
    network = ClusterNetwork(nn.Flatten(), tables, [torch.ones(len(t)) for t in tables], "abc")
    # Several blocks of rows.
    monkeypatch.setattr(module, "_BLOCK", 100)
    found = network.nearest(rows)
    for m, table in enumerate(tables):
        for i, row in enumerate(rows):
            distances = [float((row - mean).norm()) for mean in table]
            first, second, *_ = [*sorted(distances), float("inf")]
            assert distances[int(found.clusters[m, i])] == pytest.approx(first, abs=1e-6)
            assert float(found.distances[m, i]) == pytest.approx(first, abs=1e-6)
            assert float(found.second[m, i]) == pytest.approx(second, abs=1e-6)


def test_small_distances_keep_their_digits() -> None:
    means = F.normalize(torch.randn(3, 64), dim=1)
    rows = means + 1e-5 * torch.eye(64)[:3]
    found = ClusterNetwork(nn.Flatten(), [means], [torch.ones(3)], ["3"]).nearest(rows)
    assert found.clusters.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(found.distances, torch.full((1, 3), 1e-5), rtol=0.02, atol=0)


def test_silhouette_is_that_of_a_loop_and_has_its_limits() -> None:
    own = torch.rand(100)
    second = own + torch.rand(100)
    expected = [(b - a) / max(a, b) for a, b in zip(own.tolist(), second.tolist(), strict=True)]
    torch.testing.assert_close(simplified_silhouette(own, second), torch.tensor(expected))
    assert simplified_silhouette(torch.zeros(1), torch.zeros(1)).tolist() == [0.0]
    assert simplified_silhouette(torch.ones(1), torch.ones(1)).tolist() == [0.0]


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_those_of_the_embedded_file(
    split: str, pcl: Path, val: Path, images: Path, tmp_path: Path
) -> None:
    path = {"train": images, "test": val}[split]
    data = {"train_path": str(images), "val_path": str(val)}
    settings = {**PLAIN, "data": data, "split": split, "out": str(tmp_path)}
    rows = evaluate(pcl, "clusters", settings)["results"]
    table = pq.read_table(embed(pcl, path, tmp_path / "a.parquet", PLAIN).out)
    network = load_clusters(pcl)
    assert network is not None
    assert [row["granularity"] for row in rows] == ["3", "6"]
    columns = {k: table[f"cluster_{k}"].to_numpy() for k in (3, 6)}
    for row in rows:
        k = row["clusters"]
        sizes = np.bincount(columns[k], minlength=k)
        sizes = sizes[sizes > 0]
        assert row["used"] == len(sizes)
        assert (row["smallest"], row["largest"]) == (sizes.min(), sizes.max())
        assert row["median"] == np.median(sizes)
        distance, phi = table[f"distance_{k}"].to_numpy(), table[f"concentration_{k}"].to_numpy()
        assert row["distance"] == pytest.approx(distance.mean(), abs=1e-6)
        assert row["concentration"] == pytest.approx(phi.mean(), abs=1e-6)
        assert 0 <= row["silhouette"] <= 1
    expected = 100 * adjusted_mutual_info_score(columns[3], columns[6])
    assert rows[0]["agreement"] == pytest.approx(expected, abs=1e-9)
    assert rows[1]["agreement"] is None
    assert set(Clusters.headline(rows)) == {"silhouette_3", "silhouette_6", "agreement_3"}


def test_unreadable_images_are_left_out(pcl: Path, val: Path, images: Path, tmp_path: Path) -> None:
    import shutil

    own = shutil.copytree(images, tmp_path / "images")
    (own / "1" / "3.png").write_bytes(b"no image")
    data = {"train_path": str(own), "val_path": str(val), "unreadable": "skip"}
    settings = {**PLAIN, "data": data, "out": str(tmp_path)}
    (first, _) = evaluate(pcl, "clusters", settings)["results"]
    assert first["smallest"] <= 47 / first["used"]
    assert not (tmp_path / "features").exists()


def test_embeddings_are_stored_and_read_again(
    pcl: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**PLAIN, "data": {"val_path": str(val)}, "out": str(tmp_path)}
    settings["data"]["train_path"] = str(val)
    first = evaluate(pcl, "clusters", settings)["results"]
    monkeypatch.setattr(context, "feature_batches", None)
    assert evaluate(pcl, "clusters", settings)["results"] == first


def test_runs_without_clusters_are_refused(
    run: Path, make_config: MakeConfig, val: Path, tmp_path: Path
) -> None:
    data = {"val_path": str(val)}
    warm = make_config("pcl", data=data, method_kwargs={"warmup_epochs": 5}, max_epochs=1)
    for place in (run, train(warm, tmp_path / "warm").run_dir):
        assert load_clusters(place) is None
        with pytest.raises(UserError, match="has no clusters; only pcl, and metric"):
            evaluate(place, "clusters")


def test_clusters_of_metric(make_config: MakeConfig, val: Path, tmp_path: Path) -> None:
    kwargs = {"classes": "cluster", "clusters": {"num_prototypes": [4]}}
    kwargs["loss"] = "triplet_loss_func"
    config = make_config("metric", data={"val_path": str(val)}, method_kwargs=kwargs)
    run = train(config, tmp_path / "run").run_dir
    (row,) = evaluate(run, "clusters")["results"]
    assert (row["granularity"], row["agreement"]) == ("4", None)
    found = pq.read_table(embed(run, None, tmp_path / "a.parquet", PLAIN).out)
    assert "cluster_4" in found.column_names


def test_silhouette_is_logged_while_training(
    make_config: MakeConfig, val: Path, tmp_path: Path
) -> None:
    online = {"every_n_epochs": 1, "protocols": ["clusters"]}
    kwargs = {"warmup_epochs": 1}
    config = make_config("pcl", data={"val_path": str(val)}, method_kwargs=kwargs, max_epochs=2)
    run = train({**config, "online_eval": online}, tmp_path / "run").run_dir
    logged = read_jsonl(run / "metrics.jsonl")
    seen = {r["epochs_done"]: r for r in logged if "online_clusters_silhouette_3" in r}
    # There are no clusters before the first E-step.
    assert list(seen) == [2]
    found = Clusters.headline(evaluate(run, "clusters")["results"])
    for name, value in found.items():
        assert seen[2][f"online_clusters_{name}"] == pytest.approx(value, abs=1e-5)


def test_while_training_a_method_without_clusters_is_refused(
    make_config: MakeConfig, val: Path, tmp_path: Path
) -> None:
    online = {"every_n_epochs": 1, "protocols": ["clusters"]}
    config = make_config("simclr", data={"val_path": str(val)})
    with pytest.raises(UserError, match="has no clusters"):
        train({**config, "online_eval": online}, tmp_path / "run")


def test_damaged_clusters_are_a_line(pcl: Path, tmp_path: Path) -> None:
    import shutil

    own = shutil.copytree(pcl, tmp_path / "run")
    (file,) = own.glob("*.ckpt")
    state = torch.load(file, weights_only=False)
    state["state_dict"]["prototypes.means_1"] = torch.zeros(6, 5)
    torch.save(state, file)
    with pytest.raises(UserError, match=re.escape("means are not those of embeddings of 8 dim")):
        load_clusters(own)
