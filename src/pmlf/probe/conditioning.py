"""Conditioning: private mean and second moments turn features into unit vectors of a flat spectrum.

For one block of columns, with u = x / |x| for every record:

    mean:            m = (sum_i u_i + noise) / n                       sensitivity 1
    centred:         v = (u - m) / |u - m|
    second moments:  s = (sum_i clip(v_i * v_i, c) + noise) / n        sensitivity c
    conditioned:     w = t * (u - m) / |t * (u - m)|,  t = sqrt(l) (l s + floor)^(-power/2)

l are public eigenvalues, from a prior, or ones. Only the record itself and released values enter u, v and w, so each is
a function of one record. A record's blocks are joined with the square roots of their weights: its norm is at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pmlf.basics.arguments import is_number
from pmlf.probe.release import SensitiveSum
from pmlf.probe.rows import FeatureRows

SHORTEST = 1e-12  # a block of a record that is shorter than this counts as zero
NEAREST = 1e-2  # a record that is nearer to the mean than this, relative to the mean, keeps a norm below 1
_SMALLEST_MOMENT = 0.1  # of 1 / d, the mean of all moments
_SMALLEST_SCALE = 1e-3  # of the largest moment


@dataclass(frozen=True, kw_only=True)
class FeatureBlock:
    """Columns that are conditioned by themselves and then joined with the others.

    Attributes:
        start: The first column.
        stop: The column after the last one.
        weight: The share of a record's squared norm, relative to the other blocks.
        eigenvalues: Public variances of the columns, from synthetic or public data, by which the columns were divided;
            None for none. They must not be computed from the private records.

    >>> FeatureBlock(start=0, stop=3, weight=0.65).width
    3
    """

    start: int
    stop: int
    weight: float = 1.0
    eigenvalues: Sequence[float] | None = None

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start

    @property
    def columns(self) -> slice:
        """The columns as a slice."""
        return slice(self.start, self.stop)

    def variances(self) -> Tensor:
        """The public eigenvalues as a tensor, ones if there are none."""
        if self.eigenvalues is None:
            return torch.ones(self.width, dtype=torch.float64)
        return torch.as_tensor(np.asarray(self.eigenvalues, dtype=np.float64))


def checked_blocks(blocks: Sequence[FeatureBlock] | None, width: int) -> tuple[FeatureBlock, ...]:
    """The blocks of a matrix of so many columns: all columns as one block if there are none.

    Raises:
        ValueError: The blocks do not cover the columns one after the other, or a weight or eigenvalue is not positive.
    """
    found = tuple(blocks) if blocks is not None else (FeatureBlock(start=0, stop=width),)
    end = 0
    for block in found:
        if block.start != end or block.width < 1:
            raise ValueError(
                f"a block has the columns {block.start} to {block.stop} after a block that ends at {end}: give blocks "
                "that cover all columns in order, such as FeatureBlock(start=0, stop=9), FeatureBlock(start=9, stop=16)"
            )
        if not is_number(block.weight) or not 0 < block.weight < math.inf:
            raise ValueError(f"weight={block.weight!r} of a block is not positive: it is its share of a record's norm")
        variances = block.variances()
        usable = int((torch.isfinite(variances) & (variances > 0)).sum())
        if len(variances) != block.width or usable != block.width:
            raise ValueError(
                f"a block of {block.width} columns has {len(variances)} eigenvalues, of which {usable} are positive: "
                f"give {block.width} positive ones, or None; for a direction without variance, which dependent "
                "features have, give a small part of the largest one, such as 1e-6"
            )
        end = block.stop
    if end != width:
        raise ValueError(f"the blocks cover {end} of {width} columns: give blocks that cover all of them")
    return found


@dataclass(frozen=True, kw_only=True)
class BlockConditioning:
    """How one block is conditioned, from released values alone.

    Attributes:
        block: The columns.
        weight: The share of the squared norm, over all blocks at most 1.
        mean: m, zeros if no mean is released.
        scale: t.
    """

    block: FeatureBlock
    weight: float
    mean: Tensor
    scale: Tensor


def mean_sum(rows: FeatureRows, block: FeatureBlock) -> SensitiveSum:
    """sum_i u_i of a block: every record has norm at most 1."""
    total = torch.zeros(block.width, dtype=torch.float64)
    for places, part in rows.blocks(columns=block.columns):
        total += part.T @ inverse_norms(part, rows.excluded[places])
    return SensitiveSum(values=total, sensitivity=1.0)


def moment_sum(rows: FeatureRows, block: FeatureBlock, mean: Tensor, clip: float) -> SensitiveSum:
    """sum_i clip(v_i * v_i, clip) of a block: every record has norm at most `clip`."""
    total = torch.zeros(block.width, dtype=torch.float64)
    nearest = NEAREST * float(mean.norm())
    for places, part in rows.blocks(columns=block.columns):
        excluded = rows.excluded[places]
        centred = part * inverse_norms(part, excluded)[:, None] - mean.float()
        norms = torch.linalg.vector_norm(centred, dim=1).clamp_(min=max(nearest, SHORTEST))
        squares = centred.div_(norms[:, None]).square_()
        factors = clip / torch.linalg.vector_norm(squares, dim=1).clamp_(min=clip)
        total += squares.T @ factors.masked_fill_(excluded, 0.0)
    return SensitiveSum(values=total, sensitivity=clip)


def scale_of(block: FeatureBlock, moments: Tensor | None, power: float) -> Tensor:
    """t = sqrt(l) (l s + 1e-3 max(l s))^(-power/2), from released moments s, at least 0.1 / d; 1/d if None."""
    variances = block.variances()
    floor = _SMALLEST_MOMENT / block.width
    moments = torch.full((block.width,), 1 / block.width) if moments is None else moments.clamp(min=floor)
    spectrum = variances * moments.double()
    scale = variances.sqrt() * (spectrum + _SMALLEST_SCALE * spectrum.max()) ** (-power / 2)
    return scale / scale.square().mean().sqrt()  # the overall size does not matter


def inverse_norms(part: Tensor, excluded: Tensor) -> Tensor:
    """1 / |x| of every row; 0 for rows that are excluded or shorter than 1e-12."""
    norms = torch.linalg.vector_norm(part, dim=1)
    return norms.reciprocal().masked_fill_(excluded | (norms < SHORTEST), 0.0)
