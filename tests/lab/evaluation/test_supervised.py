"""``eval finetune`` and ``eval linear_augmented`` on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from solo_ext.config.schema import Images
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.convert import convert
from solo_ext.data.images import open_images
from solo_ext.data.reading import targets_of
from solo_ext.data.views import EpochSampler, shard_starts
from solo_ext.host import Host
from solo_ext.host.backbones import build_backbone
from solo_ext.lab.evaluation.context import EvalContext, open_context
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.supervised import (
    Classifier,
    Finetune,
    LinearAugmented,
    _cosine_schedule,
)
from tests.lab.evaluation.conftest import PLAIN, RESNET, shared

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 50, "augmentation": PLAIN, "lr": 0.01}
Call = Callable[..., dict[str, Any]]


@pytest.fixture
def call(digit_images: dict[str, str], tmp_path: Path) -> Call:
    """``call(**settings)``: the only row of a small ResNet's fine-tuning."""

    def run(**settings: Any) -> dict[str, Any]:
        out = settings.pop("out", tmp_path)
        given = {**shared(digit_images, out), **RESNET, **QUICK, **settings}
        (row,) = evaluate("timm/resnet10t", "finetune", given)["results"]
        return row

    return run


def opened(digit_images: dict[str, str], out: Path, name: str = "pixels") -> EvalContext:
    given = shared(digit_images, out) | ({} if name == "pixels" else RESNET)
    return open_context(name, EvalRun.model_validate(given))


@pytest.fixture
def context(digit_images: dict[str, str], tmp_path: Path) -> EvalContext:
    """The small ResNet and the digits."""
    return opened(digit_images, tmp_path, "timm/resnet10t")


@pytest.fixture
def pixels(digit_images: dict[str, str], tmp_path: Path) -> EvalContext:
    """The digits as they are."""
    return opened(digit_images, tmp_path)


def test_learns_digits_and_saves_the_network(
    call: Call, context: EvalContext, tmp_path: Path
) -> None:
    row = call(epochs=10, layer_decay=1.0, lr=0.05, save=True, out=tmp_path / "saved")
    # Chance is 10.
    assert row["acc1"] > 45
    assert row["acc5"] >= row["acc1"]
    assert row["epochs"] == 10
    model = Classifier(context.backbone(), context.model.features_dim, 10)
    model.load_state_dict(load_file(tmp_path / "saved" / "finetune.safetensors"))
    logits, targets = Finetune().predicted(model, context.loader(context.test), "cpu")
    hits = (logits.argmax(1) == targets).float().mean()
    assert row["acc1"] == pytest.approx(100 * float(hits), abs=1e-4)


def test_is_repeatable_and_leaves_the_generators_alone(call: Call, tmp_path: Path) -> None:
    settings = {"mixup": 0.8, "cutmix": 1.0, "augmentation": {}}
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = call(out=tmp_path / "a", **settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    np.random.seed(7)  # noqa: NPY002
    assert call(out=tmp_path / "b", **settings) == first
    assert call(out=tmp_path / "c", **settings, seed=1) != first
    assert not list((tmp_path / "a").glob(".unfinished*"))


def test_workers_start_as_the_run_says(context: EvalContext) -> None:
    data = context.cfg.data
    data.num_workers, data.start_method = 1, "spawn"
    loader = LinearAugmented(batch_size=50).loader(context)
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_step_without_mixup_is_plain_cross_entropy(context: EvalContext) -> None:
    """One step of SGD by hand: the first, whose rate is the base rate without a warm-up."""
    given: dict[str, Any] = {
        "epochs": 1, "batch_size": 300, "augmentation": PLAIN, "optimizer": "sgd", "lr": 0.1,
        "layer_decay": 1.0, "warmup_epochs": 0.0, "weight_decay": 0.0, "label_smoothing": 0.0,
        "save": True,
    }  # fmt: skip
    settings = Finetune.model_validate(given)
    settings.run(context)
    found = load_file(context.out / "finetune.safetensors")

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier(context.backbone(), context.model.features_dim, 10)
    model.train()
    _, (views,), labels = next(iter(settings.loader(context)))
    F.cross_entropy(model(views), labels).backward()
    rate = 0.1 * 300 / 256
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        # Nesterov's first step has momentum 0.9 on top.
        expected = parameter.detach() - 1.9 * rate * parameter.grad
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


def test_goes_on_behind_the_last_finished_epoch(
    call: Call, tmp_path: Path, interrupt: Callable[[int], list[Path]]
) -> None:
    settings = {"epochs": 3, "mixup": 0.8}
    whole = call(out=tmp_path / "whole", **settings)
    written = interrupt(2)
    with pytest.raises(KeyboardInterrupt):
        call(out=tmp_path / "parts", **settings)
    assert written[0].is_file()
    assert call(out=tmp_path / "parts", **settings) == whole
    assert len(written) == 3
    assert not written[0].exists()


@pytest.mark.fault
def test_damaged_file_of_an_unfinished_training_counts_for_nothing(
    call: Call, tmp_path: Path, interrupt: Callable[[int], list[Path]]
) -> None:
    whole = call(out=tmp_path / "whole")
    written = interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        call()
    written[0].write_bytes(written[0].read_bytes()[:40])
    assert call() == whole


def test_mixed_precision(call: Call, tmp_path: Path) -> None:
    # On smaller images the last maps have one pixel, whose bf16 gradients are not always written.
    plain = call(out=tmp_path / "a", epochs=1, crop_size=32)
    mixed = call(out=tmp_path / "b", epochs=1, crop_size=32, precision="bf16-mixed")
    assert mixed["train_loss"] != plain["train_loss"]
    assert mixed["train_loss"] == pytest.approx(plain["train_loss"], rel=0.1)


@pytest.mark.parametrize(("batch_size", "lr"), [(50, 1e30), (299, 1e20)])
def test_training_that_diverges_is_a_line(
    batch_size: int, lr: float, call: Call, tmp_path: Path
) -> None:
    """Also in its last step, whose loss is that before its update."""
    settings = {"epochs": 1, "optimizer": "sgd", "warmup_epochs": 0.0}
    with pytest.raises(UserError, match="not finite; take a smaller lr"):
        call(**settings, batch_size=batch_size, lr=lr)
    assert not list(tmp_path.glob(".unfinished-*"))


def scales(model: Classifier, layer_decay: float) -> dict[str, float]:
    names = {id(p): n for n, p in model.named_parameters()}
    groups = model.param_groups(0.05, layer_decay)
    return {names[id(p)]: g["lr_scale"] for g in groups for p in g["params"]}


def vit() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, depth=3, embed_dim=12, num_heads=2,
        num_classes=0,
    )  # fmt: skip


def test_transformer_layers_follow_the_formula() -> None:
    """Layer 0 embeds, blocks are 1 to depth, the classifier is depth + 1."""
    found = scales(Classifier(vit(), 12, 3), 0.5)
    assert len(found) == len(list(Classifier(vit(), 12, 3).named_parameters()))
    assert found["head.weight"] == found["head.bias"] == 1
    for block in range(3):
        own = {v for k, v in found.items() if f"blocks.{block}." in k}
        assert own == {0.5 ** (3 - block)}
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight"):
        assert found[f"backbone.{name}"] == 0.5**4
    # The schedule multiplies it with the rate.
    groups = Classifier(vit(), 12, 3).param_groups(0.05, 0.5)
    optimizer = torch.optim.SGD(groups, lr=0.1)
    _cosine_schedule(optimizer, 10).step_update(0)
    assert {g["lr"] for g in optimizer.param_groups} == {0.1 * g["lr_scale"] for g in groups}


@pytest.mark.parametrize("name", ["timm/resnet18", "resnet18"])
def test_resnet_layers_follow_the_formula(name: str, loaded: Host) -> None:
    """timm's, and the host's, which does not say how its layers are grouped: a stem, eight blocks,
    the classifier."""
    own, _ = build_backbone(loaded.backbones, name, {}, method=None, dataset="custom")
    found = scales(Classifier(own, 512, 3), 0.9)
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    for place, block in enumerate(blocks, start=1):
        values = {v for k, v in found.items() if k.startswith(f"backbone.{block}.")}
        assert len(values) == 1
        assert values.pop() == pytest.approx(0.9 ** (9 - place))
    assert found["backbone.conv1.weight"] == pytest.approx(0.9**9)
    assert found["head.weight"] == 1


def test_vectors_and_what_the_backbone_names_are_not_decayed() -> None:
    model = Classifier(vit(), 12, 3)
    names = {id(p): n for n, p in model.named_parameters()}
    for layer_decay in (1.0, 0.5):
        groups = model.param_groups(0.05, layer_decay)
        decay = {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
        assert len(decay) == len(names)
        for name, parameter in model.named_parameters():
            spared = parameter.ndim <= 1 or name.endswith(("pos_embed", "cls_token"))
            assert decay[name] == (0 if spared else 0.05), name


def test_unknown_layers_are_refused_unless_they_learn_alike() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 4, 3)
    with pytest.raises(ConfigError, match=r"layer_decay=0.5: the layers of a Sequential"):
        model.param_groups(0.05, 0.5)
    assert sum(len(g["params"]) for g in model.param_groups(0.05, 1.0)) == 4


def test_unfinished_training_is_found_by_the_same_call_alone(
    digit_images: dict[str, str], tmp_path: Path
) -> None:
    def file(crop: int = 8, **settings: Any) -> Path:
        given = {**shared(digit_images, tmp_path), "crop_size": crop}
        context = open_context("pixels", EvalRun.model_validate(given))
        return Finetune(**settings).checkpoint(context)

    assert file() == file(save=True)
    assert len({file(), file(seed=1), file(crop=16)}) == 3


PROBE: dict[str, Any] = {"epochs": 3, "batch_size": 50, "augmentation": PLAIN}


def run(context: EvalContext, **settings: Any) -> dict[str, Any]:
    (row,) = LinearAugmented.model_validate({**PROBE, **settings}).run(context)
    return row


def test_without_augmentation_is_a_plain_probe(pixels: EvalContext) -> None:
    """SGD with momentum 0.9 and a cosine by hand, over stored features, in the same order."""
    run(pixels, save=True, lr=[0.05])
    found = load_file(pixels.out / "linear_augmented.safetensors")
    x, y = pixels.features.train
    order = LinearAugmented.model_validate(PROBE).loader(pixels).order
    weight, bias = torch.zeros(10, x.shape[1]), torch.zeros(10)
    moved, moved_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    done, total = 0, 3 * 6
    for epoch in range(3):
        order.set_epoch(epoch)
        for rows in torch.tensor([key.sample for key in order]).split(50):
            rate = 0.05 * 50 / 256 * 0.5 * (1 + torch.tensor(torch.pi * done / total).cos())
            logits = x[rows] @ weight.T + bias
            slope = (logits.softmax(1) - F.one_hot(y[rows], 10)) / 50
            moved, moved_bias = 0.9 * moved + slope.T @ x[rows], 0.9 * moved_bias + slope.sum(0)
            weight, bias = weight - rate * moved, bias - rate * moved_bias
            done += 1
    torch.testing.assert_close(found["weight"], weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["bias"], bias, rtol=1e-4, atol=1e-6)


def test_rate_is_chosen_on_training_images_alone(pixels: EvalContext) -> None:
    """Each rate's accuracy on the images held out, by one that is trained without them."""
    targets = torch.tensor(list(targets_of(pixels.train)))
    held = holdout_mask(targets.numpy(), 0.2, 4)
    x, y = pixels.features.train
    loader = LinearAugmented.model_validate({**PROBE, "seed": 4}).loader(pixels)
    scores = {}
    for rate in (0.001, 0.03):
        probe = nn.Linear(x.shape[1], 10)
        nn.init.zeros_(probe.weight)
        nn.init.zeros_(probe.bias)
        optimizer = torch.optim.SGD(probe.parameters(), lr=rate * 50 / 256, momentum=0.9)
        schedule, step = _cosine_schedule(optimizer, 18), 0
        for epoch in range(3):
            loader.order.set_epoch(epoch)
            for indices, (views,), labels in loader:
                seen = ~held[indices]
                schedule.step_update(step)
                optimizer.zero_grad()
                F.cross_entropy(probe(views[seen].flatten(1)), labels[seen]).backward()
                optimizer.step()
                step += 1
        hits = probe(x[held]).argmax(1) == y[held]
        scores[rate] = 100 * float(hits.float().mean())
    row = run(pixels, lr=[0.03, 0.001], holdout=0.2, seed=4)
    assert row["held_out"] == ", ".join(f"{r:g}: {s:.2f}" for r, s in scores.items())
    assert row["lr"] == max(scores, key=scores.__getitem__)


def test_backbone_is_left_as_it_is(context: EvalContext, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = context.backbone().train()
    before = {k: v.clone() for k, v in copied.state_dict().items()}
    monkeypatch.setattr(EvalContext, "backbone", lambda _: copied)
    run(context, augmentation={})
    assert any("running_mean" in k for k in before)
    for name, tensor in copied.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.slow
def test_learns_is_repeatable_and_the_seed_counts(
    digit_images: dict[str, str], tmp_path: Path
) -> None:
    view = {"rrc": {"crop_min_scale": 0.6}, "horizontal_flip": {"prob": 0.0}}
    before = torch.random.get_rng_state()
    learned = run(opened(digit_images, tmp_path / "learned"), epochs=10, augmentation=view)
    assert learned["acc1"] > 60
    settings: dict[str, Any] = {"epochs": 3, "augmentation": view}
    first = run(opened(digit_images, tmp_path / "a"), **settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert run(opened(digit_images, tmp_path / "b"), **settings) == first
    assert run(opened(digit_images, tmp_path / "b"), **settings, seed=1) != first


def test_rates_that_all_diverge_are_a_line(pixels: EvalContext) -> None:
    with pytest.raises(UserError, match="answers of the classifiers are not finite"):
        run(pixels, lr=[1e30], weight_decay=1.0)
    assert not list(pixels.out.glob(".unfinished-*"))
    assert run(pixels, lr=[1e30, 0.01], weight_decay=1.0)["lr"] == 0.01


def test_training_reads_few_shards_at_a_time(digit_images: dict[str, str], tmp_path: Path) -> None:
    """As pretraining does: a disk with room for few shards is enough for remote ones."""
    data = {**digit_images, "format": "image_folder"}
    shards = {split: tmp_path / split for split in ("train", "val")}
    for split, folder in shards.items():
        images = open_images(Images(dataset="custom", **data), split)  # type: ignore[arg-type]
        convert(images, folder, 8000)
    sharded = {f"{split}_path": str(folder) for split, folder in shards.items()}
    sharded |= {"format": "streaming", "streaming": {"shuffle_shards": 2}}  # type: ignore[dict-item]
    context = opened(sharded, tmp_path, "timm/resnet10t")
    starts = shard_starts(context.train)
    assert starts is not None
    assert len(starts) > 6
    loader = Finetune(**QUICK).loader(context)
    order = [index for _, index in loader.order]
    seen = {int(np.searchsorted(starts, i, side="right")) for i in order[: starts[1]]}
    assert len(seen) <= 3
    assert sorted(order) == list(range(len(context.train)))


def test_a_folder_that_cannot_be_written_is_noticed_at_once(
    digit_images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    context = replace(opened(digit_images, tmp_path, "timm/resnet10t"), out=tmp_path / "file")
    monkeypatch.setattr(EpochSampler, "set_epoch", lambda *_: pytest.fail("an epoch began"))
    with pytest.raises(OSError, match="file"):
        Finetune(**QUICK).run(context)
