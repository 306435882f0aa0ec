"""Class weights of the margin losses."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from solo_ext.losses import arcface_loss_func
from solo_ext.memory.heads import ClassWeights


def test_gives_cosines() -> None:
    torch.manual_seed(0)
    head, x = ClassWeights(4, 3).double(), 7 * torch.randn(5, 3, dtype=torch.float64)
    cosine = head(x)
    expected = F.cosine_similarity(x.unsqueeze(1), head.weight.unsqueeze(0), dim=2)
    torch.testing.assert_close(cosine, expected)
    with torch.no_grad():
        head.weight.mul_(100)
    torch.testing.assert_close(head(x), cosine)
    assert {n for n, _ in head.named_parameters()} == {"weight"}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_leaves_cosines_in_single_precision(half: torch.dtype) -> None:
    torch.manual_seed(0)
    head, x = ClassWeights(4, 3), torch.randn(5, 3).to(half).requires_grad_()
    with torch.autocast("cpu", dtype=half):
        cosine = head(x)
    assert torch.equal(cosine, head(x.float()))
    assert cosine.dtype == torch.float32
    arcface_loss_func(cosine, torch.zeros(5).long()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("rows", ["aligned", "opposite", "zero"])
def test_extreme_features_train(rows: str) -> None:
    torch.manual_seed(0)
    head = ClassWeights(3, 4)
    factor = {"aligned": 5, "opposite": -5, "zero": 0}[rows]
    x = (factor * head.weight.detach()).requires_grad_()
    arcface_loss_func(head(x), torch.arange(3)).backward()
    assert x.grad is not None
    assert head.weight.grad is not None
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


def test_run_on_meta() -> None:
    assert ClassWeights(4, 3).to("meta")(torch.empty(5, 3, device="meta")).is_meta


def overlap(old: Tensor, new: Tensor, match: list[int]) -> int:
    """Number of samples that stay in their class."""
    return sum(match[b] == a for a, b in zip(old.tolist(), new.tolist(), strict=True))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 5))
def test_no_matching_keeps_more_samples(data: st.DataObject, count: int) -> None:
    ids = st.integers(0, count - 1)
    pairs = data.draw(st.lists(st.tuples(ids, ids), max_size=25))
    old, new = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    head = ClassWeights(count, 3)
    before = head.weight.detach().clone()
    match = head.rematch_(old, new)
    assert torch.equal(head.weight, before[match])
    best = max(overlap(old, new, list(p)) for p in permutations(range(count)))
    assert overlap(old, new, match.tolist()) == best


def test_optimizer_state_moves_along() -> None:
    """Training goes on as though the classes had been renumbered from the start."""
    match = torch.tensor([2, 0, 3, 1])
    x, old = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
    # Old class match[c] is the new class c.
    new = match.argsort()[old]
    ended = []
    for early in (True, False):
        torch.manual_seed(0)
        head = ClassWeights(4, 3)
        place = head.weight.data_ptr()
        optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
        for number in range(6):
            if number == (0 if early else 3):
                state = {**optimizer.state[head.weight], "row": torch.arange(3.0), "lr": 0.1}
                assert torch.equal(head.rematch_(old, new, state), match)
                assert state["row"].tolist() == [0, 1, 2]
            optimizer.zero_grad()
            labels = new if early or number >= 3 else old
            arcface_loss_func(head(x), labels, 8.0).backward()
            optimizer.step()
        assert head.weight.data_ptr() == place
        ended.append(head.weight.detach())
    torch.testing.assert_close(*ended)
