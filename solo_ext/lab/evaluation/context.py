"""What a protocol gets: a backbone, the images it is measured on, and its features."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from numpy.typing import NDArray
from torch import Tensor, nn

from solo_ext import __version__
from solo_ext.config.schema import DALI, CommonConfig, Crop
from solo_ext.config.schema import Images as ImagesSection
from solo_ext.core import distributed
from solo_ext.core.draws import derive_seed, permutation
from solo_ext.core.errors import ConfigError, first_line, suggest_name
from solo_ext.data.dali import DALIViews
from solo_ext.data.images import (
    TORCHVISION,
    Split,
    class_names,
    images_fingerprint,
    open_images,
    part_of,
)
from solo_ext.data.loaders import FixedLoader, fixed_loader
from solo_ext.data.reading import Images, name_of, targets_of
from solo_ext.data.transforms import STATISTICS, fixed_view
from solo_ext.lab.evaluation.features import (
    ALONE,
    Features,
    FeatureStore,
    Ranks,
    Rows,
    extract_features,
    feature_batches,
)
from solo_ext.lab.evaluation.models import EvalData, EvalRun, Model, open_model

logger = logging.getLogger(__name__)
Progress = Callable[[str, int, int], object]
"""Called with the name of a task, its number of batches done, and its number of batches in all."""
SPLITS: tuple[Split, Split] = ("train", "val")
_OF_FILES = ("image_folder", "dali")
"""Formats that read the same image files."""
_DRAWN = 2000
"""Most training images that are measured if no others are there."""
_CLASS_FOLDERS = "give class folders with data.train_path=... data.val_path=..."


@dataclass
class EvalContext:
    """Model, images and features for a protocol.

    Attributes:
        cfg: config of this evaluation; the only entry of ``augmentations`` is the fixed view.
        train: training images, all with a label; the images of ``test`` have the same classes.
            In an evaluation without labels, images of which nothing else is known.
        out: folder for pictures; it may not exist yet.
        unreadable: by split, names of images without features, if ``data.unreadable`` is ``skip``.
        readable: by split with such images, (n,) index of the image of each row of features.
        unlabelled: why protocols that need labels cannot measure; ``None`` if they can.
        drawn: (T,) the training images that ``test`` consists of, if no others are there.

    >>> from PIL import Image
    >>> settings = EvalRun(data={"train_path": "train", "val_path": "val"})
    >>> model, images = open_model("pixels", settings), [(Image.new("RGB", (8, 8)), 0)] * 3
    >>> context = EvalContext(model, settings, model.cfg, images, images, "cpu", Path("maps"))
    >>> context.title, context.about()["train"]["images"]
    ('pixels', 3)
    """

    model: Model
    settings: EvalRun
    cfg: CommonConfig
    train: Images
    test: Images
    device: str
    out: Path
    progress: Progress = lambda *_: None
    ranks: Ranks = ALONE
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    readable: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    unlabelled: ConfigError | None = None
    drawn: NDArray[np.int64] | None = None

    @property
    def labelled(self) -> bool:
        """Whether all images have labels."""
        return self.unlabelled is None

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the C classes by their number; empty without labels."""
        return class_names(self.train) if self.labelled else []

    @cached_property
    def fingerprints(self) -> tuple[str | None, str | None]:
        """Digests of the images of both splits; computed once, because this lists every file."""
        return images_fingerprint(self.train), images_fingerprint(self.test)

    def digest(self, *further: Any) -> str:
        """Digest of the package's version, the model, the view, and ``further`` JSON values."""
        view = self.cfg.augmentations[0].model_dump()
        backbone = self.cfg.backbone.model_dump()
        given = [__version__, self.model.digest, backbone, view, *further]
        text = json.dumps(given, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """Title in pictures: the method, or the model's name if it has no method."""
        return self.cfg.method or self.model.name

    def backbone(self) -> nn.Module:
        """A copy of the backbone with its weights, on the CPU, that may be trained."""
        own = copy.deepcopy(self.model.backbone).cpu().requires_grad_(True)
        # During training rank 0 evaluates alone: synchronised batch norm would wait forever.
        return TorchSyncBatchNorm().revert(own)

    def loader(self, images: Images) -> FixedLoader | DALIViews:
        """Batches ``(images, targets)`` of the fixed view, in order, each image once."""
        return fixed_loader(self.cfg, images, batch_size=self.settings.batch_size)

    def report(self, what: str) -> Callable[[int, int], object]:
        """Progress function of one task; it takes the number of batches done and in all."""
        return partial(self.progress, what)

    @cached_property
    def features(self) -> Features:
        """Frozen features of both splits, on the CPU, read from disk if they are stored already.

        Processes other than the first get no rows. A split is read when it is first asked for.
        """
        found = Features(
            lambda: self._features("train", self.train),
            lambda: self._features("val", self.test),
            self.class_names,
        )
        if self.cfg.data.unreadable == "skip":
            # Which images are left out is found on the way, and belongs into the record.
            _ = found.train, found.test
        return found

    def about(self) -> dict[str, Any]:
        """Model and data of the evaluation, for a record."""
        return {
            "run": self.model.name,
            "folder": str(self.model.folder),
            "checkpoint": self.model.checkpoint,
            "checkpoint_sha256": self.model.digest,
            "method": self.cfg.method,
            "backbone": self.cfg.backbone.model_dump(),
            "epoch": self.model.epoch,
            "image_size": self.cfg.augmentations[0].crop_size,
            "train": self._about_split("train", self.train),
            "test": self._about_split("val", self.test),
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader of the numbers has to know."""
        if self.drawn is None:
            return []
        return [
            f"there is no data.val_path and no data.holdout: measured on {len(self.drawn):,} of "
            "the training images"
        ]

    def _about_split(self, split: Split, images: Images) -> dict[str, Any]:
        unreadable, data = self.unreadable.get(split, []), self.cfg.data
        # With data.holdout both splits are parts of the training images.
        whole = data.holdout is None and self.drawn is None
        drawn = {"drawn_from": "train"} if split == "val" and self.drawn is not None else {}
        return {
            "path": str(data.path(split) if whole else data.train_path),
            "images": len(images) - len(unreadable),
            "unreadable": unreadable,
            **drawn,
        }

    def on(self, data: EvalData, out: Path) -> EvalContext:
        """The same backbone on other images."""
        settings = self.settings.model_copy(update={"data": data})
        cfg = evaluation_config(self.model.cfg, settings)
        images = _images(cfg)._asdict()
        own: dict[str, Any] = {"unreadable": {}, "readable": {}, **images}
        return replace(self, settings=settings, cfg=cfg, out=out, **own)

    def note_skipped(self, split: Split, images: Images, skipped: Sequence[int]) -> None:
        """Notes which images have no features, by their indices."""
        if skipped:
            self.unreadable[split] = [name_of(images, index) for index in skipped]
            self.readable[split] = np.setdiff1d(np.arange(len(images)), skipped)

    def image_index(self, split: Split, row: int) -> int:
        """The index of the image that a row of features is of."""
        places = self.readable.get(split)
        return row if places is None else int(places[row])

    def own_rows(self) -> Tensor | None:
        """Row of the training features that each row of the test split is, if it is drawn."""
        if self.drawn is None:
            return None
        read, trained = self.readable.get("val"), self.readable.get("train")
        images = self.drawn if read is None else self.drawn[read]
        return torch.from_numpy(images if trained is None else np.searchsorted(trained, images))

    def _features(self, split: Split, images: Images) -> Rows:
        backbone, report, device = self.model.backbone, self.report(split), self.device
        found = self.fingerprints[split != "train"]
        if found is None:
            if self.ranks.rank:
                # Features of images without a fingerprint are not stored: rank 0 extracts alone.
                return torch.empty(0, 0), torch.empty(0, dtype=torch.int64)
            loader = self.loader(images)
            rows = extract_features(backbone, loader, device=device, progress=report)
            self.note_skipped(split, images, loader.skipped)
            if loader.skipped:
                names = self.unreadable[split]
                logger.warning(
                    f"{len(names)} of {len(images)} images of {split} cannot be read and are left "
                    f"out, the first {names[0]!r}"
                )
            return rows

        size, (mean, std) = fixed_view(self.cfg)
        key = {
            "model": self.model.digest,
            "backbone": self.cfg.backbone.model_dump(),
            "data": {"path": str(self.cfg.data.path(split)), "split": split, "fingerprint": found},
            "view": {
                "size": size,
                "mean": list(mean),
                "std": list(std),
                # DALI's pixels differ from Pillow's by rounding.
                "dali": self.cfg.data.format == "dali",
            },
        }
        return self.stored(backbone, images, key, split, self.ranks)

    def stored(
        self, network: nn.Module, images: Images, key: dict[str, Any], what: str, ranks: Ranks
    ) -> Rows:
        """Rows of images by a network, which are read from disk if they are stored under the key.

        ``what`` is the name of the task for its progress; ``ranks`` share the work.
        """

        def batches(indices: Sequence[int]) -> Generator[Rows]:
            part = images
            if len(indices) < len(images):
                part = part_of(images, np.asarray(indices))
            loader, report = self.loader(part), self.report(what)
            return feature_batches(network, loader, device=self.device, progress=report)

        folder = self.settings.features_dir or self.model.folder / "features"
        return FeatureStore(Path(folder), key, len(images)).features(batches, ranks)


def open_context(
    model: str | Model, settings: EvalRun, progress: Progress = lambda *_: None
) -> EvalContext:
    """Loads a model, unless it is loaded already, and opens the images that its config names.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
    ...     (root / name).mkdir(parents=True)
    ...     Image.new("RGB", (8, 8), "red").save(root / name / "1.png")
    >>> data = {"train_path": str(root / "train"), "val_path": str(root / "val")}
    >>> settings = EvalRun(data=data, crop_size=8, num_workers=0, out=str(root))
    >>> context = open_context("pixels", settings)
    >>> context.features.train[0].shape, context.class_names
    (torch.Size([2, 192]), ['cat', 'dog'])
    """
    ranks = _ranks()
    device = _device(settings.device, ranks)
    model = open_model(model, settings) if isinstance(model, str) else model
    cfg = evaluation_config(model.cfg, settings)
    train, test, unlabelled, drawn = _images(cfg)
    context = EvalContext(model, settings, cfg, train, test, device, model.folder, progress, ranks)
    return replace(context, unlabelled=unlabelled, drawn=drawn)


def evaluation_config(trained: CommonConfig, settings: EvalRun) -> CommonConfig:
    """The config of pretraining with the images and the view of an evaluation.

    >>> settings = EvalRun(data={"train_path": "train", "val_path": "val"}, crop_size=64)
    >>> cfg = evaluation_config(open_model("pixels", settings).cfg, settings)
    >>> cfg.data.path("val"), cfg.augmentations[0].crop_size
    ('val', 64)
    """
    data = trained.data.model_dump()
    given = settings.data.model_dump(exclude_unset=True)
    given = {key: value for key, value in given.items() if value is not None}
    # Keys that are left out of these sections stay those of training, such as the labels' column.
    sections = {key: given.pop(key) for key in ("huggingface", "streaming") if key in given}
    data |= {key: {**(data[key] or {}), **own} for key, own in sections.items()}
    renamed = sections.get("huggingface", {}).keys() - {"cache_dir"}
    # None of these changes which images are meant: with them alone, keep all other data settings
    # of training.
    if "unreadable" in given:
        data["unreadable"] = given.pop("unreadable")
    labels = {"no_labels": given.pop("no_labels")} if "no_labels" in given else {}
    if data["format"] in _OF_FILES and given.get("format") in _OF_FILES:
        data["format"] = given.pop("format")
    if given or renamed:
        # New paths are the user's own class folders, unless torchvision's data set lies there.
        # The mean and deviation of the normalisation stay those of pretraining.
        inside = TORCHVISION.get(data["dataset"])
        paths = [given[key] for key in ("train_path", "val_path") if key in given]
        moved = inside is not None and all((Path(p) / inside).is_dir() for p in paths)
        # HDF5 files and Hugging Face data sets contain their classes.
        moved = moved or given.get("format", data["format"]) not in _OF_FILES
        dataset = data["dataset"] if moved else "custom"
        whole = {"no_labels": False, "fraction": -1, "holdout": None}
        data |= {"dataset": dataset, **whole} | given
    data |= labels
    if settings.num_workers is not None:
        data["num_workers"] = settings.num_workers
    size, (mean, std) = fixed_view(trained)
    view = Crop(crop_size=settings.crop_size or size, mean=list(mean), std=list(std))
    dali = settings.dali or trained.dali or DALI()
    update = {"data": ImagesSection(**data), "augmentations": [view], "dali": dali}
    return trained.model_copy(update=update)


class Splits(NamedTuple):
    """The images of an evaluation; the last two are as in :class:`EvalContext`.

    >>> Splits([("a", 0)], [("b", 0)]).unlabelled is None
    True
    """

    train: Images
    test: Images
    unlabelled: ConfigError | None = None
    drawn: NDArray[np.int64] | None = None


def _images(cfg: CommonConfig) -> Splits:
    train = open_images(cfg.data, "train")
    splits = measured_images(cfg.data, train, held_out_images(cfg.data))
    if splits.unlabelled is None and cfg.data.dataset not in STATISTICS:
        same_classes(splits.train, splits.test, str(cfg.data.val_path))
    tell_of_seen_images(cfg.data)
    return splits


def held_out_images(data: ImagesSection) -> Images | None:
    """The images that training does not see; ``None`` if the config names none.

    >>> held_out_images(ImagesSection(dataset="custom", train_path="train"))
    """
    without = data.val_path is None and data.holdout is None
    return None if without else open_images(data, "val")


def measured_images(data: ImagesSection, train: Images, val: Images | None) -> Splits:
    """The images that an evaluation measures: those with labels, or without labels all.

    Without ``val``, 2,000 of the training images stand in for it. They are the same in every call.

    >>> data = ImagesSection(dataset="custom", train_path="train", no_labels=True)
    >>> splits = measured_images(data, [(name, -1) for name in "abc"], None)
    >>> splits.drawn, print(splits.unlabelled)
    data.train_path='train': the run was trained without labels; give class folders with ...
    (array([0, 1, 2]), None)
    """
    reason = None
    if data.no_labels:
        reason = ConfigError(
            "data.train_path", data.train_path, "the run was trained without labels", _CLASS_FOLDERS
        )
    elif val is None:
        reason = ConfigError("data.val_path", None, "no path", "give the folder of the images")
    if val is None:
        places = np.arange(min(_DRAWN, len(train)))
        drawn = np.sort(permutation(len(train), derive_seed(0))(places))
        return Splits(train, part_of(train, drawn), reason, drawn)
    if reason is None:
        try:
            parts = labelled_images(train, data, "train"), labelled_images(val, data, "val")
        except ConfigError as error:
            reason = error
        else:
            return Splits(*parts)
    return Splits(train, val, reason)


def labelled_images(images: Images, data: ImagesSection, split: Split) -> Images:
    """Leaves out unlabelled images, such as STL-10 has; refuses if no image has a label.

    >>> data = ImagesSection(dataset="custom", val_path="val")
    >>> images = labelled_images([("a", 2), ("b", -1), ("c", 0)], data, "val")
    >>> [images[index] for index in range(len(images))]
    [('a', 2), ('c', 0)]
    """
    kept = np.flatnonzero(np.asarray(targets_of(images)) >= 0)
    if len(kept) == len(images):
        return images
    if not len(kept):
        raise ConfigError(
            f"data.{split}_path",
            data.path(split),
            f"none of its {len(images)} images has a label",
            _CLASS_FOLDERS,
        )
    return part_of(images, kept)


def same_classes(train: Images, val: Images, val_path: str) -> None:
    """Refuses validation folders whose class numbers differ from those of training.

    The last classes may be missing in validation, because that changes no number.

    Raises:
        ConfigError: a class that training does not have, or a missing class before others.

    >>> from types import SimpleNamespace
    >>> train = SimpleNamespace(classes=["cat", "dog"])
    >>> val = SimpleNamespace(classes=["cat", "fox"])
    >>> same_classes(train, val, "val")
    Traceback (most recent call last):
        ...
    solo_ext.core.errors.ConfigError: data.val_path='val': class 'fox' is not among the training...
    """
    ours, theirs = class_names(train), class_names(val)
    if extra := sorted(set(theirs) - set(ours)):
        problem, remedy = "is not among the training classes", suggest_name(extra[0], ours)
    elif theirs != ours[: len(theirs)]:
        extra = sorted(set(ours) - set(theirs))
        problem, remedy = "is missing, which would shift the labels", "add it, one image is enough"
    else:
        return
    raise ConfigError("data.val_path", val_path, f"class {extra[0]!r} {problem}", remedy)


def tell_of_seen_images(data: ImagesSection) -> None:
    """Warns if the held-out images are the training images: kNN then finds each image itself.

    >>> tell_of_seen_images(ImagesSection(dataset="custom", train_path="train", val_path="val"))
    """
    train, val = data.train_path, data.val_path
    if train is None or val is None or data.holdout is not None or data.no_labels:
        return
    # Data sets of torchvision and of Hugging Face have several splits at one path.
    if data.dataset in STATISTICS or data.format == "huggingface":
        return
    trained = [train] if isinstance(train, str) else train
    if Path(val).expanduser().resolve() in [Path(p).expanduser().resolve() for p in trained]:
        logger.warning(
            "data.val_path is data.train_path: accuracies are of images that were trained on, and "
            "kNN finds each of them itself; name others, or set data.holdout"
        )


def _ranks() -> Ranks:
    """Ranks from the process group, or from the variables of torchrun and SLURM launchers."""
    if distributed.world_size() > 1:
        return Ranks(distributed.rank(), distributed.world_size())
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        # `srun` sets it; a batch script without `srun` is one process, whatever the job's tasks.
        return Ranks(int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"]))
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def _device(name: str, ranks: Ranks) -> str:
    if name == "auto":
        if not torch.cuda.is_available():
            return "cpu"
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        index = int(local) % torch.cuda.device_count() if ranks.world > 1 else 0
        name = f"cuda:{index}" if index else "cuda"
    try:
        torch.ones(1, device=name).cpu()
    except Exception as error:
        # torch raises many types of error for a device that is unknown, missing or unusable.
        remedy = f"take auto or cpu; there are {torch.cuda.device_count()} GPUs"
        raise ConfigError("device", name, first_line(error), remedy) from None
    if torch.device(name).index:
        # DALI decodes on the current device.
        torch.cuda.set_device(name)
    return name
