"""The search that follows moving means against one from scratch."""

import pytest
import torch

from solo_ext.clustering import lloyd
from solo_ext.clustering.lloyd import Nearest, assign


@pytest.mark.parametrize("moving", [0, 1, 20, 70, 99, 200])
@pytest.mark.parametrize("grid", [False, True])
def test_equals_a_search_from_scratch(moving: int, grid: bool) -> None:
    draw = torch.Generator().manual_seed(moving)
    x = torch.randn(900, 5, generator=draw, dtype=torch.float64)
    means = torch.randn(200, 5, generator=draw, dtype=torch.float64) + 0.5
    if grid:
        # Many rows as near to several means; the means balance, so that the sums are exact.
        x, means = x.round(), means[:100].round()
        means = torch.cat([means, -means])
    follow = Nearest(x)
    for _ in range(5):
        assert torch.equal(follow(means), assign(x, means))
        means = means.clone()
        chosen = torch.randperm(200, generator=draw)[:moving]
        means[chosen] = means[chosen].flip(0)
        if not grid:
            means[chosen] += 0.3 * torch.randn(moving, 5, generator=draw, dtype=torch.float64)


def test_compares_with_the_moved_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    real = lloyd.search

    def noted(
        features: torch.Tensor,
        means: torch.Tensor,
        centre: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append((len(features if wanted is None else wanted), len(means)))
        return real(features, means, centre, wanted)

    monkeypatch.setattr(lloyd, "search", noted)
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    means = x[:20]
    follow = Nearest(x)
    found = follow(means)
    own = int((found == 7).sum())
    means = means.clone()
    means[7] += 0.1
    follow(means)
    assert counts == [(400, 20), (400 - own, 1), (own, 20)]
