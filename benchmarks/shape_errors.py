"""The noise that shaped noise leaves in the parameters, against white noise at the same epsilon.

    python benchmarks/shape_errors.py docs/results/shape-errors.json

n = 50,000 records, delta = 1/n, noise calibrated by PLD for each number of bands. Two tables: prefix sums of the noise
(no filter, no curvature) by epsilon, batch size, steps and bands; and the effect of curvature with and without the
filter {-0.9}{0.1} at epsilon 8. All numbers are relative to white noise without a filter. About a minute.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pmlf.accounting import noise_multiplier
from pmlf.filters import LowPass
from pmlf.shapes import NoiseShape, Workload, banded, best, error

RECORDS, DELTA = 50_000, 1 / 50_000
BANDS = (1, 2, 4, 8, 16, 32)
CURVATURES = (0.0, 0.02, 0.1, 1.0)
CORRECTED = LowPass(a=(-0.9,), b=(0.1,))
UNCORRECTED = LowPass(a=(-0.9,), b=(0.1,), corrected=False)


def multiplier(epsilon: float, batch_size: int, steps: int, bands: int) -> float:
    return noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=batch_size / RECORDS, steps=steps, bands=bands
    )


def prefix_sums() -> list[dict[str, Any]]:
    """z times the error of prefix sums, relative to white noise, for each number of bands."""
    rows = []
    for batch_size, steps in ((1000, 400), (1000, 1000), (4000, 400)):
        load = Workload(steps=steps, low_pass=LowPass(), curvatures=(0.0,))
        errors = {bands: error(banded(bands, workload=load), load) for bands in BANDS if bands * batch_size <= RECORDS}
        for epsilon in (1, 2, 4, 8):
            white = multiplier(epsilon, batch_size, steps, 1)
            noise = {
                bands: multiplier(epsilon, batch_size, steps, bands) / white * found for bands, found in errors.items()
            }
            best_bands = min(noise, key=lambda bands: noise[bands])
            rows.append(
                {"batch_size": batch_size, "steps": steps, "epsilon": epsilon, "best_bands": best_bands, "noise": noise}
            )
    return rows


def by_curvature(epsilon: float, steps: int, bands: int) -> list[dict[str, Any]]:
    """z times the error at each curvature, relative to white noise without a filter."""
    plain = Workload(steps=steps, low_pass=LowPass(), curvatures=CURVATURES)
    prefix = replace(plain, curvatures=(0.0,))
    filtered = replace(plain, low_pass=UNCORRECTED)
    ratio = multiplier(epsilon, 1000, steps, bands) / multiplier(epsilon, 1000, steps, 1)
    white = NoiseShape.white()
    cases = [
        ("white, corrected filter", white, CORRECTED, 1.0),
        ("white, uncorrected filter", white, UNCORRECTED, 1.0),
        (f"{bands} bands for prefix sums, no filter", banded(bands, workload=prefix), LowPass(), ratio),
        (f"{bands} bands for the filter, uncorrected filter", banded(bands, workload=filtered), UNCORRECTED, ratio),
        (f"{bands} bands for the filter, corrected filter", banded(bands, workload=filtered), CORRECTED, ratio),
    ]
    rows = []
    for name, shape, low_pass, scale in cases:
        load = replace(plain, low_pass=low_pass)
        noise = {h: scale * error(shape, replace(load, curvatures=(h,))) for h in CURVATURES}
        rows.append({"case": name, "coefficients": list(shape.coefficients), "noise": noise})
    return rows


def chosen() -> list[dict[str, Any]]:
    """What `best` chooses with the filter, by epsilon."""
    rows = []
    for epsilon in (1, 2, 4, 8):
        choice = best(records=RECORDS, batch_size=1000, steps=400, epsilon=epsilon, delta=DELTA)
        rows.append({"epsilon": epsilon, "bands": choice.shape.bands, "noise": choice.noise})
    return rows


def main() -> None:
    document = {"prefix_sums": prefix_sums(), "curvature": by_curvature(8, 400, 8), "best_with_filter": chosen()}
    text = json.dumps(document, indent=1) + "\n"
    for path in sys.argv[1:]:
        Path(path).write_text(text)
    print(text)


if __name__ == "__main__":
    main()
