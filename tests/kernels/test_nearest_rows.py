"""The tiled look-up against a loop, and against argmax over the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from solo_ext.kernels.nearest_rows import nearest_rows

N, K, D = 6, 23, 5
TILES = [None, 1, 2, 7, 23, 100]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(N, D, generator=generator, dtype=dtype)
    return query, torch.randn(K, D, generator=generator, dtype=dtype)


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


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [1, 3, K])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_topk_of_the_whole_matrix(tile: int | None, k: int, dtype: torch.dtype) -> None:
    query, table = inputs(dtype)
    index, similarity = nearest_rows(query, table, k, tile=tile)
    expected = (query @ table.T).topk(k, dim=1)
    assert torch.equal(index, expected.indices)
    torch.testing.assert_close(similarity, expected.values)
    assert index.dtype == torch.int64
    assert similarity.dtype == dtype


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [1, 2, 9, K])
@pytest.mark.parametrize("with_ids", [True, False])
def test_equal_rows_come_in_order(tile: int | None, k: int, with_ids: bool) -> None:
    query, table = whole_numbers()
    own = [0, 1, 2, 0, 9, 1]
    ids = [j % 4 for j in range(K)] if with_ids else [-2] * K
    given = {"query_ids": torch.tensor(own), "table_ids": torch.tensor(ids)} if with_ids else {}
    index, similarity = nearest_rows(query, table, k, tile=tile, **given)
    for i, expected in enumerate(loop(query, table, k, own, ids)):
        count = len(expected)
        assert index[i, :count].tolist() == expected
        assert torch.equal(similarity[i, :count], table[expected] @ query[i])
        assert (similarity[i, count:] == float("-inf")).all()
    assert (index >= 0).all()
    assert (index < K).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [1, 4])
def test_a_query_that_owns_the_table_finds_nothing(tile: int | None, k: int) -> None:
    query, table = inputs()
    own = torch.tensor([5, 3, 5, 5, 5, 5])
    index, similarity = nearest_rows(
        query, table, k, query_ids=own, table_ids=torch.full((K,), 5), tile=tile
    )
    assert similarity.isfinite().all(1).tolist() == [i == 1 for i in range(N)]
    assert (similarity[own == 5] == float("-inf")).all()
    assert (index >= 0).all()
    assert (index < K).all()


def test_both_views_in_one_call_equal_two_calls() -> None:
    query, table = inputs()
    together = nearest_rows(query, table, 2, tile=4)
    parts = [nearest_rows(part, table, 2, tile=4) for part in query.chunk(2)]
    assert torch.equal(together.index, torch.cat([part.index for part in parts]))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_single_precision(half: torch.dtype) -> None:
    query, table = inputs(torch.float32)
    with torch.autocast("cpu", dtype=half):
        assert (query @ table.T).dtype == half, "autocast must be on"
        found = nearest_rows(query, table)
        of_half = nearest_rows(query.to(half), table)
    assert torch.equal(found.similarity, nearest_rows(query, table).similarity)
    assert found.similarity.dtype == of_half.similarity.dtype == torch.float32
    expected = nearest_rows(query.to(half).float(), table)
    assert torch.equal(of_half.similarity, expected.similarity)
    for_half_table = nearest_rows(query, table.to(half))
    expected = nearest_rows(query, table.to(half).float())
    assert torch.equal(for_half_table.similarity, expected.similarity)


@pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has one setting for all"
)
def test_multiplies_in_full_precision_whatever_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    product = torch.Tensor.__matmul__

    def spy(a: Tensor, b: Tensor) -> Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", spy)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        nearest_rows(*inputs(torch.float32))
        assert seen == ["ieee"]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_a_diverged_query_is_seen() -> None:
    query, table = inputs()
    query[2] = float("nan")
    similarity = nearest_rows(query, table, 2, tile=5).similarity
    assert similarity.isnan().any(1).tolist() == [i == 2 for i in range(N)]


def test_no_gradient() -> None:
    query, table = inputs()
    found = nearest_rows(query.requires_grad_(), table.requires_grad_())
    assert not found.similarity.requires_grad


def test_no_query() -> None:
    query, table = inputs()
    index, similarity = nearest_rows(query[:0], table, 2)
    assert index.shape == similarity.shape == (0, 2)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("with_ids", [True, False])
def test_runs_without_looking_at_values(k: int, with_ids: bool) -> None:
    """Tensors without values stand in for a device: a look at one would synchronise with it."""
    query, table = (torch.empty(n, D, device="meta") for n in (N, K))
    ids = {
        "query_ids": torch.empty(N, dtype=torch.long, device="meta"),
        "table_ids": torch.empty(K, dtype=torch.long, device="meta"),
    }
    found = nearest_rows(query, table, k, tile=4, **(ids if with_ids else {}))
    assert found.index.shape == found.similarity.shape == (N, k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, r"k=0: must lie in \[1, 23\]"),
        ({"k": K + 1}, r"k=24: must lie in \[1, 23\]"),
        ({"table": torch.ones(0, D)}, r"k=1: must lie in \[1, 0\]"),
        ({"table": torch.ones(K, D + 1)}, r"\(23, 6\)"),
        ({"query": torch.ones(D)}, r"\(N, D\)"),
        ({"query_ids": torch.arange(N)}, "both, or neither"),
        ({"table_ids": torch.arange(K)}, "both, or neither"),
        ({"query_ids": torch.arange(N - 1), "table_ids": torch.arange(K)}, r"query_ids.*\(5,\)"),
        ({"query_ids": torch.arange(N), "table_ids": torch.arange(N)}, r"table_ids.*\(6,\)"),
    ],
)
def test_refuses(change: dict[str, object], message: str) -> None:
    query, table = inputs()
    with pytest.raises(ValueError, match=message):
        nearest_rows(**({"query": query, "table": table} | change))  # type: ignore[arg-type]


def peak_bytes(rows: int, k: int) -> int:
    """Largest sum of what is allocated at a time in a look-up with ids."""
    query, table = torch.randn(64, 32), torch.randn(rows, 32)
    ids = {"query_ids": torch.arange(64), "table_ids": torch.arange(rows)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        nearest_rows(query, table, k, **ids)
    held = most = 0
    events: list = trace.profiler.kineto_results.events()  # type: ignore[type-arg, union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("k", [1, 3])
def test_memory_does_not_grow_with_the_table(k: int) -> None:
    small, large = peak_bytes(8192, k), peak_bytes(65536, k)
    assert small > 2**20, "the tile itself must be seen"
    assert large <= 1.1 * small
