"""How a parameter's norms and clipped sum are computed: decided once for every shape, by cost, under a memory budget.

    Gram      inner products of tokens in float64 for the norms, then one large product for the sum
    root      inner products of one side in float64 and a product with their root for the norms (`roots`), then one
              large product for the sum
    dropped   per-sample gradients formed a few samples at a time for the norms and dropped, then one large product
    held      per-sample gradients formed once, for the norms and for the sum: no large product, but memory

Costs are in float32 multiply-adds of a large matrix product. `benchmarks/layer_costs.py` measures the ways side by side
and compares the decision with the fastest; the constants come from there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pmlf.engine.arithmetic import CHUNK_BYTES, wide_dtype
from pmlf.engine.factors import Factors, Outer
from pmlf.engine.norms import Norms, factored_norms
from pmlf.engine.roots import Roots

_SMALL_PRODUCT = 1.2  # a multiply-add of a product for one sample
_WIDE_PRODUCT = 2.2  # a multiply-add of a float64 product, conversion of its factors included
_TOUCH = 4  # a number written to memory or read from it
_FAR_TOUCH = 9  # a number of a gradient that no cache holds
_ROOT = 3  # a root, over the cube of its size
_ROOT_CALL = 1e5  # a root, however small
LATE_BYTES = 3 << 26  # of per-sample gradients formed late, a slice of the samples at a time

Way = Literal["held at once", "held late", "gram", "root", "dropped"]
Kept = Mapping[str, Sequence[Factors]]  # parameters whose uses are kept as factors


class Strategy(ABC):
    """Decides how the gradients of every parameter are taken."""

    @abstractmethod
    def holds_at_once(self, use: Factors, points: int) -> bool:
        """Whether to form a use's gradients as soon as they are there, for `points` evaluation points."""

    @abstractmethod
    def held_late(self, kept: Kept, samples: int) -> tuple[Sequence[str], int]:
        """Which parameters to form for a slice of the samples at a time, and the size of a slice."""

    @abstractmethod
    def norms(self, uses: Sequence[Factors], roots: Roots) -> tuple[Tensor, Tensor | None]:
        """(norm^2, slack) of every sample over all uses of a parameter."""


class Cheapest(Strategy):
    """The cheapest by calibrated cost. A decision is kept: the same shapes are not asked about again."""

    def __init__(self) -> None:
        self._at_once: dict[Any, bool] = {}
        self._late: dict[Any, tuple[Sequence[str], int]] = {}
        self._ways: dict[Any, Norms] = {}

    def holds_at_once(self, use: Factors, points: int) -> bool:
        key = use.form_key, points
        if key not in self._at_once:
            # cheaper, and less memory than its factors, which at the peak, in the last point's backward pass, are kept
            # of every point but that one
            self._at_once[key] = use.size <= use.stored and saved_by_holding([use] * points) > 0
        return self._at_once[key]

    def held_late(self, kept: Kept, samples: int) -> tuple[Sequence[str], int]:
        key = samples, *[(name, *[use.form_key for use in uses]) for name, uses in kept.items()]
        if key not in self._late:
            self._late[key] = _held_late(kept, samples)
        return self._late[key]

    def norms(self, uses: Sequence[Factors], roots: Roots) -> tuple[Tensor, Tensor | None]:
        key = (*[use.form_key for use in uses],)
        if key not in self._ways:
            self._ways[key] = way_to_norms(uses)
        return factored_norms(uses, roots, self._ways[key])


class Fixed(Strategy):
    """One way for all parameters that can go it, whatever it costs."""

    def __init__(self, way: Way, slice_size: int = 2) -> None:
        self._way, self._slice = way, slice_size

    def holds_at_once(self, use: Factors, points: int) -> bool:
        return self._way == "held at once"

    def held_late(self, kept: Kept, samples: int) -> tuple[Sequence[str], int]:
        return (list(kept), min(samples, self._slice)) if self._way == "held late" else ([], samples)

    def norms(self, uses: Sequence[Factors], roots: Roots) -> tuple[Tensor, Tensor | None]:
        possible = {"dropped": True, "root": root_cost(uses) < math.inf}.get(self._way, False)
        way: Norms = "gram" if not possible else "root" if self._way == "root" else "dropped"
        return factored_norms(uses, roots, way)


def gram_cost(uses: Sequence[Factors]) -> float:
    """Cost of one sample's norm by inner products of all pairs of uses."""
    return _pairs(uses) * _WIDE_PRODUCT * max(use.gram_operations for use in uses)


def root_cost(uses: Sequence[Factors]) -> float:
    """Cost of one sample's norm by the root of one side; linear layers have one, where there is float64."""
    if not all(isinstance(use, Outer) and wide_dtype(use.right) == torch.float64 for use in uses):
        return math.inf
    narrow, wide = sorted((uses[0].rows, uses[0].cols))
    products = max(use.tokens for use in uses) ** 2 * (_WIDE_PRODUCT * narrow + _SMALL_PRODUCT * wide)
    return _pairs(uses) * products + _ROOT * sum(use.tokens for use in uses) ** 3 + _ROOT_CALL


def form_cost(uses: Sequence[Factors]) -> float:
    """Cost of one sample's norm from its gradient, which is formed for it."""
    return sum(_SMALL_PRODUCT * use.form_operations + _touch(use) * use.form_touches for use in uses)


def way_to_norms(uses: Sequence[Factors]) -> Norms:
    """The cheapest, where gradients are not held."""
    costs: dict[Norms, float] = {"gram": gram_cost(uses), "root": root_cost(uses), "dropped": form_cost(uses)}
    return min(costs, key=lambda way: costs[way])


def saved_by_holding(uses: Sequence[Factors]) -> float:
    """What one sample costs less if its gradient is held; negative if it costs more."""
    large_product = sum(use.form_operations for use in uses)
    held = form_cost(uses) + _touch(uses[0]) * uses[0].size
    return min(gram_cost(uses), root_cost(uses), form_cost(uses)) + large_product - held


def _held_late(kept: Kept, samples: int) -> tuple[list[str], int]:
    """Parameters that save most for their size come first, as long as two samples fit into a slice."""
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


def _touch(use: Factors) -> float:
    return _TOUCH if 4 * use.size <= CHUNK_BYTES else _FAR_TOUCH


def _pairs(uses: Sequence[Factors]) -> int:
    return len(uses) * (len(uses) + 1) // 2
