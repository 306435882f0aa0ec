"""Whole steps and epochs of the CIFAR configs beside those of the base methods, and their memory.

A step is forward, backward, optimiser, momentum, queue and logging, without loading; an epoch is
all of it, E-step, decoding and augmentation included. Everything but the method is the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.measure import peak_bytes, ratio
from benchmarks.record import Effort, Finding, Measured, at_most
from benchmarks.trainers import (
    a_teacher,
    race_trainers,
    time_one_by_one,
    train,
    training_images,
)
from solo_ext.lab.training.step_graph import METHODS as WITH_GRAPHS

Run = tuple[str, tuple[str, ...]]
"""Config, and changes of its settings."""

# In the paper's proportion to the number of images.
PCL = ("method_kwargs.num_prototypes=[25,62,125]", "method_kwargs.warmup_epochs=0")
# Student and teacher end in layers alike, whatever the loss between them.
HEAD = ("method_kwargs.head=teacher",)
# One large and six small crops; the teacher sees the large one.
MULTI_CROP = (
    *HEAD,
    "solo_ext/augmentations@augmentations=dino_multicrop",
    "augmentations.0.crop_size=32",
    "augmentations.1.crop_size=16",
)
CHANGES: dict[str, tuple[str, ...]] = {
    "mochi": ("method_kwargs.mixing.warmup_epochs=0",),
    "pcl": PCL,
    "pcl, weight 0": (*PCL, "method_kwargs.proto_weight=0"),
    "pcl, bank": (*PCL, "method_kwargs.e_step=bank"),
    # As many prototypes, and no queue, which the other one has none of.
    "swav": ("method_kwargs.num_prototypes=1024", "method_kwargs.queue_size=0"),
    **dict.fromkeys(("seed", "protoseed"), HEAD),
    "seed, multi-crop": (*MULTI_CROP, "method_kwargs.small_crop_target=large"),
    "protoseed, multi-crop": MULTI_CROP,
}
"""Of the config that a run is named after."""
FAMILIES = {
    "simclr": ("debiased", "hard_negative", "metric"),
    "nnclr": ("nnclr_symmetric",),
    "mocov2plus": ("mochi", "pcl, weight 0", "pcl"),
    "swav": ("protocpc",),
    "seed": ("protoseed",),
    "seed, multi-crop": ("protoseed, multi-crop",),
}
"""Methods by the base method that they are compared with."""
JUDGED = ("simclr", "nnclr", "mocov2plus")
"""Those whose memory is not to be exceeded; SwAV has no momentum networks, SEED is ours."""
MEMORY = 1.01
"""As a ratio: mixtures, prototypes and what is logged of them are numbers that the base lacks."""
MOST = {
    "debiased": 1.0,
    "hard_negative": 1.01,
    "nnclr_symmetric": 1.02,
    "mochi": 1.08,
    "pcl": 1.05,
    "protoseed": 1.01,
    "protoseed, multi-crop": 1.03,
}
"""Most that a step may take, as a ratio to the base method's."""
GPU_MOST = 1.05
EPOCHS = {
    "pcl": {"cpu": 1.35, "cuda": 1.30},
    "pcl, bank": {"cpu": 1.05, "cuda": 1.03},
}
"""Most that an epoch may take on each device, as a ratio to MoCo v2+'s."""
STEP_ROUNDS, EPOCH_ROUNDS = 15, 3
QUEUES = ("mocov2plus", "mochi", "nnclr", "pcl", "seed")


def given(effort: Effort, name: str, *more: str) -> Run:
    """A run, made smaller where the effort is."""
    config, changes = name.partition(",")[0], (*CHANGES.get(name, ()), *more)
    if effort.shrink > 1 and config in QUEUES:
        changes += (f"method_kwargs.queue_size={10 * effort.size(256)}",)
    if effort.shrink > 1 and config == "pcl":
        changes += ("method_kwargs.num_prototypes=[5,10]",)
    return config, changes


def taught(effort: Effort, runs: Mapping[str, Run]) -> contextlib.AbstractContextManager[None]:
    """A teacher inside the block, if one of the runs needs it."""
    needed = any(config in ("seed", "protoseed") for config, _ in runs.values())
    return a_teacher(effort) if needed else contextlib.nullcontext()


def called(base: str) -> str:
    """A base method, as the table names it."""
    return base if base.startswith("seed") else f"{base} of solo-learn"


def raced(
    effort: Effort, base: str, runs: dict[str, Run], per_epoch: bool = False
) -> tuple[dict[str, float], dict[str, Any]]:
    """Time of each run over the base's, which runs ``again`` too, and all seconds.

    The first rounds are left out: three steps, or an epoch.
    """
    rounds, skip = (EPOCH_ROUNDS, 1) if per_epoch else (STEP_ROUNDS, 3)
    if effort.shrink > 1:
        rounds, skip = 1 if per_epoch else effort.rounds, 1
    with taught(effort, runs):
        runs = {**runs, "again": runs[base]}
        seconds = race_trainers(effort, runs, per_epoch=per_epoch, rounds=rounds + skip)
    timed = {name: spent[skip:] for name, spent in seconds.items()}
    return {name: ratio(timed, name, base) for name in timed}, seconds


def line(label: str, base: str, over: dict[str, float], name: str, most: float | None) -> Finding:
    """That of a run over its base."""
    target = None if most is None else at_most(most)
    label = label.format(name, base)
    return Finding(label, target, over[name], peer=called(base), again=over["again"])


def steps(effort: Effort) -> Measured:
    """A race of steps for each base method."""
    findings, details = [], {}
    for base, methods in FAMILIES.items():
        runs = {name: given(effort, name) for name in (base, *methods)}
        over, details[base] = raced(effort, base, runs)
        for name in methods:
            gpu = effort.device == "cuda" and base != "swav"
            most = GPU_MOST if gpu else MOST.get(name)
            findings.append(line("step of {} over {}", base, over, name, most))
    return Measured(findings, details)


def epochs(effort: Effort) -> Measured:
    """A race of epochs."""
    base = "mocov2plus"
    runs = {name: given(effort, name) for name in (base, *EPOCHS)}
    over, seconds = raced(effort, base, runs, per_epoch=True)
    label, most = "epoch of {} over {}", {n: each[effort.device] for n, each in EPOCHS.items()}
    findings = [line(label, base, over, name, most[name]) for name in EPOCHS]
    return Measured(findings, {"seconds": seconds})


def compiled(effort: Effort) -> Measured:
    """Steps of SimCLR with compiled networks, beside the same without."""
    label, without = "step of simclr, compiled networks", "not compiled"
    if not effort.compiled:
        note = "not compiled with --quick"
        return Measured([Finding(label, None, peer=without, note=note)], {})
    runs = {without: given(effort, "simclr")}
    runs["compiled"] = given(effort, "simclr", "performance.compile=true")
    over, seconds = raced(effort, without, runs)
    found = Finding(label, None, 1 / over["compiled"], peer=without, again=over["again"])
    return Measured([found], {"seconds": seconds})


def graphs(effort: Effort) -> Measured:
    """Steps with CUDA graphs: a base method beside itself without, and ours beside it."""
    if effort.device != "cuda":
        label = "step of simclr, CUDA graphs"
        return Measured([Finding(label, None, peer="without graphs", note="needs a GPU")], {})
    findings, details = [], {}
    for base in JUDGED:
        found, details[base] = graphs_of(effort, base)
        findings += found
    return Measured(findings, details)


def graphs_of(effort: Effort, base: str) -> tuple[list[Finding], dict[str, Any]]:
    """Those of a base method and of ours that build on it; one that fails keeps none back.

    Steps of some of solo-learn's methods cannot be recorded: ours are then beside theirs without.
    """
    rounds, skip = (STEP_ROUNDS, 3) if effort.shrink == 1 else (effort.rounds, 1)
    without, again, own = "without graphs", "again", "performance.graphs=true"
    runs = {name: given(effort, name, own) for name in FAMILIES[base]}
    recorded = base in WITH_GRAPHS
    runs |= {base: given(effort, base, *([own] if recorded else [])), without: given(effort, base)}
    runs[again] = runs[base]
    seconds, failed = time_one_by_one(effort, runs, rounds + skip)
    timed = {name: spent[skip:] for name, spent in seconds.items()}

    def over(name: str, to: str) -> dict[str, Any]:
        if why := failed.get(name) or failed.get(to):
            return {"note": why}
        return {"measured": ratio(timed, name, to)}

    label = f"step of {base}, CUDA graphs"
    found = over(without, base) if recorded else {"note": "its steps cannot be recorded"}
    findings = [Finding(label, None, peer=without, **found)]
    same = over(again, base).get("measured")
    for name in FAMILIES[base]:
        label, most = f"step of {name} over {base}, CUDA graphs", at_most(GPU_MOST)
        peer = called(base) if recorded else f"{called(base)}, without graphs"
        findings.append(Finding(label, most, peer=peer, again=same, **over(name, base)))
    return findings, {"seconds": seconds, "failed": failed}


class Peak(Callback):
    """What the second step allocates, forward pass and loss; the first one is left alone."""

    def __init__(self, device: str) -> None:
        self.device, self.mib = device, 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        step = pl_module.training_step

        # Lightning looks for this name.
        def training_step(batch: Any, batch_idx: int) -> Any:
            if batch_idx != 1:
                return step(batch, batch_idx)
            held: list[Any] = []
            self.mib = peak_bytes(lambda: held.append(step(batch, batch_idx)), self.device) / 2**20
            return held[0]

        pl_module.training_step = training_step


def memory(effort: Effort) -> Measured:
    """Of forward pass and loss of every method, beside its base method."""
    findings, mib = [], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        images = training_images(effort, Path(folder), steps=2)
        for base, methods in FAMILIES.items():
            runs = {name: given(effort, name) for name in (base, *methods)}
            with taught(effort, runs):
                for name, run in runs.items():
                    peak = Peak(effort.device)
                    train(effort, *run, images, 1, peak)
                    mib[name] = peak.mib
            target = at_most(MEMORY) if base in JUDGED else None
            for name in methods:
                label, share = f"memory of forward pass and loss of {name}", mib[name] / mib[base]
                findings.append(Finding(label, target, share, peer=called(base)))
    return Measured(findings, {name: {"mib": each} for name, each in mib.items()})
