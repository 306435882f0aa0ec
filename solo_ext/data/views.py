"""The order of the samples, and their views, which depend on (seed, epoch, index) alone.

With ``data.augmentation=batch``, whole images of one size are read instead; their crops are made on
the training device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchvision import datasets

from solo_ext.core import distributed
from solo_ext.core.draws import derive_seed, permutation
from solo_ext.core.errors import ConfigError
from solo_ext.data.reading import (
    Images,
    SkipUnreadable,
    UnreadableImage,
    name_of,
    read_sample,
    targets_of,
    unwrap_dataset,
)

Crops = Callable[[Image.Image], list[Tensor]]
Integers = NDArray[np.int64]
_ORDER_CHUNK = 4096
"""Number of entries of the order that are computed at a time."""
LARGEST_ON_DEVICE = 96
"""Longest side of images that are kept in a GPU's memory unasked."""
DEVICE_SHARE = 1 / 4
"""Largest share of a GPU's free memory that they take."""
_MOST_BYTES = 8 << 30
"""Largest decoded size that ``data.in_memory`` accepts."""


class SampleKey(NamedTuple):
    """What the sampler requests: a sample, and the epoch that augmentation draws for.

    >>> SampleKey(epoch=2, sample=7)
    SampleKey(epoch=2, sample=7)
    """

    epoch: int
    sample: int


class EpochSampler(Sampler[SampleKey]):
    """A :func:`~solo_ext.core.draws.permutation` by (seed, epoch), divided among the ranks.

    Every rank yields the same number of samples: a remainder that does not divide evenly is left
    out of that epoch.

    Args:
        size: number of samples.
        seed: of the run.
        num_replicas: number of ranks; that of ``torch.distributed`` by default.
        rank: this rank; likewise.
        shards: from :func:`shard_starts`; if given, the order is that of :func:`shard_order`.
        shards_at_once: number of shards that samples are taken from at a time.

    >>> sampler = EpochSampler(5, seed=0, num_replicas=2, rank=0)
    >>> [key.sample for key in sampler]
    [2, 1]
    """

    def __init__(
        self,
        size: int,
        seed: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shards: Integers | None = None,
        shards_at_once: int = 1,
    ) -> None:
        self.size, self.seed = size, seed
        self._shards, self._at_once = shards, shards_at_once
        self._replicas, self._rank = num_replicas, rank
        self.epoch = 0
        self.start = 0

    def _share(self) -> tuple[int, int]:
        # Ask in every epoch, because loaders are built before the process group.
        replicas = self._replicas or distributed.world_size()
        return replicas, distributed.rank() if self._rank is None else self._rank

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, starting at its first sample unless it is already the current one."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.size // self._share()[0]

    def entries(self) -> Callable[[Integers], Integers]:
        """The epoch's order, as a function from positions (N,) of this rank to samples (N,)."""
        replicas, rank = self._share()
        key = derive_seed(self.seed, self.epoch)
        if self._shards is None:
            order = permutation(self.size, key)
        else:
            order = shard_order(self._shards, key, self._at_once)
        return lambda places: order(places * replicas + rank)

    def __iter__(self) -> Iterator[SampleKey]:
        epoch, entries, count = self.epoch, self.entries(), len(self)
        for first in range(self.start, count, _ORDER_CHUNK):
            for index in entries(np.arange(first, min(first + _ORDER_CHUNK, count))).tolist():
                yield SampleKey(epoch, index)


def shard_order(starts: Integers, seed: int, at_once: int) -> Callable[[Integers], Integers]:
    """An order of all samples that reads few shards at a time, as a function from positions.

    The shards are permuted, and the samples within each. This sequence is cut into ``at_once``
    lanes of equal length, from which samples are taken in turn: any ``at_once`` samples in a row
    come from as many lanes. Lane k starts k / at_once of a shard after its cut and ends with the
    part that it left out, so that the lanes do not all reach their next shards at the same time.

    Args:
        starts: (S + 1,) first sample of every shard, and the number of samples.
        seed: as :func:`~solo_ext.core.draws.derive_seed` returns it.
        at_once: number of lanes; at most S are used.

    Returns:
        A function from positions (N,) to the samples there; it keeps only O(S) numbers in memory.

    >>> order = shard_order(np.array([0, 3, 6, 9, 12]), seed=3, at_once=2)
    >>> sorted(order(np.arange(12)).tolist()) == list(range(12))
    True
    """
    starts = starts[np.append(np.diff(starts) > 0, True)]
    sizes, size, count = np.diff(starts), int(starts[-1]), len(starts) - 1
    shards = permutation(count, seed)(np.arange(count))
    ends = np.cumsum(sizes[shards])
    lanes = min(at_once, count)

    def entries(places: Integers) -> Integers:
        lane, depth = places % lanes, places // lanes
        # The first lanes may have one sample more: `minimum` counts those before this one.
        cut = lane * (size // lanes) + np.minimum(lane, size % lanes)
        length = size // lanes + (lane < size % lanes)
        place = cut + (depth + lane * (size // count) // lanes) % length
        turns = np.searchsorted(ends, place, side="right")
        found = np.empty_like(place)
        for turn in np.unique(turns).tolist():
            here, shard = turns == turn, int(shards[turn])
            within = place[here] - (ends[turn] - sizes[shard])
            found[here] = starts[shard] + permutation(int(sizes[shard]), derive_seed(seed, shard))(
                within
            )
        return found

    return entries


def shard_starts(images: Images) -> Integers | None:
    """First sample of every shard, and the number of samples; ``None`` without shards.

    For a ``Subset``, these are indices of the subset, and a shard has only its samples in there.

    >>> shard_starts([("an image", 2), ("another", 0)])
    """
    source, indices = unwrap_dataset(images, range(len(images)))
    starts: Integers | None = getattr(source, "shard_starts", None)
    if starts is None or isinstance(indices, range):
        return starts
    return np.searchsorted(np.asarray(indices), starts)


class TrainingViews(Dataset[tuple[int, list[Tensor], int]]):
    """Samples ``(index, crops, target)`` whose crops depend on (seed, epoch, index) alone.

    If another sample replaces an unreadable one, index and target are those of the replacement. Its
    crops are drawn for the requested sample, so that they differ from its regular crops.

    ``transform`` is ``None`` if something else makes the crops.

    >>> from solo_ext.data.transforms import MultiCrop
    >>> from torchvision.transforms import ToTensor
    >>> images = [(Image.new("RGB", (8, 8)), 3)] * 4
    >>> views = TrainingViews(images, MultiCrop([ToTensor()], [2]), seed=5)
    >>> index, crops, target = views[SampleKey(epoch=0, sample=1)]
    >>> index, [tuple(crop.shape) for crop in crops], target
    (1, [(3, 8, 8), (3, 8, 8)], 3)
    """

    def __init__(self, images: Images, transform: Crops | None = None, seed: int = 0) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: SampleKey) -> tuple[int, list[Tensor], int]:
        epoch, index = key
        served, (image, target) = read_sample(self.images, index)
        assert self.transform is not None
        # Without workers this process also trains, so restore its generator afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, epoch, index))
            return served, self.transform(image), target


class FixedViews(Dataset[tuple[Tensor, int] | None]):
    """Samples ``(view, target)`` by a fixed transform; ``None`` for a skipped, unreadable image.

    >>> from torchvision.transforms import ToTensor
    >>> view, target = FixedViews([(Image.new("RGB", (8, 8)), 3)], ToTensor())[0]
    >>> view.shape, target
    (torch.Size([3, 8, 8]), 3)
    """

    def __init__(self, images: Images, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        try:
            image, target = self.images[index]
        except UnreadableImage:
            if not isinstance(self.images, SkipUnreadable):
                raise
            return None
        return self.transform(image), target


class RawBatch(NamedTuple):
    """A batch of N samples before augmentation; ``asked`` is on the CPU.

    Augmentation draws for ``epoch`` and the samples that were ``asked`` for, so that a sample that
    replaces an unreadable one gets crops that differ from its regular ones. Images (N, 3, H, W),
    uint8, and targets are those of ``indices``.

    >>> images, two = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([3, 1])
    >>> RawBatch(0, asked=two, indices=two, images=images, targets=torch.tensor([0, 2])).epoch
    0
    """

    epoch: int
    asked: Tensor
    indices: Tensor
    images: Tensor
    targets: Tensor


class RawBatches(TrainingViews):
    """A training set of images of one size, which are decoded on demand and a batch at a time.

    >>> raw = RawBatches([(Image.new("RGB", (10, 8)), 3)] * 5, height=8, width=10)
    >>> raw.__getitems__([SampleKey(epoch=0, sample=3), SampleKey(epoch=0, sample=1)]).images.shape
    torch.Size([2, 3, 8, 10])
    """

    def __init__(self, images: Images, height: int, width: int) -> None:
        super().__init__(images)
        self.height, self.width = height, width

    def __getitems__(self, keys: Sequence[SampleKey]) -> RawBatch:
        """The batch of some samples of one epoch."""
        asked = [key.sample for key in keys]
        return RawBatch(keys[0].epoch, torch.tensor(asked), *self.read(asked))

    @staticmethod
    def collate(batch: RawBatch) -> RawBatch:
        """Returns the batch, which needs no collating."""
        return batch

    def read(self, samples: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Indices, pixels (N, 3, H, W) and targets of samples, or of those that replace them.

        Raises:
            UnreadableImage: as :func:`~solo_ext.data.reading.read_sample`, or a size differs.
        """
        pixels = torch.empty(len(samples), 3, self.height, self.width, dtype=torch.uint8)
        served, targets = [], []
        for place, asked in enumerate(samples):
            sample, (image, target) = read_sample(self.images, asked)
            if image.size != (self.width, self.height):
                # From a worker, this error arrives as one line; any other arrives as a traceback.
                raise UnreadableImage(
                    f"data.augmentation='batch': image {name_of(self.images, sample)!r} has "
                    f"{image.width} x {image.height} pixels, the first {self.width} x "
                    f"{self.height}; take image, or scale them to one size beforehand"
                )
            # Copy, because torch needs writable memory.
            array = np.array(image.convert("RGB"))
            pixels[place] = torch.from_numpy(array).permute(2, 0, 1)
            served.append(sample)
            targets.append(target)
        return torch.tensor(served), pixels, torch.tensor(targets)


def moved_to(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on ``device``; the host does not wait for the copy.

    >>> moved_to(np.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        # Copying from memory that is not pinned would wait for the device.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HeldBatches(RawBatches):
    """Batches of images that are held in memory: the host's, or after :meth:`move` the GPU's.

    Args:
        images: the training images.
        pixels: (M, 3, H, W), uint8; not copied.
        targets: (M,), of the rows of ``pixels``.
        rows: (N,), row of ``pixels`` of every sample; all rows by default.
        served: (N,), index of the sample in each of ``rows``, if some replace unreadable ones.

    >>> zeros = np.zeros((5, 3, 8, 8), dtype=np.uint8)
    >>> held = HeldBatches([], zeros, targets=[0, 1, 2, 3, 4])
    >>> indices, images, targets = held.read([3, 1])
    >>> indices.tolist(), images.shape, targets.tolist()
    ([3, 1], torch.Size([2, 3, 8, 8]), [3, 1])
    """

    def __init__(
        self,
        images: Images,
        pixels: NDArray[np.uint8],
        targets: Sequence[int] | Tensor,
        rows: Sequence[int] | None = None,
        served: Tensor | None = None,
    ) -> None:
        super().__init__(images, *pixels.shape[2:])
        self.pixels: NDArray[np.uint8] | Tensor = pixels
        self.targets = torch.as_tensor(targets)
        self.rows = np.arange(len(pixels)) if rows is None else np.asarray(rows)
        self.served = torch.arange(len(self.rows)) if served is None else served

    def move(self, device: torch.device, always: bool) -> None:
        """Keeps images, indices and targets on ``device``, where a batch is then selected.

        A GPU takes images of up to :data:`LARGEST_ON_DEVICE` pixels a side that need at most
        :data:`DEVICE_SHARE` of its free memory, or with ``always`` any that it has room for.

        Raises:
            ConfigError: ``always`` is set, and the images take more than the free memory.
        """
        if isinstance(self.pixels, Tensor) or not (always or device.type == "cuda"):
            return
        size = 3 * len(self.rows) * self.height * self.width
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _MOST_BYTES
        small = max(self.height, self.width) <= LARGEST_ON_DEVICE and size <= DEVICE_SHARE * free
        if always and size > free:
            problem = f"the images take {size / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            raise ConfigError("data.in_memory", "device", problem, "take true")
        if always or small:
            self.pixels = torch.from_numpy(self.pixels[self.rows]).contiguous().to(device)
            self.targets, self.served = self.targets[self.rows].to(device), self.served.to(device)

    def read(self, samples: Sequence[int] | Integers) -> tuple[Tensor, Tensor, Tensor]:
        asked = np.asarray(samples)
        if not isinstance(self.pixels, Tensor):
            rows = self.rows[asked]
            # Use NumPy: indexing a tensor by rows takes several times as long.
            images = torch.from_numpy(self.pixels[rows]).contiguous()
            return self.served[asked], images, self.targets[rows]
        places = moved_to(asked, self.pixels.device)
        held = self.served, self.pixels, self.targets
        indices, images, targets = (values.index_select(0, places) for values in held)
        return indices, images, targets


def raw_batches(images: Images, in_memory: bool | str) -> RawBatches:
    """Whole images: from torchvision's arrays, decoded into memory now, or decoded on demand.

    Raises:
        ConfigError: ``in_memory`` is set, and the images take too much memory.
        UnreadableImage: ``in_memory`` is set, and the images have several sizes.

    >>> type(raw_batches([(Image.new("RGB", (10, 8)), 3)] * 5, in_memory=True)).__name__
    'HeldBatches'
    """
    # `SkipUnreadable` can be dropped for torchvision's arrays, whose images cannot be unreadable.
    source, rows = unwrap_dataset(images, range(len(images)))
    if isinstance(source, datasets.CIFAR10):
        return HeldBatches(images, source.data.transpose(0, 3, 1, 2), targets_of(source), rows)
    if isinstance(source, datasets.STL10):
        return HeldBatches(images, source.data, targets_of(source), rows)
    width, height = read_sample(images, 0)[1][0].size
    decoded = RawBatches(images, height, width)
    if not in_memory:
        return decoded
    size = 3 * len(images) * height * width
    if size > _MOST_BYTES:
        problem = f"takes {size / 2**30:.1f} GiB per process"
        raise ConfigError("data.in_memory", in_memory, problem, "take false")
    served, pixels, targets = decoded.read(range(len(images)))
    return HeldBatches(images, pixels.numpy(), targets, served=served)
