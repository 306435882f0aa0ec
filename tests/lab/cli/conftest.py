"""The command in process, a finished tiny run, and folders to make mistakes with."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from solo_ext.lab.cli import listing
from solo_ext.lab.cli.main import main

TINY = (
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=0.2",
    "optimizer.batch_size=64",
    "max_epochs=1",
    "scheduler.warmup_epochs=1",
    # `auto` tries bfloat16 on every layer.
    "precision=32-true",
)
LOGGERS = ("", "lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning")


@dataclass
class Outcome:
    """What a command line left.

    Attributes:
        code: exit code.
        out: standard output.
        err: standard error.
        noise: warnings and log records, which a terminal would show too.
    """

    code: int
    out: str
    err: str
    noise: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Lines of standard error that are not empty."""
        return [line for line in self.err.splitlines() if line.strip()]


Command = Callable[..., Outcome]


class _Collected(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextlib.contextmanager
def _noise() -> Iterator[list[str]]:
    """Collects what Python's default filters and log levels would let through."""
    found: list[str] = []
    handler = _Collected(found)
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", hidden)
        for name in LOGGERS:
            logging.getLogger(name).addHandler(handler)
        try:
            yield found
        finally:
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)
            found += [str(w.message) for w in caught]


def run_command(*words: str) -> Outcome:
    """Runs ``solo-ext`` with these words."""
    out, err = io.StringIO(), io.StringIO()
    with _noise() as noise, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as leave:
            code = int(leave.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue(), noise)


@pytest.fixture(scope="session", autouse=True)
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``SOLO_EXT_DATA``: digits are written there once."""
    root = tmp_path_factory.mktemp("solo-ext-data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOLO_EXT_DATA", str(root))
        yield root


@pytest.fixture(scope="session", autouse=True)
def _parsed_once() -> Iterator[None]:
    """The package's files, which stay, are searched for names once in a process: it takes 0.1 s."""
    read = listing._registered
    once = functools.cache(lambda file, register: list(read(file, register)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "_registered", lambda *given: copy.deepcopy(once(*given)))
        yield


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs ``solo-ext`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return run_command


@pytest.fixture(scope="session")
def trained(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One epoch of ``digits/debiased``, made tiny, with ``--json``."""
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    config = ("--config-name", "digits/debiased", "--run-dir", str(run_dir), "--json")
    return run_command("pretrain", *config, *TINY)


@pytest.fixture(scope="session")
def run_dir(trained: Outcome) -> Path:
    """The directory of :func:`trained`."""
    return Path(json.loads(trained.out)["run_dir"])


@pytest.fixture(scope="session")
def places(
    run_dir: Path, data_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Folders and files by name; tests leave them as they are."""
    root = tmp_path_factory.mktemp("places")
    made = {"run": run_dir, "digits": data_root / "digits" / "train"}
    for name in ("empty", "flat", "one_class_more", "one_class_less", "hollow"):
        made[name] = root / name
        made[name].mkdir()
    image = Image.new("RGB", (8, 8))
    image.save(made["flat"] / "image.png")
    (made["hollow"] / "class").mkdir()
    for label in (*range(10), "eleven"):
        for name in ("one_class_more", *(() if label in (7, "eleven") else ("one_class_less",))):
            (made[name] / str(label)).mkdir()
            image.save(made[name] / str(label) / "image.png")
    made["file"] = root / "file.txt"
    made["file"].write_text("no image\n")
    made["parquet"] = root / "torn.parquet"
    made["parquet"].write_bytes(b"PAR1 and no more")

    for name in ("torn", "other", "bare", "no_args", "bad_args", "upstream"):
        made[name] = root / name
        shutil.copytree(run_dir, made[name])
    checkpoint = next(made["torn"].glob("*.ckpt"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    _change_args(made["other"], lambda args: args["backbone"]["kwargs"].update(channels=[16] * 4))
    for name in ("bare", "no_args"):
        (made[name] / ("args.json" if name == "no_args" else "config.yaml")).unlink()
    for own in ("config.yaml", "environment.json", "metrics.jsonl", ".lock"):
        (made["upstream"] / own).unlink()
    for unwanted in made["bare"].glob("*.ckpt"):
        torch.save({"weights": torch.zeros(1)}, unwanted)
    (made["bad_args"] / "args.json").write_text('{"backbone": {"name": 3}}')
    made["configs"] = root / "configs"
    (made["configs"] / "sub").mkdir(parents=True)
    for name, text in CONFIGS.items():
        (made["configs"] / f"{name}.yaml").write_text(text)
    return {name: str(path) for name, path in made.items()}


CONFIGS = {
    "torn": "name: [1, 2\n",
    "twice": "name: a\nname: b\n",
    "list": "- name\n",
    "circle": "defaults:\n  - circle\n  - _self_\n",
    "no_default": "defaults:\n  - nothing\n  - _self_\n",
    "no_group": "defaults:\n  - /solo_ext/augmentations@augmentations: digit\n  - _self_\n",
    "missing": "name: ???\n",
    "nowhere": "name: ${data.nowhere}\n",
    "sub/unpacked": "name: a\n",
}


def _change_args(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "args.json"
    args = json.loads(file.read_text())
    change(args)
    file.write_text(json.dumps(args))


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run, which evaluations may write to."""
    return Path(shutil.copytree(run_dir, tmp_path / "own"))


def document(result: Outcome) -> Any:
    """The one JSON document on standard output."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def write_run(folder: Path, backbone: Any, args: dict[str, Any]) -> None:
    """A checkpoint folder as upstream's own Checkpointer leaves it."""
    folder.mkdir()
    state = {f"backbone.{k}": v for k, v in backbone.state_dict().items()}
    state["classifier.weight"] = torch.zeros(3, 8)
    checkpoint = {"epoch": 4, "global_step": 10, "state_dict": state}
    torch.save(checkpoint, folder / "name-offline-ep=4.ckpt")
    (folder / "args.json").write_text(json.dumps(args))
