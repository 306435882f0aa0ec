"""The Triton kernels of the nearest row against the whole matrix of similarities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.kernels import dispatch
from solo_ext.kernels.nearest_rows import NearestRows, nearest_rows

Force = Callable[[dispatch.Form], None]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(force: Force, query: Tensor, table: Tensor, **ids: Tensor) -> tuple[NearestRows, ...]:
    found = []
    for form in ("fused", "plain"):
        force(form)  # type: ignore[arg-type]
        found.append(nearest_rows(query, table, **ids))
    return tuple(found)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 200, 24), (33, 65, 130)])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_equals_the_whole_matrix(
    sizes: tuple[int, int, int], with_ids: bool, half: bool, device: torch.device, force: Force
) -> None:
    """Rows of any length; ids leave out a third of them, and one query's every row."""
    n, k, d = sizes
    query, table = rows(n, d).to(device), 3 * rows(k, d, seed=1).to(device)
    ids = {}
    if with_ids:
        own = torch.arange(n, device=device) % 3
        ids = {"query_ids": own, "table_ids": torch.arange(k, device=device) % 3}
    fused, plain = both(force, query, table.bfloat16() if half else table, **ids)
    assert torch.equal(fused.index, plain.index) or (with_ids and k == 1)
    torch.testing.assert_close(fused.similarity, plain.similarity)


def test_finds_what_bf16_would_miss(device: torch.device, force: Force) -> None:
    """Rows that differ by less than bf16 tells apart, spread over many blocks."""
    centre = F.normalize(rows(1, 32), dim=1)
    table = F.normalize(centre + 1e-3 * rows(700, 32, seed=1), dim=1).to(device)
    query = F.normalize(centre + 1e-3 * rows(8, 32, seed=2), dim=1).to(device)
    fused, plain = both(force, query, table)
    narrow = (query.bfloat16() @ table.bfloat16().T).argmax(1, keepdim=True)
    assert not torch.equal(narrow, plain.index), "else it would show nothing"
    # Products that differ by fp32's rounding alone may be ranked either way.
    exact = (query.double() @ table.double().T).gather(1, fused.index)
    best = (query.double() @ table.double().T).amax(1, keepdim=True)
    assert ((best - exact) < 4e-7).all()


@pytest.mark.parametrize(
    ("nearest", "other"),
    [
        # 2.006 is rounded to 2; the other row is exact and lies between.
        ((1.003, 1.003), (1 + 2**-7, 1 - 2**-8)),
        # The nearest row is exact; 0.997 is rounded to 1, which is above it.
        ((1.0, -(2**-9)), (2.0, -1.003)),
    ],
)
@pytest.mark.parametrize("place", [3, 70])
def test_rounding_is_allowed_for(
    nearest: tuple[float, float],
    other: tuple[float, float],
    place: int,
    device: torch.device,
    force: Force,
) -> None:
    """A block's bounds hold although its rows are rounded and those of the other are not."""
    table = torch.zeros(128, 2)
    table[place], table[73 - place] = torch.tensor(nearest), torch.tensor(other)
    fused, _ = both(force, torch.ones(1, 2).to(device), table.to(device))
    assert fused.index.item() == place


def test_of_equal_rows_the_first(device: torch.device, force: Force) -> None:
    """Within a block, and in different ones."""
    table = F.one_hot(torch.arange(300) % 7, 8).float().to(device)
    query = torch.eye(8).to(device)
    fused, _ = both(force, query, table)
    assert fused.index[:7, 0].tolist() == list(range(7))
    assert fused.index[7, 0] == 0, "all are equally far"


def test_no_row_is_left(device: torch.device, force: Force) -> None:
    query, table = rows(3, 8).to(device), rows(70, 8, seed=1).to(device)
    own = torch.tensor([5, 4, 5]).to(device)
    force("fused")
    index, similarity = nearest_rows(
        query, table, query_ids=own, table_ids=torch.full((70,), 5).to(device)
    )
    assert similarity.isfinite()[:, 0].tolist() == [False, True, False]
    assert (similarity[own == 5] == float("-inf")).all()
    assert (index >= 0).all()
    assert (index < 70).all()


def test_a_diverged_query_is_seen(device: torch.device, force: Force) -> None:
    query, table = rows(5, 8).to(device), rows(70, 8, seed=1).to(device)
    query[2, 3] = float("nan")
    force("fused")
    index, similarity = nearest_rows(query, table)
    assert similarity.isnan()[:, 0].tolist() == [i == 2 for i in range(5)]
    assert (index < 70).all()


def test_describes_itself(device: torch.device) -> None:
    from solo_ext.kernels.fused_nearest import fused_nearest

    given = rows(3, 8).to(device), rows(30, 8, seed=1).to(device), None, None
    torch.library.opcheck(fused_nearest, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_whole_support_set(force: Force) -> None:
    """The table's size, random and in clusters."""
    for spread in (1.0, 0.05):
        centre = rows(100, 256).repeat(984, 1)[:98304]
        table = F.normalize(centre + spread * rows(98304, 256, seed=1), dim=1).cuda()
        query = F.normalize(table[:512] + 0.5 * spread * rows(512, 256, seed=2).cuda(), dim=1)
        fused, _ = both(force, query, table)
        exact = query.double() @ table.double().T
        assert (exact.amax(1, keepdim=True) - exact.gather(1, fused.index) < 1e-6).all()
