"""Heads: projector and class weights; and batch norm that splits the batch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solo_ext.core import distributed
from solo_ext.core.errors import ConfigError
from solo_ext.core.precision import full_precision, full_precision_products
from solo_ext.kernels.normalized import normalized


def projector(
    in_dim: int,
    hidden_dim: int,
    out_dim: int,
    *,
    batch_norm: bool = True,
    layers: int = 2,
    last_batch_norm: bool = False,
) -> nn.Module:
    """MLP: linear layers with batch norm and ReLU between them.

    Args:
        in_dim: D of the features.
        hidden_dim: width of the hidden layers; 0 is a single linear layer.
        out_dim: D of the embeddings.
        batch_norm: whether hidden layers are normalised.
        layers: number of linear layers.
        last_batch_norm: whether the last layer is normalised.

    Example:
        >>> projector(512, 2048, 128)(torch.randn(4, 512)).shape
        torch.Size([4, 128])
    """
    widths = [in_dim, *[hidden_dim] * (layers - 1), out_dim] if hidden_dim else [in_dim, out_dim]
    parts: list[nn.Module] = []
    for number, (width, following) in enumerate(pairwise(widths), start=1):
        last = number == len(widths) - 1
        normalised = last_batch_norm if last else batch_norm
        parts.append(nn.Linear(width, following, bias=not normalised))
        if normalised:
            parts.append(nn.BatchNorm1d(following))
        if not last:
            parts.append(nn.ReLU())
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


class ClassWeights(nn.Module):
    """Cosines of features with one learned direction per class.

    Attributes:
        weight: (C, D), any scale; :meth:`forward` normalises it.

    Args:
        num_classes: C.
        dim: D.

    Example:
        >>> ClassWeights(10, dim=4)(torch.randn(3, 4)).shape
        torch.Size([3, 10])
    """

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        # Gaussian rows have uniformly distributed directions, and here about unit length.
        self.weight = nn.Parameter(torch.empty(num_classes, dim).normal_(std=dim**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Cosines (N, C) of features (N, D), which may slightly exceed 1 due to rounding.

        They are computed in fp32 (fp64 for fp64 features), also under autocast.
        """
        x, weight = full_precision(x, self.weight)
        with full_precision_products(x.device):
            return normalized(x) @ normalized(weight).T

    @torch.no_grad()
    def rematch_(
        self, old: Tensor, new: Tensor, optimizer_state: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Gives every class the weights of the old class that matches it best.

        If clusters serve as classes, their numbers change with every clustering. Of all one-to-one
        matchings m, the chosen one has the largest ``sum_c |{i: new_i = c, old_i = m(c)}|``. The
        Hungarian method finds it on the (C, C) table of counts in time O(C^3): some seconds for
        10,000 clusters.

        Args:
            old: (n,) class of every sample of this rank so far, in [0, C).
            new: (n,) class of the same samples from now on, in [0, C).
            optimizer_state: ``optimizer.state[weight]``; its (C, D) tensors, such as running means
                of gradients, are permuted as well.

        Returns:
            (C,) the old class of each new one.
        """
        from scipy.optimize import linear_sum_assignment

        classes = len(self.weight)
        counts = torch.bincount(new.long() * classes + old, minlength=classes**2)
        counts = distributed.sum_over_ranks(counts).view(classes, classes)
        _, match = linear_sum_assignment(counts.cpu().numpy(), maximize=True)
        match = torch.as_tensor(match, device=self.weight.device)
        for values in (self.weight, *(optimizer_state or {}).values()):
            if isinstance(values, Tensor) and values.shape == self.weight.shape:
                values.copy_(values[match.to(values.device)])
        return match


class SplitBatchNorm2d(nn.BatchNorm2d):
    """Normalises image i with the images of the same ``i % splits``.

    The running statistics are means over the splits. The layer replaces ``norm`` and shares its
    parameters and buffers. It imitates MoCo's batch norm on ``splits`` GPUs, which prevents the
    batch statistics from telling which query and key belong together (He et al., CVPR 2020,
    section 3.3).

    Example:
        >>> import torch
        >>> network = split_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), splits=2)
        >>> image = torch.randn(4, 3, 8, 8)
        >>> network(image)[::2].mean().abs() < 1e-6
        tensor(True)
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: nn.BatchNorm2d, splits: int) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.splits = splits
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(self, name, buffer)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises images (N, C, H, W); in training, N must be a multiple of ``splits``."""
        if not self.training:
            return super().forward(input)
        rows, channels = input.shape[:2]
        joined = input.reshape(rows // self.splits, self.splits * channels, *input.shape[2:])
        mean, var = self.running_mean.repeat(self.splits), self.running_var.repeat(self.splits)
        out = F.batch_norm(
            joined,
            mean,
            var,
            self.weight.repeat(self.splits),
            self.bias.repeat(self.splits),
            training=True,
            momentum=self.momentum or 0.1,
            eps=self.eps,
        )
        self.running_mean.copy_(mean.view(self.splits, channels).mean(0))
        self.running_var.copy_(var.view(self.splits, channels).mean(0))
        self.num_batches_tracked.add_(1)
        return out.view_as(input)


def split_batch_norm(network: nn.Module, splits: int) -> nn.Module:
    """Replaces every ``BatchNorm2d`` of a network by a :class:`SplitBatchNorm2d`.

    Raises:
        ConfigError: the network has none.

    Example:
        >>> split_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), splits=2)[0].splits
        2
    """
    modules = list(network.modules())
    # Replace each layer by one new layer, because a network may hold it under several names.
    made: dict[nn.Module | None, nn.Module] = {
        m: SplitBatchNorm2d(m, splits) for m in modules if type(m) is nn.BatchNorm2d
    }
    if not made:
        problem = "the backbone has no plain BatchNorm2d, whose batch could be split"
        raise ConfigError("method_kwargs.batch_norm_splits", splits, problem, "take 1")
    for module in modules:
        for name, child in list(module._modules.items()):
            if child in made:
                setattr(module, name, made[child])
    return made.get(network, network)
