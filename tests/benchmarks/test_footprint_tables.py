"""What the footprint's tables are made of, without processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.footprint import formulas
from benchmarks.footprint.__main__ import DOCS, SCALE, updated
from benchmarks.footprint.cases import IMAGENET, RESNET18, RESNET50, Case, cases
from benchmarks.footprint.formulas import TILE, Sizes, Traffic, perceptron
from benchmarks.footprint.tables import FORMULAS, document, scale
from benchmarks.interleaved import peak_bytes
from solo_ext import host
from solo_ext.clustering import e_step
from solo_ext.kernels import dispatch
from solo_ext.kernels.nearest_rows import nearest_rows
from solo_ext.losses.contrastive import Mixing, batch_of_views, contrastive
from solo_ext.losses.info_nce import proto_nce_terms
from solo_ext.losses.margin import arcface_loss_func
from solo_ext.losses.mochi import draw_mixes
from solo_ext.losses.protocpc import protocpc_step
from solo_ext.losses.seed import seed_terms
from solo_ext.memory.heads import ClassWeights, projector
from solo_ext.methods import METHODS, load_all

BATCH, DIM = 128, 64
S = Sizes(0, BATCH, 1, DIM, tile=TILE["cpu"])


def test_sent() -> None:
    """Of two processes each sends half of a sum twice, and its part once; alone, nothing."""
    traffic = Traffic(all_reduce=100, all_gather=10, broadcast=1)
    assert traffic.sent(2) == 100 + 10 + 1
    assert traffic.sent(8) == 175 + 70 + 1
    assert Traffic(100, 10).sent(1) == 0


@pytest.mark.parametrize("norm", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("widths", [(7, 3), (7, 5, 3), (7, 5, 5, 3)])
def test_heads(widths: tuple[int, ...], norm: tuple[bool, bool]) -> None:
    hidden = widths[1] if len(widths) > 2 else 0
    made = projector(
        widths[0],
        hidden,
        widths[-1],
        batch_norm=norm[0],
        layers=len(widths) - 1,
        last_batch_norm=norm[1],
    )
    expected = perceptron(*widths, batch_norm=norm[0], last_batch_norm=norm[1])
    assert sizes_of(made) == expected


def sizes_of(network: nn.Module) -> tuple[int, int]:
    """Parameters, and bytes of buffers."""
    buffers = sum(b.numel() * b.element_size() for b in network.buffers())
    return sum(p.numel() for p in network.parameters()), buffers


@pytest.mark.parametrize(("name", "expected"), [("resnet50", RESNET50), ("resnet18", RESNET18)])
def test_backbones(loaded: host.Host, name: str, expected: tuple[int, int, int]) -> None:
    from torchvision import models

    with torch.device("meta"):
        made = getattr(models, name)()
    width, made.fc = made.fc.in_features, nn.Identity()
    assert (width, *sizes_of(made)) == expected


def test_tiles_are_those_of_the_kernels() -> None:
    assert dispatch._TILE_BYTES == TILE


def test_every_method_has_its_lines() -> None:
    load_all()
    assert {case.method for case in cases()} == set(FORMULAS) == set(METHODS)


def value(text: str, symbols: dict[str, int]) -> int:
    """Of a formula as it stands in the table, its factors side by side."""
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    return int(eval(product, {"__builtins__": {}}, symbols))


SYMBOLS: dict[str, dict[str, int]] = {
    "debiased": {},
    "hard_negative": {},
    "mochi": {"Q": 65536},
    "nnclr_symmetric": {"Q": 98304, "k": 1},
    "metric": {"K": 1000},
    "pcl": {"Q": 16384, "ΣK": 175_000, "M": 3, "d": 1},
    "protocpc": {"K": 65536, "U": 2, "i": 3},
    "seed": {"Q": 65536},
    "protoseed": {"K": 65536, "i": 3},
}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.method)
def test_lines_say_what_the_formulas_compute(case: Case) -> None:
    """At the sizes of the shipped configs."""
    s = case.sizes(IMAGENET)
    symbols = {"n": s.images, "N": s.batch, "R": s.processes, "D": s.dim, "V": s.views}
    symbols |= SYMBOLS[case.method]
    state, collectives, _ = FORMULAS[case.method]
    if collectives == "the same":
        collectives = FORMULAS["debiased"][1]
    parts = [p.partition(" ") for p in collectives.partition(";")[0].split(", ")]
    said = {kind: value(text, symbols) for kind, _, text in parts if text}
    found = case.footprint(s)
    # Shares are rounded up.
    assert found.state == pytest.approx(value(state, symbols), abs=16)
    assert found.step == Traffic(said.get("sum", 0), said.get("gather", 0))


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
@pytest.mark.parametrize("granularities", [1, 3])
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
    s, hierarchical = Sizes(20_000, BATCH, 1, 8), backend == "hierarchical"
    expected = formulas.e_step_memory(s, counts, hierarchical=hierarchical)[1]
    # Sample numbers and the clusters as they were are the caller's.
    expected -= (formulas.LONG + formulas.INT * granularities) * s.share
    # How much is held at once depends on how many rows change their cluster.
    assert (0.95 if backend == "torch" else 0.7) < (most[1] - most[0]) / expected < 1.05


QUEUE, CLASSES = unit(16384, DIM), ClassWeights(5000, DIM)
TEMPORARIES: dict[str, tuple[Callable[[], None], int]] = {
    "in batch": (in_batch, formulas.in_batch(S._replace(batch=1024)).temporary),
    "mochi": (mixed, formulas.mochi(S, len(QUEUE), 256).temporary),
    "nnclr_symmetric": (looked_up, formulas.nearest_neighbours(S, len(QUEUE)).temporary),
    "metric": (of_classes, formulas.metric(S, [5000]).temporary),
    "pcl": (prototypes, formulas.pcl(S, len(QUEUE), [5000]).temporary),
    "protocpc": (assigned, formulas.assignments(S, 8192, targets=2).temporary),
    "seed": (distilled, formulas.seed(S, len(QUEUE)).temporary),
}


@pytest.mark.parametrize("name", TEMPORARIES)
def test_temporaries(name: str) -> None:
    """Within half of what they say."""
    work, expected = TEMPORARIES[name]
    work()
    assert 0.5 < peak_bytes(work) / expected < 1.5


def test_pages_have_the_tables() -> None:
    """As ``python -m benchmarks.footprint`` writes them."""
    for page, tables in ((DOCS, document()), (SCALE, scale())):
        assert updated(page.read_text(), tables) == page.read_text()
    assert updated(DOCS.read_text(), scale()) != DOCS.read_text()
