"""dp-accounting's Renyi accountant, without its log messages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import dp_accounting
from dp_accounting import rdp


def renyi(kinds: Iterable[tuple[float, float, int]], orders: Sequence[float] | None = None) -> rdp.RdpAccountant:
    """The accountant after Poisson-subsampled Gaussian events of kinds (z, q, T). Use it inside `quiet`."""
    total = rdp.RdpAccountant() if orders is None else rdp.RdpAccountant(orders=orders)
    for z, rate, count in kinds:
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
        total.compose(dp_accounting.SelfComposedDpEvent(step, count))
    return total


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress dp-accounting's log messages about skipped Renyi orders: fewer orders still give a bound."""

    def dropped(record: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("absl")
    logger.addFilter(dropped)
    try:
        yield
    finally:
        logger.removeFilter(dropped)
