"""Published numbers: complete, and selected by exactly what the settings say."""

from __future__ import annotations

import pytest

from solo_ext.core.errors import ConfigError
from solo_ext.lab.experiments.settings import Reported
from solo_ext.lab.experiments.tables import published, selected

DATASETS = {
    "CIFAR-10",
    "CIFAR-100",
    "STL-10",
    "Imagenette-160 (128px)",
    "Imagenette (224px)",
    "ImageNet-100",
    "ImageNet-1k",
}


def test_every_number_has_a_source_and_a_protocol() -> None:
    assert {number.dataset for number in published()} == DATASETS
    for number in published():
        assert all((number.library, number.method, number.backbone, number.source)), number
        assert number.protocol, number
        scores = [number.knn_top1, number.linear_top1, number.finetune_top1]
        assert any(scores), number
        assert all(0 < float(s) < 100 for s in scores if s), number
        assert "@" in number.source, number


def test_names_in_the_registry_are_registry_names() -> None:
    names = {number.registered for number in published()} - {""}
    assert {"simclr", "barlow_twins", "mocov2plus", "wmse", "pcl", "debiased"} <= names
    assert all(name == name.lower() and " " not in name for name in names)
    by_name = {(n.library, n.method): n.registered for n in published()}
    assert by_name["solo-learn", "Barlow Twins"] == "barlow_twins"
    # Decoupled and MoCo v2 are other methods than debiased and MoCo v2+.
    assert by_name["lightly", "DCL"] == by_name["mmselfsup", "MoCo v2"] == ""


def test_selection_is_exact() -> None:
    found = selected(Reported(dataset="CIFAR-10", backbone="ResNet18", epochs=1000))
    assert len(found) == 16
    assert {(n.dataset, n.backbone, n.epochs) for n in found} == {("CIFAR-10", "ResNet18", "1000")}
    (simclr,) = (n for n in found if n.registered == "simclr")
    assert (simclr.linear_top1, simclr.library) == ("90.74", "solo-learn")
    assert len(selected(Reported(dataset="CIFAR-10"))) > len(found)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (Reported(dataset="CIFAR10"), r"x.dataset='CIFAR10'.*did you mean 'CIFAR-10'"),
        (Reported(dataset="CIFAR-10", backbone="ResNet50"), r"x.backbone='ResNet50'.*'ResNet18'"),
        (Reported(dataset="CIFAR-10", epochs=7), r"x.epochs=7.*allowed: 1000"),
    ],
)
def test_selecting_nothing_is_an_error(wanted: Reported, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        selected(wanted, "x")
