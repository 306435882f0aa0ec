"""Models of timm and raw pixels beside runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from solo_ext.core.errors import UserError
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.models import EvalRun, open_model

SMALL = {"channels": [8, 8, 8, 8]}
KNN = {"k": [1], "temperature": [0.1], "num_workers": 0}


@pytest.fixture
def both(images: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings that name the images on both sides, and a place for what is written."""
    return {"data": {"train_path": str(images), "val_path": str(images)}, "out": str(tmp_path)}


def settings(both: dict[str, Any], **more: Any) -> EvalRun:
    return EvalRun.model_validate({**both, **more})


def test_random_model_of_timm(both: dict[str, Any], tmp_path: Path) -> None:
    given = {**KNN, **both, "pretrained": False, "model_kwargs": SMALL, "crop_size": 16}
    state = torch.random.get_rng_state()
    record = evaluate("timm/resnet10t", "knn", given)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert record["results"][0]["acc1"] == 100
    assert record["run"] == "timm/resnet10t"
    assert record["folder"] == str(tmp_path)
    assert (record["method"], record["epoch"], record["image_size"]) == (None, None, 16)
    assert (tmp_path / "features").is_dir()
    again = evaluate("timm/resnet10t", "knn", {**given, "out": str(tmp_path / "again")})
    assert again["checkpoint_sha256"] == record["checkpoint_sha256"]
    other = evaluate("timm/resnet10t", "knn", {**given, "model_seed": 1})
    assert other["checkpoint_sha256"] != record["checkpoint_sha256"]


def test_view_is_that_of_the_weights_and_the_folder_named_after_them(both: dict[str, Any]) -> None:
    """Inception's mean and size are not ImageNet's usual ones."""
    given = settings(both, pretrained=False, model_kwargs={"img_size": 48, "depth": 1})
    model = open_model("timm/vit_tiny_patch16_224.augreg_in21k", given)
    (view,) = model.cfg.augmentations
    assert (view.crop_size, view.mean, view.std) == (48, [0.5] * 3, [0.5] * 3)
    assert model.features_dim == 192
    plain = open_model("timm/resnet10t", settings(both, pretrained=False, model_kwargs=SMALL))
    assert plain.cfg.augmentations[0].crop_size == 176
    bare = settings({"data": both["data"]}, pretrained=False, model_kwargs=SMALL)
    folder = open_model("timm/resnet10t", bare).folder
    assert folder == Path("evaluations/timm-resnet10t-random-0")


def test_pixels_are_the_image(both: dict[str, Any]) -> None:
    record = evaluate("pixels", "knn", {**KNN, **both, "crop_size": 8})
    assert record["results"][0]["acc1"] == 100
    model = open_model("pixels", settings(both, crop_size=8))
    assert model.features_dim == 3 * 8 * 8
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model.backbone(x), x.flatten(1))


def test_weights_that_cannot_be_had(both: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no network\nat all")

    monkeypatch.setattr("solo_ext.lab.evaluation.models.build_backbone", refuse)
    with pytest.raises(UserError, match="cannot get the weights of 'timm/resnet10t': no network;"):
        evaluate("timm/resnet10t", "knn", both)


def test_changed_image_is_extracted_again(both: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "own"
    for label in ("a", "b"):
        (own / label).mkdir(parents=True)
        for n in range(2):
            Image.new("RGB", (8, 8), (100 * n, 50, 9)).save(own / label / f"{n}.png")
    seen: list[str] = []
    given = {**KNN, "data": {"train_path": str(own), "val_path": str(own)}, "out": str(tmp_path)}
    for expected, changed in ((2, False), (2, False), (4, True)):
        if changed:
            Image.new("RGB", (8, 8), (1, 2, 3)).save(own / "a" / "0.png")
        evaluate("pixels", "knn", given, lambda what, done, total: seen.append(what))
        assert len(seen) == expected
