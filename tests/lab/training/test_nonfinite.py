"""A loss, embeddings or gradients that are not finite: the run stops and names the batch."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from benchmarks.speed.counting import Counter
from solo_ext.core.errors import UserError
from solo_ext.host.classifier import class_loss
from solo_ext.lab.cli.main import main
from solo_ext.lab.training import nonfinite
from solo_ext.lab.training import pretrain as pretraining
from solo_ext.lab.training.nonfinite import NONFINITE, largest
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.run_dir import METRICS, checkpoints
from tests.lab.training.same_run import same_weights, train, weights
from tests.scripts import run_script

MakeConfig = Callable[..., dict[str, Any]]
Seldom = Callable[[int], None]
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
script: Any = importlib.import_module("nonfinite_run")
sys.path.remove(str(HERE))
Fault = script.Fault
STEPS = 6
"""Steps per epoch: 48 images in batches of 8."""


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
    return [json.loads(line) for line in (run_dir / NONFINITE).read_text().splitlines()]


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
        "lower optimizer.lr or gradient_clip_val=1"
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
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    words = ["--config-path", str(tmp_path), "--config-name", "mine"]
    assert main(["pretrain", *words, "--run-dir", str(tmp_path / "run")]) == 2
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
    found = map(json.loads, (tmp_path / "run" / METRICS).read_text().splitlines())
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


def test_the_largest_value() -> None:
    """Neither a huge one nor an empty tensor is a fault; an infinite or missing number is."""
    tensors = [torch.tensor([3e38, -3e38] * 10), torch.zeros(0), torch.tensor([-5.0]).bfloat16()]
    assert largest(tensors).item() == pytest.approx(3e38)
    for bad in ("inf", "-inf", "nan"):
        assert not largest([*tensors, torch.tensor([[1, float(bad)]])]).isfinite()


@pytest.mark.fault
def test_weights_that_are_not_finite_are_not_saved(make_config: MakeConfig, tmp_path: Path) -> None:
    """Though loss and gradients were."""

    class Overflow(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2 * STEPS:
                script.weights(pl_module)[0].data[0] = float("inf")

    with pytest.raises(
        UserError, match=r"^weights are not finite after epoch 1, optimiser step 11"
    ):
        train(config_of(make_config), tmp_path / "run", callbacks=[Overflow()])
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
def test_it_is_noticed_before_validation(
    make_config: MakeConfig, images: Path, tmp_path: Path, seldom: Seldom
) -> None:
    seldom(1000)
    seen: list[int] = []

    class Validated(Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.current_epoch)

    config = config_of(make_config, data={"val_path": str(images)})
    with pytest.raises(UserError, match="epoch 1"):
        train(config, tmp_path / "run", callbacks=[Fault("image", [STEPS]), Validated()])
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
@pytest.mark.parametrize(("factor", "length"), [(0.0, 0.0), (1e25, "inf")])
def test_an_embedding_without_a_direction(
    factor: float, length: float | str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The loss and its gradients are finite, so that nothing else would tell."""
    config = config_of(make_config, "hard_negative", max_epochs=1)
    scaled = _Scaled(factor, 2)
    with pytest.raises(UserError, match=r"^the length of embeddings is 0 or not finite in "):
        train(config, tmp_path / "run", callbacks=[scaled])
    (line,) = lines(tmp_path / "run")
    assert (line["what"], line["step"], line["indices"]) == ("embeddings", 2, [scaled.index])
    assert line["lengths"] == [length]
    assert len(line["images"]) == 1
    assert isinstance(line["loss"], float)


@pytest.mark.fault
def test_gradients_name_all_batches_of_the_step(make_config: MakeConfig, tmp_path: Path) -> None:
    config = config_of(make_config, accumulate_grad_batches=3)
    fault = Fault("gradients", [6, 7, 8])
    with pytest.raises(UserError, match=r"^gradients are not finite in epoch 1, optimiser step 2 "):
        train(config, tmp_path / "run", callbacks=[fault])
    assert [line["indices"] for line in lines(tmp_path / "run")] == list(fault.indices.values())


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

    config = config_of(make_config, max_epochs=4)
    train(config, tmp_path / "run", callbacks=[Half()])
    assert scales[0] == 2.0**29 > scales[-1]
    assert not (tmp_path / "run" / NONFINITE).exists()
    assert finite(weights(tmp_path / "run"))
    fault = Fault("image", [20])
    with pytest.raises(UserError, match=r"^the loss is not finite in epoch 3, optimiser step 20 "):
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
            self.counts.append(self.counter.tally.synchronisations)
        self.counter = None


def test_no_value_is_asked_for_in_a_step(
    make_config: MakeConfig,
    tmp_path: Path,
    seldom: Seldom,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two looks no more than without the watches."""
    kwargs = {"queue_size": 16}
    config = config_of(
        make_config,
        "mochi",
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


@pytest.mark.slow
@pytest.mark.fault
def test_all_processes_stop(make_config: MakeConfig, tmp_path: Path) -> None:
    """The loss of the second alone is infinite; both find it before a checkpoint."""
    config = config_of(
        make_config,
        "mocov2plus",
        method_kwargs={"queue_size": 16},
        devices=2,
        strategy="ddp",
        checkpoint={"every_n_steps": 1},
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    run_script(HERE / "nonfinite_run.py", tmp_path)
    noted = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    (line,) = lines(tmp_path / "run")
    assert (line["rank"], line["step"]) == (1, 4)
    assert line["indices"] == noted[1]["indices"]["4"]
    assert finite(weights(tmp_path / "run"))
    (left,) = checkpoints(tmp_path / "run")
    assert (left.epoch, left.step) == (1, 4)
    for rank in noted:
        assert rank["error"].startswith("the loss is not finite in epoch 1, optimiser step 4 ")
