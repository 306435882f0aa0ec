"""Whole steps and epochs of the CIFAR configs beside those of the base methods, and their memory.

A step is forward, backward, optimiser, momentum, queue and logging, without loading; an epoch is
all of it, E-step, decoding and augmentation included. Everything but the method is the same.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from benchmarks.measure import peak_bytes, ratio
from benchmarks.record import Effort, Finding, Measured, at_most
from benchmarks.trainers import a_teacher, race_trainers, train, training_images

Run = tuple[str, tuple[str, ...]]
"""Config, and changes of its settings."""

# In the paper's proportion to the number of images.
PCL = ("method_kwargs.num_prototypes=[25,62,125]", "method_kwargs.warmup_epochs=0")
# Student and teacher end in layers alike, whatever the loss between them.
HEAD = ("method_kwargs.head=teacher",)
# One large and six small crops; the teacher sees the large one.
MULTI_CROP = (
    "solo_ext/augmentations@augmentations=dino_multicrop",
    "augmentations.0.crop_size=32",
    "augmentations.1.crop_size=16",
)
RUNS: dict[str, Run] = {
    "simclr": ("simclr", ()),
    "debiased": ("debiased", ()),
    "hard_negative": ("hard_negative", ()),
    "metric": ("metric", ()),
    "nnclr": ("nnclr", ()),
    "nnclr_symmetric": ("nnclr_symmetric", ()),
    "mocov2plus": ("mocov2plus", ()),
    "mochi": ("mochi", ("method_kwargs.mixing.warmup_epochs=0",)),
    "pcl, weight 0": ("pcl", (*PCL, "method_kwargs.proto_weight=0")),
    "pcl": ("pcl", PCL),
    "pcl, bank": ("pcl", (*PCL, "method_kwargs.e_step=bank")),
    # As many prototypes, and no queue, which the other one has none of.
    "swav": ("swav", ("method_kwargs.num_prototypes=1024", "method_kwargs.queue_size=0")),
    "protocpc": ("protocpc", ()),
    "seed": ("seed", HEAD),
    "protoseed": ("protoseed", HEAD),
    "seed, multi-crop": (
        "seed",
        (*HEAD, *MULTI_CROP, "method_kwargs.small_crop_target=large"),
    ),
    "protoseed, multi-crop": ("protoseed", (*HEAD, *MULTI_CROP)),
}
FAMILIES = {
    "simclr": ("debiased", "hard_negative", "metric"),
    "nnclr": ("nnclr_symmetric",),
    "mocov2plus": ("mochi", "pcl, weight 0", "pcl"),
    "swav": ("protocpc",),
    "seed": ("protoseed",),
    "seed, multi-crop": ("protoseed, multi-crop",),
}
"""Methods by the base method that they are compared with."""
HOSTS = ("simclr", "nnclr", "mocov2plus", "swav")
"""Base methods of solo-learn."""
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
TAUGHT = ("seed", "protoseed")
"""Configs that need a teacher."""


def given(effort: Effort, name: str) -> Run:
    """A run, made smaller where the effort is."""
    config, changes = RUNS[name]
    if effort.shrink == 1:
        return config, changes
    if config in QUEUES:
        changes = (*changes, f"method_kwargs.queue_size={10 * effort.size(256)}")
    if config == "pcl":
        changes = (*changes, "method_kwargs.num_prototypes=[5,10]")
    return config, changes


def taught(effort: Effort, names: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    """A teacher inside the block, if one of the runs needs it."""
    needed = any(RUNS[name][0] in TAUGHT for name in names)
    return a_teacher(effort) if needed else contextlib.nullcontext()


def called(base: str) -> str:
    """A base method, as the table names it."""
    return f"{base} of solo-learn" if base in HOSTS else base


def raced(
    effort: Effort, base: str, runs: dict[str, Run], rounds: int, per_epoch: bool = False
) -> tuple[dict[str, float], dict[str, Any]]:
    """Time of each run over the base's, which runs ``again`` too, and all seconds.

    The first rounds are left out: three steps, or an epoch.
    """
    skip = 1 if per_epoch or effort.shrink > 1 else 3
    with taught(effort, [name for name in runs if name in RUNS]):
        runs = {**runs, "again": runs[base]}
        seconds = race_trainers(effort, runs, per_epoch=per_epoch, rounds=rounds + skip)
    timed = {name: spent[skip:] for name, spent in seconds.items()}
    return {name: ratio(timed, name, base) for name in timed}, seconds


def steps(effort: Effort) -> Measured:
    """A race of steps for each base method."""
    rounds = STEP_ROUNDS if effort.shrink == 1 else effort.rounds
    findings, details = [], {}
    for base, methods in FAMILIES.items():
        runs = {name: given(effort, name) for name in (base, *methods)}
        over, details[base] = raced(effort, base, runs, rounds)
        for name in methods:
            most = MOST.get(name)
            if effort.device == "cuda" and base != "swav":
                most = GPU_MOST
            label, target = f"step of {name} over {base}", None if most is None else at_most(most)
            line = Finding(label, target, over[name], peer=called(base), again=over["again"])
            findings.append(line)
    return Measured(findings, details)


def epochs(effort: Effort) -> Measured:
    """A race of epochs."""
    base = "mocov2plus"
    runs = {name: given(effort, name) for name in (base, *EPOCHS)}
    rounds = EPOCH_ROUNDS if effort.shrink == 1 else 1
    over, seconds = raced(effort, base, runs, rounds, per_epoch=True)
    findings = [
        Finding(
            f"epoch of {name} over {base}",
            at_most(most[effort.device]),
            over[name],
            peer=called(base),
            again=over["again"],
        )
        for name, most in EPOCHS.items()
    ]
    return Measured(findings, {"seconds": seconds})


def compiled(effort: Effort) -> Measured:
    """Steps of SimCLR with compiled networks, beside the same without."""
    line = Finding("step of simclr, compiled networks", None, peer="not compiled")
    if not effort.compiled:
        return Measured([replace(line, note="not compiled with --quick")], {})
    runs = {"simclr": RUNS["simclr"], "compiled": ("simclr", ("performance.compile=true",))}
    over, seconds = raced(effort, "simclr", runs, STEP_ROUNDS)
    line = replace(line, measured=1 / over["compiled"], again=over["again"])
    return Measured([line], {"seconds": seconds})


def graphs(effort: Effort) -> Measured:
    """Steps with CUDA graphs: a base method beside itself without, and ours beside it."""
    label = "step of simclr, CUDA graphs"
    if effort.device != "cuda":
        note = "needs a GPU"
        return Measured([Finding(label, None, peer="without graphs", note=note)], {})
    rounds = STEP_ROUNDS if effort.shrink == 1 else effort.rounds
    findings, details = [], {}
    for base in JUDGED:
        runs = {name: given(effort, name) for name in (base, *FAMILIES[base])}
        runs = {name: (c, (*more, "performance.graphs=true")) for name, (c, more) in runs.items()}
        without = "without graphs"
        over, details[base] = raced(effort, base, {**runs, without: given(effort, base)}, rounds)
        findings.append(Finding(f"step of {base}, CUDA graphs", None, over[without], peer=without))
        for name in FAMILIES[base]:
            label, most = f"step of {name} over {base}, CUDA graphs", at_most(GPU_MOST)
            line = Finding(label, most, over[name], peer=called(base), again=over["again"])
            findings.append(line)
    return Measured(findings, details)


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
    names = {name for base, methods in FAMILIES.items() for name in (base, *methods)}
    found = {name: Peak(effort.device) for name in RUNS if name in names}
    with tempfile.TemporaryDirectory() as folder:
        images = training_images(effort, Path(folder), steps=2)
        with taught(effort, found):
            for name, peak in found.items():
                train(effort, *given(effort, name), images, 1, peak)
    findings = [
        Finding(
            f"memory of forward pass and loss of {name}",
            at_most(MEMORY) if base in JUDGED else None,
            found[name].mib / found[base].mib,
            peer=called(base),
        )
        for base, methods in FAMILIES.items()
        for name in methods
    ]
    return Measured(findings, {name: {"mib": peak.mib} for name, peak in found.items()})
