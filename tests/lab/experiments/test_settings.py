"""Reading a benchmark, and what is refused of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.lab.experiments.settings import checked_benchmark, read_benchmark, suite_settings


def test_overrides(tiny_file: Path) -> None:
    settings = read_benchmark(str(tiny_file), ["seeds=[7]", "rows.simclr.changes=['seed=3']"])
    assert settings.seeds == [7]
    assert settings.rows["simclr"].changes == ["seed=3"]


def claim(**change: str) -> dict[str, Any]:
    given = {"claim": "x", "source": "y", "row": "debiased", "base": "simclr", "measure": "knn"}
    return {"hypotheses": {"h": given | change}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sedes": [1]}, "did you mean 'seeds'"),
        ({"rows": {"a": {"config": "simclr", "baseline": "raw-pixels"}}}, "rows.a"),
        ({"rows": {"a": {}}}, "a config or a baseline"),
        ({"rows": {"a": {"config": "simclr", "bases": ["b"]}}}, "rows.a.bases='b': no such row"),
        ({"teacher": "techer"}, "teacher='techer': no such row"),
        ({"evaluation": {"knm": None}}, "knm"),
        (claim(row="pcl"), "hypotheses.h.row='pcl': no such row"),
        (claim(base="bb"), "hypotheses.h.base='bb'"),
        (claim(base="debiased"), "hypotheses.h.base='debiased': is the row"),
        (claim(measure="acc"), "hypotheses.h.measure='acc'"),
        ({"headline": ["lnear"]}, "headline='lnear': no protocol"),
    ],
)
def test_mistakes(tiny: dict[str, Any], change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_benchmark(tiny | change)
    assert says in str(caught.value)


def test_no_such_benchmark() -> None:
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        read_benchmark("digit")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n"])
def test_no_benchmark_in_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        read_benchmark(str(file))


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
