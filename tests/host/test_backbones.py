"""Tests of timm's models, and the host's own, as backbones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from solo_ext.core.errors import ConfigError
from solo_ext.host import Host
from solo_ext.host.backbones import (
    SMALL_SIDE,
    BackboneTable,
    build_backbone,
    is_timm,
    small_image_kwargs,
    unknown_backbone,
)
from solo_ext.lab.training.prepare import prepare

WIDTHS = {"timm/resnet18": 512, "timm/convnext_atto": 320, "timm/vit_tiny_patch16_224": 192}


def forward(backbone: nn.Module, side: int) -> Tensor:
    with torch.no_grad():
        features: Tensor = backbone.eval()(torch.randn(2, 3, side, side))
    return features


def build(name: str, kwargs: dict[str, Any], dataset: str = "custom") -> tuple[nn.Module, int]:
    return build_backbone(BackboneTable(), name, kwargs, method="simclr", dataset=dataset)


@pytest.mark.parametrize(("name", "width"), WIDTHS.items())
def test_small_images_reach_features_of_the_stated_size(
    loaded: Host, name: str, width: int
) -> None:
    kwargs = small_image_kwargs(name, {}, 32)
    backbone, features = build_backbone(
        loaded.backbones, name, kwargs, method="simclr", dataset="custom"
    )
    assert features == width
    assert forward(backbone, 32).shape == (2, width)


def test_a_method_is_built_on_a_timm_model(loaded: Host, make_config: Any) -> None:
    """Through the host's own constructor, which on main asserts membership in its table."""
    kwargs = {"channels": [8, 8, 8, 12], "small_stem": True}
    prepared = prepare(make_config("simclr", backbone={"kwargs": kwargs}))
    method = prepared.method(prepared.cfg)
    assert method.features_dim == 12
    assert isinstance(method.backbone, timm.models.resnet.ResNet)
    assert isinstance(method.backbone.maxpool, nn.Identity)
    assert method.backbone_name == "timm/resnet10t"


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("mobilenetv3_small_050", 1024),
        ("ghostnet_100", 1280),
        ("inception_next_atto", 960),
        ("resnet18", 512),
    ],
)
def test_features_of_heads_with_a_hidden_layer(name: str, width: int) -> None:
    """timm's ``num_features`` is the width before that layer; solo-learn main reads it."""
    backbone, features = build(f"timm/{name}", {})
    assert features == backbone.num_features == width
    assert forward(backbone, 64).shape == (2, width)


@pytest.mark.parametrize(
    ("name", "convolution"),
    [("timm/resnet18", "conv1"), ("timm/convnext_atto", "stem.0"), ("timm/resnet10t", "conv1.0")],
)
def test_the_small_stem_keeps_the_resolution(name: str, convolution: str) -> None:
    plain, _ = build(name, {})
    small, _ = build(name, {"small_stem": True})
    old, new = plain.get_submodule(convolution), small.get_submodule(convolution)
    assert isinstance(old, nn.Conv2d)
    assert isinstance(new, nn.Conv2d)
    assert old.stride > (1, 1)
    assert (new.stride, new.kernel_size, new.padding) == ((1, 1), (3, 3), (1, 1))
    assert (new.in_channels, new.out_channels) == (old.in_channels, old.out_channels)
    assert (new.bias is None) == (old.bias is None)
    assert new(torch.zeros(1, 3, 32, 32)).shape[-2:] == (32, 32)
    # timm's ResNets halve twice before the blocks, its ConvNeXts fourfold in one convolution.
    before, after = (m.eval().forward_features(torch.zeros(1, 3, 32, 32)) for m in (plain, small))
    assert after.shape[-1] == 4 * before.shape[-1]


@pytest.mark.parametrize("name", ["convnext_tiny", "convnext_base", "poolformer_s12"])
def test_timm_names_mean_timms_own_models(loaded: Host, name: str) -> None:
    """main registers models of these names over timm's."""
    assert timm.models.model_entrypoint(name).__module__.startswith("timm.")


def test_timms_convnext_is_timms_class_and_takes_its_arguments(loaded: Host) -> None:
    """main's of this name fixes depths, widths and the number of classes."""
    kwargs = {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 16], "num_classes": 7}
    model, features = build_backbone(
        loaded.backbones, "timm/convnext_tiny", kwargs, method="simclr", dataset="custom"
    )
    assert type(model) is timm.models.convnext.ConvNeXt
    assert features == 16
    assert forward(model, 32).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm/resnet81", "did you mean 'timm/resnet18'? see timm.list_models()"),
        ("timm/zzzz", "see timm.list_models()"),
        ("timm/", "see timm.list_models()"),
        ("resnet26", "did you mean 'timm/resnet26'?"),
        ("resnet_18", "did you mean 'resnet18'?"),
        ("nothing", "timm/<model>"),
    ],
)
def test_unknown_names(loaded: Host, make_config: Any, name: str, words: str) -> None:
    assert name not in loaded.backbones
    with pytest.raises(ConfigError) as caught:
        prepare(make_config("simclr", backbone={"name": name, "kwargs": {}}))
    assert caught.value.key == "backbone.name"
    assert str(caught.value).startswith(f"backbone.name={name!r}: unknown backbone; ")
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="unknown backbone"):
        _ = loaded.backbones[name]
    with pytest.raises(ConfigError, match="unknown backbone"):
        build_backbone(loaded.backbones, name, {}, method=None, dataset="custom")


def test_hints_do_not_list_timms_thousand_models(loaded: Host) -> None:
    assert len(str(unknown_backbone("timm/resnet81", loaded.backbones))) < 200


def test_the_table_without_a_name(loaded: Host) -> None:
    assert loaded.backbones.get("timm/nothing") is None
    assert loaded.backbones.get("timm/nothing", 3) == 3
    assert 3 not in loaded.backbones
    before = len(loaded.backbones)
    _ = loaded.backbones["timm/resnet18"]
    assert len(loaded.backbones) == before


@pytest.mark.parametrize("name", ["timm/resnet18.a1_in1k", "timm/resnet18", "resnet18"])
def test_the_table_answers_alike_by_every_way(loaded: Host, name: str) -> None:
    assert name in loaded.backbones
    assert loaded.backbones.get(name) is not None
    assert callable(loaded.backbones[name])
    assert is_timm(name) == name.startswith("timm/")


@pytest.mark.parametrize(
    ("dataset", "stem", "pooled"),
    [
        ("cifar10", ((3, 3), (1, 1), (2, 2)), False),
        ("cifar100", ((3, 3), (1, 1), (2, 2)), False),
        ("custom", ((7, 7), (2, 2), (3, 3)), True),
    ],
)
def test_the_hosts_resnet_has_the_stem_of_its_data_set(
    loaded: Host,
    make_config: Any,
    dataset: str,
    stem: tuple[tuple[int, int], ...],
    pooled: bool,
) -> None:
    """The seam's function and the method of the host itself build the same network."""
    built, features = build_backbone(
        loaded.backbones, "resnet18", {}, method="simclr", dataset=dataset
    )
    prepared = prepare(make_config("simclr", backbone={"name": "resnet18", "kwargs": {}}))
    cfg = copy.deepcopy(prepared.cfg)
    cfg.backbone.kwargs = {}
    cfg.data.dataset = dataset
    method = prepared.method(cfg)
    assert features == method.features_dim == 512
    for backbone in (built, method.backbone):
        conv = backbone.conv1
        assert (conv.kernel_size, conv.stride, conv.padding) == stem
        assert isinstance(backbone.maxpool, nn.MaxPool2d if pooled else nn.Identity)
        assert isinstance(backbone.fc, nn.Identity)
        assert forward(backbone, 32).shape == (2, 512)
    ours, theirs = built.state_dict(), method.backbone.state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize("side", [SMALL_SIDE, SMALL_SIDE + 1])
def test_only_small_images_change_a_model(side: int) -> None:
    small = side <= SMALL_SIDE
    assert small_image_kwargs("timm/resnet18", {}, side) == ({"small_stem": True} if small else {})
    expected = {"img_size": side, "patch_size": side // 8} if small else {}
    assert small_image_kwargs("timm/vit_tiny_patch16_224", {}, side) == expected
    assert small_image_kwargs("resnet18", {"a": 1}, side) == {"a": 1}


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (16, 2), (28, 3), (32, 4), (64, 8)])
def test_patches_are_an_eighth_of_the_image(side: int, patch: int) -> None:
    found = small_image_kwargs("timm/vit_tiny_patch16_224", {}, side)
    assert found == {"img_size": side, "patch_size": patch}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("timm/resnet18", {"small_stem": False}),
        ("timm/vit_tiny_patch16_224", {"img_size": 48, "patch_size": 16}),
        ("timm/vit_tiny_patch16_224", {"patch_size": 16}),
    ],
)
def test_what_is_given_stays(loaded: Host, make_config: Any, name: str, given: Any) -> None:
    held = dict(given)
    side = given.get("img_size", 32)
    found = small_image_kwargs(name, given, side)
    assert {key: found[key] for key in given} == held
    assert given == held, "the caller's own mapping is left alone"
    config = make_config("simclr", augmentations=[{"crop_size": side, "num_crops": 2}])
    config["backbone"] = {"name": name, "kwargs": given}
    kwargs = prepare(config).cfg.backbone.kwargs
    assert {key: kwargs[key] for key in given} == held


def test_lists_of_yaml_become_tuples_and_given_classes_are_kept() -> None:
    model, _ = build("timm/vit_tiny_patch16_224", {"img_size": [32, 16], "patch_size": 8})
    assert model.patch_embed.grid_size == (4, 2)
    assert model.num_classes == 0


@pytest.mark.parametrize("name", ["timm/resnet10t", "timm/vit_tiny_patch16_224", "resnet18"])
def test_an_argument_that_the_model_does_not_take_is_refused(loaded: Host, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_backbone(
            loaded.backbones, name, {"no_such_argument": 1}, method="simclr", dataset="custom"
        )
    assert caught.value.key == "backbone.kwargs"
    assert "no_such_argument" in str(caught.value)
    assert name.removeprefix("timm/") in str(caught.value)


def test_a_small_stem_is_refused_where_there_are_patches() -> None:
    with pytest.raises(ConfigError, match="img_size and patch_size") as caught:
        build("timm/vit_tiny_patch16_224", {"small_stem": True})
    assert caught.value.key == "backbone.kwargs.small_stem"


@pytest.mark.parametrize(
    ("name", "kwargs", "width"),
    [
        ("resnet18", {"zero_init_residual": True}, 512),
        ("vit_tiny", {"img_size": 32, "patch_size": 8}, 192),
        ("swin_tiny", {"img_size": 32, "window_size": 4}, 768),
    ],
)
def test_the_hosts_own_families(
    loaded: Host, name: str, kwargs: dict[str, Any], width: int
) -> None:
    backbone, features = build_backbone(
        loaded.backbones, name, kwargs, method="simclr", dataset="custom"
    )
    assert features == width
    assert forward(backbone, 32).shape == (2, width)


@pytest.mark.parametrize("name", ["convnext_tiny", "poolformer_s12"])
def test_timms_models_keep_their_description(loaded: Host, name: str) -> None:
    """Where main has models of the same names: the stem for small images is found by it."""
    described = timm.get_pretrained_cfg(name)
    assert described is not None
    assert described.first_conv
    assert name in timm.list_models(name, pretrained=True)[0]


def test_the_hosts_own_names(loaded: Host) -> None:
    """Those that both generations have; main has a few more."""
    sizes = ("tiny", "small", "base", "large")
    both = {"resnet18", "resnet50", *(f"{f}_{s}" for f in ("vit", "swin") for s in sizes)}
    assert both <= set(loaded.backbones)
    if loaded.info.generation == "1.0.2":
        assert set(loaded.backbones) == both


@pytest.mark.parametrize("name", ["timm/pvt_v2_b0", "timm/tiny_vit_5m_224"])
def test_arguments_that_a_model_refuses_are_not_added(name: str) -> None:
    assert small_image_kwargs(name, {}, 32) == {}
