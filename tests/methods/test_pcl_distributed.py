"""Two processes agree with one: the bank under DDP, and whole runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from solo_ext.config.compose import compose
from solo_ext.config.schema import RunConfig
from solo_ext.data.views import EpochSampler
from solo_ext.lab.training.prepare import prepare
from tests.scripts import run_script

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

SMALL = [
    "max_epochs=2",
    # bfloat16 rounds more than two batches and one may differ by.
    "precision=32-true",
    "method_kwargs.warmup_epochs=0",
    "method_kwargs.kmeans.iterations=5",
    "backbone.kwargs.channels=[8,8,8,8]",
    "backbone.kwargs.stem_width=8",
    "data.fraction=0.2",
    "accelerator=cpu",
    "limit_train_batches=2",
    # Validation would bring the ranks' batch norm into line again.
    "data.val_path=null",
]
SAMPLES = 280


class Run(NamedTuple):
    """What the ranks noted at each epoch's first batch, and the checkpoint."""

    ranks: list[list[dict[str, Any]]]
    state: dict[str, Any]
    config: RunConfig


def run(folder: Path, devices: int, *overrides: str) -> Run:
    """Trains the same run in one process or in two."""
    folder.mkdir()
    words = [*SMALL, f"devices={devices}", f"optimizer.batch_size={60 // devices}", *overrides]
    if devices > 1:
        words.append("strategy=ddp")
    environment = {**os.environ, "SOLO_EXT_DATA": str(folder.parent)}
    run_script(HERE / "pcl_run.py", folder, *words, environment=environment)
    notes = [torch.load(folder / f"rank-{rank}.pt") for rank in range(devices)]
    (checkpoint,) = (folder / "run").glob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOLO_EXT_DATA", str(folder.parent))
        return Run(notes, state, prepare(compose("digits/pcl", words)).run)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    root = tmp_path_factory.mktemp("exact")
    return {devices: run(root / str(devices), devices) for devices in (1, 2)}


@pytest.fixture(scope="module")
def drawn_and_banked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("bank")
    drawn = ("method_kwargs.num_prototypes=[50,60]", "method_kwargs.num_negatives=9")
    return run(root / "2", 2, "method_kwargs.e_step=bank", "max_epochs=1", *drawn)


def test_run_of_two_ranks_clusters_alike(exact: dict[int, Run]) -> None:
    """Before the first step: the same weights, hence the same features and clusters."""
    (alone,), both = exact[1].ranks, exact[2].ranks
    assert alone[0]["assignments"].shape == (3, SAMPLES)
    for rank, notes in enumerate(both):
        assert notes[0]["epoch"] == 0
        assert torch.equal(notes[0]["assignments"], alone[0]["assignments"][:, rank::2])
        for one, two in zip(notes[0]["means"], alone[0]["means"], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_ranks_cluster_what_one_network_embeds(exact: dict[int, Run]) -> None:
    """Running statistics of batch norm, which the ranks' batches moved apart, included."""
    first, second = (notes[1] for notes in exact[2].ranks)
    assert first["epoch"] == second["epoch"] == 1
    assert all(map(torch.equal, first["means"], second["means"]))
    for one, two in zip(first["weights"], second["weights"], strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), key
    before = exact[2].ranks[0][0]["weights"][0]
    assert not torch.equal(before["bn1.running_mean"], first["weights"][0]["bn1.running_mean"])


def test_ddp_leaves_state_alone(exact: dict[int, Run]) -> None:
    """What a rank has written is still there after forward passes."""
    for rank, notes in enumerate(exact[2].ranks):
        assert notes[-1]["probe"].tolist() == [[1 + rank]] * 2


def test_bank_and_queue_hold_the_keys_of_both_ranks(drawn_and_banked: Run) -> None:
    state, seed = drawn_and_banked.state, drawn_and_banked.config.seed
    shares = [[s.sample for s in EpochSampler(SAMPLES, seed, 2, rank)][:60] for rank in (0, 1)]
    filled = state["bank.filled"].nonzero().squeeze(1).tolist()
    assert filled == sorted(shares[0] + shares[1])
    norms = state["bank.value"].norm(dim=1)
    torch.testing.assert_close(norms, state["bank.filled"].float())
    # Step by step, rank by rank; the bank holds the mean of both views' keys.
    order = [shares[rank][step * 30 : step * 30 + 30] for step in (0, 1) for rank in (0, 1)]
    keys = [state[f"queues.{view}.value"][:120] for view in (0, 1)]
    mean = torch.nn.functional.normalize(torch.stack(keys).mean(0), dim=1)
    rows = [sample for part in order for sample in part]
    torch.testing.assert_close(state["bank.value"][rows], mean)
    assert state["queues.0._extra_state"].tolist() == [120, 120, 2]


def test_every_rank_and_step_draws_its_own_negatives(drawn_and_banked: Run) -> None:
    lots = [lot for notes in drawn_and_banked.ranks for lot in notes[0]["lots"]]
    assert len(set(lots)) == len(lots) == 4
