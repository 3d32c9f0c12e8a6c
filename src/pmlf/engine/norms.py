"""Norms of per-sample gradients that are given by factors, in one of three ways (`strategy` decides).

    norm^2 = sum over token pairs of <left_t, left_s> <right_t, right_s>     by Gram matrices, in float64
           = |R wide|^2 with R^T R the Gram matrix of the narrower side      by its root (`roots`)
           = |gradient|^2, formed a few samples at a time and dropped

**Norms are never understated.** The first is a difference of large terms, hence float64; its rounding, at most
(rows + cols + tokens) * 2^-53 * spread^2 with spread = sum_t |left_t| |right_t|, is added to norm^2. The clipped sum of
factors is a float32 recursion over tokens whose rounding is at most tokens/2 * 2^-24 * spread (half, because a partial
sum is on average half of the whole); this `slack` is added to the norm before clipping, so what a sample really adds
stays within the bound even if its tokens cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pmlf.engine.arithmetic import blocks, squared_norms
from pmlf.engine.factors import Factors, Outer
from pmlf.engine.roots import Roots, rooted_norms

Norms = Literal["gram", "root", "dropped"]


def factored_norms(uses: Sequence[Factors], roots: Roots, way: Norms) -> tuple[Tensor, Tensor | None]:
    """(norm^2, slack) of every sample, float64. A single token needs no slack."""
    first, tokens = uses[0], sum(use.tokens for use in uses)
    if len(uses) == 1 and first.single:  # |left|^2 |right|^2
        squared, *others = map(squared_norms, first.vectors())
        for other in others:
            squared *= other
        return squared, None
    if way == "root":
        squared, spread = rooted_norms([use for use in uses if isinstance(use, Outer)], roots)
    else:
        squared, spread = _gram_norms(uses) if way == "gram" else _formed_norms(uses)
    return squared, (tokens / 2 + 1) * torch.finfo(first.dtype).eps / 2 * spread


def _gram_norms(uses: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """(norm^2, spread) by sums of products over all pairs of uses and of tokens."""
    first = uses[0]
    windows = {use.window for use in uses}  # one convolution on images of different shapes has several
    window = windows.pop() if len(windows) == 1 else None
    features = first.rows + first.cols + sum(use.tokens for use in uses)
    norms, spreads = [], []
    like = first.like
    for chosen in blocks(slice(0, first.samples), 8 * sum(use.gram_size for use in uses), like=like):
        wide = [use.wide(chosen, window) for use in uses]
        squared, spread = [], []
        for u, one in enumerate(wide):
            for v, other in enumerate(wide[: u + 1]):
                products = one.products(other)  # (n, groups, tokens, tokens')
                squared.append(products.sum((1, 2, 3)) * (1.0 if u == v else 2.0))
                if u == v:
                    spread.append(products.diagonal(dim1=2, dim2=3).clamp(min=0.0).sqrt().sum((1, 2)))
        spreads.append(torch.stack(spread).sum(0))
        rounding = features * torch.finfo(spreads[-1].dtype).eps / 2
        norms.append(torch.stack(squared).sum(0).clamp(min=0.0) + rounding * spreads[-1].square())
    return torch.cat(norms), torch.cat(spreads)


def _formed_norms(uses: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """(norm^2, spread) by gradients that are formed and dropped."""
    first = uses[0]
    norms, spreads, like = [], [], first.like
    bytes_each = 8 * sum(use.side_size for use in uses) + 4 * first.size
    for chosen in blocks(slice(0, first.samples), bytes_each, like=like):
        gradient = like.new_empty(chosen.stop - chosen.start, first.size)
        for index, use in enumerate(uses):
            use.form(chosen, gradient, add=index > 0)
        norms.append(squared_norms(gradient))
        spreads.append(torch.stack([use.spread(chosen) for use in uses]).sum(0))
    return torch.cat(norms), torch.cat(spreads)
