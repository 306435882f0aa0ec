"""The commands: what they print, where they write, what they import, and their mistakes."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from solo_ext import __version__, host, register
from solo_ext.core.registry import Registry
from solo_ext.host import detect
from solo_ext.host.backbones import build_backbone
from solo_ext.lab.cli import commands, output
from solo_ext.losses import LOSSES
from solo_ext.methods import METHODS
from solo_ext.pretrained.exported import load_exported
from tests import forks
from tests.lab.cli.conftest import TINY, Command, Outcome, document, write_run

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

EACH_IN_A_FORK = """
import contextlib, io, json, os, sys
from solo_ext.lab.cli.main import main
for words, _, imported in json.loads(sys.argv[1]):
    if imported:
        import solo_ext.config.compose
    if os.fork():
        os.wait()
        continue
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as left:
            code = left.code
    heavy = sorted({"torch", "lightning", "timm", "hydra", "solo"} & set(sys.modules))
    print(json.dumps([words, code, heavy, err.getvalue()]), flush=True)
    os._exit(0)
"""

SIMCLR = ["pretrain", "--config-name", "digits/simclr"]
UNKNOWN_NAMES = [
    [*SIMCLR, "method=simclrr"],
    [*SIMCLR, "optimizer.name=sdg"],
    [*SIMCLR, "backbone.name=resnet188"],
    [*SIMCLR, "backbone.name=resnet10t"],
    [*SIMCLR, "backbone.name=timm/resnet188"],
    [*SIMCLR, "method_kwargs.temperatur=1"],
    ["pretrain", "--config-name", "digits/metric", "method_kwargs.loss=tripplet"],
    ["pretrain", "images", "--method=simclrr"],
    ["eval", "knnn", "pixels"],
    ["eval", "suite", "pixels", "protocols=[knnn]"],
    ["benchmark", "run", "digitss"],
]
MISSING = [
    ["eval", "knn", "nowhere"],
    ["export", "nowhere", "--format=timm"],
    ["embed", "nowhere", "--out=features.parquet"],
    ["report", "nowhere"],
    ["pretrain", "--resume", "nowhere"],
]


def python(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-c", code, *words]
    return subprocess.run(given, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [(), *((name,) for name in commands._COMMANDS)], ids=str)
def test_help(words: tuple[str, ...], command: Command) -> None:
    result = command(*words, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: {' '.join(('solo-ext', *words))} ")


def test_version(command: Command) -> None:
    assert command("--version").out == f"solo-ext {__version__}\n"


def test_what_needs_no_training_imports_nothing_for_it(command: Command, tmp_path: Path) -> None:
    expected = [
        (["methods"], 0, []),
        (["losses"], 0, []),
        (["pretrain", "--config-name"], 2, []),
        (["pretrain", "--config-name", "digits/simclr", "optimizer.lr=-1"], 2, ["hydra"]),
        (["pretrain", "--config-name", "digits/pcl", "data.num_worker=1"], 2, ["hydra"]),
        (["pretrain", "--config-name", "digits/pcl", "max_epoch=1"], 2, ["hydra"]),
        (["pretrain", "--config-name", "digits/nonesuch"], 2, ["hydra"]),
        *((words, 2, ["hydra"]) for words in UNKNOWN_NAMES),
        *((words, 2, ["hydra"] if words[0] in ("eval", "pretrain") else []) for words in MISSING),
    ]
    # Hydra is imported once for all that may.
    expected.sort(key=lambda case: case[2])
    (tmp_path / "images").mkdir()
    done = python(EACH_IN_A_FORK, json.dumps(expected), cwd=tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('[["')]
    assert [tuple(about[:3]) for about in found] == expected, done.stderr
    for words, _, _, err in found:
        if words in UNKNOWN_NAMES + MISSING:
            # In this process, which has imported torch, the run itself refuses the name.
            assert err == command(*words).err


def test_a_name_that_other_code_may_register_is_left_to_the_run(tmp_path: Path) -> None:
    code = (
        "import json, sys\nfrom solo_ext.lab.cli.names import check_names\n"
        "try:\n    check_names(json.loads(sys.argv[1]))\n    print('passed')\n"
        "except Exception as error:\n    print(error.key)\nassert 'torch' not in sys.modules"
    )

    def refused(**given: Any) -> str:
        config = {
            "method": "simclr",
            "backbone": {"name": "resnet18"},
            "optimizer": {"name": "sgd"},
        }
        config |= {"method_kwargs": {"temperature": 1, "proj_hidden_dim": 8, "proj_output_dim": 8}}
        return python(code, json.dumps(config | given), cwd=tmp_path).stdout.strip()

    optimizer, backbone = {"name": "mine"}, {"name": "timm/theirs"}
    assert refused(optimizer=optimizer) == "optimizer.name"
    shutil.copytree(detect().path, tmp_path / "solo")
    with (tmp_path / "solo" / "methods" / "base.py").open("a") as base:
        base.write('\nBaseMethod._OPTIMIZERS["mine"] = torch.optim.SGD\n')
    assert refused(optimizer=optimizer) == "passed"
    assert refused(backbone=backbone) == "backbone.name"
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[solo_ext.methods]\ntheirs = theirs:Theirs\n")
    assert refused(method="theirs") == "passed"
    assert refused(backbone=backbone) == "passed", "what registers the method may register it"


def assert_entries(registry: Registry[Any], named: dict[str, dict[str, Any]]) -> None:
    for entry in registry.values():
        told = named[entry.name]
        assert (told["origin"], told["paper"]) == (entry.origin, entry.paper)
        assert (told["year"] or 0, told["arxiv"]) == (entry.year, entry.arxiv)


def test_methods(command: Command) -> None:
    rows = document(command("methods", "--json"))
    named = {row["name"]: row for row in rows}
    # What is read from files is what an import registers.
    register()
    assert set(named) == host.load().methods.keys() - {"base", "linear"}
    assert_entries(METHODS, named)
    assert named["debiased"]["origin"] == "solo_ext"
    assert named["debiased"]["year"] == 2020
    assert named["simclr"]["origin"] == "solo-learn"
    shown = command("methods")
    assert shown.code == 0
    assert host.load().info.generation in shown.out
    assert all(name in shown.out for name in named)


def test_losses(command: Command) -> None:
    named = {row["name"]: row for row in document(command("losses", "--json"))}
    assert named.keys() == LOSSES.keys()
    assert_entries(LOSSES, named)
    assert "debiased_loss_func" in command("losses").out


def test_doctor(command: Command) -> None:
    found = document(command("doctor", "--json"))
    assert found["solo_ext"] == __version__
    assert found["host"]["generation"] == detect().generation
    assert found["packages"]["torch"] == torch.__version__.partition("+")[0]
    shown = command("doctor").out
    assert found["host"]["fingerprint"] in shown
    assert "not installed: pip install" in shown


@pytest.mark.slow
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


def test_pretrain(trained: Outcome) -> None:
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


def test_finished_run_is_resumed_to_its_end(own_run: Path, command: Command) -> None:
    found = document(command("pretrain", "--resume", str(own_run), "--json"))
    assert (found["run_dir"], found["epochs"]) == (str(own_run), 1)
    shown = command("pretrain", "--resume", str(own_run))
    assert shown.code == 0
    assert f"solo-ext eval knn {own_run}" in shown.out


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


def test_eval_knn(own_run: Path, command: Command) -> None:
    # Overrides and options stand anywhere.
    words = ("eval", "--json", "knn", str(own_run), "k=[1,5]", "--json", "temperature=[0.1]")
    result = command(*words)
    record = document(result)
    assert record["protocol"] == "knn"
    assert [(row["k"], row["temperature"]) for row in record["results"]] == [(1, 0.1), (5, 0.1)]
    assert all(10 < row["acc1"] <= row["acc5"] <= 100 for row in record["results"])
    # The part of the training images that pretraining took, and every validation image.
    assert (record["train"]["images"], record["test"]["images"]) == (280, 397)
    assert record["epoch"] == 1
    assert json.loads((own_run / "eval_knn.json").read_text()) == record
    assert (result.err, result.noise) == ("", [])


def test_eval_shows_a_table(own_run: Path, command: Command) -> None:
    result = command("eval", "linear", str(own_run), "max_iterations=20")
    assert (result.code, result.err) == (0, "")
    assert "linear: debiased, epoch" in result.out
    record = json.loads((own_run / "eval_linear.json").read_text())
    (row,) = record["results"]
    assert set(row) == {"acc1", "acc5", "train_acc1", "weight_decay"}
    assert 10 < row["acc1"] < row["acc5"] <= 100
    assert record["settings"]["max_iterations"] == 20


def test_table_is_text_with_rounded_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup; one row of many numbers stands upright to fit a terminal."""
    rows: list[dict[str, Any]] = [
        {"name": "[/b] of [red]runs[/red]", "value": -12.3456789, "small": -0.00123456789},
        {"name": "plain", "value": 87.5, "small": None},
    ]
    output.show(argparse.Namespace(json=False), "suite: [/b] x", rows)
    monkeypatch.setenv("COLUMNS", "60")
    wide = [{f"number_{n}_of_many": float(n) for n in range(12)}]
    output.show(argparse.Namespace(json=False), "geometry", wide)
    shown = capsys.readouterr().out
    for text in ("suite: [/b] x", "[/b] of [red]runs[/red]", "-12.35", "-0.001235", "87.50"):
        assert text in shown
    assert "None" not in shown
    assert all(f"number {n} of many" in shown for n in range(12))


def test_record_that_cannot_be_written_is_not_lost(
    own_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("solo_ext.core.files.write_text", full)
    result = command("eval", "knn", str(own_run), "k=[3]", "--json")
    assert result.code == 2
    assert len(json.loads(result.out)["results"]) == 2
    (line,) = result.lines
    assert f"the record was not written to '{own_run}': no space left" in line


def test_eval_of_a_folder_of_main(
    command: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its args.json is the config, interpolations and all, none of which is resolved."""
    monkeypatch.setenv("IMAGES_OF_MAIN", str(images))
    networks = host.load().backbones
    backbone, _ = build_backbone(networks, "resnet18", {}, method="byol", dataset="custom")
    args = {
        "name": "byol-mine",
        "method": "byol",
        "backbone": {"name": "resnet18", "kwargs": {}},
        "data": {
            "dataset": "custom",
            "train_path": "${oc.env:IMAGES_OF_MAIN}",
            "val_path": "${data.train_path}",
            "format": "image_folder",
            "num_workers": 0,
            "num_classes": 3,
        },
        "augmentations": [{"crop_size": 16, "num_crops": 2, "rrc": {"enabled": True}}],
        "optimizer": {"name": "lars", "batch_size": 16, "lr": 0.3},
        "wandb_run_id": None,
    }
    write_run(tmp_path / "run", backbone, args)
    words = ("eval", "knn", "run", "k=[1]", "temperature=[0.1]", "--json")
    refused = command(*words)
    assert (refused.code, len(refused.lines)) == (2, 1)
    assert "data.train_path='${oc.env:IMAGES_OF_MAIN}': " in refused.err
    paths = [f"data.{key}_path={images}" for key in ("train", "val")]
    record = document(command(*words, *paths))
    # The nearest neighbour of an image is itself.
    assert record["results"][0]["acc1"] == 100
    assert (record["method"], record["epoch"], record["image_size"]) == ("byol", 5, 16)


def test_process_that_only_helps_says_nothing(
    own_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = command("eval", "knn", str(own_run))
    assert (result.code, result.out, result.err) == (0, "", "")
    assert not (own_run / "eval_knn.json").exists()


def test_eval_suite(own_run: Path, command: Command) -> None:
    words = ("eval", "suite", str(own_run), "protocols=[knn,retrieval]", "knn.k=[3]")
    record = document(command(*words, "--json"))
    assert [e["protocol"] for e in record["entries"]] == ["knn", "retrieval"]
    assert {r["k"] for r in record["entries"][0]["results"]} == {3}
    assert json.loads((own_run / "eval_suite.json").read_text()) == record
    failing = ("protocols=[knn,clustering]", "clustering.k=[5000]")
    shown = command("eval", "suite", str(own_run), *failing)
    assert (shown.code, shown.err) == (1, "")
    assert "k.0=5000: the test split has 397 labelled images" in shown.out
    assert f"report  {own_run / 'eval_suite.html'}" in shown.out
    # It stays in the record, and is none of another call's.
    other = command(*words)
    assert (other.code, other.err) == (0, "")
    assert "clustering" in other.out
    Path("taken").touch()
    refused = command(*words, "out=taken")
    assert (refused.code, refused.out, len(refused.lines)) == (2, "", 1)
    assert "out='taken'" in refused.err


def test_export(own_run: Path, command: Command) -> None:
    result = command("export", str(own_run), "--format", "safetensors", "--json")
    record = document(result)
    out = own_run / "backbone.safetensors"
    assert (record["format"], record["out"]) == ("safetensors", str(out))
    assert record["load"] == f'solo_ext.load_exported("{out}")'
    assert (record["method"], record["epoch"], record["input_size"]) == ("debiased", 1, 32)
    assert record["difference"] <= 1e-6
    assert (result.err, result.noise) == ("", [])
    found = load_exported(out)
    assert found.metadata.features_dim == record["features_dim"] == 8
    assert found.backbone(torch.zeros(2, 3, 32, 32)).shape == (2, 8)


def test_export_for_timm(command: Command, tmp_path: Path) -> None:
    """By default beside the checkpoint; what is printed loads it."""
    name, kwargs = "timm/resnet10t", {"channels": [8, 8, 8, 8]}
    networks = host.load().backbones
    backbone, _ = build_backbone(networks, name, kwargs, method=None, dataset="custom")
    args = {
        "method": "byol",
        "backbone": {"name": name, "kwargs": kwargs},
        "data": {"dataset": "custom"},
        "augmentations": [{"crop_size": 32}],
        "optimizer": {"batch_size": 16},
    }
    write_run(tmp_path / "run", backbone, args)
    result = command("export", "run", "--format=timm", "--out", "student")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "written   student",
        "backbone  timm/resnet10t, 8 features of images of 32 x 32",
        'load      timm.create_model("local-dir:student", pretrained=True)',
    ]
    assert {p.name for p in (tmp_path / "student").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert document(command("export", "run", "--format=timm", "--json"))["out"] == "run/export-timm"


def test_convert_images_to_shards(command: Command, images: Path, tmp_path: Path) -> None:
    words = ("data", "convert", f"data.train_path={images}", "--out", str(tmp_path / "out"))
    assert document(command(*words, "--json")) == {
        "images": 48,
        "shards": 1,
        "unreadable": [],
        "out": str(tmp_path / "out"),
    }
    done = command(*words)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "holds shards already; name another folder with --out" in done.err


@pytest.mark.fault
@pytest.mark.slow
def test_convert_that_is_killed(tmp_path: Path) -> None:
    """Again and again, until it is done."""
    rng = np.random.default_rng(0)
    for index in range(60):
        place = tmp_path / "folder" / "ab"[index % 2] / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(place)
    words = [*forks.SOLO_EXT, "data", "convert", f"data.train_path={tmp_path}/folder"]
    words += ["--shard-mb", "1", "--out"]
    assert forks.run(*words, tmp_path / "whole").returncode == 0
    parts, killed = tmp_path / "parts", 0
    while not (parts / "index.json").exists():
        before = len(list(parts.glob("*.mds")))
        process = forks.start(*words, parts)
        while process.poll() is None and len(list(parts.glob("*.mds"))) < before + 3:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        assert process.wait(60) in (0, -signal.SIGKILL)
    assert killed > 1
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in parts.iterdir()} == whole
