"""A program in which a worker serves a pickled data set, for ``test_start_method.py``.

python pickled_pass.py FOLDER METHOD: from FOLDER/given to FOLDER/served
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from torch.utils.data import DataLoader

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = pickle.loads((folder / "given").read_bytes())
    workers = {"num_workers": 1, "multiprocessing_context": sys.argv[2]}
    loader = DataLoader(given, 7, collate_fn=list, **workers)
    served = [item for batch in loader for item in batch]
    (folder / "served").write_bytes(pickle.dumps(served))
