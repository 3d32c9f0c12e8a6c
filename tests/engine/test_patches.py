"""Per-sample gradients of convolutions that are formed with samples as channels, against autograd, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pmlf.engine import patches

_RUN: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "out", "groups", "kernel", "stride", "dilation", "padding"),
    [
        ((3, 4, 9, 8), 6, 1, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
        ((3, 4, 9, 8), 6, 2, (3, 2), (2, 1), (1, 2), (1, 1, 2, 2)),
        ((3, 4, 9, 8), 8, 4, (3, 3), (2, 1), (1, 1), (1, 2, 0, 1)),
        ((2, 5, 12), 7, 1, (3,), (2,), (1,), (1, 1)),
        ((2, 6, 5, 6, 7), 4, 2, (3, 2, 3), (1, 2, 1), (1, 1, 1), (0,) * 6),
    ],
    ids=["plain", "grouped", "depthwise", "1d", "3d"],
)
def test_samples_as_channels_have_their_own_gradients(
    shape: tuple[int, ...],
    out: int,
    groups: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows that leave pixels over at the border, uneven padding, and gradients that are there already among them."""
    monkeypatch.setattr(patches, "_LARGE_IMAGE", 0)
    torch.manual_seed(0)
    input = torch.randn(shape, dtype=dtype)
    weight = torch.randn(out, shape[1] // groups, *kernel, dtype=dtype, requires_grad=True)

    def run(some: Tensor) -> Tensor:
        found: Tensor = _RUN[len(kernel)](F.pad(some, padding), weight, stride=stride, dilation=dilation, groups=groups)
        return found

    grad = torch.randn_like(run(input))
    use = patches.Patches(
        samples=shape[0],
        groups=groups,
        tokens=grad[0, 0].numel(),
        rows=out // groups,
        cols=weight[0].numel(),
        input=input,
        grad=grad,
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        padding=padding,
        padding_mode="constant",
    )
    formed = torch.ones(shape[0], use.size, dtype=dtype)
    use.form(slice(0, shape[0]), formed, add=True)
    for sample, found in enumerate(use.in_own_order(formed - 1.0)):
        one = slice(sample, sample + 1)
        (expected,) = torch.autograd.grad(run(input[one]), weight, grad[one])
        torch.testing.assert_close(found, expected.flatten(), rtol=1e-4, atol=1e-5)
