"""Runs command lines as forks of a process that has imported everything.

Reads lines of JSON, ``{"words": the command line, "cwd": a folder, "said": a file}``; answers each
with the number of the process, which is that of its session too, and with its exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from solo_ext import host
from solo_ext.lab.cli import commands
from solo_ext.lab.cli import main as command_line


def execute(words: list[str], cwd: str, said: str) -> int:
    """Runs one command line as a process of its own would; what it prints goes to a file."""
    os.setsid()
    os.chdir(cwd)
    for number, file in ((0, os.devnull), (1, said), (2, said)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
    torch.set_num_threads(1)
    try:
        return command_line.main(words)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def main() -> None:
    """Serves until standard input ends."""
    host.load()
    assert commands
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            code = execute(**request)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
