"""Per-sample gradients of one parameter, held or as factors: their norms and their clipped sum.

    norm^2 = sum over token pairs of <left_t, left_s> <right_t, right_s>,   clipped sum = one product with scaled rows,

so no per-sample gradient need be formed. Where forming it is cheaper (`choice`) it is held, and points add up in place.

**Norms are never understated.** The Gram form is a difference of large terms, so it is computed in float64; its
rounding, at most (rows + cols + tokens) * 2^-53 * spread^2 with spread = sum_t |left_t| |right_t|, is added to norm^2.
The clipped sum of factors is a float32 recursion over tokens whose rounding is at most tokens/2 * 2^-24 * spread (half,
because a partial sum is on average half of the whole); this `slack` is added to the norm before clipping, so what a
sample really adds stays within the bound even if its tokens cancel. A held gradient needs neither: its norm is taken
of the very numbers that are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pmlf import choice
from pmlf.factors import Factors, blank, full_precision, wide_dtype

_NORM_BLOCK = 1024  # float32 sums of squares run over this many numbers, float64 over the blocks
_SHORT_ROW = 128  # numbers, up to which float64 costs no more
_TINY = 1e-25  # a norm^2 below which squares that float32 cannot hold may matter


class Workspace:
    """Memory for held gradients and scratch, kept from one micro-batch to the next (fresh pages are slow)."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_buffers": {}}  # what is in it is sensitive, and nobody's: neither copied nor written to a file

    def scratch(self, like: Tensor) -> Tensor:
        """Uninitialised memory like a tensor, until the next call."""
        return self._kept("", like, like.numel()).as_strided(like.shape, _dense_strides(like))

    def part(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of a tensor's shape in another precision, until the next call."""
        return self._kept("part", torch.empty(0, dtype=dtype, device=like.device), like.numel()).view(like.shape)

    def buffer(self, name: str, factors: Factors, samples: int) -> Tensor:
        """(samples, size), uninitialised, for the gradients of the parameter `name`."""
        right = factors.sides(slice(0, 1))[1]
        return self._kept(name, right, samples * factors.size).view(samples, factors.size)

    def _kept(self, name: str, like: Tensor, needed: int) -> Tensor:
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < needed or kept.dtype != like.dtype or kept.device != like.device:
            kept = self._buffers[name] = like.new_empty(needed)
        return kept[:needed]


class SumBuffers:
    """Memory for the sum of a logical batch, twice: a micro-batch's sum is written beside the one before it, so that
    an interrupted one changes nothing. `wide` is in float64, for many samples."""

    def __init__(self, *, wide: bool = False) -> None:
        self._wide = wide
        self._sets: list[_Sums] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_wide": self._wide,
            "_sets": [],
        }  # what is in them is sensitive, and nobody's: neither copied nor written to a file

    def give_away(self, current: Mapping[str, Tensor]) -> None:
        """Never use these tensors again."""
        self._sets = [kept for kept in self._sets if kept is not current]

    def other_than(self, current: Mapping[str, Tensor] | None, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Uninitialised tensors for the parameters, at least float32, that are not the ones in use."""
        self._sets = [kept for kept in self._sets if all(t.device == parameters[n].device for n, t in kept.items())]
        for kept in self._sets:
            if kept is not current:
                return kept
        self._sets.append(_Sums(parameters, self._wide))
        return self._sets[-1]


class _Sums(dict[str, Tensor]):
    """Made when first written to: by then the factors of the parameter before it have gone."""

    def __init__(self, parameters: Mapping[str, Tensor], wide: bool) -> None:
        super().__init__()
        self._parameters = parameters
        self._wide = wide

    def __missing__(self, name: str) -> Tensor:
        like = self._parameters[name]
        dtype = torch.promote_types(like.dtype, wide_dtype(like) if self._wide else torch.float32)
        self[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return self[name]


class ParameterGradient:
    """All that a micro-batch says about one parameter: contributions of every use at every point, added up."""

    def __init__(self, name: str, workspace: Workspace) -> None:
        self._name = name
        self._workspace = workspace
        self._held: Tensor | None = None  # (samples, size)
        self._part: Tensor | None = None  # (n, size): a slice formed late, in what the backward pass has let go
        self._total: Tensor | None = None  # (size,): clipped sum of the slices formed late
        self._like: Factors | None = None  # whose order the held gradients are in; None: the parameter's own
        self._factors: list[Factors] = []

    @property
    def factors(self) -> Sequence[Factors]:
        """What was not formed yet."""
        return self._factors

    def add_formed(self, gradient: Tensor) -> None:
        """Add per-sample gradients (samples, *shape), which are taken over."""
        assert self._like is None and not self._factors, f"{self._name}: a layer's weight used bare as well"
        rows = full_precision(gradient).reshape(len(gradient), -1)
        if self._held is None:
            self._held = rows
        else:
            self._held += rows

    def add(self, factors: Factors, points: int) -> None:
        """Add one use, formed or kept as factors, whichever is better for `points` times its tokens."""
        if self._held is None and (self._factors or not choice.holds_at_once(factors, points)):
            merged = self._factors[-1].merged(factors) if self._factors else None
            if merged is None:
                self._factors.append(factors)
            else:
                self._factors[-1] = merged
            return
        add = self._held is not None
        if self._held is None:
            self._held, self._like = self._workspace.buffer(self._name, factors, factors.samples), factors
        for block in factors.blocks(4 * factors.side_size):  # near the cache
            factors.form(block, self._held[block], add=add)

    def norms(self) -> tuple[Tensor, Tensor | None]:
        """(norm^2, slack) of every sample, float64, norm^2 never below the true one and slack as said above."""
        if self._held is not None:
            return squared_norms(self._held), None
        return factored_norms(self._factors)

    def formed(self, chosen: slice) -> Tensor:
        """The gradients of some samples, (n, size), until the next call; for `add_clipped` unless they are held."""
        if self._held is not None:
            return self._held[chosen]
        self._like, samples = self._factors[0], chosen.stop - chosen.start
        if self._part is None or len(self._part) < samples:
            self._part = self._like.sides(slice(0, 1))[1].new_empty(samples, self._like.size)
        part = self._part[:samples]
        for block in self._like.blocks(4 * self._like.side_size, chosen):  # near the cache, for all uses
            out = part[block.start - chosen.start : block.stop - chosen.start]
            for index, factors in enumerate(self._factors):
                factors.form(block, out, add=index > 0)
        return part

    def add_clipped(self, part: Tensor, scale: Tensor, refused: Tensor | None) -> None:
        """Take up the clipped sum of some samples; those marked in `refused` add nothing, whatever is in their rows."""
        part = part if refused is None else part.masked_fill_(refused.to(part.device).unsqueeze(1), 0.0)
        if self._total is None:
            self._total = part.new_zeros(part.shape[1])
        self._total.addmv_(part.mT, scale.to(part))

    def forget_factors(self) -> None:
        """All samples were taken up by `add_clipped`."""
        self._factors = []

    def set_aside(self, taken: Tensor) -> None:
        """The marked samples were taken up by `add_clipped`, unless they are held."""
        self._factors = [factors.without(taken) for factors in self._factors]

    def without(self, refused: Tensor) -> None:
        """Blank out the samples marked in `refused`."""
        if self._held is not None:
            self._held = blank(self._held, refused)
        self._factors = [factors.without(refused) for factors in self._factors]

    def write_clipped_sum(self, scale: Tensor, out: Tensor, *, add: bool) -> None:
        """out = sum_i scale_i * gradient_i, or out += it; then forget the gradients, to make room."""
        total = self._total
        if self._held is not None:
            total = scale.to(self._held.dtype) @ self._held
        if total is not None:
            arranged = total.view(out.shape) if self._like is None else self._like.arranged(total, out.shape)
            out.add_(arranged) if add else out.copy_(arranged)
            add = True
        for factors in self._factors:
            if factors.dtype == out.dtype:
                factors.write_clipped_sum(scale, out, add=add, scratch=self._workspace.scratch)
            else:
                part = self._workspace.part(out, factors.dtype)
                factors.write_clipped_sum(scale, part, add=False, scratch=self._workspace.scratch)
                out.add_(part) if add else out.copy_(part)
            add = True
        self._held, self._part, self._total, self._factors = None, None, None, []  # served


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if it fills its memory (contiguous, channels-last), else contiguous ones."""
    return torch.empty_like(tensor, device="meta").stride()


def squared_norms(gradients: Tensor) -> Tensor:
    """|row|^2 of every row in float64, of float32 sums over short blocks: exact to about 2^-18 relative."""
    size, wide = gradients.shape[1], wide_dtype(gradients)
    if size <= _SHORT_ROW:
        return torch.linalg.vector_norm(gradients, dim=1, dtype=wide).square_()
    rest, parts = size % _NORM_BLOCK, []
    if rest:
        parts.append(torch.linalg.vector_norm(gradients[:, size - rest :], dim=1).to(wide).square_())
    if rest < size:
        lengths = torch.linalg.vector_norm(gradients[:, : size - rest].unflatten(1, (-1, _NORM_BLOCK)), dim=2)
        parts.append(torch.linalg.vector_norm(lengths, dim=1, dtype=wide).square_())
    squared = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if not float(squared.min()) >= _TINY:  # nor is NaN
        tiny = squared < _TINY
        squared[tiny] = gradients[tiny].to(wide).square().sum(1)
    return squared


def factored_norms(uses: Sequence[Factors]) -> tuple[Tensor, Tensor | None]:
    """(norm^2, slack) of gradients given by factors, by Gram matrices or, where those are larger, by forming and
    dropping the gradient a few samples at a time. A single token needs no slack."""
    first, tokens, by_gram = uses[0], sum(use.tokens for use in uses), choice.prefers_gram(uses)
    if tokens == 1 and first.groups == 1:  # nothing can cancel: |left|^2 |right|^2
        left, right = first.sides(slice(0, first.samples))
        squared = squared_norms(right.flatten(1))
        if left.is_floating_point():
            squared *= squared_norms(left.flatten(1))
        return squared, None
    unit = torch.finfo(first.dtype).eps / 2
    work = 8 * sum(use.gram_size if by_gram else use.side_size for use in uses) + (0 if by_gram else 4 * first.size)
    norms, slacks = [], []
    for chosen in first.blocks(work):
        if by_gram:
            squared, spread = _gram_norms(uses, chosen)
            rounding = (first.rows + first.cols + tokens) * torch.finfo(squared.dtype).eps / 2
            squared = squared.clamp(min=0.0) + rounding * spread.square()
        else:
            gradient = first.sides(slice(0, 1))[1].new_empty(chosen.stop - chosen.start, first.size)
            for index, use in enumerate(uses):
                use.form(chosen, gradient, add=index > 0)
            squared = squared_norms(gradient)
            spread = torch.stack([use.spread(chosen) for use in uses]).sum(0)
        norms.append(squared)
        slacks.append((tokens / 2 + 1) * unit * spread)
    return torch.cat(norms), torch.cat(slacks)


def _gram_norms(uses: Sequence[Factors], chosen: slice) -> tuple[Tensor, Tensor]:
    """Sums of products over all pairs of uses and of tokens, and the spread, in float64."""
    windows = {use.window for use in uses}  # one convolution on images of different shapes has several
    window = windows.pop() if len(windows) == 1 else None
    wide = [use.wide(chosen, window) for use in uses]
    squared, spread = [], []
    for u, one in enumerate(wide):
        for v, other in enumerate(wide[: u + 1]):
            products = one.products(other)  # (n, groups, tokens, tokens')
            squared.append(products.sum((1, 2, 3)) * (1.0 if u == v else 2.0))
            if u == v:
                spread.append(products.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt().sum((1, 2)))
    return torch.stack(squared).sum(0), torch.stack(spread).sum(0)
