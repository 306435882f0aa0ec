"""Features in a file: the same clusters, little memory, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering import FeatureFile, e_step
from tests.clustering.e_steps import same, steps

ROWS = 2500


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return F.normalize(torch.randn(ROWS, 24, generator=generator), dim=1)


def filled(folder: Path, x: Tensor) -> FeatureFile:
    """A file with the rows of ``x``, written in another order."""
    file = FeatureFile(folder, *x.shape)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    for part in torch.split(order, 300):
        file[part] = x[part]
    return file


@pytest.mark.parametrize("options", [{}, {"sample": 800}, {"restarts": 2}])
def test_the_same_clusters_to_the_last_bit(
    x: Tensor, tmp_path: Path, options: dict[str, Any]
) -> None:
    same(steps(filled(tmp_path, x), **options), steps(x, **options))


def test_reads_what_was_written(x: Tensor, tmp_path: Path) -> None:
    file = filled(tmp_path / "made" / "here", x)
    assert (len(file), file.shape, file.dtype) == (ROWS, x.shape, torch.float32)
    for part in (slice(0, 3), slice(1, 4), slice(2, 2), slice(900, 2600), slice(None)):
        assert torch.equal(file[part], x[part])
    file[torch.tensor([1, 2])] = torch.zeros(2, 24, dtype=torch.float64)
    assert torch.equal(file[0:4], torch.cat([x[:1], torch.zeros(2, 24), x[3:4]]))
    wanted = torch.tensor([2400, 0, 0, 77])
    assert torch.equal(file.index_select(0, wanted), x[wanted])


def test_no_rows(tmp_path: Path) -> None:
    file = FeatureFile(tmp_path, 0, 8)
    assert file[0:5].shape == file.index_select(0, torch.arange(0)).shape == (0, 8)
    file.close()


def resident(kind: str) -> int:
    """Bytes of this process that are in memory; ``RssFile`` those of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{kind}:")]
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_part_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 410 MB; 512 rows far apart map 33.
    count, width = 800_000, 128
    file = FeatureFile(tmp_path, count, width)
    before, files = resident("VmRSS"), resident("RssFile")
    most = 0
    for start in range(0, count, 20_000):
        own = torch.arange(start, start + 20_000)
        file[own] = own[:, None].float().expand(-1, width)
        most = max(most, resident("VmRSS"))
    for start in range(0, count, 1000):
        assert file[start : start + 1000][0, 0] == start
        most = max(most, resident("VmRSS"))
    found, release = [], file._release

    def noted(numbers: Tensor) -> None:
        found.append(resident("RssFile"))
        release(numbers)

    monkeypatch.setattr(file, "_release", noted)
    apart = torch.arange(0, count, 40)
    assert torch.equal(file.index_select(0, apart)[:, 5].long(), apart)
    most = max(most, resident("VmRSS"))
    assert most - before < 8e7
    assert max(found) - files < 8e7
    # Nor does anything add up at the edges of what is given back.
    assert resident("RssFile") - files < 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_what_was_touched_is_given_back(tmp_path: Path) -> None:
    """Else a read would take the longer, the larger the file is."""
    file = FeatureFile(tmp_path, 100_000, 128)
    file._rows[:50_000].sum()
    held = resident("RssFile")
    apart = torch.tensor([90_000, 91_000, 95_000])
    file[apart] = torch.ones(3, 128)
    assert file.index_select(0, apart).sum() == file[89_000:96_000].sum() == 3 * 128
    assert resident("RssFile") > held - 2**20
    file.index_select(0, torch.tensor([0, 49_999]))
    assert resident("RssFile") < held - 20 * 2**20


@pytest.mark.fault
def test_features_that_are_not_finite_are_refused(x: Tensor, tmp_path: Path) -> None:
    x[2000] = torch.nan
    with pytest.raises(ValueError, match="1 rows hold NaN"):
        e_step(filled(tmp_path, x), torch.arange(ROWS), ROWS, [5], temperature=0.2)


@pytest.mark.fault
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        FeatureFile(tmp_path / "file", 3, 3)
    with pytest.raises(OSError, match=r"space|large"):
        FeatureFile(tmp_path, 2**48, 8)


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_nothing_is_left(tmp_path: Path, end: str) -> None:
    """The folder is empty all the time; the system frees a file without a name by itself."""
    program = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from solo_ext.clustering.feature_file import FeatureFile\n"
        "file = FeatureFile(Path(sys.argv[1]), 1000, 100)\n"
        "file[torch.arange(1000)] = torch.ones(1000, 100)\n"
        "print('written', flush=True)\nsys.stdin.readline()\n"
        "file.close()\nprint('closed', flush=True)\nsys.stdin.readline()\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        maps = Path(f"/proc/{child.pid}/maps")
        assert str(tmp_path) in maps.read_text()
        assert not list(tmp_path.iterdir())
        if end == "closed":
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "closed\n"
            assert str(tmp_path) not in maps.read_text()
        os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert not list(tmp_path.iterdir())
