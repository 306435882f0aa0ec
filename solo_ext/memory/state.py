"""Buffers of a method that DDP must not broadcast, and how checkpoints store them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from solo_ext.core import distributed


class State(nn.Module):
    """Base of queues, banks and prototypes: persistent buffers, written in place between steps.

    Tables by sample index start empty, and each rank holds a share of their rows, see
    :mod:`~solo_ext.core.distributed`. Checkpoints store whole tables, so that a run can resume with
    another number of ranks; therefore all ranks must call ``state_dict`` together.

    Integers that a step reads are Python attributes, because reading a buffer on a GPU would wait
    for the device; :meth:`extra_state` and :meth:`load_extra_state` save and restore them.

    Example:
        >>> class Counter(State):
        ...     steps = 0
        ...     def extra_state(self): return [self.steps]
        ...     def load_extra_state(self, numbers): self.steps = numbers[0]
        >>> first, resumed = Counter(), Counter()
        >>> first.steps = 7
        >>> resumed.load_state_dict(first.state_dict())
        <All keys matched successfully>
        >>> resumed.steps
        7
    """

    frozen = False
    """Whether DDP ignores the parameters of the module and its children too: they never change."""
    by_sample: Mapping[str, int] = {}
    """Names of the tables by sample index, and the dimension that has an entry per sample."""

    def extra_state(self) -> list[int]:
        """Integers to store in checkpoints."""
        return []

    def load_extra_state(self, numbers: list[int]) -> None:
        """Restores what :meth:`extra_state` returned."""

    def get_extra_state(self) -> Tensor:
        # Return a tensor: tools that read checkpoints expect only tensors in a state dict.
        return torch.tensor(self.extra_state(), dtype=torch.long)

    def set_extra_state(self, state: Tensor) -> None:
        self.load_extra_state(state.tolist())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, dim in self.by_sample.items():
            given, held = state_dict.get(prefix + name), self.get_buffer(name)
            if given is None or given.ndim != held.ndim:
                continue
            state_dict[prefix + name] = share = distributed.share_of(given, dim)
            if share.shape != held.shape:
                setattr(self, name, held.new_empty(share.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, *rest: Any) -> None:
        super()._save_to_state_dict(destination, prefix, *rest)  # type: ignore[no-untyped-call]
        for name, dim in self.by_sample.items():
            destination[prefix + name] = distributed.join_shares(destination[prefix + name], dim)


def keep_out_of_broadcast(root: nn.Module) -> None:
    """Keeps the buffers of every :class:`State` in ``root`` out of DDP's buffer broadcast.

    ``root`` is the module that DDP will wrap. The broadcast would send whole tables from rank 0 at
    every forward pass. Frozen modules are kept out of DDP's initial broadcast of parameters too.

    Example:
        >>> from solo_ext.memory import PrototypePrior
        >>> method = nn.Sequential(nn.BatchNorm1d(4), PrototypePrior(8))
        >>> keep_out_of_broadcast(method)
        >>> method._ddp_params_and_buffers_to_ignore
        ['1.value']
    """
    names = {
        f"{prefix}.{name}"
        for prefix, module in root.named_modules()
        if isinstance(module, State)
        for name, _ in (
            *module.named_buffers(recurse=module.frozen),
            *(module.named_parameters() if module.frozen else ()),
        )
    }
    # DistributedDataParallel looks for this attribute on the module it wraps.
    root._ddp_params_and_buffers_to_ignore = sorted(names)  # type: ignore[assignment]
