"""How far what a sample adds alone is from what it adds in its batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pmlf.engine.arithmetic import wide_dtype


class Apart(NamedTuple):
    """Two lists of contributions, as numbers on their device from which the distance follows.

    Of every part: whether indices differ; and of each side the lengths of both and of their difference.
    """

    sides: list[int] | None  # floating-point ones of each part; None: the lists have different forms
    numbers: Tensor

    def distance(self, read: list[float]) -> float:
        """Relative to the first; infinite if forms differ, 0 if neither is finite, because such a sample adds
        nothing."""
        if self.sides is None:
            return math.inf
        apart, whole, whole_other, rest = 0.0, 0.0, 0.0, iter(read)
        for count in self.sides:
            if next(rest):
                return math.inf
            triples = [(next(rest), next(rest), next(rest)) for _ in range(count)]
            lengths, lengths_other = [each[0] for each in triples], [each[1] for each in triples]
            whole = math.hypot(whole, math.prod(lengths))
            whole_other = math.hypot(whole_other, math.prod(lengths_other))
            # |left right - left' right'| <= |left - left'| |right| + |left'| |right - right'|
            for place, (_, _, between) in enumerate(triples):
                others = math.prod(lengths[place + 1 :]) * math.prod(lengths_other[:place])
                apart = math.hypot(apart, between * others)
        if not (math.isfinite(whole) and math.isfinite(whole_other)):
            return 0.0 if math.isfinite(whole) == math.isfinite(whole_other) else math.inf
        return apart / whole if whole > 0.0 else (0.0 if apart == 0.0 else math.inf)


OTHER_FORM = Apart(None, torch.zeros(0))


def apart_from(some: list[tuple[Tensor, ...]], others: list[tuple[Tensor, ...]]) -> Apart:
    """Two lists of contributions, compared part by part."""
    sides, numbers = list[int](), list[Tensor]()
    for one, other in zip(some, others, strict=True):
        if [side.shape for side in one] != [side.shape for side in other]:
            return OTHER_FORM
        pairs = [pair for pair in zip(one, other, strict=True) if pair[0].is_floating_point()]
        indices = [pair for pair in zip(one, other, strict=True) if not pair[0].is_floating_point()]
        wide = wide_dtype(one[0])
        differ = [(first != second).any() for first, second in indices]
        numbers.append(
            torch.stack(differ).any().to(wide) if differ else torch.zeros((), dtype=wide, device=one[0].device)
        )
        for first, second in pairs:
            numbers += [torch.linalg.vector_norm(each, dtype=wide) for each in (first, second, first - second)]
        sides.append(len(pairs))
    return Apart(sides, torch.stack(numbers) if numbers else torch.zeros(0))
