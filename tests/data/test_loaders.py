"""Loaders: the same batches for any number of workers, from any place in the run."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from solo_ext.config.schema import Augmentation, RunConfig
from solo_ext.data.images import open_images
from solo_ext.data.loaders import ResumableLoader, fixed_loader, pretrain_loader
from solo_ext.data.reading import Images
from solo_ext.data.transforms import eval_transform
from solo_ext.data.views import EpochSampler
from tests.data.making import epochs, run_of, same, save_image, section

SIZE, BATCH = 22, 4
STEPS = SIZE // BATCH


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """22 small images of two classes."""
    root = tmp_path_factory.mktemp("images")
    for number in range(SIZE):
        save_image(root / str(number % 2) / f"{number:02d}.png", number)
    return open_images(section(root), "train")


def config(workers: int = 0, *, batch: int = BATCH, seed: int = 5) -> RunConfig:
    large = Augmentation(crop_size=8, num_crops=2, horizontal_flip={"prob": 0.5})  # type: ignore[arg-type]
    small = Augmentation(crop_size=6, num_crops=1, gaussian_blur={"prob": 0.5})  # type: ignore[arg-type]
    run = run_of(section(None, num_workers=workers), batch, large, small)
    return run.model_copy(update={"seed": seed})


@pytest.fixture(scope="module")
def with_workers(images: Images) -> Iterator[ResumableLoader]:
    """A loader with two workers, which live as long as it does."""
    loader = pretrain_loader(config(2), images)
    yield loader
    loader._iterator = None


@pytest.fixture(scope="module")
def expected(images: Images) -> list[Any]:
    """All batches of three epochs, without workers."""
    return epochs(pretrain_loader(config(), images), 3)


def test_batches_are_what_methods_take(images: Images, expected: list[Any]) -> None:
    loader = pretrain_loader(config(), images)
    assert len(loader) == STEPS
    assert len(expected) == 3 * STEPS
    for indices, crops, targets in expected:
        assert indices.shape == targets.shape == (BATCH,)
        assert [tuple(c.shape) for c in crops] == [(BATCH, 3, 8, 8)] * 2 + [(BATCH, 3, 6, 6)]
        assert [images[i][1] for i in indices] == targets.tolist()
    for i in range(2 * STEPS):
        assert not same(expected[i], expected[i + STEPS])
    assert not same(list(pretrain_loader(config(seed=6), images)), expected[:STEPS])
    served = torch.cat([indices for indices, _, _ in expected[:STEPS]]).tolist()
    assert served == [key.sample for key in EpochSampler(SIZE, 5)][: STEPS * BATCH]


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_the_global_generator_alone(
    images: Images, with_workers: ResumableLoader, workers: int
) -> None:
    loader = with_workers if workers else pretrain_loader(config(), images)
    torch.manual_seed(0)
    state, own = torch.get_rng_state(), random.getstate()
    epochs(loader, 2, {"epoch": 0, "batches": 0})
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == own


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("served", range(2 * STEPS + 1))
def test_continues_at_every_place(
    images: Images, with_workers: ResumableLoader, expected: list[Any], workers: int, served: int
) -> None:
    """A run is stopped after any batch of two epochs, while workers are ahead of it."""
    loader = with_workers if workers else pretrain_loader(config(), images)
    loader.load_state_dict({"epoch": 0, "batches": 0})
    before: list[Any] = []
    for epoch in range(-(-served // STEPS)):
        loader.order.set_epoch(epoch)
        before += islice(loader, served - len(before))
    assert same(before, expected[:served])
    state = dict(loader.state_dict())
    epoch, batches = divmod(served, STEPS)
    assert state == {"epoch": epoch, "batches": batches}
    again = loader if workers else pretrain_loader(config(), images)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert same(epochs(again, 3, state), expected[served:])


def test_the_place_is_that_of_the_epoch_sent_to(images: Images, expected: list[Any]) -> None:
    """A trainer names the next epoch before it asks for its first batch."""
    loader = pretrain_loader(config(), images)
    loader.load_state_dict({"epoch": 0, "batches": 3})
    # An epoch that was resumed in its middle is whole the next time.
    assert same(list(loader), expected[3:STEPS])
    assert same(list(loader), expected[:STEPS])
    loader.order.set_epoch(1)
    assert loader.state_dict() == {"epoch": 1, "batches": 0}
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 1, "batches": 1}
    loader.order.set_epoch(2)
    assert loader.state_dict() == {"epoch": 2, "batches": 0}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch", [None, 7])
def test_fixed_loader_serves_each_image_once(
    images: Images, workers: int, batch: int | None
) -> None:
    cfg = config(workers)
    cfg.augmentations[0].mean, cfg.augmentations[0].std = [0.1] * 3, [0.4] * 3
    torch.manual_seed(0)
    state = torch.get_rng_state()
    batches = list(fixed_loader(cfg, images, batch_size=batch))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(batches[0][0]) == (batch or BATCH)
    views, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert views.shape == (SIZE, 3, 8, 8)
    assert targets.tolist() == [0] * 11 + [1] * 11
    transform = eval_transform(8, [0.1] * 3, [0.4] * 3)
    assert torch.equal(views, torch.stack([transform(images[i][0]) for i in range(SIZE)]))
