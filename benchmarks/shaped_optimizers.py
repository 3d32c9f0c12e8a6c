"""Optimizers after white and after shaped noise at epsilon 8: the linear setting of `shaped_linear.py`, beside its SGD.

    python benchmarks/random_features.py ../shared/data/uoft-cs/cifar10 /tmp/cifar10-features.npz
    python benchmarks/shaped_optimizers.py run adam-no-momentum /tmp/cifar10-features.npz docs/results
    python benchmarks/shaped_optimizers.py report adam-no-momentum docs/results

Declared before the runs: everything as in `shaped_linear.py` (epsilon 8, 8 bands, its seeds and splits) except for the
optimizer, and one grid of rates for all methods. The last iterate and the average are both reported, each at its rate.

- `adam`: torch's Adam with its default decays, 0.9 and 0.999. Its steps are not multiplied by a filter's gain.
- `adam-no-momentum`: decays 0 and 0.999, so the filter is the only momentum. Declared after `adam` had been seen; a
  trial of one seed, on held-out records, came before.
- `momentum`: SGD with momentum 0.9. Its grid is of the rate times the gain of the momentum and of the filter. It was
  extended twice, by 630 and 1600, after its results had been seen, as DPSGD's best rate was the last.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

import shaped_linear as linear
from pmlf.methods import Method

EPSILON, CYCLES, SHAPED = 8.0, (1, 8), "dp-pmlf-shaped-8"
ADAM_GRID = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
RATE_GRID = (1.0, 2.5, 6.3, 16.0, 40.0, 100.0, 250.0, 630.0, 1600.0)


@dataclass(frozen=True)
class Contender:
    """An optimizer of one parameter, from the effective rate and the filter's gain; and the rates to try."""

    make: Callable[[torch.nn.Parameter, float, float], Optimizer]
    grid: tuple[float, ...]


CONTENDERS = {
    "adam": Contender(lambda weights, rate, gain: Adam([weights], lr=rate), ADAM_GRID),
    "adam-no-momentum": Contender(lambda weights, rate, gain: Adam([weights], lr=rate, betas=(0.0, 0.999)), ADAM_GRID),
    "momentum": Contender(lambda weights, rate, gain: SGD([weights], lr=0.1 * rate / gain, momentum=0.9), RATE_GRID),
}


class OptimizerRun(linear.Run):
    """One method at one rate, with a torch optimizer of the filtered gradient."""

    def __init__(self, method: Method, rate: float, width: int, contender: Contender) -> None:
        super().__init__(method, rate, width)
        self._weights = torch.nn.Parameter(torch.zeros(width, 10))
        self._optimizer = contender.make(self._weights, rate, method.low_pass.dc_gain)

    def update(self, released: Tensor, step: int) -> None:
        (self._weights.grad,) = self.filter.apply([released], scale=1 / linear.BATCH)
        self._optimizer.step()
        newest = self._weights.detach().clone()
        self.iterates = [newest, *self.iterates][: self.method.points.depth + 1]
        self.average.lerp_(newest, 1 - linear.DECAY)


def measure(contender: Contender, features: Path, out: Path) -> None:
    torch.set_num_threads(1)
    tuning, final = linear.splits(features)

    def start(method: Method, rate: float, width: int) -> OptimizerRun:
        return OptimizerRun(method, rate, width, contender)

    def once(purpose: str, cycle: int, seed: int, rates: dict[str, tuple[float, ...]], data: Any) -> None:
        key = purpose, cycle, EPSILON, seed
        linear.once(out, key, lambda: linear.train(cycle, EPSILON, seed, rates, data, linear.STEPS, start))

    for cycle in CYCLES:
        family = linear.methods_of(cycle)
        for seed in linear.TUNING_SEEDS:
            once("tuning", cycle, seed, dict.fromkeys(family, contender.grid), tuning)
        chosen = {n: tuple(set(linear.chosen_rates(out, n, EPSILON, contender.grid).values())) for n in family}
        for seed in linear.SEEDS:
            once("final", cycle, seed, chosen, final)


def report(contender: Contender, out: Path, sgd: Path) -> None:
    """Means over the seeds beside those of SGD, and paired gains with 95 % intervals.

    Gains are those of the optimizer over SGD, and those of shaped DP-PMLF over a method, with this optimizer and with
    SGD.
    """

    def scores(name: str, metric: str) -> Any:
        return linear.final_scores(out, name, EPSILON, metric, linear.SEEDS, contender.grid)

    def with_sgd(name: str, metric: str) -> Any:
        return linear.final_scores(sgd, name, EPSILON, metric, linear.SEEDS)

    for metric in linear.METRICS:
        for cycle in CYCLES:
            for name in linear.methods_of(cycle):
                ours, others = scores(name, metric), with_sgd(name, metric)
                rate = linear.chosen_rates(out, name, EPSILON, contender.grid)[metric]
                words = f"{metric:8} {name:18} rate {rate:g}: {ours.mean():.2f}, sgd {others.mean():.2f}"
                words += f", gains {interval(ours - others)} over sgd"
                words += f"; shaped dp-pmlf gains {interval(scores(SHAPED, metric) - ours)} over it"
                print(words + f", and with sgd {interval(with_sgd(SHAPED, metric) - ours)}")


def interval(gain: np.ndarray[Any, Any]) -> str:
    half = stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / math.sqrt(len(gain))
    return f"{gain.mean():.2f} +- {half:.2f}"


if __name__ == "__main__":
    command, optimizer, results = sys.argv[1], sys.argv[2], Path(sys.argv[-1])
    stored = results / f"shaped-{optimizer}.jsonl"
    if command == "run":
        measure(CONTENDERS[optimizer], Path(sys.argv[3]), stored)
    else:
        report(CONTENDERS[optimizer], stored, results / "shaped-linear.jsonl")
