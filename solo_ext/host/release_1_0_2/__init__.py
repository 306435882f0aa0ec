"""solo-learn 1.0.2 on current libraries, with the interface of its main branch."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchvision import models

from solo_ext.host.names import RELEASE_BACKBONES


def load() -> ModuleType:
    """Imports ``solo`` with its base class replaced, and lets its methods take main's config."""
    from solo_ext.host.release_1_0_2 import base

    replacement: Any = ModuleType("solo.methods.base")
    replacement.BaseMethod = base.BaseMethod
    replacement.BaseMomentumMethod = base.BaseMomentumMethod
    # Import afresh: an earlier, failed import of solo left an incomplete package.
    for name in [n for n in sys.modules if n == "solo" or n.startswith("solo.")]:
        del sys.modules[name]
    sys.modules["solo.methods.base"] = replacement
    with legacy_imports():
        solo = importlib.import_module("solo")
    solo.methods.base = replacement

    for name in ("solo.utils.whitening", "solo.methods.wmse"):
        sys.modules[name].Whitening2d = Whitening2d  # type: ignore[attr-defined]
    own_backbones = importlib.import_module("solo.utils.backbones")
    for name in RELEASE_BACKBONES:
        make = getattr(models if name.startswith("resnet") else own_backbones, name)
        base.BaseMethod._BACKBONES[name] = _after_method(make)
    made = _natives(solo.methods.METHODS)
    solo.methods.METHODS.update(made)
    for own in made.values():
        setattr(solo.methods, own.__name__, own)
    return solo


def _after_method(make: Any) -> Any:
    """Makes a constructor accept the method's name as its first argument, as in main."""
    return lambda method=None, **kwargs: make(**kwargs)


class _Stub(ModuleType):
    """Stands in for a removed module; the names imported from it are never called here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@contextlib.contextmanager
def legacy_imports() -> Iterator[None]:
    """Provides the modules that the release imports, then restores real ones of these names.

    ``pytorch_lightning`` becomes ``lightning.pytorch``. lightning depends on a distribution of the
    former name with other classes, so the redirection is needed even if that is installed.
    ``pl_bolts`` and ``distutils`` (removed in Python 3.12) are stubs: what the release imports from
    them is used only by its own scripts' argument parsing and by parts that are replaced here.

    >>> with legacy_imports():
    ...     import pytorch_lightning
    >>> pytorch_lightning.__name__
    'lightning.pytorch'
    """
    gone = ("pl_bolts", "pl_bolts.optimizers", "pl_bolts.optimizers.lr_scheduler", "distutils")
    old: dict[str, ModuleType] = {name: _Stub(name) for name in gone}
    old |= {"pytorch_lightning": pl, "pytorch_lightning.callbacks": pl.callbacks}
    tops = {name.partition(".")[0] for name in old}
    held = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] in tops}
    sys.modules.update(old)
    try:
        yield
    finally:
        for name in old:
            del sys.modules[name]
        sys.modules.update(held)


_OF_MAIN_ALONE = {
    "simsiam": {"temperature"},
    "ressl": {"base_tau_momentum", "final_tau_momentum", "momentum_classifier"},
}
_ARGUMENTS: dict[str, dict[str, Any]] = {"simclr": {"supervised": False}}


class _Native:
    """Mixin of a built-in method: takes main's config and runs the release's steps.

    The release's steps call the projector themselves. The shared part of the step must therefore
    not call the method's own ``forward``: batch norm would see every batch twice.
    """

    method_name: str

    def __init__(self, cfg: DictConfig) -> None:
        kwargs: Any = OmegaConf.to_container(cfg.method_kwargs, resolve=True)
        for name in _OF_MAIN_ALONE.get(self.method_name, ()):
            kwargs.pop(name, None)
        super().__init__(cfg=cfg, **kwargs, **_ARGUMENTS.get(self.method_name, {}))  # type: ignore[call-arg]

    def base_training_step(self, X: Tensor, targets: Tensor) -> dict[str, Any]:
        from solo_ext.host.release_1_0_2.base import BaseMethod

        return self._with_class_metrics(BaseMethod.forward(self, X), targets)  # type: ignore

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Separates DINO's clipping, which takes one number, from Lightning's hook of that name."""
        if len(args) == 1 and not kwargs:
            super().clip_gradients(args[0])  # type: ignore[misc]
        else:
            pl.LightningModule.clip_gradients(self, *args, **kwargs)  # type: ignore[arg-type]


class Whitening2d(nn.Module):
    """Whitening of W-MSE by a Cholesky factor (Ermolov et al. 2021, arXiv 2007.06346).

    The release's version calls ``torch.cholesky``, which was removed. ``eps`` is the shrinkage of
    the covariance (D, D) towards the identity.

    >>> x = Whitening2d(output_dim=3)(torch.randn(64, 3))
    >>> (x.T @ x / 63).allclose(torch.eye(3), atol=1e-4)
    True
    """

    def __init__(self, output_dim: int, eps: float = 0.0) -> None:
        super().__init__()
        self.output_dim, self.eps = output_dim, eps

    def forward(self, x: Tensor) -> Tensor:
        """Whitens (N, D) in fp32."""
        with torch.autocast(x.device.type, enabled=False):
            centred = x.float() - x.float().mean(dim=0)
            covariance = centred.T @ centred / (len(x) - 1)
            eye = torch.eye(self.output_dim, device=x.device)
            factor = torch.linalg.cholesky((1 - self.eps) * covariance + self.eps * eye)
            whitened: Tensor = torch.linalg.solve_triangular(factor, centred.T, upper=False)
            return whitened.T


def _natives(methods: dict[str, type]) -> dict[str, type]:
    """The methods of ``solo.methods.METHODS`` that train, each with main's constructor."""
    made = {}
    for name, own in methods.items():
        if name in ("base", "linear"):
            continue
        hooks: dict[str, Any] = {"method_name": name, "__module__": own.__module__}
        if "clip_gradients" not in vars(own):
            hooks["clip_gradients"] = pl.LightningModule.clip_gradients
        made[name] = type(own.__name__, (_Native, own), hooks)
    return made
