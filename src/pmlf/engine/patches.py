"""Convolutions as uses: the left factor is the gradient at an output pixel, the right one the input patch under it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmlf.engine.arithmetic import blank, wide_dtype
from pmlf.engine.factors import Factors, Order, Scratch, Wide, Window

_LARGE_IMAGE = 1024  # pixels


@dataclass(frozen=True, kw_only=True)
class Patches(Factors):
    """Convolutions: left is the gradient at an output pixel, right the input patch under it, channels innermost."""

    input: Tensor  # (samples * windows, channels, *space)
    grad: Tensor  # (samples * windows, groups * rows, *space)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]  # as F.pad takes it
    padding_mode: str

    @property
    def like(self) -> Tensor:
        return self.grad

    @property
    def form_key(self) -> tuple[Any, ...]:
        shapes = self.input.shape[1:], self.grad.shape[2:], self._windows
        return *super().form_key, *shapes, self.kernel, self.stride, self.dilation

    @cached_property
    def _windows(self) -> int:
        return self.grad.shape[0] // self.samples

    @property
    def window(self) -> Window | None:
        """None too where inner products of patches are fewer."""
        if self.groups > 1 or self._windows > 1 or set(self.stride) | set(self.dilation) != {1}:
            return None
        space = tuple(size + k - 1 for size, k in zip(self.grad.shape[2:], self.kernel, strict=True))
        taps = self.cols // self.input.shape[1]
        window = Window(space=space, kernel=self.kernel)
        return window if window.pixels**2 < self.tokens**2 * taps else None

    @property
    def gram_operations(self) -> int:
        window = self.window
        if window is None:
            return self.groups * self.tokens * self.tokens * (self.rows + self.cols)
        return self.tokens * self.tokens * self.rows + window.pixels * window.pixels * self.input.shape[1]

    @property
    def gram_size(self) -> int:
        window = self.window
        if window is None:
            return super().gram_size
        sides = self.tokens * self.rows + window.pixels * self.input.shape[1]
        return sides + window.pixels**2 + 2 * self.tokens**2

    @property
    def form_touches(self) -> int:
        written = 0 if self._as_channels else 2 * self.groups * self.tokens * self.cols  # patches are
        return 2 * self.size + written

    @property
    def _as_channels(self) -> bool:
        """Whether gradients are formed with samples as more channels of one image: for depthwise convolutions, whose
        patches would be many small matrices, and for large images, whose patches would leave the cache."""
        depthwise = self.groups > 1 and self.cols == math.prod(self.kernel)
        return self._windows == 1 and (depthwise or self.tokens >= _LARGE_IMAGE)

    @property
    def stored(self) -> int:
        return self._windows * (self.input[0].numel() + self.grad[0].numel())

    def sides(self, chosen: slice) -> tuple[Tensor, Tensor]:
        patches = self._pixels(chosen)  # (m, *space, channels)
        for axis, (size, stride, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 1):
            patches = patches.unfold(axis, (size - 1) * gap + 1, stride)[..., ::gap]
        dims = len(self.kernel)
        # (m, *out, channels, *kernel) -> (n, windows, *out, taps..., groups, channels / groups)
        patches = patches.movedim(1 + dims, -1).unflatten(-1, (self.groups, -1)).unflatten(0, (-1, self._windows))
        right = patches.movedim(-2, 1).reshape(-1, self.groups, self.tokens, self.cols)
        return self._left(chosen), right

    def wide(self, chosen: slice, window: Window | None) -> Wide:
        if window is None:
            left, right = self.sides(chosen)
        else:
            left, right = self._left(chosen), self._pixels(chosen).flatten(1, -2).unsqueeze(1)
        dtype = wide_dtype(left)
        return Wide(left=left.to(dtype), right=right.to(dtype), window=window)

    def write_clipped_sum(self, scale: Tensor, out: Tensor, *, add: bool, scratch: Scratch) -> None:
        per_row = scale.to(self.grad).repeat_interleave(self._windows)
        scaled = torch.mul(self.grad, per_row.view(-1, *[1] * (self.grad.ndim - 1)), out=scratch(self.grad))
        dims, (input, padding) = len(self.kernel), self._for_backward(self.input)
        gradient = torch.ops.aten.convolution_backward(
            scaled, input, scaled.new_empty(1).expand(out.shape), None, self.stride, padding, self.dilation,
            False, (0,) * dims, self.groups, (False, True, False),
        )[1]  # fmt: skip
        out.add_(gradient) if add else out.copy_(gradient)

    def without(self, refused: Tensor) -> Patches:
        rows = refused.repeat_interleave(self._windows)
        return replace(self, input=blank(self.input, rows), grad=blank(self.grad, rows))

    @property
    def order(self) -> Order:
        return "channels last"

    def form(self, chosen: slice, out: Tensor, *, add: bool) -> None:
        if self._as_channels:
            found = self._formed_as_channels(chosen)
            into = out.view(found.shape)
            into.add_(found) if add else into.copy_(found)
            return
        left, right = self.sides(chosen)
        into = out.view(-1, self.rows, self.cols)  # (n * groups, rows, cols)
        torch.baddbmm(into, left.flatten(0, 1).mT, right.flatten(0, 1), beta=1 if add else 0, out=into)

    def _formed_as_channels(self, chosen: slice) -> Tensor:
        """(n, out, *kernel, in): samples are groups of channels of one image, and no patch is written out."""
        grad, (input, padding), dims = self.grad[chosen], self._for_backward(self.input[chosen]), len(self.kernel)
        samples, groups, inside = len(grad), len(grad) * self.groups, input.shape[1] // self.groups
        weight = grad.new_empty(1).expand(groups * self.rows, inside, *self.kernel)
        grad, input = (each.reshape(1, -1, *each.shape[2:]) for each in (grad, input))
        found: Tensor = torch.ops.aten.convolution_backward(
            grad, input, weight, None, self.stride, padding, self.dilation, False, (0,) * dims, groups,
            (False, True, False),
        )[1]  # fmt: skip
        return found.unflatten(0, (samples, -1)).movedim(2, -1)

    def _for_backward(self, input: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input and the padding that `convolution_backward` adds to it: none where it does not know how."""
        if self.padding_mode != "constant" or self.padding[::2] != self.padding[1::2]:
            return self._padded(input), (0,) * len(self.kernel)
        return input, self.padding[::-2]

    def arranged(self, flat: Tensor, shape: torch.Size) -> Tensor:
        return flat.view(shape[0], *self.kernel, shape[1]).movedim(-1, 1)

    def in_own_order(self, flat: Tensor) -> Tensor:
        channels = self.input.shape[1] // self.groups
        return flat.view(len(flat), -1, *self.kernel, channels).movedim(-1, 2).reshape(len(flat), -1)

    def _padded(self, input: Tensor) -> Tensor:
        return F.pad(input, self.padding, mode=self.padding_mode) if any(self.padding) else input

    def _pixels(self, chosen: slice) -> Tensor:
        """Padded inputs of some samples, (m, *space, channels)."""
        part = slice(chosen.start * self._windows, chosen.stop * self._windows)
        return self._padded(self.input[part]).movedim(1, -1).contiguous()

    def _left(self, chosen: slice) -> Tensor:
        part = slice(chosen.start * self._windows, chosen.stop * self._windows)
        grad = self.grad[part].flatten(2).mT  # (m, out, channels)
        return grad.reshape(-1, self.tokens, self.groups, self.rows).transpose(1, 2)
