"""What public issues of other projects report, tried here; docs/project/public-reports.md lists it.

Only what no other test covers, above all what would go wrong without a word.
"""

from __future__ import annotations

import io
import logging
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from solo_ext.config.schema import Backbone, Crop, Data
from solo_ext.core.errors import ConfigError
from solo_ext.data.images import open_images
from solo_ext.data.reading import UnreadableImage, decode_image
from solo_ext.host.backbones import BackboneTable, build_backbone
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.supervised import Classifier
from solo_ext.lab.training.prepare import prepare, tell_of
from solo_ext.lab.training.pretrain import resume
from solo_ext.losses import debiased_loss_func, hard_negative_loss_func, nt_xent_loss_func
from solo_ext.methods.metric_criteria import Batch, TripletCriterion
from solo_ext.pretrained.weights import start_from
from tests.conftest import BATCH, MakeConfig, made_images, need_method
from tests.lab.training.resumable import KillAt
from tests.lab.training.same_run import final, same_weights, train

RATE = 0.3 * BATCH / 256
"""``optimizer.lr`` of the tiny runs, for a batch of 256, scaled to theirs."""
COSINE = {"name": "warmup_cosine", "warmup_epochs": 1, "warmup_start_lr": 0.0}


@pytest.fixture
def rates() -> Iterator[list[float]]:
    """The backbone's learning rate in every optimiser step of the test's runs."""
    found: list[float] = []

    def note(optimizer: Any, *_: Any) -> None:
        # A patch tries the host's schedule on an optimiser of one group.
        if len(optimizer.param_groups) > 1:
            found.append(optimizer.param_groups[0]["lr"])

    handle = register_optimizer_step_pre_hook(note)
    yield found
    handle.remove()


# Learning rates.


@pytest.mark.parametrize("warmup", [0.2, 0.5, 0.7, 1.1])
def test_a_warm_up_of_part_of_an_epoch_ends_at_the_rate(
    warmup: float, make_config: MakeConfig, rates: list[float], tmp_path: Path
) -> None:
    """Three steps an epoch; without its patch solo-learn's main goes up to twice the rate."""
    scheduler = {**COSINE, "warmup_epochs": warmup}
    optimizer = {"batch_size": 16}
    config = make_config("debiased", scheduler=scheduler, optimizer=optimizer, max_epochs=2)
    train(config, tmp_path / "run")
    assert len(rates) == 6
    assert 0.9 * 0.3 * 16 / 256 <= max(rates) <= 0.3 * 16 / 256 + 1e-9
    assert rates[-1] < max(rates)


def test_a_run_of_few_steps_leaves_the_start_of_its_warm_up(
    make_config: MakeConfig, rates: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its warm-up is a part of a step, after which solo-learn's main stays at the first rate."""
    config = make_config("debiased", scheduler=COSINE, max_steps=6, max_epochs=90)
    with caplog.at_level(logging.WARNING):
        train(config, tmp_path / "run")
    assert max(rates) > 0.9 * RATE
    shrinks = "the warm-up shrinks alike, from scheduler.warmup_epochs=1 to 0.0333"
    assert f"max_steps=6 ends the run after 3 of max_epochs=90: {shrinks}" in caplog.text


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({**COSINE, "warmup_epochs": 5}, "the learning rate never reaches optimizer.lr"),
        ({**COSINE, "warmup_epochs": 2}, ""),
        ({"name": "step", "lr_decay_steps": [60, 80]}, "the learning rate never decays"),
        ({"name": "step", "lr_decay_steps": [1, 80]}, ""),
    ],
)
def test_a_schedule_beyond_the_end_is_told(
    scheduler: dict[str, Any], said: str, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tell_of(prepare(make_config("simclr", scheduler=scheduler, max_epochs=2)))
    told = [text for text in caplog.messages if text.startswith("scheduler.")]
    assert [text.endswith(said) for text in told] == [True] * bool(said)


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"limit_train_batches": 0.5}, 3),
        ({"accumulate_grad_batches": 2}, 3),
        ({"max_steps": 5}, 4),
        ({"max_steps": 3, "accumulate_grad_batches": 2}, 2),
    ],
)
def test_a_schedule_ends_with_the_run(
    changes: dict[str, Any],
    last: int,
    make_config: MakeConfig,
    rates: list[float],
    tmp_path: Path,
) -> None:
    """It counts the optimiser's steps that the run will take, whatever decides their number."""
    scheduler = {**COSINE, "warmup_epochs": 0}
    config = make_config("debiased", scheduler=scheduler, max_epochs=4, **changes)
    train(config, tmp_path / "run")
    peak = RATE * changes.get("accumulate_grad_batches", 1)
    cosine = [peak * (1 + np.cos(np.pi * step / (last + 1))) / 2 for step in range(last + 1)]
    assert rates == pytest.approx(cosine, rel=1e-6)


def test_more_batches_than_an_epoch_has_are_not_accumulated(make_config: MakeConfig) -> None:
    """Lightning would step with every epoch, at rates and gradients of the number asked for."""
    prepare(make_config("simclr", accumulate_grad_batches=2))
    with pytest.raises(ConfigError, match=r"an epoch has 2 batches.*; allowed: 1 to 2") as caught:
        prepare(make_config("simclr", accumulate_grad_batches=3))
    assert (caught.value.key, caught.value.value) == ("accumulate_grad_batches", 3)
    limited = {"limit_train_batches": 0.5, "accumulate_grad_batches": 2}
    with pytest.raises(ConfigError, match=r"an epoch has 1 batch.*; allowed: 1$"):
        prepare(make_config("simclr", **limited))


@pytest.mark.parametrize(
    ("scheduler", "step"),
    [({"name": "step", "lr_decay_steps": [1, 3]}, 2), ({**COSINE, "interval": "epoch"}, 3)],
    ids=["milestones", "by epoch"],
)
def test_schedules_by_epoch_go_on_where_they_were(
    scheduler: dict[str, Any],
    step: int,
    make_config: MakeConfig,
    rates: list[float],
    tmp_path: Path,
) -> None:
    """Stopped between two epochs, or within one."""
    checkpoint = {"every_n_steps": 1}
    config = make_config("debiased", scheduler=scheduler, checkpoint=checkpoint, max_epochs=4)
    train(config, tmp_path / "whole")
    whole = [rates.pop(0) for _ in range(8)]
    assert len(set(whole)) > 2
    with pytest.raises(RuntimeError, match="killed"):
        train(config, tmp_path / "parts", callbacks=[KillAt(step)])
    resume(tmp_path / "parts")
    assert rates == whole
    assert final(tmp_path / "parts")["global_step"] == 8
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


# Momentum networks.


class _Momentum(Callback):
    """The first weights of both backbones before each batch, and the means of a batch norm."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor, bool]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._note(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(pl_module)

    def _note(self, method: Any) -> None:
        slow = method.momentum_backbone
        norm = next(m for m in slow.modules() if isinstance(m, nn.BatchNorm2d))
        assert norm.running_mean is not None
        pair = (next(net.parameters()).detach().clone() for net in (method.backbone, slow))
        self.seen.append((*pair, norm.running_mean.clone(), slow.training))


@pytest.mark.parametrize("method", ["byol", "mocov2plus", "mochi", "pcl", "protocpc"])
def test_a_momentum_network_follows_the_optimiser(
    method: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """It moves once a step, after it, and its batch norm trains with every batch."""
    need_method(method)
    watch, momentum = _Momentum(), {"base_tau": 0.75, "final_tau": 0.75}
    config = make_config(method, momentum=momentum, accumulate_grad_batches=2, max_epochs=2)
    train(config, tmp_path / "run", callbacks=[watch])
    assert len(watch.seen) == 5
    for number, (before, after) in enumerate(zip(watch.seen, watch.seen[1:], strict=False)):
        assert before[3], "the momentum network is in eval mode"
        assert not torch.equal(before[2], after[2]), "its batch norm saw no batch"
        stepped = number % 2 == 1
        assert torch.equal(before[0], after[0]) != stepped
        expected = 0.75 * before[1] + 0.25 * after[0] if stepped else before[1]
        torch.testing.assert_close(after[1], expected, rtol=0, atol=1e-7)


# Losses.


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4])
def test_half_precision_embeddings_of_any_length(size: float) -> None:
    """The floor of a norm in single precision is 0 in half, and its largest square infinite."""
    generator = torch.Generator().manual_seed(0)
    z1, z2 = (size * torch.randn(2, 16, 8, generator=generator)).half().requires_grad_().unbind()
    for loss in (
        debiased_loss_func(z1, z2, temperature=0.5, tau_plus=0.1),
        hard_negative_loss_func(z1, z2, temperature=0.5, tau_plus=0.1, beta=1.0),
        nt_xent_loss_func(z1, z2, temperature=0.5),
    ):
        (gradient,) = torch.autograd.grad(loss, z1, retain_graph=True)
        assert bool(gradient.isfinite().all())
        assert 1 < loss.item() < 5


@pytest.mark.parametrize("mining", ["hard", "semi_hard", "random"])
@pytest.mark.parametrize("spread", [0.0, 1e-7, 1.0, 1e6])
def test_mined_negatives_are_of_another_class(mining: str, spread: float) -> None:
    """Also where all embeddings are one point, or distances are too large for their differences."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    z1, z2 = 1.0 + spread * torch.randn(2, 8, 4, generator=generator)
    criterion = TripletCriterion(lambda a, p, n: n.sum(), Batch(2, 4, 4, mining=mining))  # type: ignore[arg-type]
    other = classes != classes.unsqueeze(1)
    chosen, valid = criterion._mine(z1, z2, z2, other)
    assert bool(valid.all())
    assert bool((classes[chosen] != classes).all())


@pytest.mark.parametrize("method", ["supcon", "metric"])
def test_images_without_label_are_no_class(
    method: str, make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    need_method(method)
    files = sorted(images.glob("*/*.png"))
    kwargs = {"loss": "triplet_loss_func", "classes": "label"} if method == "metric" else {}

    def prepared(labels: list[int]) -> None:
        pairs = zip(files, labels, strict=True)
        (tmp_path / "list.txt").write_text("".join(f"{file} {label}\n" for file, label in pairs))
        data = {"train_path": str(tmp_path / "list.txt")}
        prepare(make_config(method, data=data, method_kwargs=kwargs))

    prepared([place % 3 for place in range(48)])
    with pytest.raises(ConfigError, match=f"2 of 48 images have no label, and {method} learns"):
        prepared([-1, -1, *(place % 3 for place in range(46))])


# Images.


def grey_tiff(levels: Any, photometric: int, sample_format: int = 1) -> bytes:
    """A grey TIFF, which PIL itself writes without these two tags."""
    content, bits = levels.tobytes(), 8 * levels.dtype.itemsize
    tags = {256: levels.shape[1], 257: levels.shape[0], 258: bits, 259: 1, 262: photometric}
    tags |= {273: 8 + 2 + 12 * 10 + 4, 277: 1, 278: levels.shape[0], 279: len(content)}
    tags[339] = sample_format
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + content


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_white_may_be_zero(kind: Any) -> None:
    """Pictures of 8 and 16 bits are the same; PIL turns only those of 8 round."""
    grey = np.linspace(0, np.iinfo(kind).max, 12).astype(kind).reshape(3, 4)
    black, white = (
        np.asarray(decode_image(grey_tiff(grey, photometric), lambda: "a.tif")).astype(int)
        for photometric in (1, 0)
    )
    assert black[0, 0].tolist() == [0, 0, 0]
    assert (black + white == 255).all()


@pytest.mark.parametrize("kind", [np.int8, np.int16])
def test_signed_grey_levels_have_no_stated_range(kind: Any) -> None:
    levels = np.arange(12).astype(kind).reshape(3, 4)
    with pytest.raises(UnreadableImage, match="its grey levels are signed numbers"):
        decode_image(grey_tiff(levels, 1, sample_format=2), lambda: "a.tif")


@pytest.mark.parametrize("key", ["mean", "std"])
def test_statistics_are_of_pixels_up_to_one(key: str, make_config: MakeConfig) -> None:
    """Those of pixels up to 255 would make all images alike."""
    of_bytes = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}[key]
    with pytest.raises(ConfigError, match="less than or equal to 1"):
        prepare(
            make_config("simclr", augmentations=[{"crop_size": 16, "num_crops": 2, key: of_bytes}])
        )
    assert Crop(crop_size=16, mean=[0.0, 0.5, 1.0], std=[1.0, 1 / 255, 0.5]).std == [
        1,
        1 / 255,
        0.5,
    ]


@pytest.mark.parametrize("names", [("train",), ("train", "val"), ("Test", "Train", "validation")])
def test_splits_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    """The folder of a data set, instead of that of its training images."""
    made_images(tmp_path / "images", names, count=1)
    data = Data(dataset="custom", train_path=str(tmp_path / "images"))
    with pytest.raises(
        ConfigError, match="are splits, and would be its classes; name one"
    ) as error:
        open_images(data, "train")
    assert repr(str(tmp_path / "images" / sorted(names)[0])) in str(error.value)
    # A train is a class among others, and without labels the folders mean nothing.
    assert len(open_images(data.model_copy(update={"no_labels": True}), "train")) == len(names)
    made_images(tmp_path / "images", ["bus"], count=1)
    assert len(open_images(data, "train")) == len(names) + 1


def test_names_with_dots_in_a_tar_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WebDataset ends a name at its first dot; what is left out by that is told at every start."""
    monkeypatch.setenv("SOLO_EXT_CACHE", str(tmp_path / "cache"))
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    for tar, names in (("a", ["0", "1.v2", "2", "3.v2"]), ("b", ["v1.0/4", "5.seg"])):
        with tarfile.open(tmp_path / f"{tar}.tar", "w") as opened:
            for name in names:
                member = tarfile.TarInfo(f"{name}.png")
                member.size = len(file.getvalue())
                opened.addfile(member, io.BytesIO(file.getvalue()))
    data = Data(dataset="custom", format="webdataset", train_path=str(tmp_path), no_labels=True)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(open_images(data, "train")) == 3
        (said,) = caplog.messages
        assert "3 files are left out: a name ends at its first dot, and .v2.png is no" in said


# Evaluation.


def test_validation_on_training_images_is_told(
    make_config: MakeConfig, images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Random pictures: every one of them is its own nearest neighbour, and so right."""
    seen = "kNN finds each of them itself"
    other = made_images(tmp_path / "other", count=2, seed=1)
    link = tmp_path / "link"
    link.symlink_to(images)
    with caplog.at_level(logging.WARNING):
        tell_of(prepare(make_config("simclr", data={"val_path": str(other)})))
        tell_of(prepare(make_config("simclr", data={"holdout": 0.2})))
        assert seen not in caplog.text
        train(make_config("simclr", data={"val_path": str(link)}), tmp_path / "run")
        assert caplog.text.count(seen) == 1
        (row,) = evaluate(tmp_path / "run", "knn", {"k": [1], "temperature": [0.1]})["results"]
    assert row["acc1"] == 100
    assert caplog.text.count(seen) == 2


def grouped(name: str) -> tuple[Classifier, list[dict[str, Any]]]:
    """A network of timm under a classifier, and the groups that its fine-tuning trains."""
    with torch.device("meta"):
        backbone, width = build_backbone(
            BackboneTable(), f"timm/{name}", {}, method=None, dataset="custom"
        )
        model = Classifier(backbone, width, 10)
    return model, model.param_groups(weight_decay=0.05, layer_decay=0.5)


@pytest.mark.parametrize(
    "name", ["convnext_atto", "hiera_tiny_224", "mambaout_femto", "maxvit_tiny_tf_224", "resnet18"]
)
def test_layers_of_a_network_with_a_head_of_its_own(name: str) -> None:
    """What timm calls ``head`` besides its classifier belongs to the last layer, and is trained."""
    model, groups = grouped(name)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert scales.keys() == {id(p) for p in named.values()}
    heads = [n for n in named if n.startswith(("head.", "backbone.head."))]
    assert {scales[id(named[n])] for n in heads} == {1.0}
    assert min(scales.values()) < 0.1


@pytest.mark.parametrize(
    "name", ["vit_small_patch14_reg4_dinov2", "deit_tiny_distilled_patch16_224"]
)
def test_tokens_learn_like_the_first_layer_and_are_not_decayed(name: str) -> None:
    model, groups = grouped(name)
    of = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    named = dict(model.named_parameters())
    tokens = [n for n in named if n.endswith(("_token", "pos_embed"))]
    assert len(tokens) == 3
    first = of[id(named["backbone.patch_embed.proj.weight"])][0]
    assert {of[id(named[n])] for n in tokens} == {(first, 0.0)}


# Weights.

SMALL = {"depth": 1, "embed_dim": 48, "num_heads": 3}


@pytest.mark.parametrize(
    "name", ["deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"]
)
def test_positions_with_and_without_those_of_tokens(name: str, tmp_path: Path) -> None:
    """Resized as timm does it for weights of its own."""
    file, side = tmp_path / "weights.pth", 112
    torch.save(timm.create_model(name, num_classes=10, **SMALL).state_dict(), file)
    network = timm.create_model(name, num_classes=0, img_size=side, **SMALL)
    start_from(Backbone(name=f"timm/{name}", weights=str(file)), network)
    overlay = {"file": str(file), "custom_load": False, "num_classes": 10}
    own = timm.create_model(
        name, num_classes=0, img_size=side, pretrained=True, pretrained_cfg_overlay=overlay, **SMALL
    )
    for key, value in own.state_dict().items():
        assert torch.equal(network.state_dict()[key], value), key


def test_weights_of_a_size_that_timm_itself_does_not_fit(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """``checkpoint_path`` takes a file as it is; the line names the key that resizes positions."""
    name, file = "vit_tiny_patch16_224", tmp_path / "weights.pth"
    torch.save(timm.create_model(name, **SMALL).state_dict(), file)
    kwargs = {**SMALL, "img_size": 32, "patch_size": 16}
    backbone = {"name": f"timm/{name}", "kwargs": kwargs}
    crops = [{"crop_size": 32, "num_crops": 2}]
    given = {**backbone, "kwargs": {**kwargs, "checkpoint_path": str(file)}}
    with pytest.raises(
        ConfigError, match=r"give it as backbone\.weights, which leaves a"
    ) as caught:
        prepare(replaced(make_config("simclr", augmentations=crops), given))
    assert caught.value.key == "backbone.kwargs.checkpoint_path"
    config = replaced(
        make_config("debiased", augmentations=crops), {**backbone, "weights": str(file)}
    )
    assert (train(config, tmp_path / "run").run_dir / "args.json").is_file()


def replaced(config: dict[str, Any], backbone: dict[str, Any]) -> dict[str, Any]:
    """The config with another backbone, none of whose arguments stay."""
    return {**config, "backbone": backbone}
