"""One use of a parameter in a forward pass, as factors: sample i's gradient is sum_t left_t right_t^T over tokens t.

The k evaluation points, and several uses of one parameter, only add tokens ("ghost momentum"). A use knows how to form
its per-sample gradients, how to take inner products with another use of the same parameter without forming them, and
how to add their clipped sum by one matrix product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from pmlf.engine.arithmetic import add_product, blank, blocks, same_memory, wide_dtype

Scratch = Callable[[Tensor], Tensor]  # work memory like a given tensor
Order = Literal["own", "transposed", "channels last"]  # of the numbers in a per-sample gradient that is formed


@dataclass(frozen=True, kw_only=True)
class Factors(ABC):
    """A parameter seen as `groups` matrices of (rows, cols), in `arranged`'s order, with tokens of each sample."""

    samples: int
    groups: int = 1
    tokens: int
    rows: int
    cols: int

    @property
    def size(self) -> int:
        """Numbers in one per-sample gradient."""
        return self.groups * self.rows * self.cols

    @property
    def form_key(self) -> tuple[Any, ...]:
        """What decisions about a use follow from: its kind and sizes, none of its numbers."""
        return type(self), self.groups, self.tokens, self.rows, self.cols, self.dtype

    @property
    def single(self) -> bool:
        """Whether a gradient is one product of two vectors, in which nothing can cancel."""
        return self.tokens == 1 and self.groups == 1

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the precision and the device of the sides."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the sides."""
        return self.like.dtype

    @property
    @abstractmethod
    def gram_operations(self) -> int:
        """Multiplications of one sample's inner products with one other use."""

    @property
    def form_operations(self) -> int:
        """Multiplications that form one sample's gradient."""
        return self.tokens * self.size

    @property
    def form_touches(self) -> int:
        """Numbers written and read where a gradient is formed and its norm taken."""
        return 2 * self.size

    @property
    def side_size(self) -> int:
        """Numbers in the sides of one sample."""
        return self.groups * self.tokens * (self.rows + self.cols)

    @property
    def gram_size(self) -> int:
        """Numbers of one sample at work in inner products: `wide` and what comes of it."""
        return self.side_size + 2 * self.groups * self.tokens**2

    @property
    def stored(self) -> int:
        """Numbers of one sample kept in memory."""
        return self.side_size

    @abstractmethod
    def sides(self, chosen: slice) -> tuple[Tensor, Tensor]:
        """(left, right) of some samples: (n, groups, tokens, rows), or row indices (n, 1, tokens); and
        (n, groups, tokens, cols)."""

    def vectors(self) -> tuple[Tensor, ...]:
        """The sides, (samples, features) each, of a single token; no one-hot vectors. The gradient is their product."""
        return tuple(side.flatten(1) for side in self.sides(slice(0, self.samples)) if side.is_floating_point())

    @property
    def window(self) -> Window | None:
        """How patches slide over pixels, where inner products of pixels can stand for those of patches."""
        return None

    @abstractmethod
    def wide(self, chosen: slice, window: Window | None) -> Wide:
        """The sides of some samples in float64, ready for inner products with uses that have the same window."""

    @abstractmethod
    def write_clipped_sum(self, scale: Tensor, out: Tensor, *, add: bool, scratch: Scratch) -> None:
        """out = sum_i scale_i * gradient_i, or out += it."""

    @abstractmethod
    def without(self, refused: Tensor) -> Factors:
        """The same with zeros in place of the samples marked in `refused` (scaling an inf by 0 would give NaN)."""

    def merged(self, other: Factors) -> Factors | None:
        """Both uses as one with no more tokens, where that can be; None otherwise."""
        return None

    @property
    def order(self) -> Order:
        """The order of `form`, which follows from the parameter's shape: one for all uses of a parameter."""
        return "transposed" if self.rows < self.cols else "own"

    def arranged(self, flat: Tensor, shape: torch.Size) -> Tensor:
        """A gradient in the order of `form`, (size,), as a tensor of the parameter's shape."""
        if self.order == "own":
            return flat.view(shape)
        return flat.view(self.cols, self.rows).mT.reshape(shape)

    @abstractmethod
    def form(self, chosen: slice, out: Tensor, *, add: bool) -> None:
        """Write, or add, the gradients of some samples into out (n, size), in the order of `order`."""

    def in_own_order(self, flat: Tensor) -> Tensor:
        """Gradients in the order of `form`, (n, size), in the parameter's own."""
        return flat if self.order == "own" else flat.view(-1, self.cols, self.rows).mT.reshape(len(flat), -1)

    def of_one(self, sample: int) -> Tensor:
        """One gradient in the parameter's own order, (size,)."""
        out = self.like.new_empty(1, self.size)
        self.form(slice(sample, sample + 1), out, add=False)
        return self.in_own_order(out)[0]

    def formed(self) -> Tensor:
        """All gradients in the parameter's own order, (samples, size)."""
        out = self.like.new_empty(self.samples, self.size)
        for chosen in blocks(slice(0, self.samples), 4 * self.side_size, like=out):
            self.form(chosen, out[chosen], add=False)
        return self.in_own_order(out)

    def spread(self, chosen: slice) -> Tensor:
        """sum_t |left_t| |right_t| of some samples: the scale of rounding errors, however the tokens cancel."""
        left, right = self.sides(chosen)
        dtype = wide_dtype(right)  # float32 would lose squares below 1e-38, and their sides may be large
        lengths = torch.linalg.vector_norm(right, dim=3, dtype=dtype)
        if left.is_floating_point():
            lengths = lengths * torch.linalg.vector_norm(left, dim=3, dtype=dtype)
        return lengths.sum((1, 2))


@dataclass(frozen=True, kw_only=True)
class Wide:
    """Sides of some samples in float64. `window` says that `right` holds pixels, under which patches slide."""

    left: Tensor  # (n, groups, tokens, rows), or row indices (n, 1, tokens)
    right: Tensor  # (n, groups, tokens, cols), or (n, 1, pixels, channels)
    window: Window | None = None

    def products(self, other: Wide) -> Tensor:
        """<left_t, left'_s> <right_t, right'_s> for all pairs of tokens: (n, groups, tokens, tokens')."""
        right = self.right @ other.right.mT
        if self.window is not None:
            right = self.window.patch_products(right)
        return right.mul_(_inner(self.left, other.left))


@dataclass(frozen=True, kw_only=True)
class Window:
    """How patches lie over pixels, for stride 1 and dilation 1: shapes of the padded input and of the kernel."""

    space: tuple[int, ...]
    kernel: tuple[int, ...]

    @property
    def pixels(self) -> int:
        return math.prod(self.space)

    def patch_products(self, pixels: Tensor) -> Tensor:
        """Inner products of patches, as sums of shifted blocks of those of pixels: (n, 1, tokens, tokens)."""
        dims = len(self.space)
        out = tuple(size - k + 1 for size, k in zip(self.space, self.kernel, strict=True))
        grid = pixels.contiguous().view(-1, *self.space, *self.space)
        steps = [grid.stride(1 + axis) + grid.stride(1 + dims + axis) for axis in range(dims)]  # both sides move
        total = grid.new_zeros(len(grid), *out, *out)
        for shift in product(*map(range, self.kernel)):
            start = grid.storage_offset() + sum(by * step for by, step in zip(shift, steps, strict=True))
            total += grid.as_strided(total.shape, grid.stride(), start)
        return total.flatten(1, dims).flatten(2).unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Outer(Factors):
    """Linear layers: left and right given, (samples, tokens, rows) and (samples, tokens, cols)."""

    left: Tensor
    right: Tensor

    @property
    def like(self) -> Tensor:
        return self.right

    @property
    def gram_operations(self) -> int:
        return self.tokens * self.tokens * (self.rows + self.cols)

    def sides(self, chosen: slice) -> tuple[Tensor, Tensor]:
        return self.left[chosen].unsqueeze(1), self.right[chosen].unsqueeze(1)

    def vectors(self) -> tuple[Tensor, ...]:
        return self.right.squeeze(1), self.left.squeeze(1)

    def wide(self, chosen: slice, window: Window | None) -> Wide:
        dtype = wide_dtype(self.left)
        return Wide(left=self.left[chosen].unsqueeze(1).to(dtype), right=self.right[chosen].unsqueeze(1).to(dtype))

    def form(self, chosen: slice, out: Tensor, *, add: bool) -> None:
        long, short = self.left[chosen], self.right[chosen]
        if self.order == "transposed":  # tall products are faster than wide ones
            long, short = short, long
        into = out.view(-1, long.shape[2], short.shape[2])
        torch.baddbmm(into, long.mT, short, beta=1 if add else 0, out=into)

    def write_clipped_sum(self, scale: Tensor, out: Tensor, *, add: bool, scratch: Scratch) -> None:
        left, right = self.left, self.right
        per_sample = scale.to(left).view(-1, 1, 1)
        if self.rows <= self.cols:  # the side with fewer numbers
            left = torch.mul(left, per_sample, out=scratch(left))
        else:
            right = torch.mul(right, per_sample, out=scratch(right))
        add_product(left.flatten(0, 1), right.flatten(0, 1), out.view(self.rows, self.cols), add=add)

    def merged(self, other: Factors) -> Factors | None:
        """A first layer has the same input at every point: only the gradients at its output are added."""
        if not isinstance(other, Outer) or not same_memory(self.right, other.right):
            return None
        return replace(self, left=self.left + other.left)

    def without(self, refused: Tensor) -> Outer:
        return replace(self, left=blank(self.left, refused), right=blank(self.right, refused))


@dataclass(frozen=True, kw_only=True)
class Lookup(Factors):
    """Embeddings: token t adds right_t to row index_t, a one-hot left factor that is never written out."""

    index: Tensor  # (samples, tokens)
    right: Tensor  # (samples, tokens, cols)

    @property
    def like(self) -> Tensor:
        return self.right

    @property
    def gram_operations(self) -> int:
        return self.tokens * self.tokens * self.cols

    @property
    def form_operations(self) -> int:
        return self.tokens * self.cols

    @property
    def form_touches(self) -> int:
        return 3 * self.size  # made zero first

    @property
    def side_size(self) -> int:
        return self.tokens * self.cols

    def sides(self, chosen: slice) -> tuple[Tensor, Tensor]:
        return self.index[chosen].unsqueeze(1), self.right[chosen].unsqueeze(1)

    def wide(self, chosen: slice, window: Window | None) -> Wide:
        index, right = self.sides(chosen)
        return Wide(left=index, right=right.to(wide_dtype(right)))

    def form(self, chosen: slice, out: Tensor, *, add: bool) -> None:
        index, right = self.index[chosen], self.right[chosen]
        if not add:
            out.zero_()
        if self.order == "own":
            into = out.view(-1, self.rows, self.cols)
            into.scatter_add_(1, index.unsqueeze(2).expand(-1, -1, self.cols), right)
        else:
            into = out.view(-1, self.cols, self.rows)
            into.scatter_add_(2, index.unsqueeze(1).expand(-1, self.cols, -1), right.mT)

    def write_clipped_sum(self, scale: Tensor, out: Tensor, *, add: bool, scratch: Scratch) -> None:
        scaled = torch.mul(self.right, scale.to(self.right)[:, None, None], out=scratch(self.right))
        if not add:
            out.zero_()
        out.view(self.rows, self.cols).index_add_(0, self.index.flatten(), scaled.flatten(0, 1))

    def without(self, refused: Tensor) -> Lookup:
        return replace(self, right=blank(self.right, refused))


def _inner(left: Tensor, other: Tensor) -> Tensor:
    """Inner products of left factors, where row indices stand for one-hot vectors: (n, groups, tokens, tokens')."""
    if left.is_floating_point() and other.is_floating_point():
        return left @ other.mT
    if left.is_floating_point():
        return _inner(other, left).mT
    if other.is_floating_point():
        index = left.unsqueeze(2).expand(-1, -1, other.shape[2], -1)
        return other.gather(3, index).mT
    return left.unsqueeze(3) == other.unsqueeze(2)
