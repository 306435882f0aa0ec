"""A loss or gradients that are not finite: the run stops, or leaves the batch out."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from benchmarks.counting import Counter
from solo_ext.core.errors import UserError
from solo_ext.data.folders import ImageFiles
from solo_ext.host.classifier import class_loss
from solo_ext.lab.cli.main import main
from solo_ext.lab.training import nonfinite
from solo_ext.lab.training import pretrain as pretraining
from solo_ext.lab.training.nonfinite import EVERY, NONFINITE, NonFiniteWatch, _norm
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests.conftest import MakeConfig, json_lines
from tests.lab.training.resumable import KillAt
from tests.lab.training.same_run import command_of, same_weights, train, weights
from tests.scripts import run_script

Seldom = Callable[[int], None]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
script: Any = importlib.import_module("nonfinite_run")
sys.path.remove(str(HERE))
Fault = script.Fault
STEPS = 6
"""Steps per epoch: 48 images in batches of 8."""
ALL = range(10_000)


def config_of(make_config: MakeConfig, method: str = "simclr", **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "optimizer": {"batch_size": 8, "lr": 0.05},
        "max_epochs": 2,
        "log_every_n_steps": 1,
    }
    for key, value in changes.items():
        held = settings.get(key)
        settings[key] = {**held, **value} if isinstance(held, dict) else value
    return make_config(method, **settings)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return json_lines(run_dir / NONFINITE)


def finite(state: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in state.values())


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> Seldom:
    """``seldom(n)``: the host looks every n batches, as on a GPU."""

    return functools.partial(monkeypatch.setattr, nonfinite, "EVERY_ON_CPU")


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["image", "infinite", "gradients"])
def test_stops_and_names_the_batch(
    kind: str, make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """The checkpoints from before it stay, and from the last one the run goes on as if nothing
    was."""
    config = config_of(make_config, checkpoint={"every_n_steps": 1})
    fault = Fault(kind, [8])
    run_dir = tmp_path / "run"
    with pytest.raises(UserError) as caught:
        train(config, run_dir, callbacks=[fault])
    what = "gradients are" if kind == "gradients" else "the loss is"
    good = checkpoints(run_dir)[-1]
    assert str(caught.value) == (
        f"{what} not finite in epoch 1, optimiser step 8 (from 0); its images are named in "
        f"{str(run_dir / NONFINITE)!r}; the last good checkpoint is {str(good.path)!r}; try a "
        "lower optimizer.lr or gradient_clip_val=1 or on_nonfinite=skip, which leaves such batches "
        "out"
    )
    assert (good.epoch, good.step) == (1, 8)
    (line,) = lines(run_dir)
    paths = sorted(images.glob("*/*.png"), key=lambda p: (p.parent.name, p.name))
    assert sorted(line.pop("images")) == sorted(str(paths[i]) for i in fault.indices[8])
    value = line.pop("loss")
    assert value == {"image": "nan", "infinite": "inf"}.get(kind, value)
    assert kind != "gradients" or value > 0
    assert line == {
        "epoch": 1,
        "step": 8,
        "rank": 0,
        "what": "gradients" if kind == "gradients" else "loss",
        "then": "stopped",
        "indices": fault.indices[8],
    }
    assert finite(weights(run_dir))
    if kind != "image":
        return
    resume(run_dir)
    train(config, tmp_path / "whole")
    assert same_weights(run_dir, tmp_path / "whole")


@pytest.mark.fault
def test_the_command_ends_with_one_line(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate far too high; no weights that are not finite are left."""
    config = config_of(make_config, optimizer={"lr": 1e30}, checkpoint={"every_n_steps": 1})
    assert main(command_of(config, tmp_path, tmp_path / "run")) == 2
    (error,) = [e for e in capsys.readouterr().err.splitlines() if e.startswith("solo-ext: ")]
    assert "not finite" in error
    assert not checkpoints(tmp_path / "run") or finite(weights(tmp_path / "run"))


@pytest.mark.parametrize("method", ["simclr", "pcl"])
def test_no_labels_are_no_fault(
    method: str, make_config: MakeConfig, images: Path, tmp_path: Path
) -> None:
    """The online classifier has nothing to learn from."""
    data = {"no_labels": True, "train_path": str(images / "0")}
    train(config_of(make_config, method, data=data), tmp_path / "run")
    found = json_lines(tmp_path / "run" / METRICS)
    losses = [r["train_class_loss_step"] for r in found if "train_class_loss_step" in r]
    assert losses == [0, 0, 0, 0]


def test_a_mean_over_labels_where_there_are_some() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    for targets in ([0, -1, 2, 1], [-1] * 4):
        loss = class_loss(logits, torch.tensor(targets))
        rows = [i for i, target in enumerate(targets) if target >= 0]
        own = logits[rows].log_softmax(1)
        expected = [-own[k, targets[i]].item() for k, i in enumerate(rows)]
        assert loss.item() == pytest.approx(sum(expected) / max(len(rows), 1))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isfinite().all()
        assert gradient.abs().sum(1).bool().tolist() == [t >= 0 for t in targets]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_that_tells_of_every_value(dtype: torch.dtype) -> None:
    """Neither a large one nor an empty tensor is a fault; an infinite or missing number is."""
    large = 6e4 if dtype == torch.float16 else 1e18
    tensors = [torch.tensor([large, -large] * 10), torch.zeros(0), torch.tensor([-5.0]).bfloat16()]
    tensors[0] = tensors[0].to(dtype)
    assert _norm(tensors).item() == pytest.approx(large * 20**0.5, rel=0.01)
    for bad in ("inf", "-inf", "nan"):
        assert not _norm([*tensors, torch.tensor([[1, float(bad)]])]).isfinite()
    assert _norm([torch.tensor([3e38, 3e38])]).isinf()


@pytest.mark.parametrize("layers", [1, 40])
def test_launches_do_not_grow_with_the_network(layers: int, tmp_path: Path) -> None:
    """Of a step: six at most, whether it has two parameters or eighty."""
    network: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    watch = NonFiniteWatch(tmp_path, [], "stop")
    trainer: Any = SimpleNamespace(current_epoch=0, accumulate_grad_batches=1)
    trainer.precision_plugin = None
    watch._read_every = EVERY
    network.step_embeddings = [network(torch.randn(8, 4)).detach() for _ in range(2)]
    loss = network(torch.randn(8, 4)).square().sum()
    loss.backward()
    optimizer, indices = torch.optim.SGD(network.parameters(), 0.1), torch.arange(8)
    with Counter() as counter:
        watch.on_before_backward(trainer, network, loss)
        watch.on_before_optimizer_step(trainer, network, optimizer)
        watch._keep(trainer, loss, [indices])
    assert 0 < counter.launches <= 6


@pytest.mark.fault
def test_weights_that_are_not_finite_are_not_saved(make_config: MakeConfig, tmp_path: Path) -> None:
    """Though loss and gradients were."""

    def overflow(trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2 * STEPS:
            script.weights(pl_module)[0].data[0] = float("inf")

    spoil = LambdaCallback(on_train_batch_end=overflow)
    said = "^weights are not finite after epoch 1, optimiser step 11"
    with pytest.raises(UserError, match=said):
        train(config_of(make_config), tmp_path / "run", callbacks=[spoil])
    assert [c.epoch for c in checkpoints(tmp_path / "run")] == [0]
    assert finite(weights(tmp_path / "run"))


@pytest.mark.fault
@pytest.mark.parametrize("every", [4, 1000])
def test_a_late_look_finds_the_first(
    every: int, make_config: MakeConfig, tmp_path: Path, seldom: Seldom
) -> None:
    """After it every loss is NaN; a checkpoint on the way is not written."""
    seldom(every)
    config = config_of(make_config, checkpoint={"every_n_steps": 3})
    fault = Fault("image", [7])
    with pytest.raises(UserError, match="epoch 1, optimiser step 7 "):
        train(config, tmp_path / "run", callbacks=[fault])
    (line,) = lines(tmp_path / "run")
    assert (line["step"], line["indices"]) == (7, fault.indices[7])
    (left,) = checkpoints(tmp_path / "run")
    assert (left.epoch, left.step) == (0, None)


@pytest.mark.fault
def test_an_error_before_it_is_noticed(
    make_config: MakeConfig, tmp_path: Path, seldom: Seldom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an error would save is looked at first: weights after a bad batch are not saved."""
    seldom(1000)
    read, calls = ImageFiles.__getitem__, 0

    def fails(self: ImageFiles, index: int) -> Any:
        nonlocal calls
        calls += 1
        if calls > 8 * (STEPS + 4):
            raise ZeroDivisionError("of a transform")
        return read(self, index)

    monkeypatch.setattr(ImageFiles, "__getitem__", fails)
    fault = Fault("image", [STEPS + 1])
    with pytest.raises(ZeroDivisionError):
        train(config_of(make_config), tmp_path / "run", callbacks=[fault])
    (line,) = lines(tmp_path / "run")
    assert line["indices"] == fault.indices[STEPS + 1]
    (left,) = checkpoints(tmp_path / "run")
    assert (left.epoch, left.step) == (0, None)
    assert finite(weights(tmp_path / "run"))


@pytest.mark.fault
def test_it_is_noticed_before_validation(
    make_config: MakeConfig, images: Path, tmp_path: Path, seldom: Seldom
) -> None:
    seldom(1000)
    seen: list[int] = []
    validated = LambdaCallback(
        on_validation_batch_start=lambda trainer, *_: seen.append(trainer.current_epoch)
    )
    config = config_of(make_config, data={"val_path": str(images)})
    with pytest.raises(UserError, match="epoch 1"):
        train(config, tmp_path / "run", callbacks=[Fault("image", [STEPS]), validated])
    assert set(seen) == {0}


class _Scaled(Callback):
    """Scales the embedding of the second image of one batch, in one crop."""

    def __init__(self, factor: float, batch: int) -> None:
        self.factor, self.batch, self.index, self._now = factor, batch, -1, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.projector.register_forward_hook(self._scale, prepend=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self._now = trainer.fit_loop.epoch_loop.total_batch_idx == self.batch
        if self._now:
            self.index = int(batch[0][1])

    def _scale(self, module: Any, args: Any, output: Tensor) -> Tensor:
        factors = torch.ones(len(output), 1)
        factors[1] = self.factor if self._now else 1
        self._now = False
        return output * factors


@pytest.mark.fault
@pytest.mark.parametrize(
    ("action", "factor", "length"), [("stop", 0.0, 0.0), ("skip", 1e25, "inf")]
)
def test_an_embedding_without_a_direction(
    action: str, factor: float, length: float | str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The loss and its gradients are finite, so that nothing else would tell."""
    config = config_of(make_config, "hard_negative", on_nonfinite=action, max_epochs=1)
    config["optimizer"]["kwargs"] = {"momentum": 0.0}
    scaled, around = _Scaled(factor, 2), _Around(2, 2)
    if action == "stop":
        with pytest.raises(UserError, match=r"^the length of embeddings is 0 or not finite in "):
            train(config, tmp_path / "run", callbacks=[scaled])
    else:
        train(config, tmp_path / "run", callbacks=[scaled, around])
        for key, before in around.before.items():
            assert torch.equal(before, around.after[key]), key
    (line,) = lines(tmp_path / "run")
    assert (line["what"], line["step"], line["indices"]) == ("embeddings", 2, [scaled.index])
    assert line["lengths"] == [length]
    assert len(line["images"]) == 1
    assert isinstance(line["loss"], float)


class _Around(Callback):
    """Keeps the state before and after some batches."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        if number in (self.first, self.last + 1):
            found = copy.deepcopy(
                {k: v for k, v in pl_module.state_dict().items() if "extra" not in k}
            )
            setattr(self, "before" if number == self.first else "after", found)


STATEFUL: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("simclr", "byol", "dino", "deepclusterv2")},
    **{name: {} for name in ("nnclr_symmetric", "protocpc")},
    **{name: {"queue_size": 16} for name in ("mocov2plus", "nnclr", "swav")},
    "pcl": {"queue_size": 20, "symmetric": True},
    "pcl-bank": {"queue_size": 20, "e_step": "bank"},
    "hard_negative": {"negatives": "queue", "queue_size": 20},
    "metric": {"loss": "arcface_loss_func", "classes": "label"},
    "seed": {"queue_size": 20},
}
"""One for each kind of state."""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (name, "image")
            if name == "pcl"
            else pytest.param(name, "image", marks=pytest.mark.slow)
            for name in STATEFUL
        ),
        ("simclr", "infinite"),
        ("simclr", "overflow"),
    ],
)
def test_a_batch_left_out_leaves_no_trace(
    name: str, kind: str, make_config: MakeConfig, make_distilled: MakeConfig, tmp_path: Path
) -> None:
    """Neither in statistics, queues, banks, priors nor, without momentum, in weights."""
    method = name.partition("-")[0]
    make = make_distilled if method in ("seed", "protoseed") else make_config
    config = config_of(
        make,
        method,
        method_kwargs=STATEFUL[name],
        on_nonfinite="skip",
        optimizer={"kwargs": {"momentum": 0.0}},
    )
    around, number = _Around(8, 8), 8
    train(config, tmp_path / "run", callbacks=[Fault(kind, [number]), around])
    assert around.before.keys() == around.after.keys()
    averaged = {k for k in around.before if k.startswith("momentum_")}
    for key in around.before:
        if key not in averaged or "running" in key or "num_batches" in key:
            # Prototypes are brought to unit length once more.
            before, after = around.before[key], around.after[key]
            assert torch.allclose(after, before, rtol=0, atol=2e-7), key
    assert finite(around.after)
    assert finite(weights(tmp_path / "run"))
    (line,) = lines(tmp_path / "run")
    assert (line["step"], line["then"]) == (number, "skipped")
    if kind != "image":
        return
    found = json_lines(tmp_path / "run" / METRICS)
    by_step = {r["step"]: r for r in found if "train_class_loss_step" in r}
    assert all((r["train_class_loss_step"] is None) == (s == number) for s, r in by_step.items())
    assert len(by_step) == 2 * STEPS


@pytest.mark.fault
@pytest.mark.parametrize(("kind", "every"), [("image", 5), ("infinite", 1)])
def test_skipped_steps_are_counted(
    kind: str,
    every: int,
    make_config: MakeConfig,
    tmp_path: Path,
    seldom: Seldom,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seldom(every)
    config = config_of(make_config, "mocov2plus", method_kwargs={"queue_size": 16})
    fault = Fault(kind, [2, 7, 9])
    with caplog.at_level(logging.WARNING, "solo_ext"):
        train({**config, "on_nonfinite": "skip"}, tmp_path / "run", callbacks=[fault])
    file = tmp_path / "run" / NONFINITE
    assert [r.getMessage() for r in caplog.records if "left out" in r.getMessage()] == [
        f"epoch {epoch}: {count} left out (on_nonfinite=skip), the images are named in {file}"
        for epoch, count in enumerate(["1 optimiser step was", "2 optimiser steps were"])
    ]
    assert {line["step"]: line["indices"] for line in lines(tmp_path / "run")} == fault.indices
    assert finite(weights(tmp_path / "run"))


@pytest.mark.fault
def test_skipped_steps_are_counted_over_a_resumed_epoch(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(make_config, checkpoint={"every_n_steps": 1}, on_nonfinite="skip")
    faults = Fault("image", [7, 9])
    with pytest.raises(RuntimeError, match="killed"):
        train(config, tmp_path / "run", callbacks=[faults, KillAt(8)])
    with caplog.at_level(logging.WARNING, "solo_ext"):
        resume(tmp_path / "run", callbacks=[faults])
    (said,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert said.startswith("epoch 1: 2 optimiser steps were left out")


@pytest.mark.fault
def test_a_bad_batch_of_an_accumulated_step(make_config: MakeConfig, tmp_path: Path) -> None:
    """The step is left out with all of its batches; the bad one is named."""
    config = config_of(
        make_config,
        "mocov2plus",
        method_kwargs={"queue_size": 16},
        on_nonfinite="skip",
        accumulate_grad_batches=3,
        optimizer={"kwargs": {"momentum": 0.0}},
    )
    around, fault = _Around(6, 8), Fault("image", [7])
    train(config, tmp_path / "run", callbacks=[fault, around])
    for key, before in around.before.items():
        if not key.startswith("momentum_") or "running" in key:
            assert torch.equal(before, around.after[key]), key
    (line,) = lines(tmp_path / "run")
    assert (line["step"], line["indices"]) == (2, fault.indices[7])
    assert finite(weights(tmp_path / "run"))


@pytest.mark.fault
def test_gradients_name_all_batches_of_the_step(make_config: MakeConfig, tmp_path: Path) -> None:
    config = config_of(make_config, accumulate_grad_batches=3)
    fault = Fault("gradients", [6, 7, 8])
    with pytest.raises(UserError, match=r"^gradients are not finite in epoch 1, optimiser step 2 "):
        train(config, tmp_path / "run", callbacks=[fault])
    assert [line["indices"] for line in lines(tmp_path / "run")] == list(fault.indices.values())


@pytest.mark.fault
def test_too_many_in_a_row(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained any more; the good checkpoint is not replaced."""
    config = config_of(make_config, on_nonfinite="skip", max_epochs=10)
    with pytest.raises(UserError, match=r"^the last 6 optimiser steps, up to step 11 "):
        train(config, tmp_path / "run", callbacks=[Fault("image", ALL[STEPS:])])
    assert [c.epoch for c in checkpoints(tmp_path / "run")] == [0]
    assert len(lines(tmp_path / "run")) == STEPS
    monkeypatch.setattr(nonfinite, "MAX_CONSECUTIVE_BAD", 5)
    with pytest.raises(UserError, match=r"^the last 5 optimiser steps, up to step 4 "):
        train(config, tmp_path / "within", callbacks=[Fault("image", ALL)])
    # A good one between them begins the count anew.
    train(
        {**config, "max_epochs": 1}, tmp_path / "apart", callbacks=[Fault("image", [0, 1, 2, 4, 5])]
    )


@pytest.mark.slow
@pytest.mark.fault
def test_infinite_gradients_of_a_scaler_are_no_fault(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its first steps overflow fp16 and are left out by the scaler; a NaN loss is a fault."""
    scales: list[float] = []

    class Half(Callback):
        def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
            trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cpu", scaler)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            scales.append(trainer.precision_plugin.scaler.get_scale())

    config = config_of(make_config, on_nonfinite="skip", max_epochs=4)
    train(config, tmp_path / "run", callbacks=[Half()])
    assert scales[0] == 2.0**29 > scales[-1]
    assert not (tmp_path / "run" / NONFINITE).exists()
    assert finite(weights(tmp_path / "run"))
    fault = Fault("image", [20])
    train(config, tmp_path / "bad", callbacks=[Half(), fault])
    assert finite(weights(tmp_path / "bad"))
    assert [line["indices"] for line in lines(tmp_path / "bad")] == [fault.indices[20]]


class _AskedInSteps(Callback):
    """Counts the values that the host asks for, from the start of a batch to that of the next."""

    def __init__(self) -> None:
        self.counter: Counter | None = None
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.on_train_epoch_end()
        self.counter = Counter().__enter__()

    def on_train_epoch_end(self, *_: Any) -> None:
        if self.counter is not None:
            self.counter.__exit__(None, None, None)
            self.counts.append(len(self.counter.waits))
        self.counter = None


def test_no_value_is_asked_for_in_a_step(
    make_config: MakeConfig, tmp_path: Path, seldom: Seldom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks no more than without the watches; to leave batches out asks for most."""
    kwargs = {"queue_size": 16}
    config = config_of(
        make_config,
        "mochi",
        on_nonfinite="skip",
        max_epochs=1,
        method_kwargs=kwargs,
        log_every_n_steps=0,
    )
    every = _AskedInSteps()
    train(config, tmp_path / "looking", callbacks=[every])
    seldom(1000)
    watched = _AskedInSteps()
    train(config, tmp_path / "watched", callbacks=[watched])
    monkeypatch.setattr(pretraining, "NonFiniteWatch", lambda *_: Callback())
    monkeypatch.setattr(pretraining, "CollapseWatch", Callback)
    alone = _AskedInSteps()
    train(config, tmp_path / "alone", callbacks=[alone])
    # The last one goes on into the end of the epoch.
    assert watched.counts[:-1] == alone.counts[:-1]
    assert len(alone.counts) == STEPS
    assert sum(every.counts) > sum(alone.counts)


CASES = {
    "skip-image": ("image", {"on_nonfinite": "skip"}),
    "skip-infinite": ("infinite", {"on_nonfinite": "skip"}),
    "stop": ("infinite", {"checkpoint": {"every_n_steps": 1}}),
}
"""Of two processes, with a fault on the second alone."""


@pytest.fixture(scope="module")
def two(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of these runs, and of what each process noted."""
    folder = tmp_path_factory.mktemp("two")
    kwargs = {"queue_size": 16}
    shared = {"method_kwargs": kwargs, "devices": 2, "strategy": "ddp"}
    cases = {
        name: {
            "config": config_of(make_config, "mocov2plus", **shared, **changes),
            "fault": {"kind": kind, "batches": [4], "rank": 1},
        }
        for name, (kind, changes) in CASES.items()
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    run_script(HERE / "nonfinite_run.py", folder)
    return folder


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("name", CASES)
def test_all_processes_do_the_same(name: str, two: Path) -> None:
    """Three steps per epoch: found by both at the second one's end, or before a checkpoint."""
    noted = [torch.load(two / f"{name}-{rank}.pt") for rank in range(2)]
    (line,) = lines(two / name)
    assert (line["rank"], line["step"]) == (1, 4)
    assert line["indices"] == noted[1]["indices"][4]
    assert finite(weights(two / name))
    (left,) = checkpoints(two / name)
    if name == "stop":
        for rank in noted:
            assert rank["error"].startswith("the loss is not finite in epoch 1, optimiser step 4 ")
        assert (left.epoch, left.step) == (1, 4)
    else:
        assert [rank["error"] for rank in noted] == [None, None]
        assert torch.equal(noted[0]["weights"], noted[1]["weights"])
        assert (left.epoch, left.step) == (1, None)
