"""Patches: what is replaced in an installed solo-learn while the plugin is loaded, and why.

A patch names the symptom that it cures, and yields (owner, attribute, value) for what it replaces,
or nothing if the installed solo-learn does not have the defect. Patches that change no results are
applied when the host is loaded. Those that change any (``changes_results``) are applied to runs
that list them in the config key ``patches``, which is recorded with the run. Some of these do not
change the weights of an uninterrupted run: runs of plugins' methods and of ``solo-ext`` get them
without asking, see :func:`default_patches`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from torch.optim.sgd import sgd
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.datasets import FakeData

from solo_ext import host
from solo_ext.core.errors import ConfigError, UserError, show_messages, unknown_name

logger = logging.getLogger(__name__)

Replacement = tuple[Any, str, Any]
OF_SCRIPTS = ("own-size", "dali")
"""Patches to parts that only solo-learn's own scripts use."""
IN_LAUNCHER = False
"""Whether ``python -m solo_ext SCRIPT`` started this; it allows any number of large crops."""
PLUGIN_METHODS: dict[int, Any] = {}
"""Methods that were registered with this plugin, by ``id``, since not all can be hashed.

All other methods in the host's table, also those of a fork, are built-in methods.
"""
_ABSENT = object()


@dataclass
class Patch:
    """A replacement of some of a host's attributes.

    Attributes:
        name: its name in the key ``patches``.
        symptom: what a user sees without the patch.
        changes_results: whether it changes numerical results, so that a run must ask for it.
        replacements: yields (owner, attribute, value).
        fix: name of the fix in ``upstream/fixes``; a solo-learn with that fix needs no patch.
        undo: the original values while the patch is applied; ``_ABSENT`` for a new attribute.
        error: why it could not be applied to this host; empty if it could.

    >>> class Owner:
    ...     momentum = 0.9
    >>> Patch("momentum", "it is too small", False, lambda: [(Owner, "momentum", 0.99)]).apply()
    >>> Owner.momentum
    0.99
    """

    name: str
    symptom: str
    changes_results: bool
    replacements: Callable[[], Iterable[Replacement]]
    fix: str = ""
    undo: list[Replacement] = field(default_factory=list)
    error: str = ""

    def apply(self) -> None:
        """Applies the replacements; if they do not fit this host, warns and changes nothing."""
        if self.undo:
            return
        try:
            for owner, attribute, value in list(self.replacements()):
                self.undo.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
                setattr(owner, attribute, value)
        except Exception as error:
            self.remove()
            self.error = f"{type(error).__name__}: {error}"
            logger.warning(
                f"patch {self.name!r} does not fit this solo-learn and is left out "
                f"({self.error}); without it: {self.symptom}"
            )

    def remove(self) -> None:
        """Restores the original values."""
        for owner, attribute, value in reversed(self.undo):
            delattr(owner, attribute) if value is _ABSENT else setattr(owner, attribute, value)
        self.undo = []


PATCHES: dict[str, Patch] = {}
_Yields = Callable[[], Iterable[Replacement]]


def _patch(
    name: str, symptom: str, *, changes_results: bool = False, fix: str = ""
) -> Callable[[_Yields], _Yields]:
    def add(replacements: _Yields) -> _Yields:
        PATCHES[name] = Patch(name, symptom, changes_results, replacements, fix)
        return replacements

    return add


def apply_all() -> None:
    """Applies every patch that changes no results; ``solo`` must be imported already.

    >>> loaded = host.load()
    >>> apply_all()
    >>> [name for name, patch in PATCHES.items() if patch.error]
    []
    """
    for patch in PATCHES.values():
        if not patch.changes_results:
            patch.apply()


def check_names(names: Iterable[str]) -> None:
    """Refuses names other than those of patches with ``changes_results``.

    Raises:
        ConfigError: there is such a name; it reports the first.

    >>> check_names(["own-sise"])
    Traceback (most recent call last):
    solo_ext.core.errors.ConfigError: patches='own-sise': unknown patch; did you mean 'own-size'?...
    """
    optional = [patch.name for patch in PATCHES.values() if patch.changes_results]
    for name in names:
        if name not in PATCHES:
            raise unknown_name("patches", name, "patch", optional)
        if name not in optional:
            problem = "changes no number and is always applied"
            raise ConfigError("patches", name, problem, "leave it out")


def select_for_run(given: Iterable[str], repairs: Iterable[str] = ()) -> list[str]:
    """Applies a run's patches with ``changes_results``, and removes all others of this kind.

    Args:
        given: the config's ``patches``.
        repairs: from :func:`default_patches`; patches that do not fit this host are left out.

    Returns:
        The names of all patches applied, for the run's records and :func:`announce`.

    Raises:
        ConfigError: an unknown name in ``given``, or a patch that does not fit this host.

    >>> loaded = host.load()
    >>> select_for_run(["momentum-update"])
    ['momentum-update']
    >>> select_for_run([])
    []
    """
    chosen = list(given)
    check_names(chosen)
    for patch in PATCHES.values():
        if patch.changes_results and patch.name not in chosen:
            patch.remove()
    wanted = list(dict.fromkeys([*chosen, *repairs]))
    for name in wanted:
        patch = PATCHES[name]
        patch.apply()
        if name in chosen and not patch.undo:
            nothing = "this solo-learn has nothing that it would replace"
            problem = f"does not fit this solo-learn: {patch.error}" if patch.error else nothing
            raise ConfigError("patches", name, problem, "leave it out")
    return [name for name in wanted if PATCHES[name].undo]


def default_patches(
    method: str,
    data_format: str | None = None,
    warmup_epochs: float | None = None,
    max_steps: int | None = None,
    graphs: bool = False,
) -> list[str]:
    """Patches with ``changes_results`` that plugins' methods and ``solo-ext`` get without asking.

    They change NaN in logs, what happens after an interruption, DALI's order and seed, the online
    classifier's learning rate without a warm-up, all rates where the warm-up is no whole number of
    steps, and last bits of momentum networks that are CUDA graphs, but no other number.

    >>> loaded = host.load()
    >>> default_patches("dino")
    ['no-labels', 'momentum-resume', 'dino-epoch']
    """
    target = import_module("solo.methods").METHODS.get(method)
    # A method whose settings decide on momentum networks is no class, but has this attribute.
    momentum = hasattr(target, "uses_momentum") or (
        isinstance(target, type) and issubclass(target, _base().BaseMomentumMethod)
    )
    warmup = warmup_epochs or 0.0
    wanted = {
        "no-labels": True,
        "momentum-resume": momentum,
        # A graph reads parameters from where they were when it was recorded.
        "momentum-update": momentum and graphs,
        "dino-epoch": method == "dino",
        "deepcluster-first-epoch": method == "deepclusterv2",
        "dali": data_format == "dali",
        "rates-without-warmup": warmup_epochs == 0,
        # A run that ends by steps scales its warm-up by the share of its epochs.
        "broken-warmup": bool(warmup % 1) or (bool(warmup) and (max_steps or -1) != -1),
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def announce(applied: Collection[str]) -> None:
    """Logs in one line which patches with ``changes_results`` a run has, if any.

    >>> announce([])
    """
    if applied:
        logger.info(f"patches of solo-learn that change numbers: {', '.join(applied)}")


def _of_a_plugin(cfg: DictConfig) -> bool:
    return id(import_module("solo.methods").METHODS.get(cfg.get("method"))) in PLUGIN_METHODS


def _base() -> Any:
    return import_module("solo.methods.base")


def _is_main() -> bool:
    """Whether the base classes are solo-learn's own; those of 1.0.2 are replaced by ours."""
    return not _base().BaseMethod.__module__.startswith("solo_ext.")


# Patches to runs of solo-learn's own scripts.


@_patch("messages", "Hydra's `job_logging: disabled`, as in solo-learn's configs, silences loggers")
def _messages() -> Iterator[Replacement]:
    # This is the first function that solo-learn's scripts call with the composed config.
    owner = import_module("solo.utils.checkpointer").Checkpointer
    original = getattr(owner, "add_and_assert_specific_cfg", None)
    if original is None:
        return

    @functools.wraps(original)
    def add_and_assert_specific_cfg(cfg: DictConfig) -> DictConfig:
        show_messages()
        if cfg.get("precision") == "auto":
            # Only `solo-ext pretrain` chooses a precision for `auto`.
            cfg.precision = "32-true"
        try:
            announce(applied := _select_for_script(cfg))
            if applied:
                # Without patches, a built-in method's recorded config stays exactly upstream's.
                OmegaConf.set_struct(cfg, False)
                cfg.patches = applied
        except UserError as error:
            print(f"solo_ext: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        filled: DictConfig = original(cfg)
        return filled

    yield owner, "add_and_assert_specific_cfg", staticmethod(add_and_assert_specific_cfg)


def _select_for_script(cfg: DictConfig) -> list[str]:
    """Applies the patches of a script's run; refuses a config that the script cannot take."""
    given = OmegaConf.select(cfg, "patches") or []
    if not OmegaConf.is_list(given) and not isinstance(given, list):
        raise ConfigError("patches", given, "not a list", "give one such as [own-size]")
    if not _of_a_plugin(cfg):
        return select_for_run(given)
    crops = cfg.get("augmentations") or []
    large = sum(a.num_crops for a in crops if a.crop_size == crops[0].crop_size)
    if large != 2 and not IN_LAUNCHER and Path(sys.argv[0]).name == "main_pretrain.py":
        problem = "solo-learn's main_pretrain.py asserts two"
        remedy = "run it as `python -m solo_ext main_pretrain.py ...`, or give num_crops: 2"
        raise ConfigError("augmentations", f"{large} large crops", problem, remedy)
    keys = ("data.format", "scheduler.warmup_epochs", "max_steps")
    return select_for_run(
        given, default_patches(cfg.method, *(OmegaConf.select(cfg, key) for key in keys))
    )


@_patch(
    "auto-resume",
    "auto_resume takes a run of other method_kwargs for the same, and trains nothing more",
    fix="0002-auto-resume-compares-settings",
)
def _auto_resume() -> Iterator[Replacement]:
    owner = import_module("solo.utils.auto_resumer").AutoResumer
    original = owner.find_checkpoint
    if "cfg" not in original.__code__.co_varnames:
        return
    if "method_kwargs" in owner.SHOULD_MATCH:
        # Add `patches`, a key that only the plugin knows.
        yield owner, "SHOULD_MATCH", [*owner.SHOULD_MATCH, "patches"]
        return

    @functools.wraps(original)
    def find_checkpoint(self: Any, cfg: DictConfig) -> Any:
        if not _of_a_plugin(cfg):
            return original(self, cfg)
        held = owner.SHOULD_MATCH
        owner.SHOULD_MATCH = [*held, "method_kwargs", "patches"]
        try:
            return original(self, cfg)
        finally:
            owner.SHOULD_MATCH = held

    yield owner, "find_checkpoint", find_checkpoint


@_patch(
    "method-kwargs",
    "a misspelt key of a third party's method_kwargs is ignored, whatever type it declares",
)
def _method_kwargs() -> Iterator[Replacement]:
    if not _is_main():
        return
    base = _base().BaseMethod
    original = base.add_and_assert_specific_cfg

    @functools.wraps(original)
    def checked(cfg: Any) -> Any:
        cfg = original(cfg)
        target = import_module("solo.methods").METHODS.get(OmegaConf.select(cfg, "method"))
        kwargs_type = getattr(target, "kwargs_type", None)
        # Our methods check in a function of their own, after reading other sections.
        ours = str(getattr(target, "__module__", "")).startswith("solo_ext.")
        if kwargs_type is not None and not ours:
            from solo_ext.config.check import check_method_kwargs

            given: Any = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
            cfg.method_kwargs = check_method_kwargs(kwargs_type, given).model_dump()
        return cfg

    yield base, "add_and_assert_specific_cfg", staticmethod(checked)


# Patches to networks, metrics and optimisers.


@_patch("backbones", "timm models cannot be named as backbones")
def _backbones() -> Iterator[Replacement]:
    from solo_ext.host.backbones import BackboneTable, small_image_kwargs

    if not _is_main():
        return
    base = _base().BaseMethod
    original = base.add_and_assert_specific_cfg

    @functools.wraps(original)
    def with_small_images(cfg: Any) -> Any:
        cfg = original(cfg)
        weights = OmegaConf.select(cfg, "backbone.weights")
        if weights is not None and Path(sys.argv[0]).name == "main_pretrain.py":
            problem = "solo-learn's own script does not read it"
            raise ConfigError("backbone.weights", weights, problem, "train by `solo-ext pretrain`")
        if cfg.get("augmentations"):
            cfg.backbone.kwargs = small_image_kwargs(
                cfg.backbone.name, cfg.backbone.kwargs, cfg.augmentations[0].crop_size
            )
        return cfg

    yield base, "_BACKBONES", BackboneTable(base._BACKBONES)
    yield base, "add_and_assert_specific_cfg", staticmethod(with_small_images)


@_patch(
    "online-knn",
    "knn_eval.enabled fails with `Unexpected keyword arguments: compute_on_step`",
    fix="0001-online-knn",
)
def _online_knn() -> Iterator[Replacement]:
    if not _is_main():
        return
    from solo_ext.memory.knn import OnlineKNN

    own = import_module("solo.utils.knn").WeightedKNNClassifier
    classes, features = torch.arange(2), torch.eye(2)
    try:
        knn = own(k=1)
        # Leave class 0 out of the validation images: that is another reason why it fails.
        knn.update(features, classes, features[1:], classes[1:])
        knn.compute()
    except (ValueError, RuntimeError):
        yield import_module("solo.utils.knn"), "WeightedKNNClassifier", OnlineKNN
        yield _base(), "WeightedKNNClassifier", OnlineKNN


@_patch("static-lr", "checkpoints of SimSiam and NNSiam hold a function: `UnpicklingError`")
def _static_lr() -> Iterator[Replacement]:
    if not _is_main():
        return
    owner = _base().BaseMethod
    original = owner.configure_optimizers

    @functools.wraps(original)
    def configure_optimizers(self: Any) -> Any:
        made = original(self)
        for config in made[1] if isinstance(made, tuple) else ():
            scheduler = config["scheduler"] if isinstance(config, dict) else config
            if "get_lr" in vars(scheduler):
                scheduler.state_dict = functools.partial(without_functions, scheduler.state_dict)
        return made

    def without_functions(state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        # The host sets `get_lr` on the instance, and torch saves all of its attributes.
        return {k: v for k, v in state_dict().items() if k not in ("get_lr", "state_dict")}

    yield owner, "configure_optimizers", configure_optimizers


@_patch("few-classes", "fewer than five classes: `selected index k out of range`")
def _few_classes() -> Iterator[Replacement]:
    from solo_ext.host.classifier import accuracy_at_k

    for name in ("solo.utils.metrics", "solo.methods.base", "solo.methods.linear"):
        if hasattr(import_module(name), "accuracy_at_k"):
            yield import_module(name), "accuracy_at_k", accuracy_at_k


@_patch(
    "no-labels",
    "a batch without labels has a loss of nan: that of the online classifier, a mean over nothing",
    changes_results=True,
    fix="0009-batch-without-labels",
)
def _no_labels() -> Iterator[Replacement]:
    from solo_ext.host.classifier import class_loss

    if not _is_main():
        return
    unlabelled = torch.zeros(1, 5), torch.tensor([-1])
    made = vars(_base().BaseMethod)["_base_shared_step"](lambda X: {"logits": X}, *unlabelled)
    if not made["loss"].isnan():
        return

    def with_class_loss(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, X: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
            out = original(self, X, targets)
            # A momentum network without classifier has no loss.
            return {**out, "loss": class_loss(out["logits"], targets)} if "loss" in out else out

        return step

    for owner, name in (
        (_base().BaseMethod, "_base_shared_step"),
        (_base().BaseMomentumMethod, "_shared_step_momentum"),
    ):
        yield owner, name, with_class_loss(vars(owner)[name])


@_patch(
    "rates-without-warmup",
    "with `warmup_epochs: 0` the online classifier learns at the backbone's rate, and no other",
    changes_results=True,
    fix="0020-rates-without-warmup",
)
def _rates_without_warmup() -> Iterator[Replacement]:
    if not _is_main():
        return
    owner = import_module("solo.utils.lr_scheduler").LinearWarmupCosineAnnealingLR
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 2.0)]
    owner(torch.optim.SGD(groups), 0, 10, warmup_start_lr=1.0)
    if groups[1]["lr"] == 2.0:
        return
    original = owner.get_lr

    @functools.wraps(original)
    def get_lr(self: Any) -> Any:
        # The host gives the backbone's rate to all groups here, and later multiplies these.
        first = self.last_epoch == self.warmup_epochs == 0
        return list(self.base_lrs) if first else original(self)

    yield owner, "get_lr", get_lr


@_patch(
    "broken-warmup",
    "a warm-up of a broken number of steps, such as half an epoch of three, leads to up to twice "
    "`optimizer.lr` and more; one below one step leaves the rates at `warmup_start_lr`",
    changes_results=True,
    fix="0021-broken-warmup",
)
def _broken_warmup() -> Iterator[Replacement]:
    if not _is_main():
        return
    owner = import_module("solo.utils.lr_scheduler").LinearWarmupCosineAnnealingLR
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = owner(optimizer, 0.5, 4)
    # torch warns if the schedule moves before the optimiser does.
    optimizer.step()
    schedule.step()
    if optimizer.param_groups[0]["lr"]:
        return
    original = owner.__init__

    @functools.wraps(original)
    def __init__(self: Any, optimizer: Any, warmup_epochs: float, *args: Any, **kw: Any) -> None:
        # The host adds equal parts of the base rate until it meets this very number of steps.
        # Products of shares of epochs may be off a whole number in the last digit.
        original(self, optimizer, math.ceil(round(warmup_epochs, 6)), *args, **kw)

    yield owner, "__init__", __init__


@_patch(
    "lars-waits",
    "LARS reads two norms of every parameter on the host, and each time a GPU finishes its work",
    fix="0019-lars-without-waiting",
)
def _lars_waits() -> Iterator[Replacement]:
    if not _is_main():
        return
    lars = import_module("solo.utils.lars").LARS
    unread = torch.nn.Parameter(torch.empty(1, 1, device="meta"))
    unread.grad = torch.empty_like(unread)
    try:
        lars([unread], lr=1.0).step()
    except RuntimeError:
        yield lars, "step", lars_step


@torch.no_grad()
def lars_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Replaces ``LARS.step``: all parameters at once, without reading a value on the host.

    On a CPU the numbers are the same to the bit.

    The rate of a weight is ``eta |w| / (|g| + decay |w| + eps)``, Eq. 6 of You et al., 2017,
    arXiv 1708.03888; where either norm is 0, the gradient stays as it is.

    >>> p = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> p.grad = torch.tensor([[0.0, 2.0]])
    >>> group = {"params": [p], "lr": 1.0, "eta": 0.1, "eps": 0.0, "weight_decay": 0.0}
    >>> group |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "clip_lr": False}
    >>> group["exclude_bias_n_norm"] = True
    >>> lars_step(SimpleNamespace(param_groups=[group], state={p: {}}))
    >>> p.data
    tensor([[3.0000, 3.5000]])
    """
    loss = None if closure is None else torch.enable_grad()(closure)()
    for group in self.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        gradients, decay = [p.grad for p in params], group["weight_decay"]
        adapted = defaultdict[Any, list[int]](list)
        for i, p in enumerate(params):
            if p.ndim != 1 or not group["exclude_bias_n_norm"]:
                adapted[p.device, p.dtype].append(i)
        for alike in adapted.values():
            weights, own = [params[i] for i in alike], [gradients[i] for i in alike]
            p_norm, g_norm = (torch.stack(torch._foreach_norm(x)) for x in (weights, own))
            rate = p_norm / (g_norm + p_norm * decay + group["eps"]) * group["eta"]
            if group["clip_lr"]:
                rate = (rate / group["lr"]).clamp(max=1)
            # A weight of 0 adds nothing to its gradient, and a gradient of 0 must stay 0.
            rate = torch.where(g_norm == 0, 0.0, torch.where(p_norm == 0, 1.0, rate))
            decayed = torch._foreach_add(own, weights, alpha=decay)
            torch._foreach_mul_(decayed, rate.unbind())
            for i, gradient in zip(alike, decayed, strict=True):
                gradients[i] = gradient
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        same = {key: group[key] for key in ("lr", "momentum", "dampening", "nesterov")}
        sgd(params, gradients, buffers, weight_decay=0, maximize=False, foreach=True, **same)
        if group["momentum"]:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer
    return loss


# Patches to momentum networks.


@_patch(
    "momentum-resume",
    "a resumed run takes its first momentum step with base_tau, and one too many when gradients "
    "accumulate",
    changes_results=True,
    fix="0010-momentum-on-resume",
)
def _momentum_resume() -> Iterator[Replacement]:
    base = _base().BaseMomentumMethod
    original = base.on_train_start
    trainer = SimpleNamespace(global_step=1, estimated_stepping_batches=2)
    resumed = SimpleNamespace(
        trainer=trainer, momentum_updater=import_module("solo.utils.momentum").MomentumUpdater()
    )
    original(resumed)
    if resumed.last_step:
        return

    @functools.wraps(original)
    def on_train_start(self: Any) -> None:
        original(self)
        if self.trainer.global_step:
            self.last_step = self.trainer.global_step
            self.momentum_updater.update_tau(
                cur_step=self.trainer.global_step, max_steps=self.trainer.estimated_stepping_batches
            )

    yield base, "on_train_start", on_train_start


@_patch(
    "momentum-update",
    "every step of a momentum network gives its parameters new memory, by three operations each; "
    "in place by one call, it differs in the last bit",
    changes_results=True,
)
def _momentum_update() -> Iterator[Replacement]:
    updater = import_module("solo.utils.momentum").MomentumUpdater
    # Finding the parameters of a network takes longer than updating them.
    found = WeakKeyDictionary[torch.nn.Module, list[torch.Tensor]]()

    @functools.wraps(updater.update)
    @torch.no_grad()
    def update(self: Any, online_net: torch.nn.Module, momentum_net: torch.nn.Module) -> None:
        for network in (online_net, momentum_net):
            if network not in found:
                found[network] = list(network.parameters())
        online, momentum = found[online_net], found[momentum_net]
        if momentum:
            torch._foreach_lerp_(momentum, online, 1 - self.cur_tau)

    yield updater, "update", update


# Patches to the state that single methods keep between batches.


def _restore_late_buffers(method: Any, names: tuple[str, ...]) -> Iterator[Replacement]:
    """Lets checkpoints restore buffers that a method creates only when training starts."""
    if "on_load_checkpoint" in vars(method):
        return
    original = method.on_train_start

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        for name in names:
            if name in checkpoint["state_dict"]:
                self.register_buffer(name, torch.empty_like(checkpoint["state_dict"][name]))
        if "assignments" in checkpoint:
            self.assignments = checkpoint["assignments"]

    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        # DeepCluster v2's assignments are not a buffer, so save them beside the weights.
        if getattr(self, "assignments", None) is not None:
            checkpoint["assignments"] = self.assignments

    @functools.wraps(original)
    def on_train_start(self: Any) -> None:
        restored = {name: self._buffers[name] for name in names if name in self._buffers}
        # The new values are discarded, so drawing them must not advance the generator.
        with torch.random.fork_rng(enabled=bool(restored)):
            original(self)
        for name, value in restored.items():
            if self._buffers[name].shape != value.shape:
                held, needed = tuple(value.shape), tuple(self._buffers[name].shape)
                raise ValueError(
                    f"{name} of the checkpoint has shape {held}, this run needs {needed}; resume "
                    "with the data set, batch size and number of processes of the checkpoint"
                )
            self.register_buffer(name, value.to(self.device))
        if getattr(self, "assignments", None) is not None:
            self.assignments = self.assignments.to(self.device)

    yield method, "on_load_checkpoint", on_load_checkpoint
    yield method, "on_save_checkpoint", on_save_checkpoint
    yield method, "on_train_start", on_train_start


@_patch(
    "swav-queue",
    'resuming SwAV fails: `Unexpected key(s) in state_dict: "queue"`',
    fix="0005-resume-swav",
)
def _swav_queue() -> Iterator[Replacement]:
    yield from _restore_late_buffers(import_module("solo.methods.swav").SwAV, ("queue",))


@_patch(
    "deepcluster-memory",
    "resuming DeepCluster v2 fails: unexpected keys, lost assignments",
    fix="0006-resume-deepclusterv2",
)
def _deepcluster_memory() -> Iterator[Replacement]:
    yield from _restore_late_buffers(
        import_module("solo.methods.deepclusterv2").DeepClusterV2,
        ("local_memory_index", "local_memory_embeddings"),
    )


@_patch(
    "all4one-encoding",
    'resuming All4One fails: `Unexpected key(s) in state_dict: "pos_enc.penc.penc.cached_penc"`',
    fix="0007-resume-all4one",
)
def _all4one_encoding() -> Iterator[Replacement]:
    if importlib.util.find_spec("solo.methods.all4one") is None:
        return
    all4one = import_module("solo.methods.all4one").All4One
    if "on_load_checkpoint" in vars(all4one):
        return

    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        # This buffer has the size of the last batch, and the next batch creates it anew.
        checkpoint["state_dict"].pop("pos_enc.penc.penc.cached_penc", None)

    yield all4one, "on_load_checkpoint", on_load_checkpoint


@_patch(
    "deepcluster-first-epoch",
    "DeepCluster v2 logs a loss of nan through its first epoch",
    changes_results=True,
    fix="0008-deepclusterv2-first-epoch",
)
def _deepcluster_first_epoch() -> Iterator[Replacement]:
    module = import_module("solo.methods.deepclusterv2")
    original = module.deepclusterv2_loss_func
    if not original(torch.zeros(1, 1, 1, 2), torch.tensor([[-1]])).isnan():
        return

    @functools.wraps(original)
    def zero_without_targets(outputs: Any, assignments: Any, temperature: float = 0.1) -> Any:
        # Before the first clustering no image is assigned, and a mean over no targets is NaN.
        loss = original(outputs, assignments, temperature)
        return torch.where((assignments >= 0).any(), loss, outputs.sum() * 0.0)

    yield module, "deepclusterv2_loss_func", zero_without_targets


@_patch(
    "kmeans-device",
    "DeepCluster v2 fails on a GPU after its first epoch: its clusters stay on the CPU",
    fix="0018-kmeans-device",
)
def _kmeans_device() -> Iterator[Replacement]:
    kmeans = import_module("solo.utils.kmeans").KMeans
    original = kmeans.cluster_memory
    of_one = kmeans(1, 0, 1, 1, 1, [1], kmeans_iters=0)
    nothing = torch.zeros(1, 1, 1, device="meta")
    with torch.random.fork_rng(devices=[]):
        if original(of_one, nothing[0, 0].long(), nothing)[0].is_meta:
            return

    @functools.wraps(original)
    def cluster_memory(self: Any, index: torch.Tensor, embeddings: torch.Tensor) -> Any:
        # With several processes the host moves everything to the CPU; with one it mixes devices.
        alone = not (dist.is_available() and dist.is_initialized())
        with embeddings.device if alone and not embeddings.is_cpu else contextlib.nullcontext():
            assignments, centroids = original(self, index, embeddings)
        return assignments.to(embeddings.device), centroids

    yield kmeans, "cluster_memory", cluster_memory


@_patch(
    "dino-epoch",
    "DINO resumed within an epoch uses the teacher temperature of epoch 0",
    changes_results=True,
    fix="0011-dino-temperature-on-resume",
)
def _dino_epoch() -> Iterator[Replacement]:
    dino = import_module("solo.methods.dino").DINO
    if "on_train_start" in vars(dino):
        return

    def on_train_start(self: Any) -> None:
        _base().BaseMomentumMethod.on_train_start(self)
        self.dino_loss_func.epoch = self.current_epoch

    yield dino, "on_train_start", on_train_start


# Patches to the reading of images.


@_patch(
    "index-dataset",
    "workers started by spawn or forkserver cannot pickle the data set",
    fix="0012-pickle-index-dataset",
)
def _index_dataset() -> Iterator[Replacement]:
    for name in ("solo.data.pretrain_dataloader", "solo.utils.pretrain_dataloader"):
        with contextlib.suppress(ModuleNotFoundError):
            module = import_module(name)
            try:
                pickle.dumps(module.dataset_with_index(FakeData)(size=1))
            except (AttributeError, pickle.PicklingError):
                yield module, "dataset_with_index", dataset_with_index


def dataset_with_index(dataset_class: type[Dataset[Any]]) -> type[Dataset[Any]]:
    """Makes a subclass whose items are ``(index, *item)``, and whose instances can be pickled.

    Replaces solo-learn's function of this name, which returns a class that spawned workers cannot
    import.

    >>> from torch.utils.data import TensorDataset
    >>> dataset_with_index(TensorDataset)(torch.zeros(3))[1]
    (1, tensor(0.))
    """

    def getitem(self: Any, index: int) -> tuple[Any, ...]:
        return (index, *dataset_class.__getitem__(self, index))

    def reduce(self: Any) -> tuple[Any, ...]:
        return _rebuild, (pickle.dumps(dataset_class),), self.__dict__

    body = {"__getitem__": getitem, "__reduce__": reduce, "__module__": dataset_class.__module__}
    return type(f"{dataset_class.__name__}WithIndex", (dataset_class,), body)


def _rebuild(dataset_class: bytes) -> Any:
    if host.detect().generation == "1.0.2":
        # In a new process, the release's classes can be imported only after this.
        host.load()
    indexed = dataset_with_index(pickle.loads(dataset_class))
    return indexed.__new__(indexed)


class NoUpscaleCrop:
    """Upstream's random or central crop of 224 pixels, or of the shorter side of smaller images.

    >>> NoUpscaleCrop(train=False)(Image.new("RGB", (32, 40))).size
    (32, 32)
    """

    def __init__(self, train: bool) -> None:
        self.train = train

    def __call__(self, image: Image.Image) -> Any:
        side = min(*image.size, 224)
        if self.train:
            return transforms.RandomResizedCrop(side, scale=(0.08, 1.0))(image)
        resized = transforms.Resize(256)(image) if side == 224 else image
        return transforms.CenterCrop(side)(resized)


@_patch(
    "own-size",
    "validation and linear evaluation enlarge small images of data.dataset=custom to 224 x 224",
    changes_results=True,
)
def _own_size() -> Iterator[Replacement]:
    if importlib.util.find_spec("solo.data") is None:
        return
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    normalize = transforms.Normalize(mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)
    end = [transforms.ToTensor(), normalize]

    def build_custom_pipeline() -> dict[str, Any]:
        flip = transforms.RandomHorizontalFlip()
        return {
            "T_train": transforms.Compose([NoUpscaleCrop(train=True), flip, *end]),
            "T_val": transforms.Compose([NoUpscaleCrop(train=False), *end]),
        }

    module = import_module("solo.data.classification_dataloader")
    yield module, "build_custom_pipeline", build_custom_pipeline


@_patch(
    "dali",
    "data.format=dali: files that are no images are opened; the seed is 12; an epoch cut short "
    "shortens the next; indices count the rows of the batch; data.val_path=null and CPUs fail",
    changes_results=True,
)
def _dali() -> Iterator[Replacement]:
    # Upstream imports this module together with `solo.data` if DALI is installed.
    module = sys.modules.get("solo.data.dali_dataloader")
    if module is None:
        return
    ours = import_module("solo_ext.host.dali_main")
    for name in ("PretrainPipelineBuilder", "PretrainWrapper"):
        yield module, name, getattr(ours, name)
    owner = module.PretrainDALIDataModule
    original = owner.add_and_assert_specific_cfg

    def with_indices(cfg: DictConfig) -> DictConfig:
        given = OmegaConf.select(cfg, "dali.encode_indexes_into_labels")
        cfg = original(cfg)
        cfg.dali.encode_indexes_into_labels = True if given is None else given
        method, is_dali = cfg.get("method"), cfg.data.get("format") == "dali"
        if is_dali and given is False and method == "deepclusterv2":
            problem = f"{method} looks samples up by index, which DALI's batches then lack"
            key = "dali.encode_indexes_into_labels"
            raise ConfigError(key, False, problem, "set it to true")
        return cfg

    def set_attribute(self: Any, name: str, value: Any) -> None:
        # Without validation images the script sets `lambda: None`, which Lightning refuses.
        if name != "val_dataloader" or value() is not None:
            object.__setattr__(self, name, value)

    yield owner, "add_and_assert_specific_cfg", staticmethod(with_indices)
    yield owner, "__setattr__", set_attribute
