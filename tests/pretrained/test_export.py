"""Exports: the same features back in plain timm or through the one loader, or a refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import solo_ext
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.transforms import STATISTICS, eval_transform
from solo_ext.host import Host
from solo_ext.pretrained import export as exporting
from solo_ext.pretrained.export import Format, export, timm_candidates
from solo_ext.pretrained.exported import KEY, load_exported
from solo_ext.pretrained.runs import load_pretrained
from tests.pretrained.conftest import MakeRun, features, refusal

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
TINY = ("timm/resnet10t", {"channels": [8, 8, 8, 8]})
VIT = {"img_size": 32, "patch_size": 8}
ALONE = """
import importlib.machinery, sys
gone = {"solo", "solo_ext"}
find = importlib.machinery.PathFinder.find_spec
def blocked(name, path=None, target=None):
    return None if name.partition(".")[0] in gone else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(blocked)
import timm, torch
images = torch.load("images.pt")
plain = timm.create_model("local-dir:export-timm", pretrained=True).eval()
gone.remove("solo_ext")
import solo_ext
ours = solo_ext.load_exported("backbone.safetensors").backbone
torch.save([plain(images).detach(), ours(images).detach()], "found.pt")
try:
    from solo_ext import host
    host.load()
except solo_ext.core.errors.UserError as error:
    print(str(error).partition(";")[0])
"""


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def in_plain_timm(folder: Path) -> list[nn.Module]:
    """By both of timm's own ways to load a model."""
    config = json.loads((folder / "config.json").read_text())
    return [
        timm.create_model(f"local-dir:{folder}", pretrained=True),
        timm.create_model(
            config["architecture"],
            checkpoint_path=str(folder / "model.safetensors"),
            **config["model_args"],
        ),
    ]


def left(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


@pytest.mark.parametrize(
    ("name", "kwargs", "width", "size"),
    [
        ("timm/resnet10t", {"channels": [8, 8, 8, 12], "small_stem": False}, 12, 32),
        ("timm/vit_tiny_patch16_224", VIT, 192, 32),
        ("resnet18", {"zero_init_residual": True}, 512, 64),
        ("vit_tiny", VIT, 192, 32),
        ("swin_tiny", {"img_size": 32, "window_size": 4}, 768, 32),
    ],
)
def test_same_features_in_plain_timm(
    name: str, kwargs: dict[str, Any], width: int, size: int, make_run: MakeRun
) -> None:
    run = make_run(name, kwargs, size=size)
    images = torch.randn(3, 3, size, size)
    expected = features(load_pretrained(run).backbone, images)
    done = export(run, "timm")
    assert done.out == run / "export-timm"
    assert done.difference <= 1e-6
    for model in in_plain_timm(done.out):
        assert type(model).__module__.startswith("timm.")
        assert (model.num_classes, features(model, images).shape[1]) == (0, width)
        assert close(features(model, images), expected)
    found = load_exported(done.out)
    assert close(found.backbone(images), expected)
    assert found.metadata.features_dim == width
    assert json.loads((done.out / "config.json").read_text())["num_features"] == width


@pytest.mark.parametrize("method", ["mocov3", "mae"])
def test_heads_that_no_shape_shows(method: str, loaded: Host, make_run: MakeRun) -> None:
    """main's vision transformers of two methods have other numbers of heads than timm's."""
    if loaded.info.generation != "main":
        pytest.skip("main alone has them")
    run = make_run("vit_tiny", VIT, method=method)
    images = torch.randn(2, 3, 32, 32)
    done = export(run, "timm")
    assert done.metadata.backbone.kwargs["num_heads"] == 12
    model = timm.create_model(f"local-dir:{done.out}", pretrained=True)
    assert close(features(model, images), features(load_pretrained(run).backbone, images))


def test_features_decide_which_model_is_the_same(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of all candidates have the same names and shapes."""
    run = make_run("timm/vit_tiny_patch16_224", VIT)
    (own, *_) = timm_candidates("timm/vit_tiny_patch16_224", VIT)
    others = [(own[0], {**own[1], "num_heads": heads}) for heads in (1, 6)]
    monkeypatch.setattr(exporting, "timm_candidates", lambda *_: [*others, own])
    assert export(run, "timm").metadata.backbone.kwargs == own[1]
    other = run.parent / "other"
    monkeypatch.setattr(exporting, "timm_candidates", lambda *_: others)
    line = refusal(export, run, "timm", other)
    assert "the features of its vit_tiny_patch16_224 differ by" in line
    assert not other.exists()


@pytest.mark.parametrize(
    ("name", "kwargs", "dataset", "says"),
    [
        ("timm/resnet18", {"small_stem": True}, "custom", "size mismatch for conv1.weight"),
        # Here every shape is timm's.
        (TINY[0], {**TINY[1], "small_stem": True}, "custom", "features of its resnet10t differ by"),
        ("resnet18", {}, "cifar10", "size mismatch for conv1.weight"),
        ("wide_resnet28w2", {}, "custom", "it has no model of that kind"),
    ],
)
def test_networks_that_timm_does_not_build(
    name: str, kwargs: dict[str, Any], dataset: str, says: str, loaded: Host, make_run: MakeRun
) -> None:
    if name not in loaded.backbones:
        pytest.skip("main alone has it")
    run = make_run(name, kwargs, dataset=dataset)
    before = left(run)
    line = refusal(export, run, "timm")
    assert line.startswith(f"timm does not build backbone {name!r} with ")
    assert says in line
    assert line.endswith("take --format safetensors, which solo_ext.load_exported reads")
    assert left(run) == before
    images = torch.randn(3, 3, 32, 32)
    done = export(run, "safetensors")
    found = solo_ext.load_exported(str(done.out))
    assert close(found.backbone(images), features(load_pretrained(run).backbone, images))
    assert not found.backbone.training


@pytest.mark.slow
def test_nothing_of_ours_is_needed(make_run: MakeRun) -> None:
    """Plain timm loads the folder; the loader needs no solo-learn for what timm builds."""
    run = make_run()
    export(run, "timm")
    export(run, "safetensors")
    images = torch.randn(2, 3, 32, 32)
    torch.save(images, run / "images.pt")
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, cwd=run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = features(load_pretrained(run).backbone, images)
    assert all(close(found, expected) for found in torch.load(run / "found.pt"))
    assert done.stdout == "solo-learn is not installed\n"


@pytest.mark.parametrize(
    ("dataset", "augmentation", "statistics"),
    [
        ("cifar100", {"mean": [0.5] * 3, "std": [0.5] * 3}, STATISTICS["cifar100"]),
        ("custom", {"mean": None, "std": None}, IMAGENET),
        ("custom", {"mean": [0.5, 0, 1], "std": [0.25, 0.5, 1]}, ([0.5, 0, 1], [0.25, 0.5, 1])),
    ],
)
def test_images_are_normalised_as_in_pretraining(
    dataset: str, augmentation: dict[str, Any], statistics: Any, make_run: MakeRun
) -> None:
    run = make_run(dataset=dataset, size=40, **augmentation)
    folder = export(run, "timm").out
    (model, _) = in_plain_timm(folder)
    found = timm.data.resolve_model_data_config(model)
    assert (tuple(found["input_size"]), found["interpolation"]) == ((3, 40, 40), "bicubic")
    assert (list(found["mean"]), list(found["std"])) == tuple(map(list, statistics))
    image = Image.effect_noise((70, 60), 60).convert("RGB")
    ours = eval_transform(40, *statistics)(image)
    for path in (folder, export(run, "safetensors").out):
        read = load_exported(path)
        about = read.metadata
        assert (about.input_size, about.mean, about.std) == (40, *map(list, statistics))
        assert torch.equal(read.transform()(image), ours)
    transform = timm.data.create_transform(**found)
    assert transform(image).shape == ours.shape == (3, 40, 40)
    if dataset == "cifar100":
        # Its images are smaller than the crops: an evaluation cuts nothing off.
        small = image.crop((0, 0, 32, 32))
        torch.testing.assert_close(transform(small), eval_transform(40, *statistics)(small))


def test_metadata(make_run: MakeRun) -> None:
    run = make_run(kwargs={**TINY[1], "pretrained": False}, method=None)
    source = load_pretrained(run)
    (checkpoint,) = run.glob("*.ckpt")
    for path in (export(run, "timm").out, export(checkpoint, "safetensors").out):
        said = load_exported(path).metadata
        assert (said.method, said.dataset, said.epoch) == (None, "custom", 7)
        assert said.checkpoint_sha256 == source.digest
        assert said.solo_ext == solo_ext.__version__
        # What would fetch weights is left out.
        assert said.backbone.name == "timm/resnet10t"
        assert {**TINY[1], "num_classes": 0} == {"num_classes": 0, **said.backbone.kwargs}
    with safe_open(run / "backbone.safetensors", "pt") as file:
        assert json.loads(file.metadata()[KEY])["input_size"] == 32


def test_arguments_of_timms_models() -> None:
    renamed = {"num_classes": 0, "cardinality": 32, "base_width": 4}
    assert timm_candidates("resnet50", {"groups": 32, "width_per_group": 4}) == [
        ("resnet50", renamed)
    ]
    # Else a timm that takes the size from the images would resize position embeddings.
    tagged = "vit_tiny_patch16_384.augreg_in21k_ft_in1k"
    ((name, args), *_) = timm_candidates(f"timm/{tagged}", {"dynamic_img_size": True})
    assert (name, args["img_size"]) == (tagged, [384, 384])
    assert timm_candidates(f"timm/{tagged}", VIT)[0][1]["img_size"] == 32


def test_classes_are_added_by_timm(make_run: MakeRun) -> None:
    run = make_run()
    folder = export(run, "timm").out
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=5)
    images = torch.randn(2, 3, 32, 32)
    assert features(model, images).shape == (2, 5)
    model.reset_classifier(0)
    assert close(features(model, images), features(load_pretrained(run).backbone, images))


def test_tied_weights(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    real = exporting.load_pretrained

    def tied(path: Path) -> Any:
        found = real(path)
        block = found.backbone.get_submodule("layer1.0")
        block.bn2.weight = block.bn1.weight
        return found

    monkeypatch.setattr(exporting, "load_pretrained", tied)
    block = load_exported(export(run, "safetensors").out).backbone.get_submodule("layer1.0")
    assert torch.equal(block.bn1.weight, block.bn2.weight)


def test_training_that_diverged(make_run: MakeRun) -> None:
    run = make_run()
    (file,) = run.glob("*.ckpt")
    state = torch.load(file)
    state["state_dict"]["backbone.conv1.0.weight"].fill_(float("nan"))
    torch.save(state, file)
    assert "not finite" in refusal(export, run, "safetensors")


def test_size_that_does_not_fit(make_run: MakeRun) -> None:
    run = make_run("timm/vit_tiny_patch16_224", VIT, size=40)
    assert "takes no images of 40 x 40" in refusal(export, run, "timm")


def test_places(make_run: MakeRun, tmp_path: Path) -> None:
    """What somebody else wrote there stays; what cannot be written is said."""
    run = make_run()
    for form in ("timm", "safetensors"):
        export(run, form)
        before = left(run)
        assert "it is there already" in refusal(export, run, form)
        assert left(run) == before
    taken, folder = tmp_path / "file.safetensors", tmp_path / "folder.safetensors"
    folder.mkdir()
    for file in (taken, folder / "config.json"):
        file.write_text("mine")
        for form in ("timm", "safetensors"):
            place = taken if file == taken else folder
            line = refusal(export, run, form, place)
            assert "it is there already" in line
        assert file.read_text() == "mine"
    for out, says in (
        (tmp_path / "no" / "x.safetensors", f"no folder {str(tmp_path / 'no')!r}"),
        (tmp_path / "x", "let it end in .safetensors"),
    ):
        with pytest.raises(ConfigError, match="--out=") as caught:
            export(run, "safetensors", out)
        assert says in str(caught.value)
    assert left(tmp_path) == ["file.safetensors", "folder.safetensors", "run"]


@pytest.mark.parametrize("form", ["timm", "safetensors"])
@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
def test_writing_that_fails_leaves_nothing(
    form: Format, failure: BaseException, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(weights: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        raise failure

    run = make_run()
    before = left(run)
    monkeypatch.setattr(exporting, "save_file", half)
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        export(run, form)
    if isinstance(failure, OSError):
        assert "cannot be written: no space left; choose --out" in str(caught.value)
    assert left(run) == before


def test_killed_export_is_no_hindrance(make_run: MakeRun) -> None:
    run = make_run()
    (run / ".export-timm.saving").mkdir()
    (run / ".export-timm.saving" / "model.safetensors").write_bytes(b"half")
    (run / ".backbone.safetensors.saving").write_bytes(b"half")
    for form in ("timm", "safetensors"):
        load_exported(export(run, form).out)  # type: ignore[arg-type]
    assert left(run) == ["args.json", "backbone.safetensors", "export-timm", "name-ep=6.ckpt"]


@pytest.fixture
def exported(make_run: MakeRun) -> Path:
    return export(make_run(), "safetensors").out


def test_files_that_are_no_export(exported: Path, tmp_path: Path) -> None:
    whole = exported.read_bytes()
    for size in (0, 100, -1):
        exported.write_bytes(whole[:size])
        line = refusal(load_exported, exported)
        assert line.startswith(f"export {str(exported)!r} cannot be read: ")
    assert "no such file" in refusal(load_exported, tmp_path / "nothing")
    assert "model.safetensors': no such file" in refusal(load_exported, tmp_path)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(1)}, exported, metadata=metadata)
        assert "its metadata has no 'solo_ext'" in refusal(load_exported, exported)
    for said in ("{", "[1]", "[" * 5000):
        save_file({"weight": torch.zeros(1)}, exported, metadata={KEY: said})
        assert repr(str(exported)) in refusal(load_exported, exported)


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
        (lambda m: m.update(format_version=2), "another version: format_version=2"),
        (lambda m: m.update(more=1), "more=1: unknown key"),
        (lambda m: m.update(features_dim=9), "features_dim=9, and 'timm/resnet10t' has 8"),
        (lambda m: m["backbone"].update(name="timm/resnet81"), "did you mean 'timm/resnet18'?"),
        (lambda m: m["backbone"].update(name="timm/resnet14t"), "does not fit backbone"),
        (lambda m: m["backbone"]["kwargs"].update(width=8), "cannot be rebuilt: backbone.kwargs"),
        (lambda m: m["backbone"]["kwargs"].update(channels=[16] * 4), "of another shape: "),
        *(
            (
                lambda m, key=key: m["backbone"]["kwargs"].update({key: True}),
                f"backbone.kwargs.{key} names weights outside of the file",
            )
            for key in ("pretrained", "weights")
        ),
    ],
)
def test_metadata_that_does_not_do(
    edit: Callable[[dict[str, Any]], Any], says: str, exported: Path
) -> None:
    change(exported, edit)
    line = refusal(load_exported, exported)
    assert says in line
    assert repr(str(exported)) in line


def test_weights_that_do_not_fit(exported: Path) -> None:
    with safe_open(exported, "pt") as content:
        said = content.metadata()
    weights = load_file(exported)
    weights.pop("bn1.bias")
    save_file({**weights, "more": torch.zeros(1)}, exported, metadata=said)
    line = refusal(load_exported, exported)
    assert "missing: bn1.bias; unexpected: more" in line
