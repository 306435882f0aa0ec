"""Exports for detection: what torchvision's detectors and detectron2 read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.models.detection import FasterRCNN, fasterrcnn_resnet50_fpn
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from solo_ext.core.errors import UserError
from solo_ext.pretrained.export import Format, detectron2_settings, export, torchvision_twins
from solo_ext.pretrained.runs import load_pretrained
from tests.pretrained.conftest import MakeRun, features, refusal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kwargs"), [("resnet50", {}), ("timm/resnet50", {"small_stem": False})]
)
def test_faster_rcnn_takes_it(name: str, kwargs: dict[str, Any], make_run: MakeRun) -> None:
    """Every weight, and its last feature map is the run's; it detects and it trains."""
    run = make_run(name, kwargs, size=64)
    done = export(run, "torchvision")
    assert done.out == run / "backbone.pth"
    weights = torch.load(done.out, weights_only=True)
    # Pictures are enlarged to 800 pixels otherwise.
    side = {"min_size": 64, "max_size": 64}
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, **side)
    model.backbone.body.load_state_dict(weights)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        maps = model.backbone.body.eval()(images)
    expected = features(load_pretrained(run).backbone, images)
    torch.testing.assert_close(maps["3"].mean((2, 3)), expected, rtol=1e-5, atol=1e-5)
    if name != "resnet50":
        # It detects as the other does, from the same names and shapes.
        return
    pictures = list(images.sigmoid())
    assert {"boxes", "labels", "scores"} == set(model.eval()(pictures)[0])
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    losses = model.train()(pictures, [target, target])
    sum(losses.values()).backward()
    assert model.backbone.body.layer4[0].conv1.weight.grad is not None


@pytest.mark.slow
def test_smaller_ones_go_into_torchvisions_pyramid(make_run: MakeRun) -> None:
    out = export(make_run("resnet18", {}, size=64), "torchvision").out
    pyramid = resnet_fpn_backbone(backbone_name="resnet18", weights=None)
    found = pyramid.body.load_state_dict(torch.load(out, weights_only=True), strict=False)
    # torchvision freezes the norms, which then count no batches.
    assert not found.missing_keys
    assert all(key.endswith("num_batches_tracked") for key in found.unexpected_keys)
    detector = FasterRCNN(pyramid, num_classes=2, min_size=64, max_size=64)
    assert detector.eval()([torch.rand(3, 64, 64)])


@pytest.mark.slow
def test_detectron2_reads_its_own_names(make_run: MakeRun) -> None:
    run = make_run("resnet50", {}, size=64)
    done = export(run, "detectron2")
    assert done.out == run / "backbone-detectron2.pkl"
    content = pickle.loads(done.out.read_bytes())
    assert content["matching_heuristics"] is True
    assert content["__author__"]
    assert {type(value) for value in content["model"].values()} == {np.ndarray}
    expected = resnet50_of_detectron2()
    assert {name: value.shape for name, value in content["model"].items()} == expected
    weights = load_pretrained(run).backbone.state_dict()
    pairs = {
        "stem.conv1.norm.running_var": "bn1.running_var",
        "res2.0.conv3.norm.weight": "layer1.0.bn3.weight",
        "res3.0.shortcut.weight": "layer2.0.downsample.0.weight",
        "res4.0.shortcut.norm.bias": "layer3.0.downsample.1.bias",
        "res5.2.conv2.weight": "layer4.2.conv2.weight",
    }
    for theirs, ours in pairs.items():
        assert np.array_equal(content["model"][theirs], weights[ours].numpy())
    # Its images have values up to 255.
    assert "MODEL.PIXEL_MEAN [123.675, 116.28, 103.53]" in done.load
    assert "INPUT.FORMAT RGB" in done.load
    resnet = "MODEL.RESNETS.DEPTH 50 MODEL.RESNETS.NUM_GROUPS 1 MODEL.RESNETS.WIDTH_PER_GROUP 64"
    assert f"{resnet} MODEL.RESNETS.STRIDE_IN_1X1 False" in done.load
    assert export(run, "torchvision").architecture == "resnet50"


@pytest.mark.parametrize(
    ("architecture", "depth", "groups", "width", "more"),
    [
        ("resnet34", 34, 1, 64, " MODEL.RESNETS.RES2_OUT_CHANNELS 64"),
        ("wide_resnet50_2", 50, 1, 128, ""),
        ("resnext101_32x8d", 101, 32, 8, ""),
    ],
)
def test_detectron2_is_told_which_network_it_is(
    architecture: str, depth: int, groups: int, width: int, more: str
) -> None:
    """Its default is ResNet-50, which other weights do not fit."""
    resnets = "MODEL.RESNETS."
    said = detectron2_settings(architecture, [0.5] * 3, [0.25] * 3)
    assert said.endswith(
        f" {resnets}DEPTH {depth} {resnets}NUM_GROUPS {groups} "
        f"{resnets}WIDTH_PER_GROUP {width}{more} {resnets}STRIDE_IN_1X1 False"
    )


def resnet50_of_detectron2() -> dict[str, tuple[int, ...]]:
    """Names and shapes of its ``build_resnet_backbone``, from its structure."""

    def conv(name: str, out: int, into: int, side: int) -> dict[str, tuple[int, ...]]:
        norm = ("weight", "bias", "running_mean", "running_var")
        return {
            f"{name}.weight": (out, into, side, side),
            **{f"{name}.norm.{n}": (out,) for n in norm},
        }

    shapes = conv("stem.conv1", 64, 3, 7)
    into = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), 2):
        for block in range(blocks):
            place = f"res{stage}.{block}"
            shapes |= conv(f"{place}.conv1", width, into, 1)
            shapes |= conv(f"{place}.conv2", width, width, 3)
            shapes |= conv(f"{place}.conv3", 4 * width, width, 1)
            if block == 0:
                shapes |= conv(f"{place}.shortcut", 4 * width, into, 1)
            into = 4 * width
    return shapes


def test_equal_shapes_are_told_apart_by_features(make_run: MakeRun) -> None:
    """Another activation leaves no trace in names and shapes."""
    run = make_run("timm/resnet18", {"small_stem": False, "act_layer": "silu"}, size=64)
    assert [name for name, _ in torchvision_twins(load_pretrained(run).backbone)] == ["resnet18"]
    refused(run, "torchvision")


def test_a_stem_for_small_images_is_refused(make_run: MakeRun) -> None:
    refused(make_run("resnet18", {}, dataset="cifar10"), "detectron2")


def refused(run: Path, form: Format) -> None:
    before = sorted(run.iterdir())
    assert "none of the ResNets that detection libraries share" in refusal(export, run, form)
    assert sorted(run.iterdir()) == before


@pytest.mark.parametrize(("form", "suffix"), [("torchvision", ".pth"), ("detectron2", ".pkl")])
def test_names_of_files(form: Format, suffix: str, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("resnet18", {}, size=64)
    with pytest.raises(UserError, match=f"let it end in {suffix}"):
        export(run, form, tmp_path / "weights.bin")
    out = tmp_path / f"weights{suffix}"
    assert export(run, form, out).out == out
