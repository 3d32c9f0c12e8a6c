"""Monte Carlo test of the privacy of shaped noise: delta measured on adaptive streams, against the accountant's.

    python benchmarks/shaped_privacy.py docs/results/shaped-privacy.json

One record against none. In the steps of its group it is drawn with probability p and adds +C or -C, whichever the
releases so far make worse: the sign of the last release. The noise is the library's `NoiseMemory`. The log-likelihood
ratio of a stream is known exactly, so delta(epsilon) = E[(1 - exp(epsilon - ratio))_+] is a plain mean over 400,000
streams, in both directions (record added, record removed). It must not be above the claim by more than chance. A
run of 3b + 1 steps ends just after the record's last turn, and one of 4b steps when all its columns are complete.

Two controls: plain Poisson sampling at the same expected batch size, accounted for as cyclic, and accounted for as
white noise; the ratio is then a sum over all patterns of participation. About a minute.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pmlf.accounting import delta
from pmlf.mechanism.noise import SeededRandomness
from pmlf.mechanism.noise_memory import NoiseMemory
from pmlf.shapes import NoiseShape, banded

DRAWS, NOISE, RATE = 400_000, 1.0, 0.5


def noise_of(shape: NoiseShape, steps: int, seed: int) -> np.ndarray:
    """Shaped noise of many streams at once, a row a step."""
    memory, rows = NoiseMemory(shape, SeededRandomness(seed)), []
    for release in range(steps):
        row = torch.zeros(DRAWS, dtype=torch.float64)
        memory.add_([row], NOISE, release=release)
        rows.append(row.numpy())
    return np.stack(rows)


def cyclic_ratios(shape: NoiseShape, steps: int, present: bool, seed: int) -> np.ndarray:
    """log P(stream | record) / P(stream | none) of streams with or without the record, which is in group 0."""
    random, matrix = np.random.default_rng(seed), shape.matrix(steps)
    releases, ratio = noise_of(shape, steps, seed), np.zeros(DRAWS)
    parts = {}
    for t in range(0, steps, shape.bands):
        sign = np.where(releases[t - 1] >= 0, 1.0, -1.0) if t else np.ones(DRAWS)
        parts[t] = sign
        if present:
            releases[t] += sign * (random.random(DRAWS) < RATE)
    white = matrix @ releases / NOISE
    for t, sign in parts.items():
        column = matrix[t:, t] / NOISE
        along = sign * (column @ white[t:])
        ratio += np.log1p(-RATE + RATE * np.exp(along - column @ column / 2))
    return ratio


def plain_ratios(shape: NoiseShape, steps: int, rate: float, present: bool, seed: int) -> np.ndarray:
    """The same for plain Poisson sampling: the record adds +C whenever it is drawn, in any step."""
    random, matrix = np.random.default_rng(seed), shape.matrix(steps)
    drawn = (random.random((steps, DRAWS)) < rate) * (1.0 if present else 0.0)
    white = matrix @ (noise_of(shape, steps, seed) + drawn) / NOISE
    total = np.zeros(DRAWS)
    for pattern in itertools.product((0.0, 1.0), repeat=steps):
        mean = matrix @ np.asarray(pattern) / NOISE
        weight = math.prod(rate if one else 1 - rate for one in pattern)
        total += weight * np.exp(mean @ white - mean @ mean / 2)
    return np.log(total)


def measured(ratio: np.ndarray, epsilon: float, added: bool) -> tuple[float, float]:
    """delta at epsilon, and its standard error."""
    loss = np.maximum(0.0, -np.expm1(epsilon - (ratio if added else -ratio)))
    return float(loss.mean()), float(loss.std() / math.sqrt(DRAWS))


def row(name: str, ratios: Any, claim: float, epsilon: float) -> dict[str, Any]:
    sides: dict[str, dict[str, float]] = {}
    for added in (True, False):
        value, error = measured(ratios(added), epsilon, added)
        sides["added" if added else "removed"] = {"delta": value, "standard_error": error}
    worst = max(sides.values(), key=lambda side: side["delta"])
    return {
        "case": name, "epsilon": epsilon, "claimed": claim, **sides,
        "above_the_claim": worst["delta"] > claim + 4 * worst["standard_error"],
    }  # fmt: skip


def main() -> None:
    rows = []
    for bands, cut in itertools.product((2, 4, 8), (True, False)):
        shape, steps = banded(bands), 3 * bands + 1 if cut else 4 * bands
        for epsilon in (1.0, 2.0):
            claim = delta(
                noise_multiplier=NOISE, sample_rate=RATE / bands, steps=steps, epsilon=epsilon, bands=bands
            )  # fmt: skip
            rows.append(row(
                f"cyclic, {bands} bands, {steps} steps",
                lambda present, shape=shape, steps=steps: cyclic_ratios(shape, steps, present, 10 + present),
                claim, epsilon,
            ))  # fmt: skip
    shape, steps = banded(4), 8
    for epsilon in (1.0, 2.0):
        for name, rate, account in (
            ("plain Poisson, accounted for as cyclic", 0.25, {"sample_rate": 0.25, "bands": 4}),
            ("plain Poisson, accounted for as white", 0.25, {"sample_rate": 0.25}),
        ):
            claimed = delta(noise_multiplier=NOISE, steps=steps, epsilon=epsilon, **account)  # type: ignore[arg-type]
            rows.append(row(
                name, lambda present, rate=rate: plain_ratios(shape, steps, rate, present, 20 + present),
                claimed, epsilon,
            ))  # fmt: skip
    text = json.dumps({"draws": DRAWS, "noise_multiplier": NOISE, "rows": rows}, indent=1) + "\n"
    for path in sys.argv[1:]:
        Path(path).write_text(text)
    for one in rows:
        print(one)


if __name__ == "__main__":
    main()
