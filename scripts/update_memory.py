"""Writes the tables of docs/project/memory.md and docs/guides/scale.md.

python scripts/update_memory.py

The formulas stand in the tables as they are evaluated. Tests compare state and traffic with real
runs of two processes, to the byte, and temporaries with measured peaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from solo_ext.config.compose import compose
from solo_ext.core.draws import LARGE
from solo_ext.core.files import write_text

ROOT = Path(__file__).resolve().parents[1]
MEMORY, SCALE = ROOT / "docs" / "project" / "memory.md", ROOT / "docs" / "guides" / "scale.md"
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"

Symbols = Mapping[str, float]
"""Sizes by the letters of docs/project/memory.md; T are the bytes of a tile."""
TILE = 2**25
"""On a GPU, as in ``solo_ext.kernels.dispatch``."""
RELOCATED = 96
"""Clusters that a step of a warm k-means splits on trial, as in ``solo_ext.clustering``."""


class Formula(NamedTuple):
    """Of a method, on every process, in bytes.

    Attributes:
        state: of its state buffers, which checkpoints hold.
        gather: of its own parts that all processes get in a step; DDP's traffic comes on top.
        sum: of tensors that are summed in a step.
        temporary: what its loss holds at a time, about.
    """

    state: str
    gather: str
    sum: str
    temporary: str


_IN_BATCH = Formula("0", "4 V N D", "4 V R N D", "16 V R N D + 2 min(4 T, 4 V² R N²)")
FORMULAS = {
    "debiased": _IN_BATCH,
    "hard_negative": _IN_BATCH,
    "mochi": Formula("4 V Q D", "4 V N D", "0", "min(12 T, 8 N max(Q, s D))"),
    "nnclr_symmetric": Formula(
        "(4 D + 16) Q",
        "(4 V (1 + k) D + 4 D + 16) N",
        "4 V R N D",
        "8 V (1 + k) R N D + 2 max(T, min(4 T, 4 R N²))",
    ),
    "metric": Formula("(8 D + 4) K + 4 n / R", "8 N", "4 R N", "12 V N K"),
    "pcl": Formula("4 d Q D + (8 D + 4) ΣK + 4 M n / R", "(4 d D + 8) N", "4 M R N", "5 T / 2"),
    "protocpc": Formula("4 K", "0", "4 U (i + 1) K", "4 U N K + min(32 T, 4 N K) + 4 K D"),
    "seed": Formula("4 Q D", "4 N D", "0", "T"),
    "protoseed": Formula("4 K", "0", "4 (i + 1) K", "4 N K + min(32 T, 4 N K) + 4 K D"),
}
BANK = "(4 D + 1) n / R"
"""State of a bank of features."""
WITH_BANK = {"metric": "(4 D + 8) N", "pcl": "8 N"}
"""What is gathered more with ``e_step: bank``."""
LISTING = "(c + 4) n + n / 8"
"""Names of c characters with the one that ends each, targets, and where every 64th name begins."""


def value(text: str, symbols: Symbols) -> float:
    """Of a formula, whose factors stand side by side.

    >>> value("2 min(4 T, N²)", {"T": 1, "N": 3})
    8
    """
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text).replace("²", "**2")
    return eval(product, {"__builtins__": {}, "min": min, "max": max}, dict(symbols))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process gives to each kind of collective."""

    all_reduce: float = 0
    all_gather: float = 0
    broadcast: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.all_reduce + other.all_reduce,
            self.all_gather + other.all_gather,
            self.broadcast + other.broadcast,
        )

    def times(self, count: int) -> Traffic:
        """That of ``count`` such calls."""
        return Traffic(count * self.all_reduce, count * self.all_gather, count * self.broadcast)

    def sent(self, processes: float) -> float:
        """Bytes that leave a process where collectives run in rings, as NCCL's do for large ones.

        A sum goes round twice, ``2 (R - 1) / R`` of its bytes; of an all-gather each process passes
        on R - 1 parts; a broadcast is passed on once.
        """
        others = processes - 1
        return 2 * others / processes * self.all_reduce + others * self.all_gather + self.broadcast


def state(method: str, symbols: Symbols, bank: bool = False) -> float:
    """Bytes of a method's state."""
    return value(FORMULAS[method].state, symbols) + (value(BANK, symbols) if bank else 0)


def step(method: str, symbols: Symbols, bank: bool = False) -> Traffic:
    """A method's own collectives in a training step; those of DDP come on top."""
    formula = FORMULAS[method]
    more = value(WITH_BANK[method], symbols) if bank else 0
    return Traffic(value(formula.sum, symbols), value(formula.gather, symbols) + more)


def e_step(
    symbols: Symbols,
    counts: Sequence[int],
    iterations: int,
    *,
    embedder: int = 0,
    warm: bool = False,
    embeds: bool = True,
    bank: bool = False,
    matched: bool = False,
) -> Traffic:
    """k-means of all granularities with the torch backend, if no iteration is spared.

    An iteration sums ``8 K (D + 1)`` bytes. To be compared with labels, each granularity's clusters
    are gathered, of at most 2^24 images. Processes meet, with 8 bytes, before every sum or
    broadcast and at the end of what an error of one of them ends for all.

    Args:
        symbols: n, R and D.
        counts: K of each granularity.
        iterations: of k-means.
        embedder: bytes of the batch norm of the networks that embed.
        warm: from the means of the last E-step, with relocation.
        embeds: images are passed through the networks, at most 15 batches of each process.
        bank: features come from the bank as far as it has them.
        matched: a margin loss's weights follow the clusters, by a table of ``8 K^2``.
    """
    n, r, d = (int(symbols[name]) for name in "nRD")
    total = Traffic(all_reduce=8 * ((4 if embeds else 2) + bank), broadcast=embedder)
    share, every = math.ceil(n / r), math.ceil(n / LARGE)
    compared = math.ceil(share / every)
    told = Traffic(all_reduce=32, all_gather=4 * compared)
    # Of all granularities at once: what the rows are, and the end of k-means.
    total += Traffic(all_reduce=48, all_gather=8) + Traffic(8)
    for k in counts:
        means, tried = 4 * k * d, min(RELOCATED, k)
        one = Traffic(all_reduce=8 * k * d + 8 * k + 32)
        start = Traffic(broadcast=means) if warm else Traffic(all_reduce=means)
        if warm:
            halves = 3 * tried * (8 * d + 8)
            one += Traffic(16 * k + halves + 80, broadcast=32 * tried)
        runs = start + Traffic(8) + one.times(iterations) + Traffic(all_reduce=32)
        placed = Traffic(all_reduce=16 * k + 28) + told
        total += runs + placed + Traffic(8 * k**2 if matched else 0)
    return total


def e_step_memory(
    symbols: Symbols, granularities: int, *, hierarchical: bool = False
) -> tuple[float, float]:
    """Bytes in an E-step: a process's share of the features, and the most of other numbers a row.

    ``4 D n / R``, none of it on the device with ``features_dir``, and ``(36 + 16 M) n / R``: which
    samples they are, the clusters as they were, as k-means finds them with distances, and the 28
    bytes of a row that k-means needs for a moment, relocation included. Hierarchical k-means needs
    up to 22 more. Tiles, and the block that features are read in, come on top.
    """
    given = {**symbols, "M": granularities, "moment": 50 if hierarchical else 28}
    return value("4 D n / R", given), value("(8 + moment + 16 M) n / R", given)


CONFIGS = (
    *("imagenet100/debiased", "imagenet100/hard_negative", "imagenet/mochi"),
    *("imagenet/nnclr_symmetric", "imagenet100/metric", "imagenet/pcl", "imagenet/protocpc"),
    *("imagenet/seed_moco_v2", "imagenet/protoseed_moco_v2"),
)
"""Of each method one; those without a config of ImageNet by that of ImageNet-100."""
IMAGENET, BILLION = {"n": 1_281_167, "R": 8, "N": 32}, {"n": 10**9, "R": 128, "N": 32}
COUNTS, MARGINS = (25_000, 50_000, 100_000), (1000,)
"""PCL's granularities and the metric config's clusters."""
COLD, WARM = 20, 5
NODE = 8
"""GPUs of a node."""
NAME = len("n01440764/n01440764_10026.JPEG") + 1


def method_of(config: str) -> str:
    """The method of one of :data:`CONFIGS`."""
    return config.partition("/")[2].removesuffix("_moco_v2")


def sizes(config: str) -> dict[str, float]:
    """The letters of a shipped config; two crops are embedded."""
    given: dict[str, Any] = compose(config)["method_kwargs"]
    clusters, support, mixing = (
        given.get(key) or {} for key in ("clusters", "support_set", "mixing")
    )
    counts = given.get("num_prototypes") or clusters.get("num_prototypes") or 0
    counts = [counts] if isinstance(counts, int) else list(counts)
    return {
        **{"V": 2, "U": 2, "d": 1, "i": 3, "T": TILE},
        **{"K": counts[0], "ΣK": sum(counts), "M": len(counts)},
        # A distilled student has the width of its teacher's head.
        "D": given.get("proj_output_dim") or 128,
        "Q": given.get("queue_size") or support.get("size") or 0,
        "k": support.get("top_k") or 1,
        "s": mixing.get("num_pair_mixes") or 0,
    }


def pages() -> dict[Path, str]:
    """The pages with their tables."""
    memory = _formulas(), _numbers(), _e_step()
    return {
        MEMORY: updated(MEMORY.read_text(), "\n\n".join(memory)),
        SCALE: updated(SCALE.read_text(), "\n\n".join(_scale())),
    }


def updated(page: str, tables: str) -> str:
    """The page with these tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"a page needs one line {BEGIN!r}, and one {END!r} after it"
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def amount(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            number = count / size
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{count:.0f} B"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _formulas() -> str:
    rows = []
    for name, formula in FORMULAS.items():
        gather = formula.gather
        if name in WITH_BANK:
            gather += f"; `bank`: {WITH_BANK[name]} more"
        rows.append([f"`{name}`", formula.state, gather, formula.sum, formula.temporary])
    head = ["", "state", "gathered in a step", "summed in a step", "temporary of the loss"]
    return _table(head, rows)


def _numbers() -> str:
    rows = []
    for config in CONFIGS:
        row, method = [f"`{config}`"], method_of(config)
        for on in (IMAGENET, BILLION):
            given = {**sizes(config), **on}
            temporary = value(FORMULAS[method].temporary, given)
            own = step(method, given).sent(on["R"])
            row += [amount(x) for x in (state(method, given), temporary, own)]
        rows.append(row)
    columns = ["state", "temporary", "sent in a step"]
    return _table(["config", *columns, *(f"{c}, 10^9" for c in columns)], rows)


def _sent(given: Symbols, counts: Sequence[int], matched: bool = False) -> tuple[float, float]:
    """Of a cold and of a warm E-step."""
    cold = e_step(given, counts, COLD)
    warm = e_step(given, counts, WARM, warm=True, matched=matched)
    return cold.sent(given["R"]), warm.sent(given["R"])


def _e_step() -> str:
    rows = []
    machines = {"ImageNet-1k, 8 GPUs": IMAGENET, "10^9 images, 128 GPUs": BILLION}
    for name, counts in (("pcl", COUNTS), ("metric", MARGINS)):
        for machine, on in machines.items():
            given = {**on, "D": 128}
            features = *e_step_memory(given, len(counts)), *_sent(given, counts, name == "metric")
            rows.append([f"`{name}`", machine, *map(amount, (*features, value(BANK, given)))])
    head = ["E-step", "", "features", "numbers", "sent, cold", "sent, warm", "`bank`"]
    return _table(head, rows)


def _scale() -> Iterator[str]:
    """What grows with the number of images, of PCL's ImageNet config."""
    letters = sizes("imagenet/pcl")
    host, device = [], []
    for power in range(6, 10):
        n = 10**power
        for gpus in (8, 64, 512):
            given = {**letters, "n": n, "R": gpus, "N": 32}
            features, numbers = e_step_memory(given, len(COUNTS))
            held = state("pcl", given)
            # The clusters as they were are part of the state.
            on_disk = held + numbers - value("4 M n / R", given)
            row = held, on_disk + features, on_disk, *_sent(given, COUNTS)
            device.append([f"10^{power}", str(gpus), *map(amount, row)])
        files, large = value(LISTING, {"n": n, "c": NAME}), n > LARGE
        own = 0 if large else files + 8 * n
        of_node = files if large else NODE * files
        host.append([f"10^{power}", *map(amount, (files, of_node, own, NODE * 180 * n))])
    own = "a process's own, with the order"
    yield _table(["images", "listing", "of a node", own, "lists would take"], host)
    peaks = "E-step's peak", "`features_dir`"
    head = ["images", "GPUs", "state", *peaks, "E-step sends, cold", "warm"]
    yield _table(head, device)


if __name__ == "__main__":
    for page, text in pages().items():
        write_text(page, text)
