"""Defects of the hosts that a user would hit, mended in place when a host is loaded.

Each mend says what happened without it and yields the attributes it replaces, so that a test
can put the old ones back and watch the defect return.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from solo_ext.host.detect import HostInfo

Patch = tuple[Any, str, Any]


@dataclass
class Mend:
    """A repair of a host.

    Attributes:
        name: short name.
        symptom: what a user would have seen.
        generations: hosts that need it.
        patches: yields (owner, attribute, replacement).
        undo: what was there before, once applied; ``_ABSENT`` where there was nothing.
    """

    name: str
    symptom: str
    generations: tuple[str, ...]
    patches: Callable[[], Iterable[Patch]]
    undo: list[Patch] = field(default_factory=list)


_ABSENT = object()
MENDS: dict[str, Mend] = {}


def _mend(
    name: str, symptom: str, *generations: str
) -> Callable[[Callable[[], Iterable[Patch]]], Callable[[], Iterable[Patch]]]:
    def add(patches: Callable[[], Iterable[Patch]]) -> Callable[[], Iterable[Patch]]:
        MENDS[name] = Mend(name, symptom, generations or ("main", "1.0.2"), patches)
        return patches

    return add


def apply(info: HostInfo) -> None:
    """Applies every mend that the host needs; solo must be imported."""
    for mend in MENDS.values():
        if info.generation in mend.generations and not mend.undo:
            for owner, attribute, value in list(mend.patches()):
                mend.undo.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
                setattr(owner, attribute, value)


@contextlib.contextmanager
def unmended(name: str) -> Iterator[None]:
    """Puts the host's own code back inside the block; for tests."""
    mend = MENDS[name]
    if not mend.undo:
        raise ValueError(f"mend {name!r} is not applied on this host")
    mended = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in mend.undo]
    try:
        for owner, attribute, value in reversed(mend.undo):
            delattr(owner, attribute) if value is _ABSENT else setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in mended:
            setattr(owner, attribute, value)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _base() -> Any:
    return _module("solo.methods.base")


@_mend(
    "online-knn",
    "knn_eval.enabled fails with `Unexpected keyword arguments: compute_on_step`",
    "main",
)
def _online_knn() -> Iterator[Patch]:
    from solo_ext.modules.knn import OnlineKNN

    yield _module("solo.utils.knn"), "WeightedKNNClassifier", OnlineKNN
    yield _base(), "WeightedKNNClassifier", OnlineKNN


@_mend(
    "optimisers",
    "checkpoints of SimSiam and NNSiam (static_lr) cannot be loaded: UnpicklingError",
    "main",
)
def _optimisers() -> Iterator[Patch]:
    from solo_ext.host.optim import configure_optimizers

    yield _base().BaseMethod, "configure_optimizers", configure_optimizers


@_mend("backbones", "timm models cannot be named as backbones", "main")
def _backbones() -> Iterator[Patch]:
    from solo_ext.host.backbones import BackboneTable, small_image_kwargs

    base = _base().BaseMethod
    original = base.add_and_assert_specific_cfg

    @functools.wraps(original)
    def with_small_images(cfg: Any) -> Any:
        cfg = original(cfg)
        if cfg.get("augmentations"):
            cfg.backbone.kwargs = small_image_kwargs(
                cfg.backbone.name, cfg.backbone.kwargs, cfg.augmentations[0].crop_size
            )
        return cfg

    yield base, "_BACKBONES", BackboneTable(base._BACKBONES)
    yield base, "add_and_assert_specific_cfg", staticmethod(with_small_images)


@_mend("few-classes", "fewer than five classes: `selected index k out of range`")
def _few_classes() -> Iterator[Patch]:
    from solo_ext.host.accuracy import accuracy_at_k

    for name in ("solo.utils.metrics", "solo.methods.base", "solo.methods.linear"):
        if hasattr(_module(name), "accuracy_at_k"):
            yield _module(name), "accuracy_at_k", accuracy_at_k


@_mend(
    "no-labels",
    "a batch without labels has a loss of nan: that of the online classifier, a mean over nothing",
    "main",
)
def _no_labels() -> Iterator[Patch]:
    from solo_ext.host.class_loss import class_loss

    def mended(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, X: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
            out: dict[str, Any] = original(self, X, targets)
            # The momentum network's is without one where it has no classifier.
            return {**out, "loss": class_loss(out["logits"], targets)} if "loss" in out else out

        return step

    base = _base()
    for owner, name in (
        (base.BaseMethod, "_base_shared_step"),
        (base.BaseMomentumMethod, "_shared_step_momentum"),
    ):
        yield owner, name, mended(vars(owner)[name])


@_mend(
    "momentum-resume",
    "a resumed run takes its first momentum step with base_tau, and one too many when gradients "
    "accumulate",
)
def _momentum_resume() -> Iterator[Patch]:
    base = _base().BaseMomentumMethod
    original = base.on_train_start

    @functools.wraps(original)
    def on_train_start(self: Any) -> None:
        original(self)
        self.last_step = self.trainer.global_step
        self.momentum_updater.update_tau(
            cur_step=self.trainer.global_step,
            max_steps=self.trainer.estimated_stepping_batches,
        )

    yield base, "on_train_start", on_train_start


@_mend(
    "momentum-update",
    "every step of a momentum network gives its parameters new memory, by three operations each",
)
def _momentum_update() -> Iterator[Patch]:
    updater = _module("solo.utils.momentum").MomentumUpdater

    @functools.wraps(updater.update)
    @torch.no_grad()
    def update(self: Any, online_net: torch.nn.Module, momentum_net: torch.nn.Module) -> None:
        pairs = zip(online_net.parameters(), momentum_net.parameters(), strict=False)
        values = [(online.data, momentum.data) for online, momentum in pairs]
        if values:
            online, momentum = map(list, zip(*values, strict=True))
            torch._foreach_lerp_(momentum, online, 1 - self.cur_tau)

    yield updater, "update", update


def _restored_late(method: Any, names: tuple[str, ...]) -> Iterator[Patch]:
    """Buffers that a method makes when training starts, too late for a checkpoint to fill."""
    original = method.on_train_start

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        for name in names:
            if name in checkpoint["state_dict"]:
                self.register_buffer(name, torch.empty_like(checkpoint["state_dict"][name]))

    @functools.wraps(original)
    def on_train_start(self: Any) -> None:
        restored = {name: self._buffers[name] for name in names if name in self._buffers}
        # The generator is left as it was: the fresh values are thrown away.
        with torch.random.fork_rng(enabled=bool(restored)):
            original(self)
        for name, value in restored.items():
            if name in self._buffers and self._buffers[name].shape != value.shape:
                raise ValueError(
                    f"{name} of the checkpoint has shape {tuple(value.shape)}, this run needs "
                    f"{tuple(self._buffers[name].shape)}; resume with the data set, batch size "
                    "and number of processes of the checkpoint"
                )
            self.register_buffer(name, value.to(self.device))
        if "assignments" in names and "assignments" not in self._buffers:
            shape = (len(self.num_prototypes), self.dataset_size)
            none = torch.full(shape, -1, dtype=torch.long, device=self.device)
            self.register_buffer("assignments", none)

    yield method, "on_load_checkpoint", on_load_checkpoint
    yield method, "on_train_start", on_train_start


@_mend("swav-queue", 'resuming SwAV fails: `Unexpected key(s) in state_dict: "queue"`')
def _swav_queue() -> Iterator[Patch]:
    yield from _restored_late(_module("solo.methods.swav").SwAV, ("queue",))


@_mend(
    "all4one-encoding",
    'resuming All4One fails: `Unexpected key(s) in state_dict: "pos_enc.penc.penc.cached_penc"`',
    "main",
)
def _all4one_encoding() -> Iterator[Patch]:
    method = _module("solo.methods.all4one").All4One
    encoding = _module("solo.utils.positional_encodings").PositionalEncoding1D
    made = encoding.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        # What it keeps from the last batch, of that batch's size, is no state.
        self.register_buffer("cached_penc", None, persistent=False)

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        # Those of solo-learn's own script hold it.
        checkpoint["state_dict"].pop("pos_enc.penc.penc.cached_penc", None)

    yield encoding, "__init__", __init__
    yield method, "on_load_checkpoint", on_load_checkpoint


@_mend("deepcluster-memory", "resuming DeepCluster v2 fails: unexpected keys, lost assignments")
def _deepcluster_memory() -> Iterator[Patch]:
    yield from _restored_late(
        _module("solo.methods.deepclusterv2").DeepClusterV2,
        ("local_memory_index", "local_memory_embeddings", "assignments"),
    )


@_mend("deepcluster-first-epoch", "DeepCluster v2 logs a loss of nan through its first epoch")
def _deepcluster_first_epoch() -> Iterator[Patch]:
    module = _module("solo.methods.deepclusterv2")
    original = module.deepclusterv2_loss_func

    @functools.wraps(original)
    def zero_without_targets(outputs: Any, assignments: Any, temperature: float = 0.1) -> Any:
        # Nothing is assigned before the first clustering: a mean over no targets.
        loss = original(outputs, assignments, temperature)
        return torch.where((assignments >= 0).any(), loss, outputs.sum() * 0.0)

    yield module, "deepclusterv2_loss_func", zero_without_targets


@_mend("dino-epoch", "DINO resumed within an epoch uses the teacher temperature of epoch 0")
def _dino_epoch() -> Iterator[Patch]:
    dino = _module("solo.methods.dino").DINO

    def on_train_start(self: Any) -> None:
        _base().BaseMomentumMethod.on_train_start(self)
        self.dino_loss_func.epoch = self.current_epoch

    yield dino, "on_train_start", on_train_start


@_mend("index-dataset", "workers started by spawn or forkserver cannot pickle the data set")
def _index_dataset() -> Iterator[Patch]:
    from solo_ext.host.index_dataset import dataset_with_index

    for name in ("solo.data.pretrain_dataloader", "solo.utils.pretrain_dataloader"):
        with contextlib.suppress(ModuleNotFoundError):
            yield _module(name), "dataset_with_index", dataset_with_index


@_mend("own-size", "small images of data.dataset=custom are enlarged to 224 x 224", "main")
def _own_size() -> Iterator[Patch]:
    from solo_ext.host.own_size import upstream_pipelines

    yield (
        _module("solo.data.classification_dataloader"),
        "build_custom_pipeline",
        upstream_pipelines,
    )


@_mend(
    "dali",
    "data.format=dali on the CPU fails with `GPU DALI pipeline while CUDA is not available`; files "
    "that are no images are opened; the seed is 12; an epoch cut short shortens the next",
    "main",
)
def _dali() -> Iterator[Patch]:
    # Upstream imports it with `solo.data`, where DALI is installed.
    if "solo.data.dali_dataloader" not in sys.modules:
        return
    mended = _module("solo_ext.host.dali_main")
    module = sys.modules["solo.data.dali_dataloader"]
    for name in (
        "PretrainPipelineBuilder",
        "NormalPipelineBuilder",
        "CustomNormalPipelineBuilder",
        "PretrainWrapper",
    ):
        yield module, name, getattr(mended, name)
    owner = module.PretrainDALIDataModule
    section = mended.dali_section(owner.add_and_assert_specific_cfg)
    yield owner, "add_and_assert_specific_cfg", staticmethod(section)
