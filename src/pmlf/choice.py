"""Which way to a parameter's norms and clipped sum is cheapest, by calibrated cost, under a memory budget.

    Gram      inner products of tokens in float64 for the norms, then one large product for the sum
    dropped   per-sample gradients formed a few samples at a time for the norms and dropped, then one large product
    held      per-sample gradients formed once, for the norms and for the sum: no large product, but memory

Costs are in float32 multiply-adds of a large matrix product. `benchmarks/layer_costs.py` measures the ways side by side
and says how far the choice is from the fastest; it is where the constants come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pmlf.factors import Factors

_SMALL_PRODUCT = 1.2  # a multiply-add of a product for one sample
_WIDE_PRODUCT = 2.2  # one of a float64 product, conversion of its factors included
_TOUCH = 4  # a number written to memory or read from it
LATE_BYTES = 3 << 25  # of per-sample gradients formed late, a slice of the samples at a time


def gram_cost(uses: Sequence[Factors]) -> float:
    """Norms of one sample by inner products of all pairs of uses."""
    pairs = len(uses) * (len(uses) + 1) // 2
    return pairs * _WIDE_PRODUCT * max(use.gram_operations for use in uses)


def form_cost(uses: Sequence[Factors]) -> float:
    """Norms of one sample from its gradient, which is formed for it."""
    return sum(_SMALL_PRODUCT * use.form_operations + _TOUCH * use.form_touches for use in uses)


def prefers_gram(uses: Sequence[Factors]) -> bool:
    """Whether inner products cost less than forming the gradients, where these are not held."""
    return gram_cost(uses) < form_cost(uses)


def saved_by_holding(uses: Sequence[Factors]) -> float:
    """What one sample costs less if its gradient is held; negative if it costs more."""
    large_product = sum(use.form_operations for use in uses)
    held = form_cost(uses) + _TOUCH * uses[0].size
    return min(gram_cost(uses), form_cost(uses)) + large_product - held


def holds_at_once(use: Factors, points: int) -> bool:
    """Whether to form a use's gradients as soon as it is there: cheaper, and they take less memory than its factors,
    which at the peak, in the last point's backward pass, are kept of every point but that one."""
    return use.size <= use.stored and saved_by_holding([use] * points) > 0


def held_late(kept: Mapping[str, Sequence[Factors]], samples: int) -> tuple[list[str], int]:
    """Which of the parameters kept as factors to form for a slice of the samples at a time, and the slice's size.

    Those that save most for their size come first, as long as two samples fit into a slice.
    """
    savings = {name: saved_by_holding(uses) for name, uses in kept.items()}
    ranked = sorted((n for n in kept if savings[n] > 0), key=lambda n: savings[n] / kept[n][0].size, reverse=True)
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
