"""Steps that are recorded once and replayed, with a CUDA graph's rules emulated on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback

from benchmarks.emulated_graph import emulated_graph
from solo_ext import host
from solo_ext.config.check import check_run
from solo_ext.host.patches import default_patches
from solo_ext.lab.training import pretrain as module
from solo_ext.lab.training.pretrain import resume
from solo_ext.lab.training.step_graph import METHODS, StepGraphs, _cause, records_graphs
from tests.conftest import MakeConfig
from tests.lab.training.resumable import METHODS as OURS
from tests.lab.training.resumable import MIXES, STEPS, KillAt, ReadsTheLoss, config_of
from tests.lab.training.same_run import assert_same_run, train, train_killed, whole_run

BUILT_IN = tuple(
    sorted((METHODS & host.load().methods.keys()) - {m.partition("-")[0] for m in OURS})
)
AT_ONCE = ("mochi", "pcl-drawn", "simclr")
"""One that mixes by numbers drawn in the step, one with an E-step, and one of solo-learn."""
IN_CI = (
    "hard_negative-queue",
    "metric",
    "nnclr_symmetric",
    "protocpc",
    "protoseed",
    "seed",
    "swav",
)
"""With those, every class of ours."""


class Emulated:
    """Lets runs record their steps, and counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, *given: Any) -> Any:
        graph = emulated_graph(*given)
        self.recorded += 1
        replay = graph.replay

        def counted() -> None:
            self.replayed += 1
            replay()

        graph.replay = counted  # type: ignore[method-assign]
        return graph


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    record = Emulated()
    monkeypatch.setattr(module, "records_graphs", lambda run: run.performance.graphs)
    monkeypatch.setattr(module, "StepGraphs", partial(StepGraphs, record=record))
    return record


@pytest.fixture
def configs(
    make_config: MakeConfig, make_distilled: MakeConfig
) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """``configs(method, **changes)``: the same run without graphs and with them."""

    def make(method: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        name = method.partition("-")[0]
        maker = make_distilled if name in ("seed", "protoseed") else make_config
        config = config_of(maker, method, **changes)
        # Momentum networks that are updated in place have other last bits.
        wanted = set(default_patches(name, graphs=True)) - set(default_patches(name))
        if wanted:
            config["patches"] = sorted(wanted)
        return config, config | {"performance": {"graphs": True}}

    return make


@pytest.mark.parametrize(
    "method",
    [
        *AT_ONCE,
        *(pytest.param(m, marks=pytest.mark.slow) for m in IN_CI),
        *(
            pytest.param(m, marks=pytest.mark.matrix)
            for m in (*OURS, *BUILT_IN)
            if m not in (*AT_ONCE, *IN_CI)
        ),
    ],
)
def test_replayed_and_resumed_it_is_the_same_run(
    method: str, configs: Any, graphs: Emulated, tmp_path: Path
) -> None:
    plain, replayed = configs(method)
    train_killed(replayed, tmp_path / "parts", STEPS + 2)
    assert (graphs.recorded, graphs.replayed) == (2, 3 + 1)
    resume(tmp_path / "parts")
    # The resumed epoch has four steps: it warms up anew. The last one warms up for a step.
    assert (graphs.recorded, graphs.replayed) == (2 + 2, 4 + 1 + 5)
    assert_same_run(whole_run(plain), tmp_path / "parts")


@pytest.mark.parametrize(("method", "accumulated"), [("protocpc", 2), ("simclr", 4)])
def test_accumulation_has_two_graphs(
    method: str, accumulated: int, configs: Any, graphs: Emulated, tmp_path: Path
) -> None:
    """In the second and the third epoch. The last step of an epoch has two batches of four."""
    plain, replayed = configs(method, accumulate_grad_batches=accumulated)
    train(replayed, tmp_path / "replayed")
    assert graphs.recorded == 2 * 2
    assert_same_run(whole_run(plain), tmp_path / "replayed")


def test_bfloat16(configs: Any, graphs: Emulated, tmp_path: Path) -> None:
    crops = [{"crop_size": 32, "num_crops": 2}]
    given = {"precision": "bf16-mixed", "augmentations": crops, "max_epochs": 1}
    plain, replayed = configs("simclr", **given)
    train(replayed, tmp_path / "replayed")
    assert graphs.replayed
    assert_same_run(whole_run(plain), tmp_path / "replayed")


def test_a_bad_step_is_skipped(configs: Any, graphs: Emulated, tmp_path: Path) -> None:
    """Its images reach the recorded step, whose gradients are then left out."""
    poison = LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, number: (
            batch[1][0].fill_(math.inf) if trainer.global_step == 4 else None
        )
    )
    plain, replayed = configs("mochi", on_nonfinite="skip")
    for config, name in ((plain, "plain"), (replayed, "replayed")):
        train(config, tmp_path / name, callbacks=[poison])
        (line,) = (tmp_path / name / "nonfinite.jsonl").read_text().splitlines()
        assert '"step": 4' in line
    assert graphs.replayed
    assert_same_run(tmp_path / "plain", tmp_path / "replayed")


class Smaller(Callback):
    """Takes rows from a batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == 4:
            batch[:] = [batch[0][:5], [x[:5] for x in batch[1]], batch[2][:5]]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_smaller_batch_runs_without(
    accumulated: int, configs: Any, graphs: Emulated, tmp_path: Path
) -> None:
    """With accumulation it is the second of three: the third one adds to its gradients."""
    plain, replayed = configs("simclr", accumulate_grad_batches=accumulated)
    train(plain, tmp_path / "plain", callbacks=[Smaller()])
    train(replayed, tmp_path / "replayed", callbacks=[Smaller()])
    # Of each epoch batches 3 and 5, and from the second epoch on also 1 and 2; or batch 3 alone.
    assert graphs.replayed == (2 + 4 + 4 if accumulated == 1 else 1 + 1)
    assert_same_run(tmp_path / "plain", tmp_path / "replayed")


def test_what_cannot_be_recorded_is_told(
    configs: Any,
    graphs: Emulated,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, and the run goes on as without: also the draws of the step that was tried."""
    kwargs = {"mixing": {**MIXES, "warmup_epochs": 0}}
    plain, replayed = configs("mochi", method_kwargs=kwargs, max_epochs=2)
    train(plain, tmp_path / "plain", callbacks=[ReadsTheLoss()])
    caplog.clear()
    train(replayed, tmp_path / "replayed", callbacks=[ReadsTheLoss()])
    (line,) = [m for m in caplog.messages if m.startswith("performance.graphs")]
    assert "cannot be recorded" in line
    assert "_local_scalar_dense; emulated_graph.py, line " in line
    assert graphs.recorded == 0
    assert_same_run(tmp_path / "plain", tmp_path / "replayed")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"accelerator": "cpu"}, "trains on a CPU"),
        ({"devices": [0, 1], "strategy": "ddp"}, "several GPUs"),
        ({"method": "dino"}, "steps of dino"),
        ({"knn_eval": {"enabled": True}}, "knn_eval.enabled"),
        ({"precision": "16-mixed"}, "precision=16-mixed"),
        ({}, None),
    ],
    ids=str,
)
def test_where_there_are_none(
    changes: dict[str, Any],
    said: str | None,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"accelerator": "gpu", "performance": {"graphs": True}}
    method = changes.pop("method", "simclr")
    run = check_run(make_config(method, **(given | changes)))
    assert records_graphs(run) is (said is None)
    lines = [m for m in caplog.messages if m.startswith("performance.graphs")]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


def test_a_loss_that_changes_by_step_is_told(
    configs: Any, graphs: Emulated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {
        "loss": "sphereface_loss_func",
        "classes": "label",
        "loss_kwargs": {"annealing_start": 100.0},
    }
    plain, replayed = configs("metric", method_kwargs=kwargs, max_epochs=2)
    plain["method_kwargs"].pop("clusters", None)
    train(replayed, tmp_path / "replayed")
    assert "performance.graphs: the loss changes from step to step" in caplog.text
    assert_same_run(whole_run(plain), tmp_path / "replayed")


def test_a_step_that_replaces_a_buffer_is_told(
    configs: Any, graphs: Emulated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next replay would read the first buffer."""
    plain, replayed = configs("simclr", max_epochs=2)

    class Replaces(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            module.register_buffer("seen", torch.zeros(()))
            step = module.training_step

            def training_step(batch: Any, batch_idx: int) -> Any:
                module.seen = module.seen + 1
                return step(batch, batch_idx)

            module.training_step = training_step

    train(plain, tmp_path / "plain", callbacks=[Replaces()])
    train(replayed, tmp_path / "replayed", callbacks=[Replaces()])
    assert "it replaces a buffer, seen" in caplog.text
    assert_same_run(tmp_path / "plain", tmp_path / "replayed")


def test_everything_is_as_before_at_the_end(configs: Any, graphs: Emulated, tmp_path: Path) -> None:
    """Also where the run is cut off."""
    _, replayed = configs("simclr", max_epochs=1)
    seen: list[Any] = []
    note = LambdaCallback(setup=lambda trainer, module, stage: seen.append(module))
    train(replayed, tmp_path / "whole", callbacks=[note])
    with pytest.raises(RuntimeError, match="killed"):
        train(replayed, tmp_path / "parts", callbacks=[note, KillAt(5)])
    for method in seen:
        assert not {"training_step", "backward", "optimizer_zero_grad"} & vars(method).keys()


def test_the_cause_of_an_error_is_told() -> None:
    """CUDA's own message says only that something failed before."""

    def fail() -> None:
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError("failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as caught:
        fail()
    said, _, place = _cause(caught.value).partition("; ")
    assert said == "the cause"
    assert place.startswith("test_step_graph.py, line ")


def test_networks_that_move_are_told(
    configs: Any, graphs: Emulated, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As solo-learn's momentum networks do; a replay would read where they were."""
    plain, replayed = configs("byol", max_epochs=2)

    class Moves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            parameter = next(module.momentum_backbone.parameters())
            parameter.data = parameter.data.clone()

    train(plain, tmp_path / "plain", callbacks=[Moves()])
    train(replayed, tmp_path / "replayed", callbacks=[Moves()])
    assert graphs.replayed == 1
    assert "every step gives momentum_backbone.conv1" in caplog.text
    assert_same_run(tmp_path / "plain", tmp_path / "replayed")


def test_no_layer_keeps_the_history_of_a_step(
    configs: Any, graphs: Emulated, tmp_path: Path
) -> None:
    """Of weight normalisation, it would tie a recording to the stream of the step before."""
    plain, _ = configs("swav", method_kwargs={"queue_size": 0}, max_epochs=2)

    class Looks(Callback):
        kept = 0

        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                self.kept = sum(map(has_history, module.modules()))

    def has_history(layer: Any) -> bool:
        tensors = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        return any(x.grad_fn is not None for x in tensors)

    def record(step: Any, generators: Any, after: Any) -> Any:
        assert not any(map(has_history, seen[0].modules()))
        return graphs(step, generators, after)

    seen: list[Any] = []
    note = LambdaCallback(setup=lambda trainer, module, stage: seen.append(module))
    train(plain, tmp_path / "plain", callbacks=[looks := Looks()])
    assert looks.kept, "there is nothing to let go of"
    own = StepGraphs(lambda *_: None, record)
    train(plain, tmp_path / "replayed", callbacks=[note, own])
    assert graphs.replayed
    assert_same_run(tmp_path / "plain", tmp_path / "replayed")
