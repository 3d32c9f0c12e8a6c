"""The four ways to a layer's norms and clipped sum, side by side: how far is the calibrated decision from the fastest?

    python benchmarks/layer_costs.py --out docs/results/layer-costs.json

Layers of the paper's models at k = 1 and 2, each way timed in turn in one process, best of the rounds. `choice` is the
way that `pmlf.engine.strategy` takes, `behind` its time over the fastest one's.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pmlf import machine
from pmlf.engine import strategy
from pmlf.engine.arithmetic import squared_norms
from pmlf.engine.factors import Factors, Outer
from pmlf.engine.gradients import ParameterGradient, Workspace
from pmlf.engine.norms import Norms, factored_norms
from pmlf.engine.patches import Patches
from pmlf.engine.roots import Roots

LINEAR = {  # samples, tokens, out, in
    "ViT projection": (64, 65, 192, 192),
    "ViT attention in": (64, 65, 576, 192),
    "ViT feed-forward": (64, 65, 768, 192),
    "RoBERTa projection": (8, 64, 768, 768),
    "RoBERTa feed-forward": (8, 64, 3072, 768),
    "linear": (1000, 1, 10, 784),
}
CONVOLUTION = {  # samples, out, in, space, stride; kernel 3, padding 1
    "CNN-5 conv1": (128, 32, 3, 32, 1),
    "CNN-5 conv2": (128, 64, 32, 16, 1),
    "CNN-5 conv3": (128, 128, 64, 8, 1),
    "CNN-5 conv4": (128, 256, 128, 4, 1),
    "CNN-5 conv5": (128, 10, 256, 4, 1),
    "ResNet-18 stage 1": (32, 64, 64, 32, 1),
    "ResNet-18 stage 2": (32, 128, 128, 16, 1),
    "ResNet-18 stage 2, stride 2": (32, 128, 64, 32, 2),
    "ResNet-18 stage 3": (32, 256, 256, 8, 1),
    "ResNet-18 stage 4": (32, 512, 512, 4, 1),
}


def linear(samples: int, tokens: int, out: int, into: int) -> Factors:
    left, right = torch.randn(samples, tokens, out), torch.randn(samples, tokens, into)
    return Outer(samples=samples, tokens=tokens, rows=out, cols=into, left=left, right=right)


def convolution(samples: int, out: int, into: int, space: int, stride: int) -> Factors:
    layout = torch.channels_last
    grad = torch.randn(samples, out, space // stride, space // stride).contiguous(memory_format=layout)
    return Patches(
        samples=samples,
        tokens=grad[0, 0].numel(),
        rows=out,
        cols=9 * into,
        input=torch.randn(samples, into, space, space).contiguous(memory_format=layout),
        grad=grad,
        kernel=(3, 3),
        stride=(stride, stride),
        dilation=(1, 1),
        padding=(1, 1, 1, 1),
        padding_mode="constant",
    )


def ways(uses: list[Factors]) -> dict[str, Callable[[], object]]:
    """Each way from the uses to norms and clipped sum, with memory that is kept, as in training."""
    first, workspace = uses[0], Workspace()
    shape = (first.rows, first.cols) if isinstance(first, Outer) else (first.rows, first.cols // 9, 3, 3)
    out, scale = torch.empty(shape), torch.rand(first.samples, dtype=torch.float64)
    slices = max(1, min(first.samples, strategy.LATE_BYTES // (40 * first.size)))  # as if ten such layers shared it

    def product(way: Norms) -> Callable[[], object]:
        def run() -> None:
            factored_norms(uses, Roots(), way)
            for index, use in enumerate(uses):
                use.write_clipped_sum(scale, out, add=index > 0, scratch=workspace.scratch)

        return run

    def held() -> None:
        gradient = ParameterGradient("weight", workspace)
        gradient.factors = list(uses)
        for start in range(0, first.samples, slices):
            chosen = slice(start, min(start + slices, first.samples))
            part = gradient.formed(chosen)
            squared_norms(part)
            gradient.add_clipped(part, scale[chosen], None)
        gradient.write_clipped_sum(scale, out, add=False)

    by_norms: dict[str, Norms] = {"gram": "gram", "dropped": "dropped"}
    if isinstance(first, Outer):
        by_norms["root"] = "root"
    return {**{name: product(way) for name, way in by_norms.items()}, "held": held}


def chosen_way(uses: list[Factors]) -> str:
    if strategy.saved_by_holding(uses) > 0:
        return "held"
    return strategy.way_to_norms(uses)


def measure(uses: list[Factors], rounds: int) -> dict[str, float]:
    best: dict[str, float] = {}
    runs = ways(uses)
    for number in range(rounds + 1):  # the first is a warm-up
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            taken = time.perf_counter() - begin
            best[name] = taken if number <= 1 else min(best[name], taken)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, of which the best counts (default 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    machine.keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    makers: dict[str, Callable[[], Factors]] = {
        **{name: partial(linear, *shape) for name, shape in LINEAR.items()},
        **{name: partial(convolution, *shape) for name, shape in CONVOLUTION.items()},
    }
    rows = []
    print(f"{'layer':28} k  {'gram':>8} {'root':>8} {'dropped':>8} {'held':>8} ms   choice   behind")
    for name, make in makers.items():
        for k in (1, 2):
            uses = [make() for _ in range(k)]
            seconds, way = measure(uses, arguments.rounds), chosen_way(uses)
            behind = seconds[way] / min(seconds.values())
            rows.append({"layer": name, "k": k, "seconds": seconds, "choice": way, "behind": behind})
            times = " ".join(
                f"{1e3 * seconds.get(each, math.nan):8.2f}" for each in ("gram", "root", "dropped", "held")
            )
            print(f"{name:28} {k}  {times}      {way:8} {behind:.2f}", flush=True)
    if arguments.out:
        document = {**machine.describe("torch", "pmlf"), "threads": arguments.threads, "layers": rows}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
