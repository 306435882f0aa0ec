"""The shipped digits configs run on whichever host is installed: pretrain, resume, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from solo_ext.config.compose import compose, shipped_configs
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain, resume
from solo_ext.lab.training.run_dir import checkpoints
from tests.matrix.rows import BUILTIN

SMALLER = (
    "max_epochs=2",
    "data.fraction=0.25",
    "optimizer.batch_size=50",
    "backbone.kwargs.channels=[8,8,8,8]",
    "backbone.kwargs.stem_width=8",
    "checkpoint.keep_prev=true",
    "accelerator=cpu",
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digits")


def teachers(digits: Path) -> Path:
    """The folder in which the shipped configs look for their teachers, with that of digits."""
    folder = digits / "teachers"
    if not folder.exists():
        prepared = prepare(compose("digits/teacher", (*SMALLER, "max_epochs=1")))
        pretrain(prepared, run_dir=folder / "digits", show_progress=False)
    return folder


RESUMED = ("digits/pcl", "digits/protoseed")
"""One with E-steps, and one with a teacher; ``test_resume.py`` resumes every method."""


def _marks(name: str) -> Any:
    """Configs of built-ins are run whole in the matrix; CI counts and resumes their steps."""
    return pytest.mark.matrix if name.removeprefix("digits/") in BUILTIN else pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        n if n == "digits/pcl" else pytest.param(n, marks=_marks(n))
        for n in shipped_configs()
        if n.startswith("digits/")
    ],
)
def test_pretrain_resume_evaluate(
    name: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOLO_EXT_DATA", str(digits))
    if "seed" in name:
        monkeypatch.setenv("SOLO_EXT_TEACHERS", str(teachers(digits)))
    prepared = prepare(compose(name, SMALLER))
    whole = pretrain(prepared, run_dir=tmp_path / "run", show_progress=False)
    assert whole.epochs == 2
    if name in RESUMED:
        first, last = checkpoints(whole.run_dir)
        last.path.unlink()
        again = resume(whole.run_dir)
        assert again.checkpoint == last.path
        assert first.path.exists()
    record = evaluate(whole.run_dir, "knn")
    assert record["epoch"] == 2
    assert record["train"]["images"] == 350
    # Ten classes, chance is 10; fourteen steps of a tiny network are hardly more.
    assert max(r["acc1"] for r in record["results"]) > 13
