"""The tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.footprint import formulas
from benchmarks.footprint.cases import BILLION, IMAGENET, TEACHER, Case, Machines, cases
from benchmarks.footprint.formulas import FLOAT, Sizes
from solo_ext.core.draws import LARGE

BEGIN, END = "<!-- footprint: begin -->", "<!-- footprint: end -->"
COUNTS, MARGINS, DIM = (25_000, 50_000, 100_000), (1000,), 128
"""PCL's granularities and the metric config's clusters."""
COLD, WARM = 20, 5
DEVICE = 80e9
FORMULAS = {
    "debiased": ("0", "gather 4 V N D, sum 4 V R N D", "16 V R N D + 2 min(134 MB, 4 V² R N²)"),
    "hard_negative": ("0", "the same", "the same"),
    "mochi": ("4 V Q D", "gather 4 V N D", "8 N max(Q, s D), at most 403 MB"),
    "nnclr_symmetric": (
        "(4 D + 16) Q",
        "gather (4 V (1 + k) D + 4 D + 16) N, sum 4 V R N D",
        "8 V (1 + k) R N D + 67 to 268 MB",
    ),
    "metric": (
        "(8 D + 4) K + 4 n / R",
        "gather 8 N, sum 4 R N; `bank`: gather (4 D + 8) N more",
        "12 V N K",
    ),
    "pcl": (
        "4 d Q D + (8 D + 4) ΣK + 4 M n / R",
        "gather (4 d D + 8) N, sum 4 M R N; `bank`: gather 8 N more",
        "84 MB",
    ),
    "protocpc": ("4 K", "sum 4 U (i + 1) K", "4 U N K + min(1.1 GB, 4 N K) + 4 K D"),
    "seed": ("4 Q D", "gather 4 N D", "34 MB"),
    "protoseed": ("4 K", "sum 4 (i + 1) K", "the same, U = 1"),
}


NODE = 8
"""GPUs of a node."""
NAME = len("n01440764/n01440764_10026.JPEG") + 1
RATES = {"embed": 2000, "multiply": 50e12, "send": 20e9}
"""Assumed of a GPU: images per second of a ResNet-50 without gradient, multiplications of k-means
per second, and bytes sent to other nodes per second."""


def scale() -> str:
    """What grows with the number of images, of PCL's ImageNet config."""
    (case,) = (c for c in cases() if c.method == "pcl")
    host, device, seconds = [], [], []
    for power in range(6, 10):
        images = 10**power
        row = []
        for gpus in (8, 64, 512):
            on = Machines("", images, gpus, 32)
            s, label = case.sizes(on), [f"10^{power}", str(gpus)]
            features, numbers = formulas.e_step_memory(s, COUNTS)
            state = case.footprint(s).state
            gradients = formulas.ddp(case.parameters, case.batch_norm).sent(gpus)
            step = gradients + case.footprint(s).step.sent(gpus)
            sent = [
                formulas.e_step(s, COUNTS, steps, embedder=0, warm=warm).sent(gpus)
                for steps, warm in ((COLD, False), (WARM, True))
            ]
            on_disk = state + numbers - formulas.INT * len(COUNTS) * s.share
            row = [amount(x) for x in (state, on_disk + features, on_disk, step, *sent)]
            device.append([*label, *row])
            work = [
                images / gpus / RATES["embed"],
                formulas.kmeans_multiplications(s, COUNTS, COLD) / RATES["multiply"],
                formulas.kmeans_multiplications(s, COUNTS, WARM) / RATES["multiply"],
                sent[0] / RATES["send"],
                sent[1] / RATES["send"],
            ]
            seconds.append([*label, *(f"{x:,.0f}" if x >= 10 else f"{x:.2g}" for x in work)])
        files = formulas.listing(Sizes(images, 0, 1), NAME)
        copies = 1 if images > LARGE else NODE
        order = 0 if images > LARGE else formulas.LONG * images
        own = order + (0 if images > LARGE else files)
        found = amount(files), amount(copies * files), amount(own), amount(NODE * 180 * images)
        host.append([f"10^{power}", *found])
    head = [
        "images",
        "listing",
        "of a node",
        "a process's own, with the order",
        "lists would take",
    ]
    peaks = "E-step's peak", "`features_dir`"
    gpu = ["images", "GPUs", "state", *peaks, "a step sends", "E-step sends, cold", "warm"]
    time = ["images", "GPUs", "embed", "k-means, cold", "warm", "send, cold", "warm"]
    tables = _table(head, host), _table(gpu, device), _table(time, seconds)
    return "\n\n".join(tables)


def document() -> str:
    """All tables."""
    teacher = f"The teacher of the last two takes {amount(FLOAT * TEACHER)} more."
    return "\n\n".join((_formulas(), _numbers(cases()), teacher, _e_step(), _largest()))


def amount(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{count:.0f} B"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _formulas() -> str:
    rows = [[f"`{name}`", *texts] for name, texts in FORMULAS.items()]
    return _table(["", "state", "collectives of a step", "temporary of the loss"], rows)


def _numbers(given: Sequence[Case]) -> str:
    rows = []
    for case in given:
        row = [f"`{case.config}`", f"{case.parameters / 1e6:.1f} M"]
        for on in (IMAGENET, BILLION):
            found = case.footprint(case.sizes(on))
            gradients = formulas.ddp(case.parameters, case.batch_norm).sent(on.processes)
            own = found.step.sent(on.processes)
            row += [amount(x) for x in (found.state, found.temporary, gradients, own)]
        rows.append(row)
    columns = ["state", "temporary", "DDP", "own"]
    head = ["config", "P", *columns, *(f"{c}, 10^9" for c in columns)]
    return _table(head, rows)


def _e_step() -> str:
    rows = []
    for name, counts in (("pcl", COUNTS), ("metric", MARGINS)):
        for on in (IMAGENET, BILLION):
            s = _sizes(on)
            features, numbers = formulas.e_step_memory(s, counts)
            sent = [
                formulas.e_step(
                    s, counts, steps, embedder=0, warm=warm, matched=warm and name == "metric"
                ).sent(on.processes)
                for steps, warm in ((COLD, False), (WARM, True))
            ]
            bank = s.share * (FLOAT * s.dim + 1)
            found = features, numbers, *sent, bank
            rows.append([f"`{name}`", on.name, *(amount(x) for x in found)])
    head = ["E-step", "", "features", "numbers", "sent, cold", "sent, warm", "`bank`"]
    return _table(head, rows)


def _largest() -> str:
    """Images at which each table alone fills a device, for the documented K and D."""
    rows = []
    for name, counts in (("pcl", COUNTS), ("metric", MARGINS)):
        one = _sizes(BILLION)._replace(images=1, processes=1)
        share = sum(formulas.e_step_memory(one, counts))
        row = [f"`{name}`"]
        row += [_count(r * DEVICE / share) for r in (8, 128)]
        row += [_count(r * DEVICE / (share + FLOAT * DIM + 1)) for r in (8, 128)]
        rows.append(row)
    head = ["images that fill 80 GB", "8 GPUs", "128 GPUs", "`bank`, 8", "`bank`, 128"]
    return _table(head, rows)


def _count(images: float) -> str:
    return f"{images / 1e6:.0f} million"


def _sizes(on: Machines) -> Sizes:
    return Sizes(on.images, on.batch, on.processes, DIM)
