"""``backbone.weights``: every layout's backbone against a plain load, and what does not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import nn

from solo_ext.config.schema import Backbone
from solo_ext.host import Host
from solo_ext.host.backbones import build_backbone
from solo_ext.pretrained.export import export
from solo_ext.pretrained.weights import start_from, weights_digest
from tests.pretrained.conftest import (
    OFFICIAL,
    TINY_RESNET,
    TINY_VIT,
    MakeRun,
    Official,
    features,
    refusal,
)
from tests.pretrained.test_recognise import dinov2, timm_model

MakeOfficial = Callable[..., Official]
Build = Callable[..., nn.Module]


@pytest.fixture
def build(loaded: Host) -> Build:
    """``build(name, dataset="custom", **kwargs)``: a method's backbone, of other weights."""

    def make(name: str, dataset: str = "custom", **kwargs: Any) -> nn.Module:
        table = loaded.backbones
        return build_backbone(table, name, kwargs, method="simclr", dataset=dataset)[0].eval()

    return make


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def start(network: nn.Module, weights: Path | str, name: str = "timm/any", *more: nn.Module) -> Any:
    return start_from(Backbone(name=name, weights=str(weights)), network, *more)


@pytest.mark.parametrize("name", OFFICIAL)
def test_published_files(name: str, official: MakeOfficial, build: Build, tmp_path: Path) -> None:
    given, path = official(name, tiny=True), tmp_path / "file.pth"
    torch.save(given.content, path)
    if name == "dino_deitsmall16":
        make = lambda: build("timm/vit_small_patch16_224", **TINY_VIT)  # noqa: E731
    else:
        make = lambda: build("timm/resnet10t", **TINY_RESNET)  # noqa: E731
    network, copy = make(), make()
    for value in copy.state_dict().values():
        value.zero_()
    began = start(network, path, "timm/any", copy)
    assert equal(network, given.network)
    assert equal(copy, network)
    assert began.taken == len(given.network.state_dict())
    assert [*began.left_out] == given.head
    assert began.digest == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert began.digest == weights_digest(str(path))
    line = str(began)
    assert f"all {began.taken} tensors from " in line
    assert f"left out: {', '.join(given.head[:3])}" in line


def test_key_encoder_is_left_out(official: MakeOfficial, build: Build, tmp_path: Path) -> None:
    given = official("moco_v2", tiny=True)
    twin = {k.replace("encoder_q", "encoder_k"): v + 1 for k, v in given.weights.items()}
    torch.save({"state_dict": {**twin, **given.weights}}, tmp_path / "file.pth")
    network = build("timm/resnet10t", **TINY_RESNET)
    began = start(network, tmp_path / "file.pth")
    assert equal(network, given.network)
    assert {*began.left_out} == {*given.head, *twin}


@pytest.mark.parametrize("name", ["resnet18", "timm/resnet18"])
def test_torchvisions_and_timms_files(name: str, build: Build, tmp_path: Path) -> None:
    """solo-learn's own ResNets and timm's have torchvision's keys."""
    plain = torchvision.models.resnet18()
    plain.bn1.num_batches_tracked.fill_(7)
    network = build(name)
    torch.save({"model": {f"module.{k}": v for k, v in plain.state_dict().items()}}, tmp_path / "a")
    other: Any = timm_model("resnet18")
    save_file(other.state_dict(), tmp_path / "b.safetensors")
    began = start(network, tmp_path / "a", name)
    assert [*began.left_out] == ["module.fc.weight", "module.fc.bias"]
    plain.fc = nn.Identity()
    assert equal(network, plain)
    start(network, tmp_path / "b.safetensors", name)
    other.reset_classifier(0)
    assert equal(network, other)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_files_of_compiled_networks(prefix: str, build: Build, tmp_path: Path) -> None:
    plain = timm_model("resnet10t", **TINY_RESNET)
    torch.save({prefix + k: v for k, v in plain.state_dict().items()}, tmp_path / "a.pth")
    network = build("timm/resnet10t", **TINY_RESNET)
    began = start(network, tmp_path / "a.pth")
    assert [*began.left_out] == [f"{prefix}fc.weight", f"{prefix}fc.bias"]
    plain.reset_classifier(0)
    assert equal(network, plain)


def test_files_of_half_precision(build: Build, tmp_path: Path) -> None:
    plain = timm_model("resnet10t", num_classes=0, **TINY_RESNET)
    half = {k: v.half() if v.is_floating_point() else v for k, v in plain.state_dict().items()}
    torch.save(half, tmp_path / "file.pth")
    network = build("timm/resnet10t", **TINY_RESNET)
    start(network, tmp_path / "file.pth")
    assert network.state_dict()["conv1.0.weight"].dtype == torch.float32
    assert equal(network, plain.half().float())


def test_runs_and_exports(make_run: MakeRun, build: Build, tmp_path: Path) -> None:
    run = make_run()
    (checkpoint,) = run.glob("*.ckpt")
    state = torch.load(checkpoint)
    state["state_dict"]["momentum_backbone.bn1.weight"] = torch.ones(3)
    torch.save(state, checkpoint)
    plain = timm.create_model("resnet10t", num_classes=0, **TINY_RESNET)
    plain.load_state_dict(
        {k[9:]: v for k, v in state["state_dict"].items() if k.startswith("backbone.")}
    )
    folder = export(run, "timm", tmp_path / "folder").out
    file = export(run, "safetensors", tmp_path / "file.safetensors").out
    digests = {weights_digest(str(path)) for path in (run, checkpoint)}
    assert digests == {hashlib.sha256(checkpoint.read_bytes()).hexdigest()[:16]}
    for path in (run, checkpoint, folder, file):
        network = build("timm/resnet10t", **TINY_RESNET)
        began = start(network, path)
        assert equal(network, plain)
        assert began.digest == weights_digest(str(path))
        left_out = ["momentum_backbone.bn1.weight"] if path in (run, checkpoint) else []
        assert [*began.left_out] == left_out


def test_positions_are_resized_as_timm_does(build: Build, tmp_path: Path) -> None:
    plain = timm_model("vit_tiny_patch16_224", num_classes=7, **TINY_VIT)
    torch.save(plain.state_dict(), tmp_path / "file.pth")
    network = build("timm/vit_tiny_patch16_224", img_size=64, **TINY_VIT)
    began = start(network, tmp_path / "file.pth")
    assert (began.resized, [*began.left_out]) == (["pos_embed"], ["head.weight", "head.bias"])
    assert "resized: pos_embed; left out: head.weight" in str(began)
    held, own = plain.state_dict(), network.state_dict()
    wanted = resample_abs_pos_embed(held.pop("pos_embed"), [4, 4])
    torch.testing.assert_close(own.pop("pos_embed"), wanted)
    assert all(torch.equal(own[k], held[k]) for k in own)


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")
def test_tables_of_relative_positions_are_resized(build: Build, tmp_path: Path) -> None:
    """A Swin of windows of 4 from one of windows of 7, as timm does it with a download."""
    name = "swin_tiny_patch4_window7_224"
    kwargs: dict[str, Any] = {"depths": (1,), "num_heads": (2,), "embed_dim": 16}
    torch.save(timm_model(name, num_classes=3, **kwargs).state_dict(), tmp_path / "file.pth")
    network = build(f"timm/{name}", img_size=32, window_size=4, **kwargs)
    began = start(network, tmp_path / "file.pth")
    (table,) = began.resized
    assert table.endswith("relative_position_bias_table")
    overlay = {"file": str(tmp_path / "file.pth"), "num_classes": 3, "custom_load": False}
    kwargs = {**kwargs, "img_size": 32, "window_size": 4, "num_classes": 0}
    own = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    assert equal(network, own)


@pytest.mark.parametrize("classes", [0, 7])
def test_norms_below_the_prefix_of_a_classifier(classes: int, build: Build, tmp_path: Path) -> None:
    """A ConvNeXt without classifier keeps ``head.norm``."""
    kwargs: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}
    plain: Any = timm_model("convnext_atto", num_classes=classes, **kwargs)
    plain.head.norm.weight.data.fill_(2)
    torch.save(plain.state_dict(), tmp_path / "file.pth")
    network = build("timm/convnext_atto", **kwargs)
    began = start(network, tmp_path / "file.pth")
    assert network.state_dict()["head.norm.weight"].eq(2).all()
    assert [*began.left_out] == (["head.fc.weight", "head.fc.bias"] if classes else [])


def test_timm_changes_no_weights_that_fit_but_for_a_classifier(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = timm_model("resnet10t", num_classes=5, **TINY_RESNET)
    torch.save(plain.state_dict(), tmp_path / "file.pth")
    plain.reset_classifier(0)
    network = build("timm/resnet10t", **TINY_RESNET)
    added = lambda state, _: {k: v + 1 for k, v in state.items()}  # noqa: E731
    monkeypatch.setattr("timm.models.resnet.checkpoint_filter_fn", added, raising=False)
    start(network, tmp_path / "file.pth")
    assert equal(network, plain)


def test_networks_derived_from_timms(build: Build, tmp_path: Path) -> None:
    torch.save(timm_model("vit_tiny_patch16_224", **TINY_VIT).state_dict(), tmp_path / "a")
    network = build("timm/vit_tiny_patch16_224", img_size=64, **TINY_VIT)
    network.__class__ = type("Mine", (type(network),), {})
    assert start(network, tmp_path / "a").resized == ["pos_embed"]


def test_dinov2(build: Build, tmp_path: Path) -> None:
    plain = timm_model("vit_small_patch14_reg4_dinov2", num_classes=0, img_size=28, depth=2)
    torch.save(dinov2(plain), tmp_path / "file.pth")
    network = build("timm/vit_small_patch14_reg4_dinov2", img_size=28, depth=2)
    began = start(network, tmp_path / "file.pth")
    x = torch.randn(2, 3, 28, 28)
    torch.testing.assert_close(features(network, x), features(plain, x), rtol=1e-4, atol=1e-4)
    assert [*began.left_out] == ["mask_token"]


def test_models_of_libraries(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the store of torchvision, as it fetches them; what cannot be fetched is one line."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain = torchvision.models.resnet18()
    name = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    stored = tmp_path / "hub" / "checkpoints" / name
    stored.parent.mkdir(parents=True)
    torch.save(plain.state_dict(), stored)
    network = build("resnet18")
    monkeypatch.setattr("torch.hub._get_torch_home", lambda: str(tmp_path))
    began = start(network, "torchvision/resnet18:IMAGENET1K_V1", "resnet18")
    plain.fc = nn.Identity()
    assert equal(network, plain)
    assert not began.file
    assert weights_digest("torchvision/resnet18:IMAGENET1K_V1") is None
    assert began.title == "resnet18 of torchvision's IMAGENET1K_V1"
    stored.write_text("nothing")
    line = refusal(start, network, "torchvision/resnet18:IMAGENET1K_V1", "resnet18")
    assert line.startswith("backbone.weights='torchvision/resnet18:IMAGENET1K_V1': torchvision can")
    assert line.endswith("; see to the connection, or name a file with these weights")
    assert "method_kwargs" not in line


def unfit(state: dict[str, Any], edit: Callable[[dict[str, Any]], Any], file: Path) -> Path:
    edit(state)
    torch.save(state, file)
    return file


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda s: s.pop("layer2.0.bn1.weight"),
            "backbone 'timm/any' has layer2.0.bn1.weight (8,), which the file lacks",
        ),
        (
            lambda s: s.update({"layer2.0.bn1.weight": torch.ones(4)}),
            "layer2.0.bn1.weight is (4,) in the file and (8,) in the backbone",
        ),
        (
            lambda s: s.update({"layer5.0.bn1.weight": torch.ones(4)}),
            "backbone 'timm/any' has no layer5.0.bn1.weight (4,)",
        ),
        (
            lambda s: s["layer2.0.bn1.weight"].fill_(torch.nan),
            "layer2.0.bn1.weight of checkpoint",
        ),
    ],
)
def test_one_tensor_that_does_not_fit(
    edit: Callable[[dict[str, Any]], Any], says: str, build: Build, tmp_path: Path
) -> None:
    network = build("timm/resnet10t", **TINY_RESNET)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    state = timm_model("resnet10t", **TINY_RESNET).state_dict()
    path = unfit(state, edit, tmp_path / "file.pth")
    line = refusal(start, network, path)
    assert line.startswith(f"backbone.weights={str(path)!r}")
    assert says in line
    # Nothing is loaded by halves.
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_stems_for_small_images(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    torch.save(torchvision.models.resnet18().state_dict(), path)
    for network, name, remedy in (
        (
            build("timm/resnet18", small_stem=True),
            "timm/resnet18",
            "set backbone.kwargs.small_stem",
        ),
        (build("resnet18", "cifar10"), "resnet18", "take backbone.name=timm/resnet18 with "),
    ):
        line = refusal(start, network, path, name)
        assert "conv1.weight is (64, 3, 7, 7) in the file and (64, 3, 3, 3) in the back" in line
        assert remedy in line


def test_patches_of_another_size_are_not_resampled(build: Build, tmp_path: Path) -> None:
    torch.save(timm.create_model("vit_tiny_patch16_224", **TINY_VIT).state_dict(), tmp_path / "a")
    for size in (4, 32):
        network = build("timm/vit_tiny_patch16_224", img_size=32, patch_size=size, **TINY_VIT)
        line = refusal(start, network, tmp_path / "a")
        shapes = f"(16, 3, 16, 16) in the file and (16, 3, {size}, {size}) in"
        assert f"patch_embed.proj.weight is {shapes}" in line
        assert "set backbone.kwargs.patch_size to 16" in line


def test_deeper_network_is_no_start_of_a_shallower_one(build: Build, tmp_path: Path) -> None:
    """All tensors of a ResNet-18 have equals of their names and shapes in a ResNet-34."""
    torch.save(torchvision.models.resnet34().state_dict(), tmp_path / "file.pth")
    line = refusal(start, build("resnet18"), tmp_path / "file.pth", "resnet18")
    assert "backbone 'resnet18' has no layer1.2.conv1.weight (64, 64, 3, 3)" in line
    assert "name the backbone of these weights" in line


def test_files_of_no_known_layout(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    torch.save({"state_dict": {"base_encoder.conv1.weight": torch.ones(1)}}, path)
    line = refusal(start, build("resnet18"), path)
    assert line.startswith(f"backbone.weights={str(path)!r}: a file of no layout that is known")
