"""The demo, on the real digits, with a budget of one epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from solo_ext.demo.run import COMPARED, run_demo
from solo_ext.errors import UserError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOLO_EXT_DATA", str(out / "data"))
        return out, run_demo(out / "out", epochs=1, quiet=True)


def test_compares_methods_and_baselines(demo: tuple[Path, dict[str, object]]) -> None:
    out, record = demo
    rows = {r["label"]: r for r in record["rows"]}  # type: ignore[attr-defined]
    assert set(rows) == {*COMPARED, "random backbone", "raw pixels"}
    assert rows["debiased"]["kind"] == "plugin"
    assert rows["simclr"]["kind"] == "host"
    for row in rows.values():
        assert 10 < row["few_label_mean"] <= 100
        assert 10 < row["linear"] <= 100
    # One epoch is enough to leave a random backbone behind.
    assert rows["debiased"]["few_label_mean"] > rows["random backbone"]["few_label_mean"]
    page = (out / "out" / "report.html").read_text()
    assert all(label in page for label in rows)


def test_a_second_call_uses_the_finished_runs(
    demo: tuple[Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, record = demo
    monkeypatch.setenv("SOLO_EXT_DATA", str(out / "data"))
    again = run_demo(out / "out", epochs=1, quiet=True)
    assert again["rows"] == record["rows"]


def test_another_budget_needs_another_folder(
    demo: tuple[Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = demo
    monkeypatch.setenv("SOLO_EXT_DATA", str(out / "data"))
    with pytest.raises(UserError, match="of another run"):
        run_demo(out / "out", epochs=2, quiet=True)
