"""The choice of the backend, and that the optional ones agree with torch."""

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.clustering import k_means, kmeans, resolve_backend, rows
from solo_ext.clustering.backends import nearest_by_flash
from solo_ext.core.errors import ConfigError


def blobs(n: int = 3000, d: int = 16, modes: int = 30) -> Tensor:
    """Unit rows around a few modes."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(modes, d, generator=draw)
    noise = torch.randn(n, d, generator=draw)
    rows = centres[torch.randint(modes, (n,), generator=draw)] + 0.7 * noise
    return torch.nn.functional.normalize(rows, dim=1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the optional packages that seem to be installed."""
    names: set[str] = set()
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        if name in ("faiss", "flash_kmeans"):
            return object() if name in names else None
        return real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return names


@pytest.mark.parametrize(
    ("packages", "device", "where", "chosen"),
    [
        (set(), "cpu", {}, "torch"),
        ({"faiss", "flash_kmeans"}, "cpu", {}, "torch"),
        (set(), "cuda", {}, "torch"),
        ({"faiss"}, "cuda:1", {}, "torch"),
        ({"flash_kmeans"}, "cuda:1", {}, "flash"),
        ({"flash_kmeans"}, "cuda", {"sharded": True}, "flash"),
    ],
)
def test_auto(
    installed: set[str], packages: set[str], device: str, where: dict[str, bool], chosen: str
) -> None:
    installed |= packages
    assert resolve_backend("auto", torch.device(device), **where) == chosen


def test_auto_is_torch_where_results_must_not_change(installed: set[str]) -> None:
    installed |= {"flash_kmeans"}
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve_backend("auto", "cuda") == "torch"
    finally:
        torch.use_deterministic_algorithms(False)


def test_explicit_names(installed: set[str]) -> None:
    installed |= {"faiss", "flash_kmeans"}
    assert resolve_backend("faiss", "cpu") == "faiss"
    assert resolve_backend("torch", "cuda") == "torch"
    assert resolve_backend("hierarchical", "cpu", sharded=True) == "hierarchical"
    assert resolve_backend("flash", "cuda", sharded=True) == "flash"


@pytest.mark.parametrize(
    ("packages", "name", "where", "message"),
    [
        ((), "fais", {}, "did you mean 'faiss'.*auto, faiss, flash, hierarchical, torch"),
        ((), "faiss", {}, r'faiss is not installed; pip install "solo-ext\[faiss\]"'),
        (("faiss",), "faiss", {"sharded": True}, "spread over several; use auto or torch"),
        (("flash_kmeans",), "flash", {}, "needs CUDA, and this runs on cpu"),
    ],
)
def test_refuses(
    installed: set[str], packages: tuple[str, ...], name: str, where: Any, message: str
) -> None:
    installed |= {*packages}
    with pytest.raises(ConfigError, match=message):
        resolve_backend(name, "cpu", **where)


@pytest.mark.slow
def test_nothing_optional_is_imported_by_the_package() -> None:
    import subprocess

    program = (
        "import sys, solo_ext.clustering as c, torch; c.kmeans(torch.rand(9, 2), 2)\n"
        "assert not {'faiss', 'flash_kmeans'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_faiss_agrees_with_torch(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("faiss")
    x = blobs()
    old = kmeans(x, 40, iterations=2, seed=1)
    options: dict[str, Any] = {"precision": "highest", "relocate": False}
    ours = kmeans(x, 40, init=old.means, iterations=4, backend="torch", **options)
    theirs = kmeans(x, 40, init=old.means, iterations=4, backend="faiss")
    assert (ours.backend, theirs.backend) == ("torch", "faiss")
    assert ours.iterations == theirs.iterations == 4
    torch.testing.assert_close(theirs.means, ours.means, rtol=0, atol=1e-5)
    assert (theirs.assignments != ours.assignments).float().mean() < 1e-3
    assert theirs.objective == pytest.approx(ours.objective, rel=1e-5)
    assert ours.objective < 0.98 * old.objective
    shown = capfd.readouterr()
    assert not shown.out + shown.err


def test_faiss_takes_every_row_and_few_rows(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("faiss")
    # 256 rows a cluster is where faiss samples by default; it would miss the outlier.
    x = torch.cat([blobs(2000), torch.full((1, 16), 50.0)])
    found = kmeans(x, 1, iterations=1, backend="faiss")
    torch.testing.assert_close(found.means[0], x.mean(0), rtol=0, atol=1e-5)
    assert kmeans(x[:20], 20, backend="faiss").objective == pytest.approx(0, abs=1e-9)
    # Where faiss would warn of too few rows.
    kmeans(x[:20], 19, backend="faiss")
    shown = capfd.readouterr()
    assert not shown.out + shown.err


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """flash-kmeans' kernel on a CPU, under Triton's interpreter."""
    triton = pytest.importorskip("triton", reason="this build of torch comes without Triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 is not set: kernels run on the GPU")
    module: Any = pytest.importorskip("flash_kmeans.assign_euclid_triton")
    blocks = {"BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}
    # What it asks of the tensors and of the GPU.
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(module, "_need_split_d", lambda *_: False)
    monkeypatch.setattr(module, "_heuristic_euclid_config", lambda *_, **__: blocks)
    return monkeypatch


@pytest.mark.parametrize("sizes", [(1, 1, 1), (300, 70, 24), (129, 33, 16)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_flash_finds_the_nearest(flash: Any, sizes: tuple[int, int, int], offset: float) -> None:
    n, k, d = sizes
    draw = torch.Generator().manual_seed(0)
    x, means = (torch.randn(m, d, generator=draw) + offset for m in (n, k))
    means[-1] = x[0]
    found = nearest_by_flash(x, means)
    assert found.dtype == torch.int64
    apart = torch.cdist(x.double(), means.double())
    near = apart.gather(1, found[:, None])[:, 0]
    torch.testing.assert_close(near, apart.amin(1), rtol=1e-4, atol=1e-3)


def test_flash_takes_blocks_of_rows(flash: Any) -> None:
    x = blobs(700)
    whole = nearest_by_flash(x, x[:50])
    flash.setattr(rows, "_BLOCK_BYTES", {"cpu": 300 * x[:1].nbytes})
    assert torch.equal(nearest_by_flash(x, x[:50]), whole)


def test_flash_takes_the_place_of_the_search_alone(flash: Any) -> None:
    """Cold and warm, with relocation; the last assignment is torch's."""
    flash.setattr(k_means, "resolve_backend", lambda name, *_, **__: name)
    x = blobs(600)
    old = kmeans(x, 40, iterations=2, seed=1, backend="torch")
    for given in ({"seed": 1}, {"init": old.means}):
        options: dict[str, Any] = {**given, "iterations": 3}
        ours = kmeans(x, 40, backend="torch", precision="highest", **options)
        theirs = kmeans(x, 40, backend="flash", **options)
        assert (ours.backend, theirs.backend) == ("torch", "flash")
        assert ours.iterations == theirs.iterations
        assert torch.equal(theirs.assignments, ours.assignments)
        assert torch.equal(theirs.means, ours.means)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_agrees_with_torch() -> None:
    pytest.importorskip("flash_kmeans")
    x = blobs().cuda()
    old = kmeans(x, 40, iterations=2, seed=1, backend="torch")
    ours = kmeans(x, 40, init=old.means, iterations=4, backend="torch")
    theirs = kmeans(x, 40, init=old.means, iterations=4, backend="flash")
    assert theirs.objective == pytest.approx(ours.objective, rel=3e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu() -> None:
    x = blobs()
    options: dict[str, Any] = {"backend": "torch", "precision": "highest", "iterations": 5}
    cpu, cuda = kmeans(x, 20, **options), kmeans(x.cuda(), 20, **options)
    assert cuda.means.is_cuda
    torch.testing.assert_close(cuda.means.cpu(), cpu.means, rtol=0, atol=1e-4)
    assert torch.equal(kmeans(x.cuda(), 20, **options).means, cuda.means)
