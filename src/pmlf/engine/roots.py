"""Norms of linear layers by a triangular root: |left^T right| = |R wide| wherever R^T R = narrow narrow^T.

`narrow` is the side with fewer features. Its inner products and their root (Cholesky) are computed in float64, the
product with the other side in the layer's own precision: half the work of inner products of both sides, and no float64
copy of the larger one. Layers one after another that share a side, as query, key and value do, share its root.

**Rounding.** Column t of R is as long as narrow_t, so with spread = sum_t |narrow_t| |wide_t| the product, rounded R
included, is off by at most (tokens + 1) * unit * spread, which is added to the norm. (An error of float32 in inner
products of both sides would be one of the norm's square.) What float64 leaves undone is at most
(features + 2 tokens) * 2^-53 * spread^2 in norm^2, added too. So that inner products of dependent tokens have a root at
all, each token's product with itself is made larger by a little more than the rounding of them: norms only grow by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pmlf.engine.arithmetic import blocks, same_memory, squared_norms, wide_dtype
from pmlf.engine.factors import Outer

_NO_LENGTH = 1e-200  # added to squares of lengths: a root of zeros, far below the square of the smallest float32


class Root(NamedTuple):
    """R^T of every sample, and what goes with it; of the sides `of`, kept so that no others take their place."""

    of: tuple[tuple[Tensor, int], ...]  # with their versions
    lower: Tensor  # (samples, tokens, tokens), over `scale`
    scale: Tensor  # (samples,), float64: the longest token, so that nothing in R is too small for float32
    lengths: Tensor  # (samples, tokens), float64: of the tokens
    found: Tensor  # (samples,)


class Roots:
    """The root that was asked for last."""

    def __init__(self) -> None:
        self._last: Root | None = None

    def of(self, sides: Sequence[Tensor]) -> Root:
        """The root of the sides, (samples, tokens, features) of each use."""
        if self._last is None or not _same(self._last.of, sides):
            self._last = None
            self._last = _root(sides)
        return self._last


def _same(known: Sequence[tuple[Tensor, int]], sides: Sequence[Tensor]) -> bool:
    return len(known) == len(sides) and all(
        same_memory(one, other) and version == other._version
        for (one, version), other in zip(known, sides, strict=True)
    )


def _root(sides: Sequence[Tensor]) -> Root:
    (samples, _, features), ends = sides[0].shape, _ends(sides)
    tokens, wide = ends[-1], wide_dtype(sides[0])
    shift = 1.0 + 2 * tokens * (tokens + features) * torch.finfo(wide).eps
    lower = sides[0].new_empty(samples, tokens, tokens)
    lengths = lower.new_empty(samples, tokens, dtype=wide)
    found = lower.new_empty(samples, dtype=torch.bool)
    for chosen in blocks(slice(0, samples), 4 * tokens * (features + 2 * tokens), like=lower):
        rows = lengths.new_empty(chosen.stop - chosen.start, tokens, features)
        products = rows.new_empty(len(rows), tokens, tokens)
        for side, start, end in zip(sides, ends, ends[1:], strict=False):
            rows[:, start:end] = side[chosen]
            # what lies above the diagonal is not read
            products[:, start:end, :end].baddbmm_(rows[:, start:end], rows[:, :end].mT, beta=0)
        itself = products.diagonal(dim1=1, dim2=2)
        torch.sqrt(itself.mul_(shift).add_(_NO_LENGTH), out=lengths[chosen])
        root, missing = torch.linalg.cholesky_ex(products)
        lower[chosen] = root.div_(lengths[chosen].amax(1)[:, None, None])
        found[chosen] = missing == 0
    return Root(tuple((side, side._version) for side in sides), lower, lengths.amax(1), lengths, found)


def _ends(sides: Sequence[Tensor]) -> list[int]:
    """Where the tokens of each use begin and end, one after another."""
    return [0, *accumulate(side.shape[1] for side in sides)]


def rooted_norms(uses: Sequence[Outer], roots: Roots) -> tuple[Tensor, Tensor]:
    """(norm^2, spread) of every sample, float64, norm^2 never below the true one."""
    narrow, wide = [use.right for use in uses], [use.left for use in uses]
    if uses[0].rows < uses[0].cols:
        narrow, wide = wide, narrow
    root, ends = roots.of(narrow), _ends(wide)
    (samples, _, features), tokens = wide[0].shape, ends[-1]
    squared, lengths = torch.zeros_like(root.scale), torch.empty_like(root.lengths)
    for chosen in blocks(slice(0, samples), 4 * tokens * features, like=lengths):
        parts, lower = [side[chosen] for side in wide], root.lower[chosen]
        for v, part in enumerate(parts):  # rows v of R wide
            rows = lower[:, :, ends[v] : ends[v + 1]].mT
            product = rows[:, :, ends[v] : ends[v + 1]] @ part
            for u in range(v + 1, len(parts)):
                product.baddbmm_(rows[:, :, ends[u] : ends[u + 1]], parts[u])
            squared[chosen] += squared_norms(product.flatten(1))
            lengths[chosen, ends[v] : ends[v + 1]] = squared_norms(part.flatten(0, 1)).view(len(part), -1)
    lengths.sqrt_()
    number, spread = torch.finfo(root.lower.dtype), (root.lengths * lengths).sum(1)
    rounding = (tokens + 1) * number.eps / 2 * spread
    lost = tokens * number.smallest_normal * root.scale * (lengths.sum(1) + features)  # too small for the layer's dtype
    squared = (squared.sqrt_() * root.scale + rounding + lost).square_()
    squared += (narrow[0].shape[2] + 2 * tokens) * torch.finfo(squared.dtype).eps / 2 * spread.square()
    return torch.where(root.found, squared, spread.square()), spread  # no norm is larger than its spread
