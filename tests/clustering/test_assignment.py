"""The search for the nearest mean, by groups of scores, against one over all of them."""

import pytest
import torch

from solo_ext.clustering.lloyd import assign


@pytest.mark.parametrize("count", [1, 31, 64, 65, 96, 97, 250, 1000])
def test_nearest_and_of_equal_ones_the_first(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    rows = torch.randint(-3, 4, (700, 4), generator=draw).double()
    # Few places for many means: most rows have several as near, of the same bits.
    means = torch.randint(-3, 4, (count, 4), generator=draw).double()
    means -= means.mean(0).round()
    apart = (rows[:, None] - means).square().sum(2)
    found = assign(rows, means)
    near = apart.gather(1, found[:, None])[:, 0]
    torch.testing.assert_close(near, apart.amin(1), rtol=0, atol=1e-9)
    equal = (means[:, None] == means[found]).all(2).T
    assert torch.equal(found, equal.int().argmax(1))
