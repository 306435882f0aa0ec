"""What is ours beside upstream/methods and fixes, on solo-learn's main with these patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from scipy import stats

from solo_ext.host import patches
from tests import forks
from tests.upstream import parity_run, ranks_run

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "upstream" / "methods").iterdir())
pytestmark = pytest.mark.upstream


def run(patched: Path, folder: Path, *words: object) -> None:
    """Runs a program with the patched tree and the plugin."""
    path = os.pathsep.join([str(patched), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "SOLO_LEARN_ROOT": str(patched)}
    subprocess.run([sys.executable, *map(str, words)], check=True, env=env, cwd=folder)


@pytest.fixture(scope="module")
def found(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What :mod:`parity_run` writes in the patched tree."""
    output = tmp_path_factory.mktemp("parity") / "found.json"
    run(patched, output.parent, parity_run.__file__, output)
    return json.loads(output.read_text())  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_two_processes_equal_one(patched: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    run(patched, patched, ranks_run.__file__, output)
    differs = json.loads(output.read_text())
    assert set(differs) == {"hard_negative", "nnclr", "protocpc", "prior", "pcl"}
    assert max(differs.values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", parity_run.CASES)
def test_upstream_s_form_equals_ours(found: dict[str, Any], case: str) -> None:
    differs = found["results"][case]
    assert differs.get("loss", 0.0) < 1e-6
    assert differs.get("gradient", 0.0) < 1e-5
    assert differs.get("state", 0.0) < 1e-5
    if case in parity_run.METHODS_CASES:
        assert differs["steps"] in (parity_run.STEPS, 2 * parity_run.STEPS)


@pytest.mark.slow
def test_the_host_s_methods_stay(found: dict[str, Any]) -> None:
    """Where the host has a method, ours is ``solo_ext/<name>``."""
    for name, (theirs, ours) in found["methods"].items():
        assert theirs == f"solo.methods.{name}"
        assert ours.startswith("solo_ext.methods")
    for name, module in found["losses"].items():
        assert module == f"solo.losses.{name}"


@pytest.mark.slow
def test_patches_of_ours_step_aside(found: dict[str, Any], tree: Path) -> None:
    """In the tree as it is all are applied, in the patched one none that has a fix there."""
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['applied']()))"
    # The path of the other tests on this tree, whose server of forks this one can have, too.
    env = {**os.environ, "PYTHONPATH": str(tree), "SOLO_LEARN_ROOT": str(tree)}
    done = forks.run("-c", code, parity_run.__file__, env=env)
    assert not done.returncode, done.stderr
    before: dict[str, tuple[bool, str]] = json.loads(done.stdout)
    after: dict[str, tuple[bool, str]] = found["patches"]
    assert not [name for name, (_, error) in (*before.items(), *after.items()) if error]
    fixed = {patch.name for patch in patches.PATCHES.values() if patch.fix}
    needed = {name for name, (is_applied, _) in before.items() if is_applied}
    assert fixed <= needed
    # Of the comparison of runs, what is left is a key of the plugin's own.
    left = {name for name, (is_applied, _) in after.items() if is_applied}
    assert left == needed - fixed | {"auto-resume"}


def table(text: str, begin: str) -> list[list[str]]:
    """The cells of a table's rows, from the row that begins so."""
    lines = text[text.index(f"\n| {begin}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def runs(key: str) -> dict[int, dict[str, Any]]:
    """The records of ``folder/row`` by seed."""
    folder, _, row = key.strip("`").partition("/")
    lines = (ROOT / "results" / folder / "records.jsonl").read_text().splitlines()
    found = [record for line in lines if (record := json.loads(line))["row"] == row]
    assert len({record["seed"] for record in found}) == len(found) > 0
    return {record["seed"]: record for record in found}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.name)
def test_measured_numbers_are_those_of_the_records(patch: Path) -> None:
    """Every number of a pull request's tables follows from the records that it names."""
    text = (patch / "pull_request.md").read_text()
    rows = table(text, "data ")
    owed = [row for row in rows if row[4:] == ["**owed**", "**owed**", "none yet"]]
    assert [row[0] for row in owed] == ["CIFAR-10", "CIFAR-100", "ImageNet-100"]
    assert len(rows) - len(owed) >= 4
    for _, _, budget, hardware, *scores, key in rows[: -len(owed)]:
        records = runs(key).values()
        (epochs, images), *others = {(r["epochs"], r["images"]) for r in records}
        plural = "s" if len(records) > 1 else ""
        assert not others
        assert budget.endswith(
            f", {epochs} epochs of {images:,} images, {len(records)} seed{plural}"
        )
        for record in records:
            used = record["environment"]
            assert hardware == f"{used['processor']}, {used['torch_threads']} thread, no GPU"
            assert used["cuda"] is None
        for protocol, score in zip(("linear", "knn"), scores, strict=True):
            values = [record["scores"][protocol] for record in records]
            deviation = f" ± {stdev(values):.2f}" if plural else ""
            assert score == f"{mean(values):.2f}{deviation}"
    for _, *scores, keys in table(text, "| linear"):
        one, other = map(runs, keys.split(" minus "))
        for protocol, score in zip(("linear", "knn"), scores, strict=True):
            apart = [one[i]["scores"][protocol] - other[i]["scores"][protocol] for i in one]
            half = stats.t.ppf(0.975, len(apart) - 1) * stdev(apart) / len(apart) ** 0.5
            low, high = mean(apart) - half, mean(apart) + half
            assert score.replace("−", "-") == f"{mean(apart):+.2f} ({low:+.2f} to {high:+.2f})"
