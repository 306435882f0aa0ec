"""Prototypes of a sample of the rows, and what is said of all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.clustering import FeatureFile, cluster_concentration, kmeans
from solo_ext.clustering.lloyd import assign, distances_to
from solo_ext.clustering.rows import rows_of
from tests.clustering.e_steps import same, steps

ROWS, SAMPLE = 3000, 700


@pytest.fixture(scope="module")
def x() -> Tensor:
    """(3000, 16) unit rows around thirty directions."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(30, 16, generator=generator)
    return F.normalize(
        centres[torch.arange(ROWS) % 30] + 0.5 * torch.randn(ROWS, 16, generator=generator), dim=1
    )


@pytest.mark.parametrize("count", [ROWS, 10 * ROWS])
@pytest.mark.parametrize("restarts", [1, 2])
def test_a_sample_of_all_rows_changes_no_bit(x: Tensor, count: int, restarts: int) -> None:
    found = steps(x, sample=count, sample_seed=5, restarts=restarts)
    same(found, steps(x, restarts=restarts))


def test_means_are_those_of_the_drawn_rows(x: Tensor) -> None:
    drawn = rows_of(x, None, False).drawn(SAMPLE, 7)
    alone = kmeans(drawn.features, 40, iterations=5, restarts=2)
    found = kmeans(x, 40, iterations=5, restarts=2, sample=SAMPLE, sample_seed=7)
    assert torch.equal(found.means, alone.means)
    assert found.iterations == alone.iterations
    assert torch.equal(found.assignments, assign(x, found.means))
    assert torch.equal(found.distances, distances_to(x, found.means, found.assignments))
    assert found.objective == pytest.approx(float(found.distances.double().square().mean()))
    assert found.objective > 1.001 * alone.objective
    whole = kmeans(x, 40, iterations=5, restarts=2)
    assert whole.objective < found.objective < 1.1 * whole.objective


def test_what_is_said_is_said_of_all_rows(x: Tensor) -> None:
    for g in steps(x, sample=SAMPLE, sample_seed=3):
        counts = torch.bincount(g.assignments, minlength=len(g.means))
        assert len(g.assignments) == counts.sum() == ROWS
        assert (g.empty, g.singletons) == (int((counts == 0).sum()), int((counts == 1).sum()))
        distances = distances_to(x, g.means, g.assignments)
        phi = cluster_concentration(distances, g.assignments, len(g.means), 0.2)
        torch.testing.assert_close(g.concentration, phi, rtol=1e-6, atol=0)
        assert g.objective == pytest.approx(float(distances.double().square().mean()))


def test_draw() -> None:
    """Distinct rows in their order, others for another seed, each about as often as any other."""
    rows = rows_of(torch.arange(100.0).view(100, 1), None, False)
    draws = [rows.drawn(30, seed) for seed in range(200)]
    taken = torch.stack([d.features[:, 0].long() for d in draws])
    assert (taken.diff(dim=1) > 0).all()
    assert len({tuple(t.tolist()) for t in taken}) == 200
    often = torch.bincount(taken.view(-1), minlength=100)
    assert often.min() > 30
    assert often.max() < 95
    assert torch.equal(rows.drawn(30, 4).features, draws[4].features)
    assert all(torch.equal(d.ids, torch.arange(30)) for d in draws)
    assert rows.drawn(100, 0) is rows


def test_faiss_sees_the_sample(x: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    options: dict[str, Any] = {"iterations": 4, "sample": SAMPLE, "backend": "faiss"}
    found = kmeans(x, 40, **options)
    ours = kmeans(x, 40, **{**options, "backend": "torch"}, precision="highest")
    torch.testing.assert_close(found.means, ours.means, rtol=0, atol=1e-5)
    file = FeatureFile(tmp_path, *x.shape)
    file[torch.arange(ROWS)] = x
    assert torch.equal(kmeans(file, 40, **options).means, found.means)


def test_refuses_a_sample_that_is_too_small(x: Tensor) -> None:
    with pytest.raises(ValueError, match="sample=39: 40 clusters need as many rows"):
        kmeans(x, 40, sample=39)
