"""Measures without labels, against plain loops and limits that are known."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from solo_ext.config.schema import Augmentation
from solo_ext.lab.evaluation import label_free
from solo_ext.lab.evaluation.context import open_context
from solo_ext.lab.evaluation.evaluate import PROTOCOLS, evaluate
from solo_ext.lab.evaluation.label_free import (
    SeveralViews,
    Views,
    alpha_req,
    lidar,
    neighbor_overlap,
)
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.protocol import measure
from solo_ext.losses.alignment import effective_rank
from solo_ext.memory import knn
from tests.conftest import MakeConfig
from tests.lab.evaluation.conftest import RESNET, refusal, shared
from tests.lab.training.same_run import train

Floats = NDArray[np.float64]
SMALL: dict[str, Any] = {"samples": 12, "lidar_images": 5, "lidar_views": 3, "k": 4}


def cloud(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rank_by_hand(values: Floats) -> float:
    share = values / values.sum()
    return math.exp(-sum(p * math.log(p) for p in share if p > 0))


def lidar_by_hand(views: Tensor, delta: float) -> float:
    x: Floats = views.double().numpy()
    images, count, width = x.shape
    within, between = np.zeros((width, width)), np.zeros((width, width))
    mean = x.reshape(-1, width).mean(0)
    for i in range(images):
        own = x[i].mean(0)
        between += np.outer(own - mean, own - mean) / images
        for j in range(count):
            within += np.outer(x[i, j] - own, x[i, j] - own) / (images * count)
    values, vectors = np.linalg.eigh(within + delta * np.eye(width))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    return rank_by_hand(np.linalg.eigvalsh(root @ between @ root).clip(0))


@pytest.mark.parametrize(
    ("shape", "delta"), [((30, 4, 6), 1e-4), ((30, 4, 6), 0.1), ((5, 2, 40), 1e-3), ((8, 3, 20), 1)]
)
def test_lidar(shape: tuple[int, int, int], delta: float) -> None:
    """Also of more dimensions than views, where only the span of the views counts."""
    means = cloud(shape[0], 1, shape[2]) * torch.linspace(0.2, 3, shape[2])
    views = means + 0.3 * cloud(*shape, seed=1)
    assert lidar(views, delta) == pytest.approx(lidar_by_hand(views, delta), rel=1e-6)


def test_lidar_of_known_features() -> None:
    same = torch.ones(1, 1, 8)
    assert lidar(same.expand(20, 4, 8)) == 1
    # Images that cannot be told apart along 12 of 16 directions, or only along one.
    noise = 1e-2 * cloud(400, 5, 16, seed=1)
    means = cloud(400, 1, 16)
    means[..., 4:] = 0
    assert lidar(means + noise) == pytest.approx(4, rel=0.05)
    means[..., 1:] = 0
    assert lidar(means + noise) == pytest.approx(1, rel=0.05)
    # A direction that varies between images but as much within them counts less.
    blurred = cloud(400, 1, 16).expand(400, 50, 16).clone()
    blurred[..., :8] += 100 * cloud(400, 50, 8, seed=2)
    blurred[..., 8:] += 0.01 * cloud(400, 50, 8, seed=3)
    assert lidar(blurred) < 8.5 < 12 < effective_rank(blurred[:, 0] / blurred[:, 0].std(0))


def alpha_by_hand(x: Tensor, first: int, last: int) -> float:
    centred = x.double().numpy() - x.double().numpy().mean(0)
    values = np.sort(np.linalg.eigvalsh(centred.T @ centred / len(x)))[::-1]
    rows, heights, weights = [], [], []
    for j, value in enumerate(values, start=1):
        if first <= j <= last:
            rows.append([1.0, math.log(j)])
            heights.append(math.log(value))
            weights.append(1 / j)
    root = np.sqrt(weights)
    (_, slope), *_ = np.linalg.lstsq(
        np.array(rows) * root[:, None], np.array(heights) * root, rcond=None
    )
    return float(-slope)


@pytest.mark.parametrize("fit", [(4, 100), (1, 12), (11, 50)])
def test_alpha_req(fit: tuple[int, int]) -> None:
    x = cloud(300, 128) * torch.arange(1, 129).pow(-0.7) + 5
    assert alpha_req(x, *fit) == pytest.approx(alpha_by_hand(x, *fit), rel=1e-5)


def test_alpha_req_of_known_spectra() -> None:
    for alpha in (0.0, 0.5, 1.0, 2.0):
        scales = torch.arange(1.0, 65).double().pow(-alpha / 2).diag()
        assert alpha_req(torch.cat((scales, -scales))) == pytest.approx(alpha, abs=1e-6)
    assert alpha_req(cloud(20000, 64)) == pytest.approx(0, abs=0.1)
    # The scale of the features, and a mean, change nothing.
    x = cloud(100, 32) * torch.arange(1, 33).pow(-0.5)
    assert alpha_req(1000 * x + 3) == pytest.approx(alpha_req(x), rel=1e-3)


@pytest.mark.parametrize("width", [4, 40])
def test_alpha_req_without_a_spectrum(width: int) -> None:
    """Collapsed features have none, nor have those along a few directions: only rounding errors."""
    assert math.isnan(alpha_req(torch.ones(50, width) * 0.1))
    line = cloud(50, 1) * torch.linspace(1, 2, width) + 7
    assert math.isnan(alpha_req(line))


def overlap_by_hand(x: Tensor, y: Tensor, k: int) -> float:
    def near(z: Tensor, i: int) -> set[int]:
        others = [j for j in range(len(z)) if j != i]
        return set(sorted(others, key=lambda j: -float(F.cosine_similarity(z[i], z[j], 0)))[:k])

    return 100 * sum(len(near(x, i) & near(y, i)) for i in range(len(x))) / (k * len(x))


@pytest.mark.parametrize("k", [1, 3, 24])
def test_neighbor_overlap(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "_MAX_ELEMENTS", 60)
    x = cloud(25, 6)
    y = x + 0.7 * cloud(25, 6, seed=1)
    assert neighbor_overlap(x, y, k) == pytest.approx(overlap_by_hand(x, y, k))
    assert neighbor_overlap(x, 5 * x, k) == 100
    assert neighbor_overlap(x, y, 24) == 100


def test_neighbor_overlap_of_independent_views() -> None:
    """By chance, k of the N - 1 others."""
    found = neighbor_overlap(cloud(600, 16), cloud(600, 16, seed=1), 30)
    assert found == pytest.approx(100 * 30 / 599, rel=0.1)


def flattened(images: Path, folder: Path) -> Path:
    """The images of class folders without the folders."""
    folder.mkdir()
    for file in sorted(images.rglob("*.png")):
        shutil.copy(file, folder / f"{file.parent.name}-{file.name}")
    return folder


@pytest.fixture(scope="module")
def bare(
    make_config: MakeConfig, images: Path, val: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run without labels; its augmentations are two pipelines, and a small crop."""
    root = tmp_path_factory.mktemp("bare")
    data = {
        "train_path": str(flattened(images, root / "train")),
        "val_path": str(flattened(val, root / "val")),
        "no_labels": True,
    }
    flip, blur = {"horizontal_flip": {"prob": 0.5}}, {"gaussian_blur": {"prob": 1.0}}
    crops = [
        {"crop_size": 16, "num_crops": 1, **flip},
        {"crop_size": 16, "num_crops": 1, **blur},
    ]
    return train(make_config("simclr", data=data, augmentations=crops), root / "run").run_dir


def copied(run: Path, place: Path, **data: Any) -> Path:
    """A copy of a run, whose config has other images."""
    shutil.copytree(run, place, ignore=lambda *_: ["features"])
    args = json.loads((place / "args.json").read_text())
    args["data"] |= data
    (place / "args.json").write_text(json.dumps(args))
    return place


def test_numbers_are_those_of_the_features_of_the_views(bare: Path) -> None:
    context = open_context(str(bare), EvalRun(batch_size=7))
    own = context.model.cfg.augmentations
    assert all(isinstance(entry, Augmentation) for entry in own)
    (row,) = measure(Views(**SMALL), context)
    seen: list[list[Tensor]] = []
    order = torch.randperm(21, generator=torch.Generator().manual_seed(_key())).tolist()[:12]
    transforms = [label_free._first_crop("custom", entry) for entry in own]
    backbone = context.model.backbone.eval()
    for place in order:
        views = SeveralViews(context.test, transforms, 3, 0, range(21))[place]
        assert views is not None
        with torch.no_grad():
            seen.append(list(backbone(views[0])))
    first, second = (torch.stack([rows[j] for rows in seen]) for j in (0, 1))
    many = torch.stack([torch.stack(rows) for rows in seen[:5]])
    u, v = F.normalize(first, dim=1), F.normalize(second, dim=1)
    assert row["images"] == 12
    assert row["dimensions"] == 8
    assert row["lidar_images"] == 5
    assert row["rankme"] == pytest.approx(float(effective_rank(first)), rel=1e-4)
    assert row["lidar"] == pytest.approx(lidar_by_hand(many, 1e-4), rel=1e-3)
    assert row["alignment"] == pytest.approx(float((u - v).square().sum(1).mean()), rel=1e-3)
    potentials = [
        math.log(
            sum(
                math.exp(-2 * float((z[i] - z[j]).square().sum()))
                for i in range(12)
                for j in range(12)
                if i != j
            )
            / (12 * 11)
        )
        for z in (u, v)
    ]
    assert row["uniformity"] == pytest.approx(sum(potentials) / 2, rel=1e-3)
    # At most a quarter of the 11 other images.
    assert row["neighbor_overlap"] == pytest.approx(overlap_by_hand(first, second, 2), abs=2.1)
    assert row["k"] == 2


def _key() -> int:
    return label_free.derive_seed(0)


def test_views_are_drawn_by_seed_image_and_number() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    images = [(Image.fromarray(noise), 0)] * 4
    entry = Augmentation(crop_size=16, num_crops=1)
    transform = label_free._first_crop("custom", entry)

    def views(count: int, seed: int, index: int) -> Tensor:
        found = SeveralViews(images, [transform], count, seed, range(4))[index]
        assert found is not None
        return found[0]

    state = torch.random.get_rng_state()
    four = views(4, 0, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(views(2, 0, 1), four[:2])
    others = [four[1], views(1, 0, 2)[0], views(1, 1, 1)[0]]
    assert not any(torch.equal(four[0], other) for other in others)


def test_neither_workers_nor_batches_change_a_number(bare: Path) -> None:
    (alone,) = evaluate(bare, "views", {**SMALL, "num_workers": 0})["results"]
    (many,) = evaluate(bare, "views", {**SMALL, "num_workers": 2, "batch_size": 5})["results"]
    assert alone == pytest.approx(many, rel=1e-4)
    (other,) = evaluate(bare, "views", {**SMALL, "seed": 1})["results"]
    assert other["alignment"] != pytest.approx(alone["alignment"], rel=1e-4)


def test_other_augmentation(bare: Path) -> None:
    """Of two equal views all is in common, and nothing differs within an image."""
    plain = {"rrc": {"enabled": False}}
    (row,) = evaluate(bare, "views", {**SMALL, "augmentation": plain})["results"]
    assert row["alignment"] == pytest.approx(0, abs=1e-6)
    assert row["neighbor_overlap"] == 100
    headline = PROTOCOLS["views"].headline([row])
    assert "alpha_req" in headline
    assert "alpha_req" not in PROTOCOLS["views"].headline([{**row, "alpha_req": None}])


def test_models_that_say_no_augmentation(images: Path, tmp_path: Path) -> None:
    data = {"train_path": str(images), "val_path": str(images)}
    given = {**shared(data, tmp_path), **RESNET}
    line = refusal("timm/resnet10t", "views", {**given, **SMALL})
    assert "'timm/resnet10t' does not say how its views were augmented" in line
    crop = {"rrc": {"crop_min_scale": 0.5}}
    record = evaluate("timm/resnet10t", "views", {**given, **SMALL, "augmentation": crop})
    assert record["results"][0]["images"] == 12


@pytest.mark.fault
def test_unreadable_images_are_left_out(bare: Path, tmp_path: Path) -> None:
    folder = tmp_path / "val"
    old = json.loads((bare / "args.json").read_text())["data"]["val_path"]
    shutil.copytree(old, folder)
    sorted(folder.iterdir())[3].write_bytes(b"no image")
    run = copied(bare, tmp_path / "run", val_path=str(folder), unreadable="skip")
    (row,) = evaluate(run, "views", {})["results"]
    assert row["images"] == 20


def test_too_few_images(bare: Path, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(images / "0" / "0.png", folder)
    run = copied(bare, tmp_path / "run", val_path=str(folder))
    assert "split='test': the test split has 1 images" in refusal(run, "views", {})
    shutil.copy(images / "0" / "1.png", folder)
    (row,) = evaluate(run, "views", {})["results"]
    assert (row["images"], row["k"]) == (2, 1)
