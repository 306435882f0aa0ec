"""``solo-ext embed`` beside a loop of PyTorch over the same loader, one pass over all images each.

The loop keeps the features in memory. The command lists the images and writes the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import by_clock, ratio, summary, take_turns
from benchmarks.record import Effort, Finding, Measured, Target
from benchmarks.trainers import write_folders
from solo_ext.data.loaders import fixed_loader
from solo_ext.lab.evaluation.embed import EmbedRun, _opened, embed

IMAGES, BATCH, ROUNDS = 1024, 64, 5
NETWORKS: dict[str, tuple[str, dict[str, Any], Target | None]] = {
    "ResNet-18, 64 px": (
        "timm/resnet18",
        {"crop_size": 64, "pretrained": False},
        Target(0.9),
    ),
    # No network: reading, decoding and writing alone.
    "pixels of 16 x 16": ("pixels", {"crop_size": 16}, None),
}
"""Model, settings and the least speed by name."""


@torch.no_grad()
def plain_loop(backbone: torch.nn.Module, loader: Any, device: str) -> Tensor:
    """Features of all images, as a script of one's own computes them."""
    backbone.eval().to(device)
    return torch.cat([backbone(images.to(device)).cpu() for images, _ in loader])


def race(effort: Effort, name: str, data: Path, scratch: Path) -> tuple[Finding, dict[str, Any]]:
    """The speed of the command over the loop's, by the processor's time."""
    model, given, least = NETWORKS[name]
    settings = {**given, "batch_size": BATCH, "num_workers": 0, "device": effort.device}
    opened, cfg, images, _ = _opened(model, EmbedRun(**settings), [data])
    loader = fixed_loader(cfg, images, batch_size=BATCH)
    out = scratch / "features.parquet"

    def write() -> None:
        out.unlink(missing_ok=True)
        embed(opened, data, out, settings)

    def loop() -> None:
        plain_loop(opened.backbone, loader, effort.device)

    ways = {"loop": loop, "again": loop, "embed": write}
    rounds = ROUNDS if effort.shrink == 1 else effort.rounds
    seconds = take_turns(ways, rounds, warm=1, timer=by_clock())
    label, again = f"embed: speed, {name}", ratio(seconds, "again", "loop")
    finding = Finding(label, least, ratio(seconds, "loop", "embed"), peer="loop", again=again)
    return finding, summary(seconds, "loop")


def measure(effort: Effort) -> Measured:
    """Every network, on the images of ``--data``, else on made ones."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        data = effort.data
        if data is None:
            data = scratch / "images"
            write_folders(data, effort.size(IMAGES), 96)
        found = {name: race(effort, name, data, scratch) for name in NETWORKS}
    return Measured(
        [f for f, _ in found.values()], {n: details for n, (_, details) in found.items()}
    )
