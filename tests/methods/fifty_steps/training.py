"""What the package trains in fifty steps: methods on a tiny network, and one batch of views.

Processes of a run import this too, and nothing else of the tests is theirs to import.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from solo_ext.lab.training.prepare import prepare
from solo_ext.losses import MixDraws, Mixing, draw_mixes
from solo_ext.methods import negatives

EPOCHS, STEPS_PER_EPOCH = 5, 10
STEPS = EPOCHS * STEPS_PER_EPOCH
BATCH, SIDE, FEATURES = 8, 16, 8
KINDS, APIECE = 3, 4
INDICES = torch.tensor([5, 0, 9, 3, 11, 7, 2, 8])
"""Of the twelve images, in another order than they lie."""
LABELS = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0])
OPTIMIZER = {
    "batch_size": BATCH,
    # What is left of it for a batch of 8 is 0.1, and 0.05 for the classifier.
    "lr": 3.2,
    "classifier_lr": 1.6,
    "weight_decay": 1e-3,
    "kwargs": {"momentum": 0.9},
}
State = dict[str, Tensor]


class Trained(NamedTuple):
    """A training run.

    Attributes:
        start: weights and tables before the first step.
        losses: of each step.
        end: weights and tables after the last.
        draws: of mixtures, for one queue after the other.
        lots: prototypes that a step drew, of each granularity.
        assignments: clusters of the images at the start of each epoch.
    """

    start: State
    losses: list[float]
    end: State
    draws: list[Any]
    lots: list[list[list[int]]]
    assignments: list[list[list[int]]]


def made_pictures(folder: Path) -> Path:
    """Twelve images of three kinds, which differ more than those of one kind."""
    draw = torch.Generator().manual_seed(3)
    kinds = torch.randint(0, 256, (KINDS, SIDE, SIDE, 3), generator=draw)
    for kind in range(KINDS):
        (folder / str(kind)).mkdir(parents=True)
        for number in range(APIECE):
            noise = torch.randint(0, 256, (SIDE, SIDE, 3), generator=draw)
            pixels = (0.8 * kinds[kind] + 0.2 * noise).to(torch.uint8).numpy()
            Image.fromarray(pixels).save(folder / str(kind) / f"{number}.png")
    return folder


def fixed_views(large: int, small: int = 0) -> list[Tensor]:
    """Views of eight images in float64; those of one image are alike, small ones half as wide."""
    draw = torch.Generator().manual_seed(1)
    shape = (BATCH, 3, SIDE, SIDE)
    images = torch.randn(shape, generator=draw, dtype=torch.float64)
    middle = images[..., SIDE // 4 : -SIDE // 4, SIDE // 4 : -SIDE // 4]
    views = []
    for count, seen in ((large, images), (small, middle)):
        noise = torch.randn((count, *seen.shape), generator=draw, dtype=torch.float64)
        views += list(seen + 0.7 * noise)
    return views


def network() -> nn.Module:
    """A small MLP in place of the backbone."""
    layers = [nn.Linear(3 * SIDE * SIDE, FEATURES), nn.BatchNorm1d(FEATURES), nn.Tanh()]
    last = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(nn.Upsample(size=SIDE), nn.Flatten(), *layers, last)


def built(config: dict[str, Any], norm: bool = True) -> Any:
    """The method of a config on the small MLP, in float64, with or without batch norm."""
    prepared = prepare(config)
    torch.manual_seed(0)
    method = prepared.method(prepared.cfg)
    method.backbone = network()
    if hasattr(method, "momentum_backbone"):
        method.momentum_backbone = copy.deepcopy(method.backbone).requires_grad_(False)
    if not norm:
        for name, module in list(method.named_modules()):
            if isinstance(module, nn.BatchNorm1d):
                method.set_submodule(name, nn.Identity())
    method.double()
    if hasattr(method, "teacher"):
        # What it returns is rounded to float32, and goes on in float64 from there.
        method.teacher.register_forward_hook(lambda _, __, z: z.double())
    # Drawn in float32, their rows are of unit length to seven digits only.
    for name, table in method.named_buffers():
        if name.startswith(("queues", "support_set")) and name.endswith("value"):
            table.copy_(functional.normalize(table, dim=1))
    return method


def batch_of(views: list[Tensor], own: slice = slice(None)) -> list[Any]:
    """As a loader gives it; own: the images of a process."""
    crops = [view[own] for view in views]
    return [INDICES[own], crops if len(crops) > 1 else crops[0], LABELS[own]]


def repeated(batch: list[Any], folder: Path) -> DataLoader[Any]:
    """One batch as often as an epoch has steps; an E-step finds the images themselves."""
    images = ImageFolder(str(folder), transform=ToTensor())
    steps = [[0]] * STEPS_PER_EPOCH
    return DataLoader(images, batch_sampler=steps, collate_fn=lambda _: batch)


class Notes(Callback):
    """Takes down what a run starts from, its losses, its clusters, and what it ends with."""

    def __init__(self) -> None:
        self.start: State = {}
        self.end: State = {}
        self.losses: list[float] = []
        self.assignments: list[list[list[int]]] = []

    def on_train_batch_start(self, trainer: Any, method: Any, batch: Any, batch_idx: int) -> None:
        if not self.start:
            self.start = state_of(method)
        prototypes = getattr(method, "prototypes", None)
        if batch_idx == 0 and hasattr(prototypes, "assignments"):
            self.assignments.append(prototypes.assignments.tolist())

    def on_train_batch_end(self, trainer: Any, method: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, method: Any) -> None:
        self.end = state_of(method)


def state_of(method: Any) -> State:
    """Weights and tables, as they are now."""
    state = method.state_dict()
    return {k: v.clone() for k, v in state.items() if not k.endswith("_extra_state")}


def from_the_hardest_down(num_hard: int, draws: MixDraws, ranked: bool) -> Mixing:
    """The order of mined rows, which draws name by their place, is nowhere promised."""
    return Mixing(num_hard, draws)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Features of an E-step have the default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def trained(
    method: Any,
    batch: list[Any],
    folder: Path,
    put: Callable[[Any, str, Any], None],
    **options: Any,
) -> Trained:
    """Fifty steps of Lightning's trainer in float64."""
    draws, lots = list[Any](), list[list[list[int]]]()

    def note(*args: Any) -> Any:
        draws.append(draw_mixes(*args))
        return draws[-1]

    put(negatives, "draw_mixes", note)
    put(negatives, "Mixing", from_the_hardest_down)
    if getattr(method.kwargs, "num_negatives", None):
        draw = method._negatives

        def noted(*args: Any) -> Any:
            found = draw(*args)
            lots.append([ids.tolist() for ids in found])
            return found

        put(method, "_negatives", noted)
    notes = Notes()
    trainer = Trainer(
        max_epochs=EPOCHS,
        precision="64-true",
        accelerator="cpu",
        callbacks=[notes],
        barebones=True,
        **options,
    )
    # Without a logger there is nowhere to log to.
    method.log = method.log_dict = lambda *_, **__: None
    with in_float64():
        trainer.fit(method, repeated(batch, folder))
    return Trained(notes.start, notes.losses, notes.end, draws, lots, notes.assignments)
