"""Features in a file, or on another device than the one that computes: the same to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.clustering import kmeans, rows
from tests.clustering import e_steps
from tests.clustering.elsewhere import DEVICE, Elsewhere, Held
from tests.clustering.kmeans_ranks import mapped
from tests.scripts import run_script

OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "hierarchical": {"backend": "hierarchical"},
    "restarts": {"backend": "torch", "restarts": 2},
    "sample": {"backend": "torch", "sample": 700, "sample_seed": 3},
    "hierarchical sample": {"backend": "hierarchical", "sample": 700, "sample_seed": 3},
}


def table(dtype: torch.dtype = torch.float32, count: int = 3000) -> Tensor:
    """Rows (n, 16) around thirty directions, at different lengths."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(30, 16, generator=generator)
    noise = 0.5 * torch.randn(count, 16, generator=generator)
    return (centres[torch.arange(count) % 30] + noise).to(dtype)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes tiles and blocks small, so that these rows are several of each."""

    def change() -> None:
        monkeypatch.setattr(rows, "_MOST_ROWS", {"cpu": 256, "cuda": 256})
        monkeypatch.setattr(rows, "_BLOCK_BYTES", {"cpu": 2**14, "cuda": 2**14})

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_in_a_file(
    name: str, dtype: torch.dtype, small: Callable[[], None], tmp_path: Path
) -> None:
    """Cold and warm; in many blocks as in one."""
    x = table(dtype)
    expected = e_steps.steps(x, **OPTIONS[name])
    small()
    e_steps.same(e_steps.steps(mapped(x, tmp_path), **OPTIONS[name]), expected)


@pytest.mark.parametrize("name", ["sample", pytest.param("hierarchical", marks=pytest.mark.slow)])
def test_on_another_device(name: str, small: Callable[[], None], tmp_path: Path) -> None:
    """No operation is given tensors of both, and all results are on the one that computes."""
    small()
    x, options = mapped(table(count=1000), tmp_path), OPTIONS[name]
    with Elsewhere():
        here = e_steps.steps(x, **options, device=DEVICE)
        there = e_steps.steps(x.to(DEVICE), **options)
    for one, two in zip(here, there, strict=True):
        for found, expected in zip(one, two, strict=True):
            if isinstance(expected, Tensor):
                assert isinstance(found, Held)
                assert isinstance(expected, Held)
                assert torch.equal(found.held, expected.held)
            else:
                assert found == expected


def test_the_other_device_is_strict() -> None:
    """What the test above relies on."""
    with Elsewhere():
        x, y = torch.ones(3).to(DEVICE), torch.ones(3)
        assert torch.equal((x + x).to("cpu"), y + y)
        with pytest.raises(RuntimeError, match="two devices"):
            x + y


def test_faiss_reads_a_file(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    x = table()
    found = kmeans(mapped(x, tmp_path), 40, iterations=4, backend="faiss")
    expected = kmeans(x, 40, iterations=4, backend="faiss")
    assert torch.equal(found.means, expected.means)
    assert torch.equal(found.assignments, expected.assignments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["torch", "hierarchical", "flash"])
def test_a_gpu_reads_a_file(backend: str, small: Callable[[], None], tmp_path: Path) -> None:
    if backend == "flash":
        pytest.importorskip("flash_kmeans")
    else:
        small()
    x, options = table(), {"backend": backend}
    found = e_steps.steps(mapped(x, tmp_path), **options, device=torch.device("cuda"))
    e_steps.same(found, e_steps.steps(x.cuda(), **options))


@contextlib.contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Which parts of the rows are read, first and last, call by call."""
    seen: list[tuple[int, int]] = []
    read_rows = rows.read_rows

    def noted(features: Tensor, which: slice | Tensor, device: torch.device) -> Tensor:
        if len(features) == 3000 and isinstance(which, slice):
            seen.append((which.start, min(which.stop, 3000)))
        elif len(features) == 3000 and len(which):
            seen.append((int(which[0]), int(which[-1]) + 1))
        return read_rows(features, which, device)

    monkeypatch.setattr("solo_ext.clustering.lloyd.read_rows", noted)
    monkeypatch.setattr("solo_ext.clustering.rows.read_rows", noted)
    yield seen
    monkeypatch.undo()


def test_groups_of_means_read_a_file_once(
    small: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 60 groups of rows lies all over the file: they take turns in each block."""
    from solo_ext.clustering.hierarchical import NearestInGroups

    small()
    x = table()
    nearest = NearestInGroups(rows.rows_of(x, None, False))
    nearest(x[:100])
    with calls(monkeypatch) as seen:
        nearest(x[:100])
    assert seen == [(start, min(start + 256, 3000)) for start in range(0, 3000, 256)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "hierarchical"])
def test_memory(backend: str, tmp_path: Path) -> None:
    """Of 256 MB in a file an E-step holds less than half in memory of its own."""
    run_script(Path(__file__).with_name("memory_run.py"), tmp_path, backend)
    grown, size = map(int, (tmp_path / "grown.txt").read_text().split())
    assert size == 256_000_000
    # The numbers of the rows are a fifth or two.
    assert 0.1 * size < grown < 0.45 * size
