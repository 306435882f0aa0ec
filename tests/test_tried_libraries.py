"""Checks that other libraries fail: while they do, our readers, search and launcher stay."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAILS = {
    "litdata_faults": "a chunk is changed: False",
    "litdata_code": "the code of a data set runs: True",
    "litdata_mosaicml": "plain shards of MosaicML: TypeError",
    "one image": "S3, one image: error",
    "two workers after a first image": "S3, two workers after a first image: RuntimeError",
    "a chunk is missing": "S3, a chunk is missing: ChunkWaitTimeoutError",
    "the server is killed": "S3, the server is back: RuntimeError: Chunk",
    "datasets_tars": "tars, one is cut between two files: 52",
    "optuna_order": "halving, of the scores [7, 6, 5, 4, 3, 2, 1, 0] in this order go on: 1",
    "submitit_at_once": "six jobs, two at a time; most at once: 6",
}


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv installs the libraries")
@pytest.mark.parametrize("check", FAILS)
def test_a_library_still_fails(check: str) -> None:
    """A check that a newer version passes is looked at anew, in docs/project/libraries.md."""
    command = ["uv", "run", "scripts/tried_libraries.py", check]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert FAILS[check] in said
