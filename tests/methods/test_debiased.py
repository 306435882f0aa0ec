"""The method ``debiased`` on the installed host."""

import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from solo_ext import host
from solo_ext.config.compose import compose
from solo_ext.core.errors import ConfigError
from solo_ext.data.loaders import pretrain_loader
from solo_ext.lab.training.prepare import Prepared, prepare
from solo_ext.losses import debiased_loss_func
from solo_ext.losses.contrastive import NegativeEstimator, two_view_terms
from solo_ext.methods import METHODS, Debiased
from solo_ext.methods.contrastive import Contrastive
from solo_ext.methods.contrastive_kwargs import report_settings
from solo_ext.methods.debiased import DebiasedKwargs

TINY = [
    "backbone.kwargs.channels=[8,8,8,8]",
    "optimizer.batch_size=16",
    "method_kwargs.proj_hidden_dim=16",
    "method_kwargs.proj_output_dim=12",
]
DEFAULTS = {
    "proj_hidden_dim": 512,
    "proj_output_dim": 128,
    "proj_layers": 2,
    "proj_batch_norm": True,
    "proj_last_batch_norm": False,
    "pred_hidden_dim": 0,
    "positives": "view",
    "negatives": "batch",
    "temperature": 0.5,
    "tau_plus": 0.1,
    "beta": 0.0,
}
Prepare = Callable[..., Prepared]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Prepares the shipped digits config, made tiny, with overrides."""
    root = tmp_path_factory.mktemp("data")

    def make(*overrides: str) -> Prepared:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SOLO_EXT_DATA", str(root))
            return prepare(compose("digits/debiased", [*TINY, *overrides]))

    return make


@pytest.fixture
def cfg(prepared: Prepare) -> DictConfig:
    """A config as methods take it."""
    return prepared().cfg


def make_batch(batch: int = 16, crops: int = 2) -> list[Any]:
    """Returns random images as a training batch; two of them have no label."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, batch, 3, 32, 32, generator=generator)
    views = images + 0.5 * torch.randn(crops, batch, 3, 32, 32, generator=generator)
    targets = torch.arange(batch) % 10
    targets[3:5] = -1
    return [torch.arange(batch), list(views), targets]


def make_method(cfg: DictConfig) -> Contrastive:
    torch.manual_seed(0)
    return Debiased(cfg)


def by_definition(method: Contrastive, batch: list[Any]) -> tuple[Tensor, Tensor]:
    """Returns the debiased loss and the classifier's loss of a batch."""
    _, views, targets = batch
    outs = [method(view) for view in views]
    tau_plus = method.cfg.method_kwargs.tau_plus
    contrastive = debiased_loss_func(
        outs[0]["z"], outs[1]["z"], method.kwargs.temperature, tau_plus
    )
    losses = [F.cross_entropy(out["logits"], targets, ignore_index=-1) for out in outs]
    return contrastive, torch.stack(losses).mean()


def test_is_there_by_name(prepared: Prepare) -> None:
    made = prepared()
    assert made.method is Debiased is METHODS["debiased"].target
    assert host.load().methods["debiased"] is Debiased
    assert isinstance(make_method(made.cfg), host.BaseMethod)


def test_defaults_are_those_of_the_paper(cfg: DictConfig) -> None:
    cfg.method_kwargs = {}
    method = make_method(cfg)
    kwargs = method.cfg.method_kwargs
    assert {name: kwargs[name] for name in DEFAULTS} == DEFAULTS
    assert (method.kwargs.temperature, method.estimator) == (0.5, NegativeEstimator(0.1))
    assert method(torch.randn(2, 3, 32, 32))["z"].shape == (2, 128)
    del cfg["method_kwargs"]
    assert make_method(cfg).kwargs.temperature == 0.5


def test_takes_its_settings(prepared: Prepare) -> None:
    settings = {"temperature": 0.7, "tau_plus": 0.03, "proj_output_dim": 5, "proj_hidden_dim": 6}
    method = make_method(prepared(*(f"method_kwargs.{k}={v}" for k, v in settings.items())).cfg)
    assert (method.kwargs.temperature, method.estimator.tau_plus) == (0.7, 0.03)
    assert method(torch.randn(2, 3, 32, 32))["z"].shape == (2, 5)
    assert method.projector[0].out_features == 6


@pytest.mark.parametrize("batch_norm", [True, False])
def test_projector_batch_norm(prepared: Prepare, batch_norm: bool) -> None:
    method = make_method(prepared(f"method_kwargs.proj_batch_norm={batch_norm}").cfg)
    kinds = [type(layer).__name__ for layer in method.projector]
    assert ("BatchNorm1d" in kinds) == batch_norm
    # A bias that the batch norm removes again would be a parameter without effect.
    assert (method.projector[0].bias is None) == batch_norm


def test_forward(cfg: DictConfig) -> None:
    method = make_method(cfg).eval()
    images = torch.randn(4, 3, 32, 32)
    out = method(images)
    assert set(out) == {"feats", "logits", "z"}
    assert out["feats"].shape == (4, 8)
    assert out["logits"].shape == (4, 10)
    assert out["z"].shape == (4, 12)
    torch.testing.assert_close(out["z"], method.projector(out["feats"]))
    torch.testing.assert_close(out["logits"], method.classifier(out["feats"]))
    torch.testing.assert_close(out["feats"], method.backbone(images))


@pytest.mark.parametrize(("temperature", "tau_plus"), [(0.5, 0.1), (0.5, 0.0), (0.2, 0.001)])
def test_step_is_the_sum_of_both_losses(
    prepared: Prepare, temperature: float, tau_plus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"method_kwargs.temperature={temperature}", f"method_kwargs.tau_plus={tau_plus}")
    method, batch = make_method(prepared(*settings).cfg), make_batch()
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(method, "log_dict", lambda metrics, **_: logged.update(metrics))
    loss = method.training_step(batch, 0)
    contrastive, classification = by_definition(method, batch)
    torch.testing.assert_close(loss, contrastive + classification)
    torch.testing.assert_close(logged["train_debiased_loss"], contrastive)
    torch.testing.assert_close(logged["train_class_loss"], classification)
    z1, z2 = (method(view)["z"] for view in batch[1])
    floored = two_view_terms(z1, z2, temperature, NegativeEstimator(tau_plus)).floored
    assert logged.get("train_clamped_fraction", torch.zeros(())).item() == pytest.approx(
        floored.item()
    )
    assert ("train_clamped_fraction" in logged) == (tau_plus > 0)


def test_gradients_go_where_they_should(cfg: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier learns from its own loss alone, backbone and projector from the other."""
    # timm starts residual branches at zero, which keeps gradients from their first layers.
    cfg.backbone.kwargs.zero_init_last = False
    method, batch = make_method(cfg), make_batch()
    monkeypatch.setattr(method, "log_dict", lambda *_, **__: None)
    method.training_step(batch, 0).backward()
    found = {name: p.grad for name, p in method.named_parameters()}
    assert all(grad is not None and grad.any() for grad in found.values()), "a dead parameter"
    method.zero_grad()
    contrastive, classification = by_definition(method, batch)
    contrastive.backward(retain_graph=True)
    assert method.classifier.weight.grad is None
    for name, p in method.named_parameters():
        if not name.startswith("classifier"):
            torch.testing.assert_close(p.grad, found[name])
    method.zero_grad()
    classification.backward()
    assert all(
        (p.grad is not None) == name.startswith("classifier")
        for name, p in method.named_parameters()
    )
    torch.testing.assert_close(method.classifier.weight.grad, found["classifier.weight"])


def test_every_parameter_is_learnt_once(cfg: DictConfig) -> None:
    method = make_method(cfg)
    groups = {group["name"]: list(group["params"]) for group in method.learnable_params}
    assert list(groups) == ["backbone", "classifier", "projector"]
    learnt = [id(p) for p in itertools.chain.from_iterable(groups.values())]
    assert sorted(learnt) == sorted(id(p) for p in method.parameters())


def test_a_trainer_runs_it(prepared: Prepare, tmp_path: Path) -> None:
    # The warm-up's first steps are too small to move every weight in single precision.
    made = prepared("scheduler.name=none")
    method = make_method(made.cfg)
    before = {name: p.detach().clone() for name, p in method.named_parameters()}
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(method, pretrain_loader(made.given, made.train))
    assert trainer.global_step == 2
    names = {"train_debiased_loss", "train_clamped_fraction", "train_class_loss", "train_acc1"}
    assert names <= set(trainer.callback_metrics)
    assert 0 <= trainer.callback_metrics["train_clamped_fraction"] <= 1
    assert all(not torch.equal(p, before[name]) for name, p in method.named_parameters())


@pytest.mark.parametrize(("large", "small"), [(1, 0), (3, 0), (1, 1), (3, 6), (0, 2)])
def test_refuses_other_than_two_large_views(cfg: DictConfig, large: int, small: int) -> None:
    """Also from upstream's script, which gets no further than the constructor."""
    cfg.data.num_large_crops, cfg.data.num_small_crops = large, small
    with pytest.raises(ConfigError, match="two views") as caught:
        Debiased(cfg)
    assert caught.value.key == "augmentations"
    assert f"{large} large and {small} small" in str(caught.value)


def test_small_crops_are_further_positives(
    cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate takes the mean over all other crops of the image, M of the paper."""
    cfg.data.num_small_crops, cfg.method_kwargs.tau_plus = 1, 0.1
    method, (indices, views, targets) = make_method(cfg), make_batch(crops=3)
    views[2] = views[2][:, :, :16, :16]
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(method, "log_dict", lambda metrics, **_: logged.update(metrics))
    method.training_step([indices, views, targets], 0)
    unit = [F.normalize(method(view)["z"], dim=1) for view in views]
    losses = []
    for v, row in itertools.product(range(3), range(len(targets))):
        similar = [(z @ unit[v][row] / 0.5).exp() for z in unit]
        positives = torch.stack([s[row] for u, s in enumerate(similar) if u != v])
        negatives = torch.cat([torch.cat((s[:row], s[row + 1 :])) for s in similar])
        estimate = (negatives.mean() - 0.1 * positives.mean()) / 0.9
        mass = len(negatives) * estimate.clamp(min=math.exp(-2))
        losses.append((-(positives / (positives + mass)).log()).mean())
    torch.testing.assert_close(logged["train_debiased_loss"], torch.stack(losses).mean())


@pytest.mark.parametrize("count", [1, 3])
def test_refuses_other_crops_of_the_config(prepared: Prepare, count: int) -> None:
    with pytest.raises(ConfigError, match="two views"):
        Debiased(prepared(f"augmentations.0.num_crops={count}").cfg)


@pytest.mark.parametrize(
    ("temperature", "tau_plus", "dim", "warns"),
    [
        (0.1, 0.1, 128, True),
        (0.2, 0.1, 128, True),
        (0.07, 0.01, 128, True),
        (0.5, 0.1, 128, False),
        (1.0, 0.1, 128, False),
        (0.5, 0.3, 128, True),
        (0.1, 0.0001, 128, False),
        (0.1, 0.0, 128, False),
        (0.01, 0.0, 128, False),
        # So few dimensions that the usual estimate leaves the range of floats.
        (0.01, 0.1, 1, False),
        (0.015, 0.1, 2, False),
    ],
)
def test_warns_of_the_floor(
    cfg: DictConfig,
    temperature: float,
    tau_plus: float,
    dim: int,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not the constructor, which every process calls, also where nothing is trained."""
    cfg.method_kwargs = {
        "temperature": temperature,
        "tau_plus": tau_plus,
        "proj_output_dim": dim,
        "proj_hidden_dim": 8,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method = Debiased(cfg)
    # The host has its own to say.
    assert not any("floor" in str(w.message) for w in caught)
    assert "floor" not in caplog.text
    caplog.clear()
    report_settings(method.cfg, DebiasedKwargs, None)
    messages = caplog.messages
    assert len(messages) == warns
    if warns:
        assert "most anchors will sit on the floor" in messages[0]
        assert f"method_kwargs.tau_plus={tau_plus}" in messages[0]
        assert f"temperature={temperature}" in messages[0]
        assert "train_clamped_fraction" in messages[0]


MISTAKES = [
    ({"tau_pluss": 0.1}, "method_kwargs.tau_pluss", "did you mean 'tau_plus'"),
    ({"temprature": 0.5}, "method_kwargs.temprature", "did you mean 'temperature'"),
    ({"tau_plus": 1.0}, "method_kwargs.tau_plus", "below 1"),
    ({"tau_plus": -0.1}, "method_kwargs.tau_plus", "0 or more"),
    ({"temperature": 0.0}, "method_kwargs.temperature", "above 0"),
    ({"temperature": "0.5"}, "method_kwargs.temperature", "number"),
    ({"proj_output_dim": 0}, "method_kwargs.proj_output_dim", "above 0"),
    ({"mixing": {"num_hrad": 3}}, "method_kwargs.mixing.num_hrad", "did you mean 'num_hard'"),
    ({"proj_hidden_dim": 1.5}, "method_kwargs.proj_hidden_dim", "integer"),
    ({"proj_batch_norm": 3}, "method_kwargs.proj_batch_norm", "true or false"),
]


@pytest.mark.parametrize(("given", "key", "remedy"), MISTAKES)
def test_constructor_refuses_mistakes(
    cfg: DictConfig, given: dict[str, Any], key: str, remedy: str
) -> None:
    """Upstream's own script builds the method without our checks before it."""
    cfg.method_kwargs = given
    with pytest.raises(ConfigError, match=remedy) as caught:
        Debiased(cfg)
    assert caught.value.key == key


def test_preparing_refuses_mistakes(prepared: Prepare) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tau_plus'"):
        prepared("method_kwargs.tau_pluss=0.1")
    assert Debiased.kwargs_type is DebiasedKwargs
