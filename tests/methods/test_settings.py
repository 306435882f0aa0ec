"""Settings of the contrastive methods and of PCL: defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from solo_ext.config.check import check_method_kwargs
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare
from solo_ext.methods import METHODS, PCL, HardNegative, Metric, MoCHi
from solo_ext.methods.contrastive import Preset
from solo_ext.methods.contrastive_kwargs import ContrastiveKwargs
from solo_ext.methods.negatives import MixingKwargs, MixingSampler

MakeConfig = Callable[..., dict[str, Any]]
CONTRASTIVE = Preset(ContrastiveKwargs)
Build = Callable[..., Any]
PRESETS = ("debiased", "hard_negative", "mochi", "nnclr_symmetric")
PUBLISHED: dict[str, dict[str, Any]] = {
    "debiased": {"temperature": 0.5, "tau_plus": 0.1, "proj_hidden_dim": 512},
    "hard_negative": {"temperature": 0.5, "tau_plus": 0.1, "beta": 1.0, "proj_hidden_dim": 512},
    "mochi": {"negatives": "queue", "proj_batch_norm": False},
    "nnclr_symmetric": {
        "temperature": 0.1,
        "proj_output_dim": 256,
        "proj_layers": 3,
        "proj_last_batch_norm": True,
        "pred_hidden_dim": 4096,
        "positives": "nearest_neighbor",
    },
}


def filled(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return check_method_kwargs(METHODS[name].target.kwargs_type, given).model_dump()


def test_pcl_s_defaults_are_those_of_the_official_code() -> None:
    given = filled("pcl", {})
    expected = {
        **{"head": "v2", "proj_output_dim": 128, "temperature": 0.2, "alpha": 10.0},
        **{"proto_weight": 1.0, "warmup_epochs": 20, "e_step": "exact", "e_step_every": 1},
        **{"collisions": "paper", "symmetric": False, "compute_dtype": "auto"},
        "kmeans": {"backend": "auto", "iterations": 20, "warm_iterations": 5, "restarts": 1},
    }
    assert {key: value for key, value in given.items() if value is not None} == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_shared_settings_with_other_defaults(name: str) -> None:
    shared = check_method_kwargs(ContrastiveKwargs, {}).model_dump()
    preset = filled(name, {})
    other = {key: value for key, value in preset.items() if value != shared[key]}
    if name == "mochi":
        mixing = other.pop("mixing")
        assert mixing == {
            "num_hard": None,
            "num_pair_mixes": 1024,
            "num_query_mixes": 128,
            "warmup_epochs": 10,
        }
    expected = {k: v for k, v in PUBLISHED[name].items() if v != shared[k]}
    assert other == expected
    assert preset.keys() == shared.keys()
    assert shared["mixing"]["num_pair_mixes"] == shared["mixing"]["num_query_mixes"] == 0


def test_a_part_of_a_section_keeps_the_preset_s_rest(make_config: MakeConfig) -> None:
    assert filled("mochi", {"mixing": {"num_hard": 5}})["mixing"] == {
        "num_hard": 5,
        "num_pair_mixes": 1024,
        "num_query_mixes": 128,
        "warmup_epochs": 10,
    }
    config = make_config("mochi", method_kwargs={"mixing": {"num_hard": 5, "warmup_epochs": 0}})
    cfg = prepare(config).cfg
    assert cfg.method_kwargs.mixing.num_pair_mixes == 1024
    # And again from the constructor, as solo-learn's own script calls it.
    assert MoCHi(cfg).cfg.method_kwargs.mixing.num_query_mixes == 128
    clusters = {"clusters": {"kmeans": {"iterations": 3}}}
    assert filled("debiased", clusters)["clusters"]["kmeans"]["warm_iterations"] == 5
    assert filled("debiased", clusters)["clusters"]["num_prototypes"] is None


QUEUE = {"negatives": "queue", "queue_size": 9}
NEAR = {"positives": "nearest_neighbor"}
CLUSTERS: dict[str, Any] = {"clusters": {"num_prototypes": [3], "warmup_epochs": 0}}
TRIPLET = {"loss": "triplet_loss_func"}
PROTOTYPES = {"positives": "prototype", "clusters": {"num_prototypes": [3]}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"pred_hidden_dim": 4},
        "pred_hidden_dim",
        "=4: views that are anchor, positive and negative at once .* take 0",
    ),
    (
        {**PROTOTYPES, "pred_hidden_dim": 4},
        "pred_hidden_dim",
        "=4: views that are anchor.*prototypes with clusters.warmup_epochs=0",
    ),
    (
        {"queue_size": 9},
        "queue_size",
        "=9: negatives=batch has no queue; remove it, or take method_kwargs.negatives=queue",
    ),
    ({"exclude_own": True}, "exclude_own", "=true: negatives=batch has no queue"),
    (
        {**QUEUE, "exclude_own": True, "mixing": {"num_hard": 5, "num_pair_mixes": 1}},
        "mixing.num_hard",
        "=5: the queue has 9 rows; allowed: up to 4",
    ),
    (
        {**NEAR, **QUEUE, "mixing": {"num_hard": 5, "num_pair_mixes": 1}},
        "mixing.num_hard",
        "=5: the queue has 9 rows; allowed: up to 4",
    ),
    ({**PROTOTYPES, "queue_size": 9}, "queue_size", "has no queue"),
    (
        {**NEAR, "queue_size": 9, "support_set": {"size": 8}},
        "queue_size",
        "=9: negatives=batch has no queue, and support_set.size is 8",
    ),
    (
        {"compute_dtype": "bfloat16"},
        "compute_dtype",
        "='bfloat16': it is for products with a queue that is not mixed; take float32",
    ),
    ({"batch_norm_splits": 2}, "batch_norm_splits", "=2: negatives=batch"),
    (
        {"negatives": "queue", "queue_size": 9, "batch_norm_splits": 1001},
        "batch_norm_splits",
        "=1001: negatives=queue, batch_size=",
    ),
    (
        {**NEAR, "support_set": {"size": 3, "top_k": 4}},
        "support_set.top_k",
        "=4: the support set has 3 rows",
    ),
    (
        {**PROTOTYPES, "clusters": {"num_prototypes": [3], "kmeans": {"backend": "flash"}}},
        "clusters.kmeans.backend",
        "='flash': needs CUDA",
    ),
    ({"positives": "neighbour"}, "positives", "='neighbour': not a valid choice.*nearest_neighbor"),
    (
        {"clusters": {"kmeans": {"bakcend": "torch"}}},
        "clusters.kmeans.bakcend",
        "did you mean 'backend'",
    ),
    ({"temperature": 0.0}, "temperature", "greater than 0"),
    (
        {**PROTOTYPES, "clusters": {"num_prototypes": []}},
        "clusters.num_prototypes",
        "at least 1 item",
    ),
]


@pytest.mark.parametrize(("given", "key", "message"), REFUSED, ids=str)
def test_refused(
    make_config: MakeConfig, build: Build, given: dict[str, Any], key: str, message: str
) -> None:
    """Before a run starts, and by the constructor that solo-learn's own script calls."""
    with pytest.raises(ConfigError, match=rf"method_kwargs\.{key}.*{message}") as caught:
        prepare(make_config("hard_negative", method_kwargs=given))
    assert caught.value.key == f"method_kwargs.{key}"
    with pytest.raises(ConfigError, match=message):
        build(**given)


REFUSED_AT_START: list[tuple[str, dict[str, Any], str]] = [
    (
        "hard_negative",
        {"method_kwargs": {"positives": "prototype", "clusters": {"num_prototypes": [3, 49]}}},
        r"clusters\.num_prototypes=\[3, 49\]: the training set has 48 images",
    ),
    (
        "metric",
        {"method_kwargs": {**TRIPLET, "temperature": 0.2}},
        r"'temperature': 0\.2.*triplet_loss_func takes ",
    ),
    (
        "pcl",
        {"method_kwargs": {"num_prototypes": [3, 49]}},
        r"num_prototypes=\[3, 49\]: the training set has 48 images",
    ),
    (
        "pcl",
        {"method_kwargs": {"num_prototypes": [30], "num_negatives": 7}},
        "num_negatives=7: of 30 prototypes up to 24 are positives of the batch; .*up to 6",
    ),
    (
        "pcl",
        {"method_kwargs": {"num_prototypes": [3, 30], "e_step_sample": 29}},
        "method_kwargs.e_step_sample=29: k-means cannot find 30 prototypes.*numbers from 30 on",
    ),
    (
        "pcl",
        {"method_kwargs": {"features_dir": "there", "e_step": "bank"}},
        "method_kwargs.features_dir='there': the bank lies on the device.*e_step=exact",
    ),
    # Half of the images are keys alone.
    ("pcl", {"momentum": {"classifier": True}}, "momentum.classifier=true.*symmetric"),
    (
        "pcl",
        {"augmentations": [{"crop_size": 16, "num_crops": 2}, {"crop_size": 8, "num_crops": 2}]},
        "2 large and 2 small crops",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED_AT_START)
def test_refused_before_a_run_starts(
    make_config: MakeConfig, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(name, **changes))


ALLOWED: list[dict[str, Any]] = [
    {**QUEUE, "pred_hidden_dim": 4},
    {**PROTOTYPES, **CLUSTERS, "pred_hidden_dim": 4},
    # The size of a support set under nnclr's name.
    {**NEAR, "queue_size": 9, "support_set": {"size": 9}},
    {**NEAR, **QUEUE, "support_set": {"size": 8}},
    {**NEAR, "support_set": {"size": 3, "top_k": 3}},
]


@pytest.mark.parametrize("given", ALLOWED, ids=str)
def test_allowed(make_config: MakeConfig, given: dict[str, Any]) -> None:
    prepare(make_config("hard_negative", method_kwargs=given))


@pytest.mark.parametrize(
    ("kind", "kwargs", "purpose"),
    [
        (CONTRASTIVE, {**NEAR, "support_set": {"exclude_own": True}}, "earlier embedding"),
        (CONTRASTIVE, {**QUEUE, "exclude_own": True}, "earlier keys"),
        (CONTRASTIVE, {**NEAR, **QUEUE}, "neighbours' keys"),
        (CONTRASTIVE, PROTOTYPES, "clusters"),
        (CONTRASTIVE, NEAR, ""),
        (CONTRASTIVE, {}, ""),
        (CONTRASTIVE, {"support_set": {"exclude_own": True}}, ""),
        (Metric, {"loss": "soft_nearest_neighbor_loss_func"}, "tells images apart"),
        (Metric, {**TRIPLET, "classes": "cluster", **CLUSTERS}, "looks clusters up"),
        (Metric, {"loss": "arcface_loss_func", "classes": "label"}, ""),
        (Metric, {"loss": "nt_xent_loss_func"}, ""),
        (PCL, {"num_prototypes": [3], "queue_size": 8}, "looks clusters up"),
        (PCL, {"num_prototypes": [3], "queue_size": 8, "proto_weight": 0.0}, ""),
    ],
    ids=str,
)
def test_data_without_indices(
    build: Build, kind: Any, kwargs: dict[str, Any], purpose: str
) -> None:
    """As solo-learn's own script hands DALI's batches over; refused where they are needed."""
    cfg = build(kind, **kwargs).cfg
    cfg.data.format = "dali"
    cfg.dali = {"device": "gpu", "encode_indexes_into_labels": False}
    if purpose:
        with pytest.raises(ConfigError, match=f"encode_indexes_into_labels=false.*{purpose}"):
            kind(cfg)
        cfg.dali.encode_indexes_into_labels = True
    kind(cfg)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("large", "small"), [(1, 0), (3, 0), (1, 1), (3, 6), (0, 2)])
def test_two_large_crops(build: Build, name: str, large: int, small: int) -> None:
    kind = METHODS[name].target
    with pytest.raises(ConfigError, match=f"{large} large and {small} small.*num_crops: 2"):
        build(kind, small=small, data={"num_large_crops": large})


def test_momentum_section_follows_the_negatives(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Left out, with a line, where nothing would read it; filled in where something does."""
    section = {"momentum": {"base_tau": 0.9}}
    for name in ("hard_negative", "debiased", "nnclr_symmetric"):
        assert prepare(make_config(name, **section)).run.momentum is None
        assert f"momentum: {name} has no momentum backbone to read it" in caplog.text
        assert prepare(make_config(name)).run.momentum is None
        queue = {"negatives": "queue", "queue_size": 9}
        prepared = prepare(make_config(name, method_kwargs=queue, **section))
        assert prepared.cfg.momentum.base_tau == 0.9
    momentum = prepare(make_config("mochi")).run.momentum
    assert momentum is not None
    assert momentum.base_tau == 0.99
    batch = {"negatives": "batch", "queue_size": None}
    assert prepare(make_config("mochi", method_kwargs=batch, **section)).run.momentum is None


def test_momentum_classifier(make_config: MakeConfig) -> None:
    config = make_config("mochi", momentum={"classifier": True})
    method = MoCHi(prepare(config).cfg)
    assert method.momentum_classifier is not None
    assert "momentum_classifier" in [group["name"] for group in method.learnable_params]
    assert HardNegative.uses_momentum(OmegaConf.create(QUEUE))
    assert not HardNegative.uses_momentum(OmegaConf.create({"negatives": "batch"}))


@pytest.mark.slow
@pytest.mark.parametrize("method", [*PRESETS, "metric", "pcl"])
def test_shipped_configs_hold_a_batch_in_their_queues(method: str) -> None:
    names = [name for name in shipped_configs() if name.rpartition("/")[2] == method]
    more = "imagenet" if method == "pcl" else "stl10"
    assert {n.partition("/")[0] for n in names} >= {"digits", "cifar10", "cifar100", more}
    for given in map(compose, names):
        kwargs = filled(given["method"], given["method_kwargs"])
        queued = method == "pcl" or kwargs.get("negatives") == "queue"
        # A size that is left open follows from the images.
        if queued and kwargs["queue_size"] is not None:
            assert kwargs["queue_size"] >= given["optimizer"]["batch_size"], given["name"]


def test_mixing_that_never_begins_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    mixing = MixingSampler(MixingKwargs(num_pair_mixes=4, warmup_epochs=1))
    mixing.warn_of_late_start(OmegaConf.create({"max_epochs": 2}))
    assert caplog.messages == []
    mixing.warn_of_late_start(OmegaConf.create({"max_epochs": 1}))
    assert "mixing.warmup_epochs=1 of max_epochs=1: no negatives will ever be mixed" in caplog.text
