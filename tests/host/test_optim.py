"""Tests of the optimisers and schedules that stand in for those of 1.0.2, against main's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solo_ext.host import Host, detect
from solo_ext.host.release_1_0_2.base import BaseMethod, split_by_dimension, warmup_cosine
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain

only_main = pytest.mark.skipif(
    detect().generation != "main", reason="solo-learn 1.0.2 has no working code to compare with"
)
configure_optimizers: Callable[[Any], Any] = BaseMethod.configure_optimizers
SHAPES = ((5, 4), (4,), (3, 2, 3, 3), (3,))
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
lars_options = pytest.mark.parametrize(
    ("clip_lr", "exclude", "decay"), [*itertools.product([False, True], [False, True], [0.0, 1e-2])]
)


def make_module(groups: list[dict[str, Any]], **changes: Any) -> Any:
    """Stands in for a method: what ``configure_optimizers`` reads of one."""
    optimizer = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 1e-2, "extra_optimizer_args": {}}
    schedule = {"scheduler": "warmup_cosine", "scheduler_interval": "step", "lr_decay_steps": None}
    warmup = {"warmup_start_lr": 3e-5, "warmup_epochs": 2, "max_epochs": 5, "min_lr": 0.001}
    trainer = SimpleNamespace(estimated_stepping_batches=20)
    settings = {"exclude_bias_n_norm_wd": False, "trainer": trainer, "learnable_params": groups}
    return SimpleNamespace(**(settings | optimizer | schedule | warmup | changes))


def make_params(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    # As the biases of norms, and the last norm of a block, start.
    made[-1].zero_()
    return [nn.Parameter(p) for p in made]


def make_grads(steps: int = 5) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    scales = [10.0 ** (step - 2) for step in range(steps)]
    return [
        [scale * torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        for scale in scales
    ]


def trained(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[Tensor]:
    for grads in make_grads():
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [p.detach().clone() for p in params]


def lars_kwargs(clip_lr: bool, exclude: bool) -> dict[str, Any]:
    return {"momentum": 0.9, "eta": 0.02, "clip_lr": clip_lr, "exclude_bias_n_norm": exclude}


def by_the_formula(
    params: Sequence[nn.Parameter], lr: float, decay: float, clip_lr: bool, exclude: bool
) -> list[Tensor]:
    """LARS (You et al. 2017, arXiv 1708.03888), eq. 6, with solo-learn's clipping and exclusion."""
    weights = [p.detach().clone() for p in params]
    velocities: list[Any] = [None] * len(weights)
    for grads in make_grads():
        for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
            update = g.clone()
            if (w.ndim > 1 or not exclude) and w.norm() > 0:
                ratio = 0.02 * w.norm() / (g.norm() + decay * w.norm() + 1e-8)
                if clip_lr:
                    ratio = min(ratio / lr, torch.tensor(1.0))
                update = ratio * (g + decay * w)
            held = velocities[i]
            velocities[i] = update if held is None else 0.9 * held + update
            weights[i] = w - lr * velocities[i]
    return weights


def lars(params: Sequence[nn.Parameter], decay: float, **kwargs: Any) -> torch.optim.Optimizer:
    given = {"weight_decay": decay, "extra_optimizer_args": kwargs, "scheduler": "none"}
    made: torch.optim.Optimizer = configure_optimizers(
        make_module([{"params": params}], optimizer="lars", **given)
    )
    return made


@lars_options
def test_lars_equals_the_formula(clip_lr: bool, exclude: bool, decay: float) -> None:
    params = make_params()
    expected = by_the_formula(params, 0.5, decay, clip_lr, exclude)
    found = trained(lars(params, decay, **lars_kwargs(clip_lr, exclude)), params)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_lars_scales_gradients_of_a_closure() -> None:
    """Lightning runs backward inside ``optimizer.step(closure)``, after the release's scaling."""

    def after_a_step(inside: bool) -> list[Tensor]:
        params = make_params()
        optimizer = lars(params, 0.0, **lars_kwargs(clip_lr=False, exclude=False))

        def closure() -> Tensor:
            loss = torch.stack([((p - 1) ** 2).sum() for p in params]).sum()
            loss.backward()
            return loss

        if not inside:
            closure()
        optimizer.step(closure if inside else None)
        return [p.detach() for p in params]

    torch.testing.assert_close(after_a_step(inside=True), after_a_step(inside=False))


def rates(module: Any, steps: int) -> list[list[float]]:
    """Learning rate of every group before each of ``steps`` steps."""
    (optimizer,), (scheduler,) = configure_optimizers(module)
    scheduler = scheduler["scheduler"] if isinstance(scheduler, dict) else scheduler
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def written_out(step: int, base: float, warmup: int, total: int, start: float, end: float) -> float:
    if step < warmup:
        return start + (base - start) * (step / (warmup - 1) if warmup > 1 else 0.0)
    return end + (base - end) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


@pytest.mark.parametrize("warmup", [0, 1, 2, 8, 19])
def test_warmup_cosine_equals_the_formula(warmup: int) -> None:
    for step in range(21):
        found = warmup_cosine(step, 0.5, warmup=warmup, total=20, start=3e-5, end=0.01)
        assert found == pytest.approx(written_out(step, 0.5, warmup, 20, 3e-5, 0.01), abs=1e-12)


@pytest.mark.parametrize("warmup", [0.4, 2.1, 7.3])
def test_a_warmup_of_a_broken_number_of_steps_stays_below_the_base_rate(warmup: float) -> None:
    """Half an epoch of five steps; upstream shoots past the base rate."""
    found = [
        warmup_cosine(step, 0.5, warmup=warmup, total=20, start=0.01, end=0.0) for step in range(21)
    ]
    assert max(found) <= 0.5
    ramp = found[: math.ceil(warmup)]
    assert ramp == sorted(ramp)
    assert ramp[0] == 0.01
    assert found[math.ceil(warmup) :] == sorted(found[math.ceil(warmup) :], reverse=True)


def two_groups(**third: Any) -> list[dict[str, Any]]:
    """Rates of 0.5 and 0.1; with arguments a third group."""
    groups = [{}, {"lr": 0.1}, *([third] if third else [])]
    return [{"params": nn.Linear(4, 3).parameters(), **group} for group in groups]


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("warmup_epochs", [0, 1, 2])
def test_every_group_follows_the_schedule_from_its_own_rate(
    warmup_epochs: int, interval: str
) -> None:
    module = make_module(two_groups(), scheduler_interval=interval, warmup_epochs=warmup_epochs)
    total, each = (20, 4) if interval == "step" else (5, 1)
    for step, found in enumerate(rates(module, total)):
        expected = [
            written_out(step, base, warmup_epochs * each, total, 3e-5, 0.001) for base in (0.5, 0.1)
        ]
        assert found == pytest.approx(expected, rel=1e-9)
    module.learnable_params = two_groups()
    _, (schedule,) = configure_optimizers(module)
    assert (schedule["interval"], schedule["frequency"]) == (interval, 1)


@only_main
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("name", ["sgd", "lars", "adam", "adamw"])
def test_groups_are_as_upstream_makes_them(
    make_config: Any, loaded: Host, name: str, exclude: bool
) -> None:
    """Which parameter gets which rate and weight decay, by the host's own ``configure``."""
    optimizer = {"name": name, "weight_decay": 0.01, "exclude_bias_n_norm_wd": exclude}
    prepared = prepare(make_config("simsiam", optimizer=optimizer))
    method = prepared.method(prepared.cfg)
    names = {p: n for n, p in method.named_parameters()}

    def settings(configure: Callable[[Any], Any]) -> dict[str, tuple[float, float]]:
        made = configure(method)
        return {
            names[p]: (group["lr"], group["weight_decay"])
            for group in made.param_groups
            for p in group["params"]
        }

    found = settings(configure_optimizers)
    assert found == settings(type(method).configure_optimizers)
    assert len(set(found.values())) == (3 if exclude else 2)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("scheduler", ["warmup_cosine", "step", "none"])
def test_static_groups_keep_the_base_rate(scheduler: str, split: bool) -> None:
    groups = two_groups(static_lr=True)
    module = make_module(
        groups, scheduler=scheduler, lr_decay_steps=[3, 6], exclude_bias_n_norm_wd=split
    )
    if scheduler == "none":
        optimizer = configure_optimizers(module)
        found = [[group["lr"] for group in optimizer.param_groups]]
    else:
        found = rates(module, 9)
        assert found[0][0] != found[-1][0], "the others move"
    each = 2 if split else 1
    for number, step in enumerate(found):
        assert len(step) == 3 * each
        # As upstream, whose static groups take the warm-up's first step along.
        first = scheduler == "warmup_cosine" and number == 0
        assert step[2 * each :] == pytest.approx([3e-5 if first else 0.5] * each)
    assert "static_lr" in groups[2], "the method's own groups are left as they are"


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("milestones", [[6, 3], [2]])
def test_rates_decay_tenfold_at_each_milestone(milestones: list[int], static: bool) -> None:
    """With a static group the schedule is another class, which must give the same rates."""
    groups = two_groups(static_lr=True) if static else two_groups()
    module = make_module(groups, scheduler="step", lr_decay_steps=milestones)
    for step, found in enumerate(rates(module, 9)):
        passed = sum(step >= m for m in milestones)
        assert found[:2] == pytest.approx([0.5 * 0.1**passed, 0.1 * 0.1**passed])


@pytest.mark.skipif(detect().generation == "main", reason="main's schedules are its own")
@pytest.mark.parametrize("scheduler", ["warmup_cosine", "step"])
def test_schedules_are_saved_as_plain_numbers(
    scheduler: str, make_config: Any, tmp_path: Path
) -> None:
    """SimSiam has a static group."""
    schedule = {"name": scheduler, "warmup_epochs": 1, "lr_decay_steps": [1, 2]}
    result = pretrain(prepare(make_config("simsiam", scheduler=schedule)), run_dir=tmp_path)
    (state,) = torch.load(result.checkpoint, weights_only=True)["lr_schedulers"]
    assert state["last_epoch"] > 0


def test_vectors_are_parted_from_matrices() -> None:
    """Every parameter stays in exactly one group; settings and order stay."""
    layer, norm = nn.Conv2d(2, 3, 1), nn.BatchNorm1d(3)
    groups: list[dict[str, Any]] = [
        {"name": "a", "params": [*layer.parameters()], "lr": 0.1, "weight_decay": 0.3},
        {"params": [*norm.parameters()]},
    ]
    found = split_by_dimension(groups, weight_decay=0.0)
    assert [g.get("name") for g in found] == ["a", "a_no_decay", None]
    assert [g.get("weight_decay") for g in found] == [0.3, 0.0, 0.0]
    assert [g.get("lr") for g in found] == [0.1, 0.1, None]
    parts = [[id(p) for p in g["params"]] for g in found]
    assert parts == [[id(layer.weight)], [id(layer.bias)], [id(norm.weight), id(norm.bias)]]
    assert groups[0]["weight_decay"] == 0.3
