"""How much of a linear model's private gradient is arithmetic: a step written by hand beside the engine's.

    python benchmarks/linear_floor.py --threads 2 --out docs/results/linear-floor.json

By hand is what the arithmetic needs and nothing else: one model, float32 norms, no check, no sum of many micro-batches.
Turns are taken in one process, every second call of each is timed, and both must arrive at the same clipped sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines import timed
from pmlf import machine
from pmlf.bench import cases, contenders
from pmlf.bench.case import Batch
from pmlf.bench.contenders import CLIP_NORM, Runner
from pmlf.bench.suite import on_this_machine
from pmlf.engine.arithmetic import add_product

ENGINES = ("plain", "opacus-ghost", "pmlf-k1", "pmlf-k2")


def by_hand(model: nn.Module, batch: Batch) -> Runner:
    """The clipped sum of per-sample gradients: |weight's|^2 + |bias's|^2 = (|x|^2 + 1) |g|^2."""
    weight, bias = (parameter.detach() for parameter in model.parameters())
    inputs, classes = batch
    found = torch.empty_like(weight)

    def gradient() -> Sequence[Tensor]:
        x = inputs.flatten(1)
        logits = F.linear(x, weight, bias).requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(logits, classes, reduction="sum"), logits)
        squared = torch.linalg.vector_norm(x, dim=1).square_().add_(1.0)
        norms = squared.mul_(torch.linalg.vector_norm(g, dim=1).square_()).sqrt_()
        scaled = g * (CLIP_NORM / norms.clamp_(min=CLIP_NORM)).unsqueeze(1)
        add_product(scaled, x, found, add=False)
        return found, scaled.sum(0)

    return Runner(gradient=gradient)


def clipped_sum_norm(runner: Runner) -> float:
    parts = runner.gradient()
    if runner.release is not None:
        parts = runner.release()
    norm = float(torch.cat([part.flatten() for part in parts]).norm())
    runner.clear()
    return norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--rounds", type=int, default=500, help="turns of each")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    machine.keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    case = cases.find("linear")
    runners = {name: contenders.find(name).prepare(*case.prepare(), 1) for name in ENGINES}
    runners["by hand"] = by_hand(*case.prepare())
    norms = {name: clipped_sum_norm(runners[name]) for name in ("by hand", "pmlf-k1", "pmlf-k2")}
    assert max(norms.values()) <= (1.0 + 1e-4) * min(norms.values()), f"the sums differ: {norms}"
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(arguments.rounds):
        for name, runner in runners.items():
            seconds[name].append(timed(runner))
    best = {name: min(values) for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    document = {
        "machine": on_this_machine(arguments.threads),
        "rounds": arguments.rounds,
        "best_milliseconds": {name: 1e3 * value for name, value in best.items()},
        "best_over_plain": {name: value / best["plain"] for name, value in best.items()},
        "median_over_plain": {name: value / median["plain"] for name, value in median.items()},
    }
    for name in runners:
        print(f"{name:13} {1e3 * best[name]:6.2f} ms, {best[name] / best['plain']:5.2f} times a plain pass")
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
