"""One whole training step of a method on a GPU: forward, backward, optimiser, momentum, queues."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.interleaved import Work
from benchmarks.launches.tracing import cost_of
from solo_ext.config.compose import compose
from solo_ext.host.patches import default_patches, select_for_run
from solo_ext.lab.training.prepare import prepare

IMAGES, CLASSES = 126_689, 100
"""Of ImageNet-100; no image is read."""
EPOCH = 100
"""Past what methods leave out in their first epochs."""
CONFIGS = {
    "debiased": "debiased",
    "hard_negative": "hard_negative",
    "metric": "metric",
    "mochi": "mochi",
    "nnclr_symmetric": "nnclr_symmetric",
    "pcl": "pcl",
    "protocpc": "protocpc",
    "protoseed": "protoseed_moco_v2",
    "seed": "seed_moco_v2",
}
"""Configs of `imagenet100` by the method."""


class Listed:
    """Stands in for the images, whose number sizes follow."""

    classes = list(map(str, range(CLASSES)))

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


@contextlib.contextmanager
def a_teacher() -> Iterator[list[str]]:
    """Changes of a config that name a ResNet-50 of MoCo v2 with random weights."""
    from torchvision.models import resnet50

    network = resnet50()
    network.fc = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 128))
    weights = {f"module.encoder_q.{k}": v for k, v in network.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "teacher.pth"
        torch.save({"state_dict": weights}, file)
        yield [f"method_kwargs.teacher.path={file}"]


def built(config: str) -> tuple[Any, Any]:
    """The config's run and its method, as after an E-step, on the CPU."""
    with contextlib.ExitStack() as stack:
        changes = stack.enter_context(a_teacher()) if config.endswith("moco_v2") else []
        stack.enter_context(patch("solo_ext.lab.training.prepare.open_images", lambda *_: Listed()))
        prepared = prepare(compose(f"imagenet100/{config}", ["data.val_path=null", *changes]))
        select_for_run(prepared.run.patches, default_patches(prepared.run.method))
        method = prepared.method(prepared.cfg).to(memory_format=torch.channels_last)
    state = getattr(method, "prototypes", None)
    if hasattr(state, "assignments") and state.num_prototypes:
        sizes = state.num_prototypes
        clusters = [torch.randint(size, (IMAGES,)) for size in sizes]
        state.update_(0, state.means, [torch.ones(size) for size in sizes], clusters)
    return prepared.run, method


def on_fake_cuda(module: nn.Module) -> None:
    """Puts tensors without data, laid out alike, in place of parameters and buffers."""
    made: dict[Tensor, Tensor] = {}

    def like(x: Tensor) -> Tensor:
        if x not in made:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            made[x] = nn.Parameter(fake, x.requires_grad) if isinstance(x, nn.Parameter) else fake
        return made[x]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: like(x) for name, x in held.items() if x is not None})
    module._device = torch.device("cuda")  # type: ignore[assignment]


def step(config: str) -> Work:
    """A step of the config, inside of :func:`benchmarks.launches.fake_cuda.fake_cuda`.

    What the Trainer adds is left out: its logging, and callbacks.
    """
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        run, method = built(config)
    on_fake_cuda(method)
    method.log = method.log_dict = lambda *_, **__: None
    method.last_step = 0
    method.trainer = SimpleNamespace(
        global_step=1,
        current_epoch=EPOCH,
        max_epochs=run.max_epochs,
        estimated_stepping_batches=run.max_epochs * IMAGES // run.optimizer.batch_size,
        world_size=1,
        is_global_zero=True,
    )
    optimizers, _ = method.configure_optimizers()
    (optimizer,) = optimizers
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}[str(run.precision)]
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)  # type: ignore[attr-defined]
    size = run.optimizer.batch_size
    crops = [
        torch.empty(size, 3, a.crop_size, a.crop_size, device="cuda")
        for a in run.augmentations
        for _ in range(a.num_crops)
    ]
    indices, targets = (torch.zeros(size, dtype=torch.long, device="cuda") for _ in range(2))

    def work() -> None:
        batch = indices, crops, targets
        with torch.autocast("cuda", dtype=dtype):
            loss = method.training_step(batch, 1)
        scaler.scale(loss).backward()
        method.on_after_backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        method.on_train_batch_end(loss, batch, 1)

    # The first step makes the optimiser's state.
    cost_of(work)
    return work
