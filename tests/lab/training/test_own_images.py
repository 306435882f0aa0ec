"""A run on pictures of one's own: what is found in folders, and what is chosen by it."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from solo_ext import pretrain
from solo_ext.config.compose import compose, shipped_configs
from solo_ext.core.errors import ConfigError
from solo_ext.lab.cli.main import main
from solo_ext.lab.training.own_images import Machine, Plan, plan_run
from solo_ext.lab.training.pictures import LEAST, look_at
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain as train
from tests.conftest import need_method

CPU = Machine(cores=2, memory=2**34)
GPU = Machine(cores=16, memory=2**36, gpus=1, bfloat16=True)
METHODS = sorted(name.partition("/")[2] for name in shipped_configs() if name.startswith("images/"))
TINY = [
    "backbone.name=timm/resnet10t",
    "backbone.kwargs={channels: [8, 8, 8, 8], small_stem: false}",
    *("max_epochs=1", "accelerator=cpu", "data.num_workers=0"),
]


def draw(root: Path, names: Any, side: int = 24, seed: int = 0) -> Path:
    """Writes noise of ``side`` pixels as JPEG under these names."""
    rng = np.random.default_rng(seed)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(root / name)
    return root


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures in folders of several depths, with what a computer leaves beside them."""
    places = ("", "2021/", "2021/may/", "2022/sea/")
    names = [f"{places[n % 4]}{n:02}.jpg" for n in range(60)]
    root = draw(tmp_path_factory.mktemp("album") / "my photos", names)
    (root / "2021" / "._04.jpg").write_bytes(b"Mac OS X")
    (root / ".thumbnails").mkdir()
    (root / ".thumbnails" / "1.png").write_bytes(b"no image")
    (root / "list.txt").write_text("no image")
    return root


def classes(root: Path, names: str, count: int = 12, **given: Any) -> Path:
    return draw(root, [f"{a}/{n}.png" for a in names.split() for n in range(count)], **given)


def test_folders_of_any_depth(album: Path) -> None:
    found = look_at([str(album)])
    assert (found.count, found.classes, found.hidden, found.side) == (60, 0, 1, 24)
    assert found.data == {"train_path": str(album), "no_labels": True}
    assert (found.name, found.alike, found.unreadable) == ("my-photos", (24, 24), {})


def test_folders_that_are_classes(tmp_path: Path) -> None:
    """Only where that is plain to see, or asked for."""
    root = str(classes(tmp_path / "a", "ant bee"))
    assert look_at([root]).classes == 2
    assert look_at([root], no_labels=True).classes == 0
    assert look_at([str(classes(tmp_path / "b", "2021 2022-05"))]).classes == 0
    assert look_at([str(classes(tmp_path / "c", "ant bee", count=9))]).classes == 0
    assert look_at([str(tmp_path / "c")], no_labels=False).classes == 2
    assert look_at([str(draw(tmp_path / "a", ["more.png"]))]).classes == 0
    assert look_at([str(classes(tmp_path / "d", "ant ant/more bee"))]).classes == 0


def test_folders_of_training_and_validation(tmp_path: Path) -> None:
    for split in ("train", "val"):
        classes(tmp_path / split, "ant bee")
    found = look_at([str(tmp_path)])
    assert (found.count, found.classes) == (24, 2)
    assert found.data["val_path"] == str(tmp_path / "val")
    assert look_at([str(tmp_path)], no_labels=True).count == 48
    classes(tmp_path / "val", "cat")
    assert look_at([str(tmp_path)]).classes == 0
    # Splits without classes are none.
    assert look_at([str(classes(tmp_path / "flat", "train val"))]).classes == 0
    words = [f"data.val_path={tmp_path / 'flat'}"]
    (tmp_path / "val" / "cat").rename(tmp_path / "cats")
    plan = plan_run([str(tmp_path)], "simclr", words, machine=CPU)
    assert plan.config["data"]["val_path"] == str(tmp_path / "flat")


def test_several_folders_and_a_list(album: Path, tmp_path: Path) -> None:
    classes(tmp_path / "more", "ant bee")
    found = look_at([str(album), str(tmp_path / "more")])
    assert (found.count, found.classes) == (84, 0)
    assert found.data["train_path"] == [str(album), str(tmp_path / "more")]
    lines = [f"{path}\n" for path in sorted(album.rglob("[0-9]*.jpg"))[:20]]
    (tmp_path / "list.txt").write_text("".join(lines))
    assert look_at([str(tmp_path / "list.txt")]).count == 20
    (tmp_path / "list.txt").write_text(
        "".join(f"{line.strip()} a{n % 2}\n" for n, line in enumerate(lines))
    )
    assert look_at([str(tmp_path / "list.txt")]).classes == 2


def wrong(problem: str, *images: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        look_at(images)
    assert caught.value.key == "IMAGES"
    assert "\n" not in str(caught.value)


def test_refuses_what_nothing_is_learned_from(album: Path, tmp_path: Path) -> None:
    wrong("no such folder", str(tmp_path / "nowhere"))
    wrong("no such folder", "")
    wrong("no image in it", str(tmp_path))
    one = draw(tmp_path / "one", ["0.png"])
    wrong("one image, and methods compare images", str(one))
    wrong(f"give {LEAST} or more", str(draw(one, ["1.png", "2.png"])))
    for number in range(20):
        draw(tmp_path / "same", [f"{number}.png"])
    (tmp_path / "same" / "torn.png").write_bytes(b"x")
    wrong("20 images are copies of one", str(tmp_path / "same"))
    for number in range(1, 20):
        (tmp_path / "same" / f"{number}.png").write_bytes(b"x" * number)
    wrong("one image, and methods compare images", str(tmp_path / "same"))
    (tmp_path / "same" / "0.png").unlink()
    wrong("none of 20 images can be read", str(tmp_path / "same"))
    wrong("is named twice", str(album), str(album))
    with pytest.raises(ConfigError, match="no folder"):
        look_at([])
    wrong("a file beside others", str(album), str(album / "00.jpg"))
    wrong("lies in", str(album), str(album / "2021"))
    wrong("no text", str(album / "00.jpg"))


def test_odd_files_are_named_or_read(tmp_path: Path) -> None:
    """An animation is its first frame, transparency is dropped; what is unreadable is left out."""
    root = draw(tmp_path, [f"{n}.png" for n in range(20)])
    frames = [Image.new("RGB", (24, 24), colour) for colour in ("red", "blue")]
    frames[0].save(root / "moves.gif", save_all=True, append_images=frames[1:])
    frames[0].save(root / "moves.png", save_all=True, append_images=frames[1:])
    Image.new("RGBA", (24, 24)).save(root / "clear.png")
    Image.new("CMYK", (24, 24)).save(root / "print.jpg")
    (root / "empty.png").touch()
    (root / "torn.png").write_bytes((root / "0.png").read_bytes()[:20])
    found = look_at([str(root)])
    assert set(map(Path, found.unreadable)) == {root / "empty.png", root / "torn.png"}
    plan = plan_run([str(root)], "simclr", TINY, machine=CPU)
    assert any("2 are unreadable and will be left out" in line for line in plan.lines())
    assert plan.config["data"]["unreadable"] == "skip"


def seen(plan: Plan) -> dict[str, Any]:
    return {choice.key: choice.value for choice in plan.choices}


def test_choices_for_a_few_small_pictures(album: Path) -> None:
    plan = plan_run([str(album)], machine=CPU)
    assert seen(plan) == {
        "data.no_labels": True,
        "augmentations.0.crop_size": 32,
        "backbone.name": "timm/resnet18",
        "backbone.kwargs.small_stem": False,
        "optimizer.batch_size": 8,
        "max_epochs": 100,
        "optimizer.lr": 0.1,
        "precision": "auto",
        "data.augmentation": "batch",
        "data.in_memory": True,
        "data.num_workers": 2,
        "method_kwargs.warmup_epochs": 10,
        "online_eval.every_n_epochs": 10,
    }
    assert plan.config["scheduler"]["warmup_epochs"] == 10
    text = "\n".join(plan.lines())
    assert f"60 in {album}, without labels; hidden files passed over: 1" in text
    for key in seen(plan):
        assert f"  {key}=" in text


def test_some_of_many_images_are_held_out(tmp_path: Path) -> None:
    draw(tmp_path, [f"{n}.png" for n in range(120)])
    chosen = seen(plan_run([str(tmp_path)], machine=CPU))
    assert (chosen["data.holdout"], chosen["optimizer.batch_size"]) == (0.1, 8)


@pytest.mark.parametrize(
    "word",
    [
        *("max_epochs=null", "max_epochs=abc", "max_epochs=0", "~max_epochs", "optimizer=null"),
        *("augmentations=[]", "augmentations.0.crop_size=null", "data=null", "~data", "devices=0"),
        *("backbone.name=null", "optimizer.batch_size=x", "data.holdout=1.0", "method_kwargs=null"),
    ],
)
def test_wrong_settings_are_a_line(album: Path, word: str) -> None:
    with pytest.raises(ConfigError):
        plan_run([str(album)], "simclr", [word], machine=CPU)


def test_choices_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    draw(tmp_path, [f"{n}.jpg" for n in range(40)], side=300)
    draw(tmp_path, ["other.jpg"], side=200)
    found = plan_run([str(tmp_path)], "simclr", machine=GPU)
    chosen = seen(found)
    assert chosen["augmentations.0.crop_size"] == 224
    assert chosen["precision"] == "bf16-mixed"
    assert (chosen["max_epochs"], chosen["data.num_workers"]) == (800, 8)
    assert "backbone.kwargs.small_stem" not in chosen
    assert found.config["data"].get("augmentation", "image") == "image"
    old = Machine(cores=16, memory=2**36, gpus=1)
    assert plan_run([str(tmp_path)], "simclr", machine=old).config["precision"] == "16-mixed"


def test_many_images_take_larger_networks_and_all_gpus(album: Path) -> None:
    from dataclasses import replace

    from solo_ext.lab.training.own_images import _Rules

    found = replace(look_at([str(album)]), count=200_000, side=400, alike=None)
    for gpus in (1, 4):
        machine = replace(GPU, gpus=gpus)
        config = compose("images/simclr")
        rules = _Rules(config, {}, found, machine)
        chosen = {choice.key: choice.value for choice in rules.apply()}
        assert chosen["backbone.name"] == "timm/resnet50"
        assert chosen["data.holdout"] == 0.01
        assert chosen["max_epochs"] == 100
        assert (chosen.get("devices"), config["strategy"]) == (
            (4, "ddp") if gpus > 1 else (None, "auto")
        )


def test_what_is_given_is_not_chosen(album: Path) -> None:
    words = {
        "augmentations.0.crop_size": 64,
        "backbone.name": "timm/vit_tiny_patch16_224",
        "optimizer.batch_size": 4,
        "max_epochs": 3,
        "data.holdout": None,
        "data.augmentation": "image",
        "seed": 11,
    }
    given = [f"{key}={'null' if value is None else value}" for key, value in words.items()]
    plan = plan_run([str(album)], "simclr", given, machine=CPU)
    assert not words.keys() & seen(plan).keys()
    config = plan.config
    assert config["augmentations"][0]["crop_size"] == 64
    assert (config["data"]["holdout"], config["seed"], config["max_epochs"]) == (None, 11, 3)
    # A vision transformer has the optimiser of one, and fits the crops.
    assert (config["optimizer"]["name"], config["optimizer"]["lr"]) == ("adamw", 3e-4)
    assert config["backbone"]["kwargs"] == {"img_size": 64, "patch_size": 8}
    for wrong_word in ("method=byol", "data.train_path=x", "data.format=h5"):
        with pytest.raises(ConfigError, match="IMAGES and --method say it"):
            plan_run([str(album)], "simclr", [wrong_word], machine=CPU)
    with pytest.raises(ConfigError, match="epochs=2: unknown key"):
        plan_run([str(album)], "simclr", ["epochs=2"], machine=CPU)
    with pytest.raises(ConfigError, match="did you mean 'simclr'"):
        plan_run([str(album)], "simcrl", [], machine=CPU)


def test_the_network_of_the_weights_that_a_run_starts_from(album: Path, tmp_path: Path) -> None:
    words = ["backbone.weights=timm/resnet34.a1_in1k"]
    config = plan_run([str(album)], "simclr", words, machine=CPU).config
    assert config["backbone"] == {
        "name": "timm/resnet34",
        "kwargs": {"small_stem": False},
        "weights": "timm/resnet34.a1_in1k",
    }
    args = {"backbone": {"name": "timm/resnet10t", "kwargs": {"channels": [8, 8, 8, 8]}}}
    args |= {"data": {"dataset": "custom"}, "augmentations": [{"crop_size": 32}]}
    run = tmp_path / "my run"
    run.mkdir()
    (run / "args.json").write_text(json.dumps(args | {"optimizer": {"batch_size": 8}}))
    config = plan_run([str(album)], "simclr", [f"backbone.weights='{run}'"], machine=CPU).config
    assert config["backbone"] == {**args["backbone"], "weights": str(run)}
    words = ["backbone.weights=torchvision/resnet50:IMAGENET1K_V2"]
    config = plan_run([str(album)], "simclr", words, machine=GPU).config
    assert config["backbone"]["name"] == "timm/resnet50"
    assert config["backbone"]["kwargs"] == {"small_stem": False}


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("pcl", "byol") else pytest.param(name, marks=pytest.mark.slow)
        for name in METHODS
        # The teacher is the user's to name; supcon learns from labels.
        if name not in ("seed", "protoseed", "supcon")
    ],
)
def test_every_method_can_start(method: str, album: Path) -> None:
    need_method(method)
    words = ["accelerator=cpu", "data.num_workers=0"]
    if method not in ("mae",):
        words += TINY[:2]
    prepared = prepare(plan_run([str(album)], method, words, machine=CPU).config)
    assert len(prepared.train) == 60
    assert prepared.val is None


def test_supcon_takes_class_folders(album: Path, tmp_path: Path) -> None:
    need_method("supcon")
    prepared = prepare(
        plan_run([str(classes(tmp_path, "a b", 40))], "supcon", TINY, machine=CPU).config
    )
    assert prepared.run.data.num_classes == 2
    with pytest.raises(ConfigError, match="supcon learns from labels"):
        prepare(plan_run([str(album)], "supcon", TINY, machine=CPU).config)


def test_every_rule_is_on_its_page() -> None:
    from solo_ext.lab.training.own_images import _Rules

    keys = re.findall(r'self\.set\(\s*f?"([a-z_.]+)', inspect.getsource(_Rules))
    assert {"max_epochs", "data.holdout"} <= set(keys)
    page = (Path(__file__).parents[3] / "docs" / "start" / "choices.md").read_text()
    sections = ("augmentations.", "method_kwargs.", "backbone.kwargs.")
    told = {next((k for k in sections if key.startswith(k)), key).strip(".") for key in keys}
    assert not [key for key in sorted(told) if key not in page]


def test_every_method_of_solo_learn_and_of_ours_has_a_config() -> None:
    from solo_ext import methods
    from solo_ext.lab.training.builtin_methods import BUILTIN_KWARGS

    assert set(METHODS) == {*BUILTIN_KWARGS, *methods.METHODS}


def test_a_teacher_by_one_word(album: Path, tmp_path: Path) -> None:
    import timm

    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("resnet18").state_dict(), file)
    plan = plan_run([str(album)], None, TINY, teacher=str(file), machine=CPU)
    assert plan.config["method"] == "protoseed"
    kwargs = plan.config["method_kwargs"]
    assert (kwargs["teacher"]["layout"], kwargs["teacher"]["model"]) == ("torchvision", "resnet18")
    assert kwargs["head"] == "mlp"
    assert "teacher.layout=torchvision" in "\n".join(plan.lines())
    prepared = prepare(plan.config)
    assert prepared.run.method_kwargs.teacher.path == str(file)
    seed = plan_run([str(album)], "seed", TINY, teacher=str(file), machine=CPU)
    assert seed.config["method_kwargs"]["teacher"] == kwargs["teacher"]
    for method, teacher, problem in (
        ("simclr", str(file), "it has no teacher"),
        ("seed", None, "it learns from a teacher"),
        (None, str(tmp_path / "nothing"), "no such file or folder"),
    ):
        with pytest.raises(ConfigError, match=problem):
            plan_run([str(album)], method, TINY, teacher=teacher, machine=CPU)


def test_a_dry_run_refuses_weights_that_a_run_refuses(
    album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import timm

    for channels, fits in ((8, True), (16, False)):
        file = tmp_path / f"{channels}.pth"
        network = timm.create_model("resnet10t", channels=(channels,) * 4)
        torch.save(network.state_dict(), file)
        words = ["pretrain", str(album), *TINY, f"backbone.weights={file}", "--dry-run"]
        assert main(words) == (0 if fits else 2)
        assert ("it does not fit backbone 'timm/resnet10t'" in capsys.readouterr().err) != fits
    assert main([*words, "backbone.weights=nowhere.pth"]) == 2
    assert "backbone.weights='nowhere.pth': no such file or folder" in capsys.readouterr().err


def test_a_teacher_by_its_settings(album: Path, tmp_path: Path) -> None:
    """Of a network that is not recognised, as the message says; the rest is as with --teacher."""
    import timm

    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("convnext_atto").state_dict(), file)
    with pytest.raises(ConfigError, match=r"\{layout: timm, path: .*, model: NAME\}\" instead, or"):
        plan_run([str(album)], None, TINY, teacher=str(file), machine=CPU)
    written = f"method_kwargs.teacher={{layout: timm, path: {file}, model: convnext_atto}}"
    plan = plan_run([str(album)], None, [*TINY, written], machine=CPU)
    assert plan.config["method"] == "protoseed"
    assert plan.config["method_kwargs"]["head"] == "mlp"
    assert prepare(plan.config).run.method_kwargs.teacher.model == "convnext_atto"
    for method, teacher, change, problem in (
        ("simclr", None, written, "it has no teacher"),
        (None, str(file), written, "names one too; leave one of them out"),
        (
            None,
            None,
            "method_kwargs.teacher={layout: tim}",
            r"method_kwargs\.teacher\.layout='tim'",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            plan_run([str(album)], method, [*TINY, change], teacher=teacher, machine=CPU)


@pytest.mark.slow
def test_crops_fit_a_vision_transformer_that_teaches(album: Path, tmp_path: Path) -> None:
    """Its patches of 14 pixels do not divide crops of 32."""
    import timm

    file = tmp_path / "dinov2.pth"
    network = timm.create_model("vit_small_patch14_dinov2", num_classes=0)
    torch.save(network.state_dict(), file)
    plan = plan_run([str(album)], None, TINY, teacher=str(file), machine=CPU)
    assert plan.config["augmentations"][0]["crop_size"] == 28
    assert "what the teacher takes" in "\n".join(plan.lines())
    assert prepare(plan.config).run.method_kwargs.teacher.model == "vit_small_patch14_dinov2"


@pytest.mark.slow
def test_the_runs_own_config_is_the_same_run(
    album: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit; the model is there, and loads as is said."""
    import timm

    # The page is not looked at, and what draws it compiles for seconds.
    monkeypatch.setattr("solo_ext.lab.end_to_end.report", lambda *_, **__: None)
    done = pretrain(album, "simclr", TINY, run_dir=tmp_path / "run")
    assert "method  simclr" in capsys.readouterr().out
    config = compose(str(tmp_path / "run" / "config.yaml"))
    assert config == yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    again = train(prepare(config), run_dir=tmp_path / "again", show_progress=False)
    weights = [torch.load(run.checkpoint, weights_only=True)["state_dict"] for run in (done, again)]
    differ = [key for key in weights[0] if not torch.equal(weights[0][key], weights[1][key])]
    assert not differ
    assert done.load == f'timm.create_model("local-dir:{done.model}", pretrained=True)'
    model = timm.create_model(f"local-dir:{done.model}", pretrained=True)
    held = model.state_dict()
    backbone = {
        key.removeprefix("backbone."): value
        for key, value in weights[0].items()
        if key.startswith("backbone.")
    }
    assert all(torch.equal(backbone[key], held[key]) for key in held)
