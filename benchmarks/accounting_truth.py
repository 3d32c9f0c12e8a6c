"""Whether "pld" ever claims less than the truth: delta(epsilon) by an inverse Laplace transform, beside the accountant.

    python benchmarks/accounting_truth.py --out docs/results/accounting-truth.json

With M(s) = E[e^{s L}] of one step's privacy loss L, and any lambda > 0 (the tilt is Esscher's),

    delta(epsilon) = 1/(2 pi) int M(lambda + i t)^T e^{-(lambda + i t) epsilon} / ((lambda + i t)(lambda + 1 + i t)) dt.

At the saddle point of the integrand nothing cancels, so the result has many digits however small delta is. Both
integrals are trapezoidal sums of analytic functions, which converge exponentially. It shares nothing with the
accountant. Where a record is hardly ever drawn (T q small) the integrand falls slowly, and the setting is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from pmlf.mechanism import accounting
from pmlf.mechanism.accounting import Event

NOISE = (0.5, 1.0, 2.0, 10.0)
RATES = (1e-4, 1e-3, 1e-2, 1e-1)
STEPS = (1_000, 100_000, 1_000_000)
DELTAS = (1e-5, 1e-8, 1e-10)
LARGEST_EPSILON = 500.0  # more is no privacy
_TAIL = 13.0  # deviations of noise
_BLOCK = 256  # points of the integral over t that are taken together


class NotConverged(Exception):
    """The integrand falls too slowly: few draws leave an atom in the loss."""


class StepLoss:
    """The privacy loss of one step: for a record removed (mixture against Gaussian) or added (the reverse)."""

    def __init__(self, z: float, rate: float, *, removed: bool) -> None:
        noise = np.arange(-_TAIL, _TAIL + 1 / z, 0.03 * min(1.0, z))
        exponent = noise / z - 0.5 / z**2
        small = np.log1p(rate * np.expm1(np.minimum(exponent, 1)))
        large = exponent + np.log(rate + (1 - rate) * np.exp(-np.maximum(exponent, 1)))
        log_ratio = np.where(exponent < 1, small, large)  # log(mixture / Gaussian)
        self._log_weight = -0.5 * noise**2 + np.log((noise[1] - noise[0]) / np.sqrt(2 * np.pi))
        self._weight = np.exp(self._log_weight)
        # E[e^{s L}] = E_Gaussian[e^{(s + 1) log_ratio}] if removed, E_Gaussian[e^{-s log_ratio}] if added
        self._log_ratio, self._shift = (log_ratio, 1.0) if removed else (-log_ratio, 0.0)

    def log_moment(self, order: NDArray[Any] | complex) -> NDArray[np.complex128]:
        """log E[e^{s L}], as log1p(E[e^{s L} - 1]), since E[e^{s L}] is close to 1."""
        exponent = (np.atleast_1d(order)[:, None] + self._shift) * self._log_ratio
        small = exponent.real < 1
        near = self._weight * np.expm1(np.where(small, exponent, 0))
        with np.errstate(over="ignore", invalid="ignore"):  # at orders far above the saddle point
            far = np.exp(np.where(small, -np.inf, self._log_weight + exponent)) - np.where(small, 0, self._weight)
            return np.asarray(np.log1p((near + far).sum(axis=1)))

    def epsilon(self, delta: float, steps: int, *, guess: float) -> float:
        """The epsilon at delta if it is near `guess`, or 0: the other direction, then, has the larger one."""

        def saddle(log_order: float) -> float:
            order = np.exp(log_order)
            found = steps * self.log_moment(order)[0].real - order * guess - np.log(order) - np.log1p(order)
            return float(found) if np.isfinite(found) else 1e300

        log_order = optimize.minimize_scalar(saddle, bounds=(-12, 12), method="bounded").x
        order, height, h = float(np.exp(log_order)), saddle(log_order), 1e-2
        chernoff = height + np.log(order) + np.log1p(order)  # log delta at the guess is no more
        if chernoff + 0.05 * order * guess < np.log(delta):
            return 0.0
        bent = (saddle(log_order - h) - 2 * height + saddle(log_order + h)) / h**2
        if not 0 < bent < 1e100:
            raise NotConverged
        spacing = order / np.sqrt(bent) / 8
        path, value = self._integrand(order, spacing, steps, guess, height)

        def excess(epsilon: float) -> float:
            terms = (value * np.exp(-path * (epsilon - guess))).real
            found = np.exp(height) * (terms.sum() - terms[0] / 2) * spacing / np.pi
            return float(np.log(max(found, 1e-300) / delta))

        if excess(0.95 * guess) < 0:
            return 0.0
        return float(optimize.brentq(excess, 0.95 * guess, 1.05 * guess, xtol=1e-12 * guess))

    def _integrand(
        self, order: float, spacing: float, steps: int, guess: float, height: float
    ) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
        paths, values = [], []
        for block in range(8):
            path = order + 1j * spacing * (block * _BLOCK + np.arange(_BLOCK))
            log_value = steps * self.log_moment(path) - path * guess - np.log(path) - np.log1p(path)
            paths.append(path)
            values.append(np.exp(log_value - height))
            if np.abs(values[-1][-32:]).max() < 1e-13:
                return np.concatenate(paths), np.concatenate(values)
        raise NotConverged


def epsilon(*, z: float, rate: float, steps: int, delta: float, guess: float) -> float:
    """The true epsilon at delta, to about nine digits: the larger of a record removed and a record added."""
    both = (StepLoss(z, rate, removed=removed) for removed in (True, False))
    found = max(step.epsilon(delta, steps, guess=guess) for step in both)
    if found == 0.0:
        raise NotConverged
    return found


def compared(z: float, rate: float, steps: int, delta: float) -> dict[str, Any]:
    """Both bounds of the accountant as multiples of the truth, less 1; None where the integral does not converge."""
    begin = time.perf_counter()
    claimed = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=delta)
    seconds = time.perf_counter() - begin
    row: dict[str, Any] = {"z": z, "rate": rate, "steps": steps, "delta": delta, "claimed": claimed, "seconds": seconds}
    if not 1e-6 < claimed < LARGEST_EPSILON:
        return {**row, "true": None}
    try:
        true = epsilon(z=z, rate=rate, steps=steps, delta=delta, guess=claimed)
    except NotConverged:
        return {**row, "true": None}
    finest = accounting.finest_epsilon(Event(noise_multiplier=z, sample_rate=rate), steps=steps, delta=delta)
    return {**row, "true": true, "excess": claimed / true - 1, "finest_excess": finest / true - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = []
    for z, rate, steps, delta in itertools.product(NOISE, RATES, STEPS, DELTAS):
        rows.append(compared(z, rate, steps, delta))
        print(rows[-1], flush=True)
    known = [row for row in rows if row["true"] is not None]
    ordinary = [row for row in known if row["delta"] >= 1e-8 and row["steps"] <= 100_000]
    summary = {
        "settings": len(rows),
        "with_a_reference": len(known),
        "least_excess": min(row["excess"] for row in known),
        "largest_excess": max(row["excess"] for row in known),
        "largest_excess_at_ordinary_settings": max(row["excess"] for row in ordinary),
        "least_excess_of_finest": min(row["finest_excess"] for row in known),
        "longest_seconds": max(row["seconds"] for row in rows),
    }
    out.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
