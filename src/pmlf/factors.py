"""Per-sample gradients of one parameter, held or as factors: their norms and their clipped sum.

A matrix parameter's per-sample gradient is sum_t left_t right_t^T over tokens t; the k evaluation points, and several
uses of one parameter, only add tokens ("ghost momentum"). Then

    norm^2 = sum over token pairs of <left_t, left_s> <right_t, right_s>,   clipped sum = one GEMM with scaled rows,

and no per-sample gradient is formed. Where forming it is cheaper it is held, and points add up in place.

**Norms are never understated.** The Gram form is a difference of large terms, so it is computed in float64; its
rounding, at most (rows + cols + tokens) * 2^-53 * spread^2 with spread = sum_t |left_t| |right_t|, is added to norm^2.
The clipped sum of factors is a float32 recursion over tokens whose rounding is at most tokens/2 * 2^-24 * spread (half,
because a partial sum is on average half of the whole); this `slack` is added to the norm before clipping, so what a
sample really adds stays within the bound even if its tokens cancel. A held gradient needs neither: its norm is taken
of the very numbers that are added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

GRAM_CHUNK_BYTES = 1 << 26  # work memory of one block of samples when norms are taken
_NORM_BLOCK = 1024  # float32 sums of squares run over this many numbers, float64 over the blocks


@dataclass(frozen=True, kw_only=True)
class Factors(ABC):
    """One use of a parameter, seen as a (groups * rows, cols) matrix with gradient sum_t left_t right_t^T."""

    samples: int
    groups: int = 1
    tokens: int
    rows: int
    cols: int

    @abstractmethod
    def pair(self, chosen: slice) -> tuple[Tensor, Tensor]:
        """(left, right) of some samples: (n, groups, tokens, rows), or row indices (n, 1, tokens); and
        (n, groups, tokens, cols)."""

    @abstractmethod
    def add_clipped_sum(self, scale: Tensor, out: Tensor) -> None:
        """out += sum_i scale_i * gradient_i, in place."""

    @abstractmethod
    def without(self, refused: Tensor) -> Factors:
        """The same with zeros in place of the samples marked in `refused` (scaling an inf by 0 would give NaN)."""

    @property
    def size(self) -> int:
        """Numbers in one per-sample gradient."""
        return self.groups * self.rows * self.cols

    def spread(self, chosen: slice) -> Tensor:
        """sum_t |left_t| |right_t| of some samples: the scale of rounding errors, however the tokens cancel."""
        return _spread([self.pair(chosen)])

    def per_sample(self, chosen: slice) -> Tensor:
        """Gradients of some samples, formed: (n, size)."""
        left, right = self.pair(chosen)
        if left.is_floating_point():
            return (left.mT @ right).flatten(1)
        grads = right.new_zeros(right.shape[0], self.rows, self.cols)
        index = left.mT.expand(-1, -1, self.cols)  # (n, tokens, cols)
        return grads.scatter_add_(1, index, right.squeeze(1)).flatten(1)


@dataclass(frozen=True, kw_only=True)
class Outer(Factors):
    """Linear layers: left and right given, (samples, tokens, rows) and (samples, tokens, cols)."""

    left: Tensor
    right: Tensor

    def pair(self, chosen: slice) -> tuple[Tensor, Tensor]:
        return self.left[chosen].unsqueeze(1), self.right[chosen].unsqueeze(1)

    def add_clipped_sum(self, scale: Tensor, out: Tensor) -> None:
        scaled = self.left * scale.to(self.left.dtype)[:, None, None]
        out.view(self.rows, self.cols).addmm_(scaled.flatten(0, 1).mT, self.right.flatten(0, 1))

    def without(self, refused: Tensor) -> Outer:
        return replace(self, left=_blank(self.left, refused), right=_blank(self.right, refused))


@dataclass(frozen=True, kw_only=True)
class Lookup(Factors):
    """Embeddings: token t adds right_t to row index_t, a one-hot left factor that is never written out."""

    index: Tensor  # (samples, tokens)
    right: Tensor  # (samples, tokens, cols)

    def pair(self, chosen: slice) -> tuple[Tensor, Tensor]:
        return self.index[chosen].unsqueeze(1), self.right[chosen].unsqueeze(1)

    def add_clipped_sum(self, scale: Tensor, out: Tensor) -> None:
        scaled = self.right * scale.to(self.right.dtype)[:, None, None]
        out.index_add_(0, self.index.flatten(), scaled.flatten(0, 1))

    def without(self, refused: Tensor) -> Lookup:
        return replace(self, right=_blank(self.right, refused))


@dataclass(frozen=True, kw_only=True)
class Patches(Factors):
    """Convolutions: left is the gradient at an output pixel, right the input patch under it."""

    input: Tensor  # (samples * windows, channels, *space), already padded
    grad: Tensor  # (samples * windows, groups * rows, *space)
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def pair(self, chosen: slice) -> tuple[Tensor, Tensor]:
        windows = self.grad.shape[0] // self.samples
        part = slice(chosen.start * windows, chosen.stop * windows)
        grad, patches = self.grad[part], self.input[part]
        for axis, (size, stride, gap) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            patches = patches.unfold(axis, (size - 1) * gap + 1, stride)[..., ::gap]
        space = len(self.kernel)
        # (m, channels, *out, *kernel) -> (n, windows, groups, channels/groups, out, kernel)
        patches = patches.flatten(2, 1 + space).flatten(3)
        patches = patches.unflatten(1, (self.groups, -1)).unflatten(0, (-1, windows))
        right = patches.permute(0, 2, 1, 4, 3, 5).flatten(2, 3).flatten(3)
        left = grad.flatten(2).unflatten(1, (self.groups, -1)).unflatten(0, (-1, windows))
        return left.permute(0, 2, 1, 4, 3).flatten(2, 3), right

    def add_clipped_sum(self, scale: Tensor, out: Tensor) -> None:
        windows = self.grad.shape[0] // self.samples
        per_row = scale.to(self.grad.dtype).repeat_interleave(windows)
        scaled = self.grad * per_row.view(-1, *[1] * (self.grad.ndim - 1))
        space = len(self.kernel)
        needed = [
            (size - 1) * stride + (k - 1) * gap + 1
            for size, stride, k, gap in zip(scaled.shape[2:], self.stride, self.kernel, self.dilation, strict=True)
        ]
        used = self.input  # what a stride leaves over at the far edge is not under any patch
        for axis, length in enumerate(needed, 2):
            used = used.narrow(axis, 0, length)
        gradient = torch.ops.aten.convolution_backward(
            scaled, used, scaled.new_empty(1).expand(out.shape), None, self.stride, (0,) * space, self.dilation,
            False, (0,) * space, self.groups, (False, True, False),
        )[1]  # fmt: skip
        out.add_(gradient)

    def without(self, refused: Tensor) -> Patches:
        rows = refused.repeat_interleave(self.grad.shape[0] // self.samples)
        return replace(self, input=_blank(self.input, rows), grad=_blank(self.grad, rows))


class ParameterGradient:
    """All that a micro-batch says about one parameter: contributions of every use at every point, added up."""

    def __init__(self) -> None:
        self._held: Tensor | None = None  # (samples, size)
        self._factors: list[Factors] = []

    def add_held(self, gradient: Tensor) -> None:
        """Add per-sample gradients (samples, *shape); kept and added to in place."""
        if self._held is None:
            self._held = gradient.flatten(1)
        else:
            self._held += gradient.flatten(1)

    def add(self, factors: Factors, points: int, budget: HeldBudget) -> None:
        """Add one use, formed or kept as factors, whichever is cheaper for `points` times its tokens."""
        if not self._factors and (self._held is not None or budget.takes(factors, points)):
            self.add_held(factors.per_sample(slice(0, factors.samples)))
        else:
            self._factors.append(factors)

    def norms(self) -> tuple[Tensor, Tensor]:
        """(norm^2, slack) of every sample, float64, norm^2 never below the true one and slack as said above."""
        if self._held is not None:
            for factors in self._factors:  # a parameter used both ways: one gradient, cross terms included
                self._held += factors.per_sample(slice(0, factors.samples))
            self._factors = []
            return squared_norms(self._held), torch.zeros(len(self._held), device=self._held.device)
        return factored_norms(self._factors)

    def without(self, refused: Tensor) -> None:
        """Blank out the samples marked in `refused`."""
        if self._held is not None:
            self._held = _blank(self._held, refused)
        self._factors = [factors.without(refused) for factors in self._factors]

    def add_clipped_sum(self, scale: Tensor, out: Tensor) -> None:
        """out += sum_i scale_i * gradient_i, in place."""
        if self._held is not None:
            out.view(-1).addmv_(self._held.mT, scale.to(self._held.dtype))
        for factors in self._factors:
            factors.add_clipped_sum(scale, out)


class HeldBudget:
    """Memory that held gradients of one micro-batch may take together."""

    def __init__(self, limit_bytes: int = 1 << 28) -> None:
        self.left = limit_bytes

    def takes(self, factors: Factors, points: int) -> bool:
        """Whether to hold: forming costs fewer operations than the float64 Gram matrices, and memory is left."""
        if factors.size > points * factors.tokens * 2 * factors.groups * (factors.rows + factors.cols):
            return False
        needed = factors.samples * factors.size * 4
        if needed > self.left:
            return False
        self.left -= needed
        return True


def squared_norms(gradients: Tensor) -> Tensor:
    """|row|^2 of every row in float64, of float32 sums over short blocks: exact to about 2^-18 relative."""
    rows, size = gradients.shape
    whole = size - size % _NORM_BLOCK
    total = gradients.new_zeros(rows, dtype=_wide(gradients))
    for part in (gradients[:, :whole].view(rows, -1, _NORM_BLOCK), gradients[:, None, whole:]):
        if part.shape[1] and part.shape[2]:
            total += torch.linalg.vector_norm(part, dim=2).to(total).square().sum(1)
    return total


def prefers_gram(uses: Sequence[Factors]) -> bool:
    """Whether float64 Gram matrices cost fewer operations than forming the gradients."""
    first, tokens = uses[0], sum(use.tokens for use in uses)
    return tokens * 2 * first.groups * (first.rows + first.cols) < first.size


def factored_norms(uses: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """(norm^2, slack) of gradients given by factors, by Gram matrices or, where those are larger, by forming and
    dropping the gradient a few samples at a time."""
    first = uses[0]
    tokens = sum(use.tokens for use in uses)
    by_gram = prefers_gram(uses)
    wide = max(use.groups * use.tokens * (use.rows + use.cols) for use in uses) * 8
    work = wide + (first.groups * tokens * tokens * 8 if by_gram else first.size * 8)
    norms, slacks = [], []
    for chosen in _blocks(first.samples, work):
        pairs = [use.pair(chosen) for use in uses]
        if by_gram:
            squared, spread = _gram_norms(pairs)
            rounding = (first.rows + first.cols + tokens) * torch.finfo(squared.dtype).eps / 2
            squared = squared.clamp(min=0.0) + rounding * spread.square()
        else:
            gradient = uses[0].per_sample(chosen)
            for use in uses[1:]:
                gradient += use.per_sample(chosen)
            squared, spread = squared_norms(gradient), _spread(pairs)
        norms.append(squared)
        slacks.append((tokens / 2 + 1) * 2.0**-24 * spread)
    return torch.cat(norms), torch.cat(slacks)


def _gram_norms(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """sum over pairs of uses and of tokens of <left, left'> <right, right'>, and the spread, in float64."""
    wide = [
        (left.to(_wide(right)) if left.is_floating_point() else left, right.to(_wide(right))) for left, right in pairs
    ]
    squared: Tensor | float = 0.0
    spread: Tensor | float = 0.0
    for u, (left, right) in enumerate(wide):
        for v, (other_left, other_right) in enumerate(wide[: u + 1]):
            product = _inner(left, other_left) * (right @ other_right.mT)  # (n, groups, tokens, tokens')
            squared = squared + product.sum((1, 2, 3)) * (1.0 if u == v else 2.0)
            if u == v:
                spread = spread + product.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt().sum((1, 2))
    assert isinstance(squared, Tensor) and isinstance(spread, Tensor)
    return squared, spread


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


def _spread(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """sum_t |left_t| |right_t| of every sample."""
    total: Tensor | float = 0.0
    for left, right in pairs:
        lengths = torch.linalg.vector_norm(right, dim=3)
        if left.is_floating_point():
            lengths = lengths * torch.linalg.vector_norm(left, dim=3)
        total = total + lengths.sum((1, 2), dtype=_wide(right))
    assert isinstance(total, Tensor)
    return total


def _blocks(samples: int, bytes_each: int) -> Iterator[slice]:
    step = max(1, GRAM_CHUNK_BYTES // max(1, bytes_each))
    return (slice(start, min(start + step, samples)) for start in range(0, samples, step))


def _blank(tensor: Tensor, refused: Tensor) -> Tensor:
    return torch.where(refused.view(-1, *[1] * (tensor.ndim - 1)), torch.zeros_like(tensor[:1]), tensor)


def _wide(tensor: Tensor) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
