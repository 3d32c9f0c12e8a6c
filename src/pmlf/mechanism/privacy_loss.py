"""The privacy loss distribution (PLD) of T Poisson-subsampled Gaussian steps, with every error bounded and added.

The loss of one step is put on a grid by Connect-the-Dots (Doroshenko et al. 2022): a loss between two grid points is
split between them so that its mass under both distributions is kept. This gives an upper bound on every delta. Each
mass is a sum of positive terms, so it is accurate to a relative error, however small it is.

T steps are the T-th power of the Fourier transform, steps of several kinds a product of powers. The rounding errors are
relative to the largest mass, not to the tail that determines delta. So the loss is tilted first (Esscher 1932),
p(x) e^{lambda x} / M(lambda), with lambda such that the tail moves to the middle. The errors of rounding, wrap-around
and cut tails are bounded and added to delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, signal, special

_Floats = NDArray[np.float64]
Kinds = tuple[tuple[float, float, int], ...]  # (z, q, T) for every kind of step

CELLS_PER_DEVIATION = 10  # grid cells per standard deviation of one step's loss: epsilon is at most 0.1 % too large
_COARSEST_CELL = 1e-3
_MOST_CELLS = 2**18  # takes about a second; only sampling rates below 1e-4 come near it
_TAIL = 10.0  # standard deviations of noise in a table; noise beyond counts as an infinite loss
_PANEL = 0.1  # the widest interval of one quadrature, in standard deviations
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)  # relative error about 1e-15 on such intervals
_UNIT = 2.0**-53
_TABLE_ERROR = 2.0**-40  # relative, of any mass in a table: quadrature, exponentials, sums of thousands of terms
_FFT_ERROR = 8 * _UNIT  # relative, in the 2-norm, per bit of the length (Higham 2002, theorem 24.2)
_POWER_ERROR = 16 * _UNIT  # relative, per step: logarithm, angle and exponential
_LARGEST_EXPONENT = 600.0
_UNDERFLOW = 1e-300  # more than all that underflow loses
_ENOUGH = 1e-3  # relative: the search stops when the errors make up less of the bound than this
_CUT = 1e-13  # mass of the tilted sum allowed on each side of the window
_SHIFTS = np.geomspace(0.1, 100, 25)  # of the tilt, in inverse standard deviations, to bound the window
_GAUSSIAN_SHIFT = int(np.abs(_SHIFTS - math.sqrt(-2 * math.log(_CUT))).argmin())  # the best one for a Gaussian


def epsilon(z: float, rate: float, steps: int, delta: float, *, cells: int = CELLS_PER_DEVIATION) -> float:
    """An upper bound on epsilon at a given delta after T steps (Theorem 2).

    Args:
        z: The noise multiplier.
        rate: The sampling rate, in (0, 1].
        steps: The number of steps, T.
        delta: The probability of failure, in (0, 1).
        cells: Grid cells per standard deviation of one step's loss: more is tighter and slower.

    Returns:
        The bound; infinite if the errors of the computation exceed delta.

    >>> round(epsilon(1.0, 1 / 60, 1500, 1e-5), 2)
    3.93
    """
    return composed_epsilon(((z, rate, steps),), delta, cells=cells)


def composed_epsilon(kinds: Kinds, delta: float, *, cells: int = CELLS_PER_DEVIATION) -> float:
    """An upper bound on epsilon at a given delta after steps of several kinds, in any order fixed beforehand.

    Args:
        kinds: Noise multiplier, sampling rate and number of steps of every kind.
        delta: The probability of failure, in (0, 1).
        cells: Grid cells per standard deviation of the smallest loss: more is tighter and slower.

    Returns:
        The bound; infinite if the errors of the computation exceed delta.

    >>> alike = composed_epsilon(((1.0, 1 / 60, 500), (1.0, 1 / 60, 1000)), 1e-5)
    >>> round(alike, 2)
    3.93
    """

    def bound(composed: _ComposedLoss) -> tuple[float, float]:
        found = composed.epsilon(delta)
        return found, composed.error(found) / delta

    def chernoff(log_moment: float, order: float) -> float:
        return (log_moment - math.log(delta)) / order

    return max(_tightest(losses, chernoff, bound) for losses in _losses(kinds, cells))


def delta(z: float, rate: float, steps: int, epsilon: float) -> float:
    """An upper bound on delta at a given epsilon after T steps.

    Args:
        z: The noise multiplier.
        rate: The sampling rate, in (0, 1].
        steps: The number of steps, T.
        epsilon: The privacy loss, at least 0.

    Returns:
        The bound, at most 1.

    >>> delta(1.0, 1 / 60, 1500, 3.94) < 1e-5
    True
    """

    def bound(composed: _ComposedLoss) -> tuple[float, float]:
        found = composed.delta(epsilon)
        return found, composed.error(epsilon) / found

    def chernoff(log_moment: float, order: float) -> float:
        return log_moment - order * epsilon

    return max(_tightest(losses, chernoff, bound) for losses in _losses(((z, rate, steps),), CELLS_PER_DEVIATION))


@dataclass(frozen=True, kw_only=True, eq=False)
class _LossTable:
    """The masses of one step's privacy loss at consecutive multiples of the cell width, and of an infinite loss.

    It dominates the true loss up to `_TABLE_ERROR`: after any number of steps its delta is not below the true one.
    """

    cell: float
    losses: _Floats
    log_masses: _Floats
    infinite: float

    def log_moment(self, order: float) -> float:
        """log E[e^{order * loss}] over the finite losses."""
        exponents = self.log_masses + order * self.losses
        highest = float(exponents.max())
        return highest + math.log(float(np.exp(exponents - highest).sum()))

    def tilted(self, order: float) -> _Floats:
        """The masses times e^{order * loss}, normalised to a sum of 1."""
        return np.asarray(np.exp(self.log_masses + order * self.losses - self.log_moment(order)))

    def deviation(self, order: float) -> float:
        """The standard deviation of the tilted loss."""
        masses = self.tilted(order)
        return math.sqrt(float(masses @ (self.losses - masses @ self.losses) ** 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Losses:
    """The loss tables of several kinds of steps, on one grid, and how many steps there are of each."""

    tables: tuple[_LossTable, ...]
    steps: tuple[int, ...]

    @property
    def cell(self) -> float:
        return self.tables[0].cell

    def total(self, of: Callable[[_LossTable], float]) -> float:
        """The sum over all steps of a number of one step."""
        return sum(count * of(table) for table, count in zip(self.tables, self.steps, strict=True))

    def log_moment(self, order: float) -> float:
        """log E[e^{order * loss}] of all steps, over the finite losses."""
        return self.total(lambda table: table.log_moment(order))

    def deviation(self, order: float) -> float:
        """The standard deviation of the tilted loss of all steps."""
        pairs = zip(self.tables, self.steps, strict=True)
        return math.hypot(*(math.sqrt(count) * table.deviation(order) for table, count in pairs))


@lru_cache(maxsize=4)
def _losses(kinds: Kinds, cells: int) -> tuple[_Losses, _Losses]:
    """The losses for a record removed (mixture against Gaussian) and for a record added (the reverse)."""
    cell, steps = _cell(kinds, cells), tuple(count for _, _, count in kinds)
    removed, added = (
        _Losses(tables=tuple(_table(z, rate, cell, removed=way) for z, rate, _ in kinds), steps=steps)
        for way in (True, False)
    )
    return removed, added


def _cell(kinds: Kinds, cells: int) -> float:
    """The cell width: a fraction of the smallest standard deviation of one step's loss.

    Wide cells overstate the loss of every step. Narrow cells take longer.
    """
    narrow, one_step, all_steps = _COARSEST_CELL, 0.0, 0.0
    for z, rate, steps in kinds:
        deviation = min(rate * math.sqrt(math.expm1(min(1 / z**2, 500.0))), 1 / z)
        largest = float(np.logaddexp(0, math.log(rate) + _TAIL / z + 1 / (2 * z**2)))  # log(1 + q e^{largest loss})
        narrow, one_step = min(narrow, deviation / cells), max(one_step, largest)
        all_steps = math.hypot(all_steps, 2 * _TAIL * deviation * math.sqrt(steps))
    return max(narrow, max(one_step, all_steps) / _MOST_CELLS)


@lru_cache(maxsize=8)  # epsilon is asked for after every epoch of the same steps
def _table(z: float, rate: float, cell: float, *, removed: bool) -> _LossTable:
    noise, widths = _quadrature(z, rate, cell, _TAIL + 1 / z if removed else _TAIL)
    if removed:
        loss = _log_ratio(noise, z, rate, lean=1)
        mass = widths * ((1 - rate) * _density(noise) + rate * _density(noise - 1 / z))
    else:
        loss = -_log_ratio(noise, z, rate, lean=-1)
        mass = widths * _density(noise)
    loss = loss + 2.0**-48 * cell  # with `lean`, more than rounding can take away below
    below = np.floor(loss / cell).astype(np.int64)
    first, count = int(below.min()), int(np.ptp(below)) + 2
    share = np.clip(np.expm1((below + 1) * cell - loss) / math.expm1(cell), 0, 1)  # the rest goes to the point above
    masses = np.bincount(below - first, mass * share, count) + np.bincount(below - first + 1, mass * (1 - share), count)
    with np.errstate(divide="ignore"):
        log_masses = np.log(masses)
    losses = np.asarray((first + np.arange(count)) * cell, dtype=np.float64)
    return _LossTable(cell=cell, losses=losses, log_masses=log_masses, infinite=4 * float(special.ndtr(-_TAIL)))


def _quadrature(z: float, rate: float, cell: float, highest: float) -> tuple[_Floats, _Floats]:
    """Points and weights of integrals over the noise up to `highest`, with a cut at every cell boundary of the loss."""
    panels = math.ceil((highest + _TAIL) / (_PANEL * min(1.0, z)))
    ends = np.linspace(-_TAIL, highest, panels + 1)
    low, high = _log_ratio(ends[[0, -1]], z, rate) / cell
    crossed = np.arange(math.floor(low) + 1, math.ceil(high)) * cell
    ends = np.unique(np.concatenate([ends, np.clip(_noise_of(crossed, z, rate), -_TAIL, highest)]))
    half = np.diff(ends)[:, None] / 2
    return (ends[:-1, None] + half * (1 + _NODES)).ravel(), (half * _WEIGHTS).ravel()


def _density(noise: _Floats) -> _Floats:
    return np.asarray(np.exp(-0.5 * noise**2) / math.sqrt(2 * math.pi))


def _log_ratio(noise: _Floats, z: float, rate: float, *, lean: int = 0) -> _Floats:
    """log(mixture / Gaussian) = log(1 - q + q e^{x/z - 1/(2 z^2)}) at x standard deviations of noise.

    `lean` is 1 for a value not below the true one, -1 for a value not above it.
    """
    exponent = noise / z - 0.5 / z**2
    exponent = exponent + lean * 2.0**-50 * (np.abs(noise) / z + 0.5 / z**2)
    ratio = rate * np.expm1(np.minimum(exponent, 600.0))  # mixture / Gaussian - 1
    far = np.log((1 - rate) + rate * np.exp(np.clip(exponent, -700.0, 600.0)))
    near = np.log1p(np.clip(ratio, -0.5, 0.5))
    found = np.where(np.abs(ratio) < 0.5, near, np.where(exponent < 600.0, far, exponent + math.log(rate)))
    if rate == 1.0:
        found = exponent
    return np.asarray(found + lean * 2.0**-48 * np.abs(found))


def _noise_of(log_ratio: _Floats, z: float, rate: float) -> _Floats:
    """The inverse of `_log_ratio`. Its rounding moves a cut of the integral, not a mass."""
    small = np.log1p(np.maximum(np.expm1(np.minimum(log_ratio, 1.0)) / rate, -1 + 1e-15))
    large = log_ratio - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(log_ratio, 1.0)))
    return z * np.where(log_ratio < 1.0, small, large) + 0.5 / z


def _tightest(
    losses: _Losses,
    chernoff: Callable[[float, float], float],
    bound: Callable[[_ComposedLoss], tuple[float, float]],
) -> float:
    """The bound at the tilt that minimises Chernoff's bound on the same quantity.

    `bound` returns a bound and the share of errors in it. Any tilt is valid. If a record is rarely drawn, the loss has
    atoms and a smaller tilt can be tighter, so smaller tilts are tried while they help.
    """
    most = -math.log(max(losses.deviation(0.0) / 400, losses.cell))
    search = optimize.minimize_scalar(
        lambda log_order: chernoff(losses.log_moment(math.exp(log_order)), math.exp(log_order)),
        bounds=(most - 20, most),
        method="bounded",
        options={"xatol": 1e-3},
    )
    tilt, best = math.exp(search.x), math.inf
    while True:
        found, share = bound(_ComposedLoss(losses, tilt=tilt))
        if found >= best * (1 - _ENOUGH) or share <= _ENOUGH:
            return min(found, best)
        tilt, best = tilt / 4, found


class _ComposedLoss:
    """The loss of T steps in one part of its tail. Every delta includes the errors of the computation."""

    def __init__(self, losses: _Losses, *, tilt: float) -> None:
        cell = losses.cell
        low, mean, high = _window(losses, tilt)
        lowest = int(losses.total(lambda table: round(float(table.losses[0]) / cell)))
        masses = [table.tilted(tilt) for table in losses.tables]
        sums, error = _product(masses, losses.steps, most=high - low, start=low - lowest)
        self._tilt = tilt
        self._points = np.arange(low, high) * cell
        self._middle = mean * cell
        self._log_scale = losses.log_moment(tilt) - tilt * self._middle
        weights = (sums * np.exp(-tilt * (self._points - self._middle)))[::-1]
        # from each point on: the mass under one distribution, and the mass under the other times e^{that point}
        self._upper = np.cumsum(weights)[::-1]
        self._lower = signal.lfilter([1.0], [1.0, -math.exp(-cell)], weights)[::-1]
        reach = np.arange(high - low) * cell
        worst = float(np.linalg.norm(np.expm1(-reach - cell) * np.exp(-tilt * reach)))
        self._spill = error * worst + 2 * _CUT
        self._rounding = 4 * (high - low + 1000) * _UNIT
        self._log_growth = sum(losses.steps) * _TABLE_ERROR
        self._infinite = -math.expm1(losses.total(lambda table: math.log1p(-table.infinite)))

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at epsilon; 1 below the window."""
        if epsilon < self._points[0]:
            return 1.0
        index = int(np.searchsorted(self._points, epsilon, side="right"))
        found = 0.0
        if index < len(self._points):
            upper = float(self._upper[index])
            lower = math.exp(epsilon - self._points[index]) * float(self._lower[index])
            found = max(upper - lower, 0.0) + self._rounding * abs(upper)
        return min(self._scaled(found) + self.error(epsilon), 1.0)

    def error(self, epsilon: float) -> float:
        """The part of the bound on delta that covers rounding, wrap-around and cut tails."""
        spill = self._spill * math.exp(min(-self._tilt * (epsilon - self._middle), 700.0)) + _UNDERFLOW
        return self._scaled(spill) + self._infinite

    def _scaled(self, amount: float) -> float:
        if amount <= 0:
            return 0.0
        return math.exp(min(math.log(amount) + self._log_scale + self._log_growth, 1.0))

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon: the smallest whose bound on delta is at most `delta`, to a relative 1e-10."""
        low, high = max(float(self._points[0]), 0.0), max(float(self._points[-1]), 0.0)
        if self.delta(low) <= delta:
            return low
        if self.delta(high) > delta:
            return math.inf
        while high - low > 1e-10 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


def _window(losses: _Losses, tilt: float) -> tuple[int, int, int]:
    """The ends of the window that holds the tilted sum of all losses except for `_CUT` on each side, and its mean.

    The ends follow from Chernoff's bound. Losses so low that undoing the tilt overflows are left out.
    """
    mean = losses.total(lambda table: float(table.tilted(tilt) @ table.losses))
    here, log_cut = {table: table.log_moment(tilt) for table in losses.tables}, math.log(_CUT)

    def growth(order: float) -> float:
        return losses.total(lambda table: table.log_moment(order) - here[table])

    high = losses.total(lambda table: float(table.losses[-1]))
    low = losses.total(lambda table: float(table.losses[0]))
    shifts = (_SHIFTS / losses.deviation(tilt)).tolist()
    high = min(high, _least(lambda shift: (growth(tilt + shift) - log_cut) / shift, shifts))
    low = max(low, -_least(lambda shift: (growth(tilt - shift) - log_cut) / shift, shifts))
    low = max(low, mean - _LARGEST_EXPONENT / tilt)
    return math.floor(low / losses.cell), round(mean / losses.cell), math.ceil(high / losses.cell) + 1


def _least(bound: Callable[[float], float], shifts: list[float]) -> float:
    """The least of Chernoff's bounds at increasing shifts. It falls and then rises with the shift, so walk downhill."""
    start = _GAUSSIAN_SHIFT
    least = bound(shifts[start])
    for way in (range(start + 1, len(shifts)), range(start - 1, -1, -1)):
        before = least
        for place in way:
            if (found := bound(shifts[place])) >= least:
                break
            least = found
        if least < before:
            break
    return least


def _product(kinds: list[_Floats], steps: tuple[int, ...], *, most: int, start: int) -> tuple[_Floats, float]:
    """`most` masses of the sum of all draws, from `start` on, and a bound on their error in the 2-norm.

    Masses outside wrap around and are added to these.
    """
    length = fft.next_fast_len(max(most, *map(len, kinds)), real=True)
    transform_error = _FFT_ERROR * math.log2(max(length, 2))
    transforms = [fft.rfft(masses, length) for masses in kinds]
    sizes = [np.abs(transformed) for transformed in transforms]
    errors = [transform_error * math.sqrt(length) * float(np.linalg.norm(masses)) for masses in kinds]
    logs = [
        count * (np.log(np.maximum(size, 1e-300)) + 1j * np.angle(transformed))
        for count, size, transformed in zip(steps, sizes, transforms, strict=True)
    ]
    powered = np.exp(sum(logs))
    missed = _POWER_ERROR * (sum(steps) + 1) * np.abs(powered)
    largest = [np.log(size + error) for size, error in zip(sizes, errors, strict=True)]
    for one, (count, error) in enumerate(
        zip(steps, errors, strict=True)
    ):  # one factor off, the others at their largest
        others = sum(
            (count - (place == one)) * value for place, (count, value) in enumerate(zip(steps, largest, strict=True))
        )
        missed = count * error * np.exp(np.minimum(others, 300.0)) + missed
    total = math.sqrt(2) * (np.linalg.norm(missed) + transform_error * np.linalg.norm(powered))  # for both half-spectra
    sums = np.roll(fft.irfft(powered, length), -(start % length))[:most]
    return sums, float(total) / math.sqrt(length)
