"""Reading exports: torn files, files that are none, metadata that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from solo_ext.core.errors import UserError
from solo_ext.pretrained.export import export
from solo_ext.pretrained.exported import KEY, load_exported

MakeRun = Callable[..., Path]


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.fixture
def exported(make_run: MakeRun) -> Path:
    return export(make_run(), "safetensors").out


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_torn_file(size: int, exported: Path) -> None:
    exported.write_bytes(exported.read_bytes()[:size])
    line = refusal(lambda: load_exported(exported))
    assert line.startswith(f"export {str(exported)!r} cannot be read: ")


class Harmful:
    """Unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_files_that_are_no_export(exported: Path, tmp_path: Path) -> None:
    assert "no such file" in refusal(lambda: load_exported(tmp_path / "nothing"))
    assert "model.safetensors': no such file" in refusal(lambda: load_exported(tmp_path))
    torch.save(Harmful(tmp_path / "written"), exported)
    assert "cannot be read" in refusal(lambda: load_exported(exported))
    assert not (tmp_path / "written").exists()
    save_file({"weight": torch.zeros(1)}, exported)
    assert "is no export: its metadata has no 'solo_ext'" in refusal(
        lambda: load_exported(exported)
    )
    save_file({"weight": torch.zeros(1)}, exported, metadata={"format": "pt"})
    assert "is no export" in refusal(lambda: load_exported(exported))


def change(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits the metadata in place."""
    weights = load_file(file)
    with safe_open(file, "pt") as content:
        said = json.loads(content.metadata()[KEY])
    edit(said)
    save_file(weights, file, metadata={KEY: json.dumps(said)})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.pop("mean"), "mean=null: this key is required"),
        (lambda m: m.update(mean=[0.5]), "mean=[0.5]: not a valid value"),
        (lambda m: m.update(std=[1, 1, 0]), "std.2=0: not a valid value"),
        (lambda m: m.update(format_version=2), "another version: format_version=2"),
        (lambda m: m.update(input_size="32"), "input_size='32': not a valid value"),
        (lambda m: m.update(more=1), "more=1: unknown key"),
        (lambda m: m.update(features_dim=9), "features_dim=9, and 'timm/resnet10t' has 8"),
        (lambda m: m["backbone"].update(name="timm/resnet81"), "did you mean 'timm/resnet18'?"),
        (lambda m: m["backbone"].update(name="timm/resnet14t"), "does not fit backbone"),
        (lambda m: m["backbone"]["kwargs"].update(width=8), "cannot be rebuilt: backbone.kwargs"),
        (lambda m: m["backbone"]["kwargs"].update(channels=8), "cannot be rebuilt: "),
        (lambda m: m["backbone"]["kwargs"].update(channels=[16] * 4), "of another shape: "),
        *(
            (
                lambda m, key=key: m["backbone"]["kwargs"].update({key: True}),
                f"backbone.kwargs.{key} names weights outside of the file",
            )
            for key in ("pretrained", "checkpoint_path", "pretrained_cfg", "weights")
        ),
    ],
)
def test_metadata_that_does_not_do(
    edit: Callable[[dict[str, Any]], Any], says: str, exported: Path
) -> None:
    change(exported, edit)
    line = refusal(lambda: load_exported(exported))
    assert says in line
    assert repr(str(exported)) in line


@pytest.mark.parametrize("said", ["", "{", "[1]", "null", '"text"', "[" * 5000])
def test_metadata_that_is_none(said: str, exported: Path) -> None:
    save_file({"weight": torch.zeros(1)}, exported, metadata={KEY: said})
    assert repr(str(exported)) in refusal(lambda: load_exported(exported))


def test_weights_that_do_not_fit(exported: Path) -> None:
    with safe_open(exported, "pt") as content:
        said = content.metadata()
    weights = load_file(exported)
    weights.pop("bn1.bias")
    save_file({**weights, "more": torch.zeros(1)}, exported, metadata=said)
    line = refusal(lambda: load_exported(exported))
    assert "missing: bn1.bias; unexpected: more" in line
