"""Where other libraries compute the same, so do these."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor

from solo_ext.host import Host
from solo_ext.losses.contrastive import nt_xent_loss_func
from solo_ext.losses.nnclr import nnclr_symmetric_loss_func
from tests.losses.conftest import same

TEMPERATURES = pytest.mark.parametrize("temperature", [0.07, 0.2, 1.0])


def make_views(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    centres = torch.randn(batch, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, batch, 6, generator=generator, dtype=torch.float64)
    z1, z2 = 3 * (centres + 0.7 * noise)
    return z1.requires_grad_(), z2.requires_grad_()


close = partial(same, values=(1e-9, 1e-11), slopes=(1e-7, 1e-10))


@TEMPERATURES
@pytest.mark.parametrize("batch", [2, 9])
def test_nt_xent_is_the_host_s_simclr(loaded: Host, batch: int, temperature: float) -> None:
    z1, z2 = make_views(batch)
    theirs = loaded.solo.losses.simclr_loss_func
    if "indexes" in inspect.signature(theirs).parameters:
        images = torch.arange(batch).repeat(2)
        expected = theirs(torch.cat((z1, z2)), indexes=images, temperature=temperature)
    else:
        expected = theirs(z1, z2, temperature=temperature)
    close(nt_xent_loss_func(z1, z2, temperature), expected, (z1, z2))


@TEMPERATURES
@pytest.mark.parametrize("batch", [2, 9])
def test_row_term_of_nnclr_is_the_host_s(loaded: Host, batch: int, temperature: float) -> None:
    nn, p = make_views(batch)
    expected = loaded.solo.losses.nnclr_loss_func(nn, p, temperature=temperature)
    close(nnclr_symmetric_loss_func(nn, p, temperature, symmetric=False), expected, (nn, p))
