"""Tests of the built-in methods of solo-learn 1.0.2 behind main's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from solo_ext import host
from solo_ext.core.errors import ConfigError
from solo_ext.host import detect
from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from tests.host.conftest import Watch

if detect().generation != "1.0.2":
    pytest.skip("main's built-ins take main's config by themselves", allow_module_level=True)
BUILTINS = (
    *("barlow_twins", "byol", "deepclusterv2", "dino", "mocov2plus", "nnbyol", "nnclr", "nnsiam"),
    *("ressl", "simclr", "simsiam", "swav", "vicreg", "wmse"),
)
MISSING = ("all4one", "mae", "mocov3", "supcon", "vibcreg")
MULTICROP = ("byol", "simclr", "wmse")
"""Those that take small crops in the release; in main nearly all do."""
MOMENTUM_METHODS = ("byol", "dino", "mocov2plus", "nnbyol", "ressl")
builtins = pytest.mark.parametrize("name", BUILTINS)


def run(config: dict[str, Any], folder: Path) -> Watch:
    watch = Watch()
    pretrain(prepare(config), run_dir=folder, callbacks=[watch])
    return watch


def test_what_only_main_has_is_refused(loaded: host.Host, make_config: Any) -> None:
    assert {*BUILTINS} == set(loaded.methods) & set(BUILTIN_KWARGS)
    assert {*BUILTINS, *MISSING} == set(BUILTIN_KWARGS)
    for name in MISSING:
        with pytest.raises(ConfigError, match=r"method=.*only its main branch does.*PYTHONPATH"):
            prepare(make_config(name))


@pytest.mark.parametrize(
    ("name", "small"), [(n, False) for n in BUILTINS] + [(n, True) for n in MULTICROP]
)
def test_trains(make_config: Any, tmp_path: Path, name: str, small: bool) -> None:
    """Two steps move every part that learns; the batch norms of each see each crop once."""
    config = make_config(name)
    if small:
        config["augmentations"].append({"crop_size": 12, "num_crops": 3})
    if name == "dino":
        config["method_kwargs"]["use_bn_in_head"] = True
    watch = run(config, tmp_path)
    assert len(watch.seen) == 2
    assert all(torch.tensor(loss).isfinite() for loss in watch.seen)
    assert {"train_class_loss", "train_acc1", "train_acc5"} <= set(watch.metrics)
    after = watch.state
    assert all(value.isfinite().all() for value in after.values())
    learning = {n for n, p in watch.method.named_parameters() if p.requires_grad}
    expected = {key.partition(".")[0] for key in learning}
    if name in MOMENTUM_METHODS:
        expected.add("momentum_backbone")
    if name == "deepclusterv2":
        # Nothing is assigned before the first clustering.
        expected -= {"backbone", "projector"}
    parameters = dict(watch.method.named_parameters())
    moved = {k for k, v in watch.before.items() if k in parameters and not torch.equal(v, after[k])}
    assert expected <= {key.partition(".")[0] for key in moved}
    # The release projects by itself, so the shared step must not.
    counts = {
        n: int(m.num_batches_tracked)
        for n, m in watch.method.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    }
    crops = {n: 2 if n.startswith("momentum_") or not small else 5 for n in counts}
    assert counts == {n: 2 * number for n, number in crops.items()}


@builtins
def test_is_built_from_mains_config(make_config: Any, name: str) -> None:
    config = make_config(name)
    prepared = prepare(config)
    method = prepared.method(prepared.cfg)
    keys = list(method.state_dict())
    assert any(key.startswith("backbone.") for key in keys)
    assert not any("encoder" in key for key in keys)
    assert isinstance(method, host.BaseMomentumMethod) == (name in MOMENTUM_METHODS)
    if name in MOMENTUM_METHODS:
        assert any(key.startswith("momentum_backbone.") for key in keys)
        assert not any(p.requires_grad for p in method.momentum_backbone.parameters())
    for key, value in config["method_kwargs"].items():
        assert getattr(method, key, value) == value, key
    assert method.learnable_params[0]["name"] == "backbone"
    # Rates are scaled by batch / 256, and no parameter is trained twice or left out.
    assert method.lr == pytest.approx(0.3 * 24 / 256)
    grouped = [p for group in method.learnable_params for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped})
    learning = {n: p for n, p in method.named_parameters() if p.requires_grad}
    left_out = {n for n, p in learning.items() if id(p) not in {id(q) for q in grouped}}
    assert left_out == set()


@pytest.mark.parametrize("name", ["simclr", "byol"])
def test_rates_are_those_of_the_accumulated_batch(make_config: Any, name: str) -> None:
    rates = {"min_lr": 0.01, "warmup_start_lr": 0.02}
    schedule = {"name": "warmup_cosine", **rates}
    plain, accumulated = (
        prepared.method(prepared.cfg)
        for prepared in (
            prepare(make_config(name, scheduler=schedule, accumulate_grad_batches=batches))
            for batches in (1, 2)
        )
    )
    for rate in ("lr", "classifier_lr", *rates):
        before = getattr(plain, rate)
        assert before > 0
        assert getattr(accumulated, rate) == pytest.approx(2 * before), rate


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["simclr", "byol"])
def test_networks_see_channels_last(
    make_config: Any, images: Path, tmp_path: Path, name: str, plain: bool
) -> None:
    """Large, small and validation crops, also of the momentum network, unless it is disabled."""
    config = make_config(name, data={"val_path": str(images)})
    config["augmentations"].append({"crop_size": 12, "num_crops": 1})
    config["performance"] = {"disable_channel_last": plain}
    seen = set()

    class Formats(Watch):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for network in ("backbone", "momentum_backbone"):
                if hasattr(pl_module, network):
                    getattr(pl_module, network).register_forward_pre_hook(
                        lambda _, given, network=network: seen.add(
                            (network, given[0].shape[-1], given[0].is_contiguous())
                        )
                    )

    watch = Formats()
    pretrain(prepare(config), run_dir=tmp_path, callbacks=[watch])
    networks = {"backbone"} | ({"momentum_backbone"} if name == "byol" else set())
    sides = {(network, 16) for network in networks} | {("backbone", 12)}
    assert {(network, side) for network, side, _ in seen} >= sides
    assert {contiguous for *_, contiguous in seen} == {plain}


@pytest.mark.parametrize("name", ["simclr", "byol"])
def test_validates(make_config: Any, images: Path, tmp_path: Path, name: str) -> None:
    """Classifier and online kNN on the validation images, logged under main's names."""
    config = make_config(
        name,
        data={"val_path": str(images)},
        knn_eval={"enabled": True, "k": 2, "distance_func": "euclidean"},
    )
    if name == "byol":
        config["momentum"] = {"classifier": True}
    metrics = run(config, tmp_path).metrics
    expected = {"val_loss", "val_acc1", "val_acc5", "val_knn_acc1", "val_knn_acc5"}
    if name == "byol":
        expected |= {"momentum_val_loss", "momentum_val_acc1", "momentum_val_acc5"}
        expected |= {"train_momentum_class_loss", "train_momentum_acc1"}
    assert expected <= set(metrics)
    assert metrics["val_acc5"] == 100
    assert 0 <= metrics["val_acc1"] <= 100


def test_dino_clips_by_itself_and_by_the_trainer(make_config: Any, tmp_path: Path) -> None:
    """Its own method of that name takes one number, Lightning's hook takes the optimiser."""
    config = make_config("dino", optimizer={"kwargs": {"momentum": 0.0}})
    norms = {}
    for name, changes in {
        "free": {},
        "own": {"method_kwargs": {**config["method_kwargs"], "clip_grad": 1e-4}},
        "trainer": {"gradient_clip_val": 1e-4},
    }.items():
        watch = run({**config, **changes}, tmp_path / name)
        after = watch.state
        key = "backbone.layer4.0.conv1.weight"
        norms[name] = float((after[key] - watch.before[key]).norm())
    assert norms["own"] < norms["free"] / 10
    assert norms["trainer"] < norms["free"] / 10


@pytest.mark.parametrize(("dim", "eps"), [(4, 0.0), (8, 0.1)])
def test_whitening_gives_uncorrelated_features(loaded: host.Host, dim: int, eps: float) -> None:
    from solo.methods import wmse
    from solo.utils import whitening

    assert wmse.Whitening2d is whitening.Whitening2d
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(dim, dim, generator=generator)
    x = torch.randn(64, dim, generator=generator) @ mixing + 3
    found = whitening.Whitening2d(dim, eps=eps)(x)
    assert found.shape == x.shape
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(dim), atol=1e-4, rtol=0)
    # W (cov) W' is the identity for the covariance shrunk by eps.
    covariance = torch.cov(x.T)
    shrunk = (1 - eps) * covariance + eps * torch.eye(dim)
    factor = torch.linalg.cholesky(shrunk)
    expected = torch.linalg.solve_triangular(factor, covariance, upper=False)
    expected = torch.linalg.solve_triangular(factor, expected.T, upper=False)
    torch.testing.assert_close(torch.cov(found.T), expected, atol=1e-3, rtol=1e-3)
    if eps == 0:
        torch.testing.assert_close(torch.cov(found.T), torch.eye(dim), atol=1e-3, rtol=1e-3)
