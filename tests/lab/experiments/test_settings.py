"""Reading a benchmark, and what is refused of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.experiments.settings import checked_benchmark, read_benchmark, suite_settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "not a mapping"),
        ("a: [1\n", "expected ',' or ']'"),
        ("title: a\ntitle: b\n", "duplicate key title .* line 2"),
    ],
)
def test_no_benchmark_in_a_file(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"mine\.yaml.*{says}"):
        read_benchmark(str(file))


def test_two_rows_that_are_the_same_run(tiny: dict[str, Any]) -> None:
    """Also if only one of them is asked for: each would take the other's record."""
    tiny["rows"]["again"] = {**tiny["rows"]["simclr"], "label": "again"}
    with pytest.raises(ConfigError, match=r"^rows=\['simclr', 'again'\]: are the same run; leave"):
        checked_benchmark(tiny)
    assert checked_benchmark(tiny | {"teacher": "again"})


def test_paths_of_this_machine_are_resolved_late(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "${oc.env:SOLO_EXT_TEST_PLACE}/train"
    of = {"datasets": {"other": {"train_path": path, "val_path": path}}}
    tiny["evaluation"] = {"transfer": of}
    with pytest.raises(UserError, match="SOLO_EXT_TEST_PLACE"):
        checked_benchmark(tiny)
    monkeypatch.setenv("SOLO_EXT_TEST_PLACE", "/here")
    settings = checked_benchmark(tiny)
    assert settings.evaluation["transfer"] == of
    given = suite_settings(settings.evaluation)
    assert given["transfer"]["datasets"]["other"]["train_path"] == "/here/train"


def test_settings_survive_a_file(tiny: dict[str, Any]) -> None:
    settings = checked_benchmark(tiny)
    text = yaml.safe_dump(settings.model_dump(exclude_defaults=True))
    assert checked_benchmark(yaml.safe_load(text)) == settings


def test_a_power_of_ten_is_a_number(tiny: dict[str, Any], tmp_path: Path) -> None:
    """As in the config of a run, though YAML 1.1 has text for it."""
    space = "{optimizer.lr: {low: 1e-3, high: 1}, optimizer.weight_decay: {choices: [1e-5, 0]}}"
    file = tmp_path / "mine.yaml"
    tuning = f"tuning: {{trials: 2, measure: knn, space: {space}}}"
    file.write_text(f"{yaml.safe_dump({**tiny, 'hypotheses': {}})}\n{tuning}\n")
    tuning_read = read_benchmark(str(file)).tuning
    assert tuning_read is not None
    assert tuning_read.space["optimizer.lr"].low == 0.001
    assert tuning_read.space["optimizer.weight_decay"].choices == [1e-5, 0]


def test_a_score_has_the_name_that_records_give_it(tiny: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"headline='knn_acc1': records leave acc1 out.*write knn"
    ):
        checked_benchmark({**tiny, "headline": ["knn_acc1"]})
