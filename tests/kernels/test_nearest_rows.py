"""The tiled look-up against a loop, and against argmax over the whole matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from solo_ext.core.precision import matmul_precision
from solo_ext.kernels.nearest_rows import nearest_rows
from tests.kernels.conftest import Tiled, normal

N, K, D = 6, 23, 5
TILES = pytest.mark.parametrize("tile", [None, 1, 7, 100])


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return normal(N, D, dtype=dtype), normal(K, D, seed=1, dtype=dtype)


def whole_numbers() -> tuple[Tensor, Tensor]:
    """Rows in {-1, 0, 1}, whose products are exact and often equal."""
    generator = torch.Generator().manual_seed(1)
    query, table = (torch.randint(-1, 2, (n, 3), generator=generator).float() for n in (N, K))
    return query, table


def loop(query: Tensor, table: Tensor, k: int, own: list[int], ids: list[int]) -> list[list[int]]:
    """Allowed rows of each query, by falling similarity and then by number."""
    found = []
    for i, q in enumerate(query):
        allowed = [j for j in range(len(table)) if ids[j] != own[i]]
        similarity = {j: torch.dot(q, table[j]).item() for j in allowed}
        found.append(sorted(allowed, key=lambda j, s=similarity: (-s[j], j))[:k])
    return found


@TILES
@pytest.mark.parametrize("k", [1, 3, K])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_topk_of_the_whole_matrix(
    tiled: Tiled, tile: int | None, k: int, dtype: torch.dtype
) -> None:
    tiled(tile)
    query, table = inputs(dtype)
    index, similarity = nearest_rows(query, table, k)
    expected = (query @ table.T).topk(k, dim=1)
    assert torch.equal(index, expected.indices)
    torch.testing.assert_close(similarity, expected.values)
    assert index.dtype == torch.int64
    assert similarity.dtype == dtype


@TILES
@pytest.mark.parametrize("k", [1, 2, 9, K])
@pytest.mark.parametrize("with_ids", [True, False])
def test_equal_rows_come_in_order(tiled: Tiled, tile: int | None, k: int, with_ids: bool) -> None:
    tiled(tile)
    query, table = whole_numbers()
    own = [0, 1, 2, 0, 9, 1]
    ids = [j % 4 for j in range(K)] if with_ids else [-2] * K
    given = {"query_ids": torch.tensor(own), "table_ids": torch.tensor(ids)} if with_ids else {}
    index, similarity = nearest_rows(query, table, k, **given)
    for i, expected in enumerate(loop(query, table, k, own, ids)):
        count = len(expected)
        assert index[i, :count].tolist() == expected
        assert torch.equal(similarity[i, :count], table[expected] @ query[i])
        assert (similarity[i, count:] == float("-inf")).all()
    assert (index >= 0).all()
    assert (index < K).all()


@TILES
@pytest.mark.parametrize("k", [1, 4])
def test_a_query_that_owns_the_table_finds_nothing(tiled: Tiled, tile: int | None, k: int) -> None:
    tiled(tile)
    query, table = inputs()
    own = torch.tensor([5, 3, 5, 5, 5, 5])
    index, similarity = nearest_rows(query, table, k, query_ids=own, table_ids=torch.full((K,), 5))
    assert similarity.isfinite().all(1).tolist() == [i == 1 for i in range(N)]
    assert (similarity[own == 5] == float("-inf")).all()
    assert (index >= 0).all()
    assert (index < K).all()


def test_a_diverged_query_is_seen(tiled: Tiled) -> None:
    tiled(5)
    query, table = inputs()
    query[2] = float("nan")
    similarity = nearest_rows(query, table, 2).similarity
    assert similarity.isnan().any(1).tolist() == [i == 2 for i in range(N)]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_single_precision(half: torch.dtype) -> None:
    query, table = inputs(torch.float32)
    for q, t in ((query, table), (query.to(half), table), (query, table.to(half))):
        with torch.autocast("cpu", dtype=half):
            assert (query @ table.T).dtype == half, "autocast must be on"
            found = nearest_rows(q, t)
        assert found.similarity.dtype == torch.float32
        assert torch.equal(found.similarity, nearest_rows(q.float(), t.float()).similarity)


def test_multiplies_in_full_precision_whatever_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, product, matmul = [], torch.Tensor.__matmul__, torch.backends.cuda.matmul

    def spy(a: Tensor, b: Tensor) -> Tensor:
        seen.append(matmul.fp32_precision)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    with matmul_precision("high"):
        nearest_rows(*inputs(torch.float32))
        assert matmul.fp32_precision == "tf32"
    assert seen == ["ieee"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, r"k=0: must lie in \[1, 23\]"),
        ({"k": K + 1}, r"k=24: must lie in \[1, 23\]"),
        ({"table": torch.ones(K, D + 1)}, r"\(23, 6\)"),
        ({"query": torch.ones(D)}, r"\(N, D\)"),
        ({"query_ids": torch.arange(N)}, "both, or neither"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    query, table = inputs()
    with pytest.raises(ValueError, match=message):
        nearest_rows(**({"query": query, "table": table} | change))  # type: ignore[arg-type]


@TILES
@pytest.mark.parametrize("k", [1, 3])
def test_inexact_rows_are_nearly_the_nearest(tiled: Tiled, tile: int | None, k: int) -> None:
    """In a cluster that bfloat16 cannot resolve."""
    tiled(tile)
    centre = normal(1, 32, dtype=torch.float32)
    table = F.normalize(centre + 0.2 * normal(300, 32, seed=1, dtype=torch.float32), dim=1)
    query = F.normalize(centre + 0.2 * normal(40, 32, seed=2, dtype=torch.float32), dim=1)
    exact, found = nearest_rows(query, table, k), nearest_rows(query, table, k, exact=False)
    missed = (exact.index != found.index).float().mean()
    assert 0 < missed < 1, "else it would show nothing"
    truly = (query @ table.T).gather(1, found.index)
    assert (exact.similarity - truly < 0.012).all()
    torch.testing.assert_close(found.similarity, truly, rtol=0, atol=0.006)
    assert found.similarity.dtype == torch.float32


def test_inexact_rows_leave_out_the_own_image() -> None:
    table = F.normalize(normal(20, 8, dtype=torch.float32), dim=1)
    ids = torch.arange(20)
    own = nearest_rows(table, table, exact=False)
    others = nearest_rows(table, table, query_ids=ids, table_ids=ids, exact=False)
    assert torch.equal(own.index[:, 0], ids)
    assert (others.index[:, 0] != ids).all()
