"""Adam after white and after shaped noise at epsilon 8: the linear setting of `shaped_linear.py`, beside its SGD.

    python benchmarks/random_features.py ../shared/data/uoft-cs/cifar10 /tmp/cifar10-features.npz
    python benchmarks/shaped_adam.py run /tmp/cifar10-features.npz docs/results/shaped-adam.jsonl
    python benchmarks/shaped_adam.py report docs/results/shaped-adam.jsonl docs/results/shaped-linear.jsonl

Declared before the runs: everything as in `shaped_linear.py` (epsilon 8, 8 bands, its seeds and splits) except for
torch's Adam with its default decays, and one grid of rates for all methods, which Adam's steps do not multiply by a
filter's gain. The last iterate and the average are both reported. Filtered methods have their best trial at the lowest
rate of the grid; lower ones were not run in this setting.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import shaped_linear as linear
from pmlf.methods import Method

EPSILON, CYCLES = 8.0, (1, 8)
GRID = (0.01, 0.03, 0.1, 0.3)


class AdamRun(linear.Run):
    """One method at one rate, with Adam on the filtered gradient."""

    def __init__(self, method: Method, rate: float, width: int) -> None:
        super().__init__(method, rate, width)
        self._weights = torch.nn.Parameter(torch.zeros(width, 10))
        self._adam = torch.optim.Adam([self._weights], lr=rate)

    def update(self, released: Tensor, step: int) -> None:
        (self._weights.grad,) = self.filter.apply([released], scale=1 / linear.BATCH)
        self._adam.step()
        newest = self._weights.detach().clone()
        self.iterates = [newest, *self.iterates][: self.method.points.depth + 1]
        self.average.lerp_(newest, 1 - linear.DECAY)


def measure(features: Path, out: Path) -> None:
    torch.set_num_threads(1)
    tuning, final = linear.splits(features)

    def once(purpose: str, cycle: int, seed: int, rates: dict[str, tuple[float, ...]], data: Any) -> None:
        key = purpose, cycle, EPSILON, seed
        linear.once(out, key, lambda: linear.train(cycle, EPSILON, seed, rates, data, linear.STEPS, AdamRun))

    for cycle in CYCLES:
        family = linear.methods_of(cycle)
        for seed in linear.TUNING_SEEDS:
            once("tuning", cycle, seed, dict.fromkeys(family, GRID), tuning)
        chosen = {name: tuple(set(linear.chosen_rates(out, name, EPSILON, GRID).values())) for name in family}
        for seed in linear.SEEDS:
            once("final", cycle, seed, chosen, final)


def finals(out: Path, name: str, metric: str, grid: tuple[float, ...]) -> tuple[float, np.ndarray[Any, Any]]:
    """The chosen rate, and the test accuracies of the seeds in per cent."""
    rate = linear.chosen_rates(out, name, EPSILON, grid)[metric]
    found = {
        line["seed"]: 100 * line["accuracy"][name][str(rate)][metric] for line in linear.lines(out)
        if (line["purpose"], line["epsilon"]) == ("final", EPSILON) and name in line["accuracy"]
    }  # fmt: skip
    return rate, np.array([found[seed] for seed in linear.SEEDS])


def report(adam: Path, sgd: Path) -> None:
    """Means over the seeds of Adam and of SGD, and the paired gain of Adam with its 95 % interval."""
    for metric in linear.METRICS:
        for cycle in CYCLES:
            for name in linear.methods_of(cycle):
                (rate, ours), (_, others) = finals(adam, name, metric, GRID), finals(sgd, name, metric, linear.GRID)
                gain = ours - others
                half = stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / math.sqrt(len(gain))
                print(
                    f"{metric:8} {name:18} adam {ours.mean():.2f} (rate {rate:g}), sgd {others.mean():.2f}, "
                    f"gain {gain.mean():.2f} +- {half:.2f}"
                )


if __name__ == "__main__":
    if sys.argv[1] == "run":
        measure(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        report(Path(sys.argv[2]), Path(sys.argv[3]))
