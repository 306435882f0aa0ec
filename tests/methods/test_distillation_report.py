"""What the distillation methods say of settings that do not do what a user may think."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core import distributed
from solo_ext.lab.training.prepare import prepare
from solo_ext.methods import METHODS, protocpc, protoseed, seed
from solo_ext.methods.distillation import idle_in_head
from solo_ext.methods.registry import IMAGENET, idle_in_projector

MakeConfig = Callable[..., dict[str, Any]]
DIM = 128
REPORTS: dict[str, Callable[[DictConfig, int], None]] = {
    "seed": seed.report_settings,
    "protoseed": lambda cfg, _: protocpc.report_settings(
        cfg, protoseed.ProtoSEEDKwargs, idle_in_head(cfg.method_kwargs)
    ),
    "protocpc": lambda cfg, _: protocpc.report_settings(
        cfg, protocpc.ProtoCPCKwargs, idle_in_projector(cfg.method_kwargs)
    ),
}
LOSS = {"loss": "seed", "teacher_temperature": 0.01}
CONTRASTIVE, REGRESSION = {"loss": "contrastive"}, {"loss": "regression"}
BATCH = {**CONTRASTIVE, "negatives": "batch"}
MIXES = {"num_pair_mixes": 4, "warmup_epochs": 0}
CROPS = {"small_crop_target": "large", "small_weight": 0.5}
ONE_LAYER = {"proj_layers": 1, "proj_hidden_dim": 16}
PRIOR = {"prior_momentum": 0.5, "prior_order": "after_loss"}
NO_HIDDEN = "(proj_layers=1 has no hidden layer)"
OF_TEACHER = (
    "method_kwargs.proj_hidden_dim, method_kwargs.proj_layers "
    "(head=teacher has the layers of the teacher's head)"
)
FLAT = {"assignment": "softmax", "sinkhorn_iterations": 5}
NOT_ITERATED = "method_kwargs.sinkhorn_iterations (assignment=softmax does not iterate)"
NO_PRIOR = "method_kwargs.prior_momentum, method_kwargs.prior_order (loss=ce has no prior)"
IDLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "the teacher's head": ("seed", {**LOSS, "head": "teacher", **ONE_LAYER}, OF_TEACHER),
    "one layer": (
        "seed",
        {**LOSS, **ONE_LAYER, "head_batch_norm": True},
        f"method_kwargs.proj_hidden_dim, method_kwargs.head_batch_norm {NO_HIDDEN}",
    ),
    "small crops": (
        "seed",
        {**LOSS, **CROPS},
        "method_kwargs.small_crop_target, method_kwargs.small_weight (there are no small crops)",
    ),
    "negatives of seed": (
        "seed",
        {**LOSS, "negatives": "batch", "detach_weights": True, "mixing": {"num_hard": 9}},
        "method_kwargs.negatives, method_kwargs.detach_weights, method_kwargs.mixing.num_hard "
        "(loss=seed has no negatives)",
    ),
    "what regression lacks": (
        "seed",
        {
            **REGRESSION,
            "mixing": {"warmup_epochs": 1},
            "queue_size": 48,
            "student_temperature": 0.3,
        },
        "method_kwargs.mixing.warmup_epochs (loss=regression has no negatives); "
        "method_kwargs.queue_size (loss=regression has no queue); "
        "method_kwargs.student_temperature (loss=regression has no temperature)",
    ),
    "queue": (
        "seed",
        {**BATCH, "queue_size": 48},
        "method_kwargs.queue_size (negatives=batch has no queue)",
    ),
    "weights": (
        "seed",
        {**CONTRASTIVE, "detach_weights": True},
        "method_kwargs.detach_weights (beta=0 has no weights)",
    ),
    "mining without mixing": (
        "seed",
        {**CONTRASTIVE, "mixing": {"num_hard": 9, "warmup_epochs": 0}},
        "method_kwargs.mixing.num_hard, method_kwargs.mixing.warmup_epochs "
        "(no mixtures are asked for)",
    ),
    "protoseed's one layer": (
        "protoseed",
        {**ONE_LAYER, "head": "mlp"},
        f"method_kwargs.proj_hidden_dim {NO_HIDDEN}",
    ),
    "protocpc's one layer": (
        "protocpc",
        {**ONE_LAYER, "proj_batch_norm": False},
        f"method_kwargs.proj_hidden_dim, method_kwargs.proj_batch_norm {NO_HIDDEN}",
    ),
    "protocpc's several": (
        "protocpc",
        {**FLAT, "loss": "ce", "prior_momentum": 1.0, "prior_order": "after_loss"},
        f"{NOT_ITERATED}; {NO_PRIOR}",
    ),
}
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of a teacher": ("seed", {**LOSS, "head": "teacher", "head_batch_norm": True}),
    "an mlp": ("seed", {**LOSS, "proj_layers": 3, "proj_hidden_dim": 16, "head_batch_norm": True}),
    "a queue": ("seed", {**LOSS, "queue_size": 48, "student_temperature": 0.3}),
    "regression": ("seed", REGRESSION),
    "a contrast": ("seed", {**CONTRASTIVE, "queue_size": 48, "student_temperature": 0.3}),
    "weights": ("seed", {**BATCH, "beta": 1.0, "detach_weights": True}),
    "mixing": ("seed", {**CONTRASTIVE, "mixing": {**MIXES, "num_hard": 9}}),
    "sinkhorn and prior": ("protoseed", {**PRIOR, "sinkhorn_iterations": 5}),
    "protoseed's mlp": ("protoseed", {"head": "mlp", "proj_layers": 3, "proj_hidden_dim": 16}),
    "protocpc's": ("protocpc", {**PRIOR, "proj_layers": 2, "proj_hidden_dim": 16}),
}
FLOOR = {"tau_plus": 0.3, "beta": 0.0, "student_temperature": 0.2}


def config(name: str, kwargs: dict[str, Any], small: int = 0) -> DictConfig:
    """Of a batch of 24, with all defaults filled in."""
    method = METHODS[name].target
    filled = check_method_kwargs(method.kwargs_type, kwargs)
    cfg = OmegaConf.create(
        {
            "method": name,
            "max_epochs": 2,
            "optimizer": {"batch_size": 24},
            "data": {"num_large_crops": 1, "num_small_crops": small},
            "method_kwargs": filled.model_dump(),
        }
    )
    method.fill_sizes(cfg, IMAGENET)
    return cfg


def said(caplog: pytest.LogCaptureFixture, cfg: DictConfig, dim: int = DIM) -> str:
    caplog.clear()
    REPORTS[cfg.method](cfg, dim)
    return "\n".join(caplog.messages)


@pytest.mark.parametrize("case", IDLE)
def test_idle_settings(caplog: pytest.LogCaptureFixture, case: str) -> None:
    name, kwargs, listed = IDLE[case]
    line = f"{name}: settings without effect on training: {listed}"
    assert said(caplog, config(name, kwargs)) == line


@pytest.mark.parametrize("case", READ)
def test_settings_that_are_read(caplog: pytest.LogCaptureFixture, case: str) -> None:
    name, kwargs = READ[case]
    assert said(caplog, config(name, kwargs)) == ""


def test_small_crops_are_read_where_there_are(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, config("seed", {**LOSS, **CROPS}, small=2)) == ""


@pytest.mark.parametrize(
    "name",
    [n for n in shipped_configs() if n.rpartition("/")[2].partition("_")[0] in REPORTS],
)
def test_shipped_configs_have_none(caplog: pytest.LogCaptureFixture, name: str) -> None:
    given = compose(name)
    sizes = [a["crop_size"] for a in given["augmentations"] for _ in range(a["num_crops"])]
    kwargs = check_method_kwargs(
        METHODS[given["method"]].target.kwargs_type, given["method_kwargs"]
    )
    cfg = OmegaConf.create({**given, "method_kwargs": kwargs.model_dump()})
    cfg.data.num_small_crops = sum(size < max(sizes) for size in sizes)
    assert said(caplog, cfg) == ""


@pytest.mark.parametrize(
    ("changes", "dim", "warns"),
    [
        ({"tau_plus": 0.3}, DIM, True),
        ({"tau_plus": 0.3, "negatives": "queue"}, DIM, True),
        ({"tau_plus": 0.3, "student_temperature": 1.0}, DIM, False),
        ({"tau_plus": 0.012}, DIM, False),
        ({"tau_plus": 0.013, "beta": 8.0}, DIM, False),
        ({"tau_plus": 0.012}, 10**6, True),
    ],
    ids=str,
)
def test_floor(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], dim: int, warns: bool
) -> None:
    text = said(caplog, config("seed", {**BATCH, **FLOOR, **changes}), dim)
    assert text.startswith("method_kwargs.tau_plus=") if warns else text == ""
    assert ("(watch train_clamped_fraction)" in text) == warns


@pytest.mark.parametrize(
    ("temperature", "size", "warns"),
    [(1e-4, 65536, True), (0.01, 65536, False), (3.5e-3, 1000, True), (3.5e-3, 65536, False)],
)
def test_info_nce(
    caplog: pytest.LogCaptureFixture, temperature: float, size: int, warns: bool
) -> None:
    cfg = config("seed", {"teacher_temperature": temperature, "queue_size": size})
    assert ("the loss is InfoNCE" in said(caplog, cfg)) == warns


@pytest.mark.parametrize("name", ["protoseed", "protocpc"])
def test_flat_prior(caplog: pytest.LogCaptureFixture, name: str) -> None:
    text = said(caplog, config(name, {"prior_momentum": 1.0}))
    assert text.startswith("method_kwargs.prior_momentum=1: the prior stays flat")
    assert said(caplog, config(name, {"prior_momentum": 0.99})) == ""


def test_more_mined_than_a_batch_offers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many crops an image has: negatives are the teacher's of one at a time."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)

    def of(mined: int) -> str:
        kwargs = {**BATCH, "mixing": {**MIXES, "num_hard": mined}}
        return said(caplog, config("seed", kwargs, small=3))

    assert of(47) == ""
    assert of(48).startswith("method_kwargs.mixing.num_hard=48: an anchor has 47 negatives in the")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("seed", {**BATCH, **FLOOR, "queue_size": 9, "teacher_temperature": None}, 2),
        ("protoseed", {"prior_momentum": 1.0, **FLAT}, 2),
        ("protocpc", {"prior_momentum": 1.0, **FLAT}, 2),
    ],
)
def test_said_by_one_process(
    make_distilled: MakeConfig,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    name: str,
    kwargs: dict[str, Any],
    says: int,
    first: bool,
) -> None:
    """And not before training: networks are built to be evaluated too."""
    make = make_config if name == "protocpc" else make_distilled
    prepared = prepare(make(name, method_kwargs=kwargs))
    torch.manual_seed(0)
    method = prepared.method(prepared.cfg)
    assert "settings without effect" not in caplog.text
    # The host may have had something to say.
    caplog.clear()
    method.trainer = SimpleNamespace(
        is_global_zero=first, global_step=0, estimated_stepping_batches=1
    )
    method.on_train_start()
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == says * first
