"""Sizes that a config leaves open follow the training set; names of solo-learn's own methods."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import ARGS
from solo_ext.methods import METHODS
from solo_ext.methods.registry import IMAGENET, num_training_images
from tests.conftest import packed

MakeConfig = Callable[..., dict[str, Any]]
CIFAR, BATCH = 50_000, 256
QUEUE, PROTOTYPE = {"negatives": "queue"}, {"positives": "prototype"}
PUBLISHED, CLUSTERS = [25000, 50000, 100000], [976, 1951, 3903]
MARGIN = {"loss": "arcface_loss_func", "classes": "cluster"}
SIZES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    # method, what is given, training images, sizes
    ("pcl", {}, IMAGENET, {"num_prototypes": PUBLISHED, "queue_size": 16384}),
    ("pcl", {}, CIFAR, {"num_prototypes": CLUSTERS, "queue_size": 6144}),
    ("pcl", {}, 40, {"num_prototypes": [2, 3], "queue_size": BATCH}),
    ("mochi", {}, IMAGENET, {"queue_size": 65536}),
    ("mochi", {}, CIFAR, {"queue_size": 6144}),
    ("nnclr_symmetric", {}, IMAGENET, {"support_set.size": 98304, "queue_size": None}),
    ("nnclr_symmetric", {}, CIFAR, {"support_set.size": 6144, "queue_size": None}),
    ("nnclr_symmetric", QUEUE, IMAGENET, {"support_set.size": 98304, "queue_size": 65536}),
    ("nnclr_symmetric", QUEUE, CIFAR, {"support_set.size": 6144, "queue_size": 6144}),
    # The name of its size in solo-learn's nnclr.
    ("nnclr_symmetric", {"queue_size": 65536}, IMAGENET, {"support_set.size": 65536}),
    ("debiased", {}, IMAGENET, {"queue_size": None, "support_set.size": None}),
    ("hard_negative", PROTOTYPE, IMAGENET, {"clusters.num_prototypes": PUBLISHED}),
    ("hard_negative", PROTOTYPE, CIFAR, {"clusters.num_prototypes": CLUSTERS}),
    ("metric", MARGIN, IMAGENET, {"clusters.num_prototypes": PUBLISHED[:1]}),
    ("metric", MARGIN, CIFAR, {"clusters.num_prototypes": CLUSTERS[:1]}),
    ("protocpc", {}, IMAGENET, {"num_prototypes": 65536}),
    ("protocpc", {}, CIFAR, {"num_prototypes": 6250}),
    ("protoseed", {}, IMAGENET, {"num_prototypes": 65536}),
    ("protoseed", {}, CIFAR, {"num_prototypes": 6250}),
    ("protoseed", {"prototypes": "old"}, IMAGENET, {"num_prototypes": None}),
    ("seed", {}, IMAGENET, {"queue_size": 65536}),
    ("seed", {}, CIFAR, {"queue_size": 6144}),
    ("seed", {"loss": "regression"}, IMAGENET, {"queue_size": None}),
]


def filled(method: str, kwargs: dict[str, Any], images: int | None, **more: Any) -> DictConfig:
    """``method_kwargs`` with what follows from the number of images."""
    target = METHODS[method].target
    checked = check_method_kwargs(target.kwargs_type, kwargs)
    cfg = OmegaConf.create(
        {
            "method": method,
            "optimizer": {"batch_size": BATCH},
            "method_kwargs": checked.model_dump(),
            **more,
        }
    )
    target.fill_sizes(cfg, images)
    return cfg.method_kwargs


@pytest.mark.parametrize(("method", "given", "images", "sizes"), SIZES)
def test_sizes(method: str, given: dict[str, Any], images: int, sizes: dict[str, Any]) -> None:
    """The papers' for ImageNet; clusters in proportion, tables of an eighth in whole batches."""
    kwargs = filled(method, given, images)
    assert {key: OmegaConf.select(kwargs, key) for key in sizes} == sizes


def test_given_sizes_need_no_images() -> None:
    given = {"num_prototypes": [3], "queue_size": 9}
    nowhere = {"dataset": "custom", "train_path": "/nowhere", "format": "image_folder"}
    assert filled("pcl", given, None, data=nowhere).num_prototypes == [3]
    with pytest.raises(ConfigError, match=r"data.train_path='/nowhere': no such folder"):
        filled("pcl", {"queue_size": 9}, None, data=nowhere)


def test_one_line_says_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="solo_ext")
    filled("pcl", {"queue_size": 9}, CIFAR)
    line = "pcl: num_prototypes=[976, 1951, 3903] from 50,000 training images"
    assert caplog.messages == [line]


OPEN = {"num_prototypes": None, "queue_size": None, "warmup_epochs": 0}


def test_a_run_records_them(make_config: MakeConfig, tmp_path: Path) -> None:
    """48 images in batches of 24; resumed with what was recorded."""
    prepared = prepare(make_config("pcl", method_kwargs=OPEN))
    run = pretrain(prepared, run_dir=tmp_path / "run", show_progress=False).run_dir
    recorded = json.loads((run / ARGS).read_text())["method_kwargs"]
    assert (recorded["num_prototypes"], recorded["queue_size"]) == ([2, 4], 24)
    assert resume(run).epochs == 1


def test_a_part_of_the_images(make_config: MakeConfig) -> None:
    """What is trained on counts, and no other image."""
    for changes, count in (({"fraction": 0.5}, 24), ({"holdout": 0.25}, 36)):
        config = make_config("pcl", method_kwargs=OPEN, data=changes, optimizer={"batch_size": 2})
        prepared = prepare(config)
        assert len(prepared.train) == count
        kwargs: Any = prepared.run.method_kwargs
        assert kwargs.queue_size == {24: 2, 36: 4}[count]


def data(path: Path, **changes: Any) -> dict[str, Any]:
    """The section as solo-learn's own script completes it."""
    section = {"dataset": "custom", "train_path": str(path), "val_path": None}
    return section | {"format": "image_folder", "no_labels": False, "fraction": -1} | changes


def test_images_of_solo_learn_s_own_script(images: Path, tmp_path: Path) -> None:
    """Its methods are made before its data sets; counted as it will find them."""
    assert num_training_images(data(images)) == 48
    assert num_training_images(data(images, format="dali")) == 48
    assert num_training_images(data(images, fraction=0.25)) == 12
    assert num_training_images(data(images / "0", no_labels=True)) == 16
    # It reads neither.
    assert num_training_images(data(images, holdout=0.5, unreadable="skip")) == 48
    strange = Path(shutil.copytree(images, tmp_path / "strange"))
    (strange / "notes.txt").write_text("no class")
    (strange / "0" / "notes.txt").write_text("no image")
    assert num_training_images(data(strange)) == 48
    for name, size in (("cifar10", 50_000), ("cifar100", 50_000), ("stl10", 105_000)):
        # Not there yet: the script downloads them.
        assert num_training_images(data(tmp_path / "none", dataset=name)) == size


def test_images_of_an_hdf5_file(images: Path, tmp_path: Path) -> None:
    file = packed(images, tmp_path / "train.h5")
    assert num_training_images(data(file, format="h5", dataset="imagenet")) == 48


SYNONYMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # method, keys of a built-in, what they are here
    ("protocpc", {"temperature": 0.3, "sk_epsilon": 0.05}, {"student_temperature": 0.3}),
    ("protocpc", {"sk_epsilon": 0.05, "sk_iters": 5}, {"teacher_temperature": 0.05}),
    ("protocpc", {"freeze_last_layer": 2}, {"freeze_prototypes_epochs": 2}),
    ("protocpc", {"use_bn_in_head": False}, {"proj_batch_norm": False}),
    ("protoseed", {"sk_iters": 5}, {"sinkhorn_iterations": 5}),
    ("seed", {"temperature_q": 0.1, "temperature_k": 0.04}, {"teacher_temperature": 0.04}),
    ("metric", {"loss": "x", "temperature": 0.1}, {"loss_kwargs": {"temperature": 0.1}}),
]


@pytest.mark.parametrize(("method", "given", "expected"), SYNONYMS, ids=str)
def test_keys_of_built_ins(method: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    kwargs = check_method_kwargs(METHODS[method].target.kwargs_type, given)
    assert {key: getattr(kwargs, key) for key in expected} == expected


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("protocpc", {"temperature": 0.3, "student_temperature": 0.1}, "temperature=0.3: here it is "),
    ("seed", {"temperature": 0.3, "temperature_q": 0.1}, "temperature_q=0.1: here it is "),
    ("metric", {"loss": "x", "loss_kwargs": 3, "temperature": 0.1}, "loss_kwargs=3: not a valid"),
    ("protocpc", {"queue_size": 3840}, "queue_size=3840: unknown key"),
    ("seed", {"proj_output_dim": 256}, "unknown key; did you mean 'proj_hidden_dim'"),
    ("pcl", {"pred_hidden_dim": 512}, "unknown key; did you mean 'proj_hidden_dim'"),
]


@pytest.mark.parametrize(("method", "given", "message"), REFUSED, ids=str)
def test_keys_that_mean_nothing_or_two_things(
    method: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^method_kwargs.*{message}"):
        check_method_kwargs(METHODS[method].target.kwargs_type, given)
