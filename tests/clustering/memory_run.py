"""How much memory of its own an E-step of features in a file takes, for its test.

python memory_run.py FOLDER BACKEND
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import torch

from solo_ext.clustering import e_step

ROWS, WIDTH, CLUSTERS = 1_000_000, 64, 30


def anonymous() -> int:
    """Bytes of this process that are pages of no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def watch() -> None:
    """Notes the most that there was, a few hundred times a second."""
    global most
    while not done.wait(0.003):
        most = max(most, anonymous())


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    generator, file = torch.Generator().manual_seed(0), str(folder / "features")
    x = torch.from_file(file, shared=True, size=ROWS * WIDTH).view(ROWS, WIDTH)
    for part in x.split(10_000):
        part.normal_(generator=generator)
        part /= part.norm(dim=1, keepdim=True)
    ids, init = torch.arange(ROWS), x[:CLUSTERS].clone()
    options = {"temperature": 0.2, "iterations": 2, "backend": backend}
    # What the first call loads is not of the rows.
    e_step(x[:1000], ids[:1000], [CLUSTERS], **options)
    most = begin = anonymous()
    done = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    e_step(x, ids, [CLUSTERS], **options, init=[init])
    e_step(x, ids, [CLUSTERS], **options, sample=ROWS // 10)
    done.set()
    watching.join()
    (folder / "grown.txt").write_text(f"{most - begin} {x.nbytes}")
