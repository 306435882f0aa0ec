"""Fifty steps on one batch: every method against a loop written from its page and paper alone.

The loops are in float64, one sample after the other. What they take of the package are the initial
weights and rows, the draws, of which no page says how they are made, and clusters where their
numbers matter or k-means misses the best.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

from solo_ext.losses import MixDraws
from tests.conftest import DISTILLATION, tiny_config
from tests.methods.fifty_steps import training
from tests.methods.fifty_steps.cases import CASES, MIXING, PROCESSES, Case
from tests.methods.fifty_steps.loops import TRAINING, Clusters, Loop
from tests.methods.fifty_steps.networks import BACKBONE, head
from tests.methods.fifty_steps.training import STEPS, Trained
from tests.scripts import run_script

HERE = Path(__file__).parent
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""Those of the teacher: the package would show it another copy of the images, rounded anew."""
TEACHER: dict[str, Any] = {"channels": [8, 8, 8, 8]}
TOLERANCE = 1e-9
SHORT = 12
"""Steps after which every constant has had an effect, those of a first epoch included."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.made_pictures(tmp_path_factory.mktemp("pictures") / "images")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small ResNet."""
    torch.manual_seed(4)
    file = tmp_path_factory.mktemp("teacher") / "weights.pth"
    torch.save(timm.create_model("resnet10t", num_classes=0, **TEACHER).state_dict(), file)
    return file


def configured(case: Case, pictures: Path, teacher: Path, **optimizer: Any) -> dict[str, Any]:
    """A config of one batch an epoch, with the settings of a case alone."""
    kwargs = dict(case.kwargs)
    if case.method in DISTILLATION:
        layout = {"layout": "timm", "model": "resnet10t", "model_kwargs": TEACHER}
        kwargs["teacher"] = {**layout, "path": str(teacher)}
    sizes = {training.SIDE: case.views, training.SIDE // 2: case.small}
    crops = [
        {"crop_size": size, "num_crops": count, "mean": MEAN, "std": STD}
        for size, count in sizes.items()
        if count
    ]
    config = tiny_config(
        pictures,
        case.method,
        augmentations=crops,
        optimizer={**training.OPTIMIZER, **optimizer},
        max_epochs=training.EPOCHS,
    )
    return config | {"method_kwargs": kwargs}


@pytest.fixture(scope="module")
def train(pictures: Path, teacher: Path) -> Callable[[str], Trained]:
    """``train(case)``: fifty steps of the package."""

    @functools.cache
    def run(name: str) -> Trained:
        case = CASES[name]
        method = training.built(configured(case, pictures, teacher))
        batch = training.batch_of(training.fixed_views(case.views, case.small))
        with pytest.MonkeyPatch.context() as patch:
            return training.trained(method, batch, pictures, patch.setattr)

    return run


@pytest.fixture(scope="module")
def loop(train: Callable[[str], Trained], pictures: Path, teacher: Path) -> Callable[..., Loop]:
    """``loop(case, constant=value, ...)``: it starts from the weights of the package."""

    def make(name: str, **changed: float) -> Loop:
        return loop_of(CASES[name], train(name), pictures, teacher, **changed)

    return make


def loop_of(case: Case, found: Trained, pictures: Path, teacher: Path, **changed: float) -> Loop:
    """A loop from the first weights of the package, with changed constants."""
    views = training.fixed_views(case.views, case.small)
    given = {
        "steps": STEPS,
        "steps_per_epoch": training.STEPS_PER_EPOCH,
        "large": case.views,
        "draws": found.draws,
    }
    if case.method in DISTILLATION:
        given["teachers"] = taught(teacher, views)
    if case.method == "pcl":
        given |= clustered(case, found, pictures)
    layers = {"backbone": BACKBONE, "projector": case.projector, "predictor": head(2, True)}
    if not case.norm:
        layers = {
            name: ["nothing" if layer == "norm" else layer for layer in own]
            for name, own in layers.items()
        }
    constants = {**case.constants, **changed}
    return case.loop(found.start, views, training.LABELS, constants, layers, given)


@torch.no_grad()
def taught(file: Path, views: list[Tensor]) -> list[Tensor]:
    """What the teacher says, which the package rounds to float32."""
    network = timm.create_model("resnet10t", num_classes=0, **TEACHER).double().eval()
    network.load_state_dict(torch.load(file))
    return [network(view).float().double() for view in views]


def clustered(case: Case, found: Trained, pictures: Path) -> dict[str, Any]:
    """What an E-step needs."""
    pixels = [np.array(Image.open(file)) for file in sorted(pictures.glob("*/*.png"))]
    scaled = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (MEAN, STD))
    warmup = training.STEPS_PER_EPOCH * case.kwargs["warmup_epochs"]
    return {
        "images": (scaled - mean) / std,
        "num_prototypes": case.kwargs["num_prototypes"],
        "indices": training.INDICES.tolist(),
        "drawn": [[]] * warmup + found.lots if found.lots else None,
        "assignments": found.assignments if case.known_clusters else None,
    }


@pytest.fixture(scope="module")
def together(
    pictures: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """``together(case)``: what each of two processes had on its half of the batch."""
    folder = tmp_path_factory.mktemp("processes")
    configs = {
        # Learning rates count the images of both.
        name: configured(case, pictures, teacher, batch_size=training.BATCH // 2) | {"devices": 2}
        for name, case in PROCESSES.items()
    }
    (folder / "configs.json").write_text(json.dumps(configs))
    # Ten runs that wait for each other hundreds of times: on busy cores that is long.
    run_script(HERE / "fifty_steps" / "two_processes.py", folder, timeout=1200)

    def found(name: str) -> list[dict[str, Any]]:
        return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]

    return found


def assert_same(found: Trained, ours: Loop, losses: list[float]) -> None:
    """Losses and all that has weights or rows."""
    # Clusters have other numbers in the loop.
    clusters = isinstance(ours, Clusters)
    assert found.losses == pytest.approx(losses, rel=TOLERANCE)
    compared = {k: v for k, v in found.end.items() if v.is_floating_point()}
    for key, value in compared.items():
        if not (clusters and key.startswith("prototypes.")):
            torch.testing.assert_close(value, ours.w[key], rtol=TOLERANCE, atol=1e-10, msg=key)
    moved = {k.partition(".")[0] for k, v in compared.items() if not torch.equal(v, found.start[k])}
    assert {"backbone", "projector", "classifier"} <= moved


@pytest.mark.parametrize(
    "name",
    # A method's variants are named after it.
    [pytest.param(n, marks=[pytest.mark.slow] if " " in n else []) for n in CASES],
)
def test_every_loss_and_the_last_weights_are_those_of_the_loop(
    name: str, train: Callable[[str], Trained], loop: Callable[..., Loop]
) -> None:
    ours = loop(name)
    losses = ours.run(STEPS)
    assert_same(train(name), ours, losses)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_a_hundredth_more_of_any_constant_is_seen(
    name: str, train: Callable[[str], Trained], loop: Callable[..., Loop]
) -> None:
    """By the test above: it is of the loops, and nothing in the package makes it fail."""
    expected, case = train(name).losses[:SHORT], CASES[name]
    momentum = ("base_tau", "final_tau")
    shared = {k: v for k, v in TRAINING.items() if k not in momentum or case.loop.follows}
    for key, value in {**shared, **case.constants}.items():
        if key in case.without_effect:
            continue
        if key in ("iterations", "warmup_epochs", "freeze_prototypes_epochs"):
            changed = value + 1
        else:
            changed = value + 0.01 * (value or 1)
        losses = loop(name, **{key: changed}).run(SHORT)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        assert apart > 100 * TOLERANCE, key


def test_mixtures_are_drawn_from_the_ranges_of_the_paper(train: Callable[[str], Trained]) -> None:
    draws = train("mochi").draws
    assert len(draws) == 2 * STEPS
    pairs = torch.stack([one.pair_indices for one in draws])
    assert set(pairs.flatten().tolist()) == set(range(MIXING["num_hard"]))
    assert (pairs[..., 0] != pairs[..., 1]).all()
    alpha, beta = (torch.stack([getattr(one, k) for one in draws]) for k in ("alpha", "beta"))
    assert 0 < alpha.min() < 0.01 < 0.99 < alpha.max() < 1
    assert 0 < beta.min() < 0.01 < 0.49 < beta.max() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_are_the_loop_on_the_joined_batch(
    name: str, together: Callable[[str], list[dict[str, Any]]], pictures: Path, teacher: Path
) -> None:
    first, second = (Trained(**found) for found in together(name))
    draws = [
        MixDraws(*(torch.cat(parts) for parts in zip(*pair, strict=True)))
        for pair in zip(first.draws, second.draws, strict=True)
    ]
    assignments = [
        # Images are dealt out one by one.
        [torch.tensor(shares).T.flatten().tolist() for shares in zip(*epoch, strict=True)]
        for epoch in zip(first.assignments, second.assignments, strict=True)
    ]
    joined = first._replace(draws=draws, assignments=assignments)
    ours = loop_of(PROCESSES[name], joined, pictures, teacher)
    losses = ours.run(STEPS)
    mean = [(a + b) / 2 for a, b in zip(first.losses, second.losses, strict=True)]
    for found in (first, second):
        assert_same(found._replace(losses=mean), ours, losses)
