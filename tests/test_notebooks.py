"""The documentation's notebooks hold what a whole run showed, and they run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.notebooks import NOTEBOOKS, run
from tests.digits import few_digits

pytestmark = pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])


def test_holds_what_a_whole_run_showed(file: Path) -> None:
    """The site is built from it without torch; pictures stay small, because git keeps them all."""
    cells = [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert shown <= {"stream", "display_data", "execute_result"}
    assert file.stat().st_size < 300_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seventh of the digits, on which every cell does what it does on all."""
    return few_digits(tmp_path_factory.mktemp("data"), train=20, val=6)


@pytest.mark.slow
def test_runs(file: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel has the environment of this process.
    monkeypatch.setenv("SOLO_EXT_DATA", str(data))
    run(file, tmp_path, quick=True)
    assert not list(tmp_path.glob("datasets*")), "all were read from the few"
