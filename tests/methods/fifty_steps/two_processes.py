"""Fifty steps that Lightning starts once per process, on half of the batch each.

python two_processes.py FOLDER, which holds ``configs.json``: runs by name
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from training import BATCH, batch_of, built, fixed_views, trained


def main(folder: Path) -> None:
    """Trains one after the other, and saves what this process had."""
    # Known before the processes have met.
    rank = int(os.environ.get("LOCAL_RANK", 0))
    own = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    for name, config in json.loads((folder / "configs.json").read_text()).items():
        counts = [crops["num_crops"] for crops in config["augmentations"]]
        found = trained(
            built(config, norm=False),
            batch_of(fixed_views(*counts), own),
            Path(config["data"]["train_path"]),
            setattr,
            strategy="ddp",
            devices=2,
            use_distributed_sampler=False,
        )
        saved = found._asdict() | {"draws": [tuple(one) for one in found.draws]}
        torch.save(saved, folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
