"""A slot of a GPU, whole at toy size on a CPU: from the pack to what comes back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from solo_ext.lab.experiments.results import read_results
from tests import forks
from tests.data.making import save_image

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_slot.sh"
MOST_KIB = 40 << 10
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script of bash and GNU tar")


def slot(*words: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHON": sys.executable, **{k: str(v) for k, v in environment.items()}}
    return subprocess.run(
        ["bash", str(SCRIPT), *words], env=given, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of drawn images, where class folders of CIFAR-10 would lie."""
    root = tmp_path_factory.mktemp("data")
    for split, count in (("train", 24), ("test", 6)):
        for label in range(10):
            for number in range(count):
                save_image(root / "cifar10" / split / f"class{label}" / f"{number}.png", label)
    return root


@pytest.mark.slow
def test_toy(images: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    given = {"SOLO_EXT_DATA": images, "OUT": out, "WORK": work, "PACK": tmp_path / "none"}
    given["PYTHON"] = forks.executable(tmp_path)
    done = slot("train", "--toy", MINUTES="5", PARALLEL="2", **given)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(out / "gpu_slot.tar.gz") as back:
        names = back.getnames()
        back.extractall(tmp_path / "back", filter="data")
    assert not any(name.endswith((".ckpt", ".pth")) for name in names)
    results = read_results(tmp_path / "back")
    assert {r["row"] for r in results.records} == {"simclr", "hard_negative"}
    assert {r["epochs"] for r in results.records} == {2}
    assert set(results.records[0]["scores"]) == {"knn", "knn_200", "linear"}
    assert sum(name.endswith("environment.json") for name in names) == 2
    again = slot("train", "--toy", "--dry-run", MINUTES="5", **given)
    assert "0 runs in" in again.stderr


@pytest.mark.slow
def test_toy_of_speed(tmp_path: Path) -> None:
    """Every part is done, or is said not to be; the table comes last."""
    out, work = tmp_path / "out", tmp_path / "work"
    given = {"OUT": out, "WORK": work, "PACK": tmp_path / "none"}
    given["PYTHON"] = forks.executable(tmp_path)
    done = slot("speed", "--toy", MINUTES="5", **given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = ["tests", "sinkhorn", "nearest"]
    lines = (work / "speed" / "parts.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == parts
    assert all(": done in " in line for line in lines), lines
    assert done.stdout.splitlines()[-3:] == lines
    assert "| Sinkhorn" in done.stdout or "| sinkhorn" in done.stdout.lower()
    with tarfile.open(out / "gpu_slot.tar.gz") as back:
        names = {Path(name).name for name in back.getnames()}
    assert {"tests.xml", "speed.jsonl", "speed.md", "parts.txt"} <= names
    none = slot("speed", "--toy", MINUTES="0", **given)
    assert none.returncode == 0
    assert [line.partition(": ")[2] for line in none.stdout.splitlines()[-3:]] == [
        "not started, the time is over"
    ] * 3


@pytest.mark.slow
def test_a_part_that_fails_keeps_none_back(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho said\n[[ "$*" != "-m pytest"* ]] || exit 3\n')
    python.chmod(0o755)
    given = {"PYTHON": python, "WORK": tmp_path / "work", "PACK": tmp_path / "none"}
    done = slot("speed", "--toy", **given)
    first, *others = done.stdout.splitlines()[-3:]
    assert (done.returncode, first) == (
        1,
        "tests: FAILED, exit code 3; tests.log ends with: said",
    )
    assert all(": done in " in line for line in others)


def test_parts_by_name_in_the_folders_with_tests_for_a_gpu(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$*"\n')
    python.chmod(0o755)
    given = {"PYTHON": python, "WORK": tmp_path / "work", "PACK": tmp_path / "none"}
    done = slot("speed", "sinkhorn", "tests", **given)
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if line.startswith("-m ")]
    assert [words.split()[1] for words in ran] == ["benchmarks", "pytest"]
    assert {"tests/kernels", "tests/lab/training"} < set(ran[1].split())
    assert "tests/losses" not in ran[1].split()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pip") is None, reason="pip gathers the wheels")
def test_pack(images: Path, tmp_path: Path) -> None:
    """Wheels for another Python, the images, and the host; less than what may be carried."""
    pack = tmp_path / "pack"
    done = slot("pack", SOLO_EXT_DATA=images, PACK=pack)
    assert done.returncode == 0, done.stderr
    names = {wheel.name.split("-")[0] for wheel in (pack / "wheels").glob("*.whl")}
    assert {"hydra_core", "omegaconf", "antlr4_python3_runtime", "pydantic_core"} <= names
    assert any("cp312" in wheel.name for wheel in (pack / "wheels").glob("pydantic_core-*"))
    assert re.fullmatch(r"[0-9a-f]{40}(\nchanged)?", (pack / "commit").read_text().strip())
    with tarfile.open(pack / "train.tar.gz") as held:
        assert sum(member.isfile() for member in held) == 240
    # CIFAR-10's own images take 19 MiB.
    size = sum(file.stat().st_size for file in pack.rglob("*") if file.is_file()) >> 10
    assert size < MOST_KIB - (20 << 10)


def test_mistakes(tmp_path: Path) -> None:
    for words, problem in (
        (("train", "--tiny"), "train: no option --tiny"),
        (("pack", "x"), "pack: no option x"),
        (("speed", "x"), "speed: no option x"),
        (("pack",), "no train/ and test/; set SOLO_EXT_DATA"),
    ):
        done = slot(*words, SOLO_EXT_DATA=tmp_path, PACK=tmp_path / "pack", WORK=tmp_path / "w")
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
    help_text = slot()
    assert help_text.returncode == 2
    assert help_text.stderr.startswith("Minutes of a GPU")
    assert "SOLO_LEARN_ROOT" in help_text.stderr
