"""Scripts of solo-learn in forks of one process, which has imported what all of them import.

Run as a program it reads jobs, a line of JSON each, and answers with their exit codes.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn


class Done(NamedTuple):
    """What a script ended with, and what it printed."""

    code: int
    output: str


class Forks:
    """Starts scripts in a folder at once instead of after ten seconds of imports."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> Done:
        """Runs ``python WORDS``; the first is ``-m`` or a script."""
        output = self.folder / "output.txt"
        job = {"words": words, "folder": str(self.folder), "output": str(output)}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return Done(code, output.read_text())

    def close(self) -> None:
        """Ends the process that is forked."""
        self._server.communicate()


def serve() -> None:
    """Imports, then forks for every line of standard input."""
    import solo.data.pretrain_dataloader
    import solo.methods  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(words: list[str], folder: str, output: str) -> NoReturn:
    """What ``python`` does with the words, ending the process."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    into = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(into, 1)
    os.dup2(into, 2)
    code: int | str | None = 1
    try:
        if words[:2] == ["-m", "solo_ext"]:
            from solo_ext.__main__ import main

            sys.argv = ["solo_ext", *words[2:]]
            code = main()
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
            code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
