"""The choice of the backend, and that the optional ones agree with torch."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.clustering import k_means, kmeans, resolve_backend
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
        ({"flash_kmeans"}, "cuda", {"sharded": True}, "torch"),
        ({"flash_kmeans"}, "cuda", {"in_file": True}, "torch"),
    ],
)
def test_auto(
    installed: set[str], packages: set[str], device: str, where: dict[str, bool], chosen: str
) -> None:
    installed |= packages
    assert resolve_backend("auto", torch.device(device), **where) == chosen


def test_explicit_names(installed: set[str]) -> None:
    installed |= {"faiss", "flash_kmeans"}
    assert resolve_backend("faiss", "cpu") == "faiss"
    assert resolve_backend("torch", "cuda") == "torch"
    assert resolve_backend("flash", "cuda") == "flash"


@pytest.mark.parametrize(
    ("packages", "name", "where", "message"),
    [
        ((), "fais", {}, "did you mean 'faiss'.*auto, faiss, flash, torch"),
        ((), "faiss", {}, r'faiss is not installed; pip install "solo-ext\[faiss\]"'),
        (("faiss",), "faiss", {"sharded": True}, "spread over several; use auto or torch"),
        (("faiss",), "faiss", {"in_file": True}, "in a file; take auto or torch, or cluster a sam"),
        (("flash_kmeans",), "flash", {}, "on CUDA, these are on cpu"),
    ],
)
def test_refuses(
    installed: set[str], packages: tuple[str, ...], name: str, where: Any, message: str
) -> None:
    installed |= {*packages}
    with pytest.raises(ConfigError, match=message):
        resolve_backend(name, "cpu", **where)


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


class FakeFlash(SimpleNamespace):
    """Stands in for flash_kmeans: notes the call, seeds globally, leaves cluster 1 empty."""

    def batch_kmeans_Euclid(
        self, x: Tensor, n_clusters: int, max_iters: int, tol: float, init_centroids: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        torch.manual_seed(0)
        self.call: dict[str, Any] = {"k": n_clusters, "max_iters": max_iters, "tol": tol}
        self.init = init_centroids.clone()
        means = init_centroids.clone()
        means[0, 1] = 1e3
        return torch.cdist(x, means).argmin(2), means, max_iters


def test_flash_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_kmeans", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(k_means, "resolve_backend", lambda *_, **__: "flash")
    x = blobs()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    found = kmeans(x, 12, init=x[:12], iterations=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert fake.call["k"] == 12
    assert fake.call["max_iters"] == 3
    assert fake.call["tol"] > 0
    assert torch.equal(fake.init, x[None, :12])
    # The step that refills the empty cluster counts.
    assert found.iterations == 4
    assert torch.bincount(found.assignments, minlength=12).min() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_agrees_with_torch() -> None:
    pytest.importorskip("flash_kmeans")
    x = blobs().cuda()
    old = kmeans(x, 40, iterations=2, seed=1, backend="torch")
    ours = kmeans(x, 40, init=old.means, iterations=4, backend="torch", relocate=False)
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
