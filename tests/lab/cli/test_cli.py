"""The commands: what they print, where they write, what they import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from solo_ext import __version__, host
from solo_ext.host import detect
from solo_ext.lab.cli import commands
from solo_ext.losses import LOSSES
from solo_ext.methods import METHODS
from tests.lab.cli.conftest import TINY, document

Command = Callable[..., Any]
WITHOUT_SOLO = """
import contextlib, importlib.machinery, io, json, sys
find = importlib.machinery.PathFinder.find_spec
def blocked(name, path=None, target=None):
    return None if name.partition(".")[0] == "solo" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(blocked)
from solo_ext.lab.cli.main import main
done = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


def python(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=cwd,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", [(), *((name,) for name in commands._COMMANDS)], ids=str)
def test_help(words: tuple[str, ...], command: Command) -> None:
    result = command(*words, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: {' '.join(('solo-ext', *words))} ")


def test_version(command: Command) -> None:
    assert command("--version").out == f"solo-ext {__version__}\n"


def test_nothing_heavy_is_imported_early(tmp_path: Path) -> None:
    code = "from solo_ext.lab.cli.main import main; main(['pretrain', '--config-name'])"
    ask = "print(sorted({'torch', 'lightning', 'timm', 'hydra', 'solo'} & set(sys.modules)))"
    body = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n{ask}"
    assert python(body, cwd=tmp_path).stdout == "[]\n"


def test_methods(command: Command) -> None:
    rows = document(command("methods", "--json"))
    named = {row["name"]: row for row in rows}
    assert set(METHODS) <= set(named)
    assert {"simclr", "byol", "swav"} <= set(named)
    assert not {"base", "linear"} & set(named)
    assert named["debiased"]["origin"] == "solo_ext"
    assert named["debiased"]["year"] == 2020
    assert named["simclr"]["origin"] == "solo-learn"
    shown = command("methods")
    assert shown.code == 0
    assert host.load().info.generation in shown.out
    assert all(name in shown.out for name in named)


def test_losses(command: Command) -> None:
    rows = document(command("losses", "--json"))
    assert {row["name"] for row in rows} == set(LOSSES)
    assert "debiased_loss_func" in command("losses").out


def test_doctor(command: Command) -> None:
    found = document(command("doctor", "--json"))
    assert found["solo_ext"] == __version__
    assert found["host"]["generation"] == detect().generation
    assert found["packages"]["torch"] == torch.__version__.partition("+")[0]
    shown = command("doctor").out
    assert found["host"]["fingerprint"] in shown
    assert "not installed: pip install" in shown


def test_without_solo_learn(tmp_path: Path) -> None:
    """Doctor says how to get both generations; what needs one ends with a line that says so."""
    lines = [
        ["doctor"],
        ["doctor", "--json"],
        ["methods"],
        ["pretrain", "--config-name", "digits/debiased"],
    ]
    done = python(WITHOUT_SOLO, json.dumps(lines), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown, listed, *refused = json.loads(done.stdout)
    both = (
        "pip install --no-deps solo-learn==1.0.2",
        "git clone https://github.com/vturrisi/solo-learn",
        "PYTHONPATH",
    )
    for code, out, err in (shown, listed):
        assert (code, err) == (0, "")
        assert all(way in out for way in both)
    assert "solo-learn is not installed" in json.loads(listed[1])["host"]["error"]
    for code, out, err in refused:
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert err.startswith("solo-ext: solo-learn is not installed; ")
        assert all(way in err for way in both)
    assert list(tmp_path.iterdir()) == []


def test_pretrain(trained: Any) -> None:
    found = document(trained)
    run_dir = Path(found["run_dir"])
    names = {p.name for p in run_dir.iterdir()}
    assert names >= {"args.json", "config.yaml", "environment.json", "metrics.jsonl"}
    (checkpoint,) = run_dir.glob("*.ckpt")
    assert found["checkpoint"] == str(checkpoint)
    assert found["epochs"] == 1
    assert found["images_per_second"] > 0
    assert trained.noise == []


def test_standard_output_is_the_documents_alone(command: Command) -> None:
    """Lightning prints a bar and a summary of the model there, if it is told to."""
    for _ in range(2):
        result = command(
            "pretrain",
            "--json",
            "--config-name=digits/pcl",
            *TINY,
            "method_kwargs.warmup_epochs=0",
            "enable_progress_bar=true",
            "enable_model_summary=true",
        )
        found = document(result)
        # Once each, however often the command ran in this process.
        (line,) = [text for text in result.err.splitlines() if text.startswith("E-step")]
        assert line.startswith("E-step before epoch 1: 20+50+100 prototypes by torch k-means")
    # Beside the default name, and in the folder that the command was started in.
    assert Path(found["run_dir"]).parent == Path("trained_models/pcl").absolute()
    assert Path(found["checkpoint"]).is_file()


def test_finished_run_is_resumed_to_its_end(
    run_dir: Path, command: Command, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    found = document(command("pretrain", "--resume", str(copy), "--json"))
    assert (found["run_dir"], found["epochs"]) == (str(copy), 1)
    shown = command("pretrain", "--resume", str(copy))
    assert shown.code == 0
    assert f"solo-ext eval knn {copy}" in shown.out


def test_a_link_that_leads_in_a_circle_is_no_run_directory(
    command: Command, tmp_path: Path
) -> None:
    """Found before what is said of the settings."""
    (tmp_path / "link").symlink_to("link")
    given = ("pretrain", "--config-name", "digits/pcl", *TINY)
    for place in ("link", "link/run"):
        result = command(*given, f"--run-dir={place}")
        line = f"solo-ext: --run-dir={place!r}: 'link' is no folder; name a folder"
        assert (result.code, result.lines, result.noise) == (2, [line], [])


def test_failures_are_no_mistakes(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with 1, and the line names a file with the traceback."""

    def fail(args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setitem(commands._COMMANDS, "losses", fail)
    result = command("losses")
    assert result.code == 1
    assert "RuntimeError: broken (details in " in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pretrain --config-name digits/debiased", "start it again"),
        ("eval knn run", "the same command goes on"),
    ],
)
def test_interruption(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    def interrupt(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(commands._COMMANDS, words.partition(" ")[0], interrupt)
    result = command(*words.split())
    assert (result.code, result.out) == (130, "")
    assert result.lines == [f"solo-ext: interrupted; {says}"]


@pytest.mark.parametrize("number", commands._NUMBERS)
def test_one_process_of_several_prints(
    number: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun, SLURM and Lightning number them."""
    monkeypatch.setenv(number, "0")
    assert command("losses", "--json").out.startswith("[")
    monkeypatch.setenv(number, "3")
    assert command("losses", "--json").out == ""
