"""What built-in methods would only find out while they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from solo_ext import host
from solo_ext.core.errors import ConfigError
from solo_ext.lab.training.prepare import prepare

CROPS = [
    {"crop_size": 16, "num_crops": 2, "rrc": {"enabled": True}},
    {"crop_size": 12, "num_crops": 2, "rrc": {"enabled": True}},
]


@pytest.mark.parametrize(
    ("method", "taken"),
    [
        ("simclr", True),
        ("nnclr", host.detect().generation == "main"),
        ("debiased", True),
        ("pcl", False),
    ],
)
def test_small_crops(method: str, taken: bool, make_config: Callable[..., dict[str, Any]]) -> None:
    config = {**make_config(method), "augmentations": CROPS}
    if taken:
        assert prepare(config).cfg.data.num_small_crops == 2
    else:
        with pytest.raises(ConfigError, match=r"augmentations.*small crops"):
            prepare(config)


def test_a_queue_is_a_multiple_of_the_batch(
    make_config: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare(make_config("nnclr", method_kwargs={"queue_size": 50}))
    assert prepared.given["method_kwargs"]["queue_size"] == 48
    assert prepared.cfg.method_kwargs.queue_size == 48
    assert "method_kwargs.queue_size: 48 instead of 50" in caplog.text
