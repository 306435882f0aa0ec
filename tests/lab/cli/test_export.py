"""`solo-ext export` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from solo_ext import host
from solo_ext.host.backbones import build_backbone
from solo_ext.pretrained.exported import load_exported
from tests.lab.cli.conftest import document, write_run

Command = Callable[..., Any]


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
        (("--format=safetensors", f"--out={taken}"), f"--out={str(taken)!r}: it is there already"),
    ):
        result = command("export", str(own_run), *words)
        assert (result.code, result.out, len(result.lines)) == (2, "", 1)
        assert says in result.err
    assert taken.read_text() == "mine"
    assert sorted(own_run.iterdir()) == before
