"""What distillation methods share: the teacher, the student's head, the targets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.run_dir import checkpoints
from solo_ext.methods.distillation import TeacherKwargs
from solo_ext.pretrained.teachers import load_teacher

MakeConfig = Callable[..., dict[str, Any]]
Build = Callable[..., Any]
METHODS = ("seed", "protoseed")
SIDE = 16
VIT = {
    "name": "timm/vit_tiny_patch16_224",
    "kwargs": {"embed_dim": 12, "depth": 1, "num_heads": 2, "img_size": 16, "patch_size": 8},
}


def refusal(make: Callable[..., Any], *args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make(*args, **kwargs)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


class Watch(Callback):
    """The teacher before and after training, its mode in between, and what it saw."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []
        self.crops: list[Tensor] = []

    def on_train_start(self, trainer: Any, method: Any) -> None:
        self.before = _weights(method.teacher)
        method.teacher.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].clone()))

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        assert not any(m.training for m in method.teacher.modules())
        assert method.backbone.training
        crops = batch[1] if isinstance(batch[1], list) else [batch[1]]
        self.crops += [c.clone() for c in crops]

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.after = _weights(method.teacher)


def _weights(network: nn.Module) -> dict[str, Tensor]:
    held = [*network.named_parameters(), *network.named_buffers()]
    return {name: value.detach().clone() for name, value in held}


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_leaves_the_teacher_as_it_was(
    method: str, make_distilled: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It sees the student's views, is no part of the checkpoint, and is named in the log."""
    caplog.set_level("INFO", logger="solo_ext")
    watch = Watch()
    prepared = prepare(make_distilled(method))
    result = pretrain(prepared, run_dir=tmp_path / "run", callbacks=[watch], show_progress=False)
    assert len(watch.before) > 20
    assert any(name.endswith("running_mean") for name in watch.before)
    for name, value in watch.before.items():
        assert torch.equal(value, watch.after[name]), name
    assert result.checkpoint is not None
    state = torch.load(result.checkpoint, weights_only=True)["state_dict"]
    assert any(name.startswith("backbone.") for name in state)
    assert not any(name.startswith("teacher.backbone") for name in state)
    assert not any(name.startswith("teacher.head") for name in state)
    assert len(watch.seen) == len(watch.crops) == 2
    assert all(torch.equal(*pair) for pair in zip(watch.seen, watch.crops, strict=True))
    (said,) = [m for m in caplog.messages if m.startswith("teacher: ")]
    assert "8 prototypes" in said


@pytest.mark.parametrize("method", METHODS)
def test_the_teacher_is_not_optimised(method: str, make_method: Build) -> None:
    network = make_method(method)
    assert list(network.teacher.parameters())
    assert not any(p.requires_grad for p in network.teacher.parameters())
    held = {id(p) for group in network.learnable_params for p in group["params"]}
    assert held.isdisjoint(id(p) for p in network.teacher.parameters())
    assert {id(p) for p in network.projector.parameters()} <= held
    network.train()
    assert not any(m.training for m in network.teacher.modules())


OWN = {"crop_size": SIDE, "num_crops": 1, "mean": [0.3, 0.4, 0.5], "std": [0.2, 0.3, 0.4]}
ONE = {"crop_size": SIDE, "num_crops": 1}


def test_under_the_teacher_s_own_normalisation(make_method: Build) -> None:
    network, same = (make_method("seed", [crop]) for crop in (OWN, ONE))
    pixels = torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))

    def normalised(m: Any, s: Any) -> Tensor:
        return (pixels - torch.tensor(m).view(3, 1, 1)) / torch.tensor(s).view(3, 1, 1)

    given = normalised(OWN["mean"], OWN["std"])
    path = str(network.cfg.method_kwargs.teacher.path)
    loaded = load_teacher(TeacherKwargs(layout="run", path=path))
    (found,), (other,) = network.targets([given]), same.targets([given])
    (expected,) = same.targets([normalised(loaded.mean, loaded.std)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (other - expected).abs().max() > 1e-2


def test_each_crop_has_its_own_normalisation(make_method: Build) -> None:
    first, second = make_method("seed", [ONE, OWN]).teacher_views
    x = torch.randn(2, 3, SIDE, SIDE)
    torch.testing.assert_close(first(x), x)
    assert (second(x) - x).abs().max() > 0.1


def test_another_teacher_is_refused_on_resume(
    make_distilled: MakeConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    own = tmp_path / "teacher"
    backbone = {"kwargs": {"channels": [16, 16, 16, 16], "small_stem": False}}
    pretrain(prepare(make_config("swav", backbone=backbone)), run_dir=own, show_progress=False)
    section = {"teacher": {"path": str(own)}}
    config = make_distilled("seed", method_kwargs=section, max_epochs=2)
    run = tmp_path / "run"
    pretrain(prepare(config), run_dir=run, show_progress=False)
    (held,) = checkpoints(own)
    state = torch.load(held.path, weights_only=True)
    state["state_dict"]["backbone.conv1.0.weight"] += 1
    torch.save(state, held.path)
    with pytest.raises(UserError, match="was trained with the teacher"):
        pretrain(prepare(config), run_dir=run, show_progress=False)


LINEAR, NORM, RELU = nn.Linear, nn.BatchNorm1d, nn.ReLU


@pytest.mark.parametrize(
    ("kwargs", "layers"),
    [
        ({}, [LINEAR, RELU, LINEAR]),
        ({"head_batch_norm": True}, [LINEAR, NORM, RELU, LINEAR]),
        ({"proj_layers": 3}, [LINEAR, RELU, LINEAR, RELU, LINEAR]),
        # solo-learn's SwAV has a normalised head.
        ({"head": "teacher"}, [LINEAR, NORM, RELU, LINEAR]),
        ({"head": "teacher", "head_batch_norm": False}, [LINEAR, RELU, LINEAR]),
    ],
)
def test_heads(kwargs: dict[str, Any], layers: list[Any], make_method: Build) -> None:
    """Like the teacher's, or of linear layers; both as long as the teacher's embeddings."""
    network = make_method("seed", proj_hidden_dim=5, **kwargs)
    assert network(torch.randn(3, 3, SIDE, SIDE))["z"].shape == (3, 8)
    assert [type(layer) for layer in network.projector] == layers
    assert kwargs.get("head") == "teacher" or network.projector[0].out_features == 5


def test_a_vision_transformer_s_student_has_batch_norm(
    make_method: Build, make_config: MakeConfig, tmp_path: Path
) -> None:
    run = tmp_path / "vit"
    pretrain(prepare(make_config("mocov2plus") | {"backbone": VIT}), run_dir=run)
    section = {"path": str(run)}
    for given, expected in ((None, True), (False, False)):
        network = make_method("seed", teacher=section, head="teacher", head_batch_norm=given)
        assert any(isinstance(m, NORM) for m in network.projector.modules()) is expected
    # It takes images of one size only.
    error = refusal(make_method, "seed", [{"crop_size": 24, "num_crops": 1}], teacher=section)
    assert error.key == "augmentations"
    assert "24" in str(error)
    assert "crops of 16" in str(error)


def test_a_teacher_without_head(make_method: Build, tmp_path: Path) -> None:
    kwargs = {"channels": [8, 8, 8, 8]}
    model = timm.create_model("resnet10t", num_classes=0, **kwargs)
    file = tmp_path / "weights.pth"
    torch.save(model.state_dict(), file)
    section = {"layout": "timm", "path": str(file), "model": "resnet10t", "model_kwargs": kwargs}
    error = refusal(make_method, "protoseed", teacher=section)
    assert error.key == "method_kwargs.head"
    assert "mlp" in str(error)
    network = make_method("protoseed", teacher=section, head="mlp")
    assert network.projector[-1].out_features == model.num_features


SWAV = {"layout": "swav", "path": "/nowhere/swav_800ep_pretrain.pth.tar"}
REGRESSION = {"loss": "regression", "teacher_temperature": None}


@pytest.mark.parametrize(
    ("method", "kwargs", "key", "says"),
    [
        ("protoseed", {"teacher": {"path": None}}, "teacher.path", "run directory"),
        ("protoseed", {"teacher": {"path": "/nowhere/teacher"}}, "teacher.path", "/nowhere"),
        ("protoseed", {"teacher": SWAV}, "teacher.path", "https://"),
        ("protoseed", {"teacher": {"dtype": "int8"}}, "teacher.dtype", "bfloat16"),
        ("protoseed", {"head": "teachers"}, "head", "teacher"),
        ("protoseed", {"prototypes": "old"}, "num_prototypes", "8"),
        ("protoseed", {"num_prototypes": 0}, "num_prototypes", "greater than 0"),
        ("protoseed", {"prior_momentum": 1.5}, "prior_momentum", "1"),
        ("protoseed", {"assignment": "hard"}, "assignment", "softmax"),
        ("protoseed", {"teacher_temperature": 0.0}, "teacher_temperature", "greater than 0"),
        ("seed", {"teacher_temperature": 0.0}, "teacher_temperature", "greater than 0"),
        ("seed", {"teacher_temperature": None}, "teacher_temperature", ""),
        ("seed", {"loss": "regression", "teacher_temperature": 0.01}, "teacher_temperature", ""),
        ("seed", {"tau_plus": 0.1}, "tau_plus", ""),
        ("seed", {**REGRESSION, "beta": 1.0}, "beta", ""),
        ("seed", {"mixing": {"num_pair_mixes": 3}}, "mixing", ""),
        ("seed", {"negatives": "batch"}, "negatives", "take loss=contrastive"),
    ],
    ids=str,
)
def test_refused_settings(
    method: str,
    kwargs: dict[str, Any],
    key: str,
    says: str,
    make_distilled: MakeConfig,
    make_method: Build,
) -> None:
    if method == "seed":
        # What does not depend on the teacher is refused before its file is read.
        error = refusal(prepare, make_distilled(method, method_kwargs=kwargs))
    else:
        error = refusal(make_method, method, **kwargs)
    assert error.key == f"method_kwargs.{key}"
    assert says in str(error)


def test_three_large_crops_are_refused(make_method: Build) -> None:
    error = refusal(make_method, "seed", [{"crop_size": SIDE, "num_crops": 3}])
    assert error.key == "augmentations"
    assert "1 or 2" in str(error)


@pytest.mark.parametrize("method", ["seed", "protoseed", "protocpc"])
def test_mixed_precision_and_accumulated_gradients(
    method: str, make_config: MakeConfig, make_distilled: MakeConfig, tmp_path: Path
) -> None:
    """Queue and prior move with every micro-batch; numbers stay finite and near those of fp32."""
    losses = {}
    for precision in ("32-true", "bf16-mixed"):
        settings: dict[str, Any] = {
            "precision": precision,
            "optimizer": {"batch_size": 12, "lr": 0.05},
            "accumulate_grad_batches": 2,
        }
        if method != "protocpc":
            settings["method_kwargs"] = {"teacher": {"dtype": "bfloat16"}}
        make = make_config if method == "protocpc" else make_distilled
        folder = tmp_path / precision
        config = make(method, **settings)
        # Not a network with convolutions: their bf16 gradients on CPUs are not always finite,
        # whatever the method.
        config["backbone"] = VIT
        result = pretrain(prepare(config), run_dir=folder, show_progress=False)
        assert result.checkpoint is not None
        state = torch.load(result.checkpoint, weights_only=True)["state_dict"]
        assert all(v.isfinite().all() for v in state.values() if v.is_floating_point())
        if method == "seed":
            assert state["queues.0._extra_state"].tolist()[1:] == [48, 4]
        else:
            assert state["prior.value"].dtype == torch.float32
            torch.testing.assert_close(state["prior.value"].sum(), torch.tensor(20.0))
        logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[precision] = [x for x in logged if f"train_{method}_loss" in x][-1]
    values = [x[f"train_{method}_loss"] for x in losses.values()]
    assert values[0] == pytest.approx(values[1], rel=0.1)
