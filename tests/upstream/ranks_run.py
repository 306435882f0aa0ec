"""Losses of ``upstream/methods`` on two processes beside one, and PCL's clusters on both.

Run as a program in the patched tree, it writes to the file of its argument by how much they differ.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

IMAGES, DIM, RANKS = 8, 6, 2


def losses(rank: int, ranks: int) -> dict[str, Tensor]:
    """Loss of the whole batch and its gradient, of which this process has a share."""
    from solo.losses import ProtoCPCLoss, hard_negative_loss_func, nnclr_loss_func

    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, IMAGES, DIM, generator=generator)
    prototypes = F.normalize(torch.randn(10, DIM, generator=generator), dim=1)
    share = slice(rank * IMAGES // ranks, (rank + 1) * IMAGES // ranks)
    protocpc = ProtoCPCLoss(10)

    def prototypical(views: Tensor) -> Tensor:
        logits = F.normalize(torch.cat([views, z[2:, share]]), dim=-1) @ prototypes.T
        return protocpc(list(logits[:2]), list(logits[2:].detach()))

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "hard_negative": lambda views: hard_negative_loss_func(*views),
        "nnclr": lambda views: nnclr_loss_func(views[0].detach(), views[1], symmetric=True),
        "protocpc": prototypical,
    }
    found = {}
    for name, function in functions.items():
        leaf = z[:2].clone().requires_grad_()
        value = function(leaf[:, share])
        value.backward()
        assert leaf.grad is not None
        both = torch.cat([value.detach().view(1), leaf.grad.flatten()])
        if ranks > 1:
            # DDP takes the mean over processes.
            dist.all_reduce(both)
        found[name] = both / ranks
    return {**found, "prior": protocpc.prior}


class Images(torch.utils.data.Dataset):
    """Two views of each image; their number is no multiple of two batches."""

    def __len__(self) -> int:
        return 4 * IMAGES + 1

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return index, list(torch.randn(2, 3, 32, 32, generator=generator)), index % 10


def clusters(rank: int) -> list[Tensor]:
    """What PCL holds after two epochs, of which the second has prototypes."""
    from lightning.pytorch import Trainer
    from solo.methods import METHODS
    from tests.methods.utils import gen_base_cfg

    torch.manual_seed(rank)
    cfg = gen_base_cfg("pcl", batch_size=4, num_classes=10, momentum=True)
    cfg.data.dataset = "cifar10"
    sizes = {"proj_output_dim": DIM, "proj_hidden_dim": 8, "queue_size": 64}
    cfg.method_kwargs = {**sizes, "temperature": 0.2, "num_prototypes": [3, 5], "warmup_epochs": 1}
    method = METHODS["pcl"](cfg)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "num_nodes": RANKS, "strategy": "ddp"},
        **{"max_epochs": 2, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    loader = torch.utils.data.DataLoader(Images(), batch_size=4, shuffle=True, drop_last=True)
    trainer.fit(method, loader)
    assert trainer.world_size == RANKS
    unknown = (method.assignments == -1).sum(1)
    assert unknown.tolist() == [1, 1]
    return [method.memory, method.assignments, *method.prototypes, *method.concentrations]


def process(rank: int, folder: str) -> None:
    """What each of the processes computes."""
    port = 20000 + os.getppid() % 20000
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "RANK": str(rank), "NODE_RANK": str(rank)}
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.save([losses(rank, RANKS), clusters(rank)], Path(folder, f"{rank}.pt"))


def main(output: str) -> None:
    """Runs one process, then two, and writes the largest differences."""
    folder = Path(output).parent
    one = losses(0, 1)
    multiprocessing.spawn(process, (str(folder),), nprocs=RANKS)
    of_ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    found = {
        name: max(float((two[name] - value).abs().max()) for two, _ in of_ranks)
        for name, value in one.items()
    }
    pairs = zip(*(held for _, held in of_ranks), strict=True)
    found["pcl"] = max(float((a - b).abs().max()) for a, b in pairs)
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
