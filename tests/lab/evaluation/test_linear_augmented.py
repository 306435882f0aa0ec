"""``eval linear_augmented`` on scikit-learn's digits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from solo_ext.core.errors import ConfigError, UserError
from solo_ext.data.reading import targets_of
from solo_ext.lab.evaluation.context import EvalContext, open_context
from solo_ext.lab.evaluation.evaluate import evaluate
from solo_ext.lab.evaluation.linear import holdout_mask
from solo_ext.lab.evaluation.linear_augmented import LinearAugmented
from solo_ext.lab.evaluation.models import EvalRun
from solo_ext.lab.evaluation.supervised import _cosine_schedule
from tests.lab.evaluation.conftest import PLAIN, RESNET, shared

QUICK: dict[str, Any] = {"epochs": 3, "batch_size": 50, "augmentation": PLAIN}


def opened(digit_images: dict[str, str], out: Path, name: str = "pixels") -> EvalContext:
    given = shared(digit_images, out) | ({} if name == "pixels" else RESNET)
    return open_context(name, EvalRun.model_validate(given))


def run(context: EvalContext, **settings: Any) -> dict[str, Any]:
    (row,) = LinearAugmented.model_validate({**QUICK, **settings}).run(context)
    return row


def head(context: EvalContext, out: Path, **settings: Any) -> dict[str, torch.Tensor]:
    run(replace(context, out=out), save=True, **settings)
    return load_file(out / "linear_augmented.safetensors")


def test_without_augmentation_is_a_plain_probe(
    digit_images: dict[str, str], tmp_path: Path
) -> None:
    """SGD with momentum 0.9 and a cosine by hand, over stored features, in the same order."""
    context = opened(digit_images, tmp_path)
    found = head(context, tmp_path, lr=[0.05])
    x, y = context.features.train
    order = LinearAugmented.model_validate(QUICK).loader(context).order
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


def test_rate_is_chosen_on_training_images_alone(
    digit_images: dict[str, str], tmp_path: Path
) -> None:
    """Each rate's accuracy on the images held out, by one that is trained without them."""
    context = opened(digit_images, tmp_path)
    targets = torch.tensor(list(targets_of(context.train)))
    held = holdout_mask(targets.numpy(), 0.2, 4)
    x, y = context.features.train
    loader = LinearAugmented.model_validate({**QUICK, "seed": 4}).loader(context)
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
    row = run(context, lr=[0.03, 0.001], holdout=0.2, seed=4)
    assert row["held_out"] == ", ".join(f"{r:g}: {s:.2f}" for r, s in scores.items())
    assert row["lr"] == max(scores, key=scores.__getitem__)


def test_backbone_is_left_as_it_is(
    digit_images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = opened(digit_images, tmp_path, "timm/resnet10t")
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
    settings: dict[str, Any] = {"epochs": 10, "augmentation": view}
    first = run(opened(digit_images, tmp_path / "a"), **settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first["acc1"] > 60
    assert run(opened(digit_images, tmp_path / "b"), **settings) == first
    assert run(opened(digit_images, tmp_path / "b"), **settings, seed=1) != first


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": []}, "lr=[]: not a valid value"),
        # Beyond single precision.
        ({"lr": [1e300]}, "lr.0=1e+300: not a valid value"),
        ({"batch_size": 301}, "batch_size=301: the training set has 300 images"),
    ],
)
def test_settings_are_refused(
    settings: dict[str, Any], line: str, digit_images: dict[str, str], tmp_path: Path
) -> None:
    given = {"data": digit_images, "out": str(tmp_path), "num_workers": 0, "device": "cpu"}
    with pytest.raises(ConfigError) as caught:
        evaluate("pixels", "linear_augmented", {**given, **settings})
    assert str(caught.value).startswith(line)


def test_rates_that_all_diverge_are_a_line(digit_images: dict[str, str], tmp_path: Path) -> None:
    context = opened(digit_images, tmp_path)
    with pytest.raises(UserError, match="answers of the classifiers are not finite"):
        run(context, lr=[1e30], weight_decay=1.0)
    assert not list(tmp_path.glob(".unfinished-*"))
    assert run(context, lr=[1e30, 0.01], weight_decay=1.0)["lr"] == 0.01
