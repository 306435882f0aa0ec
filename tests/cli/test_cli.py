"""The commands: what they print, where they write, what they import."""

from __future__ import annotations

import argparse
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
from solo_ext.cli import commands
from solo_ext.cli.main import build_parser
from solo_ext.host import detect
from solo_ext.host.backbones import build_backbone
from solo_ext.losses import LOSSES
from solo_ext.methods import METHODS
from solo_ext.pretrained.exported import load_exported

Command = Callable[..., Any]
COMMANDS = (
    "demo",
    "methods",
    "losses",
    "doctor",
    "pretrain",
    "eval",
    "benchmark",
    "export",
)
WITHOUT_SOLO = """
import contextlib, importlib.machinery, io, json, sys
find = importlib.machinery.PathFinder.find_spec
def blocked(name, path=None, target=None):
    return None if name.partition(".")[0] == "solo" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(blocked)
from solo_ext.cli.main import main
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


def document(result: Any) -> Any:
    """The one JSON document on standard output."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_commands_are_all_here() -> None:
    actions = build_parser()._actions
    assert next(tuple(a.choices) for a in actions if a.choices) == COMMANDS
    assert set(commands._COMMANDS) == set(COMMANDS)


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=str)
def test_help(words: tuple[str, ...], command: Command) -> None:
    result = command(*words, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: {' '.join(('solo-ext', *words))} ")


def test_version(command: Command) -> None:
    assert command("--version").out == f"solo-ext {__version__}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import solo_ext",
        "from solo_ext.cli.main import build_parser; build_parser()",
        "from solo_ext.cli.main import main; main(['pretrain', '--config-name'])",
    ],
)
def test_nothing_heavy_is_imported_early(code: str, tmp_path: Path) -> None:
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
    args = json.loads((run_dir / "args.json").read_text())
    assert args["method"] == "debiased"
    # As upstream's scripts read it: scaled by batch / 256.
    assert args["optimizer"]["lr"] == pytest.approx(0.3 * 64 / 256)
    assert trained.noise == []


def test_standard_output_is_the_documents_alone(command: Command) -> None:
    """Lightning prints a bar and a summary of the model there, if it is told to."""
    result = command(
        "pretrain",
        "--json",
        "--config-name=digits/debiased",
        "accelerator=cpu",
        "backbone.kwargs.channels=[8,8,8,8]",
        "data.fraction=0.2",
        "optimizer.batch_size=64",
        "max_epochs=1",
        "enable_progress_bar=true",
        "enable_model_summary=true",
    )
    found = document(result)
    # Beside the default name, and in the folder that the command was started in.
    assert Path(found["run_dir"]).parent == Path("trained_models/debiased")
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


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy of the run, which evaluations may write to."""
    return Path(shutil.copytree(run_dir, tmp_path / "own"))


def test_eval_knn(own_run: Path, command: Command) -> None:
    words = ("eval", "knn", str(own_run), "k=[1,5]", "temperature=[0.1]", "--json")
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


def test_eval_linear(own_run: Path, command: Command) -> None:
    record = document(command("eval", "linear", str(own_run), "--json", "max_iterations=20"))
    (row,) = record["results"]
    assert set(row) == {"acc1", "acc5", "train_acc1", "weight_decay"}
    assert 10 < row["acc1"] < row["acc5"] <= 100
    assert record["settings"]["max_iterations"] == 20
    assert (own_run / "eval_linear.json").is_file()


def test_eval_shows_a_table(own_run: Path, command: Command) -> None:
    result = command("eval", "knn", str(own_run), "k=[3]")
    assert result.code == 0
    assert "knn: debiased, epoch 1" in result.out
    assert result.err == ""


def test_table_is_text_with_rounded_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup, negative numbers are as short as others."""
    rows: list[dict[str, Any]] = [
        {"name": "[/b] of [red]runs[/red]", "value": -12.3456789, "small": -0.00123456789},
        {"name": "plain", "value": 87.5, "small": None},
    ]
    commands._show(argparse.Namespace(json=False), "suite: [/b] x", rows)
    shown = capsys.readouterr().out
    for text in ("suite: [/b] x", "[/b] of [red]runs[/red]", "-12.35", "-0.001235", "87.50"):
        assert text in shown
    assert "None" not in shown


def test_table_of_one_row_stands_upright(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fits a terminal, however many numbers there are."""
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{f"number_{n}_of_many": float(n) for n in range(12)}]
    commands._show(argparse.Namespace(json=False), "geometry", rows)
    shown = capsys.readouterr().out
    assert all(f"number {n} of many" in shown for n in range(12))
    assert "11.00" in shown


def test_overrides_stand_anywhere(own_run: Path, command: Command) -> None:
    words = ("eval", "--json", "knn", str(own_run), "k=[3]", "--json", "temperature=[0.5]")
    (row,) = document(command(*words))["results"]
    assert (row["k"], row["temperature"]) == (3, 0.5)


def test_record_that_cannot_be_written_is_not_lost(
    own_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("solo_ext.training.run_dir.write_text", full)
    result = command("eval", "knn", str(own_run), "k=[3]", "--json")
    assert len(document(result)["results"]) == 2
    assert "the record was not written: no space left" in result.err


def write_run(folder: Path, backbone: Any, prefix: str, args: dict[str, Any]) -> None:
    """A checkpoint folder as upstream's own Checkpointer leaves it."""
    folder.mkdir()
    state = {f"{prefix}.{k}": v for k, v in backbone.state_dict().items()}
    state["classifier.weight"] = torch.zeros(3, 8)
    checkpoint = {"epoch": 4, "global_step": 10, "state_dict": state}
    torch.save(checkpoint, folder / "name-offline-ep=4.ckpt")
    (folder / "args.json").write_text(json.dumps(args))


def test_eval_of_a_folder_of_main(
    command: Command, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its args.json is the config, interpolations and all."""
    monkeypatch.setenv("IMAGES_OF_MAIN", str(images))
    backbone, _ = build_backbone(
        host.load().backbones, "resnet18", {}, method="byol", dataset="custom"
    )
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
    write_run(tmp_path / "run", backbone, "backbone", args)
    record = document(command("eval", "knn", "run", "k=[1]", "temperature=[0.1]", "--json"))
    # The nearest neighbour of an image is itself.
    assert record["results"][0]["acc1"] == 100
    assert (record["method"], record["epoch"], record["image_size"]) == ("byol", 5, 16)


def test_eval_of_a_folder_of_the_release(command: Command, images: Path, tmp_path: Path) -> None:
    """Its args.json is flat, and says of every path that it is not serializable."""
    backbone, _ = build_backbone(
        host.load().backbones,
        "resnet18",
        {"zero_init_residual": True},
        method="byol",
        dataset="custom",
    )
    args = {
        "name": "byol-mine",
        "method": "byol",
        "encoder": "resnet18",
        "backbone_args": {"cifar": False, "zero_init_residual": True},
        "dataset": "custom",
        "data_dir": "<not serializable>",
        "train_dir": "<not serializable>",
        "val_dir": None,
        "num_workers": 0,
        "batch_size": 16,
        "transform_kwargs": [
            {"crop_size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]},
            {"crop_size": 8},
        ],
    }
    write_run(tmp_path / "run", backbone, "encoder", args)
    refused = command("eval", "knn", "run")
    assert refused.code == 2
    assert refused.err.startswith("solo-ext: data.train_path=null: no path; give the folder")
    paths = (f"data.train_path={images}", f"data.val_path={images}")
    record = document(command("eval", "knn", "run", *paths, "k=[1]", "temperature=[0.1]", "--json"))
    assert record["results"][0]["acc1"] == 100
    assert record["backbone"] == {"name": "resnet18", "kwargs": {"zero_init_residual": True}}
    assert (record["epoch"], record["image_size"]) == (5, 16)


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
    assert found.features_dim == record["features_dim"] == 8
    assert found.backbone(torch.zeros(2, 3, 32, 32)).shape == (2, 8)


def test_export_for_timm(command: Command, tmp_path: Path) -> None:
    """By default beside the checkpoint; what is printed loads it."""
    kwargs = {"channels": [8, 8, 8, 8]}
    backbone, _ = build_backbone(
        host.load().backbones, "timm/resnet10t", kwargs, method=None, dataset="custom"
    )
    args = {
        "method": "byol",
        "backbone": {"name": "timm/resnet10t", "kwargs": kwargs},
        "data": {"dataset": "custom"},
        "augmentations": [{"crop_size": 32}],
        "optimizer": {"batch_size": 16},
    }
    write_run(tmp_path / "run", backbone, "backbone", args)
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


def test_export_that_is_refused(own_run: Path, command: Command, tmp_path: Path) -> None:
    """The stem for small images is no model of timm's; another file stays."""
    args = json.loads((own_run / "args.json").read_text())
    args["backbone"]["kwargs"]["small_stem"] = True
    (own_run / "args.json").write_text(json.dumps(args))
    taken = tmp_path / "taken.safetensors"
    taken.write_text("mine")
    before = sorted(own_run.iterdir())
    for words, says in (
        (("--format=timm",), "take --format safetensors"),
        (("--format=safetensors", f"--out={taken}"), f"{str(taken)!r} is there already"),
    ):
        result = command("export", str(own_run), *words)
        assert (result.code, result.out, len(result.lines)) == (2, "", 1)
        assert says in result.err
    assert taken.read_text() == "mine"
    assert sorted(own_run.iterdir()) == before


def test_failures_are_no_mistakes(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """They raise, which ends the process with 1 and shows where."""

    def fail(args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setitem(commands._COMMANDS, "losses", fail)
    with pytest.raises(RuntimeError, match="broken"):
        command("losses")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pretrain", "--config-name", "digits/debiased"), "resume with --resume"),
        (("eval", "knn", "run"), "the same command goes on"),
    ],
)
def test_interruption(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    def interrupt(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(commands._COMMANDS, words[0], interrupt)
    result = command(*words)
    assert (result.code, result.out) == (130, "")
    assert result.lines == [f"solo-ext: interrupted; {says}"]


PCL = (
    "pretrain",
    "--config-name=digits/pcl",
    "accelerator=cpu",
    "backbone.kwargs.channels=[8,8,8,8]",
    "data.fraction=0.2",
    "optimizer.batch_size=64",
    "max_epochs=1",
    "method_kwargs.warmup_epochs=0",
)


def test_e_step_is_reported(command: Command) -> None:
    """Once each, on standard error, however often the command ran in this process."""
    for _ in range(2):
        result = command(*PCL, "--json")
        (line,) = [text for text in result.err.splitlines() if "E-step" in text]
        assert line.startswith("E-step before epoch 1: 20+50+100 prototypes by torch k-means")
        assert document(result)["epochs"] == 1


def test_more_prototypes_than_images(command: Command) -> None:
    result = command(*PCL, "method_kwargs.num_prototypes=[50,300]")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "solo-ext: method_kwargs.num_prototypes=[50, 300]: the training set has 280 images; "
        "allowed: numbers up to 280\n"
    )


def test_eval_of_a_model_of_timm(command: Command, images: Path) -> None:
    """Its record lies in a folder of its own, below the current one."""
    paths = (f"data.train_path={images}", f"data.val_path={images}")
    own = ("pretrained=false", "model_kwargs.channels=[8,8,8,8]", "crop_size=16", "num_workers=0")
    shown = command("eval", "knn", "timm/resnet10t", "k=[1]", *paths, *own)
    assert shown.code == 0, shown.err
    assert "knn: timm/resnet10t" in shown.out
    file = Path("evaluations") / "timm-resnet10t-random-0" / "eval_knn.json"
    assert json.loads(file.read_text())["results"][0]["acc1"] == 100


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
    shown = command(*words)
    assert (shown.code, shown.err) == (0, "")
    assert f"report  {own_run / 'eval_suite.html'}" in shown.out


def test_eval_suite_with_a_failure(own_run: Path, command: Command) -> None:
    words = ("eval", "suite", str(own_run), "protocols=[knn,clustering]", "clustering.k=[5000]")
    shown = command(*words)
    assert (shown.code, shown.err) == (1, "")
    assert "k.0=5000: the test split has 397 labelled images" in shown.out
    assert "acc1" in shown.out
    # It stays in the record, and is none of another call's.
    other = command("eval", "suite", str(own_run), "protocols=[knn]")
    assert (other.code, other.err) == (0, "")
    assert "clustering" in other.out


def test_eval_suite_into_a_file(own_run: Path, command: Command) -> None:
    Path("taken").touch()
    shown = command("eval", "suite", str(own_run), "protocols=[knn]", "out=taken")
    assert (shown.code, shown.out, len(shown.lines)) == (2, "", 1)
    assert "out='taken'" in shown.err
