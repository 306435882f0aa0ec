"""Settings of ``pcl``: defaults, what `auto` decides, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import Prepared, prepare
from solo_ext.memory.clusters import ClusterPrototypes
from solo_ext.methods import PCL
from solo_ext.methods.e_step import EStep
from solo_ext.methods.pcl import KEY, PCLKwargs

MakeConfig = Callable[..., dict[str, Any]]


def made(make_config: MakeConfig, **kwargs: Any) -> Prepared:
    return prepare(make_config("pcl", method_kwargs=kwargs))


def test_defaults_are_those_of_the_official_code() -> None:
    given = prepare_kwargs({})
    assert given.pop("kmeans") == {
        "backend": "auto",
        "iterations": 20,
        "warm_iterations": 5,
        "restarts": 1,
    }
    assert given == {
        "head": "v2",
        "proj_hidden_dim": None,
        "proj_output_dim": 128,
        "temperature": 0.2,
        "queue_size": None,
        "num_prototypes": None,
        "proto_weight": 1.0,
        "warmup_epochs": 20,
        "alpha": 10.0,
        "e_step": "exact",
        "e_step_every": 1,
        "e_step_sample": None,
        "e_step_features": "memory",
        "e_step_dir": None,
        "num_negatives": None,
        "collisions": "auto",
        "symmetric": False,
        "compute_dtype": "float32",
    }


def prepare_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    return check_method_kwargs(PCLKwargs, given).model_dump()


@pytest.mark.parametrize(
    ("batch", "coarsest", "expected"), [(256, 25000, "paper"), (256, 250, "merge")]
)
def test_collisions_follow_k_and_the_batch(
    make_config: MakeConfig, batch: int, coarsest: int, expected: str
) -> None:
    cfg = made(make_config).cfg
    cfg.method_kwargs.num_prototypes = [coarsest, 100000]
    cfg.method_kwargs.collisions = "auto"
    cfg.optimizer.batch_size = batch
    assert PCL.add_and_assert_specific_cfg(cfg).method_kwargs.collisions == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more prototypes than images": (
        {"method_kwargs": {"num_prototypes": [3, 49]}},
        r"num_prototypes=\[3, 49\]: the training set has 48 images",
    ),
    "too many negatives": (
        {"method_kwargs": {"num_prototypes": [30], "num_negatives": 7}},
        "num_negatives=7: of 30 prototypes up to 24 are positives of the batch; .*up to 6",
    ),
    "misspelt k-means key": (
        {"method_kwargs": {"kmeans": {"bakcend": "torch"}}},
        "kmeans.bakcend.*did you mean 'backend'",
    ),
    "a sample below K": (
        {"method_kwargs": {"num_prototypes": [3, 30], "e_step_sample": 29}},
        "method_kwargs.e_step_sample=29: k-means cannot find 30 prototypes.*numbers from 30 on",
    ),
    "a bank on disk": (
        {"method_kwargs": {"e_step_features": "disk", "e_step": "bank"}},
        "e_step_features='disk': with method_kwargs.e_step=bank.*take memory, or e_step=exact",
    ),
    "all rows on disk and in faiss": (
        {"method_kwargs": {"e_step_features": "disk", "kmeans": {"backend": "faiss"}}},
        "method_kwargs.kmeans.backend='faiss': holds all rows in memory.*take auto or torch",
    ),
    "momentum classifier that sees half": (
        {"momentum": {"classifier": True}},
        "momentum.classifier=true.*symmetric",
    ),
    "small crops": (
        {"augmentations": [{"crop_size": 16, "num_crops": 2}, {"crop_size": 8, "num_crops": 2}]},
        "2 large and 2 small crops",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(make_config: MakeConfig, case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        prepare(make_config("pcl", **changes))


def test_data_without_indices_is_refused(make_config: MakeConfig) -> None:
    """As solo-learn's own script would hand DALI's batches over."""
    cfg = made(make_config).cfg
    cfg.data.format = "dali"
    cfg.dali = {"device": "gpu", "encode_indexes_into_labels": False}
    with pytest.raises(ConfigError, match=r"encode_indexes_into_labels=false.*sample index"):
        PCL(cfg)
    cfg.dali.encode_indexes_into_labels = True
    PCL(cfg)


def test_backend_that_is_gone(make_config: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Where the config names none, another takes over and says so; what it names is obeyed."""
    settings, cpu = made(make_config).cfg.method_kwargs, torch.device("cpu")
    prototypes = ClusterPrototypes([3], 8)
    e_step = EStep(settings, KEY, prototypes, None)
    prototypes.backend = "flash"
    assert e_step.kept_backend(cpu) == "torch"
    (message,) = caplog.messages
    assert message.startswith("k-means backend of this run, 'flash': needs features on CUDA")
    settings.kmeans.backend = "torch"
    assert e_step.kept_backend(cpu) == "torch"
    settings.kmeans.backend = "flash"
    prototypes.backend = "torch"
    with pytest.raises(ConfigError, match=r"method_kwargs\.kmeans\.backend='flash'"):
        e_step.kept_backend(cpu)


@pytest.mark.parametrize("name", [n for n in shipped_configs() if "/pcl" in n])
def test_shipped_configs_name_what_there_is(name: str) -> None:
    given = compose(name)
    assert prepare_kwargs(given["method_kwargs"])["queue_size"] >= given["optimizer"]["batch_size"]
    datasets = {n.partition("/")[0] for n in shipped_configs() if n.endswith("/pcl")}
    assert datasets >= {"digits", "cifar10", "cifar100", "imagenette", "imagenet100", "imagenet"}
