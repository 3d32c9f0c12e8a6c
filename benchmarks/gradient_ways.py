"""The three ways to per-sample gradients side by side: the layers' rules, vmap, and plain autograd one by one.

    python benchmarks/gradient_ways.py --threads 1 --samples 64 --turns 9

Turns are taken in one process, so that what slows the machine slows all three; a ratio is of one turn. A step is
`accumulate` of a whole batch and `release`, at one evaluation point, after the first look. The LSTM has no rule.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import Tensor, nn

from pmlf import PrivateStep
from pmlf.bench import cases
from pmlf.bench.case import Batch, Case, losses
from pmlf.engine.plan import GRADIENTS, Gradients


class Recurrent(nn.Module):
    """An LSTM and a classifier on its last output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(tokens)[0][:, -1])
        return logits


LSTM = Case(
    name="lstm-64x32",
    batch=64,
    classes=10,
    build=lambda: Recurrent(64),
    inputs=lambda samples: torch.randn(samples, 32, 64),
)
MEASURED = (cases.find("cnn5"), cases.find("stack-128x64"), LSTM)


def stepped(model: nn.Module, way: Gradients, samples: int) -> PrivateStep:
    return PrivateStep(model, losses, method="dpsgd", noise_multiplier=0.0, expected_batch_size=samples, gradients=way)


def seconds(step: PrivateStep, batch: Batch) -> float:
    start = time.perf_counter()
    step.accumulate(batch)
    step.release()
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--turns", type=int, default=9)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore", message="noise_multiplier=0")
    for case in MEASURED:
        model, batch = case.prepare(given.samples / case.batch)
        ways = [way for way in GRADIENTS if case is not LSTM or way != "ghost"]
        steps = {way: stepped(model, way, given.samples) for way in ways}
        for step in steps.values():
            seconds(step, batch)
        turns = [{way: seconds(step, batch) for way, step in steps.items()} for _ in range(given.turns)]
        for way in ways:
            ratios = sorted(turn[way] / turn["one-by-one"] for turn in turns)
            middle = statistics.median(turn[way] for turn in turns)
            print(
                f"{case.name:<13} {given.samples} samples  {way:<11} {1e3 * middle:8.1f} ms  "
                f"{statistics.median(ratios):5.2f} of one-by-one ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
