"""The recommendation of `pmlf plan` against the best of a grid of 12 settings, on CIFAR-10 at epsilon 1, 3 and 8.

    python benchmarks/random_features.py ../shared/data/uoft-cs/cifar10 /tmp/cifar10-features.npz
    python benchmarks/plan_grid.py trials /tmp/cifar10-features.npz docs/results/plan-grid.jsonl
    python benchmarks/plan_grid.py final /tmp/cifar10-features.npz docs/results/plan-grid.jsonl
    python benchmarks/plan_grid.py report docs/results/plan-grid.jsonl

A linear model on fixed features (`random_features.py`: unit vectors of 1,025 numbers) stands for the network: 36 runs
of CNN-5 with up to 64 epochs would take days on a laptop.

Declared before the runs: batch size 500 or 2000, 400 or 1600 steps, learning rate 8, 32 or 128, each with DPSGD and
with LP-DPSGD, which are the methods that the plan recommends; clip norm 1, delta 1e-5, constant rate, the last iterate.
A trial has one seed of its own, and is judged on 5,000 held-out training records. The recommendation is followed to the
letter: batch size, epochs, method and learning rate are those that the command prints. It has a trial too, which shows
whether its rule is good before the test set is used. The final runs, of the recommendation and of the best trial of the
grid, have three other seeds, all 50,000 training records, and are judged on the test set once. Wanted: the mean
of the recommendation is at most 1.5 points below that of the grid.

A line is written when a job is complete, and what is in the file is not run again. Trials of an earlier rule of the
plan stay in the file. Draws, noise, filters and accounting are the library's (`shaped_linear.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shaped_linear as linear

MODEL = ("--records", "50000", "--features", "1025", "--model", "linear", "--classes", "10", "--input-norm", "1")
PLAN = (*MODEL, "--no-timing", "--json")
EPSILONS = (1.0, 3.0, 8.0)
BATCHES, STEPS, RATES, METHODS = (500, 2000), (400, 1600), (8.0, 32.0, 128.0), ("dpsgd", "lp-dpsgd")
TUNING_SEED, SEEDS = 1000, (0, 1, 2)
KEY = ("purpose", "epsilon", "batch_size", "steps", "candidates", "seed")


def recommendations() -> dict[float, dict[str, Any]]:
    """What the command recommends, by epsilon."""
    done = subprocess.run([sys.executable, "-m", "pmlf", "plan", *PLAN], check=True, capture_output=True, text=True)
    return {
        each["point"]["target_epsilon"]: {
            "batch_size": each["point"]["batch_size"],
            "steps": each["point"]["steps"],
            "method": each["method"],
            "rate": each["point"]["learning_rate"],
        }
        for each in json.loads(done.stdout)["recommendations"]
    }


def once(
    out: Path,
    purpose: str,
    epsilon: float,
    size: int,
    steps: int,
    chosen: list[tuple[str, float]],
    seed: int,
    data: Any,
) -> None:
    """Train candidates (method, rate) that share their draws, unless the file has them."""
    candidates = [[method, rate] for method, rate in chosen]
    key = (purpose, epsilon, size, steps, candidates, seed)
    if any(tuple(line[name] for name in KEY) == key for line in linear.lines(out)):
        return
    linear.BATCH, linear.STEPS, linear.CLIP = size, steps, 1.0
    linear.WHITE = tuple(dict.fromkeys(method for method, _ in chosen))
    rates = {name: tuple(rate for method, rate in chosen if method == name) for name in linear.WHITE}
    found, _ = linear.train(1, epsilon, seed, rates, data, steps)
    accuracies = [found["accuracy"][method][str(rate)]["last"] for method, rate in chosen]
    line = dict(zip(KEY, key, strict=True)) | {"noise_multiplier": found["noise_multiplier"], "accuracy": accuracies}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line, flush=True)


def trials(features: Path, out: Path) -> None:
    torch.set_num_threads(1)
    data, _ = linear.splits(features)
    followed = recommendations()
    for epsilon in EPSILONS:
        each = followed[epsilon]
        chosen = [(each["method"], each["rate"])]
        once(out, "recommended", epsilon, each["batch_size"], each["steps"], chosen, TUNING_SEED, data)
        for size in BATCHES:
            for steps in STEPS:
                grid = [(method, rate) for method in METHODS for rate in RATES]
                once(out, "grid", epsilon, size, steps, grid, TUNING_SEED, data)


def best_of_grid(out: Path, epsilon: float) -> dict[str, Any]:
    """The best trial of the grid."""
    found = [
        {"batch_size": line["batch_size"], "steps": line["steps"], "method": method, "rate": rate, "trial": accuracy}
        for line in linear.lines(out) if (line["purpose"], line["epsilon"]) == ("grid", epsilon)
        for (method, rate), accuracy in zip(line["candidates"], line["accuracy"], strict=True)
    ]  # fmt: skip
    assert len(found) == len(BATCHES) * len(STEPS) * len(RATES) * len(METHODS), "run the trials first"
    return max(found, key=lambda each: float(each["trial"]))


def final(features: Path, out: Path) -> None:
    torch.set_num_threads(1)
    _, data = linear.splits(features)
    followed = recommendations()
    for epsilon in EPSILONS:
        for purpose, each in (("final grid", best_of_grid(out, epsilon)), ("final recommended", followed[epsilon])):
            for seed in SEEDS:
                chosen = [(each["method"], each["rate"])]
                once(out, purpose, epsilon, each["batch_size"], each["steps"], chosen, seed, data)


def report(out: Path) -> None:
    """The settings, their trials, and the mean test accuracies of the final runs with their difference."""
    for epsilon in EPSILONS:
        print(f"epsilon {epsilon:g}: the best trial of the grid is {best_of_grid(out, epsilon)}")
        settings: dict[tuple[Any, ...], list[float]] = {}
        for line in linear.lines(out):
            if line["epsilon"] == epsilon and line["purpose"] != "grid":
                setting = (line["purpose"], line["batch_size"], line["steps"], *line["candidates"][0])
                settings.setdefault(setting, []).append(100 * line["accuracy"][0])
        for setting, accuracies in settings.items():
            print(*setting, f"mean {np.mean(accuracies):.2f} of", [round(value, 2) for value in accuracies])


if __name__ == "__main__":
    if sys.argv[1] == "report":
        report(Path(sys.argv[2]))
    else:
        {"trials": trials, "final": final}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
