"""A frozen network whose outputs a student learns."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.core.errors import UserError
from solo_ext.memory.state import State

_WEIGHTS = ("backbone", "head")


class Teacher(State):
    """Backbone and head in eval mode, without gradient, outside DDP and, by default, checkpoints.

    Checkpoints always hold the digest, and one of another teacher is refused; whether they hold
    the weights or not, they load strictly.

    Args:
        backbone: (N, 3, H, W) -> (N, F), with its weights.
        head: (N, F) -> (N, D), or none.
        digest: of the weights' file.
        dtype: of the forward pass, by autocast: fp32, bf16, or fp16 except on the CPU.
        in_checkpoint: whether checkpoints hold the weights.
        prototypes: (K, D) unit rows that came with it; never in checkpoints.

    Raises:
        ValueError: another dtype.
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
        in_checkpoint: bool = False,
        prototypes: Tensor | None = None,
    ) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype={dtype}: a teacher computes in float32, bfloat16 or float16")
        self.backbone, self.head = backbone, head
        self.register_buffer("prototypes", prototypes, persistent=False)
        self.digest, self.dtype, self.in_checkpoint = digest, dtype, in_checkpoint
        self.requires_grad_(False)
        self.train(False)
        # A function of the module and not a method, so that copies and spawned processes work.
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Teacher:
        """Stays in eval mode."""
        return super().train(False)

    def forward(self, X: Tensor) -> Tensor:
        """Computes embeddings, as constants that autograd may keep.

        Args:
            X: (N, 3, H, W).

        Returns:
            (N, D) of the head, not L2-normalised, in fp32; the features without a head.

        Raises:
            ValueError: fp16 on the CPU.
        """
        with torch.inference_mode(), self._precision(X.device):
            z = self.backbone(X)
            if self.head is not None:
                z = self.head(z)
        # A copy made out here is no inference tensor.
        return z.to(torch.float32, copy=True)  # type: ignore[no-any-return]

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.dtype == torch.float16 and device.type == "cpu":
            raise ValueError("dtype=torch.float16: CPUs have no fast fp16; take bfloat16 there")
        # Devices without autocast, meta among them, refuse even to have it switched off.
        if not torch.amp.is_autocast_available(device.type):
            return contextlib.nullcontext()
        if self.dtype == torch.float32:
            return torch.autocast(device.type, enabled=False)
        return torch.autocast(device.type, dtype=self.dtype)

    def extra_state(self) -> list[int]:
        return [*self.digest.encode()]

    def set_numbers(self, numbers: list[int]) -> None:
        given = bytes(numbers).decode()
        if given != self.digest:
            raise UserError(
                f"the checkpoint was trained with the teacher {given}, not with {self.digest}; "
                "name the file of the first one"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        starts = tuple(f"{prefix}{name}." for name in _WEIGHTS)
        if not any(key.startswith(starts) for key in state_dict):
            # What the children look into next; the digest says that these are the same.
            state_dict.update(
                {
                    f"{prefix}{name}.{key}": value
                    for name, child in self.named_children()
                    for key, value in child.state_dict().items()
                }
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Takes the weights out of a state dict that is not to hold them."""
    assert isinstance(module, Teacher)
    if not module.in_checkpoint:
        starts = tuple(f"{prefix}{name}." for name in _WEIGHTS)
        for key in [k for k in state if k.startswith(starts)]:
            del state[key]
