"""The frozen teacher of a distillation, its settings, and the conversion to its normalisation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from solo_ext.core.errors import UserError
from solo_ext.core.types import Section
from solo_ext.memory.state import State

_WEIGHTS = ("backbone", "head")


class TeacherKwargs(Section):
    """``method_kwargs.teacher``: the frozen network that the student learns from.

    Attributes:
        layout: format of the teacher's weights: ``run`` of solo-learn or solo_ext (a run directory
            or one of its checkpoints), ``export`` of ``solo-ext export``, the official files of
            ``moco_v2``, ``swav`` and ``dino``, a model of ``timm`` or ``torchvision``.
        path: the file or run directory; null: timm and torchvision download the weights.
        model: the architecture, if the file does not name it; for timm and torchvision with the
            tag of its weights, such as ``resnet50.a1_in1k`` and ``resnet50:IMAGENET1K_V2``.
        model_kwargs: arguments of the model's constructor.
        networks: the ``online`` or the ``momentum`` networks of a run that has both.
        dtype: dtype of the teacher's forward pass, by autocast.

    Example:
        >>> TeacherKwargs(layout="moco_v2", path="moco_v2_800ep_pretrain.pth.tar").networks
        'online'
    """

    layout: Literal["run", "export", "moco_v2", "swav", "dino", "timm", "torchvision"] = "run"
    path: str | None = None
    model: str | None = None
    model_kwargs: dict[str, Any] = {}
    networks: Literal["online", "momentum"] = "online"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Teacher(State):
    """Backbone and head in eval mode, without gradient, outside DDP and checkpoints.

    Checkpoints store the teacher's digest; loading that of another teacher raises UserError.

    Args:
        backbone: (N, 3, H, W) -> (N, F), with its weights.
        head: (N, F) -> (N, D); with ``None`` the features are the embeddings.
        digest: digest of the file of the weights.
        dtype: of the forward pass, by autocast: fp32, bf16 or fp16.
        prototypes: (K, D) unit rows from the teacher's file; never in checkpoints.

    Example:
        >>> backbone = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        >>> teacher = Teacher(backbone, nn.Linear(3, 8), digest="0123456789abcdef")
        >>> z = teacher(torch.randn(4, 3, 16, 16))
        >>> z.shape, z.requires_grad
        (torch.Size([4, 8]), False)
    """

    frozen = True
    prototypes: Tensor | None

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module | None = None,
        *,
        digest: str,
        dtype: torch.dtype = torch.float32,
        prototypes: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.register_buffer("prototypes", prototypes, persistent=False)
        self.digest, self.dtype = digest, dtype
        self.requires_grad_(False)
        self.train(False)
        # The hook is a function and not a method, so that copies and spawned processes work.
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Teacher:
        """Stays in eval mode, whatever the mode of the parent module."""
        return super().train(False)

    def forward(self, X: Tensor) -> Tensor:
        """Embeddings (N, D) of images (N, 3, H, W), not normalised, in fp32, without gradient."""
        with torch.inference_mode(), self._precision(X.device):
            z = self.backbone(X)
            if self.head is not None:
                z = self.head(z)
        # Autograd cannot save inference tensors, so return a normal tensor: a copy that is made
        # outside of inference mode.
        return z.to(torch.float32, copy=True)  # type: ignore[no-any-return]

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        # Devices without autocast, such as meta, raise an error even for enabled=False.
        if not torch.amp.is_autocast_available(device.type):
            return contextlib.nullcontext()
        if self.dtype == torch.float32:
            return torch.autocast(device.type, enabled=False)
        return torch.autocast(device.type, dtype=self.dtype)

    def extra_state(self) -> list[int]:
        return [*self.digest.encode()]

    def load_extra_state(self, numbers: list[int]) -> None:
        given = bytes(numbers).decode()
        if given != self.digest:
            raise UserError(
                f"the checkpoint was trained with the teacher {given}, not with {self.digest}; "
                "name the file of the first one"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Checkpoints lack the keys of the children, which load next: insert their current weights,
        # which the digest shows to be the right ones.
        state_dict.update(
            {
                f"{prefix}{name}.{key}": value
                for name, child in self.named_children()
                for key, value in child.state_dict().items()
            }
        )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Removes the weights from a state dict: a resumed run reads them from the teacher's file."""
    starts = tuple(f"{prefix}{name}." for name in _WEIGHTS)
    for key in [k for k in state if k.startswith(starts)]:
        del state[key]


class Renormalize(nn.Module):
    """Converts images normalised by one mean and deviation to another normalisation.

    ``(x std + mean - target_mean) / target_std``; if both are the same, images are returned as is.

    Example:
        >>> view = Renormalize([0.5], [0.5], [0.0], [1.0])
        >>> view(torch.tensor([[[[-1.0, 1.0]]]])).flatten()
        tensor([0., 1.])
    """

    scale: Tensor | None
    shift: Tensor | None

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        target_mean: Sequence[float],
        target_std: Sequence[float],
    ) -> None:
        super().__init__()
        m, s, tm, ts = (
            torch.tensor(list(v), dtype=torch.float64).view(-1, 1, 1)
            for v in (mean, std, target_mean, target_std)
        )
        same = torch.equal(m, tm) and torch.equal(s, ts)
        self.register_buffer("scale", None if same else (s / ts).float(), persistent=False)
        self.register_buffer("shift", None if same else ((m - tm) / ts).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Converts images (N, C, H, W)."""
        return x if self.scale is None or self.shift is None else x * self.scale + self.shift
