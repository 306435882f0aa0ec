"""The order of training samples: a function of seed and epoch, enterable anywhere."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from solo_ext.data.views import EpochSampler, SampleKey


def order(
    size: int,
    seed: int = 0,
    *,
    epoch: int = 0,
    start: int = 0,
    replicas: int | None = None,
    rank: int | None = None,
) -> list[int]:
    """Returns the samples of one epoch of one rank."""
    sampler = EpochSampler(size, seed, replicas, rank)
    sampler.set_epoch(epoch)
    sampler.start = start
    keys = list(sampler)
    assert all(isinstance(key, SampleKey) and key.epoch == epoch for key in keys)
    return [key.sample for key in keys]


@given(size=st.integers(1, 60), seed=st.integers(0, 2**62), epoch=st.integers(0, 10_000))
def test_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    samples = order(size, seed, epoch=epoch)
    assert sorted(samples) == list(range(size))
    assert len(EpochSampler(size, seed)) == size
    assert order(size, seed, epoch=epoch) == samples


def test_differs_by_epoch_and_seed() -> None:
    orders = [order(40, seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert order(40) != list(range(40))


@given(
    size=st.integers(1, 60),
    replicas=st.integers(1, 7),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 5),
)
def test_ranks_share_the_epoch_out(size: int, replicas: int, seed: int, epoch: int) -> None:
    shares = [order(size, seed, epoch=epoch, replicas=replicas, rank=r) for r in range(replicas)]
    together = list(itertools.chain.from_iterable(shares))
    assert {len(share) for share in shares} == {size // replicas}
    assert len(EpochSampler(size, seed, replicas, 0)) == size // replicas
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(size))


def test_ranks_together_are_one_process() -> None:
    """A batch of one process is that of two, whatever their number."""
    alone = order(20, 3, epoch=2)
    shares = [order(20, 3, epoch=2, replicas=2, rank=rank) for rank in range(2)]
    assert [sample for pair in zip(*shares, strict=True) for sample in pair] == alone


def test_what_is_left_out_changes() -> None:
    left_out = {
        sample
        for epoch in range(60)
        for sample in set(range(7))
        - {s for rank in range(2) for s in order(7, epoch=epoch, replicas=2, rank=rank)}
    }
    assert left_out == set(range(7))


@given(size=st.integers(1, 40), replicas=st.integers(1, 3), data=st.data())
def test_starts_in_the_middle(size: int, replicas: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size // replicas))
    rank = data.draw(st.integers(0, replicas - 1))
    whole = order(size, replicas=replicas, rank=rank, epoch=1)
    assert order(size, replicas=replicas, rank=rank, epoch=1, start=start) == whole[start:]


def test_set_epoch_keeps_the_place_within_the_current_one() -> None:
    """A trainer names the epoch again when it resumes within it."""
    sampler = EpochSampler(10, 0)
    sampler.epoch, sampler.start = 3, 4
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.start) == (3, 4)
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.start) == (4, 0)


def test_an_epoch_under_way_keeps_its_number() -> None:
    sampler = EpochSampler(10, 0)
    under_way = iter(sampler)
    keys = [next(under_way)]
    sampler.set_epoch(1)
    keys += under_way
    assert [key.sample for key in keys] == order(10)
    assert {key.epoch for key in keys} == {0}


def test_takes_the_ranks_of_a_late_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = EpochSampler(11, 0)
    assert len(sampler) == 11
    monkeypatch.setattr("solo_ext.core.distributed.world_size", lambda: 3)
    monkeypatch.setattr("solo_ext.core.distributed.rank", lambda: 2)
    assert len(sampler) == 3
    assert [key.sample for key in sampler] == order(11, replicas=3, rank=2)


def test_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = order(20)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert order(20) == first
