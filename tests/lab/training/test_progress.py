"""What is shown while a run trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.lab.training.progress import Bar, duration
from tests.conftest import MakeConfig


@pytest.mark.parametrize(
    ("method", "losses"),
    [
        ("pcl", ("info_nce_loss=", "proto_nce_loss=")),
        ("simclr", ("nce_loss=",)),
        pytest.param("byol", ("neg_cos_sim=",), marks=pytest.mark.slow),
        pytest.param("mochi", ("mochi_loss=",), marks=pytest.mark.slow),
    ],
)
def test_a_line_has_the_loss_that_is_trained(
    make_config: MakeConfig,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    losses: tuple[str, ...],
) -> None:
    config = make_config(method, max_epochs=2, log_every_n_steps=1)
    config["data"] |= {"no_labels": True}
    pretrain(prepare(config), run_dir=tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if "  epoch " in line]
    assert [line.split("  ")[1] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    for loss in (*losses, "spread=", " images/s", "data "):
        assert loss in lines[-1]
    assert "acc1" not in lines[0]
    assert "class_loss" not in lines[0]
    assert lines[0].endswith(" left")
    assert not lines[1].endswith(" left")


def test_the_classifier_is_shown_where_there_are_labels(
    make_config: MakeConfig, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("simclr", max_epochs=1, data={"val_path": str(images)})
    pretrain(prepare(config), run_dir=tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "  epoch " in line]
    for name in ("nce_loss=", "class_loss=", "acc1=", "val_acc1="):
        assert name in line
    assert "acc5" not in line


def test_the_bar_has_the_same_numbers(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, object]] = []
    get_metrics = Bar.get_metrics

    def noted(self: Bar, *given: object) -> dict[str, object]:
        shown.append(get_metrics(self, *given))  # type: ignore[arg-type]
        return shown[-1]

    monkeypatch.setattr(Bar, "get_metrics", noted)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    config = make_config("simclr", max_epochs=2, log_every_n_steps=1, enable_progress_bar=True)
    config["data"] |= {"no_labels": True}
    pretrain(prepare(config), run_dir=tmp_path / "run")
    assert {"nce_loss", "spread", "images/s", "data", "left"} <= shown[-1].keys()
    assert not {"acc1", "class_loss"} & shown[-1].keys()


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 99, 101, 3599, 3600, 86400 * 3 + 7200)] == [
        *("0 s", "99 s", "2 min", "1 h 0 min", "1 h 0 min", "3 d 2 h")
    ]
