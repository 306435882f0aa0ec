"""A benchmark of seconds: two methods and the baselines on a fifth of the digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.lab.experiments.work import work
from tests.digits import few_digits

TINY: dict[str, Any] = {
    "title": "tiny",
    "datasets": {
        "digits": [
            "accelerator=cpu",
            "backbone.kwargs.channels=[8,8,8,8]",
            "backbone.kwargs.stem_width=8",
            "data.fraction=0.2",
            "data.augmentation=batch",
            "optimizer.batch_size=64",
            "online_eval.every_n_epochs=2",
            "max_epochs=3",
        ]
    },
    "seeds": [1, 2],
    "rows": {
        "simclr": {"config": "simclr"},
        "debiased": {"config": "debiased", "bases": ["simclr"]},
        "random-backbone": {"baseline": "random-backbone"},
        "raw-pixels": {"baseline": "raw-pixels"},
    },
    "evaluation": {"knn": {"k": [5], "temperature": [0.07]}},
}


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``SOLO_EXT_DATA`` with all digits to train on and few to test on."""
    return few_digits(tmp_path_factory.mktemp("few"), train=140, val=6)


@pytest.fixture(scope="module", autouse=True)
def _few_digits(few: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOLO_EXT_DATA", str(few))
        yield


@pytest.fixture
def tiny() -> dict[str, Any]:
    """Settings as YAML has them, to be changed."""
    copied: dict[str, Any] = yaml.safe_load(yaml.safe_dump(TINY, sort_keys=False))
    return copied


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """The same in a file."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY, sort_keys=False))
    return file


def in_this_process(folders: Sequence[Path], tick: Callable[[], None]) -> dict[Path, str]:
    """A launcher that runs one after another, without the imports of a process each."""
    for folder in folders:
        work(folder)
    tick()
    return {}
