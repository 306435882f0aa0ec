"""Reading a benchmark, and what is refused of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from solo_ext.core.errors import UserError
from solo_ext.lab.experiments.settings import checked_benchmark, read_benchmark, suite_settings


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
