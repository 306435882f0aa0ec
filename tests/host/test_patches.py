"""Tests of the patches: what happens with each, and what happened without it.

A test names its patch by a mark and must use ``without()``, inside of which the host's own code is
back. Those of data stand in ``test_data_patches.py``.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks.counting import Counter
from solo_ext.core.errors import ConfigError, UserError
from solo_ext.core.registry import Entry
from solo_ext.host import Host, detect
from solo_ext.host.patches import PATCHES, _of_a_plugin, default_patches, select_for_run
from solo_ext.lab.training.prepare import prepare
from solo_ext.lab.training.pretrain import pretrain
from solo_ext.methods import METHODS
from solo_ext.plugin import register
from tests.host.conftest import Interrupted, Watch, Without, the_loss

GENERATION = detect().generation


Read = Callable[[Any, Tensor], Any]


class Runs:
    """One config run through, and run with a stop in between."""

    def __init__(self, config: dict[str, Any], folder: Path, read: Read) -> None:
        scheduler = {"warmup_epochs": 0, **config["scheduler"]}
        self.config, self.folder, self.read = config | {"scheduler": scheduler}, folder, read

    def run(self, name: str, *callbacks: Callback, stop: int | None = None) -> Watch:
        watch = Watch(self.read, stop)
        folder = self.folder / name
        pretrain(prepare(self.config), run_dir=folder, callbacks=[*callbacks, watch])
        return watch

    def whole(self) -> Watch:
        return self.run("whole")

    def stopped(self, stop: int, name: str = "stopped") -> None:
        with pytest.raises(Interrupted):
            self.run(name, stop=stop)

    def resumed(self, name: str = "stopped") -> Watch:
        return self.run(name)

    def assert_resumes(self, stop: int) -> Watch:
        """As if it had not been stopped; the run through. Stops one more run, named ``own``."""
        whole = self.whole()
        for name in ("stopped", "own"):
            self.stopped(stop, name)
        resumed = self.resumed()
        assert resumed.seen == whole.seen[stop:]
        assert_same_end(resumed, whole)
        return whole


MakeRuns = Callable[..., Runs]


@pytest.fixture
def make_runs(make_config: Any, tmp_path: Path) -> MakeRuns:
    """``make_runs(method, read=the_loss, section={...}, ...)``."""

    def make(method: str, read: Read = the_loss, **changes: Any) -> Runs:
        return Runs(make_config(method, **changes), tmp_path, read)

    return make


def assert_same_end(found: Watch, expected: Watch) -> None:
    assert found.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name


@pytest.mark.patch("online-knn")
def test_online_knn(without: Without, make_runs: MakeRuns, images: Path) -> None:
    knn = {"enabled": True, "k": 2}
    runs = make_runs("simclr", knn_eval=knn, data={"val_path": str(images)})
    watch = runs.whole()
    # Validation images are among the training images, but seen uncropped and through an
    # untrained network.
    assert 0 <= watch.metrics["val_knn_acc1"] <= watch.metrics["val_knn_acc5"] <= 100
    with without(), pytest.raises(UserError, match="compute_on_step"):
        runs.run("own")


@pytest.mark.patch("static-lr")
def test_static_lr(without: Without, make_runs: MakeRuns) -> None:
    """A fixed learning rate was a pickled function in the checkpoint."""
    scheduler = {"name": "warmup_cosine", "warmup_epochs": 1}
    runs = make_runs("simsiam", max_epochs=2, scheduler=scheduler)
    runs.assert_resumes(2)
    with without():
        runs.run("new")
        (checkpoint,) = (runs.folder / "new").glob("*.ckpt")
        with pytest.raises(pickle.UnpicklingError, match=r"static_lr|functools"):
            torch.load(checkpoint, weights_only=True)


@pytest.mark.patch("backbones")
def test_backbones(without: Without, make_config: Any) -> None:
    """The host's constructor finds timm's models and completes their arguments by itself."""
    prepared = prepare(make_config("simclr"))
    cfg = OmegaConf.create(OmegaConf.to_container(prepared.cfg))
    cfg.backbone.kwargs = {"channels": [8, 8, 8, 8]}
    method = prepared.method(cfg)
    assert isinstance(method.backbone.maxpool, nn.Identity)
    assert method.cfg.backbone.kwargs.small_stem
    with without(), pytest.raises(AssertionError):
        prepared.method(cfg)


class Flat(nn.Module):
    """A backbone: an image's pixels."""

    num_features = 12

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def linear_model(classes: int) -> Any:
    from solo.methods.linear import LinearModel

    if GENERATION == "main":
        cfg = {
            "data": {"num_classes": classes},
            "max_epochs": 1,
            "optimizer": {"name": "sgd", "batch_size": 4, "lr": 0.1, "weight_decay": 0},
            "scheduler": {"name": "none"},
        }
        return LinearModel(Flat(), OmegaConf.create(cfg))
    return LinearModel(
        Flat(),
        num_classes=classes,
        batch_size=4,
        optimizer="sgd",
        lars=False,
        lr=0.1,
        weight_decay=0.0,
        exclude_bias_n_norm=False,
        extra_optimizer_args={},
        max_epochs=1,
        scheduler="none",
    )


@pytest.mark.patch("few-classes")
@pytest.mark.parametrize("classes", [2, 7])
def test_few_classes(without: Without, classes: int) -> None:
    """The host's linear evaluation asks for the five best of however many classes there are."""
    model, targets = linear_model(classes), torch.tensor([0, 1, 1, 0])
    batch = (torch.randn(4, 3, 2, 2), targets)
    out = model.shared_step(batch, 0)
    first, fifth = (out["acc1"], out["acc5"]) if GENERATION == "main" else out[2:]
    scores = model(batch[0])["logits"]
    expected = (scores.argmax(dim=1) == targets).float().mean() * 100
    assert first.item() == pytest.approx(expected.item())
    if classes <= 5:
        assert fifth.item() == 100
    with without():
        if classes < 5:
            with pytest.raises(RuntimeError, match="out of range"):
                model.shared_step(batch, 0)
        else:
            own = model.shared_step(batch, 0)
            own = (own["acc1"], own["acc5"]) if GENERATION == "main" else own[2:]
            torch.testing.assert_close(own, (first, fifth))


@pytest.mark.patch("no-labels")
@pytest.mark.skipif(GENERATION != "main", reason="the release's base class is replaced whole")
def test_no_labels(without: Without, make_runs: MakeRuns, images: Path) -> None:
    """As of the data sets for which self-supervision is made."""
    runs = make_runs(
        "byol",
        data={"no_labels": True, "train_path": str(images / "0")},
        momentum={"classifier": True},
        optimizer={"batch_size": 8},
    )
    watch = runs.whole()
    assert watch.metrics["train_class_loss_epoch"] == 0
    assert watch.metrics["train_momentum_class_loss_epoch"] == 0
    with without(), pytest.raises(UserError, match="the loss is not finite"):
        runs.run("own")


@pytest.mark.patch("rates-without-warmup")
@pytest.mark.parametrize("method", ["simclr", "simsiam", "debiased"])
def test_rates_without_warmup(without: Without, make_runs: MakeRuns, method: str) -> None:
    """Every group begins at its own rate and ends near 0; SimSiam's predictor stays at its own."""

    def read(method: Any, _: Tensor) -> dict[str, float]:
        return {group["name"]: group["lr"] for group in method.optimizers().param_groups}

    optimizer = {"lr": 0.1, "classifier_lr": 0.3, "batch_size": 8}
    runs = make_runs(method, read, optimizer=optimizer, scheduler={"name": "warmup_cosine"})
    seen = runs.whole().seen
    first, last = seen[0], seen[-2]
    assert first["classifier"] == pytest.approx(3 * first["backbone"])
    assert last["classifier"] == pytest.approx(3 * last["backbone"])
    assert last["backbone"] < 0.5 * first["backbone"]
    with without():
        other = runs.run("own").seen
    assert other[0]["classifier"] == other[0]["backbone"] == first["backbone"]
    assert [rates["backbone"] for rates in other] == [rates["backbone"] for rates in seen]


@pytest.mark.patch("broken-warmup")
def test_broken_warmup(without: Without) -> None:
    """A broken number of steps is the next whole one; whole numbers stay as the host has them."""
    owner = importlib.import_module("solo.utils.lr_scheduler").LinearWarmupCosineAnnealingLR

    def rates(warmup: float) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        schedule, found = owner(optimizer, warmup, 12, warmup_start_lr=0.1), []
        for _ in range(12):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    whole = {warmup: rates(warmup) for warmup in (1, 2, 11)}
    assert rates(0.04) == rates(1.0) == whole[1]
    assert rates(1.5) == whole[2]
    # A product of shares of epochs, off by its last digit.
    assert rates(1.1 * 10) == whole[11]
    assert [max(found) for found in whole.values()] == pytest.approx([0.5, 0.5, 0.5])
    with without():
        assert {warmup: rates(warmup) for warmup in whole} == whole
        assert max(rates(0.04)) == 0.1
        assert max(rates(1.5)) == pytest.approx(0.9)


MOMENTUM = {"base_tau": 0.5, "final_tau": 1.0}


@pytest.mark.patch("lars-waits")
@pytest.mark.skipif(GENERATION != "main", reason="the release has timm's LARS")
@pytest.mark.parametrize("clip_lr", [False, True])
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_lars_waits(
    without: Without, clip_lr: bool, exclude: bool, momentum: dict[str, Any]
) -> None:
    """Equal to the host's own step to the bit; a tensor without values refuses to be read."""
    lars = importlib.import_module("solo.utils.lars").LARS
    # Rates lie on both sides of where they are clipped.
    options = {"weight_decay": 1e-3, "eta": 0.1, "clip_lr": clip_lr, **momentum}
    options["exclude_bias_n_norm"] = exclude

    def trained() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(s, generator=generator) for s in ((5, 4), (4,), (3, 2, 3, 3), (3, 3))]
        made[2].zero_()
        params = [nn.Parameter(x) for x in made]
        groups = [{"params": params[:2], "weight_decay": 0}, {"params": [*params[2:], unused]}]
        optimizer = lars(groups, lr=0.3, **options)
        for step in range(20):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 5 - 2)
            params[step % 4].grad.zero_()
            assert optimizer.step(lambda: 3) == 3
        return [*params, *(optimizer.state[p].get("momentum_buffer", p) for p in params)]

    def unread() -> None:
        p = nn.Parameter(torch.empty(3, 4, device="meta"))
        p.grad = torch.empty_like(p)
        lars([p], lr=0.3, **options).step()

    unused = nn.Parameter(torch.ones(2))
    found = trained()
    unread()
    with without():
        expected = trained()
        with pytest.raises(RuntimeError, match="meta"):
            unread()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.patch("momentum-resume")
def test_momentum_resume_keeps_the_pace(without: Without, make_runs: MakeRuns) -> None:
    runs = make_runs(
        "byol",
        lambda method, _: method.momentum_updater.cur_tau,
        max_epochs=2,
        momentum=MOMENTUM,
    )
    whole = runs.assert_resumes(2)
    cosine = [1 - 0.5 * (math.cos(math.pi * step / 4) + 1) / 2 for step in range(4)]
    assert whole.seen == pytest.approx(cosine)
    with without():
        assert runs.resumed("own").seen == [0.5, whole.seen[3]]


class Averages(Callback):
    """Counts updates of momentum networks, of which BYOL has two."""

    count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        update = pl_module.momentum_updater.update

        def counted(*pair: Any) -> None:
            self.count += 1
            update(*pair)

        pl_module.momentum_updater.update = counted


@pytest.mark.patch("momentum-resume")
def test_momentum_resume_averages_once_per_step(without: Without, make_runs: MakeRuns) -> None:
    """Two batches of 12 to a step; the first batch after resuming is no step yet."""
    runs = make_runs(
        "byol",
        max_epochs=2,
        momentum=MOMENTUM,
        accumulate_grad_batches=2,
        optimizer={"batch_size": 12},
    )
    whole = runs.whole()

    def resumed(name: str) -> tuple[int, Watch]:
        runs.stopped(2, name)
        averages = Averages()
        watch = runs.run(name, averages)
        return averages.count, watch

    count, watch = resumed("stopped")
    assert count == 2 * 2
    assert_same_end(watch, whole)
    with without():
        assert resumed("own")[0] == 2 * 3


@pytest.mark.patch("momentum-update")
def test_momentum_update_is_in_place(without: Without) -> None:
    """The host's numbers to the last bit but one, in the memory that there is."""
    updater = importlib.import_module("solo.utils.momentum").MomentumUpdater(0.9, 1.0)
    online = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    patched, own = copy.deepcopy(online), copy.deepcopy(online)
    draw = torch.Generator().manual_seed(0)
    for parameter in online.parameters():
        nn.init.normal_(parameter, generator=draw)
    expected = {name: value.clone() for name, value in online.state_dict().items()}
    places = [p.data_ptr() for p in patched.parameters()]
    # The same memory could be given out again.
    held = [p.data for p in own.parameters()]
    with Counter() as counter:
        updater.update(online, patched)
    assert [p.data_ptr() for p in patched.parameters()] == places
    assert counter.launches == 1
    with without(), Counter() as counter:
        updater.update(online, own)
    assert all(p.data_ptr() != x.data_ptr() for p, x in zip(own.parameters(), held, strict=True))
    assert counter.launches == 3 * len(places)
    for found, theirs in zip(patched.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-7)
    for name, value in online.state_dict().items():
        assert torch.equal(value, expected[name]), name
    # Methods without a projector have a network without parameters.
    updater.update(nn.Identity(), nn.Identity())


def late(name: str, method: str, stop: int, words: str) -> Any:
    return pytest.param(method, stop, words, marks=pytest.mark.patch(name))


@pytest.mark.parametrize(
    ("method", "stop", "words"),
    [
        late("swav-queue", "swav", 2, "queue"),
        late("all4one-encoding", "all4one", 2, "cached_penc"),
        late("deepcluster-memory", "deepclusterv2", 2, "local_memory"),
        # Within an epoch, where nothing is clustered on resuming.
        late("deepcluster-memory", "deepclusterv2", 3, "local_memory"),
    ],
)
def test_buffers_that_are_made_late(
    method: str, stop: int, words: str, without: Without, make_runs: MakeRuns
) -> None:
    """A resumed run is the uninterrupted one; without the patch its checkpoint cannot be read."""
    runs = make_runs(method, max_epochs=2, checkpoint={"every_n_steps": 1})
    runs.assert_resumes(stop)
    with without():
        runs.stopped(stop, "unpatched")
        with pytest.raises(UserError, match=f"Unexpected key.*{words}"):
            runs.resumed("unpatched")


@pytest.mark.patch("swav-queue")
def test_swav_queue_of_another_size_is_refused(
    without: Without, make_config: Any, tmp_path: Path
) -> None:
    result = pretrain(prepare(make_config("swav")), run_dir=tmp_path / "first")
    config = make_config(
        "swav",
        max_epochs=2,
        method_kwargs={"queue_size": 24},
        resume_from_checkpoint=str(result.checkpoint),
    )
    with pytest.raises(UserError, match=r"queue of the checkpoint has shape \(2, 48, 8\)"):
        pretrain(prepare(config), run_dir=tmp_path / "second", force=True)
    with without(), pytest.raises(UserError, match="Unexpected key"):
        pretrain(prepare(config), run_dir=tmp_path / "third", force=True)


@pytest.mark.patch("deepcluster-first-epoch")
def test_deepcluster_first_epoch(without: Without, make_runs: MakeRuns) -> None:
    runs = make_runs("deepclusterv2", max_epochs=2)
    watch = runs.whole()
    assert all(math.isfinite(loss) for loss in watch.seen)
    assert all(value.isfinite().all() for value in watch.state.values())
    assert watch.metrics["train_deepcluster_loss"] > 0, "from the second epoch on it is real"
    with without(), pytest.raises(UserError, match="the loss is not finite in epoch 0"):
        runs.run("own")


@pytest.mark.patch("deepcluster-first-epoch")
def test_deepcluster_loss_with_targets_is_the_hosts(without: Without) -> None:
    module = importlib.import_module("solo.methods.deepclusterv2")
    outputs = torch.randn(2, 2, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    outputs.requires_grad_()
    some, none = torch.tensor([[0, 1, -1, 3, 2]] * 2), torch.full((2, 5), -1)
    found = module.deepclusterv2_loss_func(outputs, some, 0.2)
    nothing = module.deepclusterv2_loss_func(outputs, none, 0.2)
    (gradient,) = torch.autograd.grad(nothing, outputs)
    assert nothing == gradient.abs().sum() == 0
    with without():
        assert torch.equal(module.deepclusterv2_loss_func(outputs, some, 0.2), found)
        assert module.deepclusterv2_loss_func(outputs, none, 0.2).isnan()


@pytest.mark.patch("kmeans-device")
def test_kmeans_keeps_the_device(without: Without) -> None:
    """The meta device stands for a GPU; on a CPU nothing changes."""
    kmeans = importlib.import_module("solo.utils.kmeans").KMeans
    own = kmeans(1, 0, 2, 9, 4, [2, 3], kmeans_iters=0)
    index, embeddings = torch.arange(9), torch.randn(2, 9, 4)

    def clustered(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        assignments, centroids = own.cluster_memory(index.to(device), embeddings.to(device))
        return [assignments, *centroids]

    assert [held.device.type for held in clustered("meta")] == ["meta"] * 3
    found = clustered("cpu")
    with without():
        assert [held.device.type for held in clustered("meta")] == ["cpu", "meta", "meta"]
        assert all(map(torch.equal, found, clustered("cpu")))


@pytest.mark.patch("dino-epoch")
def test_dino_epoch(without: Without, make_runs: MakeRuns) -> None:
    """Resumed within the second epoch, whose teacher temperature is another."""
    runs = make_runs(
        "dino",
        lambda method, loss: (method.dino_loss_func.epoch, float(loss)),
        max_epochs=2,
        checkpoint={"every_n_steps": 1},
        method_kwargs={
            "warmup_teacher_temperature": 0.01,
            "teacher_temperature": 0.1,
            "warmup_teacher_temperature_epochs": 1,
        },
    )
    whole = runs.assert_resumes(3)
    assert [epoch for epoch, _ in whole.seen] == [0, 0, 1, 1]
    with without():
        ((epoch, loss),) = runs.resumed("own").seen
    assert epoch == 0
    assert loss != pytest.approx(whole.seen[3][1], rel=1e-4)


def test_every_patch_has_a_test() -> None:
    texts = [file.read_text() for file in Path(__file__).parent.glob("test_*.py")]
    found = re.findall(r'(?:\.patch|\blate)\("([a-z0-9-]+)"', "\n".join(texts))
    in_scripts = {"messages", "method-kwargs"}
    assert set(found) == set(PATCHES) - in_scripts, "those are seen in solo-learn's own scripts"


def test_what_changes_numbers_is_applied_for_the_run_that_asks(loaded: Host) -> None:
    updater = importlib.import_module("solo.utils.momentum").MomentumUpdater
    # Another test's run may have asked for it.
    select_for_run([])
    own = updater.update
    assert select_for_run(["momentum-update"]) == ["momentum-update"]
    assert updater.update is not own
    assert select_for_run([]) == []
    assert updater.update is own
    assert not any(patch.undo for patch in PATCHES.values() if patch.changes_results)
    with pytest.raises(ConfigError, match=r"patches='momentum-updat'.*did you mean"):
        select_for_run(["momentum-updat"])
    with pytest.raises(ConfigError, match="patches='few-classes': changes no number"):
        select_for_run(["few-classes"])
    if GENERATION == "1.0.2":
        with pytest.raises(ConfigError, match="patches='no-labels': this solo-learn has nothing"):
            select_for_run(["no-labels"])


def test_a_patch_that_does_not_fit_is_a_warning_until_it_is_selected(
    loaded: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a host whose updater is gone."""
    select_for_run([])
    monkeypatch.delattr(importlib.import_module("solo.utils.momentum"), "MomentumUpdater")
    patch = replace(PATCHES["momentum-update"])
    monkeypatch.setitem(PATCHES, "momentum-update", patch)
    patch.apply()
    assert "patch 'momentum-update' does not fit this solo-learn and is left out" in caplog.text
    assert not patch.undo
    with pytest.raises(ConfigError, match=r"patches='momentum-update': does not fit"):
        select_for_run(["momentum-update"])


def test_what_concerns_the_scripts_alone_is_refused_elsewhere(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"patches='own-size': it concerns solo-learn's own"):
        prepare(make_config("simclr", patches=["own-size"]))


def test_what_a_fork_puts_into_the_table_is_the_hosts(
    loaded: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what was registered here gets repairs, and is refused more large crops than two."""
    register()
    own = type("Own", (loaded.methods["simclr"],), {"__module__": "fork"})
    monkeypatch.setitem(loaded.methods, "own", own)
    assert [_of_a_plugin(OmegaConf.create({"method": m})) for m in ("own", "simclr")] == [False] * 2
    assert _of_a_plugin(OmegaConf.create({"method": "debiased"}))


def test_a_method_that_cannot_be_hashed_is_registered(
    loaded: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Maker:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, cfg: Any) -> None: ...

    made: Any = Maker()
    monkeypatch.setitem(METHODS, "made", Entry("made", made))
    monkeypatch.setitem(loaded.methods, "made", made)
    register()
    assert _of_a_plugin(OmegaConf.create({"method": "made"}))


def test_a_run_records_its_patches(
    make_config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_config("byol", patches=["momentum-update"])
    result = pretrain(prepare(config), run_dir=tmp_path / "run")
    environment = json.loads((result.run_dir / "environment.json").read_text())
    assert environment["host"]["patches"][0] == "momentum-update"
    assert "momentum-resume" in environment["host"]["patches"]
    (line,) = [m for m in caplog.messages if m.startswith("patches of solo-learn that change")]
    assert line.endswith(f": {', '.join(environment['host']['patches'])}")


def test_momentum_networks_that_are_graphs_stay_in_place(loaded: Host) -> None:
    """A graph is recorded anew if its network's parameters have moved."""
    register()
    for method, moves in {"byol": True, "pcl": True, "mochi": True, "simclr": False}.items():
        assert ("momentum-update" in default_patches(method, graphs=True)) == moves
        assert "momentum-update" not in default_patches(method)
