"""Which way to a parameter's norms and clipped sum is cheapest, by calibrated cost, under a memory budget.

    Gram      inner products of tokens in float64 for the norms, then one large product for the sum
    root      those of one side in float64 and a product with their root for the norms (`roots`), then one large product
    dropped   per-sample gradients formed a few samples at a time for the norms and dropped, then one large product
    held      per-sample gradients formed once, for the norms and for the sum: no large product, but memory

Costs are in float32 multiply-adds of a large matrix product. `benchmarks/layer_costs.py` measures the ways side by side
and says how far the choice is from the fastest; it is where the constants come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from pmlf.engine.arithmetic import CHUNK_BYTES, wide_dtype
from pmlf.engine.factors import Factors, Outer

Norms = Literal["gram", "root", "dropped"]

_SMALL_PRODUCT = 1.2  # a multiply-add of a product for one sample
_WIDE_PRODUCT = 2.2  # one of a float64 product, conversion of its factors included
_TOUCH = 4  # a number written to memory or read from it
_FAR_TOUCH = 9  # one of a gradient that no cache holds
_ROOT = 3  # a root, over the cube of its size
_ROOT_CALL = 1e5  # a root, however small
LATE_BYTES = 3 << 26  # of per-sample gradients formed late, a slice of the samples at a time


def gram_cost(uses: Sequence[Factors]) -> float:
    """Norms of one sample by inner products of all pairs of uses."""
    return _pairs(uses) * _WIDE_PRODUCT * max(use.gram_operations for use in uses)


def root_cost(uses: Sequence[Factors]) -> float:
    """Norms of one sample by the root of one side; linear layers have one, where there is float64."""
    if not all(isinstance(use, Outer) and wide_dtype(use.right) == torch.float64 for use in uses):
        return math.inf
    narrow, wide = sorted((uses[0].rows, uses[0].cols))
    products = max(use.tokens for use in uses) ** 2 * (_WIDE_PRODUCT * narrow + _SMALL_PRODUCT * wide)
    return _pairs(uses) * products + _ROOT * sum(use.tokens for use in uses) ** 3 + _ROOT_CALL


def form_cost(uses: Sequence[Factors]) -> float:
    """Norms of one sample from its gradient, which is formed for it."""
    return sum(_SMALL_PRODUCT * use.form_operations + _touch(use) * use.form_touches for use in uses)


def way_to_norms(uses: Sequence[Factors]) -> Norms:
    """The cheapest, where gradients are not held."""
    costs: dict[Norms, float] = {"gram": gram_cost(uses), "root": root_cost(uses), "dropped": form_cost(uses)}
    return min(costs, key=lambda way: costs[way])


def _touch(use: Factors) -> float:
    return _TOUCH if 4 * use.size <= CHUNK_BYTES else _FAR_TOUCH


def _pairs(uses: Sequence[Factors]) -> int:
    return len(uses) * (len(uses) + 1) // 2


def saved_by_holding(uses: Sequence[Factors]) -> float:
    """What one sample costs less if its gradient is held; negative if it costs more."""
    large_product = sum(use.form_operations for use in uses)
    held = form_cost(uses) + _touch(uses[0]) * uses[0].size
    return min(gram_cost(uses), root_cost(uses), form_cost(uses)) + large_product - held


def holds_at_once(use: Factors, points: int) -> bool:
    """Whether to form a use's gradients as soon as it is there: cheaper, and they take less memory than its factors,
    which at the peak, in the last point's backward pass, are kept of every point but that one."""
    return use.size <= use.stored and saved_by_holding([use] * points) > 0


def held_late(kept: Mapping[str, Sequence[Factors]], samples: int) -> tuple[list[str], int]:
    """Which of the parameters kept as factors to form for a slice of the samples at a time, and the slice's size.

    Those that save most for their size come first, as long as two samples fit into a slice.
    """
    # a single token's norm is the product of its sides', which nothing can be cheaper than
    savings = {name: saved_by_holding(uses) for name, uses in kept.items() if len(uses) > 1 or not uses[0].single}
    ranked = sorted((n for n in savings if savings[n] > 0), key=lambda n: savings[n] / kept[n][0].size, reverse=True)
    smallest = min(2, samples)
    chosen: list[str] = []
    bytes_each = 0
    for name in ranked:
        needed = 4 * kept[name][0].size
        if smallest * (bytes_each + needed) <= LATE_BYTES:
            chosen.append(name)
            bytes_each += needed
    if not chosen:
        return chosen, samples
    fitting, threads = LATE_BYTES // bytes_each, torch.get_num_threads()
    even = fitting - fitting % threads if fitting >= threads else fitting  # a sample for every thread, none idle
    return chosen, min(samples, even)
