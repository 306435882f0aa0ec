"""What the tables of memory and traffic are made of, without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import peak_bytes
from scripts.update_memory import (
    CONFIGS,
    FORMULAS,
    TILE,
    Traffic,
    e_step_memory,
    method_of,
    pages,
    value,
)
from solo_ext.clustering import e_step
from solo_ext.kernels import dispatch
from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.losses.contrastive import Mixing, batch_of_views, contrastive
from solo_ext.losses.info_nce import proto_nce_terms
from solo_ext.losses.margin import arcface_loss_func
from solo_ext.losses.mochi import draw_mixes
from solo_ext.losses.protocpc import protocpc_step
from solo_ext.losses.seed import seed_terms
from solo_ext.memory.heads import ClassWeights
from solo_ext.methods import METHODS, load_all

BATCH, DIM = 128, 64
S = {"N": BATCH, "R": 1, "D": DIM, "V": 2, "U": 2, "k": 1, "T": dispatch._TILE_BYTES["cpu"]}


def test_sent() -> None:
    """Of two processes each sends half of a sum twice, and its part once; alone, nothing."""
    traffic = Traffic(all_reduce=100, all_gather=10, broadcast=1)
    assert traffic.sent(2) == 100 + 10 + 1
    assert traffic.sent(8) == 175 + 70 + 1
    assert Traffic(100, 10).sent(1) == 0


def test_a_tile_is_that_of_the_kernels() -> None:
    assert dispatch._TILE_BYTES["cuda"] == TILE


def test_every_method_has_its_lines() -> None:
    load_all()
    assert set(map(method_of, CONFIGS)) == set(FORMULAS) == set(METHODS)


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape), dim=-1)


def learned(*shape: int) -> Tensor:
    return unit(*shape).requires_grad_()


def in_batch() -> None:
    batch = batch_of_views((learned(1024, DIM), learned(1024, DIM)))
    contrastive(**batch._asdict(), temperature=0.5).loss.backward()


def mixed() -> None:
    query = learned(BATCH, DIM)
    mixing = Mixing(256, draw_mixes(query, 256, 256, 32), False)
    args = query, unit(BATCH, 1, DIM), QUEUE
    contrastive(*args, mixing=mixing, temperature=0.2).loss.backward()


def prototypes() -> None:
    table, ids = QUEUE[:5000], torch.randint(0, 5000, (BATCH,))
    views = learned(2, BATCH, DIM)
    proto_nce_terms(views, [table], [torch.full((5000,), 0.2)], ids[None])[0].backward()


def assigned() -> None:
    table = QUEUE[:8192].clone().requires_grad_()
    views = learned(2, BATCH, DIM), unit(2, BATCH, DIM)
    protocpc_step(*views, table, torch.ones(8192)).loss.backward()


def distilled() -> None:
    seed_terms(learned(BATCH, DIM), unit(BATCH, DIM), QUEUE, 0.2, 0.01).loss.backward()


def of_classes() -> None:
    x, targets = learned(2 * BATCH, DIM), torch.randint(0, 5000, (2 * BATCH,))
    arcface_loss_func(CLASSES(x), targets).backward()


def looked_up() -> None:
    nearest_rows(unit(2 * BATCH, DIM), QUEUE)


@pytest.mark.parametrize("backend", ["torch", "hierarchical"])
@pytest.mark.parametrize("granularities", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_numbers_of_an_e_step(
    backend: str, granularities: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each row takes beside its features, with relocation and in steps that move few means."""
    for name, size in (("lloyd._AT_ONCE", 2**11), ("rows._BLOCK_BYTES", {"cpu": 2**16})):
        monkeypatch.setattr(f"solo_ext.clustering.{name}", size)
    modes, counts = torch.randn(40, 8), [50] * granularities
    most = []
    for count in (20_000, 40_000):
        x, ids = modes[torch.arange(count) % 40] + 0.3 * torch.randn(count, 8), torch.arange(count)
        options: dict[str, Any] = {"temperature": 0.2, "iterations": 8, "backend": backend}
        options["init"] = [x[:50].clone()] * granularities
        most.append(peak_bytes(lambda: e_step(x, ids, counts, **options)))  # noqa: B023
    sizes = {"n": 20_000, "R": 1, "D": 8}
    expected = e_step_memory(sizes, granularities, hierarchical=backend == "hierarchical")[1]
    # Sample numbers and the clusters as they were are the caller's.
    expected -= (8 + 4 * granularities) * 20_000
    # How much is held at once depends on how many rows change their cluster.
    assert (0.95 if backend == "torch" else 0.7) < (most[1] - most[0]) / expected < 1.05


QUEUE, CLASSES = unit(16384, DIM), ClassWeights(5000, DIM)
TEMPORARIES: dict[str, tuple[Callable[[], None], dict[str, int]]] = {
    "debiased": (in_batch, {"N": 1024}),
    "mochi": (mixed, {"Q": len(QUEUE), "s": 256}),
    "nnclr_symmetric": (looked_up, {}),
    "metric": (of_classes, {"K": 5000}),
    "pcl": (prototypes, {}),
    "protocpc": (assigned, {"K": 8192}),
    "seed": (distilled, {}),
}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_temporaries(name: str) -> None:
    """Within half of what they say."""
    work, sizes = TEMPORARIES[name]
    work()
    assert 0.5 < peak_bytes(work) / value(FORMULAS[name].temporary, {**S, **sizes}) < 1.5


def test_pages_have_the_tables() -> None:
    """As ``python scripts/update_memory.py`` writes them."""
    for page, text in pages().items():
        assert page.read_text() == text, f"{page}: run scripts/update_memory.py"
